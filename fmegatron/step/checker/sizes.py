"""Sizes of a rank's parts as numbers: of a sharded dim it is 1/n of what one rank has (`layout.rank_counts`).

A number that is a product of such sizes, and of numbers of ranks, is known to be, and which; one that Python was told
as a plain number (`len(x)`, `float(x.shape[0])`) may be one wherever a number is as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fmegatron.step.checker.context import Scope, line_of, op_name, suspected
from fmegatron.step.checker.dims import NOWHERE, UNIFORM, Dim, over, size_of
from fmegatron.step.checker.values import NOTHING, First, Pending, Suspect, Unknown, Value, Wrong
from fmegatron.step.graph.nodes import int_of, items_of, node_of, user_line

Node = torch.fx.Node
_FILLED = frozenset(("full", "new_full"))
_SHAPED = _FILLED.union(
    "arange zeros ones empty new_zeros new_ones new_empty view _unsafe_view reshape expand repeat as_strided"
    " unflatten linspace eye repeat_interleave".split()
)
_CUTS = frozenset("select slice roll narrow split split_with_sizes unfold".split())
_ALONG = frozenset("select slice roll narrow split split_with_sizes unfold topk kthvalue".split())
_NUMBERS = MappingProxyType({"slice": slice(2, 5), "select": slice(2, 3), "unfold": slice(2, 4)})
_SUM = "its number is a sum with a size of a rank's part, which on one rank is no multiple of it"
_VIEWS = ("view", "_unsafe_view", "reshape")
_OF_PLACES = frozenset(
    "add sub rsub mul div remainder fmod floor_divide pow clamp minimum maximum eq ne lt le gt ge".split()
)
_TURNS = frozenset("flip roll cumsum cumprod logcumsumexp cummax cummin sort".split())
_MOVED_ON = "makes other places of a number that is another on one rank: a size of a rank's part, or a number of ranks"
_TOLD = "its number may be made of a size of a rank's part, which Python was told as a plain number (int, len, float)"
_ROLLED = "rolls by a number that is another on one rank: a size of a rank's part, or a number of ranks"
_PERMUTED = "a permutation made of a size of a rank's part is another on each number of ranks"
_OF_ALL = "the same with the size of the whole dim: n * axes[name].size - 1 for n - 1"


class Known(NamedTuple):
    """{axis: power} of the numbers of ranks by which a factor is another than on one rank; sure: whether that is all of
    it, and it may not be made up for by another number in it."""

    over: Mapping[str, Fraction]
    sure: bool


class Beside(NamedTuple):
    """What a factor is beside a size of a whole dim: {axis: power} of numbers of ranks, and their product."""

    over: Mapping[str, Fraction]
    of_ranks: float


def read(graph: torch.fx.Graph) -> frozenset[str]:
    """Names of the nodes whose sizes numbers of a graph are made of, or may be."""
    found = set()
    for node in graph.nodes:
        meta = node.meta
        if "parts" in meta:
            found.update([name for _, sizes, _ in meta["parts"] for name, *_ in sizes])
        if "sums" in meta:
            found.update([name for _, made in meta["sums"] for name in _names(made)])
        if "asked" in meta:
            found.add(node.name)
    return frozenset(found)


def _names(made: tuple) -> list[str]:
    return [name for name, *_ in made[0]] + [name for _, terms, _ in made[2] for _, of in terms for name in _names(of)]


def note(scope: Scope, node: Node, value: Any) -> None:
    """Keep the dims of a node whose sizes are read, as a value is dropped after its last use."""
    if not isinstance(value, Value):
        return
    for d, dim in enumerate(value.dims):
        open_ = any(not isinstance(mark, (Pending, First)) for mark in value.marks.values())
        scope.sizes[node.name, d] = None if open_ or any(atom.axes is UNIFORM for atom in dim) else dim
    for d in node.meta.get("asked", ()):
        dim = scope.sizes[node.name, d]
        scope.asked.setdefault(size_of(value.dims[d]), set()).add(None if dim is None else over(dim))


def of_factor(scope: Scope, node: Node, factor: float, divides: bool) -> Known | None:
    """What is known of a factor that is made of sizes (divides: it is 1 by a number); None: it is not, as far as is
    known."""
    number = 1 / factor if divides and factor else factor
    for whole, sizes, ranks in node.meta.get("parts", ()):
        if abs(number - whole) <= 1e-9 * abs(whole):
            return _powers(scope, whole, sizes, ranks, -1 if divides else 1)
    return None


def is_of_all(scope: Scope, node: Node, axis: str) -> bool:
    """Whether the one number that a node is given is made of sizes that the ranks of an axis do not share."""
    given = node.meta.get("parts", ())
    if len(given) != 1:
        return False
    ((whole, made, ranks),) = given
    known = _powers(scope, whole, made, ranks, 1)
    return known is not None and known.sure and axis not in known.over


def of_tensor(scope: Scope, of: Value, divides: bool) -> Known | None:
    """Of a tensor that holds a size of a rank's part, or a product of such sizes and numbers of ranks."""
    if not of.constant:
        return None
    number = 1 / of.constant if divides else of.constant
    if abs(number / _product(scope, of.ranks) - 1) < 1e-9:
        return None  # of numbers of ranks alone
    return Known({axis: -power if divides else power for axis, power in of.ranks.items()}, True)


