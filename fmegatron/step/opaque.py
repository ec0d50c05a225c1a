"""Opaque nodes: a graph that is one node of the graph around it, compiled once however often it is used.

Each entry is an operator of its own in torch's dispatcher, named after the function and a digest of its graph, so equal
graphs share one operator, and names agree across ranks and processes (the compile cache can be shared). What the
operator runs is a value, the entry, which every node that calls it holds (`entry_of`), for what checks, simulates or
counts it: it lives as long as a graph, a layer or a World has it, and the operator no longer than it.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import fx

from fmegatron.collectives import kinds, table
from fmegatron.step.graph.nodes import OPAQUE, RUNS, entry_of, items_of, meta_of, opaque_entries, user_line
from fmegatron.step.operators import defined, existing, free_name
from fmegatron.step.output_buffers import with_own_outputs
from fmegatron.step.overlap.schedule import Overlap
from fmegatron.step.passes import Program, Target
from fmegatron.step.torch_private import below_autograd, last_call_of, outside_of_tracing
from fmegatron.step.tracing import line_here

__all__ = ["Entry", "Replay", "inline_layers"]

_SYMBOLIC, _COMPILED = OPAQUE


class Entry:
    """An inner graph and its operator. `Entry.make` returns the entry of an equal graph, where one is alive.

    Call it with a list of tensors: in a trace that is one node, else it interprets the graph.
    graph_module: the symbolic graph; takes the tensors of the node's list argument, returns a list. op: the operator
    that stands for it. fakes, out_meta: what goes in and comes out.
    called_at: the line that called it when it was traced; another program that has an equal graph calls it elsewhere.
    gradients: of the backward of a layer, how many of its last inputs are gradients of what the layer gave; its first
    output then is that of the layer's input.
    """

    gradients = 0

    def __init__(self, name, graph_module, fakes, fake_mode):
        self.called_at = line_here()
        self.name, self.graph_module, self.fakes, self.fake_mode = name, graph_module, fakes, fake_mode
        self.out_meta = [meta_of(n.meta["val"]) for n in items_of(graph_module.graph.output_node().args[0])]
        self.alone: dict[Target, Bound] = {}  # compiled without ranks
        self.op, self.library = defined(_SYMBOLIC, name, self, self.out_meta)
        # torch knows operators by their names in the whole process, and each name once, so equal graphs that live at
        # the same time have to meet here. A weak reference: it keeps no entry alive.
        self.op.entry = weakref.ref(self)

    @classmethod
    def make(cls, label: str, graph_module: torch.fx.GraphModule, fakes: list, fake_mode) -> Self:
        """Entry for a graph; `label` only makes the name readable. No output shares memory with an input or another."""
        with_own_outputs(graph_module)
        outs = [meta_of(n.meta["val"]) for n in items_of(graph_module.graph.output_node().args[0])]
        text = "\n".join([graph_module.code, *_constants(graph_module), repr([meta_of(f) for f in fakes]), repr(outs)])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        name = f"{re.sub(r'[^0-9a-zA-Z]+', '_', label)}_{digest}"
        known = existing(_SYMBOLIC, name)
        alive = None if known is None else known.entry()
        return cls(name, graph_module, fakes, fake_mode) if alive is None else alive

    def __call__(self, tensors: list) -> list[torch.Tensor]:
        outs = self.op(tensors)
        self.held_by_trace()
        return outs

    def run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Interpret the graph."""
        return self.graph_module(*tensors)

    def held_by_trace(self) -> None:
        """The node of the call that has just been recorded, if calls are, holds this entry."""
        node = last_call_of(self.op)
        if node is not None:
            node.meta[RUNS] = self

    def bind(self, target: Target) -> Bound:
        """The graph compiled for a target, with an operator; it goes through the passes here, is compiled later.

        In a layer collectives keep their order unless layers are called inside; those of a ring, or of rows that are
        routed, are waited for when their results are read.
        """
        graph = self.graph_module.graph
        if target.overlap is not None and not opaque_entries(graph):
            hides = any(
                kinds.collective_of(node.target) in (table.ALL_TO_ALL_ROWS, table.PPERMUTE) for node in graph.nodes
            )
            target = replace(target, overlap=Overlap(0, join_ends=False, peak=None) if hides else None)
        return self.bound_to(target)

    def bound_to(self, target: Target) -> Bound:
        """The graph compiled for this very target."""
        world = target.world
        # What is compiled for ranks is kept by their World and ends with it.
        known = self.alone if world is None else world.compiled.setdefault(self, {})
        if target not in known:
            where = "" if world is None else "_" + re.sub(r"[^0-9a-zA-Z]+", "_", str(world.mesh))
            known[target] = Bound(self, target, free_name(f"{self.name}{where}_"))
        return known[target]


