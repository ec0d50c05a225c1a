"""Whole matrices on any layout: right values, work dealt evenly, and no more bytes than the exchange needs."""

import pytest
import torch

from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.optim import on_whole_matrices, orthogonalize
from fmegatron.step import symbolic_nodes, trace
from fmegatron.testing import simulate

MESH = Mesh(pp=2, dp=2, fsdp=2, tp=2)
# name: (shape, spec, flat, share, matrices that each rank works on)
CASES = {
    "replicated": ((4, 6, 8), (), (), (), 4),
    "shared": ((4, 6, 8), (), (), ("dp", "fsdp"), 1),
    "shared-padded": ((3, 6, 8), (), (), ("dp", "fsdp"), 1),
    "rows": ((4, 6, 8), (None, "fsdp"), (), (), 2),
    "both": ((4, 6, 8), (None, "fsdp", "tp"), (), (), 1),
    "both-padded": ((6, 6, 8), (None, "fsdp", "tp"), (), (), 2),
    "fewer-layers-than-ranks": ((1, 6, 8), (None, "fsdp", "tp"), (), ("dp",), 1),
    "two-axes-one-dim": ((8, 8, 6), (None, ("dp", "fsdp"), "tp"), (), (), 1),
    "interleaved": ((4, 6, 16), (None, "fsdp", Split("tp", (8, 4, 4))), (), (), 1),
    "interleaved-two-axes": ((4, 6, 16), (None, "tp", Split(("dp", "fsdp"), 2)), (), (), 1),
    "interleaved-rows": ((4, 8, 6), (None, Split("tp", 2), "fsdp"), (), ("dp",), 1),
    "stages": ((8, 6, 8), ("pp", "fsdp", "tp"), (), (), 1),
    "stages-shared": ((8, 6, 8), ("pp", "fsdp"), (), ("dp",), 1),
    "experts": ((2, 4, 6, 8), ("pp", "dp", "fsdp", "tp"), (), (), 1),
    "one-matrix": ((6, 8), ("fsdp", "tp"), (), (), 1),
    "flat-whole-matrices": ((4, 6, 8), (), ("dp", "fsdp"), (), 1),
    "flat-with-tp": ((8, 6, 8), (None, None, "tp"), ("dp", "fsdp"), (), 1),
    "flat-pieces": ((3, 6, 8), (), ("dp", "fsdp"), (), 1),
    "flat-one-matrix": ((6, 8), (), ("fsdp",), (), 1),
}


@pytest.mark.parametrize("shape, spec, flat, share, work", CASES.values(), ids=CASES)
def test_values_and_balance(shape, spec, flat, share, work):
    layout = Layout(shape, torch.float64, MESH, spec, flat=flat)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = []

    def f(matrices):
        seen.append(tuple(matrices.shape))
        return orthogonalize(matrices)

    def step(x):
        return on_whole_matrices(f, x, layout, Axes(MESH), share)

    got = simulate(step, MESH, x, layouts=(layout,), out_layouts=layout).globals()
    torch.testing.assert_close(got, orthogonalize(x), rtol=1e-12, atol=1e-13)
    assert seen == [(work, *shape[-2:])]


def test_two_exchanges_for_each_split_dim_and_the_bytes_of_the_shard():
    layout = Layout((8, 6, 8), torch.float32, MESH, ("pp", "fsdp", Split(("dp", "tp"), 2)))
    x = torch.empty(layout.local_shape(0))
    traced = trace(lambda x: on_whole_matrices(lambda y: y, x, layout, Axes(MESH)), (x,))
    sent = [(node.args[1], node.args[0].meta["val"].numel()) for node in symbolic_nodes(traced.graph_module.graph)]
    padded = 2 * x.numel()  # 4 layers of a stage for 8 ranks
    assert [axes for axes, _ in sent] == [["fsdp"], ["dp", "tp"], ["dp", "tp"], ["fsdp"]]
    assert all(numel == padded for _, numel in sent)
    alone = layout.replace(spec=("pp",))
    traced = trace(lambda x: on_whole_matrices(lambda y: y, x, alone, Axes(MESH)), (torch.empty(4, 6, 8),))
    assert not symbolic_nodes(traced.graph_module.graph)
