"""A pair of a table as one graph: the forward of one microbatch beside the backward of another.

Neither reads anything of the other, so what one communicates (rows to their experts, sequence parallel sums) travels
while the other computes. The order is that of a clock on which durations are estimated (`durations.Rates`): of what
waits for nothing the half that is nearest to its next collective computes, so that this travels early; weight
gradients, which nobody waits for, fill what is left. In the lowered graph each collective is then waited for where its
result is read.

Compiled layers of both halves that communicate become layers of a pair, the k-th of the one with the k-th of the other;
those of equal kinds are equal, and are compiled once for all stages.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fmegatron.collectives import kinds, table
from fmegatron.step.durations import Rates, seconds_of, seconds_on_the_wire
from fmegatron.step.graph.nodes import RUNS, entry_of, int_of, is_view, items_of, node_of, opaque_entries
from fmegatron.step.graph.order import sort_by
from fmegatron.step.opaque import Entry
from fmegatron.step.overlap.schedule import Overlap
from fmegatron.step.passes import Target
from fmegatron.step.pipeline.cut import Parts
from fmegatron.step.torch_private import graph_module_of
from fmegatron.step.tracing import make_fakes

__all__ = ["faces", "paired"]

_TWICE = (table.PSUM, table.PMAX)  # what an all-reduce sends
Steps = Sequence[tuple[str, int]]  # the parts that run as one: (kind, stage) of each


def faces(parts: Parts, steps: Steps) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(what parts that run as one take, what they give), each as (kind of the part, name there).

    What both halves of a pair read and is the same for all microbatches comes once. What B gives for its W alone is not
    given where that is one of them.
    """
    takes, made = dict[Any, tuple[str, str]](), set[str]()
    gives = list[tuple[str, str]]()
    for kind, stage in steps:
        part = parts.of[kind, stage]
        for name in part.takes:
            if kind != "W" or name not in made:
                takes.setdefault(_source(parts, kind, stage, name), (kind, name))
        if kind == "B" and len(steps) > 1 and ("W", stage) in steps:
            made.update(part.gives)
            sent = parts.backward[stage]
            gives += [(kind, name) for name in part.gives if sent is not None and name == sent[0]]
        else:
            gives += [(kind, name) for name in part.gives]
    return list(takes.values()), gives


def _source(parts: Parts, kind: str, stage: int, name: str) -> Any:
    """What is equal for two inputs that are the same tensor: one of the batch or of a microbatch is of its half."""
    into = parts.forward[stage - 1] if stage else None
    back = parts.backward[stage + 1] if stage + 1 < parts.stages else None
    values = {pair[1] for pair in (into, back) if pair is not None}
    values.update(*(parts.of[of, stage].gives for of in "FB"))
    return (_half(kind), name) if name.startswith("1/") or name in values else name


def _half(kind: str) -> str:
    return "F" if kind == "F" else "B"


def paired(root: Any, parts: Parts, steps: Steps, name: str, fake_mode: Any) -> Entry:
    """What computes the parts of a pair: it takes and gives what `faces` says.

    root: the module whose constants their graphs read.
    """
    graph, chain = fx.Graph(), dict[fx.Node, str]()
    takes, gives = faces(parts, steps)
    given, made = dict[Any, fx.Node](), dict[tuple[str, str], fx.Node]()
    stages = dict(steps)
    for kind, taken in takes:
        part = parts.of[kind, stages[kind]]
        like = part.graph.find_nodes(op="placeholder")[part.takes.index(taken)]
        node = graph.placeholder(f"{_half(kind)}_{like.name}")
        node.meta = dict(like.meta)
        given[_source(parts, kind, stages[kind], taken)] = node
    for kind, stage in steps:
        part = parts.of[kind, stage]
        inputs = iter(
            made["B", x] if kind == "W" and ("B", x) in made else given[_source(parts, kind, stage, x)]
            for x in part.takes
        )
        outs = _copy_into(graph, part.graph, inputs, None, chain, kind)
        made |= {(kind, x): node for x, node in zip(part.gives, outs, strict=True)}
    graph.output([made[give] for give in gives])
    _join_layers(graph, chain, fake_mode)
    sort_by(graph, _side_by_side(graph, chain))
    return _entry(name, graph_module_of(root, graph), fake_mode)


