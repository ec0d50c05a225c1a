"""Copies from host memory, of parameters and of what layers keep there, begun one bucket ahead of their use.

In a lowered graph each copy stands before its use, where `step.regather` has put it, or before the backward of its
layer. Here those that stand together are a bucket. Its memory on the device is made and its copies begin when the
bucket before it has arrived, so that they travel while the device computes with that one; before the first use the
device waits for them. At most two buckets are there, the one that is used and the next.

Begin and wait are operators that write into the memory of the bucket and return nothing, so no compiler takes it for
free between the two, or reads it before the second: a wait that returned what it was given would allow both.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator

import torch
from torch import fx

from fmegatron.step.graph.nodes import is_light, node_of, written_by
from fmegatron.step.leaving import Travel, is_brought
from fmegatron.step.lower import copy_module

__all__ = ["arriving"]

_NAMESPACE = "fmegatron_step"


def arriving(graph_module: fx.GraphModule, host_bytes: int) -> fx.GraphModule:
    """A copy of a lowered graph whose copies from host memory travel by buckets of at most `host_bytes`, or of one
    array, each begun when the one before it has arrived, or when what it copies is there, if that is later; a graph
    without such copies is returned as it is."""
    if not any(map(is_brought, graph_module.graph.nodes)):
        return graph_module
    module = copy_module(graph_module)
    graph, found = module.graph, list(_buckets(module.graph, host_bytes))
    position = {node: i for i, node in enumerate(graph.nodes)}
    digest = hashlib.sha256(graph_module.code.encode()).hexdigest()[:16]
    device, names = found[0][0].meta["val"].device, (f"begin_{digest}", f"wait_{digest}")
    run = Travel(device, names, lambda copies, pairs: copies.bring(pairs), lambda copies: copies.arrived(), held=False)
    laid: dict[fx.Node, fx.Node] = {}
    begin_at, before = found[0][0], node_of(found[0][0].args[1])
    for bucket in found:
        ready = max((_written(node, position) for node in bucket), key=lambda node: position[node])
        begin_at = begin_at if position[ready] < position[begin_at] else ready.next
        on = node_of(bucket[0].args[1])  # which says the device
        on, before = on if position[on] < position[begin_at] else before, on
        values = [node.meta["val"] for node in bucket]
        with graph.inserting_before(begin_at):
            sources = [_there(graph, node_of(node.args[0]), position[begin_at], position, laid) for node in bucket]
            rooms = graph.call_function(torch.ops.fmegatron_step.rooms.default, (sources, on))
            rooms.meta |= {"val": values, "at": bucket[0].meta.get("at", "?"), "keeps": run}
            items = [graph.call_function(operator.getitem, (rooms, i)) for i in range(len(values))]
            begin = graph.call_function(run.begin.op, (items, sources))
        with graph.inserting_before(bucket[0]):
            wait = graph.call_function(run.wait.op, (items,))
        for node in (begin, wait):
            node.meta |= {"val": None, "at": rooms.meta["at"], "keeps": run}
        for node, item, value in zip(bucket, items, values, strict=True):
            item.meta |= {**node.meta, "val": value}
        begin_at = bucket[0]  # what stands before it comes behind the wait for this bucket
    for bucket, items in zip(found, _items_of(graph, run), strict=True):
        for node, item in zip(bucket, items, strict=True):
            node.replace_all_uses_with(item)
            graph.erase_node(node)
    graph.lint()
    module.recompile()
    return module


def _items_of(graph: fx.Graph, run: Travel) -> list[list[fx.Node]]:
    """The memory of each bucket, in their order."""
    return [list(node.args[0]) for node in graph.find_nodes(op="call_function", target=run.begin.op)]


def _buckets(graph: fx.Graph, host_bytes: int) -> Iterator[list[fx.Node]]:
    """Copies between which nothing is computed, of at most so many bytes together."""
    bucket, size = list[fx.Node](), 0
    for node in graph.nodes:
        nbytes = node.meta["val"].nbytes if is_brought(node) else 0
        ends = not is_brought(node) and not is_light(node)
        if bucket and (ends or size + nbytes > host_bytes):
            yield bucket
            bucket, size = [], 0
        if is_brought(node):
            bucket.append(node)
            size += nbytes
    if bucket:
        yield bucket


def _written(copy: fx.Node, position: dict[fx.Node, int]) -> fx.Node:
    """The last node before a copy that writes what it copies; the first of the graph, an argument, where none does."""
    source = node_of(copy.args[0])
    writers = [user for user in source.users if source in written_by(user) and position[user] < position[copy]]
    return max(writers, key=lambda user: position[user], default=next(iter(position)))


def _there(
    graph: fx.Graph, node: fx.Node, at: int, position: dict[fx.Node, int], laid: dict[fx.Node, fx.Node]
) -> fx.Node:
    """A view of an argument, where the graph inserts, which is before a position."""
    if node.op == "placeholder" or position[node] < at:
        return node
    if node not in laid:
        before = {x: _there(graph, x, at, position, laid) for x in node.all_input_nodes}
        laid[node] = graph.node_copy(node, lambda x: before[x])
    return laid[node]


# ---- the op ----------------------------------------------------------------------------------------------------------
def _rooms(like: list[torch.Tensor], on: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=on.device) for x in like]


def _define_ops() -> torch.library.Library:
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    library.define("rooms(Tensor[] like, Tensor on) -> Tensor[]")
    library.impl("rooms", _rooms, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::rooms", _rooms, lib=library)
    return library


_LIBRARY = _define_ops()
