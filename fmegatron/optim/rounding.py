"""float32 to bfloat16 and back: a remainder that makes it exact, and rounding at random that makes it unbiased.

Random words come from counters, as those of `tree.init` do: the word of an element depends on the key, the number of
the update, the path of its leaf and its index in the global array. So they are the same on every mesh, a resumed run
repeats them, and no generator has a state. It is integer arithmetic on tensors, which a compiler fuses.
"""

import math

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, axis_index, declare
from fmegatron.layout import Layout, Split, row_major_strides
from fmegatron.optim.scalars import stored

_LOW_32 = 0xFFFFFFFF
_QUIET = 0x00400000  # the bit of a NaN that is not a signalling one


# ---- the remainder ---------------------------------------------------------------------------------------------------
def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 -> (bfloat16, int16 remainder), from which `join_master` makes the same 32 bits again.

    The bfloat16 is the nearest one, ties away from zero: with ties to even, 65537 numbers round to an even neighbour,
    one more than 16 bits can tell apart. NaN stays NaN with its sign and payload, and becomes quiet if it is not (no
    arithmetic makes a signalling one).
    """
    nan, bits = master.isnan(), master.view(torch.int32)
    bits = torch.where(nan, bits | _QUIET, bits)
    # NaN is cut off: the carry could run over into the sign.
    high = (torch.where(nan, bits, torch.where(nan, 0, bits) + 0x8000)) >> 16
    return _bfloat16_of(high), (bits - (high << 16)).to(torch.int16)


def join_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 of `split_master`."""
    high, low = param.view(torch.int16).to(torch.int32) << 16, remainder.to(torch.int32)
    return (high + torch.where(param.isnan(), low & 0xFFFF, low)).view(torch.float32)


def _bfloat16_of(high: torch.Tensor) -> torch.Tensor:
    """The bfloat16 of these 16 bits (in int32): no cast, for instructions that cast may flush denormal numbers."""
    return high.to(torch.int16).view(torch.bfloat16)


# ---- rounding at random ----------------------------------------------------------------------------------------------
def stochastic_bfloat16(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """float32 -> one of the two neighbours in bfloat16, the nearer the likelier, so that the mean is x.

    words: int64 of x's shape, of which the low 16 bits are used. What bfloat16 has exactly (zeros and infinities too)
    stays; NaN stays NaN; above the largest finite bfloat16 the upper neighbour is infinity, as in rounding to nearest.
    """
    nan, bits = x.isnan(), x.view(torch.int32)
    up = torch.where(nan, 0, bits) + (words.to(torch.int32) & 0xFFFF)
    return _bfloat16_of(torch.where(nan, bits | _QUIET, up) >> 16)


def random_words(
    key: int, path: str, count: torch.Tensor, like: torch.Tensor, layout: Layout | None, axes: Axes | None
) -> torch.Tensor:
    """A random number of 32 bits (in int64) for each element of a leaf at update `count` (0-d int64).

    like: the local tensor.  layout, axes: where it lies in the global array; None: it is whole.
    """
    leaf = tree.fold_in(key, path)
    first = _mix((count & _LOW_32) ^ (leaf & _LOW_32))
    first, second = stored(first, _mix(first ^ (count >> 32) ^ (leaf >> 32)))
    at = positions(like, layout, axes)
    return _mix(_mix((at & _LOW_32) ^ first) ^ (at >> 32) ^ second)


def positions(like: torch.Tensor, layout: Layout | None, axes: Axes | None) -> torch.Tensor:
    """int64 index of each element of a local tensor in the global array (row-major), in the shape of the tensor.

    ValueError for an uneven layout: the ranks of a traced step share one graph.
    """
    if layout is None or not layout.sharded:
        return torch.arange(like.numel(), device=like.device).view(like.shape)
    if not layout.is_even:
        raise ValueError(f"got {layout}, which is uneven; want ranks of one shape to number their elements")
    if not layout.flat:
        return _of_dims(like, layout, axes)
    leading = _leading_dims(layout)
    if leading:
        # Ranges of whole rows: as if the leading dims were one, which the flat axes split too. (What `step.check` knows
        # of such a leaf has the same form.)
        dims, names = layout.shape[leading:], (*layout.axes(0), *layout.flat)
        merged = layout.replace(
            shape=(math.prod(layout.shape[:leading]), *dims), spec=(names, *layout.spec[leading:]), flat=()
        )
        return _of_dims(like, merged, axes).flatten()
    within = _ramp(like.numel(), layout.flat, like, axes)
    block, strides, at = layout.replace(flat=()).local_shape(0), row_major_strides(layout.shape), 0
    for dim, stride in enumerate(row_major_strides(block)):
        index = torch.div(within, stride, rounding_mode="floor") % block[dim]
        at = at + _global_index(index, layout, dim, axes) * strides[dim]
    split = tuple(name for dim in range(len(block)) for name in layout.axes(dim) if layout.mesh[name] > 1)
    return declare(at, axes[split], forward=("sharded", 0)) if split else at


def _leading_dims(layout: Layout) -> int:
    """How many leading dims of a flattened leaf make up what its ranges cut: 0 where a range is not of whole rows."""
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
    for dim, (size, stride) in enumerate(zip(layout.local_shape(0), row_major_strides(layout.shape), strict=True)):
        parts, count = layout.parts[dim], math.prod(layout.counts[dim])
        if len(parts) == 1 or count == 1:
            index = _ramp(size, layout.axes(dim), like, axes)
        else:
            starts = [sum(parts[:i]) for i in range(len(parts))]
            index = torch.cat(
                [_ramp(n // count, layout.axes(dim), like, axes) + a for a, n in zip(starts, parts, strict=True)]
            )
        at = at + (index * stride).view(-1, *[1] * (len(layout.shape) - 1 - dim))
    return at


def _ramp(size: int, names: tuple[str, ...], like: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The indices of this rank's piece, of `size` elements, of a dim that the axes split: `y[N_a]`, int64."""
    ramp = torch.arange(size, device=like.device)
    axis = axes[names]
    return ramp if axis.size == 1 else ramp + axis_index(axis, like) * size


def _global_index(index: torch.Tensor, layout: Layout, dim: int, axes: Axes) -> torch.Tensor:
    """Index in a dim from the index in this rank's piece of it."""
    axis = axes[layout.axes(dim)]
    if axis.size == 1:
        return index
    out, start, local = index, 0, 0
    rank = axis_index(axis, index)
    for size in layout.parts[dim]:
        piece = size // axis.size
        there = index - local + start + rank * piece
        out = there if local == 0 else torch.where(index >= local, there, out)
        start, local = start + size, local + piece
    return out


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A permutation of 32 bits that spreads every bit (lowbias32 of C. Wellons' hash-prospector), in int64.

    The second factor stands as a negative number, equal modulo 2³²: no product leaves the 64 bits.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW_32
    x = ((x ^ (x >> 15)) * (0xD35A2D97 - 2**32)) & _LOW_32
    return x ^ (x >> 15)
