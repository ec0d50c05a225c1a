"""Uneven splits agree with torch's DTensor, through the function that it computes them with (no process group)."""

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from fmegatron.layout import Layout, Mesh


def test_uneven_splits_are_those_of_dtensor():
    """Axis after axis, as DTensor cuts: shape and offset of every rank, empty shards included."""
    for sizes in ((2,), (4,), (3, 2), (2, 3), (4, 4)):
        mesh = Mesh(**{f"a{i}": n for i, n in enumerate(sizes)})
        for size in range(0, 14):
            for split in range(1, len(sizes) + 1):
                layout = Layout((size, 5), torch.float32, mesh, (mesh.names[:split],))
                for rank in range(mesh.size):
                    coordinate = list(mesh.coordinates(rank).values())
                    shape, offset = _compute_local_shape_and_global_offset(
                        (size, 5), sizes[:split], lambda dim, at=coordinate: at[dim], [Shard(0)] * split
                    )
                    assert layout.local_shape(rank) == tuple(shape)
                    if size and shape[0]:
                        assert layout.boxes(rank)[0].start == tuple(offset)
                    else:
                        assert layout.boxes(rank) == ()
