"""Each op has a rule: no finding where it is used rightly, a finding (or a wrong layout) where it is not."""

import pytest
import torch
import torch.nn.functional as F

from fmegatron.collectives import Axes, all_gather, all_to_all, axis_index, ppermute, psum, shard
from fmegatron.collectives.ops import declare
from fmegatron.layout import Layout, Mesh
from fmegatron.step import check, trace
from fmegatron.step.checker.dims import Misfit, met, plain
from fmegatron.step.checker.entrypoints import check_traced

MESH = Mesh(dp=2, tp=2)
A = Axes(MESH)
DP, TP = A["dp"], A["tp"]


def lay(shape, *spec, dtype=torch.float32, **other):
    return Layout(shape, dtype, MESH, spec, **other)


def report(fn, ins, outs):
    """Check fn(*tensors) -> tensors, given and wanted under these layouts."""
    empty = [torch.empty(x.local_shape(0), dtype=x.dtype) for x in ins]

    def run(*tensors):
        out = fn(*tensors)
        return out if isinstance(out, tuple) else (out,)

    return check_traced(trace(run, tuple(empty)), MESH, list(ins), list(outs))


def grads(fn, *xs, g=None):
    xs = [x.detach().requires_grad_() for x in xs]
    with torch.enable_grad():
        out = fn(*xs)
    return torch.autograd.grad(out, xs, g)


ROWS, COLUMNS, WHOLE = lay((8, 16), "dp"), lay((8, 16), None, "tp"), lay((8, 16))
VECTOR, PENDING = lay((16,)), lay((8, 16), "dp", unreduced=("tp",))
LABELS, INDEX = lay((8,), "dp", dtype=torch.int64), lay((8, 4), "dp", dtype=torch.int64)
HEADS, LENGTH = lay((4, 4, 8, 16), "dp", "tp"), lay((4, 4, 8, 16), "dp", None, "tp")
EXPERTS = lay((4, 16, 6), "tp")


def norm_weight(norm):
    def fn(x, w, g):
        return grads(lambda x, w: norm(x, (16,), w), x, w, g=g)

    return fn


def moved(dim):
    return lambda x, w: torch.bmm(all_to_all(x, TP, split_dim=0, concat_dim=dim), w)


def ring(x):
    """This rank's rows plus those of the neighbour: what the sum means is stated."""
    return declare(x + ppermute(x, TP, 1), TP, forward=("sharded", 0))


def keyed(x):
    """Dropout whose mask depends on a key and global positions."""
    at = axis_index(DP, like=x) * x.shape[0] + torch.arange(x.shape[0])
    keep = declare((at * 2654435761 % 97 < 48), DP, forward=("sharded", 0))
    return x * keep[:, None]


def written(x, part=slice(None)):
    """x, put into an array of zeros by a view of it: the node of the array is older than what its memory holds."""
    y = torch.zeros_like(x)
    y[:, part].add_(x[:, part])
    return y


def written_list(x):
    """x, put into an array of zeros by an op on lists, which returns nothing."""
    y = torch.zeros_like(x)
    torch._foreach_add_([y, torch.zeros(3)], [x, torch.ones(3)])
    return y


