"""Gathers and reduce-scatters on real ranks: the values that they stand for, in the graph that is run."""

import pytest
import torch

from fmegatron.collectives import Axes, all_gather, connect, reduce_scatter
from fmegatron.layout import Mesh
from fmegatron.step import jit

MESH = Mesh(fsdp=4)


def sums_and_wholes(rank, dtype):
    """What a reduce-scatter and a gather give on this rank."""
    with connect(MESH) as world:
        fsdp = Axes(MESH)["fsdp"]

        def both(x):
            return reduce_scatter(x, fsdp, 0), all_gather(x, fsdp, 1)

        x = (torch.arange(24).reshape(8, 3) * (rank + 1)).to(dtype)
        step = jit(both, world=world, backend="eager")
        return [y.float() for y in step(x)], str(step.graph("donate"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_values(ranks, dtype):
    found = ranks.run(sums_and_wholes, dtype, ranks=4)
    wholes = [(torch.arange(24).reshape(8, 3) * (rank + 1)).to(dtype).float() for rank in range(4)]
    for rank, ((total, whole), graph) in enumerate(found):
        assert "all_gather_into_tensor" in graph and "reduce_scatter_tensor" in graph
        assert torch.equal(total, sum(wholes)[2 * rank : 2 * rank + 2])  # small whole numbers: exact in 8 bits too
        assert torch.equal(whole, torch.cat(wholes, 1))