def _entry(name: str, module: fx.GraphModule, fake_mode: Any) -> Entry:
    fakes = make_fakes([n.meta["val"] for n in module.graph.find_nodes(op="placeholder")], fake_mode)
    return _OfTwo.make(name, module, fakes, fake_mode)


class _OfTwo(Entry):
    """An entry whose graph has two halves, in an order in which each computes while the other communicates."""

    def bind(self, target: Target) -> Any:
        """As of any entry, but without layers inside, too, collectives are waited for where they are read."""
        if target.overlap is not None and not opaque_entries(self.graph_module.graph):
            target = replace(target, overlap=Overlap(0, join_ends=False, peak=None))
        return self.bound_to(target)


def _copy_into(
    graph: fx.Graph,
    source: fx.Graph,
    inputs: Iterable[fx.Node],
    constants: dict[str, Any] | None,
    chain: dict[fx.Node, str],
    kind: str,
) -> list[fx.Node]:
    """Copy the nodes of a graph -> what it returns, there. inputs: for its placeholders. constants: {name here: tensor}
    of those that it reads of another module than the new graph's. chain: of new nodes the kind is noted."""
    inputs, copied, outs = iter(inputs), dict[fx.Node, fx.Node](), list[fx.Node]()
    for n in source.nodes:
        if n.op == "placeholder":
            copied[n] = next(inputs)
        elif n.op == "output":
            outs = [copied[x] for x in items_of(n.args[0])]
        else:
            copied[n] = new = graph.node_copy(n, copied.__getitem__)
            chain[new] = kind
            if n.op == "get_attr" and constants is not None:
                new.target = f"{kind}_{n.target}".replace(".", "_")
                constants[new.target] = operator.attrgetter(n.target)(source.owning_module)
    return outs


# ---- layers ----------------------------------------------------------------------------------------------------------
def _join_layers(graph: fx.Graph, chain: dict[fx.Node, str], fake_mode: Any) -> None:
    """Make one node of the k-th compiled layer of the forward and the k-th of the backward, and the weight gradients
    of that, where any of them communicates."""
    layers = {kind: [n for n in chain if chain[n] == kind and entry_of(n) is not None] for kind in "FBW"}
    above = _last_above(graph, layers["B"])
    for k, (forward, backward) in enumerate(zip(layers["F"], layers["B"], strict=False)):
        weights = [w for w in layers["W"] if _reads(w, backward) and above[w] <= k]
        group = [forward, backward, *weights]
        if any(_communicates(entry_of(n)) for n in group):
            _join(graph, group, chain, fake_mode)


