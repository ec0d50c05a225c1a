"""The real binding: collectives of lists of tensors as functional collectives of torch on one process group.

Every function takes *local* tensors and a `Group`, works in eager mode and under tracing, and returns fresh tensors.
Groups are named by axes, never by rank, so all ranks trace one graph.

Gathers and sums on the way take a list of buffers: a large tensor is a buffer as it is, small ones are joined into one
more. Where dtypes differ, buffers are viewed as bytes.
Tensors of one dtype are joined by plain ops, which a compiler fuses with the casts before and the copies behind. Those
of several dtypes by two opaque ops, which copy every tensor once into a buffer of bytes and once out of it, largest
element size first, so that each piece is where its dtype can be viewed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fmegatron.collectives.places import Place
from fmegatron.collectives.torch_private import functional_ops, group_named, register_work
from fmegatron.collectives.wires import wide
from fmegatron.layout.dtypes import dtype_from_name, dtype_name

if TYPE_CHECKING:
    from fmegatron.collectives.world import World

__all__ = ["Group", "all_gather", "all_reduced", "all_to_all", "all_to_all_rows", "filled_up", "ppermute", "psum"]
__all__ += ["reduce_scatter"]

# What libraries of process groups have no type for, beside floats of 8 bits (torch's maps of dtypes for NCCL and gloo).
_UNKNOWN = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})
_LITTLE = 1 << 16  # bytes below which a collective costs its latency, and a copy less than another buffer


@dataclass(frozen=True)
class Group:
    """This rank's process group over joined axes of a world."""

    world: World
    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Under which torch knows it (see `World.group_name`)."""
        return self.world.group_name(self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of ranks along each of the axes."""
        return tuple(self.world.mesh[name] for name in self.axes)

    @property
    def n(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def index(self) -> int:
        """This rank's position along the axes."""
        return self.world.index(self.axes)


# ---- order: torch numbers the ranks of a group in ascending order, joint axes may not (`World.order`) ----------------
Order = tuple[int, ...] | None  # position in the group of each index along the axes; None where they are the same


def by_index(parts, order: Order):
    """From parts in the order of the group to parts in the order of the index."""
    return parts if order is None else [parts[position] for position in order]


def by_position(parts, order: Order):
    """From parts in the order of the index to parts in the order of the group."""
    return parts if order is None else [parts[order.index(position)] for position in range(len(order))]


def _ordered(rows: Tensor, group: Group, arrange) -> Tensor:
    order = group.world.order(group.axes)
    return rows if order is None else torch.cat(arrange(rows.chunk(len(order), 0), order), 0)


# ---- buffers: the tensors of a list that travel together -------------------------------------------------------------
def _ours():
    return torch.ops.fmegatron_real


def _as_bytes(xs: list[Tensor]) -> bool:
    """Whether they travel as bytes: several dtypes, or one that process groups do not know."""
    dtype = xs[0].dtype
    unknown = dtype in _UNKNOWN or (dtype.is_floating_point and dtype.itemsize == 1)
    return unknown or len({x.dtype for x in xs}) > 1


def _summed_on_the_way(xs: list[Tensor], exact: bool) -> bool:
    return not _as_bytes(xs) and not (exact and wide(xs[0].dtype) != xs[0].dtype)


def _joined(rows: list[Tensor]) -> Tensor:
    """[n, ...] each -> [n, total]."""
    flat = [row.reshape(row.shape[0], -1) for row in rows]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def _parted(rows: Tensor, shapes: list) -> list[Tensor]:
    """The inverse of `_joined`: [n, *shape] of each."""
    if len(shapes) == 1:
        return [_of_shape(rows, shapes[0])]
    found = rows.split([math.prod(shape) for shape in shapes], 1)
    return [_of_shape(row, shape) for row, shape in zip(found, shapes, strict=True)]


def _of_shape(row: Tensor, shape: torch.Size) -> Tensor:
    return row.unflatten(1, shape) if shape else row.squeeze(1)


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


def _opened(buffer: Tensor, like: list[Tensor], group: Group) -> list[Tensor]:
    """The inverse of `_packed`, of buffers of all ranks: [n, *shape] of each tensor, in the order of the index."""
    packed = len(like) > 1 and _as_bytes(like)
    rows = _ordered((buffer if packed else buffer.view(like[0].dtype)).view(group.n, -1), group, by_index)
    shapes = [x.shape for x in like]
    return _unpacked(rows, like, shapes) if packed else _parted(rows, shapes)


# ---- all_gather ------------------------------------------------------------------------------------------------------
def _gathered_rows(xs: list[Tensor], group: Group) -> list[Tensor]:
    """[n, *shape] of each: what the ranks hold, in the order of the index."""
    ops, together = functional_ops(), _buffers(xs)
    mine = [_packed([xs[i].unsqueeze(0) for i in members]) for members in together]
    if len(mine) == 1:
        wholes = [ops.all_gather_into_tensor(mine[0], group.n, group.name)]
    else:
        if len({buffer.dtype for buffer in mine}) > 1:  # libraries take a list of one dtype
            mine = [buffer.view(torch.uint8) for buffer in mine]
        wholes = ops.all_gather_into_tensor_coalesced(mine, group.n, group.name)
    found: list = [None] * len(xs)
    for members, whole in zip(together, wholes, strict=True):
        opened = _opened(ops.wait_tensor(whole), [xs[i] for i in members], group)
        for i, rows in zip(members, opened, strict=True):
            found[i] = rows
    return found


def all_gather(xs: list[Tensor], group: Group, places: list[Place]) -> list[Tensor]:
    """Each tensor in full, from the shards of the ranks."""
    rows = _gathered_rows(xs, group)
    return [place.whole(row, group.sizes) for place, row in zip(places, rows, strict=True)]


# ---- reduce_scatter --------------------------------------------------------------------------------------------------
def reduce_scatter(xs: list[Tensor], group: Group, places: list[Place], exact: bool) -> list[Tensor]:
    """The sum of each tensor over the ranks, this rank's shard of it."""
    shapes = [place.shard_shape(x.shape, group.sizes) for place, x in zip(places, xs, strict=True)]
    pieces = [place.pieces(x, group.sizes) for place, x in zip(places, xs, strict=True)]
    return _scattered(pieces, shapes, group, exact)


def _scattered(pieces: list[Tensor], shapes: list, group: Group, exact: bool) -> list[Tensor]:
    """[n, *shape] each -> the sum over the ranks of the piece of this one."""
    if not _summed_on_the_way(pieces, exact):
        return [_row_sum(rows, exact) for rows in _exchanged_rows(pieces, shapes, group)]
    ops, together = functional_ops(), _buffers(pieces)
    given = [_ordered(_joined([pieces[i] for i in members]), group, by_position) for members in together]
    given = [buffer.reshape(-1).contiguous() for buffer in given]
    if len(given) == 1:
        sums = [ops.reduce_scatter_tensor(given[0], "sum", group.n, group.name)]
    else:
        sums = ops.reduce_scatter_tensor_coalesced(given, "sum", group.n, group.name)
    found: list = [None] * len(pieces)
    for members, flat in zip(together, sums, strict=True):
        for i, part in zip(members, _split(ops.wait_tensor(flat), [shapes[i] for i in members]), strict=True):
            found[i] = part
    return found


def _split(flat: Tensor, shapes: list) -> list[Tensor]:
    parts = [flat] if len(shapes) == 1 else flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _exchanged_rows(pieces: list[Tensor], shapes: list, group: Group) -> list[Tensor]:
    """[n, *shape] of each: the pieces that all ranks have for this one, in the order of the index."""
    ops, n = functional_ops(), group.n
    mixed = _as_bytes(pieces)
    rows = _ordered(_ours().pack(pieces) if mixed else _joined(pieces), group, by_position)
    flat = rows.reshape(-1).contiguous()
    parts = [flat.shape[0] // n] * n
    moved = ops.wait_tensor(ops.all_to_all_single(flat, parts, parts, group.name)).view(n, -1)
    moved = _ordered(moved, group, by_index)
    return _unpacked(moved, pieces, shapes) if mixed else _parted(moved, shapes)


def _row_sum(rows: Tensor, exact: bool) -> Tensor:
    """Sum over dim 0 from the first row on: the same order on all ranks, and that of simulated ones."""
    dtype = wide(rows.dtype) if exact else rows.dtype
    return functools.reduce(torch.add, [row.to(dtype) for row in rows.unbind(0)])


# ---- all_to_all ------------------------------------------------------------------------------------------------------
def all_to_all(xs: list[Tensor], group: Group, split_dims: list[int], concat_dims: list[int]) -> list[Tensor]:
    """Of each tensor part j of its split dim goes to rank j; what arrives is concatenated in rank order."""
    pieces = [torch.stack(x.chunk(group.n, dim)) for x, dim in zip(xs, split_dims, strict=True)]
    rows = _exchanged_rows(pieces, [piece.shape[1:] for piece in pieces], group)
    return [torch.cat(row.unbind(0), dim) for row, dim in zip(rows, concat_dims, strict=True)]


# ---- exchanges whose sizes are not in the graph ----------------------------------------------------------------------
def all_to_all_rows(xs: list[Tensor], group: Group, send: Tensor, recv: Tensor, given: int, rows: int) -> list[Tensor]:
    """Rows sorted by destination, counts of them in tensors; see the table.

    One opaque op that starts it: exact sizes of the exchange are not known before it runs. They are read on the host,
    where a process group wants them, so on CUDA it waits for the device. (torch.ops.symm_mem.all_to_all_vdev takes them
    from the device. It needs symmetric memory and was not tried: there was no machine with CUDA.)
    """
    order = group.world.order(group.axes) or range(group.n)
    wait = functional_ops().wait_tensor
    return [wait(_ours().all_to_all_rows(x, send, recv, order, rows, group.name)) for x in xs]


def ppermute(xs: list[Tensor], group: Group, shift: int) -> list[Tensor]:
    """Send to the rank `shift` further along the axis (a ring), receive from the one `shift` before.

    One opaque op that starts it: the split sizes of an all-to-all that moves one block would differ per rank, and the
    graph must be the same on all ranks.
    """
    order = group.world.order(group.axes) or range(group.n)
    return [functional_ops().wait_tensor(_ours().ppermute(x, shift, order, group.name)) for x in xs]


def filled_up(x: Tensor, n: int) -> Tensor:
    """x, with rows of zeros behind it where it has fewer than n."""
    return x if x.shape[0] >= n else torch.cat([x, x.new_zeros(n - x.shape[0], *x.shape[1:])])


def _ppermute(x, shift, order, group_name):
    n, me = len(order), order.index(dist.get_rank(group_named(group_name)))
    x = x.clone(memory_format=torch.contiguous_format)
    if shift % n == 0:
        return x
    sent, came = [0] * n, [0] * n
    sent[order[(me + shift) % n]] = came[order[(me - shift) % n]] = 1
    out = torch.empty_like(x)
    _start(out.unsqueeze(0), x.unsqueeze(0), came, sent, group_name)
    return out


def _all_to_all_rows(x, send, recv, order, rows, group_name):
    sent, came = send.tolist(), recv.tolist()
    x, total = filled_up(x, sum(sent))[: sum(sent)], sum(came)
    out = x.new_empty(max(rows, total), *x.shape[1:])
    out[total:] = 0
    if list(order) == sorted(order):
        _start(out[:total], x.clone(memory_format=torch.contiguous_format), came, sent, group_name)
        return out[:rows]
    # The group has its members in another order than the axis: rows change places before and behind.
    x = torch.cat(by_position(x.split(sent), order))
    there = _start(torch.empty_like(out[:total]), x, by_position(came, order), by_position(sent, order), group_name)
    functional_ops().wait_tensor(there)
    out[:total] = torch.cat(by_index(there.split(by_position(came, order)), order))
    return out[:rows]


def _start(out: Tensor, x: Tensor, came: list[int], sent: list[int], group_name: str) -> Tensor:
    """Start an exchange of rows, as bytes, which every library takes -> out, to be waited for.

    The memory of x must be its own: compilers reuse that of an argument after the op, though it is still read.
    """
    width = x.dtype.itemsize * math.prod(x.shape[1:])
    given, room = (t.reshape(-1).view(torch.uint8).view(t.shape[0], width) for t in (x, out))
    work = dist.all_to_all_single(room, given, came, sent, group_named(group_name), async_op=True)
    assert work is not None, "this rank is in the group"
    register_work(out, work)
    return out


# ---- all_reduce ------------------------------------------------------------------------------------------------------
def all_reduced(x: Tensor, kind: str, group: Group) -> Tensor:
    """A tensor reduced element by element over the ranks. kind: "sum", "max", "min", "product" ...

    Whole numbers that libraries have no type for travel as int64. Raises ValueError for uint64, which do not fit.
    """
    ops = functional_ops()
    if x.dtype is torch.uint64:
        raise ValueError(f"{kind}: got uint64, which no process group reduces, wanted int64; give x.view(torch.int64)")
    if x.dtype in _UNKNOWN:
        return all_reduced(x.to(torch.int64), kind, group).to(x.dtype)
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), kind, group.name))


