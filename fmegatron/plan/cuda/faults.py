"""Faults of a lowered step on a CUDA device: tensors on the host, waits of the host, scores in memory."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fmegatron.plan.cuda.codegen import Code
from fmegatron.plan.cuda.lowered import Graph
from fmegatron.plan.torch_private import has_cuda_kernel
from fmegatron.step import torch_private
from fmegatron.step.graph import nodes

__all__ = ["attention", "for_cpu_only", "on_host", "scores", "waits", "waits_in"]

# Operators whose CUDA kernels copy something to the host and wait for it.
_WAITS = frozenset(
    """_local_scalar_dense item is_nonzero equal nonzero masked_select unique unique_dim _unique _unique2
    unique_consecutive repeat_interleave.Tensor bincount histc tensor_split.tensor_indices_or_sections""".split()
)
# And of ours, with what they read: an exchange of rows sends as many as a tensor says.
_OURS = MappingProxyType({"all_to_all_rows": "counts of rows", "grouped_mm": "the ends of groups"})
_SENT = ("to_host", "rooms_on_host")  # `step.offload`, `step.leaving`: pinned, without a wait
_OF_TORCH = frozenset({"aten", "prims", "prim", "_c10d_functional", "inductor", "higher_order"})
_ATTENTION = re.compile(r"(scaled_dot_product|flash|efficient|tiled)_?\w*attention|flex_attention")


def on_host(graph: Graph) -> list[str]:
    """Values of a graph that are not on the device, each with its operator and line.

    State at rest in host memory, and what its update there computes, is meant to be there.
    """
    meant = {node for node in graph.module.graph.find_nodes(op="placeholder") if _devices(node) == {"cpu"}}
    found = []
    for node in graph.module.graph.nodes:
        if node.op == "output" or node in meant or "cpu" not in _devices(node):
            continue
        given = [x for x in node.all_input_nodes if "cpu" in _devices(x)]
        sent = isinstance(node.target, torch_private.Op) and torch_private.opname(node.target) in _SENT
        if sent or (given and meant.issuperset(given)):
            meant.add(node)
            continue
        found.append(f"{_said(graph, node)} is on the host; give it device=x.device")
    return found


def for_cpu_only(graph: Graph) -> list[str]:
    """Operators of a graph for which there is no kernel on CUDA: those of the CPU's libraries, and others that were
    registered for the CPU alone. (What torch's own have, its builds for CUDA know.)"""
    found = []
    for node in graph.module.graph.nodes:
        op = node.target
        if node.op != "call_function" or not isinstance(op, torch_private.Op):
            continue
        of_cpu = op.namespace in ("mkldnn", "onednn", "mkl", "quantized") or torch_private.opname(op).endswith(
            ("_for_cpu", "_cpu")
        )
        if of_cpu or (op.namespace not in _OF_TORCH and nodes.entry_of(node) is None and not has_cuda_kernel(op)):
            found.append(f"{_said(graph, node)} has no kernel on CUDA; register one (torch.library)")
    return found


def waits(graph: Graph) -> list[str]:
    """Nodes of a graph at which the host waits for the device."""
    found = []
    for node in graph.module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch_private.Op):
            continue
        name, whole = (
            torch_private.opname(node.target),
            f"{torch_private.opname(node.target)}.{torch_private.overload_name(node.target)}",
        )
        if name in _WAITS or whole in _WAITS:
            found.append(f"{_said(graph, node)} waits for the device")
        elif name in _OURS:
            found.append(f"{_said(graph, node)} reads {_OURS[name]} on the host")
        elif name in ("_to_copy", "copy_", "copy", "device_put", "to") and not node.kwargs.get("non_blocking"):
            first, result = node.args[0], _devices(node)
            if len({*result, *_devices(nodes.node_of(first)), *_devices_of_all(node.args[1:])}) > 1:
                found.append(f"{_said(graph, node)} copies between host and device and waits for it")
    return found


def waits_in(label: str, code: Code) -> list[str]:
    """Lines of a wrapper at which the host waits for the device."""
    body = code.wrapper[code.wrapper.rindex("def call(") :]
    pattern = re.compile(r"\.item\(|\.tolist\(|\.cpu\(|_local_scalar_dense|\.synchronize\(|\.nonzero\(")
    return [f"{label}: the wrapper waits: {line.strip()}" for line in body.splitlines() if pattern.search(line)]


def attention(graphs: Iterable[Graph]) -> Mapping[str, int]:
    """Names of the operators of attention that graphs call -> how often the step calls them. What is computed and not
    read does not count, as Inductor drops it."""
    found: collections.Counter[str] = collections.Counter()
    for graph in graphs:
        for node in graph.module.graph.nodes:
            if (
                isinstance(node.target, torch_private.Op)
                and node.users
                and _ATTENTION.search(torch_private.opname(node.target))
            ):
                found[torch_private.opname(node.target).strip("_")] += graph.calls
    return dict(sorted(found.items()))


def scores(graph: Graph, of_length: int) -> list[str]:
    """Values of a graph of which two dims are lengths of parts of the sequence: scores, or a mask for each.

    of_length: a number that divides all parts of the sequence and no other size of the step.
    """
    found = []
    for node in graph.module.graph.nodes:
        for x in _tensors(node) if node.op != "output" else ():
            if sum(size > 0 and size % of_length == 0 for size in x.shape) > 1 and x.stride().count(0) == 0:
                found.append(f"{_said(graph, node)} has a value for each pair of positions: {list(x.shape)}")
    return found


# ---- details ---------------------------------------------------------------------------------------------------------
def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    value: Any = node.meta.get("val")
    yield from (x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, torch.Tensor))


def _devices(node: fx.Node) -> set[str]:
    return {x.device.type for x in _tensors(node)}


def _devices_of_all(arguments: Sequence[object]) -> set[str]:
    return {device for x in arguments if isinstance(x, fx.Node) for device in _devices(x)}


def _said(graph: Graph, node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{graph.label}: {node.name} ({name}) at {node.meta.get('at', '?')}"
