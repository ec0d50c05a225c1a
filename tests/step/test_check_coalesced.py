"""check on coalesced collectives: no finding where they do what layouts say, one where axis, dim or sum is wrong."""

import pytest
import torch

from fmegatron.collectives import Axes, pmax
from fmegatron.collectives.ops import all_gather_many, psum_many, reduce_scatter_many
from fmegatron.collectives.places import FLAT, Place
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.step import trace
from fmegatron.step.checker.entrypoints import check_traced

MESH = Mesh(dp=2, fsdp=2, tp=2)
A = Axes(MESH)
FSDP, DP, BOTH = A["fsdp"], A["dp"], A["dp", "fsdp"]


def lay(shape, *spec, **other):
    return Layout(shape, torch.float32, MESH, spec, **other)


def report(fn, ins, outs):
    """Check fn(list of tensors) -> list of tensors."""
    empty = [torch.empty(x.local_shape(0), dtype=x.dtype) for x in ins]
    return check_traced(trace(lambda *xs: fn(list(xs)), tuple(empty)), MESH, list(ins), list(outs))


def gradient(fn, ins):
    """The gradients of fn(xs) for gradients that come after them in the list."""

    def run(xs):
        leaves = [x.detach().requires_grad_() for x in xs[: len(ins)]]
        with torch.enable_grad():
            out = fn(leaves)
        return list(torch.autograd.grad(out, leaves, xs[len(ins) :]))

    return run


SHARDS = (
    lay((8, 6), "fsdp"), lay((6, 8), "tp", "fsdp"), lay((6, 24), None, Split("fsdp", (16, 4, 4))),
    lay((6, 48), None, Split(("tp", "fsdp"), 3)), lay((4, 6), flat=("fsdp",)), lay((8, 6), "tp", flat=("fsdp",)),
)  # fmt: skip
PLACES = [Place.of(x, ("fsdp",)) for x in SHARDS]
WHOLE = tuple(x.without("fsdp") for x in SHARDS)
JOINT = (lay((8, 6), "dp", "fsdp"), lay((8, 6), ("dp", "fsdp")), lay((4, 6), flat=("dp", "fsdp")),
         lay((4, 6), "dp", flat=("fsdp",)))  # fmt: skip
JOINT_PLACES = [Place.of(x, ("dp", "fsdp")) for x in JOINT]


def pending(layouts, *axes):
    return tuple(x.replace(unreduced=axes) for x in layouts)


