"""The real binding of coalesced collectives: one functional collective for a list of tensors.

Gathers and sums on the way take a list of buffers: a large tensor is a buffer as it is, small ones are joined into one
more. Where dtypes differ, buffers are viewed as bytes.
Tensors of one dtype are joined by plain ops, which a compiler fuses with the casts before and the copies behind. Those
of several dtypes by two opaque ops, which copy every tensor once into a buffer of bytes and once out of it, largest
element size first, so that each piece lies where its dtype can be viewed.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from fmegatron.collectives.place import FLAT, Place
from fmegatron.collectives.real import Order, by_index, by_position
from fmegatron.collectives.torch_private import functional_ops
from fmegatron.collectives.wire import wide
from fmegatron.layout import dtype_from_name, dtype_name

__all__ = ["all_gather_many", "all_to_all_many", "emit", "psum_many", "reduce_scatter_many"]

_LITTLE = 1 << 16  # bytes below which a collective costs its latency, and a copy less than another buffer


def emit(name: str, xs: list[Tensor], world, axes: tuple[str, ...], *arguments) -> list[Tensor]:
    """The real form of a symbolic coalesced collective; `arguments`: what else the op takes."""
    group, order = world.group_name(axes), world.order(axes)
    if name == "psum_many":
        return psum_many(xs, group, world.mesh.extent(axes), *arguments, order=order)
    if name == "all_to_all_many":
        return all_to_all_many(xs, group, *arguments, order=order)
    sizes, places, *rest = arguments
    function = all_gather_many if name == "all_gather_many" else reduce_scatter_many
    return function(xs, group, tuple(sizes), [Place.parse(p) for p in places], *rest, order=order)


def _ours():
    return torch.ops.fmegatron_real


def _as_bytes(xs: list[Tensor]) -> bool:
    """Whether they travel as bytes: several dtypes, or one that process groups do not know."""
    return len({x.dtype for x in xs}) > 1 or (xs[0].dtype.is_floating_point and xs[0].dtype.itemsize == 1)


def _summed_on_the_way(xs: list[Tensor], exact: bool) -> bool:
    return not _as_bytes(xs) and not (exact and wide(xs[0].dtype) != xs[0].dtype)


def _joined(rows: list[Tensor]) -> Tensor:
    """[n, ...] each -> [n, total]."""
    flat = [row.reshape(row.shape[0], -1) for row in rows]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def _ordered(rows: Tensor, order: Order, arrange) -> Tensor:
    return rows if order is None else torch.cat(arrange(rows.chunk(len(order), 0), order), 0)


def _buffers(tensors: list[Tensor]) -> list[list[int]]:
    """Which of the tensors share a buffer: each large one has its own."""
    nbytes = [x.numel() * x.dtype.itemsize for x in tensors]
    small = [i for i, size in enumerate(nbytes) if size < _LITTLE]
    return [[i] for i, size in enumerate(nbytes) if size >= _LITTLE] + ([small] if small else [])


def _packed(rows: list[Tensor]) -> Tensor:
    """[n, ...] each -> one flat buffer, row by row; bytes where dtypes differ or process groups do not know them."""
    if len(rows) == 1:
        flat = rows[0].reshape(-1).contiguous()
        return flat.view(torch.uint8) if _as_bytes(rows) else flat
    return (_ours().pack(rows) if _as_bytes(rows) else _joined(rows)).reshape(-1).contiguous()


def _opened(buffer: Tensor, n: int, like: list[Tensor], shapes: list, order: Order) -> list[Tensor]:
    """The inverse of `_packed`: [n, *shape] of each tensor, the rows in the order of the index."""
    packed = len(like) > 1 and _as_bytes(like)
    rows = _ordered((buffer if packed else buffer.view(like[0].dtype)).view(n, -1), order, by_index)
    if packed:
        return _unpacked(rows, like, shapes)
    found = rows.split([math.prod(shape) for shape in shapes], 1)
    return [row.unflatten(1, shape) for row, shape in zip(found, shapes, strict=True)]


# ---- all_gather ------------------------------------------------------------------------------------------------------
def _gathered_rows(xs: list[Tensor], group: str, n: int, order: Order) -> list[Tensor]:
    """[n, *shape] of each: what the ranks hold, in the order of the index."""
    ops, together = functional_ops(), _buffers(xs)
    mine = [_packed([xs[i].unsqueeze(0) for i in members]) for members in together]
    if len(mine) == 1:
        wholes = [ops.all_gather_into_tensor(mine[0], n, group)]
    else:
        if len({buffer.dtype for buffer in mine}) > 1:  # libraries take a list of one dtype
            mine = [buffer.view(torch.uint8) for buffer in mine]
        wholes = ops.all_gather_into_tensor_coalesced(mine, n, group)
    found: list = [None] * len(xs)
    for members, whole in zip(together, wholes, strict=True):
        like = [xs[i] for i in members]
        opened = _opened(ops.wait_tensor(whole), n, like, [x.shape for x in like], order)
        for i, rows in zip(members, opened, strict=True):
            found[i] = rows
    return found


def all_gather_many(
    xs: list[Tensor], group: str, sizes: tuple[int, ...], places: list[Place], order: Order = None
) -> list[Tensor]:
    """Each tensor whole over the ranks of the group."""
    rows = _gathered_rows(xs, group, math.prod(sizes), order)
    return [place.whole(row, sizes) for place, row in zip(places, rows, strict=True)]


# ---- reduce_scatter --------------------------------------------------------------------------------------------------
def reduce_scatter_many(
    xs: list[Tensor], group: str, sizes: tuple[int, ...], places: list[Place], exact: bool, order: Order = None
) -> list[Tensor]:
    """The sum of each tensor over the ranks, this rank's shard of it."""
    n = math.prod(sizes)
    shapes = [place.shard_shape(x.shape, sizes) for place, x in zip(places, xs, strict=True)]
    pieces = [place.pieces(x, sizes) for place, x in zip(places, xs, strict=True)]
    if not _summed_on_the_way(xs, exact):
        return [_row_sum(rows, exact) for rows in _exchanged_rows(pieces, shapes, group, n, order)]
    ops, together = functional_ops(), _buffers(xs)
    given = [_ordered(_joined([pieces[i] for i in members]), order, by_position) for members in together]
    given = [buffer.reshape(-1).contiguous() for buffer in given]
    if len(given) == 1:
        sums = [ops.reduce_scatter_tensor(given[0], "sum", n, group)]
    else:
        sums = ops.reduce_scatter_tensor_coalesced(given, "sum", n, group)
    found: list = [None] * len(xs)
    for members, flat in zip(together, sums, strict=True):
        parts = ops.wait_tensor(flat).split([math.prod(shapes[i]) for i in members])
        for i, part in zip(members, parts, strict=True):
            found[i] = part.view(shapes[i])
    return found


