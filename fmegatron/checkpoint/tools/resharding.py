"""reshard: a checkpoint written anew under other layouts, by one process and in bounded memory.

The target layouts are the stored ones on other meshes, or by rules, or those of another checkpoint. What the ranks of
the target mesh would save, one process reads and writes here with the same functions, some chunks at a time.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.format import SHARD_BYTES, CheckpointError, Leaf, StoredLeaf
from fmegatron.checkpoint.files.manifest import layout_from_json
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.rounds import in_rounds
from fmegatron.checkpoint.reading.source import Source
from fmegatron.checkpoint.tools.ls import stored_bytes
from fmegatron.checkpoint.writing.part import Part, complete, merge, plan_digest
from fmegatron.checkpoint.writing.plan import LeafPlan, chunk_shape, cut_unit, grid_array, homes, in_files, split_chunk
from fmegatron.checkpoint.writing.write import write_part
from fmegatron.layout import Box, Layout, Mesh, Rules, Split
from fmegatron.layout.boxes import row_major_strides
from fmegatron.tree import structure

BOUND_BYTES = 256 << 20  # of elements in memory at a time
_MOST_RANKS = 1 << 20  # the ranks that write a leaf are listed one by one


@dataclass(frozen=True)
class Resharded:
    """What was written: where, how many files and bytes of chunks, and how many leaves."""

    path: str
    files: int
    nbytes: int
    leaves: int


def reshard(
    source: Source,
    path: str | os.PathLike | Store,
    plans: Sequence[LeafPlan],
    *,
    bound: int = BOUND_BYTES,
    overwrite: bool = False,
) -> Resharded:
    """Write the elements of a checkpoint anew at `path`, as a save under another plan would; step and metadata stay.

    Args:
        source: the checkpoint; all that is read of it is verified.
        path: a directory, URL or Store; the new checkpoint is complete and durable on return.
        plans: of all leaves of the source (see `plan_of`).
        bound: bytes of elements in memory at a time, or one chunk, or the small leaves that one rank packs together.
        overwrite: replace the checkpoint at `path`.

    Raises ValueError when there is something at `path` (a checkpoint, unless `overwrite`), CheckpointError for damage
    in the source, OSError. Then nothing is left of the new one.
    """
    store = open_store(path)
    if store.is_complete() and not overwrite:
        raise ValueError(
            f"{store.text}: got the path of a checkpoint, wanted a new one; choose another path, or pass --overwrite"
        )
    storage, plan_id = None, plan_digest(plans)
    parts = {0: Part(0, plan_id)}
    try:
        storage = store.begin()
        for rank, leaves in _packed(plans).items():
            tensors = _read_local(source, leaves, rank)
            parts.setdefault(rank, Part(rank, plan_id)).add(write_part(storage, leaves, tensors, rank))
        for group in in_rounds(_files(plans), bound):
            parts[0].add(_write_files(source, storage, group))
        merged = merge(plans, parts.values(), source.step, dict(source.metadata), source.finite)
        store.publish(storage, complete(storage, *merged))
    finally:
        store.end(storage)
    arrays = merged[0].arrays.values()
    return Resharded(store.text, sum(math.prod(a.grid) for a in arrays), stored_bytes(merged[0]), len(plans))


def rewrite(source: Source, path: str | os.PathLike | Store, bound: int = BOUND_BYTES) -> Resharded:
    """Write a source of any kind as a checkpoint of ours, as one process would save it; in bounded memory.

    What is at `path` is replaced. bound: as of `reshard`. Raises as `reshard`.
    """
    layouts = {name: Layout(leaf.shape, leaf.torch_dtype, Mesh()) for name, leaf in source.leaves.items()}
    return reshard(source, path, plan_of(layouts, bound=bound), bound=bound, overwrite=True)


@dataclass(frozen=True)
class _File:
    """What is in a file of an array: (leaf, index of a chunk in its grid, start and shape of what the chunk holds)."""

    chunks: list[tuple[LeafPlan, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * leaf.layout.dtype.itemsize for leaf, _, _, shape in self.chunks)


def _files(plans: Sequence[LeafPlan]) -> Iterator[_File]:
    """The files of all arrays in global shape, row-major."""
    arrays: dict[str, dict[tuple[int, ...], LeafPlan]] = {}
    for p in plans:
        if p.home == "grid":
            arrays.setdefault(grid_array(p).name, {})[p.at] = p
    for leaves in arrays.values():
        at, p = next(iter(leaves.items()))
        a, skip = grid_array(p), len(at)
        for file in itertools.product(*map(range, a.file_grid)):
            chunks = []
            for index in itertools.product(*a.file_chunks(file)):
                leaf, index = leaves[index[:skip]], index[skip:]
                start = tuple(i * c for i, c in zip(index, leaf.chunk, strict=True))
                shape = tuple(min(c, n - a) for a, c, n in zip(start, leaf.chunk, leaf.layout.shape, strict=True))
                chunks.append((leaf, index, start, shape))
            yield _File(chunks)


def _write_files(source: Source, storage: Storage, group: Sequence[_File]) -> Part:
    """Read the chunks of some files, of each leaf one after another in a tensor of its own, and write them."""
    found: dict[str, tuple[LeafPlan, list]] = {}
    for file in group:
        for leaf, *chunk in file.chunks:
            found.setdefault(leaf.path, (leaf, []))[1].append(chunk)
    tensors, places, wanted = [], [], {}
    for p, chunks in found.values():
        x, at = torch.empty(sum(math.prod(shape) for _, _, shape in chunks), dtype=p.layout.dtype), 0
        boxes = []
        for index, start, shape in chunks:
            boxes.append((index, Box(start, shape, at, row_major_strides(shape))))
            at += math.prod(shape)
        tensors, places = [*tensors, x], [*places, boxes]
        wanted[p.path] = [Target(p.path, box, box.view(x), x.dtype) for _, box in boxes]
    source.fill(wanted)
    return write_part(storage, [p for p, _ in found.values()], tensors, 0, places)


def _packed(plans: Sequence[LeafPlan]) -> dict[int, list[LeafPlan]]:
    """By rank the small leaves that it writes into one file: of each shard that holds something, one replica does."""
    found: dict[int, list[LeafPlan]] = {}
    for p in plans:
        if p.home == "packed":
            shards = itertools.product(*(range(n) for n in p.layout.shard_counts))
            for rank in {p.layout.rank_of(s, p.turn % p.layout.replicas) for s in shards if p.layout.shard_boxes(s)}:
                found.setdefault(rank, []).append(p)
    return found


def _read_local(source: Source, leaves: Sequence[LeafPlan], rank: int) -> list[torch.Tensor]:
    """The local tensors of a rank."""
    tensors = [torch.empty(p.layout.local_shape(rank), dtype=p.layout.dtype) for p in leaves]
    source.fill(
        {
            p.path: [Target(p.path, box, box.view(x), x.dtype) for box in p.layout.boxes(rank)]
            for p, x in zip(leaves, tensors, strict=True)
        }
    )
    return tensors


# ---- the target


@dataclass(frozen=True)
class LayoutRule:
    """How leaves whose path matches are split: per dim what a layout's JSON has (see FORMAT.md), and flat axes."""

    pattern: str
    spec: tuple[Any, ...]
    flat: tuple[str, ...] = ()


