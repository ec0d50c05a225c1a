"""Save: a traversal that emits (layout, local shard) of every leaf to zarr3 arrays; the commit is all or nothing.

    a place for the files -> agree -> every rank writes its chunks -> agree -> and looks whether its state is still
    what it wrote -> agree -> rank 0 merges the parts -> fsync -> marker -> the new one takes the name in one step

No tensor and no object is communicated: the ranks agree four times whether all went well so far, and rank 0 sends the
name of the place.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch

from fmegatron import tree
from fmegatron.checkpoint.calls.arguments import are_saved, check_words, flat_layouts, ranks_of
from fmegatron.checkpoint.calls.ranks import Ranks, jointly
from fmegatron.checkpoint.dicts.described import described
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.format import piece_name
from fmegatron.checkpoint.files.parse import MOST_DEPTH, MOST_PATH
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.writing.part import Part, complete, merge
from fmegatron.checkpoint.writing.plan import LeafPlan, grid_array, plan
from fmegatron.checkpoint.writing.unchanged import Live, require_unchanged
from fmegatron.checkpoint.writing.write import files_to_write, write_part
from fmegatron.layout import Layout
from fmegatron.tree import checks, structure


def save(
    path: str | os.PathLike | Store,
    state: structure.Tree,
    layouts: structure.Tree = None,
    world: Ranks | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    finite: bool | None = None,
) -> None:
    """Write a checkpoint to a directory, URL or Store; durable and complete when this returns, on all ranks.

    An existing checkpoint at `path` stays complete until the new one takes its place.

    Args:
        path: where to save.
        state: tree of this rank's local tensors, any device. Without layouts any nesting of dicts, lists and tuples of
            tensors, numpy arrays, numbers, strings, None, bytes and dtypes, such as the state dicts of modules.
        layouts: the same tree of Layouts (or ArraySpecs: what is not `saved` is left out); None on one process that
            holds the full state.
        world: the ranks that call this together, with one file system or object store; None for one process.
        metadata: JSON values.
        step: whole number.
        finite: whether loss and gradient norm of this step are finite; None if that is not known. It is stored
            (`describe(path).finite`); one rank that passes False decides for all.

    Raises:
        ValueError: state and layouts disagree, a leaf cannot be stored, several ranks save without layouts, or the
            metadata is not JSON; then nothing is written.
        RuntimeError: on every rank and with the first failing rank's message, when anything fails later (a full disk,
            a leaf that another thread changes meanwhile). Then nothing is left behind and earlier checkpoints are
            untouched.

    >>> import tempfile
    >>> from fmegatron.layout import Layout, Mesh
    >>> state = {"w": torch.arange(6.0).view(2, 3)}
    >>> layouts = {"w": Layout((2, 3), torch.float32, Mesh())}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder + "/first", state, layouts, metadata={"note": "hello"})
    ...     save(folder + "/second", {"epoch": 3, "w": torch.ones(2)})
    ...     sorted(os.listdir(folder))
    ['first', 'second']
    """
    given, world = world, ranks_of(world)
    lead, what, begun = world.rank == 0, f"saving the checkpoint {getattr(path, 'text', path)}", None
    try:
        with jointly(world, what):
            store = open_store(path)
            state, layouts, metadata = described(state, layouts, given, metadata)
            tensors, plans = check_request(state, layouts, world, metadata, step, finite)
            check_names(store, plans, world.size)
            if lead:
                begun = store.begin()
            live = Live.of(files_to_write(plans, tensors, world.rank), [plan.path for plan in plans], tensors)
        said, root = agreed(finite, world), world.broadcast_text(begun.root if begun else "")
        storage = begun or store.draft(root)
        with jointly(world, what):
            part = write_part(storage, plans, tensors, world.rank, live=live)
            if not lead:
                part.store(storage)
        with jointly(world, what):  # what was written is the state of the moment at which all ranks come here
            require_unchanged(live)
        with jointly(world, what):
            if lead:
                parts = itertools.chain([part], (Part.load(storage, rank) for rank in range(1, world.size)))
                manifest, digests = merge(plans, parts, step, metadata or {}, said)
                store.publish(storage, complete(storage, manifest, digests))
    finally:
        if begun:
            store.end(begun)


def check_request(
    state: Any, layouts: Any, world: Ranks, metadata: Any, step: Any = None, finite: Any = None
) -> tuple[list[torch.Tensor], tuple[LeafPlan, ...]]:
    """The leaves and their plan, or ValueError."""
    paths, leaves, _ = flat_layouts(layouts)
    check_layouts(paths, leaves, world.size)
    tree.check(state, layouts, world.rank, "the state", "the layouts")
    check_words(metadata, step, finite)
    held = are_saved(layouts)
    return list(compress(tree.leaves(state), held)), plan(list(compress(paths, held)), list(compress(leaves, held)))


def check_names(store: Store, plans: Sequence[LeafPlan], size: int) -> None:
    """Raise ValueError for a leaf whose files would have longer names than the place takes."""
    most_part, most = store.limits()
    for p in plans:
        # Quoting makes 3 bytes of one: most paths are so short that this cannot matter.
        if p.home not in ("grid", "piece") or (p.path.isascii() and 3 * len(p.path) + 64 < min(most_part, most)):
            continue
        name = grid_array(p).name if p.home == "grid" else piece_name(p.path, size - 1)
        part, whole = (
            max(map(len, name.split("/"))),
            len(name) + len(f"/c{'.' + '9' * 12}") * max(1, len(p.at) + len(p.chunk)),
        )
        if part > most_part or whole > most:
            got = f"a key of {part} bytes" if part > most_part else f"a path of {whole} bytes"
            raise ValueError(
                f"{p.path[:60]}...: got {got} as the name of its files below {store.text}, wanted at most"
                f" {most_part if part > most_part else most}; use shorter keys"
            )


def agreed(finite: bool | None, world: Ranks) -> bool | None:
    """What the ranks report together: False if one does, else None if one does not know. All ranks call it."""
    words = (False, None, True)
    return words[int(world.minimum(torch.tensor([words.index(finite)])))]


def check_layouts(paths: list[str], leaves: list[Layout], size: int) -> None:
    """Raise ValueError for what `size` ranks cannot save together, whatever the tensors."""
    checks.require_saved_by(paths, leaves, size)
    for path in paths:
        if len(path) > MOST_PATH:
            raise ValueError(f"{path[:60]}...: got a path of {len(path)} characters, wanted at most {MOST_PATH}")
        if path.count("/") >= MOST_DEPTH:
            raise ValueError(f"{path[:60]}...: got a path of {path.count('/') + 1} parts, wanted at most {MOST_DEPTH}")
        if not path.isprintable() and any("\ud800" <= c <= "\udfff" for c in path):
            raise ValueError(f"{path!a:.80}: got half a surrogate pair in a key, wanted text; rename the key")
    known = set(paths)
    if len(known) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise ValueError(f"{twice}: got two leaves of this path (a key that contains '/'?), wanted one; rename one")
    for path in paths:
        parts = path.split("/")
        if above := next((p for i in range(1, len(parts)) if (p := "/".join(parts[:i])) in known), None):
            raise ValueError(
                f"{path}: got a path below the leaf {above}, wanted none there; rename a key that contains '/'"
            )
