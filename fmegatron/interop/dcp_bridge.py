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

from fmegatron.checkpoint import Source, Target, open_snapshot
from fmegatron.checkpoint.dicts import values as values_of
from fmegatron.checkpoint.writing import draft as drafts
from fmegatron.interop.dcp_write import name_of
from fmegatron.interop.torch_blob import plain_object
from fmegatron.layout import Box, boxes


@dataclass(frozen=True)
class _Sent:
    """What the coordinator sends a rank: its orders, and the paths of torch's names that it has."""

    orders: drafts.Orders
    paths: dict[str, str]


class FmegatronWriter(StorageWriter):
    """A StorageWriter of torch whose directory is a checkpoint of fmegatron.

    path: directory or URL.  metadata, step: as `checkpoint.save`. A save that fails leaves an earlier checkpoint at the
    path as it is; what it has written stays hidden until a save there, when this writer is gone, removes
    it (torch does not report to a writer that a save has failed).

    Refused, with an error on all ranks: objects that are no plain data (numbers, strings, containers), shards that
    overlap or leave gaps, `use_collectives=False`, planners that cache plans (`enable_plan_caching`).
    """

    def __init__(self, path: str | os.PathLike, metadata: dict[str, Any] | None = None, *, step: int | None = None):
        super().__init__()
        self.checkpoint_id, self._metadata, self._step = path, dict(metadata or {}), step
        self._begin_none()

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Another save begins, perhaps to another path."""
        self.checkpoint_id = checkpoint_id or self.checkpoint_id
        self._begin_none()

    def _begin_none(self) -> None:
        """No save has begun. What follows is the coordinator's; names are torch's."""
        self._begun: drafts.Draft | None = None
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
        known = {name: "/".join(map(str, k)) for name, k in keys.items()}
        self._paths, self._names = {name: known.get(name) or name for name in {**known, **held}}, frozenset(held)
        leaves = {self._paths[name]: found for name, found in held.items()}
        if len(leaves) < len(held):
            raise ValueError(
                "state dict: got two tensors with one path, wanted one for each; rename one of the keys that contain "
                "'/'"
            )
        self._begun = drafts.Draft.begin(self.checkpoint_id, leaves, len(plans))
        sent = []
        for plan, orders in zip(plans, self._begun.orders, strict=True):
            mine = {i.index.fqn: self._paths[i.index.fqn] for i in plan.items if i.type != WriteItemType.BYTE_IO}
            sent.append(replace(plan, storage_data=_Sent(orders, mine)))
        return sent

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards, in the order of its local tensors."""
        sent: _Sent = plan.storage_data
        pieces: dict[str, list[torch.Tensor]] = {path: [] for path in sent.orders.plans}
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
            pieces[sent.paths[item.index.fqn]].append(x)
            results.append(WriteResult(item.index, x.numel() * x.element_size(), None))
        sent.orders.write(self.checkpoint_id, pieces, self._begun)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _value(self, item: WriteItem, planner: SavePlanner) -> str:
        """An object, which the planner has pickled, as JSON; read as data."""
        name, given = item.index.fqn, planner.resolve_data(item)
        assert isinstance(given, io.BytesIO), "a plan of an object is resolved to its bytes"
        return json.dumps(values_of.to_json(plain_object(given.getvalue(), name), name), allow_nan=False)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all have written: merge, make durable, give the name."""
        draft = self._begun
        assert draft is not None, "the coordinator has begun the save"
        try:
            texts = {r.index.fqn: r.storage_data for found in results for r in found if isinstance(r.storage_data, str)}
            values = {self._paths.get(name, name): json.loads(text) for name, text in texts.items()}
            if lost := set(metadata.state_dict_metadata) - {*self._names, *texts}:
                raise RuntimeError(f"{min(lost)}: torch planned it, but nobody has written it")
            draft.finish(self._step, {**self._metadata, values_of.VALUES: values})
        finally:
            draft.end()
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

    source: Source
    paths: dict[str, str]
    values: dict[str, Any]


class FmegatronReader(StorageReader):
    """A StorageReader of torch for checkpoints of fmegatron, however they were saved.

    torch's name of a leaf joins its path by '.'. Only the bands that the plan's boxes need are read, and verified.
    """

    def __init__(self, path: str | os.PathLike, *, verify: bool = True):
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
        with open_snapshot(self.checkpoint_id) as source:
            leaves, values = source.leaves, source.values
        paths = {name_of(path): path for path in leaves}
        named = {name_of(path): value for path, value in values.items()}
        seen = Counter(map(name_of, [*leaves, *values]))
        if twice := next((name for name, count in seen.items() if count > 1), None):
            raise ValueError(
                f"{source.text}: got several leaves with torch's name {twice}, wanted one for each; use "
                "checkpoint.restore"
            )
        self._open = _Opened(source, paths, named)
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in named}
        for path, leaf in leaves.items():
            shape = torch.Size(leaf.shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            found[name_of(path)] = TensorStorageMetadata(TensorProperties(leaf.torch_dtype), shape, [chunk])
        keys = {name_of(path): tuple(path.split("/")) for path in [*leaves, *values]}
        return Metadata(found, planner_data=keys, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The manifest is open already, or is opened now."""
        if self._open is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the digest of the save that this rank has opened, for the coordinator."""
        return replace(plan, storage_data=self._opened.source.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are. Raises RuntimeError when the ranks have opened different saves of the checkpoint."""
        if len({plan.storage_data for plan in plans}) > 1:
            first = plans[0].storage_data
            other = next(rank for rank, plan in enumerate(plans) if plan.storage_data != first)
            raise RuntimeError(
                f"{self._opened.source.text}: ranks 0 and {other} see different saves of it (another job saves there,"
                " or the file system shows some nodes what was there before): load again when that is over"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of the plan into the planner's tensors. Raises CheckpointError for damage, naming the leaf."""
        source, paths = self._opened.source, self._opened.paths
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
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        targets: dict[str, list[Target]] = {}
        for name, items in wanted.items():
            leaf = source.leaves[paths[name]]
            for item, x in items:
                host = x if x.device.type == "cpu" else torch.empty(x.shape, dtype=x.dtype)
                staged += [] if host is x else [(x, host)]
                shape = tuple(item.lengths)
                if tuple(x.shape) != shape:
                    raise ValueError(f"{name}: got a target of shape {tuple(x.shape)}, wanted {shape}, as planned")
                box = Box(tuple(item.storage_offsets), shape, 0, boxes.row_major_strides(shape))
                if box.size:
                    targets.setdefault(leaf.path, []).append(Target(leaf.path, box, host, leaf.torch_dtype))
        source.fill(targets, self._verify)
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
