"""Positions by hand: rows cut from gathered ones by a rank's index, halos, shifts, scans with what comes before.

What a step makes of its index, of numbers and of the elements along dims of a value, by moving, scaling and adding
them, is computed: on each rank, and as one rank would, whose dims are those of all ranks together. Elements are random
numbers, of dims that nothing moves along one stands for all, and a size is that of one rank where it is known what it
is made of (`rank_counts`). Where the parts of the ranks are what one rank has, the value is sharded; where their sum
is, a term of it; where each is, it is the same on all. Equal for random numbers means equal for all (Schwartz, Zippel),
as these functions are linear in them or smooth. Of all else nothing is said: of ops without an evaluation, comparisons
of data, sizes of which nothing is known. What one rank would not make (the entry of a second rank) is left out of lists
and sums there, as a loop over ranks leaves it out.

This is asked where rules end: of values that are marked as each rank's own, or as pieces of shards, in graphs that ask
for a rank's index or send to neighbours.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fmegatron.collectives import kinds, table
from fmegatron.layout import Mesh
from fmegatron.step.checker.context import Scope, line_of, op_name
from fmegatron.step.checker.dims import UNIFORM, Atom, joined, over
from fmegatron.step.checker.elements import Elements, Reader
from fmegatron.step.checker.evaluate import OF_NUMBERS, OPS
from fmegatron.step.checker.lockstep import is_crossed
from fmegatron.step.checker.shapes import GONE, Open, is_by_value, shape_on_one
from fmegatron.step.checker.values import OWED, First, Pending, Suspect, Unknown, Value, Varying
from fmegatron.step.graph.nodes import int_of, items_of, written_by
from fmegatron.step.torch_private import outside_of_tracing

__all__ = ["Positions", "after", "begin", "written"]

Node = torch.fx.Node
_OPEN = (Varying, First, Unknown, Suspect)
_ENOUGH = 1 << 22  # elements of one value on all ranks at most
_FEW = 1 << 16  # where they are all that it has
_BACK = " (backward)"
_LIKE = frozenset("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())
_VIEWS = frozenset(("view", "_unsafe_view", "reshape"))
_KEPT = frozenset((None, "number", *OWED))  # portions of parts, which do not depend on where they are
_MADE = frozenset(("psum", "all_gather", "reduce_scatter", "ppermute", "expand", "select"))
_IN_PLACE = OF_NUMBERS | {"masked_fill"}  # padding of a table's own part: nothing moves, and rules know it


@dataclass
class Positions:
    """groups: the axes together that a graph asks indices of, or sends along. known: {(axes, node): its Elements on all
    ranks and on one, None: not known}. nodes: by name. dead: nodes whose memory is written. lines: nodes of a line.
    firsts: see `_Seen._firsts`."""

    groups: tuple[tuple[str, ...], ...]
    nodes: Mapping[str, Node]
    known: dict[tuple, Any] = field(default_factory=dict)
    dead: set[Node] = field(default_factory=set)
    lines: dict[str, list[Node]] = field(default_factory=dict)
    firsts: dict[Node, Node] | None = None


def begin(mesh: Mesh, inputs: Mapping[Node, list[Node]]) -> Positions | None:
    """What is to be known of a graph's positions; None for one that moves nothing by a rank's index. One that only
    compares ids with where its range begins does not: its values need not be kept. inputs: of its nodes, in order."""
    groups: dict[tuple[str, ...], None] = {}
    numbers: dict[Node, set[tuple[str, ...]]] = {}  # nodes that are made of no data -> of which indices
    for node, sources in inputs.items():
        if node.op != "call_function":
            continue
        if node.target is table.PPERMUTE.op or node.target is table.AXIS_INDEX.op:
            asked = tuple(a for a in items_of(node.args[1]) if mesh[a] > 1)
            if node.target is table.PPERMUTE.op:
                groups[asked] = None
            else:
                numbers[node] = {asked} - {()}
            continue
        of = [numbers[n] for n in sources if n in numbers]
        if len(of) == len(sources):
            numbers[node] = set().union(*of)
        elif any(of) and op_name(node).rstrip("_") not in _IN_PLACE and not _is_range(node, numbers.__contains__):
            groups |= dict.fromkeys(itertools.chain(*of))
    groups.pop((), None)
    return Positions(tuple(groups), {node.name: node for node in inputs}) if groups else None


def written(scope: Scope, memory: Node) -> None:
    """Nothing is known any more of what was written into."""
    scope.positions.dead.add(memory)
    for key in [key for key in scope.positions.known if key[1] is memory]:
        scope.positions.known[key] = None


def after(scope: Scope, node: Node) -> bool:
    """Look at a value where rules have ended; whether more is known of it now."""
    value = scope.values[node]
    if not isinstance(value, Value) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if op_name(node) in _LIKE:  # whose shape is all that is made of it: what that is open of stays so
        return False
    cut = scope.chunks and any(n in scope.chunks for n in node.all_input_nodes)
    for axes in scope.positions.groups:
        if not cut and not any(isinstance(value.marks.get(axis), _OPEN) for axis in axes):
            continue
        seen = _Seen(scope, axes)
        one_number = not node.meta["val"].dim() and seen.is_number(node)  # without a dim that may be made up
        found = None
        if not one_number and not seen.is_unknown(node):
            whole = _Seen(scope, axes, full=True)
            found = _claimed(whole if whole.of(node) is not None else seen, node, value)
        if found is not None:
            scope.values[node] = value = found
            return True
    return False


def _claimed(seen: _Seen, node: Node, value: Value) -> Value | None:
    """The value of a node whose ranks' elements make up those of one rank; None where they do not, or are not known."""
    with outside_of_tracing(), torch.no_grad():
        known = seen.of(node)
        if known is None or known.one is None or any(one in value.excess for one in seen.axes):
            return None
        shape, whole = known.ranks[0].shape, known.one
        plain = replace(
            value.without(seen.axes), constant=None, index_of=(), ramp=False, data=False, equal_terms=False,
        )  # fmt: skip
        if all(_same(one, whole) for one in known.ranks):
            return plain
        n = len(known.ranks)
        ways = [d for d in sorted(known.tracked) if whole.shape[d] == n * shape[d]]
        ways = [d for d in ways if _same(torch.cat(known.ranks, d), whole)]
        if len(ways) == 1 and not over(plain.dims[ways[0]]):
            d = ways[0]
            return plain.with_dims((Atom(shape[d], seen.axes),) if e == d else dim for e, dim in enumerate(plain.dims))
        if not seen.is_number(node) and shape == whole.shape and _same(sum(known.ranks), whole):
            return plain.marked({axis: Pending("sum", node) for axis in seen.axes})
    return None


