"""Directories as Megatron's torch_dist writes them, made with torch's own writer: no Megatron is needed."""

import json
import os
import warnings
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fmegatron.interop.dcp_write import Shard, ShardPlanner
from fmegatron.layout import Box, Layout, Mesh
from fmegatron.layout.boxes import row_major_strides


def whole(shape, dtype):
    """A tensor whose bits are all different, as far as its type has so many."""
    n = torch.Size(shape).numel()
    width = torch.empty(0, dtype=dtype).element_size()
    data = (torch.arange(n * width, dtype=torch.int64) * 37 + 11).remainder(2 if dtype is torch.bool else 251)
    return data.to(torch.uint8).view(dtype).view(shape) if n else torch.empty(shape, dtype=dtype)


class Planner(ShardPlanner):
    """Flat names and no table of keys, all ranks' plans in the metadata, as Megatron has it."""

    def create_local_plan(self):
        """Objects keep a name that has a '/' in it."""
        self.paths |= {name: name for name in self.values}
        plan = super().create_local_plan()
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self.values]
        return replace(plan, items=tensors + objects)

    def create_global_plan(self, all_plans):
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.all_local_plans = all_plans
        return plans, metadata


def write(path, tensors, objects=None, blob=lambda x: x):
    """tensors: name -> (whole tensor, list of (start, shape) of its shards).  blob: what is stored of a shard."""
    shards, by_name = [], {}
    for name, (x, pieces) in tensors.items():
        by_name[name] = x
        layout = Layout(tuple(x.shape), x.dtype, Mesh())
        shards += [Shard(name, layout, Box(a, n, 0, row_major_strides(n))) for a, n in pieces]

    def read(shard):
        return blob(by_name[shard.path][shard.box.slices].clone())

    planner = Planner(shards, read, objects or {}, True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({}, storage_writer=dcp.FileSystemWriter(path, thread_count=2), planner=planner, no_dist=True)


def write_megatron(path):
    """An `iter_` directory: layers with a prepended dim, a second cut dim, irregular shards, objects, common.pt.

    Returns the whole tensors by name.
    """
    layers, tall = whole((4, 8, 6), torch.bfloat16), whole((7, 3), torch.float32)
    two, plain = whole((3, 4, 6), torch.float32), whole((5,), torch.float64)
    tensors = {
        "decoder.layers.linear.weight": (layers, [((i, 0, 0), (1, 8, 6)) for i in range(4)]),
        "decoder.layers.tp.weight": (two, [((i, 0, 3 * j), (1, 4, 3)) for i in range(3) for j in range(2)]),
        "irregular": (tall, [((0, 0), (5, 3)), ((5, 0), (2, 1)), ((5, 1), (2, 2))]),
        "norm": (plain, [((0,), (5,))]),
    }
    objects = {f"rng_state/shard_0.{i}_1.2": [{"seed": i, "offset": 7}] for i in range(2)}
    write(path, tensors, objects)
    with open(os.path.join(path, "metadata.json"), "w") as f:
        json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1}, f)
    torch.save({"iteration": 7, "args": {"lr": 0.1}}, os.path.join(path, "common.pt"))
    return {name: x for name, (x, _) in tensors.items()}