# name: (function, layouts of its arguments, of its results)
RIGHT = {
    "layer_norm": (lambda x, w: F.layer_norm(x, (16,), w), (ROWS, VECTOR), (ROWS,)),
    "layer_norm gradients": (
        norm_weight(F.layer_norm), (ROWS, VECTOR, ROWS), (ROWS, lay((16,), unreduced=("dp",)))
    ),
    "rms_norm": (lambda x, w: torch.ops.aten._fused_rms_norm(x, (16,), w, 1e-6)[0], (ROWS, VECTOR), (ROWS,)),
    "rms_norm gradients": (norm_weight(F.rms_norm), (ROWS, VECTOR, ROWS), (ROWS, lay((16,), unreduced=("dp",)))),
    "log_softmax": (lambda x: x.log_softmax(-1), (ROWS,), (ROWS,)),
    "nll sum": (lambda x, t: F.nll_loss(x, t, reduction="sum"), (ROWS, LABELS), (lay((), unreduced=("dp",)),)),
    "cross_entropy gradient": (
        lambda x, t: grads(lambda x: F.cross_entropy(x, t, reduction="sum"), x), (ROWS, LABELS), (ROWS,)
    ),
    "nll none": (lambda x, t: F.nll_loss(x, t, reduction="none"), (ROWS, LABELS), (lay((8,), "dp"),)),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (HEADS,), (HEADS,)),
    "attention gradient": (
        lambda q, g: grads(lambda q: F.scaled_dot_product_attention(q, q, q), q, g=g), (HEADS, HEADS), (HEADS,)
    ),
    "topk": (lambda x: x.topk(2)[0], (ROWS,), (lay((8, 2), "dp"),)),
    "sort, cumsum": (lambda x: x.sort(-1)[0].cumsum(-1), (ROWS,), (ROWS,)),
    "one_hot": (
        lambda t: torch.zeros(t.shape[0], 6, dtype=torch.int64).scatter(1, t[:, None], 1), (LABELS,),
        (lay((8, 6), "dp", dtype=torch.int64),),
    ),
    "index_add": (
        lambda t, x: torch.zeros(5, 16).index_add(0, t, x), (LABELS, ROWS), (lay((5, 16), unreduced=("dp",)),)
    ),
    "scatter_add": (lambda i, x: torch.zeros_like(x).scatter_add(1, i, x[:, :4]), (INDEX, ROWS), (ROWS,)),
    "gather": (lambda x, i: x.gather(1, i), (ROWS, INDEX), (lay((8, 4), "dp"),)),
    "foreach": (lambda x, y: tuple(torch._foreach_add([x, y], [y, x])), (PENDING, PENDING), (PENDING, PENDING)),
    "all_to_all of tokens": (moved(1), (lay((4, 10, 16), None, "tp"), EXPERTS), (lay((4, 10, 6), "tp"),)),
    "grouped_mm": (
        lambda x, w, o: torch._grouped_mm(x.bfloat16(), w.bfloat16(), o),
        (lay((32, 16), "tp"), lay((4, 16, 8), "tp"), lay((4,), "tp", dtype=torch.int32)),
        (lay((32, 8), "tp", dtype=torch.bfloat16),),
    ),
    "windows": (lambda x: x.unfold(1, 4, 1).sum(-1), (ROWS,), (lay((8, 13), "dp"),)),
    "windows' gradient": (
        lambda x, g: grads(lambda x: x.unfold(1, 4, 4), x, g=g), (ROWS, lay((8, 4, 4), "dp")), (ROWS,)
    ),
    "repeat": (lambda x: x.repeat(1, 2), (ROWS,), (lay((8, 32), "dp"),)),
    "ring": (ring, (lay((8, 16), "tp"),), (lay((8, 16), "tp"),)),
    "rows of its own that a rank adds up, declared": (
        lambda t, x: declare(torch.zeros(5, 16).index_add(0, t, x), DP, forward=("sharded", 0)), (LABELS, ROWS),
        (lay((10, 16), "dp"),)
    ),
    "what no rule knows, declared equal on all ranks": (
        lambda x: declare(all_gather(x.topk(2)[0], TP, 1).topk(2)[0], TP, forward="replicated"), (COLUMNS,),
        (lay((8, 2)),)
    ),
    "dropout by keys": (keyed, (ROWS,), (ROWS,)),
    "written through a view": (lambda x: psum(written(x), TP), (PENDING,), (ROWS,)),
    "written in a list": (lambda x: psum(written_list(x), TP), (PENDING,), (ROWS,)),
    "a part of what is whole": (lambda x: written(x, slice(2)), (WHOLE,), (WHOLE,)),
}  # fmt: skip
WRONG = {
    "layer_norm over a shard": (lambda x, w: F.layer_norm(x, (8,), w), (COLUMNS, lay((16,), "tp")), (COLUMNS,)),
    "layer_norm of a pending sum": (lambda x: F.layer_norm(x, (16,)), (PENDING,), (ROWS,)),
    "layer_norm gradients not summed": (norm_weight(F.layer_norm), (ROWS, VECTOR, ROWS), (ROWS, VECTOR)),
    "rms_norm over a shard": (lambda x: torch.ops.aten._fused_rms_norm(x, (8,), None, 1e-6)[0], (COLUMNS,), (COLUMNS,)),
    "rms_norm gradients not summed": (norm_weight(F.rms_norm), (ROWS, VECTOR, ROWS), (ROWS, VECTOR)),
    "log_softmax over a shard": (lambda x: x.log_softmax(-1), (COLUMNS,), (COLUMNS,)),
    "nll mean": (lambda x, t: F.nll_loss(x, t), (ROWS, LABELS), (lay(()),)),
    "nll mean, summed": (lambda x, t: psum(F.nll_loss(x, t), DP), (ROWS, LABELS), (lay(()),)),
    "nll mean, its gradient": (
        lambda x, t: grads(lambda x: F.cross_entropy(x, t), x), (ROWS, LABELS), (ROWS,)
    ),
    "nll over a shard": (
        lambda x, t: F.nll_loss(x, t, reduction="none"), (COLUMNS, lay((8,), dtype=torch.int64)), (lay((8,)),)
    ),
    "nll sum not summed": (lambda x, t: F.nll_loss(x, t, reduction="sum"), (ROWS, LABELS), (lay(()),)),
    "attention over shards of the length": (lambda q: F.scaled_dot_product_attention(q, q, q), (LENGTH,), (LENGTH,)),
    "attention of heads and all heads": (
        lambda q, k: F.scaled_dot_product_attention(q, k[:, :2], k[:, :2]), (HEADS, lay((4, 4, 8, 16), "dp")), (HEADS,)
    ),
    "topk over a shard": (lambda x: x.topk(2)[0], (COLUMNS,), (lay((8, 2)),)),
    "sort of a pending sum": (lambda x: x.sort(-1)[0], (PENDING,), (PENDING,)),
    "cumsum over a shard": (lambda x: x.cumsum(-1), (COLUMNS,), (COLUMNS,)),
    "cumsum of a pending sum used": (lambda x: x.cumsum(-1).exp(), (PENDING,), (ROWS,)),
    "index_add not summed": (lambda t, x: torch.zeros(5, 16).index_add(0, t, x), (LABELS, ROWS), (lay((5, 16)),)),
    "index_add to what is there": (
        lambda y, t, x: y.index_add(0, t, x), (lay((5, 16)), LABELS, ROWS), (lay((5, 16)),)
    ),
    "scatter over a shard": (
        lambda x, t: x.scatter(1, t[:, None], 1.0), (COLUMNS, lay((8,), dtype=torch.int64)), (COLUMNS,)
    ),
    "gather over a shard": (
        lambda x, i: x.gather(1, i), (COLUMNS, lay((8, 4), dtype=torch.int64)), (lay((8, 4)),)
    ),
    "foreach of pending and whole": (
        lambda x, y: tuple(torch._foreach_add([x], [y])), (PENDING, ROWS), (PENDING,)
    ),
    "all_to_all of the wrong dim": (moved(2), (lay((4, 10, 16), None, "tp"), lay((4, 32, 6), "tp")), (EXPERTS,)),
    "grouped_mm of tokens that stayed": (
        lambda x, w, o: torch._grouped_mm(x.bfloat16(), w.bfloat16(), o),
        (lay((32, 16)), lay((4, 16, 8), "tp"), lay((4,), "tp", dtype=torch.int32)),
        (lay((32, 8), dtype=torch.bfloat16),),
    ),
    "ring of what is whole": (lambda x: declare(x + ppermute(x, TP, 1), TP, forward="partial"), (WHOLE,), (WHOLE,)),
    "windows over a shard": (lambda x: x.unfold(1, 4, 1).sum(-1), (COLUMNS,), (lay((8, 5)),)),
    "repeated shards for the whole": (lambda x: x.repeat(1, 2), (COLUMNS,), (WHOLE,)),
    "the same axes in another order": (
        lambda x, y: x + y, (lay((8, 16), ("dp", "tp")), lay((8, 16), ("tp", "dp"))), (lay((8, 16), ("dp", "tp")),)
    ),
    "an output in another order": (lambda x: x * 2, (lay((8, 16), ("dp", "tp")),), (lay((8, 16), ("tp", "dp")),)),
    "the major axis gathered first": (
        lambda x: all_gather(all_gather(x, DP, 0), TP, 0), (lay((8, 16), ("dp", "tp")),), (WHOLE,)
    ),
    "a mask of local positions": (
        lambda x: x * (torch.arange(x.shape[0]) + axis_index(TP) > 2)[:, None], (ROWS,), (ROWS,)
    ),
    "sum of gathered copies": (lambda x: all_gather(x, TP, 0).view(2, 8, 16).sum(0), (WHOLE,), (WHOLE,)),
    "cut of a pending sum": (lambda x: shard(x, TP, 1), (PENDING,), (lay((8, 16), "dp", "tp"),)),
    "sum of a shard": (lambda x: psum(x, TP), (COLUMNS,), (lay((8, 8)),)),
    "a pending sum written through a view": (written, (PENDING,), (ROWS,)),
    "a pending sum written in a list": (written_list, (PENDING,), (ROWS,)),
}  # fmt: skip