def of_ranks(
    scope: Scope, over: Mapping[str, Fraction], factor: float, divides: bool
) -> tuple[Mapping[str, Fraction], float]:
    """{axis: power} of the numbers of ranks whose product a factor is, and what it is besides. Where it divides by some
    and by another number (that of all rows), nothing is known of it."""
    if not over or not factor:
        return NOTHING, 1
    over = {axis: -power if divides else power for axis, power in over.items() if axis in scope.mesh.names}
    rest = factor / _product(scope, over)
    if abs(rest - 1) < 1e-9:
        return over, 1
    least = min(over.values(), default=0)
    return (over, rest) if least > 0 or least < -1 else (NOTHING, 1)


def beside_rows(scope: Scope, over: Mapping[str, Fraction], factor: float, divides: bool) -> Beside | None:
    """Of a factor that is made of numbers of ranks, and beside these is as large as a size of a rank's part of which
    Python was told: {axis: power} of those ranks that do not share the dim, and their product. With the number of those
    that do, it is the size of the whole dim. None where that is not what it is."""
    over = {axis: power for axis, power in over.items() if scope.mesh.names.count(axis) and scope.mesh[axis] > 1}
    number = 1 / factor if divides and factor else factor
    rest = number / _product(scope, over)
    found = scope.asked.get(round(rest), ()) if abs(rest - round(rest)) < 1e-9 and round(rest) > 1 else ()
    own = next(iter(found)) if len(found) == 1 else None
    if not over or own is None or any(over.get(axis) != 1 for axis in own if scope.mesh[axis] > 1):
        return None
    over = {axis: -power if divides else power for axis, power in over.items() if axis not in own}
    return Beside(over, _product(scope, over))


def is_shared_out(scope: Scope, node: Node, axis: str) -> bool:
    """Whether the one number that a node is given is divided by the number of ranks along an axis, once, and made of
    nothing else that is theirs alone."""
    given = node.meta.get("made", ())
    if len(given) != 1 or given[0][1] is None:
        return False
    ((number, (made, ranks, sums)),) = given
    if sums:
        return False
    if made:
        known = _powers(scope, number, made, ranks, 1)
        return known is not None and known.over.get(axis) == -1 and known.sure
    rest = number / _product(scope, {a: power for a, power in ranks if a in scope.mesh.names})
    theirs = [of is None or axis in of for size, found in scope.asked.items() for of in found if may_be_of(rest, size)]
    return dict(ranks).get(axis) == -1 and not any(theirs)


