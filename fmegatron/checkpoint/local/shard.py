"""Shards: what one rank holds of a state, as a checkpoint of its own; run, rank and global layouts are in its metadata.

The leaves are the rank's local tensors, each in the layout of a single process. The metadata is
`{"metadata": {...}, "replica": {...}}`: the user's, and `Content.about` of the shard. `replica["shards"]` has
an id for the shard of every rank: the digest of its manifest (of elements, step, rank, layouts) without these ids. The
digest of the ids names the set: shards of one set were saved together, whatever their directories are called, and the
same state gives the same set each time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.format import CHUNK_BYTES, CheckpointError, Manifest, StoredLeaf, digest
from fmegatron.checkpoint.files.leases import STEP, step_name
from fmegatron.checkpoint.files.manifest import layout_from_json, layout_to_json, manifest_to_json, to_json_text
from fmegatron.checkpoint.files.saved import Save, save_at
from fmegatron.checkpoint.writing.plan import LeafPlan, homes, in_files, split_chunk
from fmegatron.layout import Layout, Mesh

_NAME = re.compile(rf"({STEP.pattern})\.rank_(\d{{5,9}})\.([0-9a-f]{{16}})")
_ABOUT = (("run", str), ("rank", int), ("world", int), ("meshes", list), ("layouts", dict), ("shards", list))
_CHUNK_BYTES = 2 * CHUNK_BYTES  # the largest chunk of a shard: one is held for each of a clique, whatever the portions

Key = tuple[int, int, int]  # step, set (or, in names, save), rank


def shard_name(step: int, rank: int, save_id: int) -> str:
    """The name of a shard: the ranks give each save a number, as its set is not known before all is written.

    >>> shard_name(100, 3, 0xABC), parse_name("step_00000100.rank_00003.0000000000000abc")
    ('step_00000100.rank_00003.0000000000000abc', (100, 2748, 3))
    """
    return f"{step_name(step)}.rank_{rank:05d}.{save_id:016x}"


def parse_name(name: str) -> Key | None:
    """(step, save, rank) of a name, None for one that `shard_name` does not make."""
    m = _NAME.fullmatch(name)
    key = (int(m[2]), int(m[4], 16), int(m[3])) if m else None
    return key if key and shard_name(key[0], key[2], key[1]) == name else None


@dataclass(frozen=True)
class Content:
    """What all ranks save together, except the elements. world: number of ranks."""

    run: str
    step: int
    world: int
    paths: Sequence[str]
    layouts: Sequence[Layout]
    metadata: dict[str, Any]
    finite: bool | None

    @cached_property
    def rows(self) -> dict[str, Any]:
        """Global shapes and layouts, as the JSON has them."""
        return layout_rows(self.paths, self.layouts)

    def plan(self, rank: int) -> tuple[LeafPlan, ...]:
        """How the shard of a rank is stored."""
        return shard_plan(self.paths, self.layouts, rank)

    def about(self, rank: int) -> dict[str, Any]:
        """The metadata of the shard of a rank, without ids."""
        replica = {"run": self.run, "rank": rank, "world": self.world, **self.rows, "shards": []}
        return {"metadata": self.metadata, "replica": replica}


def shard_plan(paths: Sequence[str], layouts: Sequence[Layout], rank: int) -> tuple[LeafPlan, ...]:
    """The plan of a shard: local tensors of one process, in files of bounded size, as they are sent one by one."""
    plans = homes(paths, [Layout(x.local_shape(rank), x.dtype, Mesh()) for x in layouts])
    small = [replace(p, chunk=split_chunk(p.chunk, p.layout.dtype.itemsize, _CHUNK_BYTES)) for p in plans]
    return in_files(small, most=_CHUNK_BYTES)


def layout_rows(paths: Sequence[str], layouts: Sequence[Layout]) -> dict[str, Any]:
    """Global shapes and layouts by path, and the meshes that they refer to, as JSON."""
    meshes: list[Mesh] = []
    rows = {p: [x.shape, layout_to_json(x, meshes)] for p, x in zip(paths, layouts, strict=True)}
    return json.loads(to_json_text({"meshes": [mesh.to_json() for mesh in meshes], "layouts": rows}))


def digest_rows(rows: dict[str, Any]) -> int:
    """63 bits that differ where `layout_rows` do."""
    return digest(to_json_text(rows).encode()) >> 1


def content_id(manifest: Manifest) -> int:
    """What names a shard's content: elements, metadata, step, rank and layouts."""
    replica = {**manifest.metadata["replica"], "shards": []}
    return digest(manifest_to_json(replace(manifest, metadata={**manifest.metadata, "replica": replica})))