def parse_mesh(text: str) -> Mesh:
    """`dp=2,fsdp=4` as a Mesh; "1" or an empty text is a mesh of one rank. Raises ValueError."""
    if text in ("", "1"):
        return Mesh()
    axes: dict[str, int] = {}
    for part in text.split(","):
        m = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,9})\s*", part)
        if m is None or m[1] in axes:
            raise ValueError(f"got the mesh {text!r}, wanted axes with sizes, each once, e.g. fsdp=4,tp=2")
        axes[m[1]] = int(m[2])
    return Mesh(**axes)


def parse_rules(text: str, where: str) -> tuple[LayoutRule, ...]:
    """Rules of a JSON list of [pattern, spec] or [pattern, spec, flat] rows. Raises ValueError.

    >>> parse_rules('[["wo", [null, ["fsdp", "dp"]]], [".*", []]]', "rules.json")[0]
    LayoutRule(pattern='wo', spec=(None, ['fsdp', 'dp']), flat=())
    """
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: got no JSON ({error}), wanted a list of [pattern, spec] rows") from None
    rules = []
    for row in rows if isinstance(rows, list) else [rows]:
        fits = isinstance(row, list) and len(row) in (2, 3) and isinstance(row[0], str)
        if not fits or not all(isinstance(part, list) for part in row[1:]):
            raise ValueError(f'{where}: got {row!r:.80}, wanted [pattern, spec] such as ["attention/wo", ["tp", null]]')
        rules.append(LayoutRule(row[0], tuple(row[1]), tuple(row[2]) if len(row) == 3 else ()))
    return tuple(rules)


