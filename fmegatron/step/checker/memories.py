"""Memories: whether a step fetches what is in host memory before it computes with it, and stores what belongs there.

On a CPU both memories are one, so nothing else would see it there; on CUDA such a step fails, or computes on the host.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from fmegatron.collectives import kinds, table
from fmegatron.layout import Layout
from fmegatron.step.checker.context import Finding
from fmegatron.step.graph.nodes import entry_of, int_of, is_view, items_of, node_of
from fmegatron.step.torch_private import opname

__all__ = ["mixed"]

_ALIASES = frozenset({"detach", "alias", "clone"})
_FETCH = "fetch it first, and store what is new: step.offload.fetched(state, after) and stored(new, state)"


def mixed(
    graph: torch.fx.Graph, given: Sequence[Layout | None], wanted: Sequence[Any], paths: Sequence[str]
) -> list[Finding]:
    """What is wrong with the memories of a graph.

    given: layouts of its inputs; None: of no known memory, which fits each. wanted: layouts of its outputs, or what
    else is asked of them. paths: of the outputs.
    """
    found: list[Finding] = []
    inputs = [None if layout is None else _place_of(layout) for layout in given]
    asked = [layout.on_host for layout in wanted if isinstance(layout, Layout)]
    if "host" not in inputs and True not in asked and not _moves(graph):
        return found
    places = _walked(graph, inputs, found)
    sources = items_of(graph.output_node().args[0])
    for source, place, layout, path in zip(sources, places, wanted, paths, strict=True):
        if isinstance(layout, Layout) and place not in (None, _place_of(layout)):
            what = f"the output {path} is in {place} memory, its layout says {_place_of(layout)}"
            found.append(Finding(_line(source), _op(source), "", what, _FETCH))
    return found


def _moves(graph: torch.fx.Graph) -> bool:
    """Whether a node moves a value to host memory: without a call for each node, as few graphs have one."""
    to_host = torch.ops.fmegatron_step.to_host.default
    for node in graph.nodes:
        if node.target is to_host:
            return True
    return False


def _walked(graph: torch.fx.Graph, given: Sequence[str | None], found: list[Finding]) -> list[str | None]:
    """The memories of a graph's outputs, given those of its inputs; notes what is wrong."""
    inputs = iter(given)
    memory: dict[torch.fx.Node, Any] = {}  # of a layer a list, of its results
    for node in graph.nodes:
        if node.op == "placeholder":
            memory[node] = next(inputs)
        elif node.op == "output":
            return [memory[source] for source in items_of(node.args[0])]
        elif (entry := entry_of(node)) is not None and "host" in (at := [memory[x] for x in items_of(node.args[0])]):
            memory[node] = _walked(entry.graph_module.graph, at, found)
        elif node.target is operator.getitem and isinstance(memory[node_of(node.args[0])], list):
            memory[node] = memory[node_of(node.args[0])][int_of(node.args[1])]
        else:
            memory[node] = _of(node, memory, found)
    raise AssertionError("graph: no output node")


def _place_of(layout: Layout) -> str:
    return "host" if layout.on_host else "device"


def _of(node: torch.fx.Node, memory: dict[torch.fx.Node, Any], found: list[Finding]) -> str | None:
    """The memory of a value; None: not known, or as wanted. Notes what is wrong with its arguments."""
    name = opname(node.target)
    if name in ("to_host", "from_host"):
        return "host" if name == "to_host" else "device"
    if name == "barrier":  # it only waits for its second argument
        return memory[node_of(node.args[0])]
    arguments = {memory[x] for x in node.all_input_nodes}
    if "host" not in arguments:
        return "device" if "device" in arguments else None
    collective = kinds.collective_of(node.target)
    states = collective is table.DECLARE
    if "device" in arguments or (collective is not None and not states):
        with_what = "beside values of the device" if "device" in arguments else "on the device"
        what = f"a value in host memory is used {with_what}"
        found.append(Finding(_line(node), _op(node), "", what, _FETCH))
        return None
    moves = states or is_view(node) or name in _ALIASES or node.target is operator.getitem
    if not moves:
        found.append(Finding(_line(node), _op(node), "", "the host computes with a value in its memory", _FETCH))
        return None
    return "host"


def _line(node: torch.fx.Node) -> str:
    return node.meta.get("at", "?")


def _op(node: torch.fx.Node) -> str:
    return opname(node.target) or str(node.target)
