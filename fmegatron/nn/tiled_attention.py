"""Attention by tiles, one operator forward and one backward: of any mask, cap and dropout, and no scores are kept.

Legend: B batch, S queries, T keys, H/G query/kv heads, K, V widths of keys and values. Heads stand before positions.
Who sees whom is made from positions and documents tile by tile, so nothing of the size [S, T] is ever in memory but one
tile. On CUDA the operator is the kernels of `tiled_kernels`; elsewhere, and of fp64, it is a walk over tiles in torch,
with the kernel of the CPU for those that it knows. Both leave out tiles of which no pair is seen, by one rule.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import flop_counter

from fmegatron.collectives import random_words
from fmegatron.nn.attention_masks import Sight, soft_cap, visible
from fmegatron.nn.torch_private import flash_on_cpu, flash_on_cpu_backward

__all__ = [
    "Dropped",
    "Given",
    "additive",
    "finite",
    "launches",
    "merged",
    "of_queries",
    "scratch",
    "tiled",
    "tiled_backward",
    "wide",
]

_TILE = 1024  # queries and keys of a tile where torch walks
_REST = (
    "Tensor? attn_mask, Tensor? at_query, Tensor? at_key, bool is_causal, int? window, float? softcap, "
    "Tensor? words, Tensor? first_of_heads, float rate"
)


class Dropped(NamedTuple):
    """Keyed dropout of the softmax p[B, S, H, T], as `nn.dropout` has it.

    words: int64 [2, B, S], what the words of each query begin with (`random_words.beginnings`). first_of_heads: int64
    [H], h·T of the number h that each head of this rank has among all. rate: probability of 0.
    """

    words: Tensor
    first_of_heads: Tensor
    rate: float


class Given(NamedTuple):
    """What the operators are given, in the order of their schemas."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    at_q: Tensor | None
    at_k: Tensor | None
    causal: bool
    window: int | None
    softcap: float | None
    words: Tensor | None
    first_of_heads: Tensor | None
    rate: float

    @property
    def at(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Positions of queries and of keys, documents of queries and of keys, each [1 | B, ..]."""
        if self.at_q is None or self.at_k is None:
            return None, None, None, None
        in_q, in_k = (x[1] if x.shape[0] == 2 else None for x in (self.at_q, self.at_k))
        return self.at_q[0], self.at_k[0], in_q, in_k


def tiled(
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    seen: Tensor | Sight | None,
    causal: bool,
    softcap: float | None = None,
    dropped: Dropped | None = None,
) -> tuple[Tensor, Tensor]:
    """(o[B, H, S, V], lse[B, H, S]): o in the dtype of v, lse wide; no gradient.

    Args:
        q_BHSK: queries.
        k_BGTK: keys.
        v_BGTV: values.
        seen: bool, broadcast to [B, H, S, T], or what it is made of; None: all, but for what `causal` hides.
        causal: whether query s sees keys 0 to s.
        softcap: of the scores.
        dropped: of the softmax.
    """
    return torch.ops.fmegatron_nn.tiled_attention(q_BHSK, k_BGTK, v_BGTV, *_rest(seen, causal, softcap, dropped))


def tiled_backward(
    given: tuple[Tensor, Tensor, Tensor],
    out: tuple[Tensor, Tensor, Tensor],
    seen: Tensor | Sight | None,
    causal: bool,
    softcap: float | None = None,
    dropped: Dropped | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), as q, k and v are.

    Args:
        given: (q, k, v) of `tiled`.
        out: (gradient of o, o, lse): o and lse of `tiled`, or of attention to more keys.
        seen: as of `tiled`.
        causal: as of `tiled`.
        softcap: as of `tiled`.
        dropped: as of `tiled`.
    """
    do, o, lse = out
    rest = _rest(seen, causal, softcap, dropped)
    return torch.ops.fmegatron_nn.tiled_attention_backward(do, *given, o, lse, *rest)


def merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two attentions (o, lse) of the same queries to different keys as one; o as wide as the log-sum-exp."""
    (o, lse), (o2, lse2) = first, second
    both = torch.logaddexp(lse, lse2)
    safe = finite(both)
    a, b = ((x - safe).exp()[..., None] for x in (lse, lse2))
    return o.to(both.dtype) * a + o2.to(both.dtype) * b, both


def of_queries(x_BGTK: Tensor, q: Tensor) -> Tensor:
    """Heads of keys [B, G, T, K] as often as queries [B, H, S, K] use them: [B, H, T, K]."""
    return x_BGTK.repeat_interleave(q.shape[1] // x_BGTK.shape[1], 1)


def wide(x: Tensor) -> Tensor:
    """In fp32, or fp64 of fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def finite(lse: Tensor) -> Tensor:
    """The log-sum-exp, 0 where nothing is seen: exp(-inf - 0) is 0, exp(-inf - -inf) is not a number."""
    return torch.where(lse == -math.inf, 0.0, lse)


def additive(q: Tensor, mask: Tensor | None) -> Tensor | None:
    """A mask as torch's kernels take it: added to the scores, in the dtype of q."""
    return None if mask is None else torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)


