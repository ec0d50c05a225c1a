"""check on padded shards: zeros stay zeros, a gather leaves padding out; what counts it is found, or not proven."""

import itertools

import pytest
import torch

from fmegatron.collectives import Axes, all_gather, all_to_all, axis_index, psum, reshard, shard
from fmegatron.collectives.ops import all_gather_many, reduce_scatter_many
from fmegatron.collectives.places import Place
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.step import trace
from fmegatron.step.checker.entrypoints import check_traced
from fmegatron.step.checker.padding import FINITE, TABLE
from fmegatron.testing import Ranks, simulate

MESH = Mesh(dp=2, fsdp=3, tp=2)
A = Axes(MESH)
FSDP, DP, TP = A["fsdp"], A["dp"], A["tp"]


def lay(shape, *spec, padded=True, **other):
    return Layout(shape, torch.float32, MESH, spec, padded=padded, **other)


def report(fn, ins, outs):
    empty = [torch.empty(x.local_shape(0), dtype=x.dtype) for x in ins]
    return check_traced(trace(lambda *xs: fn(list(xs)), tuple(empty)), MESH, list(ins), list(outs))


def gradient(fn, count):
    def run(xs):
        leaves = [x.detach().requires_grad_() for x in xs[:count]]
        with torch.enable_grad():
            out = fn(leaves)
        return list(torch.autograd.grad(out, leaves, xs[count:]))

    return run


def whole(x):
    return x.without("fsdp").replace(flat=())


ROWS, WIDE = lay((10, 4), "fsdp"), lay((4, 11), "tp", "fsdp", padded=True)
SHARDS = (
    ROWS, lay((4, 10), "tp", "fsdp"), lay((10, 4), ("tp", "fsdp")), lay((6, 13), None, Split("fsdp", (8, 5))),
    lay((5, 7), flat=("fsdp",)), lay((4, 7), "tp", flat=("fsdp",)), lay((10,), "fsdp"),
)  # fmt: skip
PLACES = [Place.of(x, ("fsdp",)) for x in SHARDS]
WHOLE = tuple(map(whole, SHARDS))
PENDING = tuple(x.replace(unreduced=("fsdp",)) for x in WHOLE)
SCALAR, NUMBER = lay(()), lay(())
FLAT2 = lay((5, 7), flat=("fsdp", "dp"))


def adam(xs):
    p, g, m, v = xs
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return [p - 1e-2 * (m / (v.sqrt() + 1e-8) + 0.1 * p), m, v]


def clipped(xs):
    norm = psum(xs[0].square().sum(), FSDP).sqrt()
    return [xs[0] * (1.0 / norm.clamp(min=1.0)), norm]


def into_zeros(xs, number=0.0):
    out = torch.full((4, 8), number)
    out[:, 2:6] = xs[0]
    return [out]