def _same(a: Any, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not b.dtype.is_floating_point:
        return torch.equal(a, b)
    return bool(((a - b).abs() <= 1e-9 * (1 + b.abs())).all())


class _Seen(Reader):
    """Elements of the nodes of a graph, as ranks along these axes have them and as one would. full: all that values
    have, where these are few; else one stands for all along dims that nothing moves."""

    def __init__(self, scope: Scope, axes: tuple[str, ...], full: bool = False):
        self.scope, self.axes, self.memory, self.full = scope, axes, scope.positions, full
        self.n = math.prod(int(scope.mesh[axis]) for axis in axes)

    def of(self, node: Node, along: frozenset[int] = frozenset()) -> Elements | None:
        """Of a node, with the elements along these dims, where they are not known to be of one kind; None: unknown."""
        try:
            return self.elements(node, along)
        except _FAULTS:
            return None

    def elements(self, node: Node, along: frozenset[int] = frozenset()) -> Elements:
        known, memory = self.memory.known, self.memory
        node = self._firsts().get(node, node)
        if self.full and isinstance(node.meta["val"], torch.Tensor):
            along = frozenset(range(node.meta["val"].dim()))
        if node in memory.dead or (node.op == "call_function" and op_name(node) in _LIKE and not self._is_leaf(node)):
            raise Open
        if node.op == "call_function" and op_name(node) in _VIEWS and not self.is_number(node):
            key = (self.axes, node, "view", along, self.full)
            if key not in known:
                known[key] = None
                with contextlib.suppress(*_FAULTS):  # None: not known
                    known[key] = self._made(node, along)
            if known[key] is not None:
                return known[key]
        leaf = self.is_leaf(node)
        if leaf:
            along = frozenset(d for d in along if node.meta["val"].shape[d] > 1)
        found = self._found(node, None) if not leaf or self.is_made(node) else None
        if leaf and (found is None or not along <= found.tracked | found.flat):
            found = self._found(node, along | frozenset(self._sharded(node)))
            found = self._found(node, None) if found is None else found
        if found is None:
            raise Open
        return found

    def _found(self, node: Node, along: frozenset[int] | None) -> Elements | None:
        """As any that lie as rules say (along these dims), or (None) by the op that makes it; None: not known."""
        known, key = self.memory.known, (self.axes, node, along, self.full)
        if key not in known:
            known[key] = None
            try:
                known[key] = self._made(node) if along is None else self._leaf(node, along)
            except _FAULTS:
                pass  # None: not known
        return known[key]

    def is_leaf(self, node: Node) -> bool:
        """Whether rules know what it is, so that its elements may be taken as any."""
        return not self.is_number(node) and self._is_leaf(node)

    def is_number(self, node: Node) -> bool:
        """Whether it is made of no data."""
        key = ("number", node)
        if key not in self.memory.known:
            self.memory.known[key] = node.op == "call_function" and (
                kinds.collective_of(node.target) is table.AXIS_INDEX
                or (op_name(node) in OPS or bool(node.all_input_nodes))
                and all(self.is_number(n) for n in node.all_input_nodes)
            )
        return self.memory.known[key]

    def is_unknown(self, node: Node) -> bool:
        """Whether something has no evaluation on the way to what rules know: seen before any shape is looked for."""
        key = ("unknown", self.axes, node)
        if key not in self.memory.known:
            self.memory.known[key] = False
            if node.op == "call_function" and not self.is_number(node) and not self._is_leaf(node):
                lost = (
                    _evaluation(node) is None
                    or op_name(node).rstrip("_") in OF_NUMBERS
                    or _is_range(node, self.is_number)
                )
                self.memory.known[key] = lost or any(self.is_unknown(n) for n in node.all_input_nodes)
        return self.memory.known[key]

    # ---- values that rules know -------------------------------------------------------------------------------------
    def _value(self, node: Node) -> Value | None:
        value = self.scope.values.get(node)
        return value if isinstance(value, Value) else None

    def _is_leaf(self, node: Node) -> bool:
        """Whether rules know what it is over these axes: sharded on one dim, the same on all, or a pending sum."""
        value = self._value(node)
        if value is None or node in self.scope.chunks or value.pads:
            return False
        if any(a in value.excess or value.portion.get(a) not in _KEPT for a in self.axes) or value.equal_terms:
            return False
        marks = [value.marks.get(axis) for axis in self.axes]
        if any(marks):
            return all(isinstance(m, Pending) and m.kind == "sum" for m in marks) and not set(self.axes) & value.sharded
        return not set(self.axes) & value.sharded or bool(self._sharded(node))

    def is_made(self, node: Node) -> bool:
        """Whether, though rules know it, what it is made of may be used beside it: sums of parts, what was sent."""
        value = self._value(node)
        if value is None or node.op != "call_function":
            return False
        return value.is_(self.axes[0], Pending) or op_name(node) in _MADE

    def _sharded(self, node: Node) -> list[int]:
        """The dim that the axes, and no other, shard in parts of one piece."""
        value = self._value(node)
        dims = [d for d, dim in enumerate(value.dims) if over(dim) & set(self.axes)] if value else []
        if len(dims) != 1 or value is None:
            return []
        atoms = joined(value.dims[dims[0]])
        whole = len(atoms) == 1 and atoms[0].axes == self.axes and atoms[0].plain
        return dims if whole and not atoms[0].cuts and not atoms[0].counted else []

    def _leaf(self, node: Node, along: frozenset[int]) -> Elements:
        value, shape = self.scope.values[node], tuple(node.meta["val"].shape)
        cut, whole = self._sharded(node), self.whole(node)
        if whole == GONE:
            raise Open
        if value.constant is None and any(whole[d] != n * (self.n if d in cut else 1) for d, n in enumerate(shape)):
            raise Open
        rank = [n if d in along else 1 for d, n in enumerate(shape)]
        if value.constant is not None and not cut:
            number = float(value.constant)
            for axis, power in value.ranks.items():
                number /= int(self.scope.mesh[axis]) ** float(power) if axis in self.axes else 1
            here = torch.full([1] * len(shape), float(value.constant), dtype=torch.float64)
            return Elements((here,) * self.n, torch.full_like(here, number), frozenset(), frozenset(range(len(shape))))
        if any(atom.axes is UNIFORM or atom.counted or atom.fold for d in along - set(cut) for atom in value.dims[d]):
            raise Open
        whole = [n * self.n if d in cut else n for d, n in enumerate(rank)]
        if math.prod(whole) * self.n > (_FEW if self.full else _ENOUGH):
            raise Open
        draw = torch.Generator().manual_seed(1 + len(self.memory.known))

        def drawn(of: Sequence[int]) -> torch.Tensor:
            return torch.randn(list(of), generator=draw, dtype=torch.float64)

        if cut:
            one = drawn(whole)
            return Elements(tuple(one.chunk(self.n, cut[0])), one, along)
        if value.is_(self.axes[0], Pending):
            terms = tuple(drawn(rank) for _ in range(self.n))
            return Elements(terms, torch.stack(terms).sum(0), along)
        one = drawn(rank)
        return Elements((one,) * self.n, one, along)

    # ---- what is made -----------------------------------------------------------------------------------------------
    def _made(self, node: Node, along: frozenset[int] | None = None) -> Any:
        if node.op != "call_function":
            raise Open
        evaluate = _evaluation(node)
        if evaluate is None:
            raise Open
        found = evaluate(self, node) if along is None else evaluate(self, node, along)
        each = found if isinstance(found, list) else [found]
        for one in each:
            if sum(x.numel() for x in one.ranks) > (_FEW if self.full else _ENOUGH):
                raise Open
        meta = node.meta["val"]
        for one, like in zip(each, meta if isinstance(meta, (list, tuple)) else [meta], strict=True):
            if len(one.ranks[0].shape) != like.dim():
                raise Open
            for d, n in enumerate(like.shape):
                if one.ranks[0].shape[d] not in (n, 1) or (d in one.tracked and one.ranks[0].shape[d] != n):
                    raise Open
        if isinstance(meta, torch.Tensor):
            free = [d for d in range(meta.dim()) if d not in each[0].tracked | each[0].flat]
            if is_crossed(self, node, free):
                raise Open
        return found

    # ---- numbers ----------------------------------------------------------------------------------------------------
    def number(self, node: Node, x: int | float, lines: bool = True) -> int | float:
        """A number that a node was given, as one rank has it. lines: in the backward as the forward has it."""
        if isinstance(x, bool) or abs(x) >= 2**62:
            return x
        found = self._noted(node, x)
        line = line_of(node)
        if lines and line.endswith(_BACK):
            before = self.lines().get(line.removesuffix(_BACK), ())
            for one in before:
                found |= self._noted(one, x) | {-y for y in self._noted(one, -x)}
            if not found and x not in (0, 1, -1) and not any(_given(one.args, x) for one in before):
                raise Open  # torch has made it, of sizes, say
        if len(found) > 1:
            raise Open
        if found:
            return found.pop()
        if x in (0, 1, -1) or abs(x) in node.meta.get("constants", ()):
            return x
        if node.meta.get("of_gradient") and not line.endswith(_BACK):
            raise Open  # of a gradient that is written out, whose numbers know nothing
        if any(axes is None or axes & set(self.axes) for of in self.scope.asked.values() for axes in of):
            raise Open  # Python was told a size of a part as a plain number, of which this may be made
        return x

    def _noted(self, node: Node, x: int | float) -> set:
        found = set()
        for value, made in node.meta.get("made", ()):
            if value == x:
                one = None if made is None else self._on_one(value, made)
                if one is None or (isinstance(x, int) and abs(one - round(one)) > 1e-9):
                    raise Open
                found.add(round(one) if isinstance(x, int) else one)
        return found

    def _on_one(self, value: float, made: tuple) -> float:
        """What a number is on one rank."""
        sizes, ranks, sums = made
        if not sizes and not ranks and len(sums) == 1 and sums[0][2] == 1 and sums[0][0] == value:
            return sum(self._on_one(part, of) for part, of in sums[0][1])
        return value * self._ratio(made)

    def _ratio(self, made: tuple) -> float:
        """How many times as large a number is on one rank."""
        sizes, ranks, sums = made
        ratio = 1.0
        for name, dim, power in sizes:
            of = self.memory.nodes[name]
            ratio *= (self.whole(of)[dim] / of.meta["val"].shape[dim]) ** float(power)
        for axis, power in ranks:
            ratio *= int(self.scope.mesh[axis]) ** -float(power) if axis in self.axes else 1
        for value, terms, power in sums:
            if not value:
                raise Open
            one = sum(self._on_one(part, of) for part, of in terms)
            ratio *= (one / value) ** float(power)
        return ratio

    def whole(self, node: Node) -> Any:
        """The shape on one rank of what a node gives, of several results a list. Each node is looked at once."""
        known = self.memory.known
        todo = [node]
        while todo:
            one = todo[-1]
            inputs = () if is_by_value(self, one) else one.all_input_nodes
            ahead = [n for n in inputs if ("whole", self.axes, n) not in known]
            if ahead and ("whole", self.axes, one) not in known:
                todo += ahead
                continue
            todo.pop()
            key = ("whole", self.axes, one)
            if key not in known:
                known[key] = None
                try:
                    known[key] = shape_on_one(self, one)
                except _FAULTS:
                    pass
        found = known["whole", self.axes, node]
        if found is None:
            raise Open
        return found

    def _firsts(self) -> Mapping[Node, Node]:
        """Of each node that makes what one before it has made, the first that does: the same op on the same operands
        gives the same, of a graph that writes into nothing."""
        if self.memory.firsts is None:
            nodes = [n for n in self.memory.nodes.values() if n.op == "call_function"]
            self.memory.firsts, made = {}, dict[tuple, Node]()
            for node in nodes if not any(map(written_by, nodes)) else ():
                if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                    continue
                given = torch.fx.map_arg((node.args, node.kwargs), lambda n: self.memory.firsts.get(n, n))
                first = made.setdefault((node.target, repr(given), repr(node.meta.get("made"))), node)
                if first is not node:
                    self.memory.firsts[node] = first
        return self.memory.firsts

    def lines(self) -> Mapping[str, list[Node]]:
        """The nodes of each line, found when they are first asked for: most graphs never do."""
        if not self.memory.lines:
            for node in self.memory.nodes.values():
                if node.op == "call_function":
                    self.memory.lines.setdefault(line_of(node), []).append(node)
        return self.memory.lines

    def forward(self, node: Node, fits: Callable[[Node], bool]) -> list[Node]:
        """The nodes on the line of a node of the backward that fit it: where autograd says which is its own, that; a
        node of the forward itself has none."""
        line, number = line_of(node), node.meta.get("seq_nr")
        nodes = self.lines().get(line.removesuffix(_BACK), ()) if line.endswith(_BACK) else ()
        found = [one for one in nodes if fits(one)]
        return [one for one in found if one.meta.get("seq_nr") == number is not None] or found

    def size_as_forward(self, node: Node, shape: Sequence[int], dim: int) -> int:
        """The size on one rank of a dim of a shape that torch took from the forward: of all of its nodes of that shape
        on that line, and what they are made of, it is the same; else as the number that it is."""
        found = set()
        for one in self.forward(node, lambda _: True):
            for each in (one, *one.all_input_nodes):
                meta = each.meta.get("val")
                if isinstance(meta, torch.Tensor) and tuple(meta.shape) == tuple(shape):
                    found.add(self.whole(each)[dim])
        if len(found) > 1:
            raise Open
        if found:
            return found.pop()
        if line_of(node).endswith(_BACK) and shape[dim] > 1:
            raise Open
        return int(self.number(node, int_of(shape[dim])))


def _is_range(node: Node, is_number: Callable[[Node], bool]) -> bool:
    """Whether whole numbers of data meet one number of a rank: ids and where its range begins (`ranges.py`)."""
    if op_name(node) not in ("add", "sub", "rsub") or node.meta["val"].is_floating_point():
        return False
    return any(not n.meta["val"].dim() and is_number(n) for n in node.all_input_nodes)


def _evaluation(node: Node) -> Callable[..., Any] | None:
    collective = kinds.collective_of(node.target)
    if collective is not None:
        return OPS.get(collective.name)
    return OPS.get(op_name(node).rstrip("_") if hasattr(node.target, "_schema") else "getitem")


def _given(args: Any, x: int | float) -> bool:
    """Whether a number, or its negative, is among arguments."""
    if isinstance(args, (list, tuple)):
        return any(_given(one, x) for one in args)
    return isinstance(args, (int, float)) and args in (x, -x)


_FAULTS = (Open, RuntimeError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError)