RIGHT = {
    "gather": (lambda xs: all_gather_many(xs, FSDP, PLACES), SHARDS, WHOLE),
    "gather over two axes": (
        lambda xs: all_gather_many(xs, BOTH, JOINT_PLACES), JOINT, tuple(x.without(("dp", "fsdp")) for x in JOINT)
    ),
    "gradient of a gather": (
        gradient(lambda xs: all_gather_many(xs, FSDP, PLACES), SHARDS), (*SHARDS, *pending(WHOLE, "fsdp")), SHARDS
    ),
    "gradient over two axes": (
        gradient(lambda xs: all_gather_many(xs, BOTH, JOINT_PLACES), JOINT),
        (*JOINT, *pending([x.without(("dp", "fsdp")) for x in JOINT], "dp", "fsdp")), JOINT,
    ),
    "scatter": (
        lambda xs: reduce_scatter_many(xs, FSDP, PLACES, exact=True), pending(WHOLE, "fsdp"), SHARDS
    ),
    "psum": (lambda xs: psum_many(xs, DP), pending(SHARDS, "dp"), SHARDS),
    "gradient of a psum": (
        gradient(lambda xs: psum_many(xs, DP), SHARDS[:2]), (*pending(SHARDS[:2], "dp"), *SHARDS[:2]), SHARDS[:2]
    ),
}  # fmt: skip
RIGHT["maxima side by side"] = (
    lambda xs: [pmax(torch.cat([x.abs().amax((0, 1)).view(1) for x in xs]), FSDP)], SHARDS[:1] * 2, (lay((2,)),)
)  # fmt: skip
ROWS, COLUMNS, VECTOR = lay((8, 8), "fsdp"), lay((8, 8), None, "fsdp"), lay((8,))
GATHERED = lay((8, 8))
WRONG = {
    "gather over another axis": (lambda xs: all_gather_many(xs, DP, [0]), (ROWS,), (GATHERED,)),
    "gather of another dim": (lambda xs: all_gather_many(xs, FSDP, [1]), (ROWS,), (GATHERED,)),
    "gather of what is whole": (lambda xs: all_gather_many(xs, FSDP, [0, 0]), (ROWS, VECTOR), (GATHERED, VECTOR)),
    "gather of a pending sum": (
        lambda xs: all_gather_many(xs, FSDP, [0]), (lay((8, 8), unreduced=("fsdp",)),), (GATHERED,)
    ),
    "gather of other parts": (
        lambda xs: all_gather_many(xs, FSDP, [Place((1,), 1, (4, 4, 4))]), (SHARDS[2],), (WHOLE[2],)
    ),
    "gather without the parts": (lambda xs: all_gather_many(xs, FSDP, [1]), (SHARDS[2],), (WHOLE[2],)),
    "gather of parts where there are none": (
        lambda xs: all_gather_many(xs, FSDP, [Place((1,), 1, (1, 3))]), (COLUMNS,), (GATHERED,)
    ),
    "gather of two dims the other way": (
        lambda xs: all_gather_many(xs, BOTH, [Place((1, 0))]), (lay((8, 8), "dp", "fsdp"),), (GATHERED,)
    ),
    "gather in the other order": (
        lambda xs: all_gather_many(xs, A["fsdp", "dp"], [0]), (lay((8, 8), ("dp", "fsdp")),), (GATHERED,)
    ),
    "gather of the major axis alone": (
        lambda xs: all_gather_many(xs, DP, [0]), (lay((8, 8), ("dp", "fsdp")),), (ROWS,)
    ),
    "flat, gathered over another axis": (
        lambda xs: all_gather_many(xs, DP, [Place((FLAT,), block=(4, 6))]), (SHARDS[4],), (WHOLE[4],)
    ),
    "a pending maximum beside a whole value": (
        lambda xs: [torch.cat([x.abs().amax((0, 1)).view(1) for x in xs])], (ROWS, GATHERED), (lay((2,)),)
    ),
    "scales that are no maxima over all ranks": (
        lambda xs: all_gather_many([xs[0] / xs[0].abs().amax((0, 1))], FSDP, [0]), (ROWS,), (GATHERED,)
    ),
    "scatter of what is whole": (lambda xs: reduce_scatter_many(xs, FSDP, [0]), (GATHERED,), (ROWS,)),
    "scatter over another axis": (
        lambda xs: reduce_scatter_many(xs, DP, [0]), (lay((8, 8), unreduced=("fsdp",)),), (ROWS,)
    ),
    "scatter of another dim": (
        lambda xs: reduce_scatter_many(xs, FSDP, [1]), (lay((8, 8), unreduced=("fsdp",)),), (lay((8, 8), "fsdp"),)
    ),
    "one of two is not scattered but cut": (
        lambda xs: [reduce_scatter_many(xs[:1], FSDP, [0])[0], xs[1][:4]],
        pending((GATHERED, GATHERED), "fsdp"), (ROWS, ROWS),
    ),
    "psum of a shard": (lambda xs: psum_many(xs, FSDP), (ROWS,), (lay((4, 8)),)),
    "psum twice": (lambda xs: psum_many(psum_many(xs, DP), DP), pending((GATHERED,), "dp"), (GATHERED,)),
    "psum over another axis": (lambda xs: psum_many(xs, FSDP), pending((GATHERED,), "dp"), (GATHERED,)),
    "one of two is not summed": (
        lambda xs: [psum_many(xs[:1], DP)[0], xs[1]], pending((GATHERED, VECTOR), "dp"), (GATHERED, VECTOR)
    ),
    "a gradient that every rank has": (
        gradient(lambda xs: all_gather_many(xs, FSDP, [0]), (ROWS,)), (ROWS, GATHERED), (ROWS,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    found = report(*RIGHT[name])
    assert found.ok, str(found)


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    assert report(*WRONG[name]).findings
