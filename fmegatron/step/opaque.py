"""Opaque nodes: a graph that is one node of the graph around it, compiled once however often it is used.

Each entry is an operator of its own in torch's dispatcher, named after the function and a digest of its graph, so equal
graphs share one operator, names agree across ranks and processes (the compile cache can be shared), and the operator
itself leads back to the graph inside it (`node.target.entry`), for whoever checks, simulates or counts.
"""

from __future__ import annotations

import hashlib
import re

import torch

from fmegatron.collectives import World
from fmegatron.step.compile import IN_ORDER, compile_graph
from fmegatron.step.fresh import with_fresh_outputs
from fmegatron.step.gloo_all_to_all import exchanged
from fmegatron.step.lower import copy_module, lower
from fmegatron.step.overlap import overlapped
from fmegatron.step.torch_private import Op, below_autograd, outside_of_tracing
from fmegatron.step.trace import line_here, meta_of

__all__ = ["Entry", "entry_of", "opaque_entries"]

_SYMBOLIC, _COMPILED = "fmegatron_layer", "fmegatron_compiled"


def _define(namespace: str, name: str, run, out_meta, entry) -> Op:
    """Register `name(Tensor[] args) -> Tensor[]`. Raw registration: torch.library.custom_op costs 0.15 ms per call."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"{name}(Tensor[] args) -> Tensor[]")
    library.impl(name, lambda args: run(*args), "CompositeExplicitAutograd")

    def fake(args):
        return [
            torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in out_meta
        ]

    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    op = getattr(getattr(torch.ops, namespace), name).default
    op.entry, op.library = entry, library  # the operator keeps its library, and so itself, alive
    return op


def _existing(namespace: str, name: str):
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return None if packet is None else packet.default


class Entry:
    """An inner graph and its operator. `Entry.make` returns the existing entry when the graph is known already.

    graph_module: the symbolic graph; takes the tensors of the node's list argument, returns a list. op: the operator
    that stands for it; run on real tensors it interprets the graph. fakes, out_meta: what goes in and comes out.
    called_at: the line that called it when it was traced; another program that has an equal graph calls it elsewhere.
    """

    def __init__(self, name, graph_module, fakes, fake_mode):
        self.called_at = line_here()
        self.name, self.graph_module, self.fakes, self.fake_mode = name, graph_module, fakes, fake_mode
        self.out_meta = [meta_of(n.meta["val"]) for n in graph_module.graph.output_node().args[0]]
        self.bound = {}
        self.op = _define(_SYMBOLIC, name, graph_module, self.out_meta, self)

    @classmethod
    def make(cls, label: str, graph_module: torch.fx.GraphModule, fakes: list, fake_mode) -> Entry:
        """Entry for a graph; `label` only makes the name readable. No output shares memory with an input or another."""
        with_fresh_outputs(graph_module)
        outs = [meta_of(n.meta["val"]) for n in graph_module.graph.output_node().args[0]]
        text = "\n".join([graph_module.code, *_constants(graph_module), repr([meta_of(f) for f in fakes]), repr(outs)])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        name = f"{re.sub(r'[^0-9a-zA-Z]+', '_', label)}_{digest}"
        known = _existing(_SYMBOLIC, name)
        return known.entry if known is not None else cls(name, graph_module, fakes, fake_mode)

    def bind(self, world: World | None, backend: str, patches: dict, overlap=None) -> Op:
        """The operator that runs the compiled graph with the collectives of `world`; lowered here, compiled later.

        overlap: how they are ordered if layers are called inside (`step.Overlap`); in a layer they keep their order.
        """
        overlap = overlap if opaque_entries(self.graph_module.graph) else None
        key = (world, backend, tuple(sorted(patches.items())), overlap)
        if key not in self.bound:
            # The ranks of a mesh have bound it as often for this mesh, but not all of them for smaller ones.
            mesh = None if world is None else world.mesh
            before = sum((None if known is None else known.mesh) == mesh for known, *_ in self.bound)
            where = "" if mesh is None else "_" + re.sub(r"[^0-9a-zA-Z]+", "_", str(mesh))
            self.bound[key] = Bound(self, world, backend, patches, f"{self.name}{where}_{before}", overlap)
        return self.bound[key].op


def _constants(graph_module) -> list[str]:
    """The constant tensors of a graph with their bytes: its code has only their names, alike in every graph."""
    constants = [getattr(graph_module, n.target) for n in graph_module.graph.find_nodes(op="get_attr")]
    with outside_of_tracing():
        return [
            f"{meta_of(c)} {c.detach().cpu().reshape(-1).view(torch.uint8).tolist()}"
            for c in constants
            if isinstance(c, torch.Tensor)
        ]


class Bound:
    """An entry lowered to one world and backend, with the operator that calls the compiled code."""

    def __init__(self, entry: Entry, world, backend, patches, name, overlap=None):
        self.entry, self.backend, self.run = entry, backend, None
        inner = bind_inner(entry.graph_module, world, backend, patches, overlap)
        lowered, self.fakes, self.rank_inputs = lower(inner, entry.fakes, world, entry.fake_mode)
        self.graph_module = copy_module(exchanged(overlapped(lowered, overlap, world), world))
        with_fresh_outputs(self.graph_module, in_order=backend in IN_ORDER)
        self.patches = {**patches, **(overlap.options if overlap else {})}
        self.op = _define(_COMPILED, name, self._call, entry.out_meta, self)

    def compile(self) -> None:
        """Compile if that is not done yet."""
        if self.run is None:
            for inner in opaque_entries(self.graph_module.graph):
                inner.compile()
            run = compile_graph(self.graph_module, self.fakes, self.backend, self.patches)
            self.run = run if self.backend == "inductor" else below_autograd(run)

    def _call(self, *args):
        if self.run is None:
            self.compile()
        return list(self.run(*args, *self.rank_inputs.tensors))


def entry_of(node: torch.fx.Node) -> Entry | Bound | None:
    """The entry behind a node, or None."""
    return getattr(node.target, "entry", None) if node.op == "call_function" else None


def opaque_entries(graph: torch.fx.Graph) -> list:
    """The distinct entries that a graph calls, in order of first use."""
    return list(dict.fromkeys(e for e in map(entry_of, graph.nodes) if e is not None))


def bind_inner(graph_module, world, backend, patches, overlap=None) -> torch.fx.GraphModule:
    """A copy of the graph in which every opaque node calls the compiled form of its entry."""
    if not opaque_entries(graph_module.graph):
        return graph_module
    copy = copy_module(graph_module)
    for node in copy.graph.nodes:
        if entry_of(node) is not None:
            node.target = entry_of(node).bind(world, backend, patches, overlap)
    copy.recompile()
    return copy
