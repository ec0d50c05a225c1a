"""Passes: one pipeline from a traced graph to compiled code, shared by jit and by opaque layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from fmegatron.collectives import World
from fmegatron.step.arriving import arriving
from fmegatron.step.compile import IN_ORDER, compile_graph
from fmegatron.step.gloo_all_to_all import exchanged
from fmegatron.step.graph.nodes import RUNS, entry_of, items_of, opaque_entries
from fmegatron.step.leaving import leaving
from fmegatron.step.lower import RankInputs, copy_module, lower
from fmegatron.step.overlap.gathers import units
from fmegatron.step.overlap.schedule import KEEP_ORDER, KEEP_WAITS, Overlap, hides, overlapped, planned_peak
from fmegatron.step.streamed import How, streamed
from fmegatron.step.write_back import write_back, writes_last

__all__ = ["PASSES", "Program", "Target"]

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Target:
    """What a graph is compiled for: the ranks, a backend (`compile_graph`), Inductor's settings, order of collectives.

    patches: sorted pairs of a name in torch._inductor.config and its value. overlap: None: the order of the graph.
    host_bytes: as `jit` is given them.
    """

    world: World | None = None
    backend: str = "inductor"
    patches: tuple[tuple[str, Any], ...] = ()
    overlap: Overlap | None = None
    host_bytes: int = 1 << 29

    @property
    def in_order(self) -> bool:
        """Whether the backend runs a graph op by op."""
        return self.backend in IN_ORDER

    @property
    def by_products(self) -> bool:
        """Whether Inductor is to join collectives and products (`collectives.in_product_form`)."""
        return bool(dict(self.patches).get("_micro_pipeline_tp"))


class Program:
    """A traced graph after all passes, for one target: the outer graph of a jit, or that of an opaque layer.

    stages: name -> graph module, in order "trace", "lower", "overlap", "stream", "donate", "exchange". fakes,
    rank_inputs: what the last of them takes. donated: output index -> index of the input whose memory its value is
    written into. written, harmless: after `compile` of a graph that runs op by op: as in `Donation`.
    """

    written: Sequence[int] = ()
    harmless: bool = False
    rank_inputs: RankInputs  # of the pass "lower"

    def __init__(
        self,
        graph_module: fx.GraphModule,
        fakes: list,
        fake_mode,
        target: Target,
        donated: Mapping[int, int] = _NOTHING,
    ):
        self.fakes, self.fake_mode, self.target, self.donated = fakes, fake_mode, target, donated
        self.stages = {"trace": graph_module}
        for name, run in PASSES:
            graph_module = self.stages[name] = run(graph_module, self)
        self.graph_module = graph_module

    @property
    def settings(self) -> dict[str, Any]:
        """Inductor's settings for this graph: those of the target, and such under which the graph's order is kept."""
        overlap, order = self.target.overlap, {}
        if overlap is not None and overlap.reorders and hides(self.stages["overlap"].graph.nodes):
            order = overlap.options
        elif any("keeps" in node.meta for node in self.stages["stream"].graph.nodes):
            order = KEEP_ORDER
        elif units(self.stages["lower"].graph):
            order = KEEP_WAITS
        return {**dict(self.target.patches), **order}

    @functools.cached_property
    def beside(self) -> int:
        """Bytes that a call takes beside its arguments and results, as planned from the order of the graph."""
        graph = self.stages["overlap"].graph
        results = {n: None for n in items_of(graph.output_node().args[0]) if isinstance(n, fx.Node)}
        made = sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in results)
        return max(0, planned_peak(graph, self.target.world) - made)

    def compile(self, tell: Callable[[str], None] = lambda text: None) -> Callable:
        """Compile the layers inside, then the graph around them -> callable(*tensors) -> list of tensors.

        tell: hears what is being compiled.
        """
        entries = opaque_entries(self.graph_module.graph)
        for number, entry in enumerate(entries, 1):
            tell(f"compiling graph {number} of {len(entries) + 1} ({entry.label})")
            entry.compile()
        tell(f"compiling graph {len(entries) + 1} of {len(entries) + 1}" if entries else "compiling")
        module, target = self.graph_module, self.target
        if target.in_order and self.donated:
            module, self.written, self.harmless = writes_last(module)
        run = compile_graph(module, self.fakes, target.backend, self.settings)
        ranks = self.rank_inputs.tensors
        return (lambda *tensors: run(*tensors, *ranks)) if ranks else run


def _lowered(graph_module: fx.GraphModule, program: Program) -> fx.GraphModule:
    """Opaque nodes call the operators that are compiled for the target, collectives those of its world."""
    if opaque_entries(graph_module.graph):
        graph_module = copy_module(graph_module)
        for node in graph_module.graph.nodes:
            if entry_of(node) is not None:
                bound = entry_of(node).bind(program.target)
                node.target, node.meta[RUNS] = bound.op, bound
        graph_module.recompile()
    target = program.target
    found = lower(graph_module, program.fakes, target.world, program.fake_mode, target.by_products)
    lowered, program.fakes, program.rank_inputs = found
    return lowered


def _overlapped(graph_module: fx.GraphModule, program: Program) -> fx.GraphModule:
    """Collectives are merged, and start and wait when it suits the computation."""
    return overlapped(graph_module, program.target.overlap, program.target.world)


def _streamed(graph_module: fx.GraphModule, program: Program) -> fx.GraphModule:
    """What updates leaves in host memory is one node, which does it piece by piece; what layers keep there leaves while
    the next one is computed, and it and parameters that are there come one bucket ahead of their use."""
    target = program.target
    how = How(target.backend, target.patches, target.host_bytes)
    return arriving(leaving(streamed(graph_module, program.donated, how, program.fake_mode)), target.host_bytes)


def _written_back(graph_module: fx.GraphModule, program: Program) -> fx.GraphModule:
    """Outputs have memory of their own, or are written into that of donated inputs."""
    return write_back(graph_module, program.donated, program.target.in_order)


def _exchanged(graph_module: fx.GraphModule, program: Program) -> fx.GraphModule:
    """Collectives have the form that suits the library of the world. After the write-back, which looks for gathers."""
    return graph_module if program.target.by_products else exchanged(graph_module, program.target.world)


# Each a function from a graph module and its program to a graph module.
PASSES = (
    ("lower", _lowered),
    ("overlap", _overlapped),
    ("stream", _streamed),
    ("donate", _written_back),
    ("exchange", _exchanged),
)
