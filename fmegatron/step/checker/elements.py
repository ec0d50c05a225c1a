"""What ranks have along dims, and one rank would; pieces of it, and what is put back (`positions.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fmegatron.step.checker.context import op_name
from fmegatron.step.checker.shapes import Open
from fmegatron.step.graph.nodes import int_of, items_of, node_of

__all__ = ["NONE", "Elements", "Reader", "dim_at", "known_along", "made", "moved", "sizes_of"]
__all__ += ["added_at", "indexed", "put_back", "selected", "sliced"]

Node = torch.fx.Node
Tensor = torch.Tensor
NONE: frozenset[int] = frozenset()


class Elements(NamedTuple):
    """ranks: what each rank has, one: what one rank has (None: one rank would not make it), in all dims that the value
    has; of dims that are not `tracked` one element stands for all. flat: of these, dims along which all are equal."""

    ranks: tuple[Tensor, ...]
    one: Tensor | None
    tracked: frozenset[int] = NONE
    flat: frozenset[int] = NONE


class Reader(Protocol):
    """What an evaluation asks for."""

    n: int
    axes: tuple[str, ...]
    scope: Any

    def elements(self, node: Node, along: frozenset[int] = NONE) -> Elements: ...
    def is_leaf(self, node: Node) -> bool: ...
    def is_number(self, node: Node) -> bool: ...
    def number(self, node: Node, x: int | float, lines: bool = True) -> int | float: ...
    def forward(self, node: Node, fits: Callable[[Node], bool]) -> list[Node]: ...
    def whole(self, node: Node) -> Any: ...
    def size_as_forward(self, node: Node, shape: Sequence[int], dim: int) -> int: ...


def made(
    xs: Sequence[Elements], of: Callable[[list[Tensor], bool], Tensor], tracked: frozenset[int], flat: frozenset[int]
) -> Elements:
    """of(tensors, whether of one rank) on each rank and on one."""
    ranks = tuple(of(list(each), False) for each in zip(*[x.ranks for x in xs], strict=True))
    ones = [x.one for x in xs if x.one is not None]
    return Elements(ranks, of(ones, True) if len(ones) == len(xs) else None, tracked, flat - tracked)


def sizes_of(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def moved(dims: frozenset[int], to: Mapping[int, int]) -> frozenset[int]:
    return frozenset(to[d] for d in dims if d in to)


def dim_at(node: Node, at: int, rank: int, default: int = 0) -> int:
    found = node.args[at] if len(node.args) > at else node.kwargs.get("dim", default)
    return int_of(found) % max(1, rank)


# ---- pieces ----------------------------------------------------------------------------------------------------------
def known_along(seen: Reader, node: Node, source: Node, dim: int) -> Elements:
    """A value whose elements along a dim are known one by one."""
    x = seen.elements(source, frozenset((dim,)))
    if dim not in x.tracked and sizes_of(source)[dim] > 1:
        raise Open
    return x


def _bounds(seen: Reader, node: Node, at: int) -> tuple[tuple, tuple]:
    """(start, stop, step) of a slice as each rank has it, and as one."""
    given = _given(node, at)
    return given, tuple(None if x is None else seen.number(node, int_of(x)) for x in given)


def _given(node: Node, at: int) -> tuple:
    start, stop, step = [*node.args[at : at + 3], None, None, None][:3]
    return start or 0, stop, step or 1


def sliced(seen: Reader, node: Node) -> Elements:
    source = node_of(node.args[0])
    dim = dim_at(node, 1, len(sizes_of(source)))
    x = known_along(seen, node, source, dim)
    here = _given(node, 2)
    if joints := seen.forward(node, lambda one: op_name(one) == "cat" and sizes_of(one) == sizes_of(source)):
        ends = {_ends(seen, one, dim) for one in joints}  # the gradient of a piece of what was put together
        if len(ends) != 1:
            raise Open
        mine, theirs = ends.pop()
        start, stop, _ = slice(*here).indices(sizes_of(source)[dim])
        if start not in mine or stop not in mine:
            raise Open
        whole: tuple = (theirs[mine.index(start)], theirs[mine.index(stop)], 1)
    else:
        whole = _bounds(seen, node, 2)[1]
        if x.one is not None and x.one.shape[dim] != sizes_of(source)[dim]:
            for a, b in zip(here, whole, strict=True):  # a number that torch may have made of the size of a part
                if a is not None and a == b and sizes_of(source)[dim] <= 2 * abs(a) < 2**62 and abs(a) > 1:
                    raise Open

    def of(ts: list[Tensor], one: bool) -> Tensor:
        index = [slice(None)] * dim + [slice(*(whole if one else here))]
        return ts[0][tuple(index)]

    return made([x], of, x.tracked | {dim}, x.flat)


def _ends(seen: Reader, cat: Node, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where what is put together ends, on each rank and on one."""
    sizes = []
    for n in items_of(cat.args[0]):
        x = seen.elements(n, frozenset((dim,)))
        if x.one is None:
            raise Open
        sizes.append((x.ranks[0].shape[dim], x.one.shape[dim]))
    a, b = zip(*sizes, strict=True)
    return tuple(itertools.accumulate(a, initial=0)), tuple(itertools.accumulate(b, initial=0))


def selected(seen: Reader, node: Node) -> Elements:
    source = node_of(node.args[0])
    rank = len(sizes_of(source))
    dim, at = dim_at(node, 1, rank), int_of(node.args[2])
    x, whole = known_along(seen, node, source, dim), seen.number(node, at)
    to = {d: d - (d > dim) for d in range(rank) if d != dim}
    ranks = tuple(one.select(dim, at) for one in x.ranks)
    there = x.one is not None and -x.one.shape[dim] <= whole < x.one.shape[dim]
    one = x.one.select(dim, int(whole)) if there and x.one is not None else None
    return Elements(ranks, one, moved(x.tracked, to), moved(x.flat, to))


