"""Which rows of a batch make up a microbatch: how a step cuts them, compared with the layout of the batch.

A local tensor does not state which rows of the batch it has. So where a step cuts one into microbatches, or numbers
its rows, the traced graph carries a mark, and what knows the batch's layout (check, jit, simulate) compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fmegatron.collectives import torch_private
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.torch_private import Op, fx_traceback
from fmegatron.step.tracing import Traced

__all__ = ["cut_rows", "microbatches_of", "require_rows", "rows_in_order"]

_MARK = "fmegatron_rows"
_SAME_ROWS = frozenset(
    "detach alias clone _to_copy contiguous lift_fresh lift_fresh_copy view _unsafe_view reshape unsqueeze".split()
)


class _Cut(NamedTuple):
    """What a step assumes of a leaf: `n` microbatches; rows assigned in the order of `axes` (None: of any axes)."""

    n: int
    axes: tuple[str, ...] | None


def cut_rows(x: torch.Tensor, n: int) -> Sequence[torch.Tensor]:
    """n equal consecutive parts of dim 0, a microbatch each. A traced step remembers it."""
    with fx_traceback.annotate({_MARK: _Cut(n, None)}):
        return x.chunk(n, 0)


def rows_in_order(x: torch.Tensor, n: int, axes: tuple[str, ...]) -> torch.Tensor:
    """x, whose rows are split over `axes` for n microbatches (`DataParallel.batch_layout`). A traced step remembers."""
    with fx_traceback.annotate({_MARK: _Cut(n, axes)}):
        return x.detach()


def microbatches_of(traced: Traced) -> dict[str, int]:
    """Path of an input -> the number of microbatches that its rows are cut into, of those that are cut."""
    found: dict[str, int] = {}
    for index, cut in _marks(traced.graph_module.graph):
        path = traced.in_paths[index]
        found[path] = math.lcm(found.get(path, 1), cut.n)
    return found


def require_rows(traced: Traced, layouts: Sequence[Layout | None], who: str) -> None:
    """ValueError, naming the leaf, where a layout assigns rows so that a microbatch is other rows on another mesh.

    layouts: of the inputs, None where it is not known.
    """
    for index, cut in _marks(traced.graph_module.graph):
        layout = layouts[index]
        if layout is None or not layout.shape or layout.flat or _fits(layout, cut):
            continue
        names = cut.axes if cut.axes is not None else layout.axes(0)
        names = tuple(name for name in names if name in layout.mesh)
        wanted = layout.replace(spec=(Split(names, cut.n) if cut.n > 1 else names, *layout.spec[1:]))
        raise ValueError(
            f"{who}: {traced.in_paths[index]!r}: got the layout {layout}, wanted {wanted}, as the step cuts the rows "
            f"of a rank into {cut.n} microbatches, which else are other rows of the batch on every mesh; give "
            f"strategy.batch_layout({layout.shape}, {layout.dtype}, mesh, microbatches={cut.n}), also where rows are "
            "given to ranks (loop.own_rows)"
        )


def _fits(layout: Layout, cut: _Cut) -> bool:
    """Whether part m of n of each rank's rows is its share of part m of n of all rows."""
    names, parts, rows = _big(layout.axes(0), layout.mesh), layout.parts[0], layout.shape[0]
    if cut.axes is not None:
        in_order = names == _big(cut.axes, layout.mesh)
        return in_order and (not names or tuple(p for p in parts if p) == (rows // cut.n,) * cut.n)
    ends = {sum(parts[:i]) for i in range(len(parts) + 1)}
    return not names or all(rows * m % cut.n == 0 and rows * m // cut.n in ends for m in range(cut.n))


def _big(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in axes if name in mesh and mesh[name] > 1)


def _marks(graph: torch.fx.Graph, known: dict | None = None) -> list[tuple[int, _Cut]]:
    """(index of a placeholder, how its rows are cut) of a graph and the opaque nodes in it. known: of graphs that were
    looked at; a node is there for each layer and microbatch."""
    known = {} if known is None else known
    if graph in known:
        return known[graph]
    inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    found = []
    for node in graph.nodes:
        mark = node.meta.get("custom", {}).get(_MARK)
        entry = entry_of(node)
        cuts = [] if entry is None else [(node.args[0][i], cut) for i, cut in _marks(entry.graph_module.graph, known)]
        cuts += [(node.args[0], mark)] if mark and isinstance(node.target, Op) else []
        found += [(inputs[origin], cut) for source, cut in cuts if (origin := _origin(source)) in inputs]
    known[graph] = list(dict.fromkeys(found))
    return known[graph]


def _origin(node: torch.fx.Node) -> torch.fx.Node | None:
    """The placeholder of whose rows a value consists, one by one: behind casts, reshapes and other ops of elements."""
    while node.op == "call_function":
        sources = node.all_input_nodes
        known = isinstance(node.target, Op) and (
            torch_private.schema_of(node.target).name.partition("::")[2] in _SAME_ROWS
            or torch.Tag.pointwise in node.target.tags
        )
        if not known or len(sources) != 1 or _rows(sources[0]) != _rows(node):
            return None
        node = sources[0]
    return node if node.op == "placeholder" else None


def _rows(node: torch.fx.Node) -> int | None:
    shape = node.meta["val"].shape
    return shape[0] if shape else None