def _product(scope: Scope, over: Mapping[str, Fraction]) -> float:
    return math.prod(int(scope.mesh[axis]) ** float(power) for axis, power in over.items())


def _powers(scope: Scope, whole: float, sizes: tuple, ranks: tuple, sign: int) -> Known | None:
    """The axes of the ranks are taken as they are said; a number beside them may be of anything."""
    powers = {axis: power * sign for axis, power in ranks if scope.mesh.names.count(axis) and scope.mesh[axis] > 1}
    rest = whole / _product(scope, {axis: power for axis, power in ranks if axis in scope.mesh.names})
    for name, d, power in sizes:
        dim = scope.sizes.get((name, d))
        if dim is None:
            return None
        rest /= size_of(dim) ** float(power)
        for axis in over(dim):
            powers[axis] = powers.get(axis, Fraction(0)) - sign * power
    powers = {axis: power for axis, power in powers.items() if power}
    return Known(powers, abs(rest - 1) < 1e-9)


def as_asked(scope: Scope, node: Node, number: float) -> frozenset[str]:
    """The axes that shard a dim of which Python was told the size, where a number that a node is given is as large, is
    not known to be the same on one rank, and no other such dim is as large."""
    constant = any(abs(n - number) < 1e-9 for n in node.meta.get("constants", ()))
    found = scope.asked.get(round(number), ()) if abs(number - round(number)) < 1e-9 and not constant else ()
    return next(iter(found)) or frozenset() if len(found) == 1 else frozenset()


def shape_of_parts(scope: Scope, node: Node, shape: tuple[int, ...]) -> tuple[Dim | None, ...]:
    """Of each dim of this size what it is, where it is the size of a dim of another value; None: not known."""
    known: dict[int, list[Dim | None]] = {}
    for whole, sizes, ranks in node.meta.get("parts", ()):
        one = not ranks and len(sizes) == 1 and sizes[0][2] == 1
        known.setdefault(round(whole), []).append(scope.sizes.get(sizes[0][:2]) if one else None)
    found = []
    for n in shape:
        dims = known.get(n, [None])
        dims = dims if len(dims) >= shape.count(n) else [None]  # of two dims of one size it may be either
        same = dims[0] is not None and size_of(dims[0]) == n and all(dim == dims[0] for dim in dims)
        found.append(dims[0] if same else None)
    return tuple(found)


def by_own_size(scope: Scope, node: Node, found: Any) -> Any:
    """What an op gives whose number is a sum with a size of a rank's part (`n - 1`): on one rank it is no multiple of
    that. A shape may be one, and so may an index or a bound of a dim that the ranks share, or of places in their own
    parts; of all else nothing is known over these axes."""
    name, args = op_name(node), (*node.args, *node.kwargs.values())
    if name in _SHAPED:
        args = node.args[1:2] if name in _FILLED else ()
    elif name == "roll":
        args = items_of(node.args[1])
    given = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    if name == "lift_fresh_copy" and isinstance(found, Value) and found.constant is not None:
        given = [found.constant]
    mixed = [
        axes for number, term in node.meta["sums"] if _is_given(number, given) and (axes := _of_term(scope, term)[1])
    ]
    axes = frozenset().union(*mixed)
    if axes and name in _ALONG:
        x = scope.values[node_of(node.args[0])]
        dim = _dim_of(node, name) % len(x.dims)
        axes -= over(x.dims[dim]) | x.may_shard(dim)
    if axes and name not in _ALONG and not any(n.meta["val"].is_floating_point() for n in node.all_input_nodes):
        xs = [x for n in node.all_input_nodes if isinstance(x := scope.values.get(n), Value)]  # places, not numbers
        bounded = name.startswith("clamp") or any(n in scope.ranges for n in node.all_input_nodes)
        axes = frozenset() if bounded else axes.difference(*(x.axes().union(x.index_of) for x in xs))
    if not axes:
        return found
    alone = name in ("mul", "div") and all(float(n).is_integer() for n, _ in node.meta["sums"]) and _alone(node)
    mark = suspected(node, _SUM, _OF_ALL)._replace(births=frozenset()) if alone else scope.vague(node, _SUM)
    return [_marked(v, axes, mark) for v in found] if isinstance(found, list) else _marked(found, axes, mark)