def _constants(graph_module) -> list[str]:
    """The constant tensors of a graph with their bytes: its code has their names alone, the same in every graph."""
    constants = [getattr(graph_module, n.target) for n in graph_module.graph.find_nodes(op="get_attr")]
    with outside_of_tracing():
        return [
            f"{meta_of(c)} {c.detach().cpu().reshape(-1).view(torch.uint8).tolist()}"
            for c in constants
            if isinstance(c, torch.Tensor)
        ]


class Bound:
    """An entry after the passes for one target, with the operator that calls the compiled code."""

    def __init__(self, entry: Entry, target: Target, name: str):
        self.program = Program(entry.graph_module, entry.fakes, entry.fake_mode, target)
        self.code: Callable[..., Any] | None = None  # once it is compiled
        self.name, self.label = entry.name, entry.name.rpartition("_")[0]  # with the digest of the graph, and without
        self.graph_module = self.program.graph_module
        self.out_meta = entry.out_meta
        self.op, self.library = defined(_COMPILED, name, self, entry.out_meta)

    @property
    def beside(self) -> int:
        """Bytes that a call takes beside its arguments and results, as planned."""
        return self.program.beside

    def compile(self) -> None:
        """Compile if that is not done yet."""
        if self.code is None:
            run = self.program.compile()
            self.code = run if self.program.target.backend == "inductor" else below_autograd(run)

    def run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Call what is compiled. A result that the compiler lays out in another way than it was recorded is copied, as
        code that reads it was compiled for what was recorded."""
        self.compile()
        assert self.code is not None, "it is compiled"
        return [
            x if x.stride() == stride else _laid_out(x, stride)
            for x, (_, stride, *_) in zip(self.code(*tensors), self.out_meta, strict=True)
        ]


def _laid_out(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """x with these strides, but for those of dims of size 1."""
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), stride, strict=True)):
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


class Replay(fx.Interpreter):
    """Runs a graph; where that is recorded, the nodes of opaque calls hold what they run, as those of the graph do."""

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        value, entry = super().run_node(n), entry_of(n)
        if entry is not None:
            entry.held_by_trace()
        return value


# ---- inlining --------------------------------------------------------------------------------------------------------
def inline_layers(graph: fx.Graph, which: Callable[[Entry], bool] = lambda entry: True) -> fx.Graph:
    """A copy of a traced graph with the nodes of its own symbolic graph in place of each opaque compiled layer.

    which: entries that are opened; others stay nodes.

    Equal layers are one entry, whose nodes have the line that called it when it was traced, perhaps in another program:
    they get the line of its first call in this one.
    """
    flat = fx.Graph()
    out = _copy_into(flat, graph, None, {}, which)
    flat.output(out)
    return flat


def _copy_into(flat, graph, arguments, lines, which):
    """Copy nodes; `arguments` stand for the placeholders (None: copy these too). -> what the graph returns.

    lines: the user's lines that are replaced, and by which.
    """
    copied: dict[fx.Node, Any] = {}
    arguments, inner = iter(arguments) if arguments is not None else None, _lines_of_layers(graph, lines)

    def lookup(value):
        return fx.map_arg(value, lambda n: copied[n])

    for node in graph.nodes:
        entry = entry_of(node)
        if node.op == "output":
            return lookup(node.args[0])
        if node.op == "placeholder" and arguments is not None:
            copied[node] = next(arguments)
        elif node.op == "get_attr":
            constant = functools.reduce(getattr, node.target.split("."), graph.owning_module)
            copied[node] = flat.call_function(_constant_function(constant))
        elif entry is not None and which(entry):
            copied[node] = tuple(_copy_into(flat, entry.graph_module.graph, lookup(node.args[0]), inner, which))
        elif node.target is operator.getitem and isinstance(copied[node.args[0]], tuple):
            copied[node] = copied[node.args[0]][node.args[1]]
        else:
            copied[node] = flat.node_copy(node, lambda n: copied[n])
            copied[node].meta["at"] = _relined(node, lines)
    raise AssertionError("graph: no output node")


def _lines_of_layers(graph, lines) -> dict[str, str]:
    """`lines`, and for each line that called a layer of this graph when it was traced that of its first call here. Of
    backward calls the line is that of what their gradient came from, and is not informative."""
    found = dict(lines)
    for node in graph.nodes:
        entry = entry_of(node)
        if entry is not None and "(backward)" not in (at := _relined(node, lines)):
            found.setdefault(user_line(entry.called_at), user_line(at))
    return found


def _relined(node, lines) -> str:
    """The line of a node, with the user's part replaced."""
    at = node.meta.get("at", "?")
    user = user_line(at)
    return lines.get(user, user) + at.removeprefix(user)


def _constant_function(value):
    def constant():
        return value

    return constant
