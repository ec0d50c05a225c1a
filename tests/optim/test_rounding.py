"""float32 <-> bfloat16: the remainder is exact for every bit pattern, rounding at random is unbiased and mesh-free."""

import math

import pytest
import torch

from fmegatron import tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.optim import join_master, positions, random_words, split_master, stochastic_bfloat16
from fmegatron.step import PaperWorld
from fmegatron.testing import simulate, split

QUIET = 0x00400000
EDGES = {
    "zeros": [0x00000000, 0x80000000],
    "denormal": [0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00008000, 0x00018000, 0x00007FFF],
    "ties": [0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x3F807FFF, 0x3F808001, 0x3F817FFF, 0x3F818001],
    "largest": [0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF],
    "infinite": [0x7F800000, 0xFF800000],
    "NaN": [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC12345, 0xFFC08000],
    "signalling NaN": [0x7F800001, 0x7F808000, 0xFFBFFFFF],
}


def from_bits(bits):
    return torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def every_high():
    """All 65536 upper halves with the lower halves at which something happens."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    return (high[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)).view(torch.float32)


@pytest.mark.parametrize("x", [*map(from_bits, EDGES.values()), every_high()], ids=[*EDGES, "every upper half"])
def test_parameter_and_remainder_are_the_master_bit_for_bit(x):
    param, remainder = split_master(x)
    assert (param.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    wanted = torch.where(x.isnan(), x.view(torch.int32) | QUIET, x.view(torch.int32))
    assert torch.equal(join_master(param, remainder).view(torch.int32), wanted)
    assert torch.equal(param.isnan(), x.isnan())
    known = ~x.isnan()
    assert torch.equal(param.signbit(), x.signbit())
    nearest, tie = x.to(torch.bfloat16), (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(param[known & ~tie].view(torch.int16), nearest[known & ~tie].view(torch.int16))
    away = (x.view(torch.int32) >> 16) + 1
    assert torch.equal(param[known & tie].view(torch.int16), away[known & tie].to(torch.int16))


def words_of(n, count=0, path="w", key=0):
    return random_words(key, path, torch.tensor(count), torch.empty(n), None, None)


def test_words_are_uniform_and_differ_between_keys_paths_and_updates():
    n = 1 << 16
    drawn = [words_of(n), words_of(n, 1), words_of(n, 2**33), words_of(n, path="v"), words_of(n, key=1)]
    for words in drawn:
        assert words.dtype == torch.int64 and words.min() >= 0 and words.max() < 2**32
        ones = ((words[:, None] >> torch.arange(32)) & 1).double().mean(0)
        assert ((ones - 0.5).abs() < 5 * 0.5 / math.sqrt(n)).all()
        low = (words & 0xFFFF).double()
        following = torch.corrcoef(torch.stack([low[:-1], low[1:]]))[0, 1]
        assert following.abs() < 5 / math.sqrt(n)
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert (a == b).double().mean() < 1e-3
            assert torch.corrcoef(torch.stack([a, b]).double())[0, 1].abs() < 5 / math.sqrt(n)


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159e-5, -2.7e30, 1e-40, -0.7, 1 + 2**-8 + 2**-20])
def test_rounding_at_random_is_unbiased(value):
    n = 200_000
    x = torch.full((n,), value)
    rounded = stochastic_bfloat16(x, words_of(n)).double()
    below, above = rounded.min(), rounded.max()
    assert below <= x[0] <= above and len(rounded.unique()) <= 2
    step = above - below
    assert (rounded.mean() - x[0].double()).abs() <= 5 * step * 0.5 / math.sqrt(n)
    p = ((x[0].double() - below) / step).item() if step else 0.0
    assert abs((rounded == above).double().mean().item() - p) < 5 * 0.5 / math.sqrt(n) if step else True


def test_what_bfloat16_has_stays():
    x = torch.cat([every_high()[:, 0], from_bits([b for name in ("NaN", "infinite", "zeros") for b in EDGES[name]])])
    rounded = stochastic_bfloat16(x, words_of(len(x)))
    assert torch.equal(rounded.isnan(), x.isnan())
    known = ~x.isnan()
    assert torch.equal(rounded[known].view(torch.int16), x[known].to(torch.bfloat16).view(torch.int16))


def test_no_small_update_is_lost_on_average():
    """1000 additions of 1e-4 to 1 in bfloat16, whose step there is 2⁻⁷: to nearest it stays 1."""
    x = torch.ones(4096, dtype=torch.bfloat16)
    for count in range(1000):
        x = stochastic_bfloat16(x.float() + 1e-4, words_of(4096, count))
    assert (1 + torch.tensor(1e-4)).to(torch.bfloat16) == 1
    assert abs(x.double().mean().item() - 1.1) < 5 * 2**-7 * math.sqrt(1000) / math.sqrt(4096)


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
        drawn.append(random_words(0, "w", torch.tensor(0), like, layout, axes))
    assert not (drawn[0] == drawn[1]).any()


def test_uneven_positions_are_refused():
    layout = Layout((5, 2), torch.float32, MESH, ("fsdp",))
    with pytest.raises(ValueError, match="uneven"):
        positions(torch.zeros(3, 2), layout, Axes(MESH))