# What may be right, by what follows or by what only numbers tell: no finding, and no "ok" either.
OPEN = {
    "the largest of the largest of parts": (
        lambda x: all_gather(x.topk(2)[0], TP, 1).topk(2)[0], (COLUMNS,), (lay((8, 2)),)
    ),
    "a ring of which it is not declared what it adds up": (
        lambda x: x + ppermute(x, TP, 1), (lay((8, 16), "tp"),), (lay((8, 16), "tp"),)
    ),
    "means of parts that may ignore other numbers of labels": (
        lambda x, t: psum(F.nll_loss(x, t), DP) / DP.size, (ROWS, LABELS), (lay(()),)
    ),
    "their gradients": (
        lambda x, t: grads(lambda x: F.cross_entropy(x, t) / DP.size, x), (ROWS, LABELS), (ROWS,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    found = report(*RIGHT[name])
    assert found.ok, str(found)


@pytest.mark.parametrize("name", OPEN)
def test_open(name):
    found = report(*OPEN[name])
    assert not found.findings and [one.outputs for one in found.unproven] == [("0",)], str(found)


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    assert report(*WRONG[name]).findings


@pytest.mark.timeout(120)  # it never ended, and took memory without limit
def test_what_topk_leaves_may_be_used():
    """A dim that an op makes shorter meets others of the new size; over a shard it is this rank's, which is found."""

    def best(x, w):
        value, place = x.topk(3, dim=-1)
        return ((value.softmax(-1) + w[:3]) * x.gather(-1, place)).sum(-1)

    assert report(best, (ROWS, VECTOR), (lay((8,), "dp"),)).ok
    found = report(best, (COLUMNS, lay((8,))), (lay((8,)),))
    assert {one.axis for one in found.findings} <= {"tp"} and not found.ok, str(found)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sizes", [(6, 4), (4, 6), (3, 7), (1, 5), (8, 12)])
def test_dims_of_different_sizes_are_put_together_by_no_rule(sizes):
    a, b = (plain(size, ("tp",)) for size in sizes)
    if 1 in sizes:
        assert met(a, b).dim == b
        return
    with pytest.raises(Misfit, match="sizes"):
        met(a, b)


@pytest.mark.parametrize("view", [lambda y: y[:, :2], lambda y: y[:, :1], lambda y: y.view(2, 2, 4), torch.t])
def test_what_is_written_through_another_view_is_unproven(view):
    """Nothing is claimed of an array of which a part is written, or all in another shape: neither right nor wrong."""

    square = lay((8, 4), "dp")  # 4 x 4 on each rank

    def fn(x, p):
        y = x.clone()
        beside = y[:, 2:]
        view(y).copy_(view(p))
        return y * 2, beside * 2

    found = report(fn, (square, square.replace(unreduced=("tp",))), (square, lay((8, 2), "dp")))
    assert (
        not found.ok
        and not found.findings
        and {one.why for one in found.unproven} == {"aten.copy_.default writes into memory that other values share"}
    )
    assert found.unproven[0].at.startswith("test_check_ops.py:")


def test_what_an_op_does_to_several_arguments_is_unproven():
    def fn(p, g):
        w, m, v = (torch.zeros_like(p) for _ in range(3))
        torch._fused_sgd_([w], [g * 1], [m], weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False,
                          maximize=False, is_first_step=True)  # fmt: skip
        return w, v

    found = report(fn, (ROWS, PENDING), (ROWS, ROWS))
    assert not found.findings and [one.op for one in found.unproven] == ["_fused_sgd_"]


def test_a_shard_of_one_element_meets_what_is_broadcast_there():
    """Rope's backward of one head on a rank: its place is lost in a view, and the only dim that fits is that of one
    element. Where the replicated operand is as large along every dim, nothing fits."""
    mesh, (B, S, K) = Mesh(tp=2), (4, 6, 8)

    def turned(heads, c):
        def step(a, b):
            x = a["x"].flatten(0, 2).unflatten(0, (B, S, heads))
            return {"x": x * (b["c"][:, :, None] if heads == 1 else b["c"])}, {}

        at = {"x": Layout((B, S, 2 * heads, K), torch.float64, mesh, (None, None, "tp"))}
        return check(step, at, {"c": Layout(c, torch.float64, mesh)})

    report = turned(1, (B, S, K))
    assert report.ok and not report.unproven, str(report)
    assert any("replicated and sharded" in finding.what for finding in turned(2, (B, S, 2, K)).findings)