def _rest(seen: Tensor | Sight | None, causal: bool, softcap: float | None, dropped: Dropped | None) -> tuple:
    """The arguments behind queries, keys and values."""
    if isinstance(seen, Sight):
        who = (None, seen.at_queries, seen.at_keys, causal, seen.window)
    else:
        who = (seen, None, None, causal, None)
    return *who, softcap, *((None, None, 0.0) if dropped is None else dropped)


# ---- the walk --------------------------------------------------------------------------------------------------------
class _Tile(NamedTuple):
    """Queries and keys of a tile, and which of its pairs are seen: bool, broadcast to [B, H, s, t]; None: all."""

    rows: slice
    keys: slice
    mask: Tensor | None


def _tiles(given: Given) -> Iterator[tuple[slice, Iterator[_Tile]]]:
    """Queries, and their tiles of which a pair may be seen."""
    S, T = given.q.shape[2], given.k.shape[2]
    rows, keys = ([slice(n, min(n + _TILE, size)) for n in range(0, size, _TILE)] for size in (S, T))
    for row, may in zip(rows, _may_be_seen(given, rows, keys), strict=True):
        some = [key for key, one in zip(keys, may, strict=True) if one]
        yield row, (_Tile(row, key, _mask_of(given, row, key)) for key in some)


def _may_be_seen(given: Given, rows: list[slice], keys: list[slice]) -> list[list[bool]]:
    """Of each tile, by the least and the largest position and document of its queries and of its keys; numbers of
    another device than the CPU are not waited for."""
    found = [[not given.causal or key.start < row.stop for key in keys] for row in rows]
    at_q, at_k, in_q, in_k = given.at
    if at_q is None or at_k is None or at_q.device.type != "cpu":
        return found

    def ends(x: Tensor, parts: list[slice]) -> tuple[Tensor, Tensor]:
        return torch.stack([x[:, p].amin(1) for p in parts]), torch.stack([x[:, p].amax(1) for p in parts])

    (low, high), (least, most) = ends(at_q, rows), ends(at_k, keys)
    seen = high[:, None] >= least
    if given.window is not None:
        seen = seen & (low[:, None] - most < given.window)
    if in_q is not None and in_k is not None:
        (low, high), (least, most) = ends(in_q, rows), ends(in_k, keys)
        seen = seen & (high[:, None] >= least) & (low[:, None] <= most)
    by_numbers = seen.any(-1).tolist()
    return [[a and b for a, b in zip(*pair, strict=True)] for pair in zip(found, by_numbers, strict=True)]


def _mask_of(given: Given, rows: slice, keys: slice) -> Tensor | None:
    """Which pairs of a tile are seen."""
    found = []
    if given.causal and keys.stop - 1 > rows.start:
        i, j = (torch.arange(part.start, part.stop, device=given.q.device) for part in (rows, keys))
        found.append(i[:, None] >= j)
    at_q, at_k, in_q, in_k = given.at
    if at_q is not None and at_k is not None:
        in_q, in_k = (None if x is None else x[:, p] for x, p in ((in_q, rows), (in_k, keys)))
        found.append(visible(at_q[:, rows], at_k[:, keys], given.window, in_q, in_k)[:, None])
    if given.mask is not None:
        S, T = given.q.shape[2], given.k.shape[2]
        found.append(given.mask.expand(*given.mask.shape[:-2], S, T)[..., rows, keys])
    return functools.reduce(torch.bitwise_and, found) if found else None


