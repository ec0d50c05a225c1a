"""torch.distributed.checkpoint with our files: `dcp.save(sd, storage_writer=FmegatronWriter(path))` and back.

torch plans who writes what; we write it as a checkpoint of fmegatron: digested, complete or not there, readable by
`checkpoint.restore`, and by torch on any other mesh through `FmegatronReader`. Whatever torch plans: DTensors, tensors
that only some ranks have (pipeline stages), irregular shards; objects if they are plain data.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fmegatron.checkpoint.dicts.described import stored_values
from fmegatron.checkpoint.dicts.values import VALUES, to_json
from fmegatron.checkpoint.files.format import MOST_SMALL, dtype_of
from fmegatron.checkpoint.files.manifest import to_json_text
from fmegatron.checkpoint.files.open_store import open_store
from fmegatron.checkpoint.files.snapshot import Snapshot, snapshot_of
from fmegatron.checkpoint.files.storage import Storage, Store
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.fetch import Fetch
from fmegatron.checkpoint.writing.part import Part, complete, merge, plan_digest
from fmegatron.checkpoint.writing.plan import LeafPlan, is_small
from fmegatron.checkpoint.writing.write import write_part
from fmegatron.interop.dcp_write import name_of
from fmegatron.interop.scattered import Scattered
from fmegatron.interop.torch_blob import plain_object
from fmegatron.layout import Box, check_cover, row_major_strides


@dataclass(frozen=True)
class _Orders:
    """What the coordinator sends a rank: its number, where to write, the plans of the leaves that it has parts of."""

    rank: int
    root: str
    digest: str
    plans: dict[str, LeafPlan]  # by torch's name


class FmegatronWriter(StorageWriter):
    """A StorageWriter of torch whose directory is a checkpoint of fmegatron.

    path: directory or URL.  metadata, step: as `checkpoint.save`. A save that fails leaves an earlier checkpoint at the
    path as it is; what it has written stays hidden until a save there, when this writer is gone, removes
    it (torch does not report to a writer that a save has failed).

    Refused, with an error on all ranks: objects that are no plain data (numbers, strings, containers), shards that
    overlap or leave gaps, `use_collectives=False`, planners that cache plans (`enable_plan_caching`).
    """

    def __init__(
        self, path: str | os.PathLike | Store, metadata: dict[str, Any] | None = None, *, step: int | None = None
    ):
        super().__init__()
        self.checkpoint_id, self._metadata, self._step = path, dict(metadata or {}), step
        self._begin_none()

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Another save begins, perhaps to another path."""
        self.checkpoint_id = checkpoint_id or self.checkpoint_id
        self._begin_none()

    def _begin_none(self) -> None:
        """No save has begun. What follows is the coordinator's; names are torch's."""
        self._begun: Storage | None = None
        self._plans: tuple[LeafPlan, ...] = ()
        self._names: frozenset[str] = frozenset()
        self._paths: dict[str, str] = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: what a rank is to write comes with its plan. Raises ValueError for saves without one plan."""
        if not kwargs.get("use_collectives", True):
            raise ValueError("FmegatronWriter: got use_collectives=False, wanted one plan for all ranks; leave it out")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: the home of every leaf, from the boxes of all ranks. Raises ValueError for gaps."""
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise ValueError(
                "FmegatronWriter: got plans that torch has kept from an earlier save, wanted new ones; do not cache "
                "plans"
            )
        held, keys = {}, {}
        for rank, plan in enumerate(plans):
            keys |= plan.planner_data if isinstance(plan.planner_data, dict) else {}
            for item in plan.items:
                if item.type != WriteItemType.BYTE_IO:
                    data = _described(item)
                    whole = held.setdefault(item.index.fqn, (tuple(data.size), data.properties.dtype, []))
                    whole[2].append((rank, tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        self._paths = {name: "/".join(map(str, k)) for name, k in keys.items()}
        leaves = {}
        for name, (shape, dtype, boxes) in held.items():
            try:
                check_cover([Box(start, size, 0, row_major_strides(size)) for _, start, size in boxes], shape)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            leaves[name] = Scattered(shape, dtype, tuple(boxes))
        pack = sum(is_small(leaf.shape, leaf.nbytes) for leaf in leaves.values()) > MOST_SMALL
        leaves = {name: leaf.plan(self._paths.get(name, name), pack) for name, leaf in leaves.items()}
        self._plans, self._names = tuple(leaves.values()), frozenset(leaves)
        if len({leaf.path for leaf in self._plans}) < len(leaves):
            raise ValueError(
                "state dict: got two tensors with one path, wanted one for each; rename one of the keys that contain "
                "'/'"
            )
        self._begun = open_store(self.checkpoint_id).begin()
        digest, orders = plan_digest(self._plans), []
        for rank, plan in enumerate(plans):
            mine = {i.index.fqn: leaves[i.index.fqn] for i in plan.items if i.type != WriteItemType.BYTE_IO}
            orders.append(replace(plan, storage_data=_Orders(rank, self._begun.root, digest, mine)))
        return orders

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards, in the order of its local tensors."""
        orders: _Orders = plan.storage_data
        storage = self._begun or open_store(self.checkpoint_id).draft(orders.root)
        pieces: dict[str, list[torch.Tensor]] = {name: [] for name in orders.plans}
        results = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                results.append(WriteResult(item.index, 0, self._value(item, planner)))
                continue
            given, described = planner.resolve_data(item), _described(item)
            assert isinstance(given, torch.Tensor), "a plan of a shard is resolved to its tensor"
            x = given.detach()
            if tuple(x.shape) != tuple(described.chunk.sizes) or x.dtype != described.properties.dtype:
                raise ValueError(f"{item.index.fqn}: got {x.dtype} {tuple(x.shape)}, wanted {described}, as planned")
            pieces[item.index.fqn].append(x)
            results.append(WriteResult(item.index, x.numel() * x.element_size(), None))
        tensors = [x[0] if len(x) == 1 else torch.cat([part.reshape(-1) for part in x]) for x in pieces.values()]
        part = write_part(storage, tuple(orders.plans.values()), tensors, orders.rank)
        part.plan = orders.digest  # of all ranks' leaves together
        part.store(storage)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _value(self, item: WriteItem, planner: SavePlanner) -> str:
        """An object, which the planner has pickled, as JSON; read as data."""
        name, given = item.index.fqn, planner.resolve_data(item)
        assert isinstance(given, io.BytesIO), "a plan of an object is resolved to its bytes"
        return to_json_text(to_json(plain_object(given.getvalue(), name), name))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all have written: merge, make durable, give the name."""
        store, storage = open_store(self.checkpoint_id), self._begun
        assert storage is not None, "the coordinator has begun the save"
        try:
            parts = [Part.load(storage, rank) for rank in range(len(results))]
            texts = {r.index.fqn: r.storage_data for found in results for r in found if isinstance(r.storage_data, str)}
            values = {self._paths.get(name, name): json.loads(text) for name, text in texts.items()}
            if lost := set(metadata.state_dict_metadata) - {*self._names, *texts}:
                raise RuntimeError(f"{min(lost)}: torch planned it, but nobody has written it")
            manifest, digests = merge(self._plans, parts, self._step, {**self._metadata, VALUES: values})
            store.publish(storage, complete(storage, manifest, digests))
        finally:
            store.end(storage)
            self._begun = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Whether this writer can write there."""
        return isinstance(checkpoint_id, str | os.PathLike)


def _described(item: WriteItem) -> TensorWriteData:
    """The shard that an item of a plan describes."""
    assert item.tensor_data is not None, "what is no object is a shard"
    return item.tensor_data


@dataclass(frozen=True)
class _Opened:
    """One save, opened. paths, values: by torch's name."""

    snapshot: Snapshot
    paths: dict[str, str]
    values: dict[str, Any]


class FmegatronReader(StorageReader):
    """A StorageReader of torch for checkpoints of fmegatron, however they were saved.

    torch's name of a leaf joins its path by '.'. Only the bands that the plan's boxes need are read, and verified.
    """

    def __init__(self, path: str | os.PathLike | Store, *, verify: bool = True):
        super().__init__()
        self.checkpoint_id, self._verify = path, verify
        self._open: _Opened | None = None

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Another load begins, perhaps from another path."""
        self.checkpoint_id = checkpoint_id or self.checkpoint_id
        self._open = None

    @property
    def _opened(self) -> _Opened:
        assert self._open is not None, "torch sets a reader up first"
        return self._open

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is stored, as torch describes it: every tensor as one chunk, of which any box can be read.

        Raises CheckpointError as `checkpoint.restore`.
        """
        snapshot = snapshot_of(self.checkpoint_id)
        manifest = snapshot.manifest
        values = stored_values(manifest.metadata, snapshot.text)
        paths = {name_of(path): path for path in manifest.leaves}
        named = {name_of(path): value for path, value in values.items()}
        seen = Counter(map(name_of, [*manifest.leaves, *values]))
        if twice := next((name for name, count in seen.items() if count > 1), None):
            raise ValueError(
                f"{snapshot.text}: got several leaves with torch's name {twice}, wanted one for each; use "
                "checkpoint.restore"
            )
        self._open = _Opened(snapshot, paths, named)
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in named}
        for path, leaf in manifest.leaves.items():
            shape = torch.Size(leaf.shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            found[name_of(path)] = TensorStorageMetadata(TensorProperties(dtype_of(leaf.dtype)), shape, [chunk])
        keys = {name_of(path): tuple(path.split("/")) for path in [*manifest.leaves, *values]}
        return Metadata(found, planner_data=keys, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The manifest is open already, or is opened now."""
        if self._open is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the digest of the save that this rank has opened, for the coordinator."""
        return replace(plan, storage_data=self._opened.snapshot.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are. Raises RuntimeError when the ranks have opened different saves of the checkpoint."""
        if len({plan.storage_data for plan in plans}) > 1:
            first = plans[0].storage_data
            other = next(rank for rank, plan in enumerate(plans) if plan.storage_data != first)
            raise RuntimeError(
                f"{self._opened.snapshot.text}: ranks 0 and {other} see different saves of it (another job saves there,"
                " or the file system shows some nodes what was there before): load again when that is over"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of the plan into the planner's tensors. Raises CheckpointError for damage, naming the leaf."""
        snapshot, paths = self._opened.snapshot, self._opened.paths
        wanted: dict[str, list[tuple[ReadItem, torch.Tensor]]] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(self._opened.values[name], data)
                data.seek(0)
                planner.load_bytes(item, data)
            else:
                wanted.setdefault(name, []).append((item, planner.resolve_tensor(item).detach()))
        staged = []
        with Fetch(snapshot, self._verify) as fetch:
            for name, items in wanted.items():
                leaf, targets = snapshot.manifest.leaves[paths[name]], []
                for item, x in items:
                    host = x if x.device.type == "cpu" else torch.empty(x.shape, dtype=x.dtype)
                    staged += [] if host is x else [(x, host)]
                    shape = tuple(item.lengths)
                    if tuple(x.shape) != shape:
                        raise ValueError(f"{name}: got a target of shape {tuple(x.shape)}, wanted {shape}, as planned")
                    box = Box(tuple(item.storage_offsets), shape, 0, row_major_strides(shape))
                    if box.size:
                        targets.append(Target(leaf.path, box, host, dtype_of(leaf.dtype)))
                fetch.add(leaf, targets)
        for x, host in staged:
            x.copy_(host)
        for items in wanted.values():
            for item, x in items:
                planner.commit_tensor(item, x)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Whether this reader can read there."""
        return isinstance(checkpoint_id, str | os.PathLike)
