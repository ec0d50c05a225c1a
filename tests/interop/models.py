"""Small FSDP2 and tensor-parallel modules with an optimizer, for tests on real ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    """Dims that 2 and 4 do not divide, a tied buffer-like counter, bf16 beside fp32."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 5)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.scale.sum()


def build(kind, size, seed=0, steps=1):
    """A Net on `size` ranks and its AdamW after so many steps. kind: "fsdp", "tp" or "fsdp_tp"."""
    torch.manual_seed(seed)
    net = Net()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    else:
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("fsdp", "tp"))
    if "tp" in kind:
        tp = mesh["tp"] if kind == "fsdp_tp" else mesh
        parallelize_module(net, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "fsdp" in kind:
        fsdp = mesh["fsdp"] if kind == "fsdp_tp" else mesh
        fully_shard(net.up, mesh=fsdp)
        fully_shard(net, mesh=fsdp)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 + seed, betas=(0.9, 0.98), foreach=False)
    for _ in range(steps):
        train(net, optimizer, seed)
    return net, optimizer


def train(net, optimizer, seed=0):
    """One step."""
    x = torch.arange(24.0).view(4, 6) / 24 + seed
    net(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    net.seen += 1 + seed


def state_of(net, optimizer):
    """The state dict of both, as a user writes it."""
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def full(value):
    """Nested state dict with whole tensors."""
    if isinstance(value, dict):
        return {k: full(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(full(v) for v in value)
    return (
        value.full_tensor().clone()
        if isinstance(value, DTensor)
        else value.clone()
        if torch.is_tensor(value)
        else value
    )


def same(a, b):
    """Whether two whole state dicts are equal, bit by bit and type by type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if torch.is_tensor(a):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b
