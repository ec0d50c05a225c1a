"""The description of a checkpoint without its elements: tree, layouts, metadata, sizes, meshes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fmegatron.checkpoint.dicts.values import own_metadata
from fmegatron.checkpoint.files.format import CheckpointError
from fmegatron.checkpoint.files.manifest import mesh_from_json
from fmegatron.checkpoint.reading.snapshot import Saved, snapshot_of
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
    source = snapshot_of(path)
    size = sum(leaf.nbytes for leaf in source.leaves.values())
    meshes = tuple(map(mesh_from_json, source.meshes))
    return Description(
        source.text,
        source.step,
        own_metadata(source.metadata),
        source.kind,
        source.version,
        len(source.leaves),
        size,
        meshes,
        source.finite,
    )


def layouts(path: Saved) -> dict[str, Any]:
    """The layouts under which the leaves were written, as nested dicts by path; no tensor data is read."""
    source = snapshot_of(path)
    nested: dict[str, Any] = {}
    for name in source.leaves:
        *above, last = name.split("/")
        at = nested
        for key in above:
            at = at.setdefault(key, {})
            if type(at) is not dict:  # names of foreign sources may do that
                raise CheckpointError(f"{name[:200]}: got a leaf on the way to it, wanted a dict; restore it by rules")
        at[last] = source.layout_of(name)
    return nested


def metadata(path: Saved) -> dict[str, Any]:
    """The user's metadata that was saved with a checkpoint."""
    return own_metadata(snapshot_of(path).metadata)
