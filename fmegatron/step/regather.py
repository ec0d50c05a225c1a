"""Where a step gathers: a pass over a trace that puts gathers of weights before their first use, and again before the
backward's.

A gather of *weights* depends on nothing but the step's arguments, so it may run at any time and as often as one likes:
the same op on the same arguments is the same value. As written it may stand far from its use (all weights at the start
of a loss), and autograd keeps what it brings until the backward. Here every array that a gather brings is gathered for
itself: before its first use, and, where the backward reads it too, again before the first use there; what the forward
gathered is free behind its last use. Gradients that would wait for each other until one reduce-scatter takes them all
are reduced when they are there.

Copies of parameters that rest in host memory (`step.offload.brought`) are placed alike, behind the gathers that take
them: what a step reads of a stack is copied layer by layer.

The pass runs where a function is traced, so it is the new graph that is checked, simulated, planned, lowered and run.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from fmegatron.collectives import kept, kinds, table
from fmegatron.step.copied import copied_in_parts, is_copied
from fmegatron.step.graph.nodes import int_of, is_light, is_view, items_of, node_of
from fmegatron.step.lower import copy_module
from fmegatron.step.torch_private import opname

__all__ = ["TOGETHER", "regathered"]

TOGETHER = 1 << 22  # bytes, gathered: smaller arrays travel together up to here, larger ones alone
_GATHERS, _COPIES = "gathers", "copies of parameters"
_OF_BACKWARD = " (backward)"  # behind the line of a node of the backward
_LAID = frozenset({"detach", "alias", "clone", "_to_copy", "convert_element_type", "contiguous"})


def regathered(graph_module: fx.GraphModule, together: int = TOGETHER) -> fx.GraphModule:
    """A traced graph whose gathers of weights are placed; the same module where that gains nothing.

    Nothing is gained, and a gather stays as it is, where behind its last use in the forward less than `together` bytes
    of others are used: the backward begins with what they bring. Of small arrays, as many bytes more are kept. A gather
    whose arrays wait for their first use behind others is placed if these have as many bytes.
    It stays, too, where it is marked (`reshard_after_forward=False`), where the graph returns what it brings, and where
    other collectives are made of it.

    together: bytes. Arrays of at least as many are gathered (and their gradients reduced) one by one, smaller ones
    together up to as many, in the order of their use, those that are gathered again apart from the others.
    """
    for placed in (_GATHERS, _COPIES):
        if placed == _COPIES:
            graph_module = copied_in_parts(graph_module)
        if not _to_place(_Trace(graph_module.graph, placed), together):
            continue
        module = copy_module(graph_module)
        trace = _Trace(module.graph, placed)
        arrays = _to_place(trace, together)
        _Placing(trace, arrays, together).run()
        if placed == _GATHERS:
            _reduce_when_ready(module.graph, arrays, together)
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
        graph_module = module
    return graph_module


# ---- what is there ---------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Array:
    """An array that a gather brings, or a copy from host memory, which is its own item. reads: (position of the reader,
    reader), in order, of it and of what is laid out or cast of it. turn: the position from which on the backward reads
    it, None where it does not."""

    gather: fx.Node
    index: int
    item: fx.Node
    nbytes: int
    reads: list[tuple[int, fx.Node]] = field(default_factory=list)
    turn: int | None = None
    again: bool = False  # whether it is gathered again for the reads from `turn` on

    @property
    def first(self) -> int:
        return self.reads[0][0]

    @property
    def last(self) -> int:
        """The position of its last read in the forward; of one that only the backward reads, of the first there."""
        before = [at for at, _ in self.reads if self.turn is None or at < self.turn]
        return before[-1] if before else self.first

    def version(self, at: int) -> int:
        """Which gather serves a read at a position: the first, or that for the backward."""
        return int(self.again and self.turn is not None and at >= self.turn)


class _Trace:
    """A graph with the arrays that its gathers of weights bring, or its copies of them, and what lies behind each."""

    def __init__(self, graph: fx.Graph, what: str):
        self.graph, self.nodes = graph, list(graph.nodes)
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.behind: dict[fx.Node, tuple[_Array, ...]] = {}  # node that is laid out of arrays -> these
        self.arrays: list[_Array] = []
        movable, placed = set(), set()
        for node in self.nodes:
            collective = kinds.collective_of(node.target)
            if node.op in ("placeholder", "get_attr") or (
                all(x in movable for x in node.all_input_nodes)
                and (
                    is_light(node)
                    or is_copied(node)
                    or (what == _GATHERS and collective in (table.ALL_GATHER, table.PMAX))
                )
            ):
                movable.add(node)
            if node not in movable or node.op != "call_function":
                continue
            if what == _COPIES and is_copied(node):
                self.arrays.append(_Array(node, 0, node, _nbytes(node)))
                self.behind[node] = (self.arrays[-1],)
            elif collective is table.ALL_GATHER and not any(x in self.behind for x in node.all_input_nodes):
                placed.add(node)
            elif node.target is operator.getitem and node.args[0] in placed:
                index = int_of(node.args[1])
                self.arrays.append(_Array(node.args[0], index, node, _nbytes(node)))
                self.behind[node] = (self.arrays[-1],)
            elif of := tuple(dict.fromkeys(a for x in node.all_input_nodes for a in self.behind.get(x, ()))):
                self.behind[node] = of
        fixed = set()
        for node in self.nodes:
            if node in self.behind and kinds.collective_of(node.target) is None:
                continue
            for array in dict.fromkeys(a for x in node.all_input_nodes for a in self.behind.get(x, ())):
                array.reads.append((self.position[node], node))
                if node.op == "output" or node in self.behind:
                    fixed.add(array.gather)
        fixed |= {a.gather for a in self.arrays if kept.is_kept(a.gather.meta)}
        laid = [{a.gather for a in of} for of in self.behind.values() if len(of) > 1]
        while more := {gather for of in laid if of & fixed for gather in of - fixed}:
            fixed |= more  # what is laid out of both is where the later one is
        self.arrays = [a for a in self.arrays if a.gather not in fixed and a.reads]
        for array in self.arrays:
            array.turn = next((at for at, node in array.reads if _is_backward(node)), None)
        self.behind = {n: of for n, of in self.behind.items() if not any(a.gather in fixed for a in of)}


def _nbytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()


def _is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("backward"))


class _Bytes:
    """Bytes at positions."""

    def __init__(self, found: Iterable[tuple[int, int]]):
        ordered = sorted(found)
        self.at = [at for at, _ in ordered]
        self.total = [0, *itertools.accumulate(nbytes for _, nbytes in ordered)]

    def between(self, begin: int, end: int) -> int:
        """The sum of those between two positions, neither included."""
        first, last = bisect.bisect_right(self.at, begin), bisect.bisect_left(self.at, end)
        return self.total[last] - self.total[first] if last > first else 0


def _to_place(trace: _Trace, together: int) -> list[_Array]:
    """The arrays of the gathers that are to be placed, `again` set where the backward gets its own."""
    begun = _Bytes((a.first, a.nbytes) for a in trace.arrays)
    ended = _Bytes((a.last, a.nbytes) for a in trace.arrays)
    for array in trace.arrays:
        turn = array.turn
        array.again = turn is not None and array.last < turn and ended.between(array.last, turn) >= together
    held = 0
    for array in sorted((a for a in trace.arrays if a.again), key=lambda a: -a.last):
        if array.nbytes < together and held + array.nbytes <= together:
            array.again, held = False, held + array.nbytes
    waiting = collections.Counter()
    for array in trace.arrays:
        if begun.between(trace.position[array.gather], array.first) >= together:
            waiting[array.gather] += array.nbytes
    gains = {a.gather for a in trace.arrays if a.again} | {g for g, nbytes in waiting.items() if nbytes >= together}
    if gains:  # what was written to travel alone
        counts = collections.Counter(a.gather for a in trace.arrays)
        gains |= {a.gather for a in trace.arrays if counts[a.gather] == 1 and a.nbytes < together}
    arrays = [a for a in trace.arrays if a.gather in gains]
    for array in set(trace.arrays) - set(arrays):
        array.again = False
    return arrays


# ---- gathers ---------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Use:
    """An array that is needed from a position on, in the forward (0) or again in the backward (1)."""

    at: int
    reader: fx.Node
    array: _Array
    version: int


class _Placing:
    """Gathers of arrays, put where they are used."""

    def __init__(self, trace: _Trace, arrays: list[_Array], together: int):
        self.trace, self.graph, self.together = trace, trace.graph, together
        self.arrays = set(arrays)
        self.whole: dict[tuple[_Array, int], fx.Node] = {}  # (array, version) -> what its new gather brings
        self.made: dict[tuple, fx.Node] = {}

    def run(self) -> None:
        """Place the gathers, let every reader read what they bring, and erase those as they were written."""
        for bucket in self._buckets():
            self._gather(bucket)
        for node in self.trace.nodes:
            if node in self.trace.behind:
                continue
            for x in node.all_input_nodes:
                if self.arrays.intersection(self.trace.behind.get(x, ())):
                    node.replace_input_with(x, self._laid(x, node))
        gathers = {a.gather for a in self.arrays}
        for node in reversed(self.trace.nodes):
            if (node in self.trace.behind or node in gathers) and not node.users:
                self.graph.erase_node(node)

    def _buckets(self) -> Iterable[list[_Use]]:
        """Uses whose gathers travel together, in the order of the first of each."""
        uses = []
        for array in self.arrays:
            uses.append(_Use(*array.reads[0], array, array.version(array.first)))
            if array.again and not uses[-1].version:
                uses.append(_Use(*next(read for read in array.reads if array.version(read[0])), array, 1))
        uses.sort(key=lambda use: (use.at, self.trace.position[use.array.item]))
        open_: dict[tuple, list[_Use]] = {}
        found: list[list[_Use]] = []
        for use in uses:
            gather, device = use.array.gather, use.array.item.meta["val"].device
            leaves = use.array.again and not use.version  # one that stays would keep the buffer of all
            if is_copied(gather):
                found.append([use])
                continue
            key = (repr(gather.args[1:3]), _is_backward(use.reader), leaves, device)
            bucket = open_.get(key)
            fits = bucket is not None and sum(u.array.nbytes for u in bucket) + use.array.nbytes <= self.together
            if use.array.nbytes >= self.together:
                found.append([use])
            elif bucket is not None and fits and self._available(use.array, bucket[0].at):
                bucket.append(use)
            else:
                open_[key] = [use]
                found.append(open_[key])
        return found

    def _available(self, array: _Array, at: int) -> bool:
        """Whether what an array is gathered of is there at a position, or can be."""
        return all(is_light(n) for n in self._before(array) if self.trace.position[n] >= at)

    def _before(self, array: _Array) -> set[fx.Node]:
        found, todo = set(), [self._source(array)]
        while todo:
            node = todo.pop()
            if node not in found and node.op == "call_function":
                found.add(node)
                todo += node.all_input_nodes
        return found

    @staticmethod
    def _source(array: _Array) -> fx.Node:
        return node_of(array.gather.args[0]) if is_copied(array.gather) else items_of(array.gather.args[0])[array.index]

    def _gather(self, bucket: list[_Use]) -> None:
        """One gather for a bucket, before the first of its readers."""
        first = bucket[0]
        old = first.array.gather
        with self.graph.inserting_before(first.reader):
            copied: dict[fx.Node, fx.Node] = {}
            sources = [self._again(self._source(use.array), first.at, copied) for use in bucket]
            if is_copied(old):
                item = self.graph.create_node("call_function", old.target, (sources[0], *old.args[1:]))
                item.meta = {**old.meta, "backward": _is_backward(first.reader)}
                self.whole[first.array, first.version] = item
                return
            places = [items_of(use.array.gather.args[3])[use.array.index] for use in bucket]
            node = self.graph.call_function(table.ALL_GATHER.op, (sources, *old.args[1:3], places), dict(old.kwargs))
            node.meta = {**old.meta, "val": [use.array.item.meta["val"] for use in bucket]}
            if _is_backward(first.reader):
                node.meta |= {"backward": True, "at": f"{old.meta.get('at', '?')}{_OF_BACKWARD}"}
            for i, use in enumerate(bucket):
                item = self.graph.call_function(operator.getitem, (node, i))
                item.meta = {**use.array.item.meta, "at": node.meta["at"], "backward": _is_backward(first.reader)}
                self.whole[use.array, use.version] = item

    def _again(self, node: fx.Node, at: int, copied: dict[fx.Node, fx.Node]) -> fx.Node:
        """What a gather is made of, as it is needed before a position: cast there, as else the cast is kept until then.

        What is only looked at in another way is taken as it is.
        """
        if node.op != "call_function" or not is_light(node):
            return node
        if node not in copied:
            before = {x: self._again(x, at, copied) for x in node.all_input_nodes}
            same = all(x is y for x, y in before.items()) and self.trace.position[node] < at
            looks = is_view(node) or node.target is operator.getitem
            copied[node] = node if same and looks else self.graph.node_copy(node, lambda x: before[x])
        return copied[node]

    def _laid(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The same of new gathers, laid out and cast where a reader first needs it."""
        of = self.arrays.intersection(self.trace.behind.get(node, ()))
        if not of:
            return node
        at = self.trace.position[reader]
        if len(of) == 1 and (array := next(iter(of))).item is node:
            return self.whole[array, array.version(at)]
        before = {x: self._laid(x, reader) for x in node.all_input_nodes}
        key = (node, *before.values())
        if key not in self.made:
            with self.graph.inserting_before(reader):
                self.made[key] = self.graph.node_copy(node, lambda x: before[x])
        return self.made[key]


