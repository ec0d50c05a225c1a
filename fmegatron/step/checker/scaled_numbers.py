"""Plain numbers in a graph that Python made of numbers of ranks, or of sizes of a rank's part: which they are.

`int(axes["dp"].size)`, `len(x)` and `float(x.shape[0])` are plain numbers, of which a graph keeps the value alone. The
same step, traced where an axis has one rank, has other such numbers at the same ops of the same lines: a number that is
n there and 1 here is the number of ranks along the axis, and one that is n times as small is the size of a part. What
the step closes over was made before: where the user's code has asked a mesh for a number of ranks, a plain number as
large is taken for that one, and on random numbers must be. A number that is the same where all axes have one rank is
made of no size of a part, however large that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction

import torch

from fmegatron import tree
from fmegatron.collectives import torch_private
from fmegatron.layout import Layout, Mesh, rank_counts
from fmegatron.step.checker.context import line_of, op_name
from fmegatron.step.checker.shapes import Open
from fmegatron.step.checker.sizes import may_be_of
from fmegatron.step.description import Description
from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.other_mesh import OneRank, on_one_rank
from fmegatron.step.tracing import Traced, trace
from fmegatron.tree import structure

__all__ = ["FAULTS", "known_numbers", "there_of", "told_ranks"]

_Way = int | None  # see `_way`; None: another, of which nothing is known
_FACTORS = frozenset(("mul", "div", "_foreach_mul", "_foreach_div"))
_GIVEN = _FACTORS.union(
    "add sub rsub arange eye slice select narrow roll eq ne lt le gt ge remainder floor_divide fmod clamp clamp_min"
    " clamp_max minimum maximum constant_pad_nd split split_with_sizes pow topk scalar_tensor lift_fresh_copy".split()
)
_POWERS, _SAME = (-2, -1, 1, 2), 3
# Of a step that cannot be traced or run with other numbers, or on another mesh.
FAULTS = (
    *(Open, ValueError, RuntimeError, IndexError, TypeError),
    *(KeyError, AttributeError, AssertionError, ArithmeticError),
)


def told_ranks(fn: Callable | Description, mesh: Mesh) -> list[rank_counts.Told]:
    """What the user's code asked of the mesh, in the order of lines."""
    moved = OneRank(mesh)
    try:
        moved((mesh, fn.function if isinstance(fn, Description) else fn))
    except ValueError:  # of what one rank has not
        pass
    return sorted(moved.told, key=lambda one: (one.number is None, one.file, one.line))


def known_numbers(
    traced: Traced,
    fn: Callable,
    layouts: structure.Tree,
    told: Sequence[rank_counts.Told],
    empty: Callable[[Layout], torch.Tensor],
) -> bool:
    """Note of the numbers in a graph what they are made of (meta["made"], of factors meta["ranks"], meta["scales"]),
    and which are the same on one rank (meta["constants"]), as far as other meshes tell; whether there are any.

    layouts: of the arguments of the function. told: what the user's code asked of the mesh.
    """
    mesh, graph = tree.leaves(layouts)[0].mesh, traced.graph_module.graph
    asked = any("asked" in node.meta for node in _nodes(graph))
    axes = [a for a in mesh.names if mesh[a] > 1 and (asked or any(a in dict(one.over) for one in told))]
    made, tried = dict[torch.fx.Node, dict[float, dict[str, _Way]]](), set[str]()
    inside = _asked_inside(fn, layouts, axes, empty) if len(axes) > 1 else frozenset()
    for axis in axes:
        outside = [one for one in told if (one.file, one.line) not in inside and axis in dict(one.over)]
        try:
            moved, _ = _on_one_rank_of(fn, layouts, outside, (axis,), empty)
        except FAULTS:  # nothing is known of it
            continue
        if moved.out_paths != traced.out_paths:
            continue
        for node, ways in _differences(graph, moved.graph_module.graph, int(mesh[axis])).items():
            for number, way in ways.items():
                made.setdefault(node, {}).setdefault(number, {})[axis] = way
        tried.add(axis)
    forward = {(*_op(one), number) for one in made for number in made[one] if not one.meta.get("backward")}
    every = tried == {axis for axis in mesh.names if mesh[axis] > 1}
    for node, every_number in made.items():
        if every and {"parts", "sums"} & node.meta.keys():
            _note_more(node, every_number, mesh)
        numbers = {n: differ for n, w in every_number.items() if (differ := {a: k for a, k in w.items() if k != _SAME})}
        known = dict(node.meta.get("made", ()))
        node.meta["made"] = (*known.items(), *((n, _of(n, w, mesh)) for n, w in numbers.items() if n not in known))
        if op_name(node).rstrip("_") not in _FACTORS or {"ranks", "parts", "sums"} & node.meta.keys():
            continue
        if not node.meta.get("backward") or _is_of_forward(node, forward):  # of a mean torch makes others
            _note_factor(node, numbers, mesh)
    of_all = [one for one in told if (one.file, one.line) not in inside]
    return _note_constants(traced, fn, layouts, of_all, empty) or bool(made) if asked else bool(made)


