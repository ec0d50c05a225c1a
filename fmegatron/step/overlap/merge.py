"""Bucketing: small all-reduces become one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import torch
from torch import fx

from fmegatron.step.overlap.order import sort_by
from fmegatron.step.overlap.roles import behind, is_start, waits_of
from fmegatron.step.torch_private import opname

__all__ = ["add_call", "ancestors", "merge_reductions", "topological"]


def merge_reductions(graph: fx.Graph, bucket_bytes: int) -> None:
    """All-reduces that do not depend on each other become one on a concatenated buffer; see `Overlap.bucket_bytes`."""
    buckets: dict[tuple, list[list[fx.Node]]] = {}
    directly = behind(graph)
    for node in [n for n in graph.nodes if is_start(n) and opname(n.target) == "all_reduce"]:
        value = node.meta["val"]
        if value.numel() * value.element_size() > bucket_bytes:
            continue
        before, key = ancestors([node], directly), (node.args[1:], value.dtype, value.device)
        for bucket in buckets.setdefault(key, []):
            size = sum(n.meta["val"].numel() for n in [*bucket, node]) * value.element_size()
            if size <= bucket_bytes and not before & set(bucket):
                bucket.append(node)
                break
        else:
            buckets[key].append([node])
    merged = [bucket for found in buckets.values() for bucket in found if len(bucket) > 1]
    for bucket in merged:
        _merge(graph, bucket)
    if merged:
        sort_by(graph, topological(graph))


def ancestors(nodes: Iterable[fx.Node], directly: dict[fx.Node, list[fx.Node]]) -> set[fx.Node]:
    """All nodes that must come before one of these; directly: as `behind` gives them."""
    found, todo = set(), [before for node in nodes for before in directly[node]]
    while todo:
        n = todo.pop()
        if n not in found:
            found.add(n)
            todo += directly[n]
    return found


def _merge(graph: fx.Graph, starts: list[fx.Node]) -> None:
    """One all-reduce of the concatenation, where the last of them stands."""
    last, aten = starts[-1], torch.ops.aten
    with graph.inserting_before(last):
        flat = [add_call(graph, aten.reshape.default, (s.args[0], [-1]), last) for s in starts]
        whole = add_call(graph, aten.cat.default, (flat,), last)
        start = add_call(graph, last.target, (whole, *last.args[1:]), last)
        wait = add_call(graph, waits_of(last)[0].target, (start,), last)
        offset = 0
        for old in starts:
            shape = old.meta["val"].shape
            end = offset + shape.numel()
            piece = add_call(graph, aten.slice.Tensor, (wait, 0, offset, end), last)
            piece = add_call(graph, aten.reshape.default, (piece, list(shape)), last)
            if not shape:  # a metric that is returned: a copy, so that keeping it does not keep the buffer
                piece = add_call(graph, torch.ops.fmegatron_step.barrier.default, (piece, piece), last)
            for old_wait in waits_of(old):
                old_wait.replace_all_uses_with(piece)
                graph.erase_node(old_wait)
            offset = end
    for old in starts:
        graph.erase_node(old)


def add_call(graph: fx.Graph, target, args, like: fx.Node) -> fx.Node:
    """A node with the fake value that its arguments imply, and the line of another one."""
    node = graph.call_function(target, args)
    with like.meta["val"].fake_mode:
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    node.meta["at"] = like.meta.get("at", "?")
    return node


def topological(graph: fx.Graph) -> list[fx.Node]:
    """Nodes after what must come before them, else in the order they have; what needs a merged collective moves behind
    it."""
    nodes, before = list(graph.nodes), behind(graph)
    place, missing = {n: i for i, n in enumerate(nodes)}, {n: len(before[n]) for n in nodes}
    after: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for node, earlier in before.items():
        for n in earlier:
            after[n].append(node)
    ready = [place[n] for n in nodes if not missing[n]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for following in after[node]:
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(ready, place[following])
    return order