# ---- reductions ------------------------------------------------------------------------------------------------------
def _reduce_when_ready(graph: fx.Graph, arrays: list[_Array], together: int) -> None:
    """Gradients that wait for their reduce-scatter while the backward goes on are reduced when they are ready."""
    later = [node for a in arrays if a.again for at, node in a.reads if a.version(at)]
    over, position = {repr(a.gather.args[1:3]) for a in arrays}, {n: i for i, n in enumerate(graph.nodes)}
    turns = sorted(position[node] for node in later)
    pools: dict[str, list[_Gradient]] = {}
    waiting = collections.Counter()
    for node in position:
        if kinds.collective_of(node.target) is not table.REDUCE_SCATTER or not _is_backward(node):
            continue
        if repr(node.args[1:3]) not in over:
            continue
        sent = items_of(node.args[0])
        ready = [_made_by(x) for x in sent]
        waits = [
            bisect.bisect_right(turns, position[made]) < bisect.bisect_left(turns, position[node]) for made in ready
        ]
        if any(waits):
            key = repr((node.args[1:3], node.args[4:]))
            pools.setdefault(key, []).extend(
                _Gradient(node, i, x, made) for i, (x, made) in enumerate(zip(sent, ready, strict=True))
            )
            waiting[key] += sum(_nbytes(x) for x, wait in zip(sent, waits, strict=True) if wait)
    for key, gradients in pools.items():
        if waiting[key] >= together:
            _Reducing(graph, gradients, position, together).run()


