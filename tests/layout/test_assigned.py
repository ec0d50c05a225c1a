"""Dims assigned in pieces of their own sizes and order (stages of a pipeline): known answers, spelling, refusals.

What holds of any layout holds of these too (`test_layout_properties.py`, whose layouts have such dims).
"""

import json

import pytest
import torch

from fmegatron import step, testing, tree
from fmegatron.collectives import Axes, psum, reshard
from fmegatron.collectives.places import Place
from fmegatron.collectives.random_words import positions
from fmegatron.layout import DataParallel, Layout, Mesh, Split, check_cover, plan_reshard
from fmegatron.optim import muon
from tests.layout.arrays import cut, execute, numbered
from tests.work import counted

F32 = torch.float32
PP4 = Mesh(pp=4)
STAGES = Layout((12, 2), F32, PP4, (Split("pp", sizes=(3, 4, 4, 1)),))


def layers_of(layout):
    """The indices of dim 0 of each rank, in the order of its local tensor."""
    return [
        [i for s in layout.segments(r, 0) for i in range(s.start, s.start + s.length)] for r in range(layout.mesh.size)
    ]


def test_stages_of_unequal_length():
    assert [STAGES.local_shape(rank) for rank in range(4)] == [(3, 2), (4, 2), (4, 2), (1, 2)]
    assert layers_of(STAGES) == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11]]
    assert (STAGES.assigned, STAGES.is_even, STAGES.divides, STAGES.fullest) == ((0,), False, False, 1)
    nine = Layout((9, 4), F32, Mesh(pp=4, tp=2), (Split("pp", sizes=(3, 2, 2, 2)), "tp"))  # plain would be 3, 3, 3, 0
    assert [nine.local_shape(rank) for rank in (0, 2, 4, 6)] == [(3, 2), (2, 2), (2, 2), (2, 2)]
    check_cover(nine)


def test_stages_without_layers():
    layout = Layout((5, 2), F32, PP4, (Split("pp", sizes=(0, 3, 0, 2)),))
    assert layers_of(layout) == [[], [0, 1, 2], [], [3, 4]]
    assert layout.local_shape(2) == (0, 2) and layout.boxes(2) == () and layout.local_nbytes(2) == 0
    check_cover(layout)


def test_a_v_and_a_loop():
    v = Layout((8,), F32, PP4, (Split("pp", order=(0, 1, 2, 3, 3, 2, 1, 0)),))
    assert layers_of(v) == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [(box.slices, box.offset) for box in v.boxes(0)] == [((slice(0, 1),), 0), ((slice(7, 8),), 1)]
    assert v.is_even and not v.divides and not v.replace(padded=True).padded  # all shapes are equal
    long = Layout((9,), F32, Mesh(pp=2), (Split("pp", sizes=(3, 2, 0, 4), order=(0, 1, 0, 1)),))
    assert layers_of(long) == [[0, 1, 2], [3, 4, 5, 6, 7, 8]]
    table = Layout((6,), F32, Mesh(pp=3), (Split("pp", order=(2, 0, 1)),))  # rank of each stage
    assert layers_of(table) == [[2, 3], [4, 5], [0, 1]]


def test_what_is_a_plain_or_an_interleaved_split_is_written_so():
    plain = Layout((8, 3), F32, PP4, ("pp",))
    for same in (Split("pp", sizes=(2, 2, 2, 2)), Split("pp", order=range(4)), Split(("pp",), sizes=[2] * 4)):
        assert Layout((8, 3), F32, PP4, (same,)) == plain
    loop = Layout((8, 3), F32, PP4, (Split("pp", order=(*range(4), *range(4))),))
    assert loop == Layout((8, 3), F32, PP4, (Split("pp", parts=2),)) and loop.is_even
    v = Layout((8, 3), F32, PP4, (Split("pp", order=(0, 1, 2, 3, 3, 2, 1, 0)),))
    assert v == Layout((8, 3), F32, PP4, (Split("pp", sizes=(1,) * 8, order=(0, 1, 2, 3, 3, 2, 1, 0)),)) != loop
    one = Layout((8, 3), F32, Mesh(pp=1, tp=2), (Split("pp", sizes=(8,)), "tp"))
    assert one == Layout((8, 3), F32, Mesh(pp=1, tp=2), ("pp", "tp"))
    assert Layout((8,), F32, Mesh(tp=2), (Split("pp", sizes=(3, 5), order=(0, 0)),)) == Layout((8,), F32, Mesh(tp=2))
    assert Layout((0,), F32, PP4, (Split("pp", sizes=(0,) * 4),)) == Layout((0,), F32, PP4, ("pp",))


