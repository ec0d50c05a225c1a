"""Whether a state stayed as it was while it was saved: a save of what another thread changes is refused.

A digest of what is written does not show it: taken while it is written, bytes and digest may differ
(acknowledged and unreadable); taken of a copy, both agree on a state that never was (torn). So the live memory itself
is looked at before the first byte is given away, and again when all is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from fmegatron.checkpoint.files.format import bits
from fmegatron.checkpoint.files.torch_private import write_count
from fmegatron.checkpoint.writing.plan import LeafPlan, chunks_to_write

_LOOK_BYTES = 1 << 20  # what is strided is copied so much at a time, and digested while it is in the cache


def look(plans: Sequence[LeafPlan], tensors: Sequence[torch.Tensor], rank: int) -> list[tuple[int, int]]:
    """What `rank` is to write of each leaf, as two numbers a leaf: (0, 0) for what it does not write.

    A digest of the elements in host memory, and the version that torch counts (a write through `.data` is not in it).
    On a device only the version: a copy of all to the host would take as long as the save. In host memory it shows
    what has changed and is back by the second look; but not for a part of a tensor, beside which others may write.
    """
    return [_look(leaf, x, rank) for leaf, x in zip(plans, tensors, strict=True)]


def require_unchanged(
    before: Sequence[tuple[int, int]], plans: Sequence[LeafPlan], tensors: Sequence[torch.Tensor], rank: int
) -> None:
    """Raise RuntimeError naming the first leaf that is not as `look` saw it."""
    for seen, leaf, x in zip(before, plans, tensors, strict=True):
        if _look(leaf, x, rank) != seen:
            raise RuntimeError(changed(leaf.path))


def changed(path: str) -> str:
    """The error for a leaf that changed meanwhile."""
    return (
        f"{path}: got a leaf that changed while it was saved, wanted one that stays as it is until the call returns;"
        " have no other thread write to the state meanwhile, or save a clone of it (nothing was saved)"
    )


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often torch has written to the memory of each tensor; tensors of inference mode do not count: 0."""
    return [0 if x.is_inference() else write_count(x) for x in tensors]


def _look(leaf: LeafPlan, x: torch.Tensor, rank: int) -> tuple[int, int]:
    if leaf.home == "grid" and leaf.layout.replicas > 1:
        parts = [box for _, box in chunks_to_write(leaf, rank)]  # the other replicas look at the others
        if not parts:
            return 0, 0
    elif leaf.layout.boxes(rank) and (leaf.home == "grid" or leaf.writes(rank)):
        parts = None
    else:
        return 0, 0
    (version,) = versions([x])
    if x.device.type != "cpu":
        return 0, version
    local, found = bits(x.resolve_conj().resolve_neg()), xxhash.xxh3_64()
    if parts is not None:
        local = local.contiguous()
    for part in [local] if parts is None else [box.view(local) for box in parts]:
        for data in _contiguous(part):
            found.update(data.data)
    return found.intdigest(), version if x.untyped_storage().nbytes() == x.nbytes else 0


def _contiguous(x: torch.Tensor) -> list[np.ndarray] | map[np.ndarray]:
    """The elements of a tensor, in any order that its strides give: as they are in memory, or copies of a few rows."""
    x = x.permute(sorted(range(x.ndim), key=lambda d: -x.stride(d) if x.shape[d] > 1 else 0))
    if x.is_contiguous():
        return [x.numpy().reshape(-1)]
    rows = max(1, _LOOK_BYTES // max(1, x[0].nbytes))
    return map(lambda part: part.contiguous().numpy(), x.split(rows))
