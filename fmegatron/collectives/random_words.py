"""Random words from counters: the word of an element depends on key, count and its index in the global array only.

So words are the same on every mesh, compiled or not, in each microbatch and recomputation; a resumed run repeats them;
and no generator has a state. It is integer arithmetic on tensors, which a compiler fuses.
"""

import math

import torch

from fmegatron import tree
from fmegatron.collectives.axes import Axes, Axis
from fmegatron.collectives.ops import axis_index, declare
from fmegatron.layout import Layout, Split, boxes, notation, split
from fmegatron.tree import arithmetic

__all__ = ["beginnings", "positions", "random_words", "word_at"]

_LOW_32 = 0xFFFFFFFF


def random_words(
    key: int, name: str, count: torch.Tensor, like: torch.Tensor, layout: Layout | None = None, axes: Axes | None = None
) -> torch.Tensor:
    """A random number of 32 bits for each element: int64 in the shape of the local tensor `like`.

    Each pair of key and name gives other words, and the first 2³² words of a pair and a count are all different.

    Args:
        key: a Python int, 0 or more.
        name: a leaf's path, or a kind of numbers.
        count: what distinguishes draws of one pair, int64: 0-d (the number of a step), or one number for each index of
            dim 0 (of the samples of a batch), or of the leading dims (of tokens [B, S]); a word then depends on it and
            the index within the row (or token), not on where the row is.
        like: the local tensor.
        layout: of the value in the global array; None: it is not sharded.
        axes: of the mesh of the layout.

    Raises ValueError for a key, count or layout that is not like this, and for uneven layouts (see `positions`). Where
    a layout is padded, the words of padding are those of some elements: multiply by what is 0 there.
    """
    _require_count(count, like)
    first, second = beginnings(key, name, count)
    if dims := count.dim():
        at = _positions(tuple(like.shape[dims:]), like, _of_a_row(like, layout, dims), axes)
        behind = (..., *[None] * (like.dim() - dims))  # no view, in which a shard of one row would lose its place
        first, second = first[behind], second[behind]
    else:
        at = positions(like, layout, axes)
    return word_at(at, first, second)


