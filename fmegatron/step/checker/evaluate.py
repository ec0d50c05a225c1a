"""Ops on the elements that ranks have along dims, and on those of one rank (`positions.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.fx.node import map_aggregate

from fmegatron.collectives import kinds, table
from fmegatron.step.checker.context import op_name
from fmegatron.step.checker.elements import (
    NONE,
    Elements,
    Reader,
    added_at,
    dim_at,
    indexed,
    known_along,
    made,
    moved,
    put_back,
    selected,
    sizes_of,
    sliced,
)
from fmegatron.step.checker.shapes import Open, grouped, viewed_on_one
from fmegatron.step.graph.nodes import int_of, items_of, node_of

__all__ = ["OF_NUMBERS", "OPS"]

Node = torch.fx.Node
Tensor = torch.Tensor


# ---- element by element ----------------------------------------------------------------------------------------------
# Smooth, or linear in one operand: equal results for random numbers mean equal ones for all.
_SMOOTH = frozenset(
    "add sub rsub mul div true_divide neg exp tanh sigmoid log pow square sqrt rsqrt reciprocal sin cos softplus"
    " tanh_backward sigmoid_backward silu gelu erf addcmul".split()
)
# Of numbers that are made of no data alone: neither smooth nor linear.
OF_NUMBERS = frozenset(
    "eq ne lt le gt ge bitwise_and bitwise_or bitwise_not bitwise_xor logical_and logical_or logical_not logical_xor"
    " remainder floor_divide abs clamp minimum maximum".split()
)
_CHOSEN = frozenset(("where", "masked_fill"))  # by a condition that is made of no data


def _together(seen: Reader, node: Node) -> tuple[dict[Node, Elements], frozenset[int], frozenset[int]]:
    """Operands that are broadcast, with the dims of the result that are tracked and flat."""
    shape, nodes = sizes_of(node), list(node.all_input_nodes)
    known: dict[Node, Elements] = {}
    tracked: frozenset[int] = NONE
    for leaves in (False, True):
        for n in nodes:
            if seen.is_leaf(n) == leaves:
                shift = len(shape) - n.meta["val"].dim()
                along = frozenset(d - shift for d in tracked if d >= shift and sizes_of(n)[d - shift] > 1)
                known[n] = seen.elements(n, along)
                tracked |= frozenset(d + shift for d in known[n].tracked)
    flat = frozenset(range(len(shape)))
    for n, x in [*known.items()]:
        shift = len(shape) - n.meta["val"].dim()
        for d, size in enumerate(sizes_of(n)):
            free = size > 1 and d not in x.tracked and d not in x.flat
            if free and d + shift in tracked:
                if not seen.is_leaf(n):
                    raise Open
                more = frozenset(e - shift for e in tracked if e >= shift and sizes_of(n)[e - shift] > 1)
                known[n] = seen.elements(n, more)
            if free:
                flat -= {d + shift}
    return known, tracked, flat - tracked


def _elementwise(seen: Reader, node: Node) -> Elements:
    name = op_name(node).rstrip("_")
    data = [n for n in node.all_input_nodes if not seen.is_number(n)]
    if data and name not in _SMOOTH | _CHOSEN:
        raise Open
    if name in _CHOSEN and not seen.is_number(node_of(node.args[1 if name == "masked_fill" else 0])):
        raise Open
    known, tracked, flat = _together(seen, node)
    nodes = list(known)
    if name == "add" and len(nodes) == 2 and sum(x.one is None for x in known.values()) == 1:  # as a loop leaves it out
        left = next(x for x in known.values() if x.one is not None)
        found = made([known[n] for n in nodes], _called(seen, node, nodes), tracked, flat)
        return found._replace(one=left.one)
    return made([known[n] for n in nodes], _called(seen, node, nodes), tracked, flat)


def _called(seen: Reader, node: Node, nodes: list[Node]) -> Callable[[list[Tensor], bool], Tensor]:
    """The op itself, of tensors in the place of nodes and of numbers as one rank has them."""
    dtype, exact, op = node.meta["val"].dtype, seen.is_number(node), cast("Callable", node.target)

    def number(x: Any) -> Any:
        return seen.number(node, x, False) if isinstance(x, (int, float)) and not isinstance(x, bool) else x

    whole = map_aggregate((node.args, node.kwargs), number)

    def run(tensors: list[Tensor], one: bool) -> Tensor:
        at = dict(zip(nodes, tensors, strict=True))
        args, kwargs = torch.fx.map_arg(whole if one else (node.args, node.kwargs), lambda n: at[n])
        out = op(*args, **{k: v for k, v in kwargs.items() if k in ("alpha", "rounding_mode", "dim")})
        return out.to(torch.float64) if dtype.is_floating_point or not exact else out.to(dtype)

    return run


def _same(seen: Reader, node: Node) -> Elements:
    x, dtype = seen.elements(node_of(node.args[0])), node.meta["val"].dtype
    wide = torch.float64 if dtype.is_floating_point else dtype
    if not seen.is_number(node):
        wide = torch.float64
    return made([x], lambda ts, one: ts[0].to(wide), x.tracked, x.flat)


# ---- dims ------------------------------------------------------------------------------------------------------------
def _permuted(seen: Reader, node: Node) -> Elements:
    x, rank = seen.elements(node_of(node.args[0])), node.meta["val"].dim()
    order, name = list(range(rank)), op_name(node)
    if name == "permute":
        order = [int_of(d) % rank for d in items_of(node.args[1])]
    elif rank > 1:
        a, b = (int_of(d) % rank for d in node.args[1:3]) if name == "transpose" else (0, 1)
        order[a], order[b] = order[b], order[a]
    to = {old: new for new, old in enumerate(order)}
    return made([x], lambda ts, one: ts[0].permute(order), moved(x.tracked, to), moved(x.flat, to))


def _unsqueezed(seen: Reader, node: Node) -> Elements:
    x, rank = seen.elements(node_of(node.args[0])), node.meta["val"].dim()
    dim = int_of(node.args[1]) % rank
    to = {d: d + (d >= dim) for d in range(rank - 1)}
    return made([x], lambda ts, one: ts[0].unsqueeze(dim), moved(x.tracked, to), moved(x.flat, to) | {dim})


def _squeezed(seen: Reader, node: Node) -> Elements:
    source = node_of(node.args[0])
    x, shape = seen.elements(source), sizes_of(source)
    given = node.args[1] if len(node.args) > 1 else range(len(shape))
    dims = [int_of(d) % max(1, len(shape)) for d in (given if isinstance(given, (list, tuple, range)) else [given])]
    gone = sorted((d for d in dims if shape[d] == 1), reverse=True)

    def of(ts: list[Tensor], one: bool) -> Tensor:
        out = ts[0]
        for d in gone:
            if out.shape[d] != 1:
                raise Open
            out = out.squeeze(d)
        return out

    to = {d: d - sum(g < d for g in gone) for d in range(len(shape)) if d not in gone}
    return made([x], of, moved(x.tracked, to), moved(x.flat, to))


def _expanded(seen: Reader, node: Node) -> Elements:
    """New elements along a dim are equal: they need not be counted."""
    x, new = seen.elements(node_of(node.args[0])), node.meta["val"].dim() - node_of(node.args[0]).meta["val"].dim()
    to = {d: d + new for d in range(node.meta["val"].dim() - new)}

    def of(ts: list[Tensor], one: bool) -> Tensor:
        return ts[0].reshape([1] * new + list(ts[0].shape))

    tracked, shape = moved(x.tracked, to), sizes_of(node)
    for d in tracked:
        if x.ranks[0].shape[d - new] != shape[d]:  # a dim of one element that another rank may have more of
            raise Open
    repeated = frozenset(
        d for d in range(len(shape)) if d < new or sizes_of(node_of(node.args[0]))[d - new] != shape[d]
    )
    return made([x], of, tracked, moved(x.flat, to) | repeated)


def _viewed(seen: Reader, node: Node, along: frozenset[int] = NONE) -> Elements:
    source = node_of(node.args[0])
    before, after = sizes_of(source), sizes_of(node)
    if before == after:
        return seen.elements(source, along)
    groups, sizes = grouped(before, after), viewed_on_one(seen, node, before, after, seen.whole(source))
    ones = {d for d, n in enumerate(after) if n == sizes[d] == 1}
    x = seen.elements(source, frozenset(d for olds, news in groups if (along - ones) & {*news} for d in olds))
    tracked, flat = set(), set()
    for olds, news in groups:
        mine = [d for d in olds if d in x.tracked]
        if not mine:
            if all(before[d] == 1 or d in x.flat for d in olds):
                flat.update(news)
            continue
        if any(before[d] > 1 and d not in mine for d in olds):
            raise Open
        tracked.update(news)
    tracked, flat = tracked - ones, flat | ones
    here = [after[d] if d in tracked else 1 for d in range(len(after))]
    whole = [sizes[d] if d in tracked else 1 for d in range(len(after))]
    return made([x], lambda ts, one: ts[0].reshape(whole if one else here), frozenset(tracked), frozenset(flat))


# ---- lists -----------------------------------------------------------------------------------------------------------
def _joined(seen: Reader, node: Node) -> Elements:
    """cat, stack: what one rank would not make is not in its list."""
    nodes, stacks, rank = [node_of(n) for n in items_of(node.args[0])], op_name(node) == "stack", len(sizes_of(node))
    dim = dim_at(node, 1, rank)
    want = NONE if stacks else frozenset((dim,))
    tracked: frozenset[int] = NONE
    for leaves in (False, True):
        for n in nodes:
            if seen.is_leaf(n) == leaves:
                tracked |= seen.elements(n, want | (tracked if leaves else NONE)).tracked
    xs = [seen.elements(n, want | tracked if seen.is_leaf(n) else NONE) for n in nodes]
    for n, x in zip(nodes, xs, strict=True):
        for d, size in enumerate(sizes_of(n)):
            counts = d in tracked or (not stacks and d == dim)
            if size > 1 and counts and d not in x.tracked and (d not in x.flat or (not stacks and d == dim)):
                raise Open
    free = {d for n, x in zip(nodes, xs, strict=True) for d in range(len(sizes_of(n))) if d not in x.flat | tracked}

    def of(ts: list[Tensor]) -> Tensor:
        ts = [t.unsqueeze(dim) for t in ts] if stacks else ts
        sizes = [max(t.shape[d] for t in ts) for d in range(rank)]
        return torch.cat([t.expand([t.shape[d] if d == dim else n for d, n in enumerate(sizes)]) for t in ts], dim)

    to = {d: d + (stacks and d >= dim) for d in range(rank)}
    kept = [x.one for x in xs if x.one is not None]
    ranks = tuple(of([x.ranks[r] for x in xs]) for r in range(seen.n))
    return Elements(
        ranks, of(kept) if kept else None, moved(tracked, to) | {dim},
        frozenset(to[d] for d in range(rank - stacks) if d not in free | tracked) - {dim},
    )  # fmt: skip


def _split(seen: Reader, node: Node) -> list[Elements]:
    source, parts = node_of(node.args[0]), node.meta["val"]
    name, rank = op_name(node), len(sizes_of(source))
    dim = dim_at(node, 1 if name == "unbind" else 2, rank)
    x = known_along(seen, node, source, dim)
    if name == "unbind" or x.one is None or x.one.shape[dim] != x.ranks[0].shape[dim]:
        raise Open  # of how many parts there would be on one rank, nothing is known
    ends = list(itertools.accumulate((part.shape[dim] for part in parts), initial=0))
    return [
        made([x], lambda ts, one, a=a, b=b: ts[0].narrow(dim, a, b - a), x.tracked | {dim}, x.flat)
        for a, b in itertools.pairwise(ends)
    ]


def _item(seen: Reader, node: Node) -> Elements:
    found: Any = seen.elements(node_of(node.args[0]))
    return found[int_of(node.args[1])]


# ---- along dims ------------------------------------------------------------------------------------------------------
def _scanned(seen: Reader, node: Node) -> Elements:
    """cumsum, flip, roll."""
    source, name = node_of(node.args[0]), op_name(node)
    rank = len(sizes_of(source))
    given = node.args[2 if name == "roll" else 1] if len(node.args) > (2 if name == "roll" else 1) else None
    if given is None:
        raise Open
    dims = [int_of(d) % rank for d in (given if isinstance(given, (list, tuple)) else [given])]
    x = seen.elements(source, frozenset(dims))
    if any(d not in x.tracked and sizes_of(source)[d] > 1 for d in dims):
        raise Open
    shifts = [int_of(s) for s in items_of(node.args[1])] if name == "roll" else []
    whole = [int(seen.number(node, s)) for s in shifts]

    def of(ts: list[Tensor], one: bool) -> Tensor:
        if name == "roll":
            return ts[0].roll(whole if one else shifts, dims)
        return ts[0].flip(dims) if name == "flip" else ts[0].cumsum(dims[0])

    return made([x], of, x.tracked | frozenset(dims), x.flat)


def _summed(seen: Reader, node: Node) -> Elements:
    source = node_of(node.args[0])
    rank = len(sizes_of(source))
    given = node.args[1] if len(node.args) > 1 and node.args[1] else range(rank)
    dims = sorted({int_of(d) % rank for d in (given if isinstance(given, (list, tuple, range)) else [given])})
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    x = seen.elements(source, frozenset(dims))
    if any(d not in x.tracked and sizes_of(source)[d] > 1 for d in dims):
        raise Open
    to = {d: d if keep else d - sum(g < d for g in dims) for d in range(rank) if d not in dims}
    flat = moved(x.flat, to) | (frozenset(dims) if keep else NONE)
    return made([x], lambda ts, one: ts[0].sum(dims, keepdim=keep) if dims else ts[0], moved(x.tracked, to), flat)


def _multiplied(seen: Reader, node: Node) -> Elements:
    """mm, bmm, mv, dot: sums of products along the dim that both have, of which each element is known."""
    a, b = (node_of(n) for n in node.args[:2])
    batch, rows, columns = int(op_name(node) == "bmm"), len(sizes_of(a)) - 1, len(sizes_of(b)) - 1
    x, y = seen.elements(a, frozenset((rows,))), seen.elements(b, frozenset((batch,)))
    if batch and 0 in x.tracked ^ y.tracked and sizes_of(a)[0] > 1:  # of the other one each element, too
        of_a = 0 not in x.tracked
        n, known = (a, x) if of_a else (b, y)
        if not seen.is_leaf(n) and 0 not in known.flat:
            raise Open
        known = seen.elements(n, frozenset((0, rows if of_a else batch))) if seen.is_leaf(n) else known
        x, y = (known, y) if of_a else (x, known)
    for n, known, dim in ((a, x, rows), (b, y, batch)):
        if dim not in known.tracked and sizes_of(n)[dim] > 1:
            raise Open

    def of(ts: list[Tensor], one: bool) -> Tensor:
        left, right = ts[0].to(torch.float64), ts[1].to(torch.float64)
        if left.shape[-1] != right.shape[batch]:
            raise Open
        return left @ right

    to_y = {d: d + rows - 1 - batch for d in range(batch + 1, columns + 1)} | ({0: 0} if batch else {})
    to_x = {d: d for d in range(rows)}
    tracked = moved(x.tracked, to_x) | moved(y.tracked, to_y)
    each = moved(x.flat, to_x), moved(y.flat, to_y)
    flat = (each[0] | each[1]) - ({0} if batch and 0 not in each[0] & each[1] else NONE)
    return made([x, y], of, tracked, flat)


def _padded(seen: Reader, node: Node) -> Elements:
    source, pads = node_of(node.args[0]), [int_of(n) for n in items_of(node.args[1])]
    rank, value = len(sizes_of(source)), node.args[2] if len(node.args) > 2 else 0
    dims = [rank - 1 - i // 2 for i, n in enumerate(pads) if n]
    x = seen.elements(source, frozenset(dims))
    if value != 0 or any(d not in x.tracked and sizes_of(source)[d] > 1 for d in dims):
        raise Open
    whole = [int(seen.number(node, n)) for n in pads]
    run = torch.ops.aten.constant_pad_nd.default
    tracked = x.tracked | frozenset(dims)
    return made([x], lambda ts, one: run(ts[0], whole if one else pads), tracked, x.flat - tracked)


# ---- made of numbers -------------------------------------------------------------------------------------------------
def _counted(seen: Reader, node: Node) -> Elements:
    """arange, eye: exactly."""
    given = [int_of(n) for n in node.args]
    whole = [int(seen.number(node, n)) for n in given]
    make = torch.arange if op_name(node) == "arange" else torch.eye
    dtype = node.meta["val"].dtype
    dtype = torch.float64 if dtype.is_floating_point else dtype
    here = make(*given, dtype=dtype)
    tracked = frozenset(range(here.dim()))
    return Elements((here,) * seen.n, make(*whole, dtype=dtype), tracked)


_FILLED = MappingProxyType({"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1})


def _filled(seen: Reader, node: Node) -> Elements:
    """One number everywhere."""
    name, meta = op_name(node), node.meta["val"]
    number: Any = _FILLED.get(name)
    if name in ("full", "new_full", "full_like"):
        number = node.args[1 if name != "new_full" else 2]
    elif name == "scalar_tensor":
        number = node.args[0]
    whole = number if isinstance(number, bool) else seen.number(node, number)
    dtype = torch.float64 if meta.dtype.is_floating_point else meta.dtype
    here, one = (torch.full([1] * meta.dim(), n, dtype=dtype) for n in (number, whole))
    return Elements((here,) * seen.n, one, NONE, frozenset(range(meta.dim())))


# ---- collectives -----------------------------------------------------------------------------------------------------
def _sent(seen: Reader, node: Node) -> list[Elements]:
    """What ranks of just these axes send to one another; one rank has what it had."""
    collective = kinds.collective_of(node.target)
    axes, sizes = items_of(node.args[1]), items_of(node.args[2])
    assert collective is not None and collective.type is not None, "the table names it"
    if tuple(a for a, n in zip(axes, sizes, strict=True) if n > 1) != seen.axes:
        raise Open
    if collective is table.AXIS_INDEX:
        ranks = tuple(torch.tensor(i) for i in range(seen.n))
        return [Elements(ranks, torch.tensor(0))] * len(items_of(node.args[0]))
    out = []
    for n, own in zip(items_of(node.args[0]), collective.each(node.args[3:], len(items_of(node.args[0]))), strict=True):
        dims: frozenset[int] = NONE
        for type_ in collective.type(*own):
            if isinstance(type_, kinds.Sharded):
                place = type_.place
                if place.block or place.true or place.assigned or place.parts or len({*place.dims}) != 1:
                    raise Open
                dims |= {*place.dims}
        x = seen.elements(n, dims)
        if any(d not in x.tracked and sizes_of(n)[d] > 1 for d in dims) or any(d < 0 for d in dims):
            raise Open
        each = collective.simulated(list(x.ranks), sizes, *own)
        out.append(Elements(tuple(each), x.one, x.tracked | dims, x.flat - dims))
    return out


OPS: Mapping[str, Callable[[Any, Node], Any]] = MappingProxyType(
    dict.fromkeys(_SMOOTH | _CHOSEN, _elementwise)
    | dict.fromkeys(OF_NUMBERS, _elementwise)
    | dict.fromkeys("clone detach alias _to_copy convert_element_type contiguous lift_fresh_copy".split(), _same)
    | dict.fromkeys(("permute", "transpose", "t"), _permuted)
    | dict.fromkeys(("view", "_unsafe_view", "reshape"), _viewed)
    | {"unsqueeze": _unsqueezed, "squeeze": _squeezed, "expand": _expanded}
    | {"slice": sliced, "select": selected, "slice_backward": put_back, "select_backward": put_back}
    | {"index": indexed, "index_select": indexed, "index_put": added_at, "index_add": added_at}
    | {"cat": _joined, "stack": _joined, "getitem": _item, "sum": _summed, "constant_pad_nd": _padded}
    | dict.fromkeys(("split", "split_with_sizes", "unbind"), _split)
    | dict.fromkeys(("cumsum", "flip", "roll"), _scanned)
    | dict.fromkeys(("mm", "bmm", "mv", "dot"), _multiplied)
    | dict.fromkeys(("arange", "eye"), _counted)
    | dict.fromkeys((*_FILLED, "full", "new_full", "full_like", "scalar_tensor"), _filled)
    | dict.fromkeys(("psum", "all_gather", "reduce_scatter", "ppermute", "axis_index"), _sent)
)  # fmt: skip
