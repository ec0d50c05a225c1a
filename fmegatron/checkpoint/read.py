"""Restore: ask for target layouts, get this rank's tensors; only the bands that the rank needs are read, and verified.

Each band (at most 1 MiB) is read into a buffer that stays in the cache, digested there, and copied from there to where
it belongs: one pass over memory for reading, verifying and resharding together. Two or four threads share the chunks.
Plain positioned reads beat tensorstore's mapped ones here (warm page cache, 2 cores, digests on: 1.15 of plain readinto
against 0.65), and a file that gets shorter while it is read is an error instead of a SIGBUS.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from fmegatron import tree
from fmegatron.checkpoint.fetch import Fetch, Target
from fmegatron.checkpoint.format import Leaf, Manifest, dtype_of, dtype_text
from fmegatron.checkpoint.manifest import layout_from_json, read_manifest
from fmegatron.checkpoint.ranks import Alone, Ranks, together
from fmegatron.checkpoint.storage import Store, locate, open_store
from fmegatron.layout import Layout


def restore(
    path: str | os.PathLike | Store,
    target_layouts: Any,
    *,
    world: Ranks | None = None,
    rank: int | None = None,
    strict: str = "error",
    cast: bool = False,
    device: str | torch.device | None = None,
    verify: bool = True,
) -> Any:
    """The state at `path` as local tensors of a rank under target layouts: a tree of the structure of `target_layouts`.

    target_layouts: tree of Layouts (or ArraySpecs), on any mesh.  world: the ranks that restore together (an error on
    one is raised on all); or rank: whose tensors to return (needed when the mesh has several ranks and there is no
    world).  strict: "error": the target names exactly the stored leaves; "subset": stored leaves that the target does
    not name are left out (restore of parameters only).  cast: convert to the target's dtype where it differs.
    device: where the tensors go (default: CPU).  verify: check the digests.

    Raises CheckpointError when the checkpoint is missing, incomplete or damaged (naming leaf and file), ValueError when
    the target does not fit it. Nothing in the files is executed.
    """
    world_or_alone = world or Alone()

    def work() -> Any:
        return read_state(path, target_layouts, rank_of(target_layouts, world, rank), strict, cast, device, verify)

    return together(world_or_alone, f"restoring the checkpoint {open_store(path).text}", work)


def layouts(path: str | os.PathLike | Store) -> dict[str, Any]:
    """The layouts under which the leaves were written, as nested dicts by path; no tensor data is read."""
    manifest = read_manifest(locate(path))
    nested: dict[str, Any] = {}
    for name, leaf in manifest.leaves.items():
        *above, last = name.split("/")
        at = nested
        for key in above:
            at = at.setdefault(key, {})
        at[last] = layout_from_json(leaf, manifest.meshes)
    return nested


def metadata(path: str | os.PathLike | Store) -> dict[str, Any]:
    """The user's metadata that was saved with a checkpoint."""
    return read_manifest(locate(path)).metadata


def read_state(path, target_layouts, rank, strict="error", cast=False, device=None, verify=True) -> Any:
    """`restore` for one rank, without a word to the others."""
    if strict not in ("error", "subset"):
        raise ValueError(f"strict: got {strict!r}, wanted 'error' or 'subset'")
    storage = locate(path)
    manifest = read_manifest(storage)
    paths, targets, spec = tree.flatten(target_layouts)
    targets = [x if isinstance(x, Layout) else x.layout for x in targets]
    _check_targets(storage.text, manifest, paths, targets, strict, cast)
    tensors: list[torch.Tensor | None] = [None] * len(paths)
    leaves = [manifest.leaves[name] for name in paths]
    # Leaves with files of their own first: they are read while this thread goes through the many small ones.
    with Fetch(storage, manifest, verify) as fetch:
        for i in sorted(range(len(paths)), key=lambda i: leaves[i].array is None):
            x = tensors[i] = torch.empty(targets[i].local_shape(rank), dtype=targets[i].dtype)
            stored = dtype_of(leaves[i].dtype)
            fetch.add(leaves[i], [Target(paths[i], box, box.view(x), stored) for box in targets[i].boxes(rank)])
    if device is not None:
        for i, x in enumerate(tensors):  # one by one, so that host memory is given back on the way
            tensors[i] = x.to(device)
    return tree.unflatten(spec, tensors)


def rank_of(target_layouts: Any, world: Ranks | None, rank: int | None) -> int:
    meshes = {(x if isinstance(x, Layout) else x.layout).mesh for x in tree.leaves(target_layouts)}
    for mesh in meshes:
        if world is not None and mesh.size != world.size:
            raise ValueError(
                f"restore: got target layouts on {mesh} ({mesh.size} ranks), but {world.size} restore together;"
                f" make the layouts with a mesh of {world.size}"
            )
        if world is None and rank is None and mesh.size > 1:
            raise ValueError(f"restore: got no rank, wanted one of the {mesh.size} of {mesh}; pass world= or rank=")
    if world is not None and rank is not None and rank != world.rank:
        raise ValueError(f"restore: got rank {rank} and a world in which this is rank {world.rank}; pass one of them")
    return world.rank if world is not None else rank or 0


def _check_targets(
    root: str, manifest: Manifest, paths: list[str], targets: list[Layout], strict: str, cast: bool
) -> None:
    problems = []
    stored, asked = manifest.leaves, set(paths)
    unused = [name for name in stored if name not in asked]
    for name, layout in zip(paths, targets, strict=True):
        leaf = stored.get(name)
        if leaf is None:
            near = tree.did_you_mean(name, unused or list(stored))
            problems.append(
                f"{name}: not in the checkpoint{near}; rename it, or leave it out of the target and make it anew"
            )
        elif leaf.shape != layout.shape:
            problems.append(
                f"{name}: stored with global shape {leaf.shape}, wanted {layout.shape}; use the stored shape"
            )
        elif layout.unreduced:
            problems.append(
                f"{name}: wanted as a pending sum over {layout.unreduced}; ask for a layout without unreduced"
            )
        elif dtype_of(leaf.dtype) is not layout.dtype:
            problems += _dtype_problem(leaf, layout, cast)
    if strict == "error" and unused:
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        problems.append(f"stored but not asked for: {shown}; name them in the target, or pass strict='subset'")
    if problems:
        more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        lines = "\n".join(f"  {p}" for p in problems[:10])
        raise ValueError(f"{root} does not fit the target layouts:\n{lines}{more}")


def _dtype_problem(leaf: Leaf, layout: Layout, cast: bool) -> list[str]:
    wanted = dtype_text(layout.dtype)
    if not cast:
        return [
            f"{leaf.path}: stored as {leaf.dtype}, wanted {wanted}; pass cast=True to convert, or ask for {leaf.dtype}"
        ]
    if not torch.can_cast(dtype_of(leaf.dtype), layout.dtype):
        return [f"{leaf.path}: stored as {leaf.dtype}, wanted {wanted}, which cannot hold it; ask for {leaf.dtype}"]
    return []