def test_notation_and_json():
    v = Layout((8, 6), F32, Mesh(pp=2, tp=2), (Split("pp", sizes=(1, 3, 2, 2), order=(0, 1, 1, 0)), "tp"))
    assert str(STAGES) == "f32[(3|4|4|1)@pp, 2] on pp4"
    assert str(v) == "f32[(1|3|2|2)@pp order 0-1-1-0, 6@tp] on pp2·tp2"
    assert STAGES.to_json()["spec"] == [{"axes": ["pp"], "sizes": [3, 4, 4, 1]}, None]
    assert v.to_json()["spec"] == [{"axes": ["pp"], "sizes": [1, 3, 2, 2], "order": [0, 1, 1, 0]}, "tp"]
    for layout in (STAGES, v):
        assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert repr(Split("tp", 2)) == "Split(axes='tp', parts=2)"  # as it was: digests of plans are of it
    assert repr(v.spec[0]) == "Split('pp', sizes=(1, 3, 2, 2), order=(0, 1, 1, 0))"


def test_pictures():
    v = Layout((5, 2), F32, Mesh(pp=3), (Split("pp", sizes=(1, 2, 1, 1), order=(0, 1, 1, 0)),))
    assert v.show().splitlines() == [
        "f32[(1|2|1|1)@pp order 0-1-1-0, 2] on pp3",
        "ranks by range of dim 0",
        "  0:1  1:4  4:5  nothing",
        "  0    1    0    2",
    ]
    assert v._repr_svg_().count("<rect") == 3
    shown = tree.show({"w": STAGES, "e": Layout((4,), F32, PP4)})
    assert "w: f32[(3|4|4|1)@pp, 2] on pp4, local 2 of (4, 2) + 1 of (3, 2) + 1 of (1, 2), 1 replica" in str(shown)
    assert "4 × 2 or less" in shown._repr_html_()


def test_joint_axes_and_without():
    layout = Layout((6,), F32, Mesh(pp=2, x=2), (Split(("pp", "x"), sizes=(1, 0, 2, 3)),))
    assert layers_of(layout) == [[0], [], [1, 2], [3, 4, 5]]
    assert layers_of(layout.without("x")) == [[0], [0], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    assert layers_of(layout.without("pp")) == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]
    assert layout.without(("pp", "x")) == Layout((6,), F32, layout.mesh)


PIPELINES = {
    "plain": Layout((12, 4), F32, Mesh(pp=4), ("pp",)),
    "two": Layout((12, 4), F32, Mesh(pp=2), ("pp",)),
    "custom": Layout((12, 4), F32, Mesh(pp=4, tp=2), (Split("pp", sizes=(3, 4, 4, 1)), "tp")),
    "empty": Layout((12, 4), F32, Mesh(tp=2, pp=4), (Split("pp", sizes=(0, 6, 6, 0)), "tp")),
    "virtual": Layout((12, 4), F32, Mesh(pp=4), (Split("pp", sizes=(2, 2, 1, 1, 1, 1, 2, 2), order=(*range(4),) * 2),)),
    "v": Layout((12, 4), F32, Mesh(pp=3, dp=2), (Split("pp", order=(0, 1, 2, 2, 1, 0)),), flat=("dp",)),
    "padded": Layout((12, 4), F32, Mesh(pp=2, fsdp=3), (Split("pp", sizes=(5, 7)), "fsdp"), padded=True),
    "tensor": Layout((12, 4), F32, Mesh(tp=2), (None, "tp")),
}


@pytest.mark.parametrize("source", PIPELINES)
def test_any_pipeline_to_any_other(source):
    src, x = PIPELINES[source], numbered((12, 4))
    for dst in PIPELINES.values():
        plans = [plan_reshard(src, dst, rank) for rank in range(max(src.mesh.size, dst.mesh.size))]
        moved = execute(src, dst, cut(x, src), plans)
        assert all(torch.equal(a, b) for a, b in zip(moved, cut(x, dst), strict=True)), (src, dst)


def test_split_and_join_and_init():
    for layout in PIPELINES.values():
        x = numbered(layout.shape)
        ranks = testing.split({"x": x}, {"x": layout})
        assert torch.equal(testing.join(ranks, {"x": layout})["x"], x)
        spec = {"w": tree.ArraySpec(layout, tree.Normal(1.0))}
        whole = {"w": tree.ArraySpec(Layout(layout.shape, F32, Mesh()), tree.Normal(1.0))}
        parts = [tree.init(spec, 3, rank) for rank in range(layout.mesh.size)]
        assert torch.equal(testing.join(parts, {"w": layout})["w"], tree.init(whole, 3, 0)["w"])


