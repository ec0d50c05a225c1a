"""Save: a traversal that emits (layout, local shard) of every leaf to zarr3 arrays; the commit is all or nothing.

    hidden place for the files -> every rank writes its chunks -> agree -> rank 0 merges the parts -> fsync -> marker
    -> the new one takes the name in one step

No tensor and no object is communicated: the ranks agree three times whether all went well so far, and rank 0 tells the
name of the hidden place.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import torch

from fmegatron import tree
from fmegatron.checkpoint.parse import MOST_PATH, MOST_STEP
from fmegatron.checkpoint.part import Part, complete, merge
from fmegatron.checkpoint.plan import LeafPlan, plan
from fmegatron.checkpoint.ranks import Alone, Ranks, together
from fmegatron.checkpoint.request import flat_layouts
from fmegatron.checkpoint.storage import Store, open_store
from fmegatron.checkpoint.write import write_part
from fmegatron.layout import Layout


def save(
    path: str | os.PathLike | Store,
    state: Any,
    layouts: Any,
    world: Ranks | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    step: int | None = None,
) -> None:
    """Write a checkpoint to a directory, URL or Store; durable and complete when this returns, on all ranks.

    state: tree of this rank's local tensors, any device.  layouts: the same tree of Layouts (or ArraySpecs).
    world: the ranks that call this together, with one file system or object store; None for one process.
    metadata: JSON values.
    An existing checkpoint at `path` stays complete until the new one takes its place.

    Raises ValueError when state and layouts disagree or the metadata is not JSON (then nothing is written);
    RuntimeError, on every rank and with the first failing rank's message, when anything fails later (full disk). Then
    nothing is left behind and earlier checkpoints are untouched.

    >>> import tempfile
    >>> from fmegatron.layout import Layout, Mesh
    >>> state = {"w": torch.arange(6.0).view(2, 3)}
    >>> layouts = {"w": Layout((2, 3), torch.float32, Mesh())}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder + "/first", state, layouts, metadata={"note": "hello"})
    ...     os.listdir(folder)
    ['first']
    """
    world = world or Alone()
    lead, what, store, begun = world.rank == 0, f"saving the checkpoint {getattr(path, 'text', path)}", None, None

    def prepare():
        nonlocal store, begun
        store = open_store(path)
        tensors, plans = check_request(state, layouts, world, metadata, step)
        if lead:
            begun = store.begin()
        return tensors, plans

    def write():
        part = write_part(storage, plans, tensors, world.rank)
        if not lead:
            part.store(storage)
        return part

    def finish():
        if lead:
            parts = itertools.chain([part], (Part.load(storage, rank) for rank in range(1, world.size)))
            manifest, digests = merge(plans, parts, step, metadata or {})
            store.publish(storage, complete(storage, manifest, digests))

    try:
        tensors, plans = together(world, what, prepare)
        root = world.broadcast_text(begun.root if begun else "")
        storage = begun or store.draft(root)
        part = together(world, what, write)
        together(world, what, finish)
    finally:
        if begun:
            store.end(begun)


def check_request(
    state: Any, layouts: Any, world: Ranks, metadata: Any, step: Any = None
) -> tuple[list[torch.Tensor], tuple[LeafPlan, ...]]:
    """The leaves and their plan, or ValueError."""
    paths, leaves, _ = flat_layouts(layouts)
    check_layouts(paths, leaves, world.size)
    tree.check(state, layouts, world.rank)
    check_words(metadata, step)
    return tree.leaves(state), plan(paths, leaves)


def check_layouts(paths: list[str], leaves: list[Layout], size: int) -> None:
    """Raise ValueError for what `size` ranks cannot save together, whatever the tensors."""
    for path, layout in zip(paths, leaves, strict=True):
        if layout.mesh.size != size:
            raise ValueError(
                f"{path}: got a layout on {layout.mesh} ({layout.mesh.size} ranks), but {size} save together;"
                " pass world= of the ranks that hold the state, or layouts on their mesh"
            )
        if layout.unreduced:
            raise ValueError(
                f"{path}: got pending sums over {layout.unreduced}, wanted a value; reduce it before the save"
            )
    for path in paths:
        if len(path) > MOST_PATH:
            raise ValueError(f"{path[:60]}...: got a path of {len(path)} characters, wanted at most {MOST_PATH}")
        if not path.isprintable() and any("\ud800" <= c <= "\udfff" for c in path):
            raise ValueError(f"{path!a:.80}: got half a surrogate pair in a key, wanted text; rename the key")
    known = set(paths)
    if len(known) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise ValueError(f"{twice}: two leaves have this path (a key that contains '/'?); rename one")
    for path in paths:
        parts = path.split("/")
        if above := next((p for i in range(1, len(parts)) if (p := "/".join(parts[:i])) in known), None):
            raise ValueError(f"{path}: {above} is a leaf, so nothing can lie below it; rename a key that contains '/'")


def check_words(metadata: Any, step: Any) -> None:
    """Raise ValueError for metadata or a step that no reader would take back."""
    if step is not None and (type(step) is not int or abs(step) >= MOST_STEP):
        raise ValueError(f"step: got {step!r:.60} ({type(step).__name__}), wanted a whole number; pass int(state.step)")
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(f"metadata: got {metadata!r:.60}, wanted a dict of JSON values; pass {{'note': ...}}")
    check_json(metadata or {}, "metadata")


def check_json(value: Any, where: str) -> None:
    """Raise ValueError, naming the place, for what is not a JSON value."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: got the key {key!r}, wanted a string, as JSON has it; write str({key!r})")
            check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_json(item, f"{where}[{i}]")
    elif not (
        value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    ):
        raise ValueError(
            f"{where}: got {value!r:.80} ({type(value).__name__}), wanted a JSON value; pass numbers (finite), strings,"
            " lists and dicts, and tensors as leaves of the state"
        )
