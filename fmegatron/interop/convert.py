"""fmegatron checkpoints from DCP directories and back, in one process and bounded memory.

Both ways go leaf by leaf and, in a leaf, some chunks at a time; so what fits a disk can be converted on any machine.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fmegatron.checkpoint import CheckpointError, Foreign, Leaf, Source, Target, open_snapshot
from fmegatron.checkpoint.dicts import values as values_of
from fmegatron.checkpoint.tools import resharding
from fmegatron.interop.dcp_directory import Directory, check_files, open_dcp
from fmegatron.interop.dcp_read import object_of
from fmegatron.interop.dcp_source import NOTE, DcpSource, newest_step
from fmegatron.interop.dcp_write import Shard, ShardPlanner, write_dcp
from fmegatron.interop.flat import flat_items
from fmegatron.layout import Box, Layout, Mesh, boxes

_GROUP_BYTES = 256 << 20  # elements in memory at a time
_SHARD_BYTES = 64 << 20  # of a DCP directory that is written: larger leaves have one for each stored chunk


class _Converted(DcpSource):
    """A directory with the tensors inside of its objects as leaves, and plain values as a state has them."""

    def __init__(
        self, directory: Directory, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], step: int | None
    ):
        super().__init__(directory)
        own = {path: Leaf.of(path, tuple(x.shape), x.dtype) for path, x in tensors.items()}
        self._own = tensors
        self._leaves = dict(sorted({**super().leaves, **own}.items()))
        self._values = dict(values)
        self._step = self._step if step is None else step

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What `fmegatron_to_dcp` has noted, and the values."""
        return {**self._noted, values_of.VALUES: self._values}

    def fill(self, wanted: Mapping[str, Sequence[Target]], verify: bool = True) -> None:
        """As of a directory; tensors inside of objects have been read already."""
        for path, x in self._own.items():
            for target in wanted.get(path, ()):
                target.view.copy_(x[target.box.slices])
        super().fill({path: targets for path, targets in wanted.items() if path not in self._own}, verify)


def dcp_to_fmegatron(
    source: str | os.PathLike, target: str | os.PathLike, *, skip_objects: bool = False, step: int | None = None
) -> list[str]:
    """Write a DCP or Megatron torch_dist directory as a checkpoint of fmegatron; digested, complete or not there.

    Megatron's iteration is its step, unless another is given; of a run the newest step is taken. Plain objects become
    values (interop.load_state_dict gives them back), tensors inside them leaves. Others are a ValueError that names
    them, or left out with skip_objects; returns the paths that were left out.
    """
    directory = open_dcp(newest_step(source))
    check_files(directory, [(t.path, place) for t in directory.tensors.values() for place in t.places])
    extra, values, left = _objects(directory, skip_objects)
    resharding.rewrite(_Converted(directory, extra, values, step), target, _GROUP_BYTES)
    return left


def fmegatron_to_dcp(source: str | os.PathLike | Source | Foreign, target: str | os.PathLike) -> None:
    """Write a checkpoint of fmegatron as a new DCP directory, which torch.distributed.checkpoint.load reads.

    Values (saved by interop.save_state_dict) become objects; step and metadata the object "fmegatron".
    """
    with open_snapshot(source) as opened:
        values = opened.values
        hidden = (values_of.VALUES, values_of.CONTAINERS)
        own = {key: value for key, value in opened.metadata.items() if key not in hidden}
        if opened.step is not None or own:
            values[NOTE] = {"step": opened.step, "metadata": own}
        shards = []
        for path, leaf in opened.leaves.items():
            layout = Layout(leaf.shape, leaf.torch_dtype, Mesh())
            chunk = next(iter(opened.grid(path)), leaf.shape)
            shards += [Shard(path, layout, box) for box in _boxes(leaf.shape, chunk, layout.dtype.itemsize)]
        write_dcp(target, ShardPlanner(shards, lambda shard: _read(opened, shard), values, True), alone=True)


def _read(source: Source, shard: Shard) -> torch.Tensor:
    x = torch.empty(shard.box.shape, dtype=shard.layout.dtype)
    if x.numel():
        source.fill({shard.path: [Target(shard.path, shard.box, x, x.dtype)]})
    return x


def _boxes(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """The shards of a leaf in a DCP directory: one if it is of moderate size, else as many chunks as make it so."""
    if 0 in shape or math.prod(shape) * itemsize <= _SHARD_BYTES:
        yield Box((0,) * len(shape), shape, 0, boxes.row_major_strides(shape))
        return
    for start in itertools.product(*(range(0, n, c) for n, c in zip(shape, chunk, strict=True))):
        size = tuple(min(c, n - a) for a, c, n in zip(start, chunk, shape, strict=True))
        yield Box(start, size, 0, boxes.row_major_strides(size))


def _objects(directory: Directory, skip: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[str]]:
    """Tensors inside objects, values as JSON (by path), and the objects that were left out."""
    tensors, values, left = {}, {}, []
    for name in directory.objects.keys() - {NOTE}:
        try:
            value = object_of(directory, name)
            found = {path: item for path, (_, item) in flat_items({name: value}).items()}
            plain = {path: values_of.to_json(item, path) for path, item in found.items() if not torch.is_tensor(item)}
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
