"""Attention by tiles on CUDA: three Triton kernels that make who sees whom themselves, and keep no scores.

Legend: M queries of a tile, N keys of a tile, K, V widths of keys and values. A tile of queries walks over the tiles of
keys; the least and the largest position and document of both decide first whether any of its pairs is seen, so that a
hidden tile costs what these take. Every sum is in fp32 and made by one program in one order: the same bits twice.
Source: Dao 2023, arXiv 2307.08691, algorithms 1 and 2.
"""

# pyright: reportOptionalMemberAccess=false, reportInvalidTypeForm=false
# (triton may be missing, and its kernels are no Python)
from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from fmegatron.nn.tiled_attention import Given

try:
    import triton
    import triton.language as tl
except ImportError:  # which a machine without CUDA does not need
    triton = tl = None

__all__ = ["Launch", "backward", "forward", "has_triton"]


class Launch(NamedTuple):
    """kernel[grid](*arguments, **settings)."""

    kernel: Any
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    settings: dict[str, int]


def has_triton() -> bool:
    """Whether triton is installed."""
    return triton is not None


def forward(given: Given, o_BHSV: Tensor, lse_BHS: Tensor) -> list[Launch]:
    """What computes output and log-sum-exp into these."""
    arrays = (given.q, given.k, given.v, o_BHSV, lse_BHS)
    tile = _tile(given, "forward")
    grid = -(-given.q.shape[2] // tile["M"]), given.q.shape[0] * given.q.shape[1]
    return [Launch(_forward, grid, (arrays, *_rest(given, arrays)), tile)]


def backward(
    given: Given, out: tuple[Tensor, Tensor, Tensor], found: tuple[Tensor, Tensor, Tensor], sums_BHS: Tensor
) -> list[Launch]:
    """What computes the gradients of queries, keys and values into `found`.

    out: (gradient of the output, output, log-sum-exp). sums_BHS: fp32, memory for the products of the first two.
    """
    (do, o, lse), (dq, dk, dv) = out, found
    tile, other = _tile(given, "queries"), _tile(given, "keys")
    rows = (given.q, given.k, given.v, do, o, dq, lse, sums_BHS)
    keys = (given.q, given.k, given.v, do, dk, dv, lse, sums_BHS)
    (B, H, S, _), (_, G, T, _) = given.q.shape, given.k.shape
    of_rows, of_keys = (-(-S // tile["M"]), B * H), (-(-T // other["N"]), B * G)
    return [
        Launch(_backward_of_queries, of_rows, (rows, *_rest(given, rows)), tile),
        Launch(_backward_of_keys, of_keys, (keys, *_rest(given, keys)), other),
    ]


# ---- what kernels are given ------------------------------------------------------------------------------------------
# (queries, keys) of a tile of each kernel, by the bytes of a row of keys or values, up to so many: what registers hold.
_SIZES = MappingProxyType(
    {
        "forward": ((256, 128, 64), (512, 64, 32)),
        "queries": ((128, 64, 64), (256, 64, 32), (512, 32, 32)),
        "keys": ((128, 64, 64), (256, 32, 64), (512, 32, 32)),
    }
)


def _tile(given: Given, which: str) -> dict[str, int]:
    """Sizes of tiles, and warps, of a kernel."""
    wide, long = (max(16, 1 << (x.shape[-1] - 1).bit_length()) for x in (given.q, given.v))
    item = given.q.element_size()
    rows, keys = next(((m, n) for most, m, n in _SIZES[which] if max(wide, long) * item <= most), (16, 16))
    if item == 4:  # whose products no tensor core makes
        rows, keys = (min(rows, 32), min(keys, 32)) if max(wide, long) <= 64 else (16, 16)
    warps = 4 if item == 2 and max(rows, keys) * max(wide, long) <= 64 * 64 else 8
    return {"M": rows, "N": keys, "K": wide, "V": long, "num_warps": warps, "num_stages": 2}


def _rest(given: Given, arrays: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """(strides of the arrays, (what says who sees whom, its strides, sizes, numbers)); what is None is not compiled."""
    (B, H, S, width), (_, G, T, values) = given.q.shape, given.v.shape
    rows, keys = (B, S), (B, T)
    mask = None if given.mask is None else given.mask.expand(B, H, S, T)
    at = [x if x is None else x.expand(size) for x, size in zip(given.at, (rows, keys, rows, keys), strict=True)]
    words = (None, None) if given.words is None else tuple(given.words)
    seen = (mask, *at, *words, given.first_of_heads)
    strides = tuple(None if x is None else x.stride() for x in seen)
    dropped, factor = round(given.rate * 2**32), 1 / (1 - given.rate) if given.rate < 1 else 0.0
    numbers = (width**-0.5, given.softcap, given.window, 1 if given.causal else None, dropped, factor)
    return tuple(x.stride() for x in arrays), (seen, strides, (H, G, S, T, width, values), numbers)


def _jit(fn: Callable) -> Any:
    return fn if triton is None else triton.jit(fn)


# ---- who sees whom ---------------------------------------------------------------------------------------------------
@_jit
def _ends(numbers, strides, b, i, inside):
    """(least, largest) of the positions or documents of a tile's tokens."""
    x = tl.load(numbers + b * strides[0] + i.to(tl.int64) * strides[1], mask=inside, other=0)
    most = 0x7FFFFFFFFFFFFFFF
    return tl.min(tl.where(inside, x, most), 0), tl.max(tl.where(inside, x, -most), 0)


@_jit
def _any_seen(how, b, i, j):
    """Whether a pair of two tiles may be seen."""
    seen, strides, sizes, numbers = how
    _, at_q, at_k, in_q, in_k, _, _, _ = seen
    in_rows, in_keys = i < sizes[2], j < sizes[3]
    found = (tl.min(i, 0) < sizes[2]) & (tl.min(j, 0) < sizes[3])
    if numbers[3] is not None:
        found = found & (tl.max(i, 0) >= tl.min(j, 0))
    if at_q is not None:
        low, high = _ends(at_q, strides[1], b, i, in_rows)
        least, most = _ends(at_k, strides[2], b, j, in_keys)
        found = found & (high >= least)
        if numbers[2] is not None:
            found = found & (low - most < numbers[2])
    if in_q is not None:
        low, high = _ends(in_q, strides[3], b, i, in_rows)
        least, most = _ends(in_k, strides[4], b, j, in_keys)
        found = found & (high >= least) & (low <= most)
    return found


@_jit
def _pairs(how, b, h, i, j):
    """Which pairs are seen; i and j are numbers of queries and keys along two dims, in any order."""
    seen, strides, sizes, numbers = how
    mask, at_q, at_k, in_q, in_k, _, _, _ = seen
    in_rows, in_keys = i < sizes[2], j < sizes[3]
    i64, j64 = i.to(tl.int64), j.to(tl.int64)
    found = in_rows & in_keys
    if numbers[3] is not None:
        found = found & (i >= j)
    if at_q is not None:
        gap = tl.load(at_q + b * strides[1][0] + i64 * strides[1][1], mask=in_rows, other=0).to(tl.int32)
        gap = gap - tl.load(at_k + b * strides[2][0] + j64 * strides[2][1], mask=in_keys, other=0).to(tl.int32)
        found = found & (gap >= 0)
        if numbers[2] is not None:
            found = found & (gap < numbers[2])
    if in_q is not None:
        document = tl.load(in_q + b * strides[3][0] + i64 * strides[3][1], mask=in_rows, other=0)
        other = tl.load(in_k + b * strides[4][0] + j64 * strides[4][1], mask=in_keys, other=0)
        found = found & (document == other)
    if mask is not None:
        at = mask + b * strides[0][0] + h * strides[0][1] + i64 * strides[0][2] + j64 * strides[0][3]
        found = found & (tl.load(at, mask=found, other=0) != 0)
    return found


@_jit
def _scores(products, numbers):
    """(scores, the derivative of a score by what is capped)."""
    s = products * numbers[0]
    slope = numbers[0]
    if numbers[1] is not None:
        # tanh, without overflow
        t = 1.0 - 2.0 / (tl.exp(2.0 * s / numbers[1]) + 1.0)
        s = t * numbers[1]
        slope = (1.0 - t * t) * numbers[0]
    return s, slope


@_jit
def _mix(x):
    """`collectives.random_words`: a permutation of 32 bits."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@_jit
def _kept(p, how, b, h, i, j):
    """The softmax, or a gradient of it, with keyed dropout: the words of `nn.dropout` of p[B, S, H, T]."""
    seen, strides, sizes, numbers = how
    _, _, _, _, _, first, second, first_of_heads = seen
    if first is not None:
        at = tl.load(first_of_heads + h * strides[7][0]) + j
        in_rows = i < sizes[2]
        i = i.to(tl.int64)
        one = tl.load(first + b * strides[5][0] + i * strides[5][1], mask=in_rows, other=0)
        other = tl.load(second + b * strides[6][0] + i * strides[6][1], mask=in_rows, other=0)
        word = _mix(at.to(tl.uint32) ^ one.to(tl.uint32)) ^ (at >> 32).to(tl.uint32) ^ other.to(tl.uint32)
        p = tl.where(_mix(word).to(tl.int64) < numbers[4], 0.0, p * numbers[5])
    return p


@_jit
def _rows(x, strides, b, h, start, ends, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """[ROWS, PADDED] of an array [B, H, S, K], from a row on; zeros behind the ends of rows and of the width."""
    width, most = ends
    r, c = tl.arange(0, ROWS), tl.arange(0, PADDED)
    x += b * strides[0] + h * strides[1] + tl.cast(start, tl.int64) * strides[2]
    inside = (start + r < most)[:, None] & (c < width)[None, :]
    return tl.load(x + r[:, None] * strides[2] + c[None, :] * strides[3], mask=inside, other=0.0)


@_jit
def _put(x, value, strides, b, h, start, ends):
    """The same, written."""
    width, most = ends
    r, c = tl.arange(0, value.shape[0]), tl.arange(0, value.shape[1])
    x += b * strides[0] + h * strides[1] + tl.cast(start, tl.int64) * strides[2]
    inside = (start + r < most)[:, None] & (c < width)[None, :]
    tl.store(x + r[:, None] * strides[2] + c[None, :] * strides[3], value.to(x.dtype.element_ty), mask=inside)


# ---- the kernels -----------------------------------------------------------------------------------------------------
@_jit
def _own_rows(heads, ROWS: tl.constexpr):
    """(number in the batch, head, first row, rows) of what a program computes."""
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS
    return head // heads, head % heads, first, first + tl.arange(0, ROWS)


@_jit
def _forward(arrays, strides, how, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    q_, k_, v_, o_, lse_ = arrays
    _, _, sizes, numbers = how
    H, G, S, T, width, values = sizes
    b, h, first, i = _own_rows(H, M)
    g = h // (H // G)
    q = _rows(q_, strides[0], b, h, first, (width, S), M, K)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    o = tl.zeros((M, V), tl.float32)
    for start in tl.range(0, T, N):
        j = start + tl.arange(0, N)
        if _any_seen(how, b, i, j):
            k = _rows(k_, strides[1], b, g, start, (width, T), N, K)
            v = _rows(v_, strides[2], b, g, start, (values, T), N, V)
            s, slope = _scores(tl.dot(q, tl.trans(k), input_precision="ieee"), numbers)
            s = tl.where(_pairs(how, b, h, i[:, None], j[None, :]), s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp(s - safe[:, None])
            scale = tl.exp(top - safe)
            total = total * scale + tl.sum(p, 1)
            p = _kept(p, how, b, h, i[:, None], j[None, :])
            o = o * scale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = new
    none = total == 0.0
    o = o / tl.where(none, 1.0, total)[:, None]
    lse = tl.where(none, float("-inf"), top + tl.log(tl.where(none, 1.0, total)))
    _put(o_, o, strides[3], b, h, first, (values, S))
    tl.store(lse_ + b * strides[4][0] + h * strides[4][1] + i.to(tl.int64) * strides[4][2], lse, mask=i < S)


@_jit
def _backward_of_queries(arrays, strides, how, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    q_, k_, v_, do_, o_, dq_, lse_, sums_ = arrays
    _, _, sizes, numbers = how
    H, G, S, T, width, values = sizes
    b, h, first, i = _own_rows(H, M)
    g = h // (H // G)
    q = _rows(q_, strides[0], b, h, first, (width, S), M, K)
    do = _rows(do_, strides[3], b, h, first, (values, S), M, V)
    o = _rows(o_, strides[4], b, h, first, (values, S), M, V)
    sums = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(sums_ + b * strides[7][0] + h * strides[7][1] + i.to(tl.int64) * strides[7][2], sums, mask=i < S)
    lse = tl.load(lse_ + b * strides[6][0] + h * strides[6][1] + i.to(tl.int64) * strides[6][2], mask=i < S, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    dq = tl.zeros((M, K), tl.float32)
    for start in tl.range(0, T, N):
        j = start + tl.arange(0, N)
        if _any_seen(how, b, i, j):
            k = _rows(k_, strides[1], b, g, start, (width, T), N, K)
            v = _rows(v_, strides[2], b, g, start, (values, T), N, V)
            s, slope = _scores(tl.dot(q, tl.trans(k), input_precision="ieee"), numbers)
            found = _pairs(how, b, h, i[:, None], j[None, :])
            p = tl.exp(tl.where(found, s - lse[:, None], float("-inf")))
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            dp = _kept(dp, how, b, h, i[:, None], j[None, :])
            ds = p * (dp - sums[:, None]) * slope
            dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    _put(dq_, dq, strides[5], b, h, first, (width, S))


@_jit
def _backward_of_keys(arrays, strides, how, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    q_, k_, v_, do_, dk_, dv_, lse_, sums_ = arrays
    _, _, sizes, numbers = how
    H, G, S, T, width, values = sizes
    b, g, first, j = _own_rows(G, N)
    k = _rows(k_, strides[1], b, g, first, (width, T), N, K)
    v = _rows(v_, strides[2], b, g, first, (values, T), N, V)
    dk = tl.zeros((N, K), tl.float32)
    dv = tl.zeros((N, V), tl.float32)
    for r in range(0, H // G):
        h = g * (H // G) + r
        for start in tl.range(0, S, M):
            i = start + tl.arange(0, M)
            if _any_seen(how, b, i, j):
                q = _rows(q_, strides[0], b, h, start, (width, S), M, K)
                do = _rows(do_, strides[3], b, h, start, (values, S), M, V)
                at = b * strides[6][0] + h * strides[6][1] + i.to(tl.int64) * strides[6][2]
                lse = tl.load(lse_ + at, mask=i < S, other=0.0)
                lse = tl.where(lse == float("-inf"), 0.0, lse)
                at = b * strides[7][0] + h * strides[7][1] + i.to(tl.int64) * strides[7][2]
                sums = tl.load(sums_ + at, mask=i < S, other=0.0)
                s, slope = _scores(tl.dot(k, tl.trans(q), input_precision="ieee"), numbers)
                found = _pairs(how, b, h, i[None, :], j[:, None])
                p = tl.exp(tl.where(found, s - lse[None, :], float("-inf")))
                kept = _kept(p, how, b, h, i[None, :], j[:, None])
                dv += tl.dot(kept.to(do.dtype), do, input_precision="ieee")
                dp = tl.dot(v, tl.trans(do), input_precision="ieee")
                dp = _kept(dp, how, b, h, i[None, :], j[:, None])
                ds = p * (dp - sums[None, :]) * slope
                dk += tl.dot(ds.to(q.dtype), q, input_precision="ieee")
    _put(dk_, dk, strides[4], b, g, first, (width, T))
    _put(dv_, dv, strides[5], b, g, first, (values, T))