def _note_constants(
    traced: Traced,
    fn: Callable,
    layouts: structure.Tree,
    told: Sequence[rank_counts.Told],
    empty: Callable[[Layout], torch.Tensor],
) -> bool:
    """Note the numbers that are the same where all axes have one rank, and were made when it was traced: what the step
    closes over is the same there, whatever it was made of. Whether there are any."""
    mesh = tree.leaves(layouts)[0].mesh
    try:
        there, moved = _on_one_rank_of(fn, layouts, told, mesh.names, empty)
    except FAULTS:  # nothing is known of it
        return False
    found = False
    if there.out_paths != traced.out_paths:
        return False
    for node, pairs in _pairs(traced.graph_module.graph, there.graph_module.graph):
        differ = {abs(a) for a, b in pairs if a != b}
        same = {abs(a) for a, b in pairs if a == b and 1 < abs(a) < 1 << 62} - differ
        if same := {n for n in same if not any(n == x or may_be_of(round(n), x) for x in moved.plain)}:
            node.meta["constants"], found = frozenset(same), True
    return found


def _is_of_forward(node: torch.fx.Node, forward: Collection[tuple]) -> bool:
    """Whether a number of the backward is one that an op of the forward was given."""
    return any((*_op(node), number) in forward for number in _numbers(node))


def _op(node: torch.fx.Node) -> tuple:
    """Which op of the forward a node belongs to, by its number in a graph."""
    return node.graph, node.meta.get("seq_nr")


