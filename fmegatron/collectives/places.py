"""Places: where the axes of a coalesced collective split one of its tensors, and how shards form the full tensor.

Written as text into the graph ("1", "0,2", "1|1:24+8+8", "-1|4x6", "-1|@1:8x4x6", "0|~0:10", "-1|4x6|~-1:24|%6",
"0|^3+4+4+1:0+1+1+0"), because an op's schema knows no nested lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fmegatron.layout import Layout
from fmegatron.layout.notation import require_shares
from fmegatron.layout.split import rooms

__all__ = ["FLAT", "Place"]

FLAT = -1  # in `Place.dims`: the axis cuts the flattened block into ranges


def _big(layout: Layout, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if layout.mesh[name] > 1)


@dataclass(frozen=True)
class Place:
    """dims: per axis the dim that it splits (axes on one dim: major first), or FLAT.

    interleaved, parts: a dim that consists of parts which are split one by one, and their sizes in the shard; -1 and ()
    for none. () with a dim: the shards are put side by side on it. block: of a flattened shard, the shape of its block
    before that, local to all axes that are not FLAT. first: the dim of it from which on it is flattened.

    true: (dim or FLAT, sizes of its parts in the full tensor) where shards are padded (`Layout.padded`): each part has
    a room of one size in all shards, each axis's that of the one before divided and rounded up. A gather leaves out
    what is behind the true elements, and a cut puts zeros there, so that padding is in no full tensor. unit: of which
    the rooms of ranges are multiples: those of the block, if there is one, else those of each dim.

    assigned: of a dim that is assigned in pieces (`Split(sizes=, order=)`), which all axes split and no other field is
    about: sizes of these in the full tensor, and the index of the shard that has each; () for none. Shards have the
    room of the largest; the others have zeros behind their pieces, which a gather leaves out.

    A full tensor is made up of `n` shards, n the product of the `sizes` of the axes, in the order of the joined index:

    >>> place = Place((1,), 1, (2, 1))                       # [[q q k | q q k]] over two ranks -> [[q q q q k k]]
    >>> place.whole(torch.tensor([[[0, 1, 8]], [[2, 3, 9]]]), (2,))
    tensor([[0, 1, 2, 3, 8, 9]])
    >>> str(place), Place.parse("1|1:2+1") == place
    ('1|1:2+1', True)
    """

    dims: tuple[int, ...]
    interleaved: int = -1
    parts: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    true: tuple[tuple[int, tuple[int, ...]], ...] = ()
    first: int = 0
    unit: int = 1
    assigned: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(layout: Layout, names: Sequence[str]) -> Place:
        """The place of these axes (of size > 1, each of which shards the layout) in a local tensor, to be gathered.

        Raises ValueError where a layout is uneven and not padded, where another axis splits the same dim below them or
        in another order, and where ranges of the flattened block would remain after a dim is gathered.
        """
        require_shares(layout, "a gather inside a step")
        if not layout.is_even:
            ways = [layout.mesh.extent(layout.axes(d)) for d in range(len(layout.shape))]
            cut = [n for parts, n in zip(layout.parts, ways, strict=True) if any(part % n for part in parts)]
            raise ValueError(
                f"got {layout}, which is uneven, wanted equal shards for a gather inside a step; make the "
                f"{'dim' if cut else 'block'} a multiple of {cut[0] if cut else layout.mesh.extent(layout.flat)}, pad "
                "it at rest (layout.replace(padded=True)), or do not shard this leaf"
            )
        if found := [d for d in layout.assigned if set(_big(layout, layout.axes(d))) & set(names)]:
            axes = _big(layout, layout.axes(found[0]))
            if tuple(names) != axes or layout.flat:
                raise ValueError(
                    f"got {layout}, whose dim {found[0]} is assigned in pieces, and a gather over {'+'.join(names)}, "
                    f"wanted one over {'+'.join(axes)} alone, ranges before; gather axis after axis"
                )
            cut = layout.cuts[found[0]]
            return Place((found[0],) * len(axes), assigned=(cut.parts, cut.order))
        rank, flat, unit = len(layout.shape), _big(layout, layout.flat), int(layout.padded) or 1
        held = {d: _big(layout, layout.axes(d)) for d in range(rank)} | {FLAT: flat}
        where: dict[str, int] = {}
        for d, axes in held.items():
            mine = tuple(name for name in names if name in axes)
            if mine and axes[len(axes) - len(mine) :] != mine:
                raise ValueError(
                    f"got {layout}, whose {'flattened block' if d == FLAT else f'dim {d}'} is split over {axes}, "
                    f"wanted {'+'.join(mine)}, which is gathered, as its minor end; put it last in the rule"
                )
            where |= dict.fromkeys(mine, d)
        if any(name not in names for name in flat):  # ranges of a range
            if any(where[name] != FLAT for name in names):
                raise ValueError(f"got {layout}, wanted a dim gathered with all flat axes {flat}; gather these first")
            dim = layout.flat_from
            found = rooms(math.prod(_block_of(layout)[dim:]), layout.flat_counts, unit)
            room = found[flat.index(names[0])]
            if room == found[-1] * layout.mesh.extent(tuple(names)):
                return Place((dim,) * len(names))
            return Place((dim,) * len(names), true=((dim, (room,)),), unit=unit)
        split = [d for d in range(rank) if len(layout.parts[d]) > 1 and set(held[d]) & set(names)]
        if len(split) > 1:
            raise ValueError(f"got {layout}, whose dims {split} are interleaved and gathered, wanted one at most")
        parts = [rooms(part, layout.counts[d])[-1] for d in split for part in layout.parts[d]]
        block = _block_of(layout) if layout.flat else ()
        dims = tuple(where[name] for name in names)
        true = []
        for d in sorted(set(dims)):  # of what is not padded uneven in ranges of nothing alone
            counts = layout.flat_counts if d == FLAT else layout.counts[d]
            kept = len(held[d]) - sum(name in names for name in held[d])
            flattened = math.prod(block[layout.flat_from :])
            ranges = [rooms(flattened, counts, unit)]
            found = ranges if d == FLAT else [rooms(n, counts) for n in layout.parts[d]]
            if any(room[-1] * math.prod(counts[kept:]) != room[kept] for room in found):
                true.append((d, tuple(room[kept] for room in found)))
        unit = unit if any(d == FLAT for d, _ in true) else 1
        return Place(dims, split[0] if split else -1, tuple(parts), block, tuple(true), layout.flat_from, unit)

    # ---- text

    def __str__(self) -> str:
        text = ",".join(map(str, self.dims))
        if self.interleaved >= 0:
            text += f"|{self.interleaved}:" + "+".join(map(str, self.parts))
        if self.block:
            text += "|" + (f"@{self.first}:" if self.first else "") + "x".join(map(str, self.block))
        text += "".join(f"|~{d}:" + "+".join(map(str, sizes)) for d, sizes in self.true)
        if self.assigned:
            text += "|^" + ":".join("+".join(map(str, numbers)) for numbers in self.assigned)
        return text + (f"|%{self.unit}" if self.unit > 1 else "")

    @staticmethod
    def parse(text: str) -> Place:
        """The inverse of `str`."""
        dims, *rest = text.split("|")
        place = Place(tuple(map(int, dims.split(","))))
        for field in rest:
            dim, colon, parts = field.partition(":")
            if field.startswith("~"):
                place = replace(place, true=(*place.true, (int(dim[1:]), tuple(map(int, parts.split("+"))))))
            elif field.startswith("^"):
                numbers = [tuple(map(int, part.split("+"))) for part in field[1:].split(":")]
                place = replace(place, assigned=tuple(numbers))
            elif field.startswith("%"):
                place = replace(place, unit=int(field[1:]))
            elif field.startswith("@"):
                place = replace(place, first=int(dim[1:]), block=tuple(map(int, parts.split("x"))))
            elif colon:
                place = replace(place, interleaved=int(dim), parts=tuple(map(int, parts.split("+") if parts else ())))
            else:
                place = replace(place, block=tuple(map(int, field.split("x"))))
        return place

    # ---- shapes

    def axes_on(self, dim: int) -> tuple[int, ...]:
        """Positions of the axes that split a dim (or are FLAT), major first."""
        return tuple(j for j, d in enumerate(self.dims) if d == dim)

    def _ways(self, dim: int, sizes: Sequence[int]) -> int:
        return math.prod(sizes[j] for j in self.axes_on(dim))

    def whole_shape(self, shard: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of the full tensor that shards of this shape make up."""
        true = self._in_full()
        return tuple(sum(true[d]) if d in true else n * self._ways(d, sizes) for d, n in enumerate(self.block or shard))

    def shard_shape(self, whole: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of the shards of a full tensor, padding included."""
        if self.assigned:
            return tuple(self._room if d == self.dims[0] else n for d, n in enumerate(whole))
        block = self._block(whole, sizes)
        if not self.block:
            return block
        flattened, true = math.prod(block[self.first :]), dict(self.true)
        unit = self._unit(FLAT) if FLAT in true else 1
        return (*block[: self.first], rooms(flattened, (self._ways(FLAT, sizes),), unit)[-1])

    def _in_full(self) -> dict[int, tuple[int, ...]]:
        """{dim: sizes of its parts in the full tensor}, where they are known."""
        return dict(self.true) | ({self.dims[0]: self.assigned[0]} if self.assigned else {})

    @property
    def _shares(self) -> list[list[tuple[int, int]]]:
        """Of a dim that is assigned, for each shard that holds a piece the (start, size) of its pieces."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(max(self.assigned[1]) + 1)]
        at = 0
        for size, holder in zip(*self.assigned, strict=True):
            found[holder].append((at, size))
            at += size
        return found

    @property
    def _room(self) -> int:
        return max(sum(size for _, size in share) for share in self._shares)

    def _unit(self, dim: int) -> int:
        """Of which the rooms on a dim (or of ranges of the block) are multiples."""
        return self.unit if dim == FLAT or not self.block else 1

    def _block(self, whole: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of the block of a shard, before it is flattened."""
        true = dict(self.true)
        return tuple(
            sum(rooms(part, (self._ways(d, sizes),), self._unit(d))[-1] for part in true[d])
            if d in true
            else n // self._ways(d, sizes)
            for d, n in enumerate(whole)
        )

    def require_shard(self, shard: Sequence[int], sizes: Sequence[int], what: str) -> None:
        """ValueError when shards of this shape are none of this place; `what` begins the message."""
        wanted = self.shard_shape(self.whole_shape(shard, sizes), sizes)
        if (self.true or self.assigned) and tuple(shard) != wanted:
            raise ValueError(
                f"{what}: got shards of shape {tuple(shard)}, wanted {wanted}: the place {self} leaves padding out; "
                "give the place of the layout that the value has: Place.of(layout, axes)"
            )

    def check(self, whole: Sequence[int], sizes: Sequence[int], what: str) -> None:
        """ValueError when a full tensor of this shape cannot be split so; `what` begins the message."""
        where, fix = f"of a tensor with shape {tuple(whole)}", "pad it, or choose another dim"
        for d in set(self.dims) - {FLAT}:
            if not 0 <= d < len(whole):
                raise ValueError(f"{what}: got dim {d} {where}, wanted a dim of it")
            if (true := self._in_full().get(d)) is not None:
                if whole[d] != sum(true):
                    raise ValueError(
                        f"{what}: got dim {d} {where}, wanted {sum(true)} of it, by the place {self}, which knows "
                        "where padding is; give the place of the layout that the value has"
                    )
            elif whole[d] % self._ways(d, sizes):
                ways = self._ways(d, sizes)
                raise ValueError(
                    f"{what}: got dim {d} {where}, which is not divisible by {ways}, wanted a multiple of it; {fix}"
                )
        if self.assigned:
            if len(self._shares) > math.prod(sizes):
                raise ValueError(
                    f"{what}: got the place {self}, pieces of {len(self._shares)} shards, wanted those of "
                    f"{math.prod(sizes)}; give the place of a layout on this mesh"
                )
            return
        block = self._block(whole, sizes)
        if self.parts and sum(self.parts) != block[self.interleaved]:
            raise ValueError(
                f"{what}: got parts {self.parts} of dim {self.interleaved}, which is {block[self.interleaved]} long in "
                f"a shard {where}, wanted the sizes of the parts in the shard"
            )
        if (FLAT in self.dims and not self.block) or (self.block and self.block != block):
            raise ValueError(
                f"{what}: got block {self.block}, wanted {block}, that of the tensor; give that with FLAT axes"
            )
        flattened = math.prod(block[self.first :])
        if self.block and FLAT not in dict(self.true) and flattened % self._ways(FLAT, sizes):
            raise ValueError(
                f"{what}: got {flattened} elements, wanted a multiple of {self._ways(FLAT, sizes)} ranges; {fix}"
            )

    # ---- values

    def whole(self, pieces: Tensor, sizes: Sequence[int]) -> Tensor:
        """[n, *shard] -> the full tensor; a view where only dim 0 is split and the pieces are contiguous."""
        if self.assigned:
            return self._whole_of_pieces(pieces)
        if self.true:
            return self._whole_without_padding(pieces, sizes)
        k = len(sizes)
        x = pieces.unflatten(0, tuple(sizes))
        flat, rest = self.axes_on(FLAT), [j for j in range(k) if self.dims[j] != FLAT]
        if self.block:
            at = k + self.first  # of the ranges; before them are dims that are not flattened
            x = x.permute(*rest, *range(k, at), *flat, at).reshape([*(sizes[j] for j in rest), *self.block])

        def in_place(x: Tensor) -> Tensor:
            order, shape = [], []
            for d in range(x.dim() - len(rest)):
                order += [*(i for i, j in enumerate(rest) if self.dims[j] == d), len(rest) + d]
                shape.append(x.shape[len(rest) + d] * self._ways(d, sizes))
            return x.permute(order).reshape(shape)

        return self._by_parts(in_place, x, self.parts, len(rest), 0)

    def pieces(self, whole: Tensor, sizes: Sequence[int]) -> Tensor:
        """The full tensor -> [n, *shard]: row i is the shard of the rank with index i; a view where it can be one."""
        if self.assigned:
            return self._assigned_pieces(whole, math.prod(sizes))
        if self.true:
            return self._pieces_with_padding(whole, sizes)
        k = len(sizes)
        flat, rest = self.axes_on(FLAT), [j for j in range(k) if self.dims[j] != FLAT]

        def apart(x: Tensor) -> Tensor:
            shape, where, kept = [], {}, []
            for d, size in enumerate(x.shape):
                for j in self.axes_on(d):
                    where[j] = len(shape)
                    shape.append(sizes[j])
                kept.append(len(shape))
                shape.append(size // self._ways(d, sizes))
            return x.reshape(shape).permute([*(where[j] for j in rest), *kept])

        ways = 1 if not self.parts else self._ways(self.interleaved, sizes)
        x = self._by_parts(apart, whole, tuple(part * ways for part in self.parts), 0, len(rest))
        if self.block:
            inner = x.shape[len(rest) : len(rest) + self.first]
            each = math.prod(x.shape[len(rest) + self.first :]) // self._ways(FLAT, sizes)
            x = x.reshape([*(sizes[j] for j in rest), *inner, *(sizes[j] for j in flat), each])
            where = {j: i for i, j in enumerate(rest)} | {j: len(rest) + self.first + i for i, j in enumerate(flat)}
            x = x.permute([*(where[j] for j in range(k)), *range(len(rest), len(rest) + self.first), k + self.first])
        return x.flatten(0, k - 1)

    def _by_parts(self, f: Callable, x: Tensor, parts: tuple[int, ...], before: int, after: int) -> Tensor:
        """f, or f of each part of the interleaved dim (which has `before`, then `after` dims in front) joined again."""
        if len(parts) < 2:  # no cat: its transpose has other strides once it is compiled
            return f(x)
        dim = self.interleaved
        return torch.cat([f(part) for part in x.split(list(parts), dim + before)], dim + after)

    def _whole_of_pieces(self, pieces: Tensor) -> Tensor:
        """[n, *shard] -> the full tensor, of a dim that is assigned."""
        dim, upto, found = self.dims[0], dict[int, int](), []
        for size, holder in zip(*self.assigned, strict=True):
            at = upto.get(holder, 0)
            found.append(pieces[holder].narrow(dim, at, size))
            upto[holder] = at + size
        return torch.cat(found, dim)

    def _assigned_pieces(self, whole: Tensor, n: int) -> Tensor:
        """The full tensor -> [n, *shard], of a dim that is assigned."""
        dim, room, rows = self.dims[0], self._room, []
        for share in [*self._shares, *([[]] * (n - len(self._shares)))]:
            parts = [whole.narrow(dim, at, size) for at, size in share if size]
            behind = room - sum(size for _, size in share)
            shape = [behind if d == dim else size for d, size in enumerate(whole.shape)]
            rows.append(
                torch.cat([*parts, whole.new_zeros(shape)] if behind else parts or [whole.narrow(dim, 0, 0)], dim)
            )
        return torch.stack(rows)

    # ---- values with padding: axis after axis, as each of them leaves its own out, or puts it in

    def _steps(self, sizes: Sequence[int]) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        """(axis, dim or FLAT, sizes of the parts of the dim in full, and in a piece), in the order of cutting."""
        true, out = dict(self.true), []
        ways = math.prod(sizes[j] for j in self.axes_on(self.interleaved)) if self.parts else 1
        for d in sorted(set(self.dims) - {FLAT}) + [FLAT] * (FLAT in self.dims):
            parts = tuple(part * ways for part in self.parts) if self.parts and d == self.interleaved else ()
            parts = true.get(d, parts)
            for j in self.axes_on(d):
                inside = tuple(rooms(part, sizes[j : j + 1], self._unit(d))[-1] for part in parts)
                out.append((j, d, parts, inside))
                parts = inside
        return out

    def padding_axes(self, names: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
        """Of the names of the axes those along which some shards have padding."""
        if self.assigned:
            shares = [sum(size for _, size in share) for share in self._shares]
            uneven = len(shares) < math.prod(sizes) or len(set(shares)) > 1
            return tuple(names) if uneven and any(shares) else ()
        found = {
            j for j, _, parts, inside in self._steps(sizes) if any(
                room * sizes[j] != part for part, room in zip(parts, inside, strict=True))
        }  # fmt: skip
        return tuple(names[j] for j in sorted(found)) if self.true else ()

    def _pieces_with_padding(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The full tensor -> [n, *shard]."""
        front: list[int] = []  # the axes that stand before the dims of x
        for j, d, parts, inside in self._steps(sizes):
            if d == FLAT and FLAT not in (self.dims[i] for i in front):
                x = x.flatten(len(front) + self.first)
            dim, n = len(front) + (self.first if d == FLAT else d), sizes[j]
            pieces = []
            for part, room in zip(x.split(list(parts), dim) if len(parts) > 1 else [x], inside or [0], strict=True):
                room = room or part.shape[dim] // n
                if behind := room * n - part.shape[dim]:
                    part = pad(part, (0, 0) * (x.dim() - 1 - dim) + (0, behind))
                pieces.append(part.unflatten(dim, (n, room)).movedim(dim, 0))
            x = torch.cat(pieces, dim + 1) if len(pieces) > 1 else pieces[0]
            front.insert(0, j)
        k = len(front)
        if self.block and FLAT not in self.dims:
            x = x.flatten(k + self.first)
        return x.permute([*(front.index(j) for j in range(k)), *range(k, x.dim())]).flatten(0, k - 1)

    def _whole_without_padding(self, pieces: Tensor, sizes: Sequence[int]) -> Tensor:
        """[n, *shard] -> the full tensor."""
        front = list(range(len(sizes)))
        x = pieces.unflatten(0, tuple(sizes))
        flat = bool(self.block)
        for j, d, parts, inside in reversed(self._steps(sizes)):
            if flat and d != FLAT:
                x, flat = x.unflatten(len(front) + self.first, self.block[self.first :]), False
            at, dim = front.index(j), len(front) + (self.first if d == FLAT else d)
            joined = []
            for part, n in zip(x.split(list(inside), dim) if len(inside) > 1 else [x], parts or [None], strict=True):
                part = part.movedim(at, dim - 1).flatten(dim - 1, dim)
                joined.append(part if n in (None, part.shape[dim - 1]) else part.narrow(dim - 1, 0, n))
            x = torch.cat(joined, dim - 1) if len(joined) > 1 else joined[0]
            front.remove(j)
        return x.unflatten(self.first, self.block[self.first :]) if flat else x


def _block_of(layout: Layout) -> tuple[int, ...]:
    """Shape of the block that every rank flattens."""
    return layout.replace(flat=(), unreduced=()).local_shape(0)
