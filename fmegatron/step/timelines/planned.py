"""Planned timelines: the order of a lowered graph as text, and played with estimated durations, on a mesh on paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from fmegatron.collectives import World
from fmegatron.layout import Mesh
from fmegatron.step.durations import Rates, seconds_of, seconds_on_the_wire
from fmegatron.step.graph.nodes import entry_of, is_layer, is_start, is_wait, kind, node_of, start_of
from fmegatron.step.pipeline.entry import BoundPipeline
from fmegatron.step.timelines.events import COMPUTE, Event, Timeline
from fmegatron.step.timelines.stages import clock_of, events_of, seconds_of_ends
from fmegatron.step.torch_private import opname

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


def planned(graph: fx.Graph, rates: Rates | None = None, title: str = "planned") -> Timeline:
    """Play a lowered graph on one device: computation in its order, the collectives of each group one after another.

    rates: None for unit durations: a layer's forward 1, its backward 2, every collective 1, the rest nothing. With
    rates a compiled layer is played, too: what it communicates beside its computation, and waits for.
    """
    playing = _Playing(rates)
    playing.play(graph)
    return Timeline(tuple(playing.events), title, "units" if rates is None else "s")


class _Playing:
    """A device that runs graphs. clock: its time. free: group -> when its last collective ends."""

    def __init__(self, rates: Rates | None):
        self.rates, self.clock, self.events, self.free = rates, 0.0, list[Event](), dict[str, float]()

    def play(self, graph: fx.Graph, layer: str = "") -> None:
        """Run a graph from now on. layer: the name of the compiled layer that it is: all that it computes is that."""
        names, ends = named(graph.nodes), dict[fx.Node, float]()
        rest, began = [], self.clock  # computation outside of layers since `began`
        prefix = layer and f"{layer}:"

        def flush():
            if rest and self.clock > began:
                self.events.append(Event(layer or rest[0], COMPUTE, began, self.clock, detail=" ".join(rest[:20])))
            rest.clear()

        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if is_start(node):
                group, twice = str(node.args[-1]), kind(node) == "reduce"
                start = max(self.clock, self.free.get(group, 0.0))
                took = 1.0 if self.rates is None else seconds_on_the_wire(node, self.rates, twice)
                ends[node] = self.free[group] = start + took
                word, at = dict(_WORDS)[kind(node)], group.removeprefix("fmegatron:").partition("#")[0]
                lane, at_line = f"{word} {at}", node.meta.get("at", "?")
                self.events.append(Event(prefix + names[node], lane, start, ends[node], detail=at_line))
            elif is_wait(node):
                source = start_of(node)
                if ends.get(source, 0.0) > self.clock:
                    flush()
                    self.events.append(Event(prefix + names[source], COMPUTE, self.clock, ends[source], waits=True))
                    self.clock = ends[source]
            elif isinstance(entry_of(node), BoundPipeline):
                flush()
                found = list(_by_stages(entry_of(node), self.rates, self.clock))
                self.events += found
                self.clock = max(e.end for e in found)
            elif is_layer(node) and self.rates is not None and not layer:
                flush()
                self.play(entry_of(node).program.stages["overlap"].graph, names[node])
            else:
                took = self._seconds_of(node)
                if is_layer(node) and not layer:
                    flush()
                    begin, name = self.clock, entry_of(node).op.name()
                    self.events.append(Event(names[node], COMPUTE, begin, begin + took, detail=name))
                elif took:
                    began = began if rest else self.clock
                    rest.append(opname(node.target) or node.name)
                self.clock += took
        flush()

    def _seconds_of(self, node: fx.Node) -> float:
        if self.rates is not None:
            return seconds_of(node, self.rates)
        return _units_of(entry_of(node).op.name()) if is_layer(node) else 0.0


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
    yield from events_of(bound, found, costs, begin, lambda graph: planned(graph, rates))
    begin += found.duration
    yield Event("end", COMPUTE, begin, begin + last, detail="gradients of ends and metrics summed over pp")


def _units_of(layer: str) -> float:
    """A forward 1, a backward 2, each half of one that a pipeline has cut 1, of a pair their sum."""
    halves = layer.count("_bwd_dx_") + layer.count("_bwd_dw_")
    backward = halves or 2.0 * ("_bwd_" in layer)
    return backward + ("_fwd_" in layer) or 1.0


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
