"""Collectives over padded shards: a gather leaves padding out, a cut and a reduce-scatter put zeros in, and back."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fmegatron import tree
from fmegatron.collectives import Axes, reshard, shard
from fmegatron.collectives.ops import all_gather_many, lend, reduce_scatter_many
from fmegatron.collectives.places import Place
from fmegatron.collectives.random_words import positions
from fmegatron.collectives.reshard_plan import reshard_moves
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.testing import Ranks, join, simulate, split
from tests.layout.arrays import numbered
from tests.layout.strategies import layouts


@pytest.mark.medium
@settings(max_examples=200, deadline=None)
@given(layouts(padded=True), st.data())
def test_places_leave_padding_out_and_put_zeros_in(layout, data):
    held = [name for name in layout.mesh.names if name in layout.sharded]
    assume(held and layout.shape)  # DataParallel flattens no scalar
    names = data.draw(st.sets(st.sampled_from(held), min_size=1))
    order = [n for n in (*(a for d in range(len(layout.shape)) for a in layout.axes(d)), *layout.flat) if n in names]
    try:
        place = Place.of(layout, tuple(order))
    except ValueError:  # no minor end of a dim, several interleaved dims, ranges of a dim
        assume(False)
    assert Place.parse(str(place)) == place
    after, sizes = layout.without(tuple(order)), tuple(layout.mesh[name] for name in order)
    if layout.flat and not after.flat_counts:
        after = after.replace(flat=())
    after = after if after.is_even else after.replace(padded=True)  # ranges of nothing are even, dims of it are not
    before, whole = split(numbered(layout.shape), layout), split(numbered(layout.shape), after)
    ranks = [r for r in range(layout.mesh.size) if all(layout.mesh.coordinates(r)[n] == 0 for n in order)]
    for first in ranks:
        members = sorted(
            (r for r in range(layout.mesh.size)
             if all(layout.mesh.coordinates(r)[n] == layout.mesh.coordinates(first)[n]
                    for n in layout.mesh.names if n not in order)),
            key=lambda r: [layout.mesh.coordinates(r)[n] for n in order],
        )  # fmt: skip
        shards = torch.stack([before[r] for r in members])
        assert place.shard_shape(whole[first].shape, sizes) == tuple(shards.shape[1:])
        assert place.whole_shape(shards.shape[1:], sizes) == tuple(whole[first].shape)
        place.check(whole[first].shape, sizes, "test")
        assert torch.equal(place.whole(shards, sizes), whole[first])
        assert torch.equal(place.pieces(whole[first], sizes), shards)


MESH = Mesh(a=3, b=2)
ROWS = Layout((10, 4), torch.float64, MESH, ("a",), padded=True)
PADDED = {
    "rows": ROWS,
    "rows of two axes": ROWS.replace(spec=(("a", "b"),)),
    "columns": Layout((6, 10), torch.float64, MESH, (None, "a"), padded=True),
    "interleaved": Layout((6, 13), torch.float64, MESH, (None, Split("a", (8, 5))), padded=True),
    "interleaved and another": Layout((5, 13), torch.float64, MESH, ("b", Split("a", (8, 5))), padded=True),
    "pieces": Layout((9, 4), torch.float64, MESH, (Split("a", sizes=(2, 4, 3)), "b"), padded=True),
    "pieces in an order": Layout((6, 4), torch.float64, MESH, (Split("a", order=(0, 1, 2, 2, 1, 0)),)),
    "pieces, none on a rank": Layout(
        (5, 4), torch.float64, MESH, (Split("a", sizes=(2, 0, 3), order=(2, 1, 0)),), padded=True
    ),
    "pieces over two axes": Layout(
        (5, 4), torch.float64, MESH, (Split(("a", "b"), sizes=(1, 0, 2, 2), order=(4, 1, 0, 4)),), padded=True
    ),
    "range": Layout((5, 7), torch.float64, MESH, flat=("a",), padded=True),
    "range of a shard": Layout((4, 7), torch.float64, MESH, ("b",), flat=("a",), padded=True),
    "range of ranges": Layout((5, 7), torch.float64, MESH, flat=("a", "b"), padded=True),
    "range of a layer": Layout((2, 5, 7), torch.float64, MESH, flat=("a",), flat_from=1, padded=True),
    "range of ranges of a layer": Layout((2, 5, 7), torch.float64, MESH, flat=("a", "b"), flat_from=1, padded=True),
    "range of a shard of a layer": Layout(
        (2, 4, 7), torch.float64, MESH, (None, "b"), flat=("a",), flat_from=1, padded=True
    ),
    "range of a shard of layers": Layout((4, 5, 7), torch.float64, MESH, ("b",), flat=("a",), flat_from=1, padded=True),
    "range of interleaved columns": Layout(
        (2, 3, 10), torch.float64, MESH, (None, None, Split("b", (6, 4))), flat=("a",), flat_from=1, padded=True
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", PADDED.values(), ids=PADDED)
def test_collectives_and_their_transposes(layout):
    names = ("a", "b") if ("a", "b") in (layout.axes(0), layout.flat) else ("a",)
    axes, place = Axes(MESH), Place.of(layout, names)
    whole = layout.without(names).replace(flat=())
    x = numbered(layout.shape, torch.float64)
    generator = torch.Generator().manual_seed(0)
    g = torch.randint(-99, 99, layout.shape, generator=generator).double()

    def step(x, full, g_full, g_shard):
        x, full = x.detach().requires_grad_(), full.detach().requires_grad_()
        gathered, lent = all_gather_many([x], axes[names], [place])[0], lend(x, axes[names], place)
        cut, scattered = shard(full, axes[names], place), reduce_scatter_many([full], axes[names], [place])[0]
        gradients = [
            *torch.autograd.grad(gathered, x, g_full), *torch.autograd.grad(lent, x, g_full),
            *torch.autograd.grad(cut, full, g_shard), *torch.autograd.grad(scattered, full, g_shard),
        ]  # fmt: skip
        return [y.detach().clone() for y in (gathered, lent, cut, scattered, *gradients)]

    n = math.prod(MESH[name] for name in names)
    given_ = (x, x, g, g)
    sim = simulate(step, MESH, *given_, layouts=(layout, whole, whole, layout), out_layouts=[
        whole, whole, layout, layout, layout, layout, whole, whole,
    ])  # fmt: skip
    found = sim.globals()
    for y, wanted in zip(found, (x, x, x, n * x, n * g, g, g, g), strict=True):
        assert torch.equal(y, wanted)
    for rank, outputs in enumerate(sim.outputs):
        true = torch.zeros_like(outputs[2], dtype=torch.bool)
        for box in layout.boxes(rank):
            box.view(true).fill_(True)
        assert not any(y[~true].count_nonzero() for y in outputs[2:6])


def pairs(layout_of):
    @st.composite
    def draw_pair(draw):
        mesh = draw(st.sampled_from([Mesh(dp=2, fsdp=3), Mesh(fsdp=5), Mesh(fsdp=2, tp=3), Mesh(dp=2, fsdp=2, tp=2)]))
        shape = draw(st.sampled_from([(7, 4), (5, 3, 2), (9,), (4, 11)]))
        source = draw(layout_of(shape=shape, mesh=mesh, unreduced=True, dtype=torch.float64, padded=True))
        target = draw(layout_of(shape=shape, mesh=mesh, unreduced=True, dtype=torch.float64, padded=True))
        return source, target.replace(unreduced=tuple(n for n in target.unreduced if n in source.unreduced))

    return draw_pair()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(pairs(layouts))
def test_reshard_between_padded_layouts(pair):
    """As `test_reshard`: value and gradient; padding is zero in both."""
    source, target = pair
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randint(-512, 512, source.shape, generator=generator).double() for _ in range(2))
    gathered = tuple(a for a in source.sharded if a not in target.sharded)

    def step(x, g):
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            y = reshard(leaf, source, target, Axes(source.mesh))
        return y.detach().clone(), torch.autograd.grad(y, leaf, g)[0]

    sim = simulate(step, source.mesh, split(x, source), split(g, target.replace(unreduced=gathered)))
    said = f"{source} -> {target} by {[str(m) for m in reshard_moves(source, target)]}"
    assert torch.equal(join([y for y, _ in sim.outputs], target), x), f"value of {said}"
    assert torch.equal(join([dx for _, dx in sim.outputs], source.replace(unreduced=())), g), f"gradient of {said}"
    # The zeros of a target that cuts what it had in full; what stays in shards has the padding that it had.
    wanted = split(torch.ones(source.shape, dtype=torch.float64), target.replace(unreduced=()))
    for rank, (y, _) in enumerate(sim.outputs):
        assert not y[wanted[rank] == 0].count_nonzero(), said


def test_range_of_a_range_is_reduced_without_the_block():
    mesh = Mesh(dp=2, fsdp=3)
    held = Layout((5, 7), torch.float32, mesh, flat=("fsdp",), unreduced=("dp",), padded=True)
    further = held.replace(flat=("fsdp", "dp"), unreduced=())
    assert [str(move) for move in reshard_moves(held, further)] == ["reduce_scatter(dp dim 0)"]
    assert [str(m) for m in reshard_moves(further, held.replace(unreduced=()))] == ["all_gather(dp dim 0)"]


def test_a_place_of_another_size_is_refused_in_words():
    axes = Axes(MESH)
    with pytest.raises(ValueError, match=r"got shards of shape \(5, 4\), wanted \(4, 4\).*Place.of"):
        simulate(
            lambda x: all_gather_many([x], axes["a"], [Place.of(ROWS, ("a",))])[0], MESH, Ranks([torch.zeros(5, 4)] * 6)
        )
    with pytest.raises(ValueError, match="got dim 0 .* wanted 10 of it"):
        simulate(lambda x: shard(x, axes["a"], Place.of(ROWS, ("a",))), MESH, Ranks([torch.zeros(12, 4)] * 6))


@pytest.mark.long
@pytest.mark.parametrize("layout", PADDED.values(), ids=PADDED)
def test_positions_are_global_indices(layout):
    sim = simulate(
        lambda x: positions(x, layout, Axes(MESH)), MESH, torch.zeros(layout.shape), layouts=(layout,),
        out_layouts=layout.replace(dtype=torch.int64),
    )  # fmt: skip
    everything = torch.arange(math.prod(layout.shape)).view(layout.shape)
    found = [tree.leaves(out)[0] for out in sim.outputs]
    assert torch.equal(join(found, layout.replace(dtype=torch.int64)), everything)