RIGHT = {
    "gather": (lambda xs: all_gather_many(xs, FSDP, PLACES), SHARDS, WHOLE),
    "gradient of a gather": (gradient(lambda xs: all_gather_many(xs, FSDP, PLACES), 7), (*SHARDS, *PENDING), SHARDS),
    "scatter": (lambda xs: reduce_scatter_many(xs, FSDP, PLACES), PENDING, SHARDS),
    "cut": (lambda xs: [shard(x, FSDP, p) for x, p in zip(xs, PLACES, strict=True)], WHOLE, SHARDS),
    "gradient of a cut": (
        gradient(lambda xs: [shard(x, FSDP, p) for x, p in zip(xs, PLACES, strict=True)], 7), (*WHOLE, *SHARDS), WHOLE
    ),
    "reshard there and back": (
        lambda xs: [reshard(reshard(x, s, w, A), w, s, A) for x, s, w in zip(xs, SHARDS, WHOLE, strict=True)],
        SHARDS, SHARDS,
    ),
    "a range of a range": (lambda xs: [reshard(xs[0], SHARDS[4], FLAT2, A)], SHARDS[4:5], (FLAT2,)),
    "and back": (lambda xs: [reshard(xs[0], FLAT2, SHARDS[4], A)], (FLAT2,), SHARDS[4:5]),
    "pending ranges": (
        lambda xs: [reshard(xs[0], SHARDS[4].replace(unreduced=("dp",)), FLAT2, A)],
        (SHARDS[4].replace(unreduced=("dp",)),), (FLAT2,),
    ),
    "the sum of squares": (lambda xs: [psum(xs[0].square().sum(), FSDP)], (ROWS,), (SCALAR,)),
    "a norm of rows": (lambda xs: [xs[0] * xs[0].norm(dim=1, keepdim=True)], (ROWS,), (ROWS,)),
    "odd functions": (lambda xs: [xs[0] * xs[0].cos() + xs[0].tanh()], (ROWS,), (ROWS,)),
    "AdamW": (adam, (ROWS,) * 4, (ROWS,) * 3),
    "AdamW of ranges": (adam, SHARDS[4:5] * 4, SHARDS[4:5] * 3),
    "clipped": (clipped, (ROWS,), (ROWS, SCALAR)),
    "chosen": (lambda xs: [torch.where(xs[1] > 0, xs[0], xs[0] * 2)], (ROWS, SCALAR), (ROWS,)),
    "a product that sums padding": (lambda xs: [psum(xs[0].mT @ xs[0], FSDP)], (ROWS,), (lay((4, 4)),)),
    "matrices of other ranks": (
        lambda xs: [all_to_all(3 * all_to_all(xs[0], FSDP, 1, 2) - 1e-3 * all_to_all(xs[0], FSDP, 1, 2), FSDP, 2, 1)],
        (lay((2, 6, 10), None, None, "fsdp"),), (lay((2, 6, 10), None, None, "fsdp"),),
    ),
    "zeros, padded or not": (lambda xs: [torch.zeros_like(xs[0])] * 2, (ROWS,), (ROWS, lay((12, 4), "fsdp"))),
    "zeros beside a shard": (lambda xs: [torch.cat([xs[0] * 0, xs[0]], 1)], (ROWS,), (lay((10, 8), "fsdp"),)),
    "zeros into which a shard is written": (into_zeros, (ROWS,), (lay((10, 8), "fsdp"),)),
    "norms, one of zeros": (
        lambda xs: [psum(torch.stack([x.square().sum() for x in (xs[0], 0 * xs[0])]), FSDP).sum().sqrt()],
        (ROWS,), (SCALAR,),
    ),
    "ones of no padding": (lambda xs: [torch.ones_like(xs[0])], (ROWS,), (lay((12, 4), "fsdp"),)),
    "all finite": (lambda xs: [psum((~xs[0].isfinite()).sum(), FSDP)], (ROWS,), (SCALAR.replace(dtype=torch.int64),)),
}  # fmt: skip
WRONG = {
    "a mean": lambda xs: [psum(xs[0].mean(), FSDP) / 3],
    "something added": lambda xs: [xs[0] + 1e-3],
    "exp": lambda xs: [xs[0].exp()],
    "ones": lambda xs: [torch.ones(4, 4)],
    "exp of zeros": lambda xs: [xs[0] + (0 * xs[0]).exp()],
    "a plain gather": lambda xs: [all_gather(xs[0], FSDP, 0)],
    "a plain gather, cut off": lambda xs: [all_gather(xs[0], FSDP, 0)[:10]],
    "a cut of a pending sum": lambda xs: [shard(xs[0].mT @ xs[0], FSDP, Place((0,), true=((0, (4,)),)))],
}
SAYS = {
    "a mean": "a mean over a dim whose shards have padding counts it",
    "something added": "padding of the output .* is 0.001.*, zeros must stay zeros",
    "exp": "padding of the output .* is 1.0, zeros must stay zeros",
    "ones": "padding of the output .* is 1.0, zeros must stay zeros",
    "exp of zeros": "padding of the output .* is 1.0, zeros must stay zeros",
    "a plain gather": "brings padding along",
    "a plain gather, cut off": "brings padding along",
    "a cut of a pending sum": "cut over 'fsdp': cut takes a part of a value that is partial",
}
OUT_OF_WRONG = {
    "a mean": SCALAR, "something added": ROWS, "exp": ROWS, "ones": ROWS,
    "exp of zeros": ROWS, "a plain gather": lay((12, 4)),
    "a plain gather, cut off": lay((10, 4)), "a cut of a pending sum": lay((4, 4), "fsdp"),
}  # fmt: skip
UNPROVEN = {
    "sum of exp": (lambda xs: [psum(xs[0].exp().sum(), FSDP)], SCALAR),
    "a sum of ones like it": (lambda xs: [psum(torch.ones_like(xs[0]).sum(), FSDP)], SCALAR),
    "eps of 0": (lambda xs: [xs[0] / xs[0].abs()], ROWS),
    "an unknown number added": (lambda xs: [xs[0] + xs[1]], ROWS),
    "of an unknown divisor": (lambda xs: [xs[0] / (xs[0] * xs[1])], ROWS),
    "a sum over what an all_to_all brought": (
        lambda xs: [all_to_all(all_to_all(xs[3], FSDP, 0, 1).softmax(1), FSDP, 1, 0)], lay((6, 10), None, "fsdp")
    ),
    "ones into which a shard is written": (lambda xs: into_zeros(xs, 1.0), lay((10, 8), "fsdp")),
    "by another number": (
        lambda xs: [xs[0] + shard(xs[2], FSDP, PLACES[0]) * axis_index(FSDP)], ROWS
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    found = report(*RIGHT[name])
    assert found.ok, str(found)


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    found = report(WRONG[name], (ROWS,), (OUT_OF_WRONG[name],))
    assert found.findings, str(found)
    with pytest.raises(ValueError, match=SAYS[name]):
        found.require()


@pytest.mark.parametrize("name", UNPROVEN)
def test_unproven(name):
    fn, out = UNPROVEN[name]
    found = report(fn, (ROWS, NUMBER, lay((10, 4)), lay((6, 10), None, "fsdp")), (out,))
    assert not found.ok, "proven, though padding may be anything"


def test_a_place_that_leaves_out_what_is_no_padding():
    even = lay((12, 4), "fsdp")
    assert not even.padded
    found = report(lambda xs: all_gather_many(xs, FSDP, PLACES[:1]), (even,), (lay((10, 4)),))
    assert "leaves out the end of shards that have no padding" in str(found)


def test_padding_of_an_output_without_any():
    found = report(lambda xs: [xs[0] * 1], (ROWS,), (lay((12, 4), "fsdp"),))
    assert "has padding, its layout has none" in str(found)


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "a norm of rows"])
def test_right_ones_keep_zeros_on_ranks(name):
    """What is proven is so: zeros come out where zeros went in."""
    fn, ins, outs = RIGHT[name]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(x.shape, generator=generator) for x in ins]
    sim = simulate(lambda *xs: fn(list(xs)), MESH, *values, layouts=ins, out_layouts=list(outs))
    for rank, got in enumerate(sim.outputs):
        for layout, y in zip(outs, got, strict=True):
            true = torch.zeros(y.shape, dtype=torch.bool)
            for box in layout.boxes(rank):
                box.view(true).fill_(True)
            assert not y[~true].count_nonzero(), (rank, layout)


