"""Merging of collectives: all-reduces into buckets; the embedding's gather and reduction into the first layer's."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fmegatron.collectives import torch_private
from fmegatron.layout import dtypes
from fmegatron.step.graph.nodes import int_of, is_layer, is_start, is_view, is_wait, items_of, kind, node_of, waits_of
from fmegatron.step.graph.order import add_call, ancestors, behind, layers, sort_by, topological
from fmegatron.step.overlap.gathers import units
from fmegatron.step.torch_private import opname

__all__ = ["join_ends", "merge_reductions"]

_GATHER, _SCATTER, _EXCHANGE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"
_VIEW, _LIST = torch.ops.aten.view.dtype, "_coalesced"


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


def join_ends(graph: fx.Graph, backward: bool = True) -> None:
    """The embedding's gather travels with the first layer's, its gradient's reduce-scatter with that layer's.

    Gathers and plain reduce-scatters become one coalesced collective without a copy: the library is handed a list, of
    bytes where dtypes differ. Exact reductions (exchanges with sums behind them) share one buffer.
    Nothing is done where the first computation that needs gathered weights is a compiled layer itself, or the second
    is none. backward: False for the gather alone.
    """
    found = units(graph)
    if len(found) < 2 or is_layer(found[0].anchor) or not is_layer(found[1].anchor):
        return
    if len(found[0].stages) > 1 or len(found[1].stages) > 1:
        return
    _join(graph, [*found[0].gathers, *found[1].gathers], at=0)
    if backward:
        _join(graph, _last_scatters(graph), at=-1)


def _last_scatters(graph: fx.Graph) -> list[fx.Node]:
    """Reduce-scatters of the last layer of the backward and of what comes after it, as far as they are independent."""
    layer, directly = layers(graph), behind(graph)
    scatters = [n for n in graph.nodes if is_start(n) and kind(n) == "scatter"]
    by_layer = list(dict.fromkeys(layer[s] for s in scatters))
    if len(by_layer) < 2:
        return []
    before, end = by_layer[-2:]
    if before is None or end is None or not is_layer(before) or is_layer(end):
        return []
    last = [s for s in scatters if layer[s] in by_layer[-2:]]
    return [s for s in last if not ancestors([s], directly) & set(last)]


def _join(graph: fx.Graph, starts: list[fx.Node], at: int) -> None:
    """Starts of one kind over one group as one, in the place of the first or the last of them; others stay as they are.

    Sums that are made on the way are made in one dtype, so a reduce-scatter shares only with those of its own. Between
    two ranks it shares with an exchange, as an exchange: its sum then is local too, in the order of the ranks, which
    for more than two may not be the library's.
    """
    joinable: dict[tuple, list[fx.Node]] = {}
    exchanged = {str(s.args[-1]) for s in starts if opname(s.target) == _EXCHANGE}
    for start in starts:
        name, group = opname(start.target), str(start.args[-1])
        of_two = name == _SCATTER and int_of(start.args[-2]) == 2
        if name == _EXCHANGE or of_two and group in exchanged:
            joinable.setdefault((_EXCHANGE, group), []).append(start)
        elif (base := name.removesuffix(_LIST)) in (_GATHER, _SCATTER):
            dtype = _parts(start)[0][1].meta["val"].dtype if base == _SCATTER else None
            joinable.setdefault((base, start.args[1:], dtype), []).append(start)
    for (name, *_), together in joinable.items():
        if len(together) > 1:
            (_exchanged if name == _EXCHANGE else _coalesced)(graph, together, together[at])
            sort_by(graph, topological(graph))


def _parts(start: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """(buffer that is sent, node of what arrives) of a start, or of each in its list."""
    if not opname(start.target).endswith(_LIST):
        return [(node_of(start.args[0]), start)]
    given = items_of(start.args[0])
    return [(given[int_of(piece.args[1])], piece) for piece in start.users]


def _coalesced(graph: fx.Graph, starts: list[fx.Node], at: fx.Node) -> None:
    """One start for a list of buffers; several dtypes are viewed as bytes on the way."""
    parts = [part for start in starts for part in _parts(start)]
    as_bytes = len({old.meta["val"].dtype for _, old in parts}) > 1
    like = next(wait for _, old in parts for wait in old.users if is_wait(wait))
    with graph.inserting_before(at):
        given = [x for x, _ in parts]
        if as_bytes:
            given = [add_call(graph, _VIEW, (x, torch.uint8), like) for x in given]
        target = getattr(torch_private.functional_ops(), opname(starts[0].target).removesuffix(_LIST) + _LIST).default
        whole = add_call(graph, target, (given, *starts[0].args[1:]), like)
        pieces = [graph.call_function(operator.getitem, (whole, i)) for i in range(len(parts))]
    for i, (piece, (_, old)) in enumerate(zip(pieces, parts, strict=True)):
        piece.meta |= {"val": whole.meta["val"][i], "at": old.meta.get("at", "?")}
        if not as_bytes:
            old.replace_all_uses_with(piece)
            continue
        for wait in [user for user in old.users if is_wait(user)]:
            with graph.inserting_before(wait):
                arrived = add_call(graph, wait.target, (piece,), wait)
                viewed = add_call(graph, _VIEW, (arrived, old.meta["val"].dtype), wait)
            wait.replace_all_uses_with(viewed)
            graph.erase_node(wait)
    for _, old in parts:
        if old not in starts:
            graph.erase_node(old)
    for start in starts:
        graph.erase_node(start)


# ---- exchanges -------------------------------------------------------------------------------------------------------
def _exchanged(graph: fx.Graph, starts: list[fx.Node], at: fx.Node) -> None:
    """One exchange of a buffer [ranks, row] that has the rows of all; what was packed already is packed only once."""
    ours, reshape = torch.ops.fmegatron_real, torch.ops.aten.reshape.default
    exchange = next(s for s in starts if opname(s.target) == _EXCHANGE)
    n = len(items_of(exchange.args[1]))
    packs, unpacks = ([_along(s, ours.pack.default) for s in starts], [_along(s, ours.unpack.default) for s in starts])
    with graph.inserting_before(at):
        rows = [
            list(items_of(pack[-1].args[0]))
            if pack and unpack
            else [add_call(graph, reshape, (s.args[0], [n, -1]), at)]
            for s, pack, unpack in zip(starts, packs, unpacks, strict=True)
        ]
        sent = [row for mine in rows for row in mine]
        buffer = add_call(graph, ours.pack.default, (sent,), at)
        parts = [buffer.meta["val"].shape[1]] * n
        flat = add_call(graph, reshape, (buffer, [-1]), at)
        start = add_call(graph, exchange.target, (flat, parts, parts, at.args[-1]), at)
        wait = add_call(graph, waits_of(at)[0].target, (start,), at)
        values = [row.meta["val"] for row in sent]
        named = [dtypes.dtype_name(v.dtype) for v in values], [v.numel() // n for v in values]
        found = add_call(graph, ours.unpack.default, (add_call(graph, reshape, (wait, [n, -1]), at), *named), at)
        start.meta["symbolic"] = exchange.meta["symbolic"]
        arrived = iter([add_call(graph, operator.getitem, (found, i), at) for i in range(len(sent))])
        for old, mine, pack, unpack in zip(starts, rows, packs, unpacks, strict=True):
            mine = [next(arrived) for _ in mine]
            if pack and unpack:
                for user in list(unpack[-1].users):
                    user.replace_all_uses_with(mine[int_of(user.args[1])])
                    graph.erase_node(user)
                gone = [*reversed(unpack), old, *pack]
            else:
                whole = mine[0] if opname(old.target) == _EXCHANGE else _sum(graph, mine[0], n, at)
                gone = [*waits_of(old), old]
                gone[0].replace_all_uses_with(add_call(graph, reshape, (whole, [-1]), at))
            for node in gone:
                graph.erase_node(node)


def _sum(graph: fx.Graph, rows: fx.Node, n: int, like: fx.Node) -> fx.Node:
    """Rows [n, ...] added up from the first one on, in their dtype."""
    aten = torch.ops.aten
    found = [add_call(graph, aten.select.int, (rows, 0, i), like) for i in range(n)]
    total = found[0]
    for row in found[1:]:
        total = add_call(graph, aten.add.Tensor, (total, row), like)
        total.meta["symbolic"] = "reduce_scatter"  # a part of the reduction: it waits with it
    return total


def _along(start: fx.Node, end) -> list[fx.Node]:
    """The nodes that lead from an exchange, by views that nothing else reads, to the one that packs or unpacks its
    buffer; [] if that is not so."""
    back, found, node = end is torch.ops.fmegatron_real.pack.default, [], start
    while node.target is not end:
        near = [node_of(node.args[0])] if back else list(node.users)
        if len(near) != 1 or (back and len(near[0].users) != 1):
            return []
        node = near[0]
        if not (is_view(node) or is_wait(node) or node.target is end):
            return []
        found.append(node)
    return found
