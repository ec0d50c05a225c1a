"""Files and metadata operations of a save, counted from its plan on paper: nothing is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fmegatron.checkpoint.files.format import MOST_CHUNK_BYTES
from fmegatron.checkpoint.writing.plan import LeafPlan, grid_array
from fmegatron.checkpoint.writing.write import PACKED_BYTES

_FEW = 4  # COMPLETE of the save and of its place, manifest.json, digests.bin


class Counts(NamedTuple):
    """Of one save to a directory.

    shards: files of arrays in global shape.  data: those, and what each rank keeps in packed/ and pieces/.  files: and
    what describes them.  operations: creates, opens, fsyncs, renames and unlinks of all ranks; reads of directories are
    not counted.
    """

    shards: int
    data: int
    files: int
    operations: int


def counts(plans: Sequence[LeafPlan]) -> Counts:
    """Of a state on the ranks of its layouts' mesh."""
    arrays, pieces, packed, ranks = {}, 0, {}, max((p.layout.mesh.size for p in plans), default=1)
    for p in plans:
        writers = p.layout.mesh.size // p.layout.replicas
        if p.home == "grid":
            array = grid_array(p)
            arrays[array.name] = array
        elif p.home == "piece":
            pieces += writers * -(-p.layout.most_nbytes // MOST_CHUNK_BYTES)
        else:
            packed[writers] = packed.get(writers, 0) + p.layout.most_nbytes
    shards = sum(math.prod(a.file_grid) for a in arrays.values())
    boxes = sum(writers * -(-size // PACKED_BYTES) for writers, size in packed.items())
    groups = {name.rsplit("/", i)[0] for name in arrays for i in range(1, name.count("/") + 1)}
    own, data = len(arrays) + pieces + boxes, shards + pieces + boxes
    parts = ranks - 1  # which rank 0 reads and removes
    operations = 2 * (data + own + len(groups) + _FEW) + 3 * parts
    return Counts(shards, data, data + own + len(groups) + _FEW, operations)