def test_data_parallelism_within_stages():
    """A stage's ranks share what the stage holds; its layers stay where they are. All have the room of the largest."""
    mesh = Mesh(pp=4, dp=2, fsdp=3)
    w = Layout((9, 12, 10), F32, mesh, (Split("pp", sizes=(0, 4, 3, 2)), "fsdp"))
    placed = DataParallel.hybrid("fsdp", "dp").place(w, whole=(0,))
    assert str(placed.params) == "f32[(0|4|3|2)@pp, 12@fsdp, 10] padded on pp4·dp2·fsdp3"
    assert str(placed.optim) == "f32[(0|4|3|2)@pp, 12@fsdp·dp, 10] padded on pp4·dp2·fsdp3"
    bias = DataParallel.zero1().place(Layout((9, 10), F32, mesh, (w.spec[0],)), whole=(0,)).optim
    for rank in range(mesh.size):
        layers = (0, 4, 3, 2)[mesh.coordinates(rank)["pp"]]
        assert placed.optim.local_shape(rank) == (4, 2, 10)
        assert sum(box.size for box in placed.optim.boxes(rank)) == layers * 2 * 10
        assert bias.local_shape(rank) == (-(-4 * 5 // 3),)  # a range of the room that dp leaves: padded for all
    check_cover(bias)
    with pytest.raises(
        ValueError, match=r"dim 0 is assigned in pieces over data axes, .* wanted sizes and order over other"
    ):
        DataParallel.zero3().place(Layout((9, 4), F32, Mesh(fsdp=2), (Split("fsdp", sizes=(4, 5)),)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Split("pp", 2, sizes=(1, 2)), r"got parts, of which every rank has a share, and pieces"),
        (lambda: Split("pp", sizes=(1, 2), order=(0, 1, 0)), r"got 2 sizes and the ranks of 3 pieces, wanted both of"),
        (lambda: Layout((9,), F32, PP4, (Split("pp", sizes=(3, 3, 3)),)), r"got 3 sizes for 4 ranks of pp, wanted"),
        (lambda: Layout((9,), F32, PP4, (Split("pp", sizes=(3, 3, 2, 0)),)), r"sizes that sum to 8, wanted"),
        (lambda: Layout((9,), F32, PP4, (Split("pp", sizes=(3, 3, 4, -1)),)), r"one size \(0 or more\) for each piece"),
        (lambda: Layout((9,), F32, PP4, (Split("pp", order=(0, 1, 2, 4, 5, 6, 7, 8, 9)),)), r"got rank 4 in order"),
        (lambda: Layout((9,), F32, PP4, (Split("pp", order=(0, 1, 2, 3)),)), r"got 4 pieces of a dim of size 9"),
        (lambda: Layout((9,), F32, Mesh(tp=2), (Split("pp", sizes=(3, 6)),)), r"got 2 sizes for 1 rank of pp, wanted"),
        (lambda: STAGES.replace(shape=(13, 2)), r"sizes that sum to 12, wanted the size of the dim, 13"),
    ],
)  # fmt: skip
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_padded_stages_have_one_shape():
    padded = STAGES.replace(padded=True)
    assert [padded.local_shape(rank) for rank in range(4)] == [(4, 2)] * 4
    assert layers_of(padded) == layers_of(STAGES) and padded.padding_axes == ("pp",) and padded.is_even
    assert str(padded) == "f32[(3|4|4|1)@pp, 2] padded on pp4"


# ---- one graph serves all ranks: what has one refuses ranks of several shapes


def test_steps_are_refused_in_words():
    wanted, layout = r"of whose dim 0 ranks hold more or less, wanted one shape on all ranks.*padded=True", STAGES
    plain = layout.replace(spec=("pp",))
    x, axes = torch.zeros(layout.local_shape(0)), Axes(layout.mesh)
    pp = axes["pp"]
    refused = {
        "check": lambda: step.check(lambda x: psum(x.sum(), pp), layout),
        "trace": lambda: step.trace(lambda x: x * 2, (tree.place(x, layout),)),
        "simulate": lambda: testing.simulate(
            lambda x: psum(x.sum(), pp), layout.mesh, numbered(layout.shape), layouts=(layout,)
        ),
        "gather": lambda: Place.of(layout, ("pp",)),
        "reshard": lambda: reshard(x, layout, plain, axes),
        "positions": lambda: positions(x, layout, axes),
        "muon": lambda: muon(1e-3).init({"w": tree.ArraySpec(layout)}),
    }
    for what, call in refused.items():
        with pytest.raises(ValueError, match=wanted):
            call()
            raise AssertionError(f"{what} took {layout}")


@pytest.mark.parametrize("padded", [False, True])
def test_ranks_that_hold_nothing_are_not_gone_through(padded):
    """Of 2**40 ranks eight pieces are on eight; the other ranks are no work."""
    mesh = Mesh(pp=2**40)
    with counted() as work:
        layout = Layout((8,), torch.float32, mesh, (Split("pp", order=range(8)),), padded=padded)
        assert (
            layout.is_even == padded and layout.padded == padded and layout.padding_axes == (("pp",) if padded else ())
        )
    assert work.calls < 3000 and layout.local_shape(7) == (1,) and layout.boxes(2**40 - 1) == ()