def put_back(seen: Reader, node: Node) -> Elements:
    """The gradient of a slice, or of one index: among zeros, as long as what it was taken of."""
    sizes, name = [int_of(n) for n in items_of(node.args[1])], op_name(node)
    dim, source = int_of(node.args[2]) % len(sizes), node_of(node.args[0])
    kind = name.removesuffix("_backward")
    x = seen.elements(source, frozenset((dim,)) if kind == "slice" else NONE)
    if kind == "slice" and dim not in x.tracked and sizes_of(source)[dim] > 1:
        raise Open

    def fits(one: Node) -> bool:
        if op_name(one) != kind or tuple(one.meta["val"].shape) != sizes_of(source):
            return False
        of = node_of(one.args[0])
        mine = [*one.args[2:], *(None,) * 3][: 3 if kind == "slice" else 1]
        given = list(node.args[3 : 6 if kind == "slice" else 4])
        if kind == "slice":
            mine, given = ([*slice(*g).indices(sizes[dim])] for g in (mine, given))
        return sizes_of(of) == tuple(sizes) and dim_at(one, 1, len(sizes)) == dim and mine == given

    found = set()
    for one in seen.forward(node, fits):
        taken = seen.elements(node_of(one.args[0]), frozenset((dim,)))
        if taken.one is None or dim not in taken.tracked:
            raise Open
        at = _bounds(seen, one, 2)[1] if kind == "slice" else (seen.number(one, int_of(one.args[2])),)
        found.add((taken.one.shape[dim], at))
    if len(found) != 1:
        raise Open
    size, whole = found.pop()
    here = _bounds(seen, node, 3)[0] if kind == "slice" else (int_of(node.args[3]),)

    def of(ts: list[Tensor], one: bool) -> Tensor:
        g = ts[0] if kind == "slice" else ts[0].unsqueeze(dim)
        shape = list(g.shape)
        shape[dim] = size if one else sizes[dim]
        out, at = g.new_zeros(shape), whole if one else here
        index = slice(*at) if kind == "slice" else slice(at[0], at[0] + 1 or None)
        if out[(slice(None),) * dim + (index,)].shape[dim] != g.shape[dim]:
            raise Open
        out[(slice(None),) * dim + (index,)] = g
        return out

    if kind == "select":
        to = {d: d + (d >= dim) for d in range(len(sizes) - 1)}
        found = made([x], of, moved(x.tracked, to) | {dim}, moved(x.flat, to))
        if found.one is None:  # one rank has no such entry: its gradient is that of the others
            raise Open
        return found
    return made([x], of, x.tracked | {dim}, x.flat)


def indexed(seen: Reader, node: Node) -> Elements:
    """One index that is made of no data."""
    source, (dim, at) = node_of(node.args[0]), _index(node)
    if not seen.is_number(at):
        raise Open
    x, index = known_along(seen, node, source, dim), seen.elements(at)
    more, select = len(sizes_of(at)), op_name(node) == "index_select"
    if index.ranks[0].shape != sizes_of(at):
        raise Open

    def of(ts: list[Tensor], one: bool) -> Tensor:
        where = ts[1].reshape(1) if select and not ts[1].dim() else ts[1]
        return ts[0][(slice(None),) * dim + (where,)]

    more = max(more, 1) if select else more
    to = {d: d + (more - 1) * (d > dim) for d in range(len(sizes_of(source))) if d != dim}
    tracked = moved(x.tracked, to) | frozenset(range(dim, dim + more))
    return made([x, index], of, tracked, moved(x.flat, to))


def _index(node: Node) -> tuple[int, Node]:
    if op_name(node) == "index_select":
        return dim_at(node, 1, len(sizes_of(node_of(node.args[0])))), node_of(node.args[2])
    given = [(d, one) for d, one in enumerate(items_of(node.args[1])) if one is not None]
    if len(given) != 1:
        raise Open
    return given[0][0], node_of(given[0][1])


def added_at(seen: Reader, node: Node) -> Elements:
    """Added up at positions in zeros, which are as long as what was looked up in the forward."""
    name = op_name(node).rstrip("_")
    if name == "index_put":
        (dim, at), g = _index(node), node_of(node.args[2])
        if not (len(node.args) > 3 and node.args[3]):
            raise Open
    else:
        dim, at, g = dim_at(node, 1, node.meta["val"].dim()), node_of(node.args[2]), node_of(node.args[3])
    if not seen.is_number(at) or len(sizes_of(at)) > 1 or node.kwargs.get("alpha", 1) != 1:
        raise Open
    base = seen.elements(node_of(node.args[0]))
    if base.one is None or any(bool(one.any()) for one in (*base.ranks, base.one)):
        raise Open
    index, shape = seen.elements(at), sizes_of(node)
    alone = name == "index_put" and not sizes_of(at)
    x = seen.elements(g, NONE if alone else frozenset((dim,)))
    if not alone and (dim not in x.tracked and sizes_of(g)[dim] > 1 or len(sizes_of(g)) != len(shape)):
        raise Open
    size = seen.size_as_forward(node, shape, dim)

    def of(ts: list[Tensor], one: bool) -> Tensor:
        g = ts[0].unsqueeze(dim) if alone else ts[0]
        sizes = list(g.shape)
        sizes[dim] = size if one else shape[dim]
        if ts[1].numel() != g.shape[dim]:
            raise Open
        return g.new_zeros(sizes).index_add(dim, ts[1].reshape(-1), g)

    to = {d: d + (alone and d >= dim) for d in range(len(sizes_of(g)))}
    return made([x, index], of, moved(x.tracked, to) | {dim}, moved(x.flat, to))
