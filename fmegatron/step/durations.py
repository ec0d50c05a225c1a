"""How long the nodes of a graph take on a device, estimated from their FLOP and bytes; nothing is measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fmegatron.collectives import kinds
from fmegatron.step.graph.nodes import entry_of, is_layer, is_light, is_start, is_view
from fmegatron.step.torch_private import Op, opname

__all__ = ["Rates", "is_product", "seconds_of", "seconds_on_the_wire"]


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


def seconds_on_the_wire(node: fx.Node, rates: Rates, twice: bool) -> float:
    """Of a collective: latency, and the full array at the rate of the network; twice for all-reduces. (A ring of n
    ranks sends (n - 1)/n of that; the graph does not state n for all of them.)"""
    whole = max(_bytes([node]), _bytes(node.all_input_nodes))
    return rates.latency + whole * (2 if twice else 1) / rates.network


def seconds_of(node: fx.Node, rates: Rates) -> float:
    """What a node computes, of a compiled layer all that is in it; what is communicated is left out."""
    if is_layer(node):
        inner = entry_of(node).graph_module.graph
        return sum(seconds_of(n, rates) for n in inner.nodes if n.op == "call_function")
    if not isinstance(node.target, Op) or is_start(node) or is_view(node) or kinds.collective_of(node.target):
        return 0.0
    if is_product(node):
        return _flops(node) / rates.flops
    # Elementwise work is fused: what is read and written once, shared by a chain of a few operations.
    moved = _bytes([node, *node.all_input_nodes])
    return moved / rates.memory / (4 if is_light(node) else 1)


def is_product(node: fx.Node) -> bool:
    """Whether a node is a product of matrices, attention or another op whose work is counted in FLOP."""
    return isinstance(node.target, Op) and (_is_grouped(node) or node.target.overloadpacket in flop_registry)


def _is_grouped(node: fx.Node) -> bool:
    """Whether each group of rows is multiplied with a matrix of its own (torch has no formula for it)."""
    return opname(node.target) in ("_grouped_mm", "grouped_mm")


def _flops(node: fx.Node) -> float:
    found: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    (args, named), target = found, cast(Op, node.target)
    if _is_grouped(node):  # each of the rows [N, D], or of the columns [D, N], is in one group
        return 2.0 * args[0].numel() * args[1].shape[-1]
    return flop_registry[target.overloadpacket](*args, **named, out_val=node.meta["val"])


def _bytes(nodes: Iterable[fx.Node]) -> int:
    """Of the tensors that nodes give."""
    values = (node.meta.get("val") for node in nodes)
    each = (v for value in values for v in (value if isinstance(value, (list, tuple)) else [value]))
    return sum(v.numel() * v.element_size() for v in each if isinstance(v, torch.Tensor))
