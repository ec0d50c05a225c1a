"""Opened checkpoints of other systems as the values that restores, tools and Managers take: names, shapes, a reader."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from fmegatron.checkpoint.calls.arguments import MOST_SAVED_STEP
from fmegatron.checkpoint.files.folder import Folder, FolderStore
from fmegatron.checkpoint.files.format import Leaf, Manifest, dtype_text
from fmegatron.checkpoint.files.snapshot import ForeignReader, Snapshot
from fmegatron.layout import Mesh


def snapshot_from(
    path: str,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    reader: ForeignReader,
    digest: int,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Snapshot:
    """A snapshot of these tensors, each a full array on one rank.

    Args:
        path: of the directory or file.
        tensors: stored path -> (shape, dtype).
        reader: fills regions of them.
        digest: 63 bits that differ where the content does.
        step: None where it is not known.
        metadata: JSON values.
    """
    leaves = {
        name: Leaf(name, shape, dtype_text(dtype), {"mesh": 0, "spec": [None] * len(shape), "flat": []})
        for name, (shape, dtype) in tensors.items()
    }
    known = step if step is not None and 0 <= step < MOST_SAVED_STEP else None
    manifest = Manifest(known, dict(metadata or {}), (Mesh().to_json(),), leaves, {}, 0, f"{digest << 1:016x}")
    return Snapshot(FolderStore(os.path.realpath(path)), Folder(path), manifest, reader)
