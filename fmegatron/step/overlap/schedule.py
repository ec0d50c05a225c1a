"""Overlap of communication and computation: its options, and the schedule of a lowered graph under them.

Gathers start early, reductions are waited for late, the rest keeps its order. The order is built by demand: nodes come
in the order of the graph, a node that is held back comes when a reader needs it, or when its time is there. So whatever
the rules say, every node comes after its arguments.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from fmegatron.collectives import World
from fmegatron.step.graph.memory import materialized, most_alive, peak_bytes
from fmegatron.step.graph.nodes import is_layer, is_light, is_start, is_wait, kind, waits_of
from fmegatron.step.graph.order import behind, layers, sort_by
from fmegatron.step.lower import copy_module
from fmegatron.step.overlap.gathers import keep_last, separate_groups, units
from fmegatron.step.overlap.merge import join_ends, merge_reductions

__all__ = ["KEEP_WAITS", "Overlap", "overlapped"]

# It would move every wait to its reader, so that reduce-scatters keep a layer's full gradients alive until the end of
# the step.
KEEP_WAITS = MappingProxyType({"reorder_for_locality": False})
# The other one would move starts of gathers back to their waits.
_KEEP_ORDER = MappingProxyType({"reorder_for_peak_memory": False, **KEEP_WAITS})


@dataclass(frozen=True)
class Overlap:
    """How communication is ordered in a lowered step. Arithmetic is not changed: only when collectives start and wait.

    depth: how many layers ahead the gather of weights starts; 1: while a layer computes, the next layer's weights
    travel. 0: no reordering of gathers. Each unit of depth costs one more layer of gathered weights.
    late_reductions: wait for a layer's reduce-scatter when the next layer's starts, not at once; costs one more layer
    of full gradients.
    bucket_bytes: independent all-reduces over one group and of one dtype travel as one, up to so many bytes together
    (losses, norms, gradients of vectors); an array that is larger travels alone, because concatenating it costs more
    than a message. 0: none. Over two ranks sums keep their bits; over more, a library that divides a buffer among
    ranks may add in another order.
    join_ends: the embedding travels with the first block, forward (gather) and backward (reduce-scatter), whatever
    their dtypes: nothing could hide either. As one coalesced collective without a copy; reductions that are exchanges
    (sums of 16 bits in fp32) share one buffer. The embedding then lives as long as the first block.
    keep_last: the block that ends the forward begins the backward: its weights are kept instead of gathered twice.
    separate_groups: gathers get process groups of their own, so that they and reductions do not queue behind each
    other (one communicator runs its collectives in order).
    ahead_bytes: no gather starts early while more than so many bytes of gathered weights travel or wait; None: any.

    peak: how many times the planned peak of the graph without overlap the one with it may be (1.05). Where memory is
    highest, gathers then start when they are needed and reductions are waited for at once; if that is not enough, the
    ends of the backward are not joined. None: any. Where nothing is reordered, it is not looked at. The planned peak is
    of the outer graph (`graph.memory.peak_bytes`): 10 to 86% below what is measured, so it compares two orders and
    bounds nothing; `plan.exact` counts what an order takes, at the cost of scheduling it (20 s).

    Overlap(depth=0, late_reductions=False, bucket_bytes=0, join_ends=False) changes nothing.
    Raises ValueError for a negative number.
    """

    depth: int = 1
    late_reductions: bool = True
    bucket_bytes: int = 1 << 22
    join_ends: bool = True
    keep_last: bool = False
    separate_groups: bool = False
    ahead_bytes: int | None = None
    peak: float | None = None

    def __post_init__(self):
        for name in ("depth", "bucket_bytes", "ahead_bytes", "peak"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"Overlap: got {name}={value}, wanted 0 or more")
            if name != "peak" and value is not None and not isinstance(value, int):
                raise ValueError(f"Overlap: got {name}={value}, wanted a whole number")

    @property
    def reorders(self) -> bool:
        """Whether any node is moved for the sake of overlap."""
        return self.depth > 0 or self.late_reductions

    @property
    def options(self) -> dict:
        """Settings of Inductor under which generated code keeps the order of the graph."""
        return dict(_KEEP_ORDER) if self.reorders else {}


def overlapped(
    graph_module: torch.fx.GraphModule, setting: Overlap | None, world: World | None = None
) -> torch.fx.GraphModule:
    """A copy of a lowered graph whose collectives are merged and ordered as `setting` states; it computes the same.

    A graph without collectives is returned as it is.
    """
    if setting is None or not any(map(is_start, graph_module.graph.nodes)):
        return graph_module
    limit = None
    if setting.reorders and setting.peak is not None:
        limit = int(setting.peak * peak_bytes(graph_module.graph))
    module = _ordered(graph_module, setting, limit)
    if setting.join_ends and limit is not None and peak_bytes(module.graph) > limit:
        # The shard of the embedding's gradient arrives with that of the first block, before all blocks' are stacked.
        apart = _ordered(graph_module, setting, limit, join_backward=False)
        module = min(module, apart, key=lambda m: peak_bytes(m.graph))
    if setting.separate_groups and world is not None:
        separate_groups(module.graph, world)
    module.graph.lint()
    module.recompile()
    return module


def _ordered(
    graph_module: torch.fx.GraphModule, setting: Overlap, limit: int | None, join_backward: bool = True
) -> torch.fx.GraphModule:
    module = copy_module(graph_module)
    graph = module.graph
    if setting.keep_last:
        keep_last(graph)
    if setting.bucket_bytes:
        merge_reductions(graph, setting.bucket_bytes)
    if setting.join_ends:
        join_ends(graph, join_backward)
    if setting.reorders:
        sort_by(graph, _reordered(graph, setting, limit))
    return module


def _reordered(graph: fx.Graph, setting: Overlap, limit: int | None = None) -> list[fx.Node]:
    """The nodes of a graph in the order that a setting wants; `sort_by` puts them into it.

    limit: bytes. What travels where memory is highest gives way: those gathers start when they are needed, those
    reductions are waited for at once, until the peak that is planned (`peak_bytes`) keeps to the limit. None: any.
    """
    order = _Order(graph, setting).run()
    if limit is None:
        return order
    counted, at_once = materialized(graph), set()
    while True:
        most, at = most_alive(order, counted)
        position = {n: i for i, n in enumerate(order)}
        more = set() if most <= limit else _travelling(graph, setting, position, at) - at_once
        if not more:
            return order
        at_once |= more
        order = _Order(graph, setting, at_once).run()


def _travelling(graph: fx.Graph, setting: Overlap, position: dict[fx.Node, int], at: int) -> set[fx.Node]:
    """What is on its way at a position of the order and need not be: anchors of units, starts of reductions."""
    found = set()
    if setting.depth:
        for unit in units(graph):
            if min(position[g] for g in unit.gathers) <= at < position[unit.anchor]:
                found.add(unit.anchor)
    if setting.late_reductions:
        for start in filter(is_start, graph.nodes):
            if kind(start) != "gather" and position[start] <= at <= min(
                (position[w] for w in waits_of(start)), default=-1
            ):
                found.add(start)
    return found


class _Order:
    """One pass over a graph. done: the nodes that are placed, in order.

    at_once: anchors of units that are not gathered ahead, reductions that are waited for where they start.
    """

    def __init__(self, graph: fx.Graph, setting: Overlap, at_once: Collection[fx.Node] = ()):
        self.nodes, self.setting, self.at_once = list(graph.nodes), setting, at_once
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.done: dict[fx.Node, None] = {}
        self.units = units(graph) if setting.depth else []
        self.anchors = {unit.anchor: i for i, unit in enumerate(self.units)}
        self.held = self._held_gathers()
        self.late = _late(graph, self.held) if setting.late_reductions else set()
        self.before, last = behind(graph), layers(graph)
        self.layer = {n: self.position.get(last[n], -1) for n in self.nodes}
        self.flying: list[fx.Node] = []  # reductions that have started and are not waited for

    def run(self) -> list[fx.Node]:
        """The order."""
        *body, output = self.nodes
        for node in body:
            if node.op in ("placeholder", "get_attr"):
                self.emit(node)
        self.start_ahead(-1)
        for node in body:
            if node in self.held or node in self.late:
                continue
            if node in self.anchors:
                self.emit_inputs(node)
                self.start_ahead(self.anchors[node])
            if is_start(node):
                self.land(self.layer[node])
            self.emit(node)
            if node in self.at_once and is_start(node):
                for wait in waits_of(node):
                    self.emit(wait)
        for node in body:
            self.emit(node)
        self.emit(output)
        return list(self.done)

    def emit(self, node: fx.Node) -> None:
        """Append a node, after the arguments that are not in the order yet."""
        if node in self.done:
            return
        self.emit_inputs(node)
        self.done[node] = None
        if is_start(node) and node not in self.held:
            self.flying.append(node)

    def emit_inputs(self, node: fx.Node) -> None:
        """Append what must come before a node."""
        for before in sorted(self.before[node], key=self.position.__getitem__):
            self.emit(before)

    # ---- gathers --------------------------------------------------------------------------------------------------
    def _held_gathers(self) -> set[fx.Node]:
        """Gathers of weights, what follows them, and copies that are made for them alone: all placed by demand."""
        held = {n for unit in self.units for n in unit.after}
        for node in reversed(self.nodes):
            if is_light(node) and node.users and all(u in held for u in node.users):
                held.add(node)
        return held

    def start_ahead(self, now: int) -> None:
        """Start the gathers that are due when unit `now` begins to compute (-1: the step begins).

        A gather in several stages starts one unit earlier for each stage that is left. What comes before the first
        layer is a lookup, behind which no gather could hide: that layer's starts with the first ones.
        """
        layers_at = (i for i, unit in enumerate(self.units) if is_layer(unit.anchor))
        more = next(layers_at, 0) if now < 0 else 0
        for ahead in range(1, self.setting.depth + more + 1):
            if now + ahead >= len(self.units):
                continue
            unit = self.units[now + ahead]
            if now + ahead and unit.anchor in self.at_once or now >= 0 and self._too_much(now, unit):
                continue
            depth = self.setting.depth + more - ahead + 1
            for stage in unit.stages[: min(depth, self.setting.depth)]:
                for gather in stage:
                    self.emit(gather)

    def _too_much(self, now: int, unit) -> bool:
        limit = self.setting.ahead_bytes
        if limit is None:
            return False
        waiting = [u for u in self.units[now + 1 :] if u is not unit and u.gathers[0] in self.done]
        return sum(u.nbytes for u in [*waiting, unit]) > limit

    # ---- reductions -----------------------------------------------------------------------------------------------
    def land(self, layer: int) -> None:
        """Before a reduction of this layer starts: wait for those of earlier layers, start what depends on them."""
        if not self.setting.late_reductions:
            return
        earlier = [start for start in self.flying if self.layer[start] < layer and not _is_number(start)]
        for start in earlier:
            self.flying.remove(start)
            for wait in waits_of(start):
                self.emit(wait)
        for start in earlier:  # a reduction over two axes: the second begins where the first is done
            for following in _next_starts(start, self.late):
                self.emit(following)


def _late(graph: fx.Graph, held: set[fx.Node]) -> set[fx.Node]:
    """Waits for reductions, and the views, casts and further reductions of what they bring: held until needed."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node in held:
            continue
        if is_wait(node):
            found.add(node)
        elif node.all_input_nodes and all(x in found for x in node.all_input_nodes):
            one = len(node.all_input_nodes) == 1 or node.meta.get("symbolic")  # or a sum that ends an exact reduction
            if (is_light(node) and one and _no_larger(node)) or (is_start(node) and kind(node) != "exchange"):
                found.add(node)
    return found


def _is_number(start: fx.Node) -> bool:
    """Whether a collective carries one number (a metric): nothing is freed by waiting for it."""
    value = start.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _no_larger(node: fx.Node) -> bool:
    value, source = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return True  # a split of a tensor into several, or one of several: views
    return value.numel() * value.element_size() <= 2 * source.numel() * source.element_size()


def _next_starts(start: fx.Node, late: set[fx.Node]) -> list[fx.Node]:
    """Held-back collectives that begin with the result of this one."""
    found, todo, seen = [], waits_of(start), set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_start(node):
            found.append(node)
        else:
            todo += [u for u in node.users if u in late]
    return found