def parse_chunks(texts: Sequence[str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """`PATTERN=256x1024` as (pattern, chunk shape). Raises ValueError."""
    rows = []
    for text in texts:
        pattern, _, shape = text.rpartition("=")
        if not pattern or not re.fullmatch(r"\d{1,15}(x\d{1,15})*", shape) or "0" in shape.split("x"):
            raise ValueError(f"got the chunks {text!r}, wanted PATTERN=SHAPE, e.g. blocks/.*=1x256x1024")
        rows.append((pattern, tuple(map(int, shape.split("x")))))
    return tuple(rows)


def target_layouts(
    source: Source,
    meshes: Sequence[Mesh] = (),
    rules: Sequence[LayoutRule] = (),
    like: Source | None = None,
) -> dict[str, Layout]:
    """By path the layout to rewrite to. Raises ValueError naming the path that does not fit.

    meshes: views of the same ranks; a leaf goes to the first that has all axes which split it, else to the first one,
    where it is no longer split over the axes that the mesh lacks.  rules: the first that matches decides instead of the
    stored layout.  like: a checkpoint of the same leaves, whose layouts are taken.
    """
    stored = {path: source.layout_of(path) for path in source.leaves}
    if len({mesh.size for mesh in meshes}) > 1:
        raise ValueError(
            f"got the meshes {', '.join(map(str, meshes))} of different sizes, wanted views of the same ranks"
        )
    if like is not None:
        if meshes or rules:
            raise ValueError("got the layouts of another checkpoint and a mesh or rules, wanted one of them")
        layouts = {path: _like(like, source.leaves[path]) for path in stored}
    elif rules:
        meshes = tuple(meshes) or tuple(dict.fromkeys(layout.mesh for layout in stored.values()))
        table = Rules([(rule.pattern, ()) for rule in rules])
        layouts = {p: _ruled(source.leaves[p], rules[table.row(p)], meshes) for p in stored}
    else:
        layouts = {path: _moved(layout, meshes) if meshes else layout for path, layout in stored.items()}
    sizes = {layout.mesh.size for layout in layouts.values()}
    if len(sizes) > 1:
        raise ValueError(f"got target layouts on meshes of {sorted(sizes)} ranks, wanted the same ranks for all leaves")
    if max(sizes, default=1) > _MOST_RANKS:
        raise ValueError(f"got a mesh of {max(sizes)} ranks, wanted at most {_MOST_RANKS}; give --mesh")
    return layouts


def plan_of(
    layouts: dict[str, Layout], chunks: Sequence[tuple[str, tuple[int, ...]]] = (), bound: int = BOUND_BYTES
) -> tuple[LeafPlan, ...]:
    """The plan of a save under these layouts, with every leaf in a regular grid, in files of at most `bound` bytes.

    A save stores the shards that no grid can hold as pieces; one process that writes all of a leaf does not need them.
    chunks: (pattern, shape) rules over the chunk shapes; the first that matches decides, whatever the bound.

    Raises ValueError for a chunk shape that does not fit the leaf, or crosses a cut between two ranks.
    """
    table, used = Rules([*((pattern, ()) for pattern, _ in chunks), (".*", ())]), set()
    found = []
    for p in homes(list(layouts), list(layouts.values())):
        unit = cut_unit(p.layout) if p.home == "grid" else p.layout.shape
        if p.home in ("grid", "piece"):
            shape = p.chunk or chunk_shape(p.layout.shape, unit, p.layout.dtype.itemsize)
            assert shape is not None, "uncut dims can be cut anywhere"
            p = replace(p, home="grid", chunk=split_chunk(shape, p.layout.dtype.itemsize, bound))
            row = table.row(p.path)
            if row < len(chunks):
                used.add(row)
                p = replace(p, chunk=_chunk(p, chunks[row][1], unit))
        found.append(p)
    if unused := [pattern for i, (pattern, _) in enumerate(chunks) if i not in used]:
        raise ValueError(
            f"--chunks: got the pattern {unused[0]!r}, wanted one that matches a leaf with an array of its own"
        )
    return in_files(found, _unit, min(SHARD_BYTES, bound))


def _unit(p: LeafPlan) -> tuple[int, ...]:
    """As a save has it; the full shape where no save could have these chunks."""
    unit = cut_unit(p.layout)
    fits = all(u == n or u % c == 0 for u, n, c in zip(unit, p.layout.shape, p.chunk, strict=True))
    return unit if fits else p.layout.shape


def _chunk(p: LeafPlan, wanted: tuple[int, ...], unit: tuple[int, ...]) -> tuple[int, ...]:
    """The chunk shape that was asked for, where the leaf has so many elements. unit: see `cut_unit`."""
    shape = p.layout.shape
    if len(wanted) != len(shape):
        raise ValueError(f"{p.path}: got chunks of shape {wanted}, wanted {len(shape)} dims, as its shape {shape} has")
    fitted = tuple(min(c, n) for c, n in zip(wanted, shape, strict=True))
    for dim, (c, u, n) in enumerate(zip(fitted, unit, shape, strict=True)):
        if u < n and u % c:
            raise ValueError(
                f"{p.path}: got chunks of {c} in dim {dim}, wanted a divisor of {u}: no chunk may be on two ranks of"
                f" {p.layout}"
            )
    return fitted


def _like(other: Source, leaf: Leaf) -> Layout:
    found = other.leaves.get(leaf.path)
    if found is None:
        near = structure.did_you_mean(leaf.path, list(other.leaves))
        wanted = f"a leaf that {other.text} has{near}"
        raise ValueError(
            f"{leaf.path}: got a leaf of the source only, wanted {wanted}; give --mesh and --rules instead"
        )
    if found.shape != leaf.shape:
        raise ValueError(f"{leaf.path}: got shape {leaf.shape}, wanted {found.shape} as in {other.text}; give --mesh")
    return other.layout_of(leaf.path).replace(dtype=leaf.torch_dtype)


def _ruled(leaf: Leaf, rule: LayoutRule, meshes: Sequence[Mesh]) -> Layout:
    entries = [entry.get("axes") if isinstance(entry, dict) else entry for entry in rule.spec] + [list(rule.flat)]
    axes = [name for entry in entries for name in (entry if isinstance(entry, list) else [entry]) if name is not None]
    errors = []
    # A standard axis that a mesh lacks has size 1 there, so those come first that have the axes.
    for i in sorted(range(len(meshes)), key=lambda i: sum(name not in meshes[i].names for name in axes)):
        row = {"mesh": i, "spec": list(rule.spec), "flat": list(rule.flat)}
        try:
            ruled = StoredLeaf(leaf.path, leaf.shape, leaf.dtype, row)
            return layout_from_json(ruled, tuple(mesh.to_json() for mesh in meshes))
        except CheckpointError as error:
            errors.append(str(error.__context__))
    raise ValueError(
        f"{leaf.path}: got the rule {rule.pattern!r}, wanted one that fits its shape and the meshes: {errors[0]}"
    )


def _moved(layout: Layout, meshes: Sequence[Mesh]) -> Layout:
    """A layout on the mesh that suits it best; axes that the mesh lacks split nothing any more, and of axes of another
    size the pieces that were assigned are equal shares."""
    used = {name for dim in range(len(layout.shape)) for name in layout.axes(dim)}.union(layout.flat)
    needed = {name for name in used if layout.mesh[name] > 1}
    mesh = next((m for m in meshes if all(name in m for name in needed)), meshes[0])

    def kept(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in axes if name in mesh)

    spec = []
    for dim, entry in enumerate(layout.spec):
        axes = kept(layout.axes(dim))
        if isinstance(entry, Split) and entry.assigned and mesh.extent(axes) != layout.mesh.extent(entry.names):
            entry = None  # pieces for other ranks
        spec.append(entry.over(axes) if isinstance(entry, Split) and axes else axes)
    ranges = {"flat": kept(layout.flat), "flat_from": layout.flat_from}
    return Layout(layout.shape, layout.dtype, mesh, tuple(spec), **ranges, padded=layout.padded)