def psum(xs: list[Tensor], group: Group, exact: bool) -> list[Tensor]:
    """The sum of each tensor over the ranks."""
    if _summed_on_the_way(xs, exact):
        if len(xs) == 1:
            return [all_reduced(xs[0], "sum", group)]
        flat = all_reduced(torch.cat([x.reshape(-1) for x in xs]), "sum", group)
        return _split(flat, [x.shape for x in xs])
    n = group.n
    if n == 2 or sum(x.numel() * x.dtype.itemsize for x in xs) * n <= _LITTLE:
        return [_row_sum(rows, exact) for rows in _gathered_rows(xs, group)]
    padded = [torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % n)).view(n, -1) for x in xs]
    sums = _scattered(padded, [x.shape[1:] for x in padded], group, exact)
    wholes = _gathered_rows(sums, group)
    return [y.reshape(-1)[: x.numel()].view(x.shape) for x, y in zip(xs, wholes, strict=True)]


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
    return [_of_shape(row, shape) for row, shape in zip(found, shapes, strict=True)]


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
    library = torch.library.Library("fmegatron_real", "DEF")
    library.define("ppermute(Tensor x, int shift, int[] order, str group) -> Tensor")
    library.impl("ppermute", _ppermute, "CompositeExplicitAutograd")
    library.impl("ppermute", lambda x, shift, order, group: x.new_empty(x.shape), "Meta")
    library.define("all_to_all_rows(Tensor x, Tensor send, Tensor recv, int[] order, int rows, str group) -> Tensor")
    library.impl("all_to_all_rows", _all_to_all_rows, "CompositeExplicitAutograd")
    library.impl("all_to_all_rows", lambda x, s, r, order, rows, group: x.new_empty((rows, *x.shape[1:])), "Meta")
    library.define("pack(Tensor[] xs) -> Tensor")
    library.impl("pack", _pack, "CompositeExplicitAutograd")
    library.impl("pack", _pack_meta, "Meta")
    library.define("unpack(Tensor rows, str[] dtypes, int[] counts) -> Tensor[]")
    library.impl("unpack", _unpack, "CompositeExplicitAutograd")
    library.impl("unpack", _unpack_meta, "Meta")
    return library


_LIBRARY = _define_ops()
