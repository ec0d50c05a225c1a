"""A state under layouts written as a directory that torch.distributed.checkpoint reads.

A layout's boxes are exactly what DCP's plan is made of: chunks of a global tensor. So any layout can be written,
flattened and interleaved ones included, and torch loads it into DTensors of any placement. torch's own writer does the
writing; our planner lists what there is.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from fmegatron import tree
from fmegatron.checkpoint.dicts import values as values_of
from fmegatron.collectives import World
from fmegatron.files import disk
from fmegatron.layout import Box, Layout, Mesh
from fmegatron.tree import checks, structure


def save_dcp(
    path: str | os.PathLike,
    state: structure.Tree,
    world: World | None = None,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Write a state as a DCP directory; `torch.distributed.checkpoint.load` reads it.

    torch's names join the parts of a path by '.'. With several ranks, torch.distributed must be initialized: torch
    exchanges its plans over the default group. The directory is complete when `.metadata` is there, which torch writes
    last.

    Args:
        path: of a new directory.
        state: tree of this rank's local tensors, which know their layouts (`tree.place`); on one process also of full
            ones, which need not.
        world: as `checkpoint.save`.
        values: plain data by path ("optimizer/param_groups/0/lr"), stored as DCP stores objects; the same on all ranks.

    Raises:
        ValueError: the path exists or the request does not fit; the rest are torch's errors.
    """
    ranks = world or World.alone("cpu")
    alone, rank = ranks.size == 1, ranks.rank
    if not alone and not (dist.is_initialized() and dist.get_world_size() == ranks.size):
        raise ValueError(
            f"save_dcp: got a world of {ranks.size} ranks without torch.distributed over them, wanted the same ranks"
        )
    if alone and all(isinstance(x, torch.Tensor) and tree.layout_of(x) is None for x in tree.leaves(state)):
        layouts = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, Mesh()), state)
    else:
        layouts = tree.layouts(state)
    tree.check(state, layouts, rank, "the state", "the layouts")
    paths, leaves, _ = structure.flatten(layouts)
    by_path = dict(zip(paths, tree.leaves(state), strict=True))
    checks.require_saved_by(paths, leaves, ranks.size)
    shards = [
        Shard(name, layout, box)
        for turn, (name, layout) in enumerate(zip(paths, leaves, strict=True))
        if layout.owner(rank, turn)
        for box in (layout.boxes(rank) if layout.nbytes else _nothing(layout, rank))
    ]
    for name, value in (values or {}).items():
        values_of.to_json(value, name)  # what is no plain data is refused, as everywhere
    planner = ShardPlanner(shards, lambda shard: _piece(by_path[shard.path], shard.box), values or {}, rank == 0)
    write_dcp(path, planner, alone)


@dataclass(frozen=True)
class Shard:
    """One box of a leaf that this process writes."""

    path: str
    layout: Layout
    box: Box


def write_dcp(path: str | os.PathLike, planner: SavePlanner, alone: bool) -> None:
    """Let torch write what a planner has, to a new directory."""
    path = os.fspath(path)
    if disk.names_in(path) or (disk.is_there(path) and not disk.is_directory(path)):
        raise ValueError(f"{path}: got a path that exists, wanted a new one, for torch would overwrite it in place")
    try:
        with warnings.catch_warnings():
            # torch warns of a save in one process, which is what is asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.save({}, storage_writer=dcp.FileSystemWriter(path), planner=planner, no_dist=alone)
    except CheckpointException as failed:  # torch's own is no Exception: `except Exception` lets it pass
        rank, (error, _) = min(failed.failures.items())
        if isinstance(error, ValueError):
            raise error from None
        where = "" if alone else f" on rank {rank}"
        raise RuntimeError(f"writing {path} failed{where}: {type(error).__name__}: {error}") from error


class ShardPlanner(SavePlanner):
    """The planner of what torch is to write: shards, whose tensors `read` gives one by one, and values."""

    def __init__(
        self,
        shards: Sequence[Shard],
        read: Callable[[Shard], torch.Tensor],
        values: Mapping[str, Any],
        is_coordinator: bool,
    ):
        self.read, self.values = read, dict(values) if is_coordinator else {}
        self.shards = {(name_of(s.path), s.box.start): s for s in shards}
        self.paths: dict[str, str] = {}
        for path in dict.fromkeys([*(s.path for s in shards), *self.values]):
            if (other := self.paths.setdefault(name_of(path), path)) != path:
                raise ValueError(
                    f"{name_of(path)}: got torch's name for {other} and for {path}, wanted it for one; rename one"
                )

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to do: all is known."""

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        items = [_item(shard) for shard in self.shards.values()]
        items += [WriteItem(MetadataIndex(name_of(path)), WriteItemType.BYTE_IO) for path in self.values]
        return SavePlan(items, planner_data={name: tuple(path.split("/")) for name, path in self.paths.items()})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """torch's own rule, and the keys of every name, by which other readers know how the names nest."""
        plans, metadata = create_default_global_save_plan(all_plans)
        keys: dict[str, tuple[str, ...]] = {}
        for plan in all_plans:
            for name, found in (plan.planner_data or {}).items():
                if (other := keys.setdefault(name, found)) != found:
                    raise ValueError(
                        f"{name}: got torch's name for {'/'.join(other)} and for {'/'.join(found)}, wanted it for one"
                    )
        return plans, replace(metadata, planner_data=keys)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor of a shard, or a value as torch stores objects."""
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self.values[self.paths[index.fqn]], data)
            return data
        assert index.offset is not None, "an item of `_item`"
        return self.read(self.shards[index.fqn, tuple(index.offset)])


def name_of(path: str) -> str:
    """torch's flat name of a path."""
    return path.replace("/", ".")


def _item(shard: Shard) -> WriteItem:
    start, shape = torch.Size(shard.box.start), torch.Size(shard.box.shape)
    properties = TensorProperties(dtype=shard.layout.dtype)
    data = TensorWriteData(ChunkStorageMetadata(start, shape), properties, torch.Size(shard.layout.shape))
    return WriteItem(MetadataIndex(name_of(shard.path), start), WriteItemType.SHARD, tensor_data=data)


def _nothing(layout: Layout, rank: int) -> Iterator[Box]:
    """The one empty box by which torch knows of a tensor without elements; a layout has none."""
    if not any(layout.shard(rank)):
        yield Box((0,) * len(layout.shape), layout.shape, 0, (1,) * len(layout.shape))


def _piece(x: torch.Tensor, box: Box) -> torch.Tensor:
    return box.view(x.detach().contiguous()).contiguous()