def _made_by(node: fx.Node) -> fx.Node:
    """The node that computes a value, which others only lay out or cast."""
    while (
        node.op == "call_function"
        and (is_view(node) or opname(node.target) in _LAID)
        or node.target is operator.getitem
    ):
        node = node.all_input_nodes[0]
    return node


class _Gradient(NamedTuple):
    """What a reduce-scatter takes: its index there, the node that is sent, and the one that computes it."""

    node: fx.Node
    index: int
    sent: fx.Node
    ready: fx.Node


class _Reducing:
    """Reduce-scatters over the same axes, cut and joined by when their gradients are ready."""

    def __init__(self, graph: fx.Graph, gradients: list[_Gradient], position: dict[fx.Node, int], together: int):
        self.graph, self.gradients, self.position, self.together = graph, gradients, position, together

    def run(self) -> None:
        """Put the parts where their last gradient is ready, and erase what was written."""
        for bucket in self._buckets():
            self._reduce(bucket)
        for node in dict.fromkeys(one.node for one in self.gradients):
            for item in list(node.users):
                self.graph.erase_node(item)
            self.graph.erase_node(node)

    def _buckets(self) -> Iterable[list[_Gradient]]:
        """Large ones by what computes them, small ones together; none is later than it was written."""
        order = sorted(self.gradients, key=lambda one: (self.position[one.ready], self.position[one.node], one.index))
        large: dict[fx.Node, list[_Gradient]] = {}
        small: list[list[_Gradient]] = []
        for one in order:
            size = _nbytes(one.sent)
            if size >= self.together:
                large.setdefault(one.ready, []).append(one)
                continue
            last = small[-1] if small else []
            fits = sum(_nbytes(other.sent) for other in last) + size <= self.together
            if last and fits and self.position[one.ready] < min(self.position[other.node] for other in last):
                last.append(one)
            else:
                small.append([one])
        return [*large.values(), *small]

    def _reduce(self, bucket: list[_Gradient]) -> None:
        at = max((one.ready for one in bucket), key=self.position.__getitem__).next
        while at.op == "placeholder":
            at = at.next
        first, copied = bucket[0].node, dict[fx.Node, fx.Node]()
        with self.graph.inserting_before(at):
            sent = [self._laid(one.sent, one.ready, copied) for one in bucket]
            places = [items_of(one.node.args[3])[one.index] for one in bucket]
            given = (sent, *first.args[1:3], places, *first.args[4:])
            part = self.graph.call_function(table.REDUCE_SCATTER.op, given, dict(first.kwargs))
            part.meta = {**first.meta, "val": [one.node.meta["val"][one.index] for one in bucket]}
            for k, one in enumerate(bucket):
                found = self.graph.call_function(operator.getitem, (part, k))
                found.meta = {**one.node.meta, "val": one.node.meta["val"][one.index]}
                for item in one.node.users:
                    if int_of(item.args[1]) == one.index:
                        item.replace_all_uses_with(found)

    def _laid(self, node: fx.Node, made: fx.Node, copied: dict[fx.Node, fx.Node]) -> fx.Node:
        if node is made:
            return node
        if node not in copied:
            before = self._laid(node.all_input_nodes[0], made, copied)
            copied[node] = self.graph.node_copy(node, lambda _: before)
        return copied[node]