def _last_above(graph: fx.Graph, layers: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Of each node the last of some layers that it is made of, by its place among them; -1 for none."""
    place, found = {n: i for i, n in enumerate(layers)}, dict[fx.Node, int]()
    for n in graph.nodes:
        found[n] = max((place.get(x, found[x]) for x in n.all_input_nodes), default=-1)
        found[n] = max(found[n], *(found[x] for x in n.all_input_nodes), -1)
    return found


def _reads(n: fx.Node, layer: fx.Node) -> bool:
    """Whether a node takes a result of a layer as it is."""
    return any(x.target is operator.getitem and x.args[0] is layer for x in n.all_input_nodes)


def _communicates(entry: Entry) -> bool:
    return any(_travels(n) for n in entry.graph_module.graph.nodes) or any(
        map(_communicates, opaque_entries(entry.graph_module.graph))
    )


def _travels(n: fx.Node) -> bool:
    """Whether a node is a collective that sends something."""
    collective = kinds.collective_of(n.target)
    return collective is not None and collective.sent is not None


def _join(graph: fx.Graph, group: Sequence[fx.Node], chain: dict[fx.Node, str], fake_mode: Any) -> None:
    """One node in the place of several compiled layers, of which the later may read results of the earlier."""
    inner, inside, constants = fx.Graph(), dict[fx.Node, str](), dict[str, Any]()
    outer, made = dict[fx.Node, fx.Node](), dict[fx.Node, list[fx.Node]]()  # input of the group -> placeholder
    for node in group:
        for x in items_of(node.args[0]):
            if x not in outer and not (x.target is operator.getitem and x.args[0] in group):
                outer[x] = inner.placeholder(f"x{len(outer)}")
                outer[x].meta["val"] = x.meta["val"]
    for i, node in enumerate(group):
        inputs = [outer[x] if x in outer else _item(made, x) for x in items_of(node.args[0])]
        label = chain[node] if chain[node] != "W" else f"W{i}"
        made[node] = _copy_into(inner, entry_of(node).graph_module.graph, inputs, constants, inside, label)
    results = [item for node in group for item in node.users if not set(item.users) <= set(group)]
    inner.output([_item(made, item) for item in results])
    sort_by(inner, _side_by_side(inner, inside))
    name = "_".join(entry_of(node).name.rpartition("_")[0] for node in group)
    entry = _entry(name, graph_module_of(constants, inner), fake_mode)
    with graph.inserting_after(group[0]):
        node = graph.call_function(entry.op, (list(outer),))
    node.meta = {**group[0].meta, "val": [item.meta["val"] for item in results], RUNS: entry}
    chain[node] = "F"
    for i, item in enumerate(results):
        with graph.inserting_after(node):
            new = graph.call_function(operator.getitem, (node, i))
        new.meta, chain[new] = dict(item.meta), chain[item]
        item.replace_all_uses_with(new)
    for old in reversed(group):
        for item in list(old.users):
            chain.pop(item)
            graph.erase_node(item)
        chain.pop(old)
        graph.erase_node(old)


def _item(of: Mapping[fx.Node, Sequence[fx.Node]], item: fx.Node) -> fx.Node:
    """What stands for an item of what a node gives."""
    return of[node_of(item.args[0])][int_of(item.args[1])]


# ---- order -----------------------------------------------------------------------------------------------------------
def _side_by_side(graph: fx.Graph, chain: Mapping[fx.Node, str], rates: Rates | None = None) -> list[fx.Node]:
    """The nodes in an order in which each half computes while the other waits. chain: of each node that is no input its
    half, "F", "B", or another one for what fills gaps."""
    rates, place = rates or Rates(), {n: i for i, n in enumerate(graph.nodes)}
    order = [n for n in graph.nodes if n.op == "placeholder"]
    missing = {n: sum(x in chain for x in n.all_input_nodes) for n in chain}
    took = {n: seconds_of(n, rates) for n in chain}
    there, near = dict.fromkeys(order, 0.0), _until_next(sorted(chain, key=place.__getitem__), chain, took)
    ready: dict[str, list[tuple[int, fx.Node]]] = {"F": [], "B": [], "": []}
    clock, wires = 0.0, dict[Any, float]()

    def add(n: fx.Node) -> None:
        heapq.heappush(ready[_half_of(chain[n])], (place[n], n))

    def first(half: str) -> tuple[float, bool, float]:
        """What comes first: when it can begin, not before now; gaps are filled last; how far its next collective is."""
        n = ready[half][0][1]
        waits = 0.0 if _is_named(n) else max((there[x] for x in n.all_input_nodes), default=0.0)
        return max(clock, waits), not half, near[n]

    for n, count in missing.items():
        if not count:
            add(n)
    while any(ready.values()):
        half = min((half for half in ready if ready[half]), key=first)
        clock = first(half)[0]
        _, n = heapq.heappop(ready[half])
        order.append(n)
        if _travels(n):
            axes, twice = str(n.args[1]), kinds.collective_of(n.target) in _TWICE
            there[n] = wires[axes] = max(clock, wires.get(axes, 0.0)) + seconds_on_the_wire(n, rates, twice)
        elif _is_named(n):
            there[n] = max((there[x] for x in n.all_input_nodes), default=0.0)
        else:
            clock += took[n]
            there[n] = clock
        for user in n.users:
            if user in missing:
                missing[user] -= 1
                if not missing[user]:
                    add(user)
    return [*order, graph.output_node()]


def _half_of(kind: str) -> str:
    return kind if kind in ("F", "B") else ""


def _until_next(
    nodes: Sequence[fx.Node], chain: Mapping[fx.Node, str], took: Mapping[fx.Node, float]
) -> dict[fx.Node, float]:
    """Of each node how long its half computes from there to its next collective; infinite behind the last."""
    found, left = dict[fx.Node, float](), dict[str, float]()
    for n in reversed(nodes):
        half = _half_of(chain[n])
        left[half] = 0.0 if _travels(n) else left.get(half, math.inf) + took[n]
        found[n] = left[half]
    return found


def _is_named(n: fx.Node) -> bool:
    """Whether a node computes nothing: an item of a list, a view."""
    return n.op != "call_function" or n.target is operator.getitem or is_view(n)
