"""The gradient of one microbatch as an opaque node, cut where the counts of all microbatches must be known.

The gradient is traced once, as if the microbatch were the whole batch: its counts are summed between its forward and
its backward. The nodes above these sums are the first graph (a few sums of masks), which runs for all microbatches
before the first backward. In the second the sums are inputs; that is the node, compiled once however often it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from fmegatron import tree
from fmegatron.collectives import known_ranks
from fmegatron.step.gradient import Gradient
from fmegatron.step.graph.memory import memory_of, memory_written
from fmegatron.step.graph.nodes import user_line
from fmegatron.step.opaque import Entry, Replay, inline_layers
from fmegatron.step.parts import weight_differs
from fmegatron.step.torch_private import graph_module_of, opname, outside_of_tracing
from fmegatron.step.tracing import Traced, own_results, trace
from fmegatron.tree import labels

__all__ = ["OneNode"]

_BEFORE, _SUMS, _REST = range(3)


class OneNode:
    """`gradient(*args) -> Gradient` of arguments like these, traced once, with marks of stages or without.

    counts: the first graph; None where nothing must be known before. entry: the opaque node of the second.
    """

    def __init__(
        self, gradient: Callable[..., Gradient], args: tuple, name: str, who: str, twice: bool, stages: bool = False
    ):
        mesh, one = known_ranks.recorded_mesh(), own_results(gradient)
        one.__name__ = name  # which errors tell
        with outside_of_tracing():
            self.traced = trace(one, args, mesh=mesh, stages=stages)
        traced, self.counts = self.traced, None
        root, graph = traced.graph_module, traced.graph_module.graph
        kinds = [{"before": _BEFORE, "sums": _SUMS}.get(path.partition("/")[0], _REST) for path in traced.out_paths]
        self.places = [[i for i, kind in enumerate(kinds) if kind == wanted] for wanted in range(3)]
        early, sums, rest = self.places
        _require_same_weights(who, traced)
        if not sums:
            self.entry = Entry.make(name, root, traced.fakes, traced.fake_mode)
            return
        reached = _reached(graph, traced)
        # A layer gives all its outputs and asks for all its weights; opened, a count depends on what it is made of.
        flat = inline_layers(graph) if reached else graph
        inside = _reached(flat, traced) if reached else {}
        if inside and not twice:
            raise _refused(who, *next(iter(inside.items())), stages)
        if reached and not inside:
            self.counts = graph_module_of({}, _needed(flat, early))
        else:
            self.counts = graph_module_of(root, _needed(graph, early))
        with outside_of_tracing(), traced.fake_mode:
            fakes = [*traced.fakes, *(torch.empty_like(traced.outputs[i].meta["val"]) for i in sums)]
        self.entry = Entry.make(name, graph_module_of(root, _needed(graph, rest, sums)), fakes, traced.fake_mode)

    def before(self, args: tuple) -> Gradient:
        """Of a microbatch `Gradient.before`, and what is no tensor, alone."""
        assert self.counts is not None, "nothing must be known before"
        return self._result(_BEFORE, Replay(self.counts).run(*_tensors(args)))

    def gradient(self, args: tuple, sums: dict[str, torch.Tensor]) -> Gradient:
        """The gradient of a microbatch, given the sums of all: one node."""
        return self.result(self.entry([*_tensors(args), *(sums[name] for name in self.sums)]))

    @property
    def gives(self) -> list[str]:
        """The paths of what the node gives."""
        return [self.traced.out_paths[i] for i in self.places[_REST]]

    @property
    def sums(self) -> list[str]:
        """The names of the sums that the node takes, behind the tensors of the arguments."""
        return [self.traced.out_paths[i].removeprefix("sums/") for i in self.places[_SUMS]]

    def result(self, tensors: Sequence) -> Gradient:
        """What the node gives, as the gradient that it is; None stands for what is not computed."""
        return self._result(_REST, tensors)

    def _result(self, kind: int, tensors: Sequence) -> Gradient:
        """What the traced function returned, filled with the tensors of one kind."""
        filled: list[Any] = [None] * len(self.traced.out_paths)
        for i, x in zip(self.places[kind], tensors, strict=True):
            label = self.traced.out_labels[i]
            filled[i] = x if label is None or x is None else labels.labelled(x, label.layout)
        return self.traced.result(filled)


def _tensors(args: tuple) -> list[torch.Tensor]:
    return [x for x in tree.leaves(args) if isinstance(x, torch.Tensor)]


def _needed(graph: fx.Graph, outputs: Sequence[int], given: Sequence[int] = ()) -> fx.Graph:
    """A copy with what some outputs need; the values of the outputs `given` are placeholders behind all others."""
    outs: Any = graph.output_node().args[0]
    sums: dict[fx.Node, int] = {}
    for i in given:
        sums[_behind(outs[i], ("detach",))] = i  # `trace` detaches outputs
    made_of, ends = _made_of(graph)
    needed, todo = set(), [node for i in outputs for node in ends[outs[i]]]
    while todo:
        node = todo.pop()
        if node not in needed and node not in sums:
            needed.add(node)
            todo += made_of[node]
    copy, copied = fx.Graph(graph.owning_module), {}
    for node in graph.find_nodes(op="placeholder"):
        copied[node] = copy.node_copy(node)
    for i in given:
        node = _behind(outs[i], ("detach",))
        copied[node] = copy.placeholder(f"sum_{i}")
        copied[node].meta.update(node.meta)
    for node in graph.nodes:
        if node in needed and node not in copied:
            copied[node] = copy.node_copy(node, lambda n: copied[n])
    copy.output([copied[outs[i]] for i in outputs])
    return copy


def _made_of(graph: fx.Graph) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, list[fx.Node]]]:
    """(what each node is made of: its inputs and what has written into their memory before it, as in `count[0] = n`;
    what each one returned is: itself and all that has written into its memory)."""
    memory, made_of = memory_of(graph.nodes), {}
    writers: dict[Hashable, list[fx.Node]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        made_of[node] = [*inputs, *(w for x in inputs for w in writers.get(memory[x], ()))]
        for written in memory_written(node, memory):
            writers.setdefault(written, []).append(node)
    returned = graph.output_node().all_input_nodes
    return made_of, {node: [node, *writers.get(memory[node], ())] for node in returned}


def _reached(graph: fx.Graph, traced: Traced, wanted: str = "before/", of: str = "0") -> dict[str, tuple[str, str]]:
    """{path of an output: (path of an input that it depends on, line)}, of outputs and inputs whose paths begin so: of
    the counts that depend on a parameter; empty where the batch decides all."""
    inputs = dict(zip(graph.find_nodes(op="placeholder"), traced.in_paths, strict=True))
    above = {node: path.partition("/")[2] for node, path in inputs.items() if path.split("/")[0] == of}
    made_of, ends = _made_of(graph)
    for node in graph.nodes:  # the first input above each
        found = next((above[a] for a in made_of[node] if a in above), None)
        if found is not None:
            above.setdefault(node, found)
    outputs: Any = graph.output_node().args[0]
    reached = {}
    for path, node in zip(traced.out_paths, outputs, strict=True):
        leaf = next((above[end] for end in ends[node] if end in above), None)
        if leaf is not None and path.startswith(wanted):
            reached[path] = leaf, user_line(_behind(node, _CASTS).meta.get("at", "?"))
    return reached


def _require_same_weights(who: str, traced: Traced) -> None:
    """ValueError for a weight that depends on the batch, of which each microbatch has other rows."""
    graph, found = traced.graph_module.graph, {}
    for flat in (False, True):  # as for counts: a layer's outputs are looked at apart only where that matters
        found = _reached(inline_layers(graph) if flat else graph, traced, _WEIGHTS, "1")
        if not found:
            return
    path, (leaf, line) = next(iter(found.items()))
    name = path.removeprefix(_WEIGHTS).rpartition("/")[0]
    raise weight_differs(who, f"part {name!r}: got a weight (at {line}) that depends on {leaf!r} of the batch")


_WEIGHTS = "shown/factors/"


_CASTS = ("detach", "_to_copy", "convert_element_type")


def _behind(node: fx.Node, names: Sequence[str]) -> fx.Node:
    """The node that one of these ops, and one of these, was applied to."""
    while node.op == "call_function" and opname(node.target) in names:
        node = node.all_input_nodes[0]
    return node


def _refused(who: str, path: str, found: tuple[str, str], stages: bool) -> ValueError:
    part, _, what = path.removeprefix("before/").partition("/")[2].rpartition("/")
    leaf, line = found
    fix = "take microbatches=1, or twice=True, which runs all forward passes once more before"
    if stages:  # no stage has all of it before its backward, of one microbatch neither
        fix = (
            "make it of each row by itself, or of the step before, as a leaf of the state (of experts "
            "sequence_balance=, or balance_of='step before'), or take a mesh without pp"
        )
    return ValueError(
        f"{who}: part {part!r}: its {what} (at {line}) depends on the parameter {leaf!r}, wanted one that the batch "
        "alone decides, as all microbatches are divided by one sum, known before the first backward; count what "
        f"the batch has (mask.sum(); x.numel() where all count, and not ones_like(x).sum()), {fix}"
    )
