"""Random words: uniform, told apart by keys and counts, and a function of the position in the global array."""

import math

import pytest
import torch

from fmegatron import tree
from fmegatron.collectives import Axes
from fmegatron.collectives.random_words import positions, random_words
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.step.timelines.planned import PaperWorld
from fmegatron.testing import simulate, split


def words_of(n, count=0, key=0, name="w"):
    return random_words(key, name, torch.tensor(count), torch.empty(n))


def test_words_are_uniform_and_differ_between_keys_names_and_counts():
    n = 1 << 16
    drawn = [words_of(n), words_of(n, 1), words_of(n, 2**33), words_of(n, key=1), words_of(n, key=2**62 + 3)]
    drawn += [words_of(n, 1, 1), words_of(n, name="v"), words_of(n, key=2**33)]
    for words in drawn:
        assert words.dtype == torch.int64 and words.min() >= 0 and words.max() < 2**32
        ones = ((words[:, None] >> torch.arange(32)) & 1).double().mean(0)
        assert ((ones - 0.5).abs() < 5 * 0.5 / math.sqrt(n)).all()
        low = (words & 0xFFFF).double()
        following = torch.corrcoef(torch.stack([low[:-1], low[1:]]))[0, 1]
        assert following.abs() < 5 / math.sqrt(n)
        assert len(words.unique()) == n  # no word comes twice in one stream
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert (a == b).double().mean() < 1e-3
            assert torch.corrcoef(torch.stack([a, b]).double())[0, 1].abs() < 5 / math.sqrt(n)


MESH = Mesh(dp=2, fsdp=2, tp=2)
LAYOUTS = {
    "whole": Layout((3, 5), torch.float32, MESH),
    "scalar": Layout((), torch.float32, MESH),
    "dims": Layout((4, 6, 2), torch.float32, MESH, ("fsdp", "tp", "dp")),
    "two axes on one dim": Layout((8, 3), torch.float32, MESH, (("tp", "dp"), None)),
    "interleaved": Layout((2, 12), torch.float32, MESH, (None, Split("tp", (4, 2, 6)))),
    "interleaved over two axes": Layout((2, 16), torch.float32, MESH, ("dp", Split(("fsdp", "tp"), 2))),
    "flat, in rows": Layout((3, 5, 4), torch.float32, MESH, flat=("fsdp",)),
    "flat, whole rows": Layout((4, 3), torch.float32, MESH, flat=("fsdp", "dp")),
    "flat from dim 1": Layout((3, 5, 4), torch.float32, MESH, flat=("fsdp", "dp"), flat_from=1),
    "flat from dim 1 of split dims": Layout((4, 6, 2), torch.float32, MESH, ("dp", "tp"), flat=("fsdp",), flat_from=1),
    "flat from dim 1, interleaved": Layout(
        (4, 3, 12), torch.float32, MESH, (Split("dp", 2), None, Split("tp", (4, 8))), flat=("fsdp",), flat_from=1
    ),
    "flat of a split dim 0": Layout((4, 3), torch.float32, MESH, ("tp",), flat=("dp",)),
    "flat of a split dim 1": Layout((3, 8), torch.float32, MESH, (None, "tp"), flat=("fsdp",)),
    "flat rows of a split dim 1": Layout((4, 6), torch.float32, MESH, (None, "tp"), flat=("fsdp",)),
    "flat of split dims": Layout((6, 2, 4), torch.float32, MESH, ("fsdp", None, "tp"), flat=("dp",)),
    "flat of an interleaved dim 0": Layout((12, 3), torch.float32, MESH, (Split("tp", (4, 8)),), flat=("fsdp",)),
    "flat of an interleaved dim 1": Layout((3, 12), torch.float32, MESH, (None, Split("tp", (4, 8))), flat=("fsdp",)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_positions_are_global_indices(layout):
    sim = simulate(
        lambda x: positions(x, layout, Axes(MESH)), MESH, torch.zeros(layout.shape), layouts=(layout,),
        out_layouts=layout.replace(dtype=torch.int64),
    )  # fmt: skip
    everything = torch.arange(math.prod(layout.shape)).view(layout.shape)
    parts = split(everything, layout.replace(dtype=torch.int64))
    for rank, part in enumerate(parts):
        assert torch.equal(tree.leaves(sim.outputs[rank])[0], part), rank


def test_words_of_arrays_of_more_than_32_bits_of_elements():
    """Ranks whose elements are 2^32 apart in the global array draw words of their own."""
    mesh = Mesh(fsdp=2**31)
    layout, like = Layout((2**33,), torch.float32, mesh, ("fsdp",)), torch.empty(4)
    drawn = []
    for rank in (0, 2**30):
        axes = Axes(mesh, PaperWorld(mesh, rank))
        assert positions(like, layout, axes).tolist() == list(range(4 * rank, 4 * rank + 4))
        drawn.append(random_words(7, "w", torch.tensor(0), like, layout, axes))
    assert not (drawn[0] == drawn[1]).any()


def test_uneven_positions_are_refused():
    layout = Layout((5, 2), torch.float32, MESH, ("fsdp",))
    with pytest.raises(ValueError, match="uneven"):
        positions(torch.zeros(3, 2), layout, Axes(MESH))
