"""Two steps by hand on the ranks of engines. It imports torch and collectives alone: each engine imports it anew."""

import torch

from fmegatron.collectives import Axes, World, all_gather, psum, shard
from fmegatron.layout import Mesh


def losses(mesh: Mesh, world: World) -> list[float]:
    """Of a linear model, fp64: its matrix is split by fsdp, rows of the batch by all axes."""
    axes = Axes(mesh, world)
    own, rows = axes[mesh.axes(("fsdp",))], axes[mesh.names]
    rest = axes[tuple(name for name in mesh.names if name not in own.names)]
    x_BD = shard(torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6), rows, 0)
    w_DF = shard(torch.linspace(1, 2, 30, dtype=torch.float64).reshape(6, 5).sin(), own, 0)
    found = []
    for _ in range(2):
        w_DF = w_DF.detach().requires_grad_()
        total = (x_BD @ all_gather(w_DF, own, 0) - 1).square().sum()
        (grad_DF,) = torch.autograd.grad(total, w_DF)
        found.append(psum(total.detach(), rows).item())
        w_DF = w_DF - 0.05 * psum(grad_DF, rest)
    return found