def _exchanged_rows(pieces: list[Tensor], shapes: list, group: str, n: int, order: Order) -> list[Tensor]:
    """[n, *shape] of each: the pieces that all ranks have for this one, in the order of the index."""
    ops = functional_ops()
    mixed = _as_bytes(pieces)
    rows = _ordered(_ours().pack(pieces) if mixed else _joined(pieces), order, by_position)
    flat = rows.reshape(-1).contiguous()
    parts = [flat.shape[0] // n] * n
    moved = ops.wait_tensor(ops.all_to_all_single(flat, parts, parts, group)).view(n, -1)
    moved = _ordered(moved, order, by_index)
    if mixed:
        return _unpacked(moved, pieces, shapes)
    found = moved.split([math.prod(shape) for shape in shapes], 1)
    return [rows.unflatten(1, shape) for rows, shape in zip(found, shapes, strict=True)]


def _row_sum(rows: Tensor, exact: bool) -> Tensor:
    """Sum over dim 0 from the first row on: the same order on all ranks, and that of simulated ones."""
    dtype = wide(rows.dtype) if exact else rows.dtype
    return functools.reduce(torch.add, [row.to(dtype) for row in rows.unbind(0)])


# ---- all_to_all ------------------------------------------------------------------------------------------------------
def all_to_all_many(
    xs: list[Tensor], group: str, n: int, split_dims: list[int], concat_dims: list[int], order: Order = None
) -> list[Tensor]:
    """Of each tensor part j of its split dim goes to rank j; what arrives is concatenated in rank order."""
    pieces = [torch.stack(x.chunk(n, dim)) for x, dim in zip(xs, split_dims, strict=True)]
    rows = _exchanged_rows(pieces, [piece.shape[1:] for piece in pieces], group, n, order)
    return [torch.cat(row.unbind(0), dim) for row, dim in zip(rows, concat_dims, strict=True)]


# ---- psum ------------------------------------------------------------------------------------------------------------
def psum_many(xs: list[Tensor], group: str, n: int, exact: bool, order: Order = None) -> list[Tensor]:
    """The sum of each tensor over the ranks."""
    if _summed_on_the_way(xs, exact):
        ops = functional_ops()
        mine = _joined([x.unsqueeze(0) for x in xs]).reshape(-1).contiguous()
        flat = ops.wait_tensor(ops.all_reduce(mine, "sum", group))
        return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in xs]), xs, strict=True)]
    if n == 2 or sum(x.numel() * x.dtype.itemsize for x in xs) * n <= _LITTLE:
        return [_row_sum(rows, exact) for rows in _gathered_rows(xs, group, n, order)]
    padded = [torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % n)) for x in xs]
    place = [Place((FLAT,), block=tuple(x.shape)) for x in padded]
    sums = reduce_scatter_many(padded, group, (n,), place, exact, order)
    whole = all_gather_many(sums, group, (n,), place, order)
    return [y[: x.numel()].view(x.shape) for x, y in zip(xs, whole, strict=True)]


