"""Plain numbers in a graph that Python made of numbers of ranks, or of sizes of a rank's part: which they are.

`int(axes["dp"].size)`, `len(x)` and `float(x.shape[0])` are plain numbers, of which a graph keeps the value alone. The
same step, traced where an axis has one rank, has other such numbers at the same ops of the same lines: a number that is
n there and 1 here is the number of ranks along the axis, and one that is n times as small is the size of a part. What
the step closes over was made before: where the user's code has asked a mesh for a number of ranks, a plain number as
large is taken for that one, and on random numbers must be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction

import torch

from fmegatron import tree
from fmegatron.layout import Layout, Mesh, rank_counts
from fmegatron.step.checker.context import line_of, op_name
from fmegatron.step.checker.shapes import Open
from fmegatron.step.other_mesh import OneRank, on_one_rank
from fmegatron.step.tracing import Traced, trace

__all__ = ["known_numbers", "on_one_rank_of"]

_FACTORS = frozenset(("mul", "div", "_foreach_mul", "_foreach_div"))
_POWERS = (-2, -1, 1, 2)
_FAULTS = (Open, ValueError, RuntimeError, IndexError, TypeError, KeyError, AttributeError, AssertionError)


def known_numbers(
    traced: Traced,
    fn: Callable,
    layouts: tree.Tree,
    told: Sequence[rank_counts.Told],
    empty: Callable[[Layout], torch.Tensor],
) -> bool:
    """Note of the factors in a graph what they are (meta["ranks"], meta["scales"]), as far as other meshes tell; whether
    there are any. layouts: those of the arguments of the function. told: what the user's code asked of the mesh."""
    mesh, graph = tree.leaves(layouts)[0].mesh, traced.graph_module.graph
    asked = any("asked" in node.meta for node in graph.nodes)
    axes = [a for a in mesh.names if mesh[a] > 1 and (asked or any(a in dict(one.over) for one in told))]
    scales: dict[torch.fx.Node, dict[str, Fraction]] = {}
    inside = _asked_inside(fn, layouts, axes, empty) if len(axes) > 1 else frozenset()
    for axis in axes:
        outside = [one for one in told if (one.file, one.line) not in inside and axis in dict(one.over)]
        try:
            moved, _ = on_one_rank_of(fn, layouts, outside, (axis,), empty)
        except _FAULTS:  # nothing is known of it
            continue
        if moved.out_paths != traced.out_paths:
            continue
        for node, power in _powers(graph, moved.graph_module.graph, int(mesh[axis])).items():
            scales.setdefault(node, {})[axis] = Fraction(power)
    for node, over in scales.items():
        (number,) = _factors(node)
        product = float(number)
        for axis, power in over.items():
            product /= int(mesh[axis]) ** float(power)
        node.meta["ranks" if abs(product - 1) < 1e-9 else "scales"] = over
    return bool(scales)


def on_one_rank_of(
    fn: Callable,
    layouts: tree.Tree,
    told: Sequence[rank_counts.Told],
    axes: Collection[str],
    empty: Callable[[Layout], torch.Tensor],
) -> tuple[Traced, OneRank]:
    """The step where these axes have one rank, and so have the plain numbers of ranks that Python was told."""
    mesh = tree.leaves(layouts)[0].mesh
    moved = OneRank(mesh, _instead(mesh, told, axes), axes)
    function = moved(fn)
    return trace(function, tree.map(empty, tree.map(lambda x: on_one_rank(x, axes), layouts))), moved


def _instead(mesh: Mesh, told: Sequence[rank_counts.Told], axes: Collection[str]) -> dict[float, float]:
    found = dict[float, float]()
    for one in told:
        if one.number is not None:
            here = one.number
            for axis, power in one.over:
                here /= int(mesh[axis]) ** float(power) if axis in axes else 1
            found |= {one.number: here, 1 / one.number: 1 / here}
    return found


def _asked_inside(
    fn: Callable, layouts: tree.Tree, axes: Sequence[str], empty: Callable[[Layout], torch.Tensor]
) -> frozenset[tuple[str, int]]:
    """Where the step itself asks for numbers of ranks, and not what has made it: what the meshes of it are asked for,
    that are new when it is traced."""
    found = set[tuple[str, int]]()
    for axis in axes:
        try:
            _, moved = on_one_rank_of(fn, layouts, (), (axis,), empty)
        except _FAULTS:
            continue
        found.update((one.file, one.line) for mesh in moved.made for one in mesh.told)
    return frozenset(found)


def _powers(graph: torch.fx.Graph, moved: torch.fx.Graph, ranks: int) -> dict[torch.fx.Node, int]:
    """{node: power} of the number of ranks by which its factor is another than in the graph where there is one."""
    here, there = _by_line(graph), _by_line(moved)
    found = {}
    for key, nodes in here.items():
        others = there.get(key, [])
        if len(others) != len(nodes):
            continue
        for node, other in zip(nodes, others, strict=True):
            (mine,), (its,) = _factors(node), _factors(other)
            power = next((p for p in _POWERS if abs(mine - its * float(ranks) ** p) <= 1e-9 * abs(mine)), None)
            if power is not None and not {"ranks", "parts", "sums"} & node.meta.keys():
                found[node] = power
    return found


def _by_line(graph: torch.fx.Graph) -> Mapping[tuple[str, str], list[torch.fx.Node]]:
    """The factors of each line, by their ops."""
    found: dict[tuple[str, str], list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and len(_factors(node)) == 1:
            found.setdefault((line_of(node), op_name(node)), []).append(node)
    return found


def _factors(node: torch.fx.Node) -> list[float]:
    if op_name(node).rstrip("_") not in _FACTORS:
        return []
    return [x for x in node.args if isinstance(x, (int, float)) and not isinstance(x, bool) and x]
