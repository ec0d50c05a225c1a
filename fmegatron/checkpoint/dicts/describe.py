"""The description of a checkpoint without its elements: tree, layouts, metadata, sizes, meshes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fmegatron.checkpoint.dicts.values import own_metadata
from fmegatron.checkpoint.files.format import FORMAT, CheckpointError, dtype_of
from fmegatron.checkpoint.files.manifest import layout_from_json, mesh_from_json
from fmegatron.checkpoint.files.snapshot import Saved, snapshot_of
from fmegatron.layout import Mesh


@dataclass(frozen=True)
class Description:
    """A checkpoint at a glance, before any target tree is built.

    metadata: the user's JSON object (content flags).  format: ours, or what a foreign source is.  leaves: how many.
    total_bytes: of the global arrays, once.  meshes: those that the leaves were written on.  finite: whether loss and
    gradient norm of the step were, as the run reported; None: it did not.
    """

    path: str
    step: int | None
    metadata: dict[str, Any]
    format: str
    version: int
    leaves: int
    total_bytes: int
    meshes: tuple[Mesh, ...]
    finite: bool | None


def describe(path: Saved) -> Description:
    """The description of a complete checkpoint. Raises CheckpointError when it is missing or damaged."""
    snapshot = snapshot_of(path)
    manifest = snapshot.manifest
    size = sum(math.prod(leaf.shape) * dtype_of(leaf.dtype).itemsize for leaf in manifest.leaves.values())
    meshes = tuple(map(mesh_from_json, manifest.meshes))
    return Description(
        snapshot.text,
        manifest.step,
        own_metadata(manifest.metadata),
        FORMAT if snapshot.reader is None else snapshot.reader.kind,
        manifest.version,
        len(manifest.leaves),
        size,
        meshes,
        manifest.finite,
    )


def layouts(path: Saved) -> dict[str, Any]:
    """The layouts under which the leaves were written, as nested dicts by path; no tensor data is read."""
    manifest = snapshot_of(path).manifest
    nested: dict[str, Any] = {}
    for name, leaf in manifest.leaves.items():
        *above, last = name.split("/")
        at = nested
        for key in above:
            at = at.setdefault(key, {})
            if type(at) is not dict:  # names of foreign sources may do that
                raise CheckpointError(f"{name[:200]}: got a leaf on the way to it, wanted a dict; restore it by rules")
        at[last] = layout_from_json(leaf, manifest.meshes)
    return nested


def metadata(path: Saved) -> dict[str, Any]:
    """The user's metadata that was saved with a checkpoint."""
    return own_metadata(snapshot_of(path).manifest.metadata)
