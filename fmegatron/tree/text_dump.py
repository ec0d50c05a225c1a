"""dump: a tree of layouts, specs or tensors as text, one line a leaf, so that a change of layout is a readable diff."""

from __future__ import annotations

import itertools
from collections import Counter

import torch

from fmegatron.layout import Layout, dtypes
from fmegatron.tree.spec import ArraySpec
from fmegatron.tree.structure import Tree, flatten


def dump(layouts: Tree) -> str:
    """One line for each leaf: path, layout, local shapes (with the number of ranks that have each), replicas, init.

    layouts: tree of Layouts or ArraySpecs, or of tensors, of which shape, dtype and device are shown. The last line has
    the totals. Compare it with a file to guard a layout.

    >>> import torch
    >>> from fmegatron.layout import Mesh
    >>> print(dump({"table": Layout((65, 8), torch.float32, Mesh(dp=2, tp=2), ("tp",))}))
    table: f32[65@tp, 8] on dp2·tp2, local 2 of (33, 8) + 2 of (32, 8), 2 replicas
    520 elements in 1 leaves, 2,080 bytes; on rank 0: 1,056 bytes
    """
    paths, leaves, _ = flatten(layouts)
    lines, elements, nbytes, local_nbytes = [], 0, 0, 0
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            lines.append(f"{path}: {dtypes.dtype_name(leaf.dtype)}{list(leaf.shape)} on {leaf.device}")
            elements, nbytes = elements + leaf.numel(), nbytes + leaf.nbytes
            continue
        layout = leaf if isinstance(leaf, Layout) else leaf.layout
        init = f", {leaf.init}" if isinstance(leaf, ArraySpec) else ""
        replicas = f"{layout.replicas} replica{'s' * (layout.replicas > 1)}"
        lines.append(f"{path}: {layout}, local {_local_shapes(layout)}, {replicas}{init}")
        elements += layout.nbytes // layout.dtype.itemsize
        nbytes += layout.nbytes
        local_nbytes += layout.local_nbytes(0)
    local = f"; on rank 0: {local_nbytes:,} bytes" if local_nbytes else ""
    lines.append(f"{elements:,} elements in {len(leaves)} leaves, {nbytes:,} bytes{local}")
    return "\n".join(lines)


def _local_shapes(layout: Layout) -> str:
    if layout.is_even:
        return str(layout.local_shape(0))
    shards = itertools.product(*(range(count) for count in layout.shard_counts))
    shapes = Counter(layout.local_shape(layout.rank_of(shard)) for shard in shards)
    per_shard = layout.mesh.size // sum(shapes.values())
    return " + ".join(f"{n * per_shard} of {shape}" for shape, n in sorted(shapes.items(), reverse=True))
