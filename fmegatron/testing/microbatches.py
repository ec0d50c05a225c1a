"""The order of rows in which microbatch i of one rank is the union of all ranks' microbatches i.

A step cuts the rows of its batch, and each rank cuts its own: microbatch 0 is the first rows of every rank, on one rank
the first rows of all. Sums over all microbatches do not see that; line by line, nothing of the two is comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx

from fmegatron.layout import Layout, Mesh
from fmegatron.testing.align import LOOKS, name_of
from fmegatron.testing.first_difference import Finding

__all__ = ["Cut", "cuts_of", "finding_of_cut"]


@dataclass(frozen=True)
class Cut:
    """An argument that is cut into n equal parts on a dim which several ranks share. argument: its position; at: the
    line that cuts it; order: int64 [size of the dim], the rows of the global array as n microbatches of all ranks."""

    argument: int
    dim: int
    n: int
    at: str
    order: torch.Tensor


def cuts_of(many: fx.Graph, one: fx.Graph, layouts: list[Layout | None]) -> list[Cut]:
    """How a step cuts its arguments on all meshes, but for cuts that give the same rows on one rank and on many.

    many, one: its graphs over a mesh and over one rank (`inline_layers`). layouts: of the arguments on the mesh.
    """
    found = []
    inputs = (graph.find_nodes(op="placeholder") for graph in (many, one))
    for i, (node, twin, layout) in enumerate(zip(*inputs, layouts, strict=True)):
        if layout is None or layout.flat:  # a range has no rows
            continue
        for dim in range(len(layout.spec)):
            local, size = layout.local_shape(0)[dim], layout.shape[dim]
            cut, theirs = (None, None) if local == size else (_cut(node, dim, local), _cut(twin, dim, size))
            if cut is None or theirs is None or cut[0] != theirs[0]:
                continue
            order = _order(layout, dim, cut[0])
            if order is not None and not torch.equal(order, torch.arange(len(order))):
                found.append(Cut(i, dim, cut[0], cut[1], order))
    return found


def finding_of_cut(cut: Cut, mesh: Mesh) -> Finding:
    """What is reported where only the order of rows makes the difference."""
    what = (
        f"each rank of {mesh} cuts its own rows into {cut.n} microbatches, so that these hold other rows than on one "
        "rank, and the result depends on which rows are together; give the batch a layout by which every rank has its "
        f"part of every microbatch: Split(axes, parts={cut.n}) on dim {cut.dim}, which is what "
        f"DataParallel.batch_layout(..., microbatches={cut.n}) makes"
    )
    return Finding(cut.at, "microbatches", what)


def _cut(node: fx.Node, dim: int, size: int) -> tuple[int, str] | None:
    """(number of equal parts into which a dim of a value is cut, the line), or None."""
    todo, pieces = [node], {}
    while todo:
        at = todo.pop()
        for user in at.users:
            name, line = name_of(user), user.meta.get("at", "?")
            args = cast("tuple[Any, ...]", user.args)  # each of the type that its op in `_CUTS` takes
            shapes = at.meta["val"].shape, getattr(user.meta.get("val"), "shape", ())
            if name in LOOKS and shapes[0] == shapes[1] or name == "_to_copy":
                todo.append(user)
            elif name in ("view", "_unsafe_view") and dim == 0 and len(shapes[1]) > 1 and 1 < shapes[1][0] <= size:
                if shapes[1][0] * shapes[1][1] == size:
                    return shapes[1][0], line
            elif name in _CUTS and _argument(args, _CUTS[name], 0) % len(shapes[0]) == dim:
                if name == "split":
                    sizes = [args[1]] * (size // args[1]) if size % args[1] == 0 else []
                elif name == "split_with_sizes":
                    sizes = args[1]
                else:
                    sizes = [1] * size if name == "unbind" else []
                if len(set(sizes)) == 1 and len(sizes) > 1:
                    return len(sizes), line
                if name in ("select", "slice"):
                    start = _argument(args, 2, 0) or 0
                    end = start + 1 if name == "select" else min(_argument(args, 3, size), size)
                    pieces[start % size] = (end % (size + 1), line)
    lengths = {end - start for start, (end, _) in pieces.items()}
    if len(lengths) == 1 and 0 < (length := lengths.pop()) < size and sorted(pieces) == list(range(0, size, length)):
        return size // length, pieces[0][1]
    return None


# Ops that take parts of a dim, and where the dim is among their arguments
_CUTS = MappingProxyType({"split": 2, "split_with_sizes": 2, "unbind": 1, "select": 1, "slice": 1})


def _argument(args: Sequence[Any], position: int, default: int) -> int:
    return args[position] if len(args) > position and args[position] is not None else default


def _order(layout: Layout, dim: int, n: int) -> torch.Tensor | None:
    """Which rows the microbatches hold, one after the other; None for parts that are no full rows."""
    rows = torch.arange(layout.shape[dim])
    alone = Layout((layout.shape[dim],), torch.int64, layout.mesh, (layout.spec[dim],))
    shards = {}  # by what they hold; in the order of ranks
    for rank in range(layout.mesh.size):
        boxes = alone.boxes(rank)
        shards.setdefault(boxes, torch.cat([rows[box.slices] for box in boxes]))
    if any(len(shard) % n for shard in shards.values()):
        return None
    return torch.cat([shard.chunk(n)[i] for i in range(n) for shard in shards.values()])