def _walk(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = Given(*arguments)
    o_BHSV, lse_BHS = _results(given)
    for rows, tiles in _tiles(given):
        found = None
        for tile in tiles:
            more = _of_tile(given, tile)
            found = more if found is None else merged(found, more)
        o_BHSV[:, :, rows], lse_BHS[:, :, rows] = (0.0, -math.inf) if found is None else found
    return o_BHSV, lse_BHS


def _walk_back(do_BHSV: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o_BHSV, lse_BHS, *rest = arguments
    given = Given(q, k, v, *rest)
    sums = [torch.zeros_like(wide(x)) for x in (q, k, v)]
    dq, dk, dv = sums
    for rows, tiles in _tiles(given):
        out = tuple(x[:, :, rows] for x in (do_BHSV, o_BHSV, finite(lse_BHS)))
        for tile in tiles:
            found = _of_tile_backward(given, tile, out)
            for whole, part, more in zip((dq, dk, dv), (rows, tile.keys, tile.keys), found, strict=True):
                whole[:, :, part] += more
    found = _gradients(given)
    for x, total in zip(found, sums, strict=True):
        x.copy_(total)
    return found


def scratch(arguments: Sequence[Any]) -> int:
    """Bytes that the walk takes beside its results: of one tile its mask, and scores where no kernel computes it; of
    the backward sums of gradients.

    arguments: of an operator; those of the backward are three more.
    """
    back = len(arguments) > len(Given._fields)
    given = Given(*([*arguments[1:4], *arguments[6:]] if back else arguments))
    (B, H, S, _), T = given.q.shape, given.k.shape[2]
    pairs, item, of_wide = B * min(S, _TILE) * min(T, _TILE), given.q.element_size(), max(4, given.q.element_size())
    by_kernel = _by_kernel(given)
    mask = 8 + 3 + (item if by_kernel else 0) if given.at_q is not None else 3 + (item if by_kernel else 0)
    scores = 0 if by_kernel else H * (5 if back else 3) * of_wide
    sums = of_wide * sum(x.numel() for x in given[:3]) if back else 0
    return pairs * (mask + scores) + sums


def _by_kernel(given: Given) -> bool:
    """Whether the CPU's kernel knows a tile."""
    return (
        given.q.device.type == "cpu"
        and given.q.shape[-1] == given.v.shape[-1]
        and given.softcap is None
        and given.words is None
        and given.q.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    )


def _of_tile(given: Given, tile: _Tile) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention to the keys of a tile, normalised within it; a row that sees none has 0 and -inf."""
    q, k, v = given.q[:, :, tile.rows], given.k[:, :, tile.keys], given.v[:, :, tile.keys]
    if _by_kernel(given):
        o, lse = flash_on_cpu(q, k, v, False, additive(q, tile.mask))
        return o, lse if tile.mask is None else lse.masked_fill(~tile.mask.any(-1), -math.inf)
    s = _masked(_scores(given, q @ of_queries(k, q).mT), tile.mask)
    lse = s.logsumexp(-1)
    p = _kept(given, tile, (s - finite(lse)[..., None]).exp())
    return p.to(v.dtype) @ of_queries(v, q), lse


def _of_tile_backward(given: Given, tile: _Tile, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(dq, dk, dv) through a tile, given (do, o, finite lse) of attention to all keys."""
    q, k, v = given.q[:, :, tile.rows], given.k[:, :, tile.keys], given.v[:, :, tile.keys]
    do, o, lse = out
    do = do.to(q.dtype)
    if _by_kernel(given):
        return flash_on_cpu_backward(do, q, k, v, o.to(q.dtype), lse, False, additive(q, tile.mask))
    k_of, v_of = of_queries(k, q), of_queries(v, q)
    s = _scores(given, q @ k_of.mT)
    p = (_masked(s, tile.mask) - lse[..., None]).exp()
    dp = _kept(given, tile, wide(do @ v_of.mT)) - wide(do * o).sum(-1, keepdim=True)
    ds = p * dp * q.shape[-1] ** -0.5
    if given.softcap is not None:
        ds = ds * (1 - (s / given.softcap).square())  # of cap tanh(x / cap)
    ds = ds.to(q.dtype)
    dv = _kept(given, tile, p).to(q.dtype).mT @ do
    return ds @ k_of, _of_keys(ds.mT @ q, k), _of_keys(dv, v)


def _scores(given: Given, products: Tensor) -> Tensor:
    scores = wide(products) * given.q.shape[-1] ** -0.5
    return scores if given.softcap is None else soft_cap(scores, given.softcap)


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _kept(given: Given, tile: _Tile, p: Tensor) -> Tensor:
    """With dropout."""
    if given.words is None or given.first_of_heads is None:
        return p
    first, second = (x[:, None, tile.rows, None] for x in given.words)
    at = given.first_of_heads[:, None, None] + torch.arange(tile.keys.start, tile.keys.stop, device=p.device)
    dropped = random_words.word_at(at, first, second) < round(given.rate * 2**32)
    return torch.where(dropped, 0, p * (1 / (1 - given.rate) if given.rate < 1 else 0))


def _of_keys(x_BHTK: Tensor, k: Tensor) -> Tensor:
    """The sum over the heads of queries that use a head of keys."""
    return x_BHTK.unflatten(1, (k.shape[1], -1)).sum(2)


# ---- the operators ---------------------------------------------------------------------------------------------------
def _laid(like: Tensor, heads: int, rows: int, width: int) -> Tensor:
    """[B, heads, rows, width], whose memory has positions before heads, as its readers want it."""
    return like.new_empty(like.shape[0], rows, heads, width).transpose(1, 2)


def _results(given: Given) -> tuple[Tensor, Tensor]:
    """Memory for output and log-sum-exp."""
    (B, H, S, _), q = given.q.shape, given.q
    lse = q.new_empty(B, H, S, dtype=torch.promote_types(q.dtype, torch.float32))
    return _laid(given.v, H, S, given.v.shape[-1]), lse


def _gradients(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for gradients."""
    dq, dk, dv = (_laid(x, *x.shape[1:]) for x in (given.q, given.k, given.v))
    return dq, dk, dv


def _shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _results(Given(*arguments))


def _shapes_back(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any):
    return _gradients(Given(q, k, v, *rest))


def launches(arguments: Sequence[Any], results: Sequence[Tensor]) -> list[Any]:
    """What computes the results of a call of an operator into their memory, on CUDA: `tiled_kernels.Launch`es.

    arguments: of the operator; of the backward, whose results are three, with those of the forward between.
    Raises RuntimeError without triton, and for fp64, which no kernel is for.
    """
    kernels = importlib.import_module("fmegatron.nn.tiled_kernels")  # and triton, which a CPU does not need
    if not kernels.has_triton():
        raise RuntimeError(
            "attention with masks, caps or dropout on CUDA: got no triton, wanted it, as its kernels are written in "
            "it; pip install triton, of the release that this torch is built for"
        )
    if len(results) == 2:
        return kernels.forward(Given(*arguments), *results)
    do, q, k, v, o, lse, *rest = arguments
    return kernels.backward(Given(q, k, v, *rest), (do, o, lse), tuple(results), torch.empty_like(lse))


def _on_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = Given(*arguments)
    return _walk(*arguments) if given.q.dtype == torch.float64 else _launched(arguments, _results(given))


def _back_on_cuda(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any):
    arguments = (do, q, k, v, o, lse, *rest)
    if q.dtype == torch.float64:
        return _walk_back(*arguments)
    return _launched(arguments, _gradients(Given(q, k, v, *rest)))


def _launched(arguments: Sequence[Any], results: Any) -> Any:
    for one in launches(arguments, results):
        one.kernel[one.grid](*one.arguments, **one.settings)
    return results


def _flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Of all pairs, as torch counts its own kernels."""
    (B, H, S, K), (T, V) = q, v[-2:]
    return 2 * B * H * S * T * (K + V)


def _flops_back(do: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Scores once more, and four products."""
    (B, H, S, K), (T, V) = q, v[-2:]
    return 2 * B * H * S * T * (3 * K + 2 * V)


def _define_ops() -> torch.library.Library:
    library = torch.library.Library("fmegatron_nn", "FRAGMENT")
    qkv = "Tensor query, Tensor key, Tensor value, "
    library.define(f"tiled_attention({qkv}{_REST}) -> (Tensor, Tensor)")
    library.define(
        f"tiled_attention_backward(Tensor grad_out, {qkv}Tensor out, Tensor logsumexp, {_REST}) "
        "-> (Tensor, Tensor, Tensor)"
    )
    both: tuple[tuple[str, Any, Any, Any, Any], ...] = (
        ("tiled_attention", _walk, _on_cuda, _shapes, _flops),
        ("tiled_attention_backward", _walk_back, _back_on_cuda, _shapes_back, _flops_back),
    )
    for name, walk, on_cuda, shapes, flops in both:
        library.impl(name, walk, "CompositeExplicitAutograd")
        library.impl(name, on_cuda, "CUDA")
        library.impl(name, shapes, "Meta")
        counted: Any = flop_counter.register_flop_formula(getattr(torch.ops.fmegatron_nn, name))
        counted(flops)
    return library


_LIBRARY = _define_ops()