def _note_more(node: torch.fx.Node, numbers: Mapping[float, Mapping[str, _Way]], mesh: Mesh) -> None:
    """Of numbers that know of what sizes and numbers of ranks they are made, and of plain ones besides: how another
    they are with these."""
    if left := tuple(one for one in node.meta.get("sums", ()) if set(numbers.get(one[0], {0: 0}).values()) != {_SAME}):
        node.meta["sums"] = left
    else:
        node.meta.pop("sums", None)
    if len(numbers) != 1 or "parts" not in node.meta or op_name(node).rstrip("_") not in _FACTORS:
        return
    ((number, ways),) = numbers.items()
    given, sizes, ranks = node.meta["parts"][0]
    rest = number / math.prod(int(mesh[axis]) ** float(power) for axis, power in ranks)
    shapes = {n.name: n.meta["val"].shape for n in node.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    rest /= math.prod(shapes[name][dim] ** float(power) for name, dim, power in sizes)
    if given == number and abs(rest - 1) > 1e-9 and all(way for way in ways.values()):
        node.meta["scales"] = {axis: Fraction(way) for axis, way in ways.items() if way and way != _SAME}


def _note_factor(node: torch.fx.Node, numbers: Mapping[float, Mapping[str, _Way]], mesh: Mesh) -> None:
    """meta["ranks"] of a factor that is a product of numbers of ranks; meta["scales"] of another."""
    if len(numbers) != 1:
        return
    ((number, ways),) = numbers.items()
    if any(not way for way in ways.values()):  # a sum, or unknown
        return
    over = {axis: Fraction(way) for axis, way in ways.items() if way}
    rest = number / math.prod(int(mesh[axis]) ** float(power) for axis, power in over.items())
    node.meta["ranks" if abs(rest - 1) < 1e-9 else "scales"] = over


def _of(number: float, ways: Mapping[str, _Way], mesh: Mesh) -> tuple | None:
    """What a number is made of, as `tracing` notes it of numbers that know it; None: that is not known."""
    if None in ways.values() or (0 in ways.values() and len(ways) > 1):
        return None
    if 0 not in ways.values():
        return (), tuple((axis, Fraction(power or 0)) for axis, power in ways.items()), ()
    (axis,) = ways
    ranks = int(mesh[axis])
    terms = (ranks, ((), ((axis, Fraction(1)),), ())), (number - ranks, ((), (), ()))
    return (), (), ((number, terms, Fraction(1)),)


def _on_one_rank_of(
    fn: Callable,
    layouts: structure.Tree,
    told: Sequence[rank_counts.Told],
    axes: Collection[str],
    empty: Callable[[Layout], torch.Tensor],
) -> tuple[Traced, OneRank]:
    """The step where these axes have one rank, and so have the plain numbers of ranks that Python was told."""
    mesh = tree.leaves(layouts)[0].mesh
    moved = OneRank(mesh, there_of(mesh, told, axes), axes)
    function = moved(fn)
    return trace(function, tree.map(empty, tree.map(lambda x: on_one_rank(x, axes), layouts))), moved


def there_of(mesh: Mesh, told: Sequence[rank_counts.Told], axes: Collection[str]) -> dict[float, float]:
    """{a plain number of ranks that Python was told, or its inverse: that number where these axes have one rank}."""
    found = dict[float, float]()
    for one in told:
        if one.number is not None:
            here = one.number
            for axis, power in one.over:
                here /= int(mesh[axis]) ** float(power) if axis in axes else 1
            found |= {one.number: here, 1 / one.number: 1 / here}
    return found


def _asked_inside(
    fn: Callable, layouts: structure.Tree, axes: Sequence[str], empty: Callable[[Layout], torch.Tensor]
) -> frozenset[tuple[str, int]]:
    """Where the step itself asks for numbers of ranks, and not what has made it: what the meshes of it are asked for,
    that are new when it is traced."""
    found = set[tuple[str, int]]()
    for axis in axes:
        try:
            _, moved = _on_one_rank_of(fn, layouts, (), (axis,), empty)
        except FAULTS:
            continue
        found.update((one.file, one.line) for mesh in moved.made for one in mesh.told)
    return frozenset(found)


def _differences(graph: torch.fx.Graph, moved: torch.fx.Graph, ranks: int) -> dict[torch.fx.Node, dict[float, _Way]]:
    """{node: {a number that it is given: how another it is in the graph where there is one rank}}."""
    found = dict[torch.fx.Node, dict[float, _Way]]()
    for node, pairs in _pairs(graph, moved):
        ways: dict[float, set[_Way]] = {}
        for a, b in pairs:
            ways.setdefault(a, set()).add(_way(a, b, ranks))
        knows = bool({"parts", "sums"} & node.meta.keys())
        ways = {a: way for a, way in ways.items() if knows or way != {_SAME}}
        known = {a: next(iter(way)) if len(way) == 1 else None for a, way in ways.items()}
        if known:
            found[node] = known
    return found


def _pairs(graph: torch.fx.Graph, moved: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, list[tuple[float, float]]]]:
    """Nodes that both graphs have, at the same line and as often, with each number that they are given, and that of the
    other graph in its place."""
    here, there = _by_line(graph), _by_line(moved)
    for key, nodes in here.items():
        others = there.get(key, [])
        for node, other in zip(nodes, others, strict=True) if len(nodes) == len(others) else ():
            mine, its = _numbers(node), _numbers(other)
            if len(mine) == len(its):
                yield node, list(zip(mine, its, strict=True))


def _way(here: float, there: float, ranks: int) -> _Way:
    """The power of the number of ranks by which a number is larger than on one; 0: it is a sum with that number."""
    if here == there:
        return _SAME
    power = next((p for p in _POWERS if abs(here - there * float(ranks) ** p) <= 1e-9 * abs(here)), None)
    return 0 if power is None and here - ranks == there - 1 else power


def _by_line(graph: torch.fx.Graph) -> Mapping[tuple[str, str], list[torch.fx.Node]]:
    """Nodes that are given numbers, by lines and ops."""
    found: dict[tuple[str, str], list[torch.fx.Node]] = {}
    for node in _nodes(graph):
        # An item of several results has no schema.
        if torch_private.schema_of(node.target) and op_name(node).rstrip("_") in _GIVEN:
            found.setdefault((line_of(node), op_name(node)), []).append(node)
    return found


def _nodes(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """Those of a graph, and of the compiled layers in it, each once."""
    todo, seen = [graph], {graph}
    while todo:
        for node in todo.pop(0).nodes:
            yield node
            inner = entry_of(node).graph_module.graph if hasattr(node.target, "entry") else graph
            if inner not in seen:
                seen.add(inner)
                todo.append(inner)


def _numbers(node: torch.fx.Node) -> list[float]:
    """Numbers that are no dims, in their order."""
    schema = torch_private.schema_of(node.target)
    names = [] if schema is None else [one.name for one in schema.arguments]
    given = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    flat = [one for name, x in given if "dim" not in name for one in (x if isinstance(x, (list, tuple)) else [x])]
    return [x for x in flat if isinstance(x, (int, float)) and not isinstance(x, bool)]