def beginnings(key: int, name: str, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the words of a count begin with, two numbers of 32 bits in int64, in its shape. Arguments as of
    `random_words`."""
    _require_key(key)
    # Hashed: key and count meet in an exclusive or, so that (1, 0) and (0, 1) would be one stream.
    key = tree.fold_in(key, name)
    first = _mix((count & _LOW_32) ^ (key & _LOW_32))
    first, second = arithmetic.stored(first, _mix(first ^ (count >> 32) ^ (key >> 32)))
    return first, second


def word_at(at: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The words of elements: at is the index of each in the global array, behind what is counted."""
    return _mix(_mix((at & _LOW_32) ^ first) ^ (at >> 32) ^ second)


def _require_key(key: int) -> None:
    if not isinstance(key, int) or isinstance(key, bool) or key < 0:
        raise ValueError(
            f'random words: got the key {key!r}, wanted a Python int, 0 or more, such as tree.fold_in(seed, "mlp", 3), '
            "which is a constant of a step; what changes from step to step is the count"
        )


def _require_count(count: torch.Tensor, like: torch.Tensor) -> None:
    if not isinstance(count, torch.Tensor) or count.dtype != torch.int64:
        got = f"a tensor of {count.dtype}" if isinstance(count, torch.Tensor) else repr(count)
        raise ValueError(
            f"random words: got the count {got}, wanted an int64 tensor, such as the step's number in the state: a "
            "Python number would be a constant of a compiled step, which then draws the same numbers in every step"
        )
    if count.shape != like.shape[: count.dim()]:
        raise ValueError(
            f"random words: got counts of shape {tuple(count.shape)} for values of shape {tuple(like.shape)}, wanted "
            "one number, or one for each index of dim 0, or of more leading dims"
        )


def _of_a_row(like: torch.Tensor, layout: Layout | None, dims: int) -> Layout | None:
    """The layout of one index of so many leading dims."""
    if layout is None:
        return None
    _require_shape(tuple(like.shape), layout)
    if layout.flat and layout.flat_from < dims:
        raise ValueError(f"random words: got a count for each row of {layout}, whose ranges cut rows, wanted one count")
    how = {"flat": layout.flat, "flat_from": max(0, layout.flat_from - dims), "padded": layout.padded}
    return Layout(layout.shape[dims:], layout.dtype, layout.mesh, layout.spec[dims:], **how)


def positions(like: torch.Tensor, layout: Layout | None = None, axes: Axes | None = None) -> torch.Tensor:
    """int64 index of each element of a local tensor in the global array (row-major), in the shape of the tensor.

    What stands at padding is an integer, and no index of its own.
    Raises ValueError for an uneven layout (the ranks of a traced step share one graph), for one of another local shape
    or mesh, and for a sharded one without axes.
    """
    return _positions(tuple(like.shape), like, layout, axes)


def _require_shape(shape: tuple[int, ...], layout: Layout) -> None:
    notation.require_shares(layout, "positions")
    if not layout.is_even:
        raise ValueError(f"got {layout}, which is uneven, wanted ranks of one shape to number their elements")
    if layout.local_shape(0) != shape:
        raise ValueError(
            f"positions: got a local tensor of shape {shape}, wanted {layout.local_shape(0)}, which {layout} gives on "
            "each rank; give the layout of this value (its shape is that of the global array)"
        )


def _positions(shape: tuple[int, ...], like: torch.Tensor, layout: Layout | None, axes: Axes | None) -> torch.Tensor:
    """`positions` of a tensor of this shape on the device of `like`."""
    if layout is not None:
        _require_shape(shape, layout)
    if layout is None or not layout.sharded:
        return torch.arange(math.prod(shape), device=like.device).view(shape)
    if axes is None:
        raise ValueError(f"positions: got {layout}, which is sharded, and no axes, wanted axes; give Axes(mesh)")
    axes.require(layout, "positions: the layout")
    if not layout.flat:
        return _of_dims(like, layout, axes)
    leading = 0 if layout.padded or layout.flat_from else _leading_dims(layout)
    if leading:
        # Ranges of full rows: as if the leading dims were one, which the flat axes split too. (What `step.check` knows
        # of such a leaf has the same form.)
        dims, names = layout.shape[leading:], (*layout.axes(0), *layout.flat)
        merged = layout.replace(
            shape=(math.prod(layout.shape[:leading]), *dims), spec=(names, *layout.spec[leading:]), flat=()
        )
        return _of_dims(like, merged, axes).flatten()
    block, strides = layout.replace(flat=()).local_shape(0), boxes.row_major_strides(layout.shape)
    first = layout.flat_from
    if layout.padded:
        within = _padded_ramp(math.prod(block[first:]), layout.flat, like, axes, layout.padded)
    else:
        within = _ramp(shape[first], layout.flat, like, axes)
    at: torch.Tensor | int = 0
    for dim in range(first):
        at = at + (_of_dim(like, layout, dim, axes) * strides[dim]).view(-1, *[1] * (first - dim))
    for dim, stride in zip(range(first, len(block)), boxes.row_major_strides(block[first:]), strict=True):
        index = torch.div(within, stride, rounding_mode="floor") % block[dim]
        at = at + _global_index(index, layout, dim, axes) * strides[dim]
    split = tuple(name for dim in range(first, len(block)) for name in layout.axes(dim) if layout.mesh[name] > 1)
    assert isinstance(at, torch.Tensor), "a sharded array has a dim"
    return declare(at, axes[split], forward=("sharded", first)) if split else at


def _leading_dims(layout: Layout) -> int:
    """How many leading dims of a flattened leaf make up what its ranges cut: 0 where a range is not of full rows."""
    if isinstance(layout.spec[0], Split) and layout.counts[0]:
        return 0
    count = 1
    while count < len(layout.shape) and not layout.counts[count]:
        count += 1
    rows = math.prod(layout.replace(flat=()).local_shape(0)[:count])
    return count if rows % math.prod(layout.flat_counts) == 0 else 0


def _of_dims(like: torch.Tensor, layout: Layout, axes: Axes) -> torch.Tensor:
    """`positions` under a layout that is not flattened."""
    at: torch.Tensor | int = 0
    for dim, stride in enumerate(boxes.row_major_strides(layout.shape)):
        at = at + (_of_dim(like, layout, dim, axes) * stride).view(-1, *[1] * (len(layout.shape) - 1 - dim))
    assert isinstance(at, torch.Tensor), "a sharded array has a dim"
    return at


def _of_dim(like: torch.Tensor, layout: Layout, dim: int, axes: Axes) -> torch.Tensor:
    """The indices in a dim of this rank's piece of it."""
    size, parts, count = layout.block_shape(layout.shard(0))[dim], layout.parts[dim], math.prod(layout.counts[dim])
    starts = [sum(parts[:i]) for i in range(len(parts))]
    if layout.cuts[dim].order:
        axis = axes[layout.axes(dim)]
        return declare(_of_pieces(like, layout, dim, axis), axis, ("sharded", 0))
    if layout.padded and count > 1:
        ramps = [_padded_ramp(n, layout.axes(dim), like, axes) + a for a, n in zip(starts, parts, strict=True)]
        return torch.cat(ramps) if len(ramps) > 1 else ramps[0]
    if len(parts) == 1 or count == 1:
        return _ramp(size, layout.axes(dim), like, axes)
    return torch.cat([_ramp(n // count, layout.axes(dim), like, axes) + a for a, n in zip(starts, parts, strict=True)])


def _of_pieces(like: torch.Tensor, layout: Layout, dim: int, axis: Axis) -> torch.Tensor:
    """The indices in a dim that is assigned of what this rank holds of it; 0 where it has padding."""
    cut, rows = layout.cuts[dim], []
    for i in range(axis.size):
        held = [s.start + j for s in split.segments(cut, i, True) for j in range(s.length)]
        rows.append(held + [0] * (cut.length(i, bool(layout.padded)) - len(held)))
    return torch.tensor(rows, device=like.device).index_select(0, axis_index(axis, like).view(1)).squeeze(0)


def _ramp(size: int, names: tuple[str, ...], like: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The indices of this rank's piece, of `size` elements, of a dim that the axes split: `y[N_a]`, int64."""
    ramp = torch.arange(size, device=like.device)
    axis = axes[names]
    if axis.size == 1:
        return ramp
    # declared: a piece of one element leaves no trace in sizes
    return declare(ramp + axis_index(axis, like) * size, axis, ("sharded", 0))


def _padded_ramp(size: int, names: tuple[str, ...], like: torch.Tensor, axes: Axes, unit: int = 1) -> torch.Tensor:
    """`_ramp` of this rank's room of a dim, part or block, of `size` elements: `y[N_a]`, int64."""
    big = tuple(name for name in names if axes.mesh[name] > 1)
    ramp = torch.arange(split.rooms(size, [axes.mesh[name] for name in big], unit)[-1], device=like.device)
    return declare(ramp + _start(size, big, like, axes, unit), axes[big], ("sharded", 0)) if big else ramp


def _start(size: int, names: tuple[str, ...], like: torch.Tensor, axes: Axes, unit: int = 1) -> torch.Tensor | int:
    """Where this rank's room of a dim, part or block, of `size` elements begins."""
    start: torch.Tensor | int = 0
    for name, room in zip(names, split.rooms(size, [axes.mesh[name] for name in names], unit)[1:], strict=True):
        start = start + axis_index(axes[name], like) * room
    return start


def _global_index(index: torch.Tensor, layout: Layout, dim: int, axes: Axes) -> torch.Tensor:
    """Index in a dim from the index in this rank's piece of it."""
    axis = axes[layout.axes(dim)]
    if axis.size == 1:
        return index
    if layout.cuts[dim].order:
        return _of_pieces(index, layout, dim, axis).index_select(0, index.flatten()).view_as(index)
    out, start, local = index, 0, 0
    rank = axis_index(axis, index)
    for size in layout.parts[dim]:
        if layout.padded:
            names = tuple(name for name in layout.axes(dim) if layout.mesh[name] > 1)
            piece = split.rooms(size, layout.counts[dim])[-1]
            there = index - local + start + _start(size, names, index, axes)
        else:
            piece = size // math.prod(layout.counts[dim])
            there = index - local + start + rank * piece
        out = there if local == 0 else torch.where(index >= local, there, out)
        start, local = start + size, local + piece
    return out


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A permutation of 32 bits that spreads every bit (lowbias32 of C. Wellons' hash-prospector), in int64.

    The second factor is written as a negative number, equal modulo 2³²: no product leaves the 64 bits.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW_32
    x = ((x ^ (x >> 15)) * (0xD35A2D97 - 2**32)) & _LOW_32
    return x ^ (x >> 15)
