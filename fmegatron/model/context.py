"""Attention of a decoder: what a token sees, and over a sequence that `cp` splits which form it has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from fmegatron import nn
from fmegatron.collectives import axes, axis_index, ops
from fmegatron.model.arrays import TokenContext
from fmegatron.model.draws import dropping
from fmegatron.model.mixer import Order, Slots
from fmegatron.nn import context_parallel

Context = Literal["ring", "balanced", "gathered", "ulysses", "two_level", "two_level_balanced"]
FORMS: tuple[Context, ...] = get_args(Context)
DEALT: tuple[Context, ...] = ("balanced", "two_level_balanced")  # of sequences in the order of `nn.zigzag`


def attention_of(
    at: TokenContext,
    *,
    form: Context | None = None,
    mask: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    dropout: float = 0.0,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of these tokens, a function of queries, keys and values of this rank's heads:
    `q[B, S, H, K], k, v[B, T, G, K] -> o[B, S, H, K]`; over cp to the keys of all its ranks.

    Args:
        at: positions and documents of this rank's tokens, and the axes, of which cp (and cpi) split the sequence.
        form: over cp. "ring"; "balanced": a ring whose ranks have the sequence in the order of `nn.zigzag`; "gathered":
            of keys and values; "ulysses": heads exchanged for positions. Over cp and inside of it cpi, one for fast
            links: "two_level": heads exchanged over cpi, a ring over cp; "two_level_balanced": the same, in the order
            of `nn.zigzag` for the ranks of cp. The other forms take both axes as one. None: "ring".
        mask: of who sees whom, without cp; None: as `at` states, and window.
        window: of positions; None: all before.
        scale: of q·k; None: 1 / sqrt(K).
        softcap: of the scores.
        sinks_H: a logit of each head (`nn.attention`).
        dropout: of the softmax, where `at` has draws (`dropping`).

    Raises ValueError for a balanced form over cp and tokens whose positions the batch does not have, and for dropout
    over cp.
    """
    axes, drop = at.axes, dropping(dropout, at)
    if axes.sequence.size == 1:
        seen = seen_by(at, window) if mask is None else mask
        how = {"mask_ST": seen, "scale": scale, "softcap": softcap, "sinks_H": sinks_H}
        if drop is None:
            return functools.partial(nn.attention, **how)
        return lambda q, k, v: nn.attention(q, k, v, **how, dropped=drop(q, k))
    cp, balanced = axes.sequence, form in DEALT
    dealt = (axes["cp"] if form == "two_level_balanced" else cp).size
    if balanced and dealt > 1 and at.positions.dim() == 1:
        raise ValueError(
            f"batch['positions']: got none, wanted int64 [B, S], since context={form!r} has the tokens in zigzag order"
            f"; give data.Batches(..., zigzag={dealt}), which adds them, or choose context='ring'"
        )
    causal = nn.Causal(at.positions, at.documents, window, balanced)
    over: Callable[..., Tensor]
    if form == "gathered":
        over = functools.partial(context_parallel.gathered_attention, cp=cp)
    elif form == "ulysses":
        over = functools.partial(context_parallel.ulysses_attention, cp=cp, tp=axes["tp"])
    elif form in ("two_level", "two_level_balanced"):
        over = functools.partial(context_parallel.two_level_attention, axes=axes)
    else:
        over = functools.partial(nn.ring_attention, cp=cp)
    over = functools.partial(over, causal=causal, softcap=softcap, sinks_H=sinks_H)
    if scale is None:
        return over
    return lambda q, k, v: over(q * (scale * q.shape[-1] ** 0.5), k, v)  # the forms divide by sqrt(K)


def seen_by(at: TokenContext, window: int | None) -> nn.Causal | None:
    """What the tokens of a rank see of each other; None: each all before it."""
    if at.documents is None and at.positions.dim() == 1 and window is None:
        return None
    return nn.Causal(at.positions, at.documents, window)


def remembered(
    k_BSGK: Tensor, v_BSGK: Tensor, cache: dict | None, slots: Slots | None, window: int | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """(the cache with keys and values of these tokens, the mask of who sees whom in it): of `Mixer.read`.

    Without a cache what comes back are the keys and values themselves, and no mask: `attention_of` makes it.
    """
    if cache is None or slots is None:
        return {"k": k_BSGK, "v": v_BSGK}, None
    found = {name: cache[name].index_copy(1, slots.slots, new) for name, new in (("k", k_BSGK), ("v", v_BSGK))}
    return found, slots.visible(found["k"].shape[1], window)


def longer(one: dict, rows: int, slots: int) -> dict[str, Tensor]:
    """`Mixer.new_cache` of keys and values: zeros [rows, slots, G, K]."""
    return {name: x.new_zeros((rows, slots, *x.shape[2:])) for name, x in one.items()}


def joined(o_BSHK: Tensor, cache: dict | None) -> Tensor:
    """What the heads read, [B, S, H, K], as the output's projection takes it."""
    if cache is not None and o_BSHK.shape[1] == 1:
        # Of one token the dim S is left with the stride of heads, which matmul takes for a batch of products (bmm with
        # a copy of the weights for each row); squeezed and put back it has its own.
        return o_BSHK.squeeze(1).unsqueeze(1)
    return o_BSHK


def positions_of(tokens_BS: Tensor, cp: axes.Axis) -> Tensor:
    """int64 [S]: the positions of this rank's tokens, where cp splits the sequence in order."""
    S = tokens_BS.shape[1]
    positions_S = torch.arange(S, device=tokens_BS.device)
    if cp.size == 1:
        return positions_S
    return ops.declare(positions_S + S * axis_index(cp, like=positions_S), cp, ("sharded", 0))


def order_of(form: Context | None) -> Order:
    """`Mixer.order` of an attention of this form."""
    return "zigzag" if form in DEALT else "any"


def require_form(form: Context | None, who: str) -> None:
    """ValueError for a form that there is not."""
    if form is not None and form not in FORMS:
        raise ValueError(f"{who}.context: got {form!r}, wanted one of {', '.join(FORMS)}")
