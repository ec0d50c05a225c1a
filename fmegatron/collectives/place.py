"""Places: where the axes of a coalesced collective split one of its tensors, and how shards form the full tensor.

Written as text into the graph ("1", "0,2", "1|1:24+8+8", "-1|4x6"), because an op's schema knows no nested lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fmegatron.layout import Layout

__all__ = ["FLAT", "Place"]

FLAT = -1  # in `Place.dims`: the axis cuts the flattened block into ranges


def _big(layout: Layout, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if layout.mesh[name] > 1)


@dataclass(frozen=True)
class Place:
    """dims: per axis the dim that it splits (axes on one dim: major first), or FLAT.

    interleaved, parts: a dim that consists of parts which are split one by one, and their sizes in the shard; -1 and ()
    for none. () with a dim: the shards are put side by side on it. block: of a flattened shard, the shape of its block
    before that, local to all axes that are not FLAT.

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

    @staticmethod
    def of(layout: Layout, names: Sequence[str]) -> Place:
        """The place of these axes (of size > 1, each of which shards the layout) in a local tensor, to be gathered.

        Raises ValueError where a layout is uneven, where another axis splits the same dim below them or in another
        order, and where ranges of the flattened block would remain after a dim is gathered.
        """
        if not layout.is_even:
            ways = [layout.mesh.extent(layout.axes(d)) for d in range(len(layout.shape))]
            cut = [n for parts, n in zip(layout.parts, ways, strict=True) if any(part % n for part in parts)]
            raise ValueError(
                f"got {layout}, which is uneven, wanted equal shards for a gather inside a step; make the "
                f"{'dim' if cut else 'block'} a multiple of {cut[0] if cut else layout.mesh.extent(layout.flat)}, or "
                "do not shard this leaf"
            )
        rank, flat = len(layout.shape), _big(layout, layout.flat)
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
            return Place((0,) * len(names))
        split = [d for d in range(rank) if len(layout.parts[d]) > 1 and set(held[d]) & set(names)]
        if len(split) > 1:
            raise ValueError(f"got {layout}, whose dims {split} are interleaved and gathered, wanted one at most")
        parts = [part // layout.mesh.extent(held[d]) for d in split for part in layout.parts[d]]
        block = layout.replace(flat=(), unreduced=()).local_shape(0) if layout.flat else ()
        return Place(tuple(where[name] for name in names), split[0] if split else -1, tuple(parts), block)

    # ---- text

    def __str__(self) -> str:
        text = ",".join(map(str, self.dims))
        if self.interleaved >= 0:
            text += f"|{self.interleaved}:" + "+".join(map(str, self.parts))
        return text + ("|" + "x".join(map(str, self.block)) if self.block else "")

    @staticmethod
    def parse(text: str) -> Place:
        """The inverse of `str`."""
        dims, *rest = text.split("|")
        place = Place(tuple(map(int, dims.split(","))))
        for field in rest:
            dim, colon, parts = field.partition(":")
            if colon:
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
        return tuple(n * self._ways(d, sizes) for d, n in enumerate(self.block or shard))

    def shard_shape(self, whole: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of the shards of a full tensor."""
        block = tuple(n // self._ways(d, sizes) for d, n in enumerate(whole))
        return (math.prod(block) // self._ways(FLAT, sizes),) if self.block else block

    def check(self, whole: Sequence[int], sizes: Sequence[int], what: str) -> None:
        """ValueError when a full tensor of this shape cannot be split so; `what` begins the message."""
        where, fix = f"of a tensor with shape {tuple(whole)}", "pad it, or choose another dim"
        for d in set(self.dims) - {FLAT}:
            if not 0 <= d < len(whole):
                raise ValueError(f"{what}: got dim {d} {where}, wanted a dim of it")
            if whole[d] % self._ways(d, sizes):
                ways = self._ways(d, sizes)
                raise ValueError(
                    f"{what}: got dim {d} {where}, which is not divisible by {ways}, wanted a multiple of it; {fix}"
                )
        block = tuple(n // self._ways(d, sizes) for d, n in enumerate(whole))
        if self.parts and sum(self.parts) != block[self.interleaved]:
            raise ValueError(
                f"{what}: got parts {self.parts} of dim {self.interleaved}, which is {block[self.interleaved]} long in "
                f"a shard {where}, wanted the sizes of the parts in the shard"
            )
        if (FLAT in self.dims and not self.block) or (self.block and self.block != block):
            raise ValueError(
                f"{what}: got block {self.block}, wanted {block}, that of the tensor; give that with FLAT axes"
            )
        if self.block and math.prod(block) % self._ways(FLAT, sizes):
            raise ValueError(
                f"{what}: got {math.prod(block)} elements, wanted a multiple of {self._ways(FLAT, sizes)} ranges; {fix}"
            )

    # ---- values

    def whole(self, pieces: Tensor, sizes: Sequence[int]) -> Tensor:
        """[n, *shard] -> the full tensor; a view where only dim 0 is split and the pieces are contiguous."""
        k = len(sizes)
        x = pieces.unflatten(0, tuple(sizes))
        flat, rest = self.axes_on(FLAT), [j for j in range(k) if self.dims[j] != FLAT]
        if self.block:
            x = x.permute(*rest, *flat, k).reshape([*(sizes[j] for j in rest), *self.block])

        def in_place(x: Tensor) -> Tensor:
            order, shape = [], []
            for d in range(x.dim() - len(rest)):
                order += [*(i for i, j in enumerate(rest) if self.dims[j] == d), len(rest) + d]
                shape.append(x.shape[len(rest) + d] * self._ways(d, sizes))
            return x.permute(order).reshape(shape)

        return self._by_parts(in_place, x, self.parts, len(rest), 0)

    def pieces(self, whole: Tensor, sizes: Sequence[int]) -> Tensor:
        """The full tensor -> [n, *shard]: row i is the shard of the rank with index i; a view where it can be one."""
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
            x = x.reshape([*(sizes[j] for j in rest), *(sizes[j] for j in flat), -1])
            order = [*rest, *flat]
            x = x.permute([*(order.index(j) for j in range(k)), k])
        return x.flatten(0, k - 1)

    def _by_parts(self, f: Callable, x: Tensor, parts: tuple[int, ...], before: int, after: int) -> Tensor:
        """f, or f of each part of the interleaved dim (which has `before`, then `after` dims in front) joined again."""
        if len(parts) < 2:  # no cat: its transpose has other strides once it is compiled
            return f(x)
        dim = self.interleaved
        return torch.cat([f(part) for part in x.split(list(parts), dim + before)], dim + after)