# ---- several dtypes in one buffer ------------------------------------------------------------------------------------
def _slots(dtypes: list[torch.dtype], counts: list[int]) -> tuple[list[int], int]:
    """(byte at which each piece begins in a row, bytes of a row): largest element size first, which divides the row."""
    starts, at = [0] * len(dtypes), 0
    for i in sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize):
        starts[i] = at
        at += counts[i] * dtypes[i].itemsize
    widest = max(dtype.itemsize for dtype in dtypes)
    return starts, -(-at // widest) * widest


def _piece(buffer: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    return buffer[:, start : start + count * dtype.itemsize].view(dtype)


def _unpacked(rows: Tensor, like: list[Tensor], shapes: list) -> list[Tensor]:
    """[n, *shape] of each tensor out of a buffer of bytes [n, row]."""
    found = _ours().unpack(rows, [dtype_name(x.dtype) for x in like], [math.prod(shape) for shape in shapes])
    return [row.unflatten(1, shape) for row, shape in zip(found, shapes, strict=True)]


def _pack(xs):
    counts = [x[0].numel() for x in xs]
    starts, row = _slots([x.dtype for x in xs], counts)
    buffer = torch.empty(xs[0].shape[0], row, dtype=torch.uint8, device=xs[0].device)
    buffer[:, sum(count * x.dtype.itemsize for count, x in zip(counts, xs, strict=True)) :] = 0
    for x, start, count in zip(xs, starts, counts, strict=True):
        _piece(buffer, start, count, x.dtype).view(x.shape).copy_(x)
    return buffer


def _pack_meta(xs):
    _, row = _slots([x.dtype for x in xs], [x[0].numel() for x in xs])
    return xs[0].new_empty((xs[0].shape[0], row), dtype=torch.uint8)


def _unpack(rows, dtypes, counts):
    dtypes = [dtype_from_name(name) for name in dtypes]
    starts, _ = _slots(dtypes, counts)
    pieces = [_piece(rows, *slot) for slot in zip(starts, counts, dtypes, strict=True)]
    return [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]


def _unpack_meta(rows, dtypes, counts):
    shapes = [(rows.shape[0], count) for count in counts]
    return [rows.new_empty(n, dtype=dtype_from_name(name)) for n, name in zip(shapes, dtypes, strict=True)]


def _define_ops():
    library = torch.library.Library("fmegatron_real", "FRAGMENT")
    library.define("pack(Tensor[] xs) -> Tensor")
    library.impl("pack", _pack, "CompositeExplicitAutograd")
    library.impl("pack", _pack_meta, "Meta")
    library.define("unpack(Tensor rows, str[] dtypes, int[] counts) -> Tensor[]")
    library.impl("unpack", _unpack, "CompositeExplicitAutograd")
    library.impl("unpack", _unpack_meta, "Meta")
    return library


_LIBRARY = _define_ops()