def set_id(ids: Sequence[int]) -> int:
    """What names the shards of all ranks together."""
    return digest(np.array(ids, "<u8").tobytes())


def with_ids(manifest: Manifest, ids: Sequence[int]) -> Manifest:
    """The manifest of a shard with the ids of the shards of all ranks."""
    replica = {**manifest.metadata["replica"], "shards": [f"{one:016x}" for one in ids]}
    return replace(manifest, metadata={**manifest.metadata, "replica": replica})


@dataclass(frozen=True)
class Shard:
    """A shard that is stored. Its manifest is checked; elements are verified when they are read. set: its id."""

    save: Save
    set: int

    @property
    def text(self) -> str:
        """Its directory, for messages."""
        return self.save.storage.text

    @property
    def key(self) -> Key:
        """(step, set, rank)."""
        step = self.save.manifest.step
        assert step is not None, "`open_shard` has checked it"
        return step, self.set, self.about["rank"]

    @property
    def about(self) -> dict[str, Any]:
        """Run, rank, world and global layouts."""
        return self.save.manifest.metadata["replica"]

    @property
    def metadata(self) -> dict[str, Any]:
        """The user's."""
        return self.save.manifest.metadata["metadata"]

    def description(self) -> str:
        """Of its set, the same in all shards: dtypes, global shapes, layouts, the user's metadata; for `described`."""
        dtypes = {path: leaf.dtype for path, leaf in self.save.manifest.leaves.items()}
        return to_json_text([dtypes, {key: self.about[key] for key in ("meshes", "layouts")}, self.metadata])


def described(description: str, world: int) -> tuple[dict[str, Layout], dict[str, Any], dict[str, Any]]:
    """(layouts by path, `layout_rows`, the user's metadata) of a set of so many ranks. Raises CheckpointError."""
    dtypes, rows, user = json.loads(description)
    made: dict[tuple[str, str], Layout] = {}  # thousands of leaves share a few
    found = {}
    for path, (shape, layout) in rows["layouts"].items():
        if (key := (to_json_text([shape, layout]), dtypes[path])) not in made:
            made[key] = layout_from_json(StoredLeaf(path, tuple(shape), dtypes[path], layout), rows["meshes"])
            if made[key].mesh.size != world:
                raise CheckpointError(f"{path[:200]}: got {made[key].mesh}, wanted the mesh of {world} ranks")
        found[path] = made[key]
    return found, rows, user


def open_shard(store: Store) -> Shard:
    """The shard at a place; all but the elements is checked. Raises CheckpointError."""
    save = save_at(store)
    manifest, at = save.manifest, save.storage.text
    about, user = manifest.metadata.get("replica"), manifest.metadata.get("metadata")
    if not isinstance(about, dict) or not isinstance(user, dict):
        raise CheckpointError(f"{at}: got a checkpoint of another kind, wanted a shard of local replicas")
    for key, kind in _ABOUT:
        if type(about.get(key)) is not kind:
            raise CheckpointError(f"{at}: {key}: got {about.get(key)!r:.60}, wanted {kind.__name__}")
    rank, world, texts = about["rank"], about["world"], about["shards"]
    if not 0 <= rank < world or manifest.step is None or not 0 <= manifest.step < 1 << 62:
        got = f"rank {rank!r:.20} of {world!r:.20}, step {manifest.step!r:.20}"
        raise CheckpointError(f"{at}: got {got}, wanted a rank below the number of ranks, and a step of 0 or more")
    if len(texts) != world or not all(isinstance(x, str) and re.fullmatch("[0-9a-f]{16}", x) for x in texts):
        raise CheckpointError(f"{at}: shards: got {texts!r:.60}, wanted the ids of {world} shards")
    if about["layouts"].keys() != manifest.leaves.keys() or not all(map(_is_row, about["layouts"].values())):
        raise CheckpointError(f"{at}: got layouts of other leaves than it holds, wanted those of its leaves")
    ids = [int(text, 16) for text in texts]
    try:
        own = content_id(manifest)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{at}: its manifest cannot be that of a save ({str(error)[:200]})") from None
    if own != ids[rank]:
        raise CheckpointError(f"{at}: its metadata or its digests were altered after the save")
    return Shard(save, set_id(ids))


def _is_row(row: Any) -> bool:
    """Whether this is [global shape, layout]; what is in the layout is looked at when it is used."""
    if type(row) is not list or [type(x) for x in row] != [list, dict]:
        return False
    return all(type(n) is int and 0 <= n < 1 << 62 for n in row[0])
