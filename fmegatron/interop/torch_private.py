"""Every private name of torch that this room uses, in one place. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Placement

try:
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:  # a torch that has given it up has no tensors with such a placement either
    _StridedShard = None

__all__ = ["local_of", "split_dim", "strided_factor", "strided_shard"]


def strided_factor(placement: Placement) -> int | None:
    """The split factor of a `_StridedShard`, None for any other placement."""
    if _StridedShard is not None and isinstance(placement, _StridedShard):
        return int(placement.split_factor)
    return None


def split_dim(placement: Placement) -> int:
    """The tensor dim that a `Shard` or a `_StridedShard` splits; their common base has none in torch's types."""
    dim = getattr(placement, "dim", None)
    assert isinstance(dim, int), f"{placement} splits a dim"
    return dim


def strided_shard(dim: int, factor: int) -> Placement:
    """The placement that cuts `dim` after `factor` pieces have been cut by later mesh dims."""
    if _StridedShard is None:
        raise ValueError(
            f"dim {dim}: got axes in another order than the mesh, wanted its order, for torch {torch.__version__} has"
            " no _StridedShard"
        )
    return _StridedShard(dim, split_factor=factor)


def local_of(x: DTensor) -> torch.Tensor:
    """The rank's own tensor: the memory itself, outside autograd (`to_local` makes a view and a node)."""
    return x._local_tensor.detach()
