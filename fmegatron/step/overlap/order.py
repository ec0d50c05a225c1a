"""The order of a graph in which gathers start early and reductions are waited for late; the rest keeps its order.

It is built by demand: nodes come in the order of the graph, a node that is held back comes when a reader needs it, or
when its time is there. So whatever the rules say, every node comes after its arguments.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from fmegatron.step.graph.nodes import is_layer, is_light, is_start, is_wait, kind, waits_of
from fmegatron.step.graph.order import behind, layers
from fmegatron.step.overlap.gathers import Unit, units

__all__ = ["Order", "is_number"]


class Order:
    """Orders of one graph. `run` makes one.

    depth: how many units of gathered weights ahead their gathers start. late: whether reductions are waited for when
    the next layer's start. ahead_bytes: as in `Overlap`.
    units: the gathers of weights, by what needs them. held: what is placed with them, on demand. late: waits for
    reductions and what follows them, on demand.
    """

    def __init__(self, graph: fx.Graph, depth: int, late: bool, ahead_bytes: int | None = None):
        self.nodes, self.depth, self.ahead_bytes = list(graph.nodes), depth, ahead_bytes
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.units = units(graph) if depth else []
        self.anchors = {unit.anchor: i for i, unit in enumerate(self.units)}
        self.held = self._held_gathers()
        self.late = _late(graph, self.held) if late else set()
        self.before, last = behind(graph), layers(graph)
        self.layer = {n: self.position.get(last[n], -1) for n in self.nodes}
        self.done: dict[fx.Node, None] = {}  # the nodes that are placed, in order
        self.flying: list[fx.Node] = []  # reductions that have started and are not waited for
        self.at_once: Collection[fx.Node] = ()

    def run(self, at_once: Collection[fx.Node] = ()) -> list[fx.Node]:
        """The nodes in order.

        at_once: anchors of units that are not gathered ahead, reductions that are waited for where they start.
        """
        self.done, self.flying, self.at_once = {}, [], at_once
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
                self.arrive(node)
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
        for ahead in range(1, self.depth + more + 1):
            if now + ahead >= len(self.units):
                continue
            unit = self.units[now + ahead]
            if now + ahead and unit.anchor in self.at_once or now >= 0 and self._too_much(now, unit):
                continue
            depth = self.depth + more - ahead + 1
            for stage in unit.stages[: min(depth, self.depth)]:
                for gather in stage:
                    self.emit(gather)

    def _too_much(self, now: int, unit: Unit) -> bool:
        limit = self.ahead_bytes
        if limit is None:
            return False
        waiting = [u for u in self.units[now + 1 :] if u is not unit and u.gathers[0] in self.done]
        return sum(u.nbytes for u in [*waiting, unit]) > limit

    # ---- reductions -----------------------------------------------------------------------------------------------
    def land(self, layer: int) -> None:
        """Before a reduction of this layer starts: wait for those of earlier layers, start what depends on them."""
        if not self.late:
            return
        earlier = [start for start in self.flying if self.layer[start] < layer and not is_number(start)]
        for start in earlier:
            self.flying.remove(start)
            self.arrive(start)
        for start in earlier:  # a reduction over two axes: the second begins where the first is done
            for following in filter(is_start, _following(start, self.late)):
                self.emit(following)

    def arrive(self, start: fx.Node) -> None:
        """Wait for a reduction, and make the sums that end it: until then all that arrived is kept."""
        for wait in waits_of(start):
            self.emit(wait)
        for node in sorted(_following(start, self.late), key=self.position.__getitem__):
            if node.meta.get("symbolic") and not is_start(node):
                self.emit(node)


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


def is_number(start: fx.Node) -> bool:
    """Whether a collective carries one number (a metric): nothing is freed by waiting for it."""
    value = start.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _no_larger(node: fx.Node) -> bool:
    value, source = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return True  # a split of a tensor into several, or one of several: views
    return value.numel() * value.element_size() <= 2 * source.numel() * source.element_size()


def _following(start: fx.Node, late: set[fx.Node]) -> list[fx.Node]:
    """What is held back behind the waits for a reduction, up to further collectives, these included."""
    found, todo, seen = [], waits_of(start), set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        found.append(node)
        if not is_start(node):
            todo += [u for u in node.users if u in late]
    return found