def of_places(scope: Scope, node: Node, found: Any) -> Any:
    """What moves by a number that is another on one rank, as it is made of a size of a rank's part, or of a number of
    ranks. Whole numbers are places: where the ranks share them, what is made of them and such a number is not what one
    rank makes. A value that is rolled by it, or taken apart by it and turned round or put together in another order, is
    in another order on each number of ranks. Of all that nothing is known."""
    name, meta = op_name(node).rstrip("_"), node.meta.get("val")
    if not isinstance(found, Value) or not isinstance(meta, torch.Tensor) or node.meta.get("backward"):
        return found
    numbers = [made for _, made in node.meta["made"]]
    axes = frozenset[str]().union(*(_differs(scope, made) for made in numbers))
    axes = frozenset(axis for axis in axes if found.marks.get(axis) is None or found.is_(axis, Pending))
    if name == "roll" and axes:
        x = scope.values[node_of(node.args[0])]
        axes -= over(x.dims[_dim_of(node, name) % len(x.dims)]) if x.dims else NOWHERE
        return _marked(found, axes, scope.vague(node, _ROLLED)) if axes else found
    if name in _VIEWS:
        axes = axes - found.sharded if _is_reordered(node) else NOWHERE
        return _marked(found, axes, scope.vague(node, _PERMUTED)) if axes else found
    if name not in _OF_PLACES or (meta.is_floating_point() and "sums" not in node.meta):
        return found
    if any(n.meta["val"].is_floating_point() for n in node.all_input_nodes):
        return found
    axes = found.sharded if None in numbers else axes & found.sharded
    axes = frozenset(axis for axis in axes if found.marks.get(axis) is None)
    return _marked(found, axes, scope.vague(node, _MOVED_ON)) if axes else found


def is_cut(node: Node) -> bool:
    """Whether the user's code takes a part, or rolls, by a number that is made of a size of a part."""
    if op_name(node) not in _CUTS or node.meta.get("backward") or _of_library(node):
        return False
    return any(made is not None and made[0] for _, made in node.meta.get("made", ()))


def _of_library(node: Node) -> bool:
    return bool(node.meta.get("outside")) or line_of(node) != user_line(line_of(node))


def of_asked(scope: Scope, node: Node, found: Any) -> Any:
    """What is taken of a dim that the ranks share, or rolled along it, by a plain number as large as a size of a rank's
    part of which Python was told (or half, or a multiple of it, one more or less): as of a number that is another on
    one rank, nothing is known; of one that is the same there (`scaled_numbers`) nothing is in doubt."""
    name = op_name(node)
    if name not in _CUTS or node.meta.get("backward") or _of_library(node):
        return found  # the library takes sizes apart that Python knows, of what ranks have
    known = {abs(number) for number, _ in node.meta.get("made", ())}.union(node.meta.get("constants", ()))
    flat = [one for a in node.args[_NUMBERS.get(name, slice(1, 2))] for one in (items_of(a) if _is_list(a) else [a])]
    given = {abs(n) for n in flat if isinstance(n, int) and 1 < abs(n) < 1 << 62} - known
    told = [axes for size, of in scope.asked.items() if any(may_be_of(n, size) for n in given) for axes in of]
    if not told:
        return found
    axes = frozenset(axis for axis in scope.mesh.names if scope.mesh[axis] > 1)
    axes = axes if None in told else frozenset[str]().union(*told)
    x = scope.values[node_of(node.args[0])]
    if isinstance(x, Value) and x.dims:
        dim = _dim_of(node, name) % len(x.dims)
        axes -= over(x.dims[dim]) | x.may_shard(dim)
    if not axes:
        return found
    mark = scope.vague(node, _TOLD)
    return [_marked(v, axes, mark) for v in found] if isinstance(found, list) else _marked(found, axes, mark)


