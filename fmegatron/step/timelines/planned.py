"""Planned timelines: the order of a lowered graph as text, and played with estimated durations, on a mesh on paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fmegatron.collectives import World
from fmegatron.layout import Mesh
from fmegatron.step.graph.nodes import (
    entry_of,
    is_layer,
    is_light,
    is_start,
    is_view,
    is_wait,
    kind,
    node_of,
    start_of,
)
from fmegatron.step.pipeline.entry import BoundPipeline
from fmegatron.step.timelines.events import COMPUTE, Event, Timeline
from fmegatron.step.timelines.stages import clock_of, events_of, seconds_of_ends
from fmegatron.step.torch_private import Op, opname

__all__ = ["PaperWorld", "Rates", "launched", "launches", "planned"]

_LETTERS = (("gather", "G"), ("scatter", "R"), ("reduce", "A"), ("exchange", "X"))
_WORDS = (("gather", "gather"), ("scatter", "reduce"), ("reduce", "reduce"), ("exchange", "exchange"))


def named(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Names by order: G0, G1 gathers, R reduce-scatters, A all-reduces, X exchanges; F and B a layer's forward and
    backward, C another compiled graph; "w:G0" the wait for G0."""
    names: dict[fx.Node, str] = {}
    counts: dict[str, int] = {}
    wholes: dict[str, str] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        if is_wait(node):
            source = node_of(node.args[0])
            names[node] = "w:" + (names.get(source) or names.get(node_of(source.args[0]), "?"))
            continue
        if is_start(node):
            letter = _letter(node)
        elif is_layer(node):
            called = entry_of(node).op.name()
            letter = "F" if "_fwd_" in called else "B" if "_bwd_" in called else "C"
        else:
            continue
        whole = node.meta.get("part_of", node.name)  # a coalesced collective may run in parts (`step.gloo_all_to_all`)
        if whole not in wholes:
            wholes[whole] = f"{letter}{counts.get(letter, 0)}"
            counts[letter] = counts.get(letter, 0) + 1
        names[node] = wholes[whole]
    return names


def _letter(start: fx.Node) -> str:
    """G, R, A or X for a node that starts a collective."""
    return dict(_LETTERS)[kind(start)]


def launched(graph: fx.Graph) -> list[str]:
    """The names of all collectives that a lowered graph starts, one after the other, those in its layers too."""

    def starts(graph: fx.Graph) -> Iterator[fx.Node]:
        for node in graph.nodes:
            if is_layer(node):
                yield from starts(entry_of(node).graph_module.graph)
            elif is_start(node):
                yield node

    counts: dict[str, int] = {}
    found, last = [], None
    for node in starts(graph):
        letter, whole = _letter(node), node.meta.get("part_of")
        if whole is None or whole != last:
            counts[letter] = counts.get(letter, 0) + 1
        last = whole
        found.append(f"{letter}{counts[letter] - 1}")
    return found


