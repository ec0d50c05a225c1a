"""Optimizer state in 8 or 16 bits with a scale for each block: block-wise quantization (Dettmers et al. 2021).

arXiv 2110.02861, section 2.1: a block's values are divided by the largest magnitude in it (absmax), and each becomes
the nearest code of a grid. The scales are an array with a layout of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, ops
from fmegatron.layout import Layout, Split, split
from fmegatron.optim.contrib.grids import Dynamic, Floating, Grid, Linear
from fmegatron.optim.matrices import joined
from fmegatron.tree import ArraySpec


@dataclass(frozen=True)
class Blockwise:
    """Codes of a grid and a scale, the largest magnitude, for each block of `block` elements of the last dim.

    block: rows of a leaf [..., n] are cut into blocks, the last one of which may be shorter; one at least as long as
    the rows gives a scale per row. The scales are the array [..., ⌈n/block⌉], laid out as the leaf. No result
    depends on the mesh; in return no edge of a shard may cut a block (ValueError, with a block that fits): a strategy
    that knows the block cuts none (`DataParallel.block`), on any number of ranks. Padding is zeros, which no block
    notices.
    fit: where an edge would cut a block, take the longest blocks that fit instead (the greatest common divisor of
    `block` and what is between edges). It serves every even layout, but values and the shape of the scales then
    depend on how the mesh cuts the leaf: its checkpoint is restored onto a mesh that cuts it in the same places.
    root: store the square root. For second moments, which are never negative and span twice the orders of magnitude of
    the first: the codes need no sign, and what is above 0 stays above 0 (a negative value becomes NaN).
    smallest: leaves of fewer elements (of the global array) stay float32, as in the paper's implementation.

    A block with a NaN or an infinity in it decodes to NaN, so neither is lost. Encoding what was decoded gives the same
    bits. ValueError for a block of less than 1.
    """

    grid: Grid
    block: int = 256
    root: bool = False
    smallest: int = 4096
    fit: bool = False

    def __post_init__(self) -> None:
        if self.block < 1 or self.smallest < 0:
            raise ValueError(f"Blockwise: got {self}, wanted a block of at least 1 element and smallest >= 0")

    def applies(self, shape: tuple[int, ...]) -> bool:
        """Whether a leaf of this global shape is stored so."""
        return math.prod(shape) >= max(1, self.smallest)

    def specs(self, path: str, spec: ArraySpec) -> dict[str, ArraySpec]:
        """{"codes", "scale"}: specs of what `encode` makes of a leaf. ValueError where a shard's edge cuts a block."""
        if spec.init != tree.zeros_like(spec).init:
            raise ValueError(
                f"{path}: got a start as {spec.init}, wanted zeros for a state in blocks; leave it in float32"
            )
        codes = spec.layout.replace(dtype=self.grid.code_dtype(not self.root))
        return {"codes": ArraySpec(codes), "scale": ArraySpec(self._scale(path, spec.layout))}

    def encode(self, x: torch.Tensor, layout: Layout | None) -> dict[str, torch.Tensor]:
        """float32 -> {"codes": in its shape and layout, "scale": float32}.  layout: None for a full array."""
        row, width = self._row_and_width(x, layout)
        rows = (x.sqrt() if self.root else x).reshape(*_lead(x, layout), row)
        codes, scales = [], []
        for part in map(_declared(layout), _cut(rows, width)):
            scale = part.abs().amax(-1)
            y = torch.where(scale.unsqueeze(-1) == 0, 0.0, part / scale.unsqueeze(-1))
            codes.append(self.grid.encode(y, not self.root).flatten(-2))
            scales.append(scale)
        scale = joined(scales, -1)
        if layout is not None and layout.flat:
            scale = scale.flatten(layout.flat_from)
        return {"codes": joined(codes, -1).reshape(x.shape), "scale": scale}

    def decode(self, stored: dict[str, torch.Tensor], layout: Layout | None) -> torch.Tensor:
        """The float32 that `encode` was given, up to the precision of the grid."""
        codes, out, at = stored["codes"], [], 0
        row, width = self._row_and_width(codes, layout)
        lead = _lead(codes, layout)
        scale = stored["scale"].view(*lead, -(-row // width))
        for part in map(_declared(layout), _cut(self.grid.decode(codes, not self.root).view(*lead, row), width)):
            count = part.shape[-2]
            own = scale if count == scale.shape[-1] else scale[..., at : at + count]
            y = part * own.unsqueeze(-1)
            out.append((y * y if self.root else y).flatten(-2))
            at += count
        return joined(out, -1).view(codes.shape)

    # ---- where the blocks are

    def _row_and_width(self, x: torch.Tensor, layout: Layout | None) -> tuple[int, int]:
        """Elements of a row of the local tensor (of a block, where flat ranges are not full rows), and of a block."""
        if layout is None:
            row = x.shape[-1] if x.dim() else 1
            return row, min(self.block, row)
        width, row = self._width("", layout), layout.replace(flat=()).local_shape(0)[-1] if layout.shape else 1
        return (width if layout.flat and row % width == 0 else row), width

    def _width(self, path: str, layout: Layout) -> int:
        """Elements of a block. ValueError where an edge of a shard would cut one."""
        if not layout.shape:
            return 1
        width = min(self.block, layout.shape[-1])
        last = len(layout.shape) - 1
        count, between = math.prod(layout.counts[last]), []
        if count > 1:
            parts = layout.parts[last]
            between += [split.rooms(part, layout.counts[last])[-1] for part in parts]
            between += parts if layout.padded else []  # a part begins with a block in rows that are full, too
        if layout.flat_counts:
            row, length = layout.replace(flat=()).local_shape(0)[-1], layout.local_shape(0)[-1]
            between += [] if length % row == 0 else [length, row]
        if between and not layout.is_even:
            raise ValueError(
                f"{path}: got {layout}, whose rows are cut into uneven pieces, wanted rooms of one size; pad it "
                "(padded=True), or leave it in Float32()"
            )
        if any(n % width for n in between):
            fits, ranks = math.gcd(width, *between), f"give the strategy the block, DataParallel(..., block={width})"
            if not self.fit or layout.padded:
                other = "leave it in Float32()" if layout.padded else f"give block={fits}, or fit=True (blocks then"
                other += "" if layout.padded else " depend on the mesh)"
                raise ValueError(
                    f"{path}: got blocks of {width} elements of the last dim of {layout}, but an edge of a shard every"
                    f" {' and '.join(str(n) for n in dict.fromkeys(between))} elements, wanted a block that divides"
                    f" them; {ranks}, or {other}"
                )
            width = fits
        return width

    def _scale(self, path: str, layout: Layout) -> Layout:
        """Layout of the scales: that of the leaf, with ⌈n/width⌉ elements for the n of the last dim."""
        if not layout.shape:
            return layout.replace(shape=(1,), dtype=torch.float32, spec=(None,))
        width, entry = self._width(path, layout), layout.spec[-1]
        if isinstance(entry, Split):
            parts = layout.parts[-1]
            aligned = not any(part % width for part in parts)
            entry = Split(entry.axes, tuple(part // width for part in parts)) if aligned else entry.axes
        row, padded = layout.replace(flat=()).local_shape(0)[-1], layout.padded
        if padded > 1:  # ranges of so many blocks
            padded = padded // row * -(-row // width) if row % width else padded // width
        return layout.replace(
            padded=padded,
            shape=(*layout.shape[:-1], -(-layout.shape[-1] // width)),
            dtype=torch.float32,
            spec=(*layout.spec[:-1], entry),
        )


def in_blocks(node: Any) -> bool:
    """Whether a node of a state is a leaf that `Blockwise.encode` made."""
    if not (isinstance(node, dict) and node.keys() == {"codes", "scale"} and isinstance(node["codes"], torch.Tensor)):
        return False
    return node["codes"].dtype not in (torch.float32, torch.float64)  # two leaves that happen to have these names


def _lead(x: torch.Tensor, layout: Layout | None) -> tuple[int, ...]:
    """The dims before the last one of a leaf seen as rows; one dim of rows for what is flattened."""
    if layout is not None and layout.flat:
        return (*x.shape[: layout.flat_from], -1)
    return tuple(x.shape[:-1])


def _cut(rows: torch.Tensor, width: int) -> list[torch.Tensor]:
    """x[..., N] -> [y[..., N // width, width], and the shorter block at the end as z[..., 1, N % width]].

    Two pieces and no padding: Inductor 2.13 on CPU reads the maxima of padded blocks before it has written them.
    """
    count, rest = divmod(rows.shape[-1], width)
    if not rest:
        return [rows.unflatten(-1, (count, width))]
    return [rows[..., :-rest].unflatten(-1, (count, width)), rows[..., -rest:].unsqueeze(-2)]


def _declared(layout: Layout | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows in blocks [..., N // width, width], of which the axes of the last dim split the blocks and never a block,
    and those of ranges the rows.

    Where a rank has one block (of each part), sizes leave open which: to a check the maximum of a block may
    be that of a rank's piece of one.
    """
    if layout is None or not layout.shape:
        return _as_it_is
    names = tuple(axis for axis in layout.flat or layout.axes(-1) if layout.mesh[axis] > 1)
    if not names:
        return _as_it_is
    return lambda part: ops.declare(
        part, Axes(layout.mesh)[names], ("sharded", layout.flat_from if layout.flat else part.dim() - 2)
    )


def _as_it_is(part: torch.Tensor) -> torch.Tensor:
    return part


def float8(
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    block: int = 256,
    root: bool = False,
    smallest: int = 4096,
    fit: bool = False,
) -> Blockwise:
    """8-bit floating-point codes with a scale per block (`Blockwise`): 1 + 4/block bytes per element.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block: elements of a block of the last dim.
        root: store the square root, for second moments.
        smallest: leaves of fewer elements stay float32.
        fit: shorten blocks that an edge of a shard would cut.
    """
    return Blockwise(Floating(dtype), block, root, smallest, fit)


def float16(*, block: int = 256, root: bool = False, smallest: int = 4096, fit: bool = False) -> Blockwise:
    """float16 codes with a scale per block (`Blockwise`), for its range ends at 6e-8: 2 + 4/block bytes per element."""
    return Blockwise(Floating(torch.float16), block, root, smallest, fit)


def int8(
    *, block: int = 256, root: bool = False, smallest: int = 4096, fit: bool = False, linear: bool = False
) -> Blockwise:
    """8-bit integer codes (uint8 with `root`) with a scale per block (`Blockwise`): 1 + 4/block bytes per element.

    Args:
        block: elements of a block of the last dim.
        root: store the square root, for second moments.
        smallest: leaves of fewer elements stay float32.
        fit: shorten blocks that an edge of a shard would cut.
        linear: in equal steps, instead of the dynamic grid of the paper (`Dynamic`).
    """
    return Blockwise(Linear() if linear else Dynamic(), block, root, smallest, fit)