CALLS = {
    "mul": torch.mul, "div": torch.div, "true_divide": torch.true_divide, "addcmul": torch.addcmul,
    "addcdiv": torch.addcdiv, "lerp": torch.lerp,
    "where": lambda c, a, b: torch.where(c != 0, a, b), "masked_fill": lambda a, m, v: torch.where(m != 0, v, a),
}  # fmt: skip
KINDS = {0.0: (0.0,), 1.5: (1.5,), FINITE: (0.37, -2.3, 1e4, 1e-30), None: (0.37, -2.3, float("inf"), float("nan"))}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_by_trying(name):
    """Where it claims a number, every choice of what is not known gives it."""
    count, claimed = 2 if name in ("mul", "div", "true_divide") else 3, 0
    for operands in itertools.product(KINDS, repeat=count):
        number = TABLE[name](*operands)
        if number is None:
            continue
        claimed += 1
        for values in itertools.product(*(KINDS[kind] for kind in operands)):
            made = CALLS[name](*(torch.tensor(v, dtype=torch.float64) for v in values)).item()
            assert made == number, (name, operands, values)
    assert claimed


def test_what_is_open_over_one_axis_is_known_over_others():
    """Of ranges of rows that another axis splits, nothing is known over the axis of the ranges: the other one stays."""
    rows = lay((4, 7), "dp", flat=("fsdp",))
    found = report(lambda xs: [xs[0] * psum(xs[0].exp().sum(), A["dp", "fsdp"])], (rows,), (rows,))
    assert not found.findings and [one.axes for one in found.unproven] == [("fsdp",)], str(found)


def test_ranks_of_padding_alone():
    """13 ranks for 5 rows: eight of them have nothing but padding."""
    mesh = Mesh(fsdp=13)
    layout = Layout((5, 3), torch.float32, mesh, ("fsdp",), padded=True)
    x = torch.arange(15.0).view(5, 3)
    place = Place.of(layout, ("fsdp",))
    sim = simulate(
        lambda x: all_gather_many([x], Axes(mesh)["fsdp"], [place])[0], mesh, x, layouts=(layout,),
        out_layouts=layout.without("fsdp"),
    )  # fmt: skip
    assert torch.equal(sim.globals(), x) and isinstance(sim.outputs, Ranks)
