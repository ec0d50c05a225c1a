"""Where a rank has one row, views leave no trace of it: what is wrong is found, what may be right is not refused."""

import pytest
import torch

from fmegatron import model, nn, optim, step
from fmegatron.collectives import Axes, Precision, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.step import trace
from fmegatron.step.checker.entrypoints import check_traced

MESH = Mesh(dp=2)
DP = Axes(MESH)["dp"]


def lay(shape, *spec):
    return Layout(shape, torch.float64, MESH, spec)


X, P = lay((2, 6), "dp"), lay((2, 6, 4), "dp")


def report(fn, out, *ins):
    empty = tuple(torch.empty(x.local_shape(0), dtype=x.dtype) for x in ins)
    return check_traced(trace(lambda *xs: [fn(*xs)], empty), MESH, list(ins), [out])


def test_a_mean_of_a_rank_is_found():
    """It was proven: 2 times too large on two ranks."""
    for view in (lambda x: x.view(6), lambda x: x.squeeze(0), lambda x: x):
        with pytest.raises(ValueError, match="mean over a sharded dim divides by the local size only"):
            report(lambda x, view=view: psum(view(x).mean(), DP), lay(()), X).require()
        assert report(lambda x, view=view: psum(view(x).mean(), DP) / 2, lay(()), X).ok
        assert report(lambda x, view=view: psum(view(x).sum(), DP), lay(()), X).ok


def test_a_sum_of_tokens_is_no_finding():
    """What was summed along a dim that may have been the sharded one may be pending, and be added to what is."""
    for fn, out in (
        (lambda p, x: psum(p.view(6, 4).sum(0), DP), lay((4,))),
        (lambda p, x: psum(torch.cat([p.view(6, 4).sum(0), x.sum().view(1)]), DP), lay((5,))),
    ):
        assert not report(fn, out, P, X).findings
    assert report(lambda p, x: psum(p.sum((0, 1)) + x.sum(), DP), lay((4,)), P, X).ok


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 8])
def test_experts_on_one_row_or_two(rows):
    precision, moe = Precision.fp64(), model.MoE(nn.Router(4, 2), 12, balance=0.01, ep=("dp",))
    decoder = model.llama(
        vocab_size=30, dim=16, layers=1, heads=4, kv_heads=2, ffn_dim=24, max_seq=6, mlp=moe, precision=precision,
        param_dtype=precision.param, compute_dtype=precision.compute,
    )  # fmt: skip
    found = step.check(*model.build(decoder, optim.adamw(1e-2), Mesh(dp=2, fsdp=2), (rows, 6)))
    assert not found.findings and (found.ok or rows == 4), str(found)
