"""Fewer collectives: small all-reduces as one, and the two ends of the model with their neighbours."""

from __future__ import annotations

import heapq
import operator

import torch
from torch import fx

from fmegatron.step.overlap.order import sort_by
from fmegatron.step.overlap.roles import behind, is_layer, is_start, kind, layers, units, waits_of

__all__ = ["join_ends", "merge_reductions"]

_COALESCED = ("all_gather_into_tensor", "reduce_scatter_tensor")


def merge_reductions(graph: fx.Graph, bucket_bytes: int) -> None:
    """All-reduces that do not depend on each other become one on a concatenated buffer; see `Overlap.bucket_bytes`."""
    buckets: dict[tuple, list[list[fx.Node]]] = {}
    directly = behind(graph)
    for node in [n for n in graph.nodes if is_start(n) and n.target._opname == "all_reduce"]:
        value = node.meta["val"]
        if value.numel() * value.element_size() > bucket_bytes:
            continue
        before, key = _ancestors(node, directly), (node.args[1:], value.dtype, value.device)
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
        sort_by(graph, _stable_topological(graph))


def _ancestors(node: fx.Node, directly: dict[fx.Node, list[fx.Node]]) -> set[fx.Node]:
    found, todo = set(), list(directly[node])
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
        flat = [_call(graph, aten.reshape.default, (s.args[0], [-1]), last) for s in starts]
        whole = _call(graph, aten.cat.default, (flat,), last)
        start = _call(graph, last.target, (whole, *last.args[1:]), last)
        wait = _call(graph, waits_of(last)[0].target, (start,), last)
        offset = 0
        for old in starts:
            shape = old.meta["val"].shape
            end = offset + shape.numel()
            piece = _call(graph, aten.slice.Tensor, (wait, 0, offset, end), last)
            piece = _call(graph, aten.reshape.default, (piece, list(shape)), last)
            if not shape:  # a metric that is returned: a copy, so that keeping it does not keep the buffer
                piece = _call(graph, torch.ops.fmegatron_step.barrier.default, (piece, piece), last)
            for old_wait in waits_of(old):
                old_wait.replace_all_uses_with(piece)
                graph.erase_node(old_wait)
            offset = end
    for old in starts:
        graph.erase_node(old)


def _call(graph: fx.Graph, target, args, like: fx.Node) -> fx.Node:
    """A node with the fake value that its arguments imply, and the line of another one."""
    node = graph.call_function(target, args)
    with like.meta["val"].fake_mode:
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    node.meta["at"] = like.meta.get("at", "?")
    return node


def _stable_topological(graph: fx.Graph) -> list[fx.Node]:
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


# ---- the ends of the model -------------------------------------------------------------------------------------------
def join_ends(graph: fx.Graph) -> None:
    """The embedding's gather travels with the first layer's, its gradient's reduce-scatter with that layer's.

    Nothing is done where the first computation that needs gathered weights is a compiled layer itself, or the second
    is none.
    """
    found = units(graph)
    if len(found) < 2 or is_layer(found[0].anchor) or not is_layer(found[1].anchor):
        return
    if len(found[0].stages) > 1 or len(found[1].stages) > 1:
        return
    _coalesce(graph, [*found[0].gathers, *found[1].gathers], at=0)
    _coalesce(graph, _last_scatters(graph), at=-1)


def _last_scatters(graph: fx.Graph) -> list[fx.Node]:
    """Reduce-scatters of the last layer of the backward and of what comes after it, as far as they are independent."""
    layer, directly = layers(graph), behind(graph)
    scatters = [n for n in graph.nodes if is_start(n) and kind(n) == "scatter"]
    by_layer = list(dict.fromkeys(layer[s] for s in scatters))
    if len(by_layer) < 2 or None in by_layer[-2:] or not is_layer(by_layer[-2]) or is_layer(by_layer[-1]):
        return []
    last = [s for s in scatters if layer[s] in by_layer[-2:]]
    return [s for s in last if not _ancestors(s, directly) & set(last)]


def _coalesce(graph: fx.Graph, starts: list[fx.Node], at: int) -> None:
    """Starts over one group as one coalesced collective, in the place of the first or the last of them.

    No copy: the library is handed a list. Starts of other groups, dtypes or kinds stay as they are.
    """
    alike: dict[tuple, list[fx.Node]] = {}
    for start in starts:
        if start.target._opname in _COALESCED:
            alike.setdefault((start.target._opname, start.args[1:], start.meta["val"].dtype), []).append(start)
    for (name, rest, _), together in alike.items():
        if len(together) < 2:
            continue
        values = [s.meta["val"] for s in together]
        with graph.inserting_before(together[at]):
            target = getattr(torch.ops._c10d_functional, f"{name}_coalesced").default
            whole = graph.call_function(target, ([s.args[0] for s in together], *rest))
            whole.meta |= {"val": values, "at": together[at].meta.get("at", "?")}
            for i, (old, value) in enumerate(zip(together, values, strict=True)):
                piece = graph.call_function(operator.getitem, (whole, i))
                piece.meta |= {"val": value, "at": old.meta.get("at", "?")}
                old.replace_all_uses_with(piece)
        for old in together:
            graph.erase_node(old)
    sort_by(graph, _stable_topological(graph))
