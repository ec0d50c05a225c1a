"""Gathers and reduce-scatters beside products: torch's pass finds all of them, and the joined ops compute the same.

On gloo ranks, with what torch's ops in symmetric memory fall back to: they themselves are for CUDA.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fmegatron import nn, step
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import Mesh

MESH = Mesh(tp=2)
OPS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def two_products(x, up, down):
    """(loss, gradients) of a sequence-parallel MLP: x[B, S_tp, D], up[D, F_tp], down[F_tp, D]."""
    tp = Axes(MESH)["tp"]
    leaves = [t.detach().requires_grad_() for t in (x, up, down)]
    with torch.enable_grad():
        x, up, down = leaves
        y = nn.row_parallel(torch.tanh(nn.column_parallel(x, up, tp, True)), down, tp, True)
        loss = psum(y.square().sum(), tp)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def counting(fn, name, calls):
    def run(*args, **more):
        calls[name] += 1
        return fn(*args, **more)

    return run


def joined_and_plain(rank: int):
    """(calls of torch's joined ops, results with them, results without)."""
    from torch.distributed import _symmetric_memory as symmetric

    g, calls = torch.Generator().manual_seed(0), dict.fromkeys(OPS, 0)
    x, up, down = (torch.randn(shape, generator=g) for shape in ((2, 2, 8, 16), (2, 16, 12), (2, 12, 16)))
    given = x[rank], up[rank], down[rank]
    library = torch.library.Library("symm_mem", "IMPL")
    for name in OPS:
        library.impl(name, counting(getattr(symmetric, f"_{name}_fallback"), name, calls), "CPU")
    with connect(MESH) as world, symmetric._test_mode(), mock.patch.object(dist, "is_nccl_available", lambda: True):
        found = [
            [t.clone() for t in step.jit(two_products, world=world, **how)(*given)]
            for how in ({"patches": {"_micro_pipeline_tp": True}}, {"backend": "eager"})
        ]
    library._destroy()
    return calls, *found


@pytest.mark.slow
@pytest.mark.long
def test_joined_ops_are_found_and_equal(ranks):
    for calls, joined, plain in ranks.run(joined_and_plain, ranks=2):
        # forward one of each; backward the gather of y's gradient serves two products, x's gradient is scattered
        assert calls == {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}
        for a, b in zip(joined, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