def launches(graph: fx.Graph) -> str:
    """The order of a lowered graph: "G0 w:G0 G1 F0 w:G1 F1 ..."; repeated waits of a coalesced collective count once.

    Read `step.graph("overlap")` of a jit with it.
    """
    return " ".join(dict.fromkeys(named(graph.nodes).values()))


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, to estimate durations: FLOP of matrix products, bytes of memory, bytes that a
    rank sends, seconds that each collective takes before its first byte, and bytes that go each way between device and
    host. The defaults are an H100 at half of its bf16 peak, and links of 50 GB/s."""

    flops: float = 5e14
    memory: float = 2.5e12
    network: float = 5e10
    latency: float = 2e-5
    host: float = 5e10


def planned(graph: fx.Graph, rates: Rates | None = None, title: str = "planned") -> Timeline:
    """Play a lowered graph on one device: computation in its order, the collectives of each group one after another.

    rates: None for unit durations: a layer's forward 1, its backward 2, every collective 1, the rest nothing.
    """
    names, clock, events = named(graph.nodes), 0.0, []
    free: dict[str, float] = {}  # group -> when its last collective ends
    ends: dict[fx.Node, float] = {}
    rest, began = [], 0.0  # computation outside of layers since `began`

    def flush(until: float):
        if rest and until > began:
            events.append(Event(rest[0], COMPUTE, began, until, detail=" ".join(rest[:20])))
        rest.clear()

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_start(node):
            group = str(node.args[-1])
            start = max(clock, free.get(group, 0.0))
            ends[node] = free[group] = start + _seconds_on_the_wire(node, rates)
            word, at = dict(_WORDS)[kind(node)], group.removeprefix("fmegatron:").partition("#")[0]
            events.append(Event(names[node], f"{word} {at}", start, ends[node], detail=node.meta.get("at", "?")))
        elif is_wait(node):
            source = start_of(node)
            if ends.get(source, 0.0) > clock:
                flush(clock)
                events.append(Event(names[source], COMPUTE, clock, ends[source], waits=True))
                clock = ends[source]
        elif isinstance(entry_of(node), BoundPipeline):
            flush(clock)
            found = list(_by_stages(entry_of(node), rates, clock))
            events += found
            clock = max(e.end for e in found)
        else:
            took = _seconds_of(node, rates)
            if is_layer(node):
                flush(clock)
                events.append(Event(names[node], COMPUTE, clock, clock + took, detail=entry_of(node).op.name()))
            elif took:
                began = began if rest else clock
                rest.append(opname(node.target) or node.name)
            clock += took
    flush(clock)
    return Timeline(tuple(events), title, "units" if rates is None else "s")


def _by_stages(bound: BoundPipeline, rates: Rates | None, begin: float) -> Iterator[Event]:
    """What a pipeline does that begins then: its ends are brought together, the table runs, sums over pp are made.

    Without rates messages take nothing, and an action of which nothing is known takes 1.
    """

    def seconds(graph: fx.Graph) -> float:
        return planned(graph, rates).duration

    first, last = seconds_of_ends(bound, seconds)
    found, costs = clock_of(
        bound,
        seconds if rates is not None else lambda graph: seconds(graph) or 1.0,
        lambda nbytes: 0.0 if rates is None else rates.latency + nbytes / rates.network,
    )
    if first:
        yield Event("begin", COMPUTE, begin, begin + first, detail="embedding and head brought to their stages")
    begin += first
    yield Event("table", COMPUTE, begin, begin + found.duration, detail=bound.plan.table.name)
    yield from events_of(bound, found, costs, begin)
    begin += found.duration
    yield Event("end", COMPUTE, begin, begin + last, detail="gradients of ends and metrics summed over pp")


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor)]


def _bytes(nodes) -> int:
    return sum(v.numel() * v.element_size() for n in nodes for v in _values(n))


def _seconds_on_the_wire(start: fx.Node, rates: Rates | None) -> float:
    """Latency, and the full array at the rate of the network: once for gathers, reduce-scatters and exchanges, twice
    for all-reduces. (A ring of n ranks sends (n - 1)/n of that; the graph does not state n for all of them.)"""
    if rates is None:
        return 1.0
    whole = max(_bytes([start]), _bytes(start.all_input_nodes))
    return rates.latency + whole * (2 if kind(start) == "reduce" else 1) / rates.network


def _units_of(layer: str) -> float:
    """A forward 1, a backward 2, each half of one that a pipeline has cut 1."""
    return 2.0 if "_bwd_" in layer and "_bwd_dx_" not in layer and "_bwd_dw_" not in layer else 1.0


def _seconds_of(node: fx.Node, rates: Rates | None) -> float:
    if rates is None:
        return _units_of(entry_of(node).op.name()) if is_layer(node) else 0.0
    if is_layer(node):
        inner = entry_of(node).graph_module.graph
        return sum(_seconds_of(n, rates) for n in inner.nodes if n.op == "call_function" and not is_start(n))
    if not isinstance(node.target, Op) or is_view(node):
        return 0.0
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is not None:
        arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        return formula(*arguments[0], **arguments[1], out_val=node.meta["val"]) / rates.flops
    # Elementwise work is fused: what is read and written once, shared by a chain of a few operations.
    moved = _bytes([node, *node.all_input_nodes])
    return moved / rates.memory / (4 if is_light(node) else 1)


class PaperWorld(World):
    """The ranks of a mesh on paper, seen by one of them: groups have names, but nothing can be sent.

    It stands where a graph is lowered and ordered (`timeline(..., mesh=...)`); what is compiled for it cannot run.
    """

    def __init__(self, mesh: Mesh, rank: int = 0, device: str | torch.device = "cpu"):
        super().__init__(mesh, rank, torch.device(device))

    def _make_group(self, name, axes, own=False):
        return None

    def close(self) -> None:
        """Nothing to leave."""
        self._groups.clear()
