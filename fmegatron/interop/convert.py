"""fmegatron checkpoints from DCP directories and back, in one process and bounded memory.

Both ways go leaf by leaf and, in a leaf, some chunks at a time; so what fits a disk can be converted on any machine.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.dicts.described import stored_values
from fmegatron.checkpoint.dicts.values import CONTAINERS, VALUES, to_json
from fmegatron.checkpoint.files.format import CHUNK_BYTES, dtype_of
from fmegatron.checkpoint.files.open_store import open_store
from fmegatron.checkpoint.files.snapshot import Saved, Snapshot, snapshot_of
from fmegatron.checkpoint.files.storage import Store
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.fetch import read_all
from fmegatron.checkpoint.writing.part import Part, complete, merge, plan_digest
from fmegatron.checkpoint.writing.plan import LeafPlan, chunks_to_write, plan
from fmegatron.checkpoint.writing.write import write_part
from fmegatron.interop.dcp_directory import Directory, check_files, open_dcp
from fmegatron.interop.dcp_read import object_of, read_tensors
from fmegatron.interop.dcp_source import NOTE, newest_step, words_of
from fmegatron.interop.dcp_write import Shard, ShardPlanner, write_dcp
from fmegatron.interop.flat import flat_items
from fmegatron.layout import Box, Layout, Mesh, row_major_strides

_GROUP_BYTES = 256 << 20  # elements in memory at a time


def dcp_to_fmegatron(
    source: str | os.PathLike, target: str | os.PathLike | Store, *, skip_objects: bool = False, step: int | None = None
) -> list[str]:
    """Write a DCP or Megatron torch_dist directory as a checkpoint of fmegatron; digested, complete or not there.

    Megatron's iteration is its step, unless another is given; of a run the newest step is taken. Plain objects become
    values (interop.load_state_dict gives them back), tensors inside them leaves. Others are a ValueError that names
    them, or left out with skip_objects; returns the paths that were left out.
    """
    directory = open_dcp(newest_step(source))
    check_files(directory, [(t.path, place) for t in directory.tensors.values() for place in t.places])
    extra, values, left = _objects(directory, skip_objects)
    known, metadata = words_of(directory)
    step = known if step is None else step
    layouts = {t.path: Layout(t.shape, t.dtype, Mesh()) for t in directory.tensors.values()}
    layouts |= {name: Layout(tuple(x.shape), x.dtype, Mesh()) for name, x in extra.items()}
    names = sorted(layouts)
    plans = plan(names, [layouts[name] for name in names])
    store = open_store(target)
    storage = store.begin()
    try:
        parts = []
        for group in _groups(plans):
            tensors = [extra.get(leaf.path) for leaf, _ in group]
            tensors, local = zip(*map(_memory, group, tensors), strict=True)
            requests = {
                leaf.path: [Target(leaf.path, box, place.view(x), leaf.layout.dtype) for box, place in places]
                for (leaf, _), x, places in zip(group, tensors, local, strict=True)
                if leaf.path not in extra
            }
            read_tensors(directory, requests, verify=True)
            chunks = [
                None if todo is None else [(index, place) for (index, _), (_, place) in zip(todo, places, strict=True)]
                for (_, todo), places in zip(group, local, strict=True)
            ]
            part = write_part(storage, [leaf for leaf, _ in group], tensors, 0, chunks)
            part.plan = plan_digest(plans)
            parts.append(part)
        manifest, digests = merge(plans, parts or [Part(0, plan_digest(plans))], step, {**metadata, VALUES: values})
        store.publish(storage, complete(storage, manifest, digests))
    finally:
        store.end(storage)
    return left


def fmegatron_to_dcp(source: Saved, target: str | os.PathLike) -> None:
    """Write a checkpoint of fmegatron as a new DCP directory, which torch.distributed.checkpoint.load reads.

    Values (saved by interop.save_state_dict) become objects; step and metadata the object "fmegatron".
    """
    snapshot = snapshot_of(source)
    manifest = snapshot.manifest
    values = stored_values(manifest.metadata, snapshot.text)
    own = {key: value for key, value in manifest.metadata.items() if key not in (VALUES, CONTAINERS)}
    if manifest.step is not None or own:
        values[NOTE] = {"step": manifest.step, "metadata": own}
    shards = []
    for leaf in manifest.leaves.values():
        layout = Layout(leaf.shape, dtype_of(leaf.dtype), Mesh())
        chunk = manifest.arrays[leaf.array].chunk if leaf.array is not None else leaf.shape
        shards += [Shard(leaf.path, layout, box) for box in _boxes(leaf.shape, chunk, layout.dtype.itemsize)]
    write_dcp(target, ShardPlanner(shards, lambda shard: _read(snapshot, shard), values, True), alone=True)


def _read(snapshot: Snapshot, shard: Shard) -> torch.Tensor:
    x = torch.empty(shard.box.shape, dtype=shard.layout.dtype)
    if x.numel():
        wanted = [Target(shard.path, shard.box, x, x.dtype)]
        read_all(snapshot, [(snapshot.manifest.leaves[shard.path], wanted)], verify=True)
    return x


def _boxes(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """The shards of a leaf in a DCP directory: one if it is of moderate size, else as many chunks as make it so."""
    if 0 in shape or math.prod(shape) * itemsize <= 4 * CHUNK_BYTES:
        yield Box((0,) * len(shape), shape, 0, row_major_strides(shape))
        return
    for start in itertools.product(*(range(0, n, c) for n, c in zip(shape, chunk, strict=True))):
        size = tuple(min(c, n - a) for a, c, n in zip(start, chunk, shape, strict=True))
        yield Box(start, size, 0, row_major_strides(size))


Group = list[tuple[LeafPlan, list[tuple[tuple[int, ...], Box]] | None]]


def _groups(plans: tuple[LeafPlan, ...]) -> Iterator[Group]:
    """All leaves, some chunks of the large ones at a time; the small ones, which share a file, together."""
    group: Group = [(leaf, None) for leaf in plans if leaf.home != "grid"]
    size = sum(leaf.layout.nbytes for leaf, _ in group)
    for leaf in plans:
        chunks = chunks_to_write(leaf, 0) if leaf.home == "grid" else []
        width = math.prod(leaf.chunk) * leaf.layout.dtype.itemsize
        while chunks:
            count = max(1, (_GROUP_BYTES - size) // width)
            group.append((leaf, chunks[:count]))
            size, chunks = size + min(count, len(chunks)) * width, chunks[count:]
            if size >= _GROUP_BYTES or chunks:
                yield group
                group, size = [], 0
    if group:
        yield group


def _memory(entry: Any, given: torch.Tensor | None) -> tuple[torch.Tensor, list[tuple[Box, Box]]]:
    """Memory for what is written now, and for every box of it (where in the leaf, where in that memory)."""
    leaf, chunks = entry
    if given is not None and chunks is None:
        return given.contiguous(), []
    if chunks is None:
        boxes = leaf.layout.boxes(0)
        return torch.empty(leaf.layout.shape, dtype=leaf.layout.dtype), [(box, box) for box in boxes]
    places, at = [], 0
    for _, box in chunks:
        places.append((box, Box(box.start, box.shape, at, row_major_strides(box.shape))))
        at += box.size
    x = torch.empty(at, dtype=leaf.layout.dtype)
    if given is not None:
        for box, place in places:
            place.view(x).copy_(given[box.slices])
    return x, places


def _objects(directory: Directory, skip: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[str]]:
    """Tensors inside objects, values as JSON (by path), and the objects that were left out."""
    tensors, values, left = {}, {}, []
    for name in directory.objects.keys() - {NOTE}:
        try:
            value = object_of(directory, name)
            found = {path: item for path, (_, item) in flat_items({name: value}).items()}
            plain = {path: to_json(item, path) for path, item in found.items() if not torch.is_tensor(item)}
        except ValueError as error:
            if isinstance(error, CheckpointError) and not skip:
                raise
            if not skip:
                raise ValueError(
                    f"{name}: got what cannot be converted ({error}), wanted plain data; pass --skip-objects to leave "
                    "it out"
                ) from None
            left.append(name)
            continue
        tensors |= {path: item for path, item in found.items() if torch.is_tensor(item)}
        values |= plain
    return tensors, dict(sorted(values.items())), sorted(left)