def may_be_of(n: float, size: int) -> bool:
    """Whether a number may be one that Python made of a size."""
    return size > 1 and (not n % size or abs(n - size) == 1 or n in (size // 2, size - size // 2))


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple))


def _differs(scope: Scope, made: tuple | None) -> frozenset[str]:
    """The axes whose number of ranks a number depends on; of one that is made of what is not known, none."""
    sizes, ranks, sums = made or ((), (), ())
    powers = {axis: power for axis, power in ranks if scope.mesh.names.count(axis) and scope.mesh[axis] > 1}
    for name, d, power in sizes:
        for axis in over(scope.sizes.get((name, d)) or ()):
            powers[axis] = powers.get(axis, Fraction(0)) - power
    terms = [of for _, given, _ in sums for _, of in given]
    return frozenset(axis for axis, power in powers.items() if power).union(*(_differs(scope, of) for of in terms))


def _is_reordered(view: Node) -> bool:
    """Whether what a view takes apart is turned round, or put together again in another order of its dims."""
    if any(op_name(n) in _TURNS for n in view.users):
        return True
    for one in view.users:
        behind = list(one.users) if op_name(one) in ("permute", "transpose", "t") else []
        behind += [user for n in behind if op_name(n) == "clone" for user in n.users]
        if any(op_name(n) in _VIEWS and n.meta["val"].dim() < view.meta["val"].dim() for n in behind):
            return True
    return False


def _alone(node: Node) -> bool:
    """Whether no other op than this, and its gradient, is given a sum with a size: nothing makes up for it."""
    others = [n for n in node.graph.nodes if n.meta.get("sums") and n.meta.get("seq_nr") != node.meta.get("seq_nr")]
    given = node.all_input_nodes
    return not others and bool(given) and all(n.meta["val"].is_floating_point() for n in given)


def _marked(x: Any, axes: frozenset[str], mark: Any) -> Any:
    if not isinstance(x, Value):
        return x
    return x.marked({a: mark for a in sorted(axes) if not x.is_(a, Unknown, Wrong, Suspect)})


def _is_given(number: float, given: list) -> bool:
    """Whether it is one of these numbers, as it is, negative or in the denominator."""
    wanted = (number, -number, 1 / number)
    return any(abs(one - n) <= 1e-9 * abs(n) for one in given for n in wanted)


def _dim_of(node: Node, name: str) -> int:
    if name == "roll":
        return int(items_of(node.args[2])[0]) if len(node.args) > 2 else 0
    at = 2 if name in ("topk", "kthvalue", "split", "split_with_sizes") else 1
    dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0 if at == 1 or "split" in name else -1)
    return int_of(dim)


def _of_term(scope: Scope, term: tuple) -> tuple[Mapping[str, Fraction], frozenset[str]]:
    """{axis: power} of the numbers of ranks by which it is another than on one rank; the axes of which it is no power,
    as it is a sum of what is and what is not, or is to another."""
    sizes, ranks, sums = term
    powers = {axis: power for axis, power in ranks if scope.mesh.names.count(axis) and scope.mesh[axis] > 1}
    for name, d, power in sizes:
        for axis in over(scope.sizes.get((name, d)) or ()):
            powers[axis] = powers.get(axis, Fraction(0)) - power
    mixed: frozenset[str] = frozenset()
    for _, terms, power in sums:
        found = [_of_term(scope, of) for _, of in terms]
        mixed = mixed.union(*(axes for _, axes in found))
        for axis in frozenset().union(*(one for one, _ in found)):
            first, *others = [one.get(axis, Fraction(0)) for one, _ in found]
            if any(one != first for one in others):
                mixed |= {axis}
            powers[axis] = powers.get(axis, Fraction(0)) + power * first
    return {axis: power for axis, power in powers.items() if power}, mixed
