"""Attention of a decoder: what a token sees, and over a sequence that `cp` splits which form it has."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fmegatron import nn
from fmegatron.collectives import Axis, axis_index, declare
from fmegatron.model.arrays import At

Context = Literal["ring", "balanced", "gathered", "ulysses"]
FORMS: tuple[Context, ...] = ("ring", "balanced", "gathered", "ulysses")


def attend(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    at: At,
    *,
    cp: Axis | None = None,
    form: Context | None = None,
    mask: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention `q[B, S, H, K], k, v[B, T, G, K] -> o[B, S, H, K]`; over cp to the keys of all its ranks.

    Args:
        q_BSHK: queries.
        k_BTGK: keys.
        v_BTGK: values.
        at: positions and documents of this rank's tokens.
        cp: what splits the sequence; None: nothing.
        form: over cp. "ring"; "balanced": a ring whose ranks have the sequence in the order of `nn.zigzag`; "gathered":
            of keys and values; "ulysses": heads exchanged for positions. None: "gathered" with softcap or sinks, which
            no other form can do, else "ring".
        mask: of who sees whom, without cp; None: as `at` states, and window.
        window: of positions; None: all before.
        scale: of q·k; None: 1 / sqrt(K).
        softcap: of the scores.
        sinks_H: a logit of each head (`nn.attention`).

    Raises ValueError for "balanced" over cp and tokens whose positions the batch does not have.
    """
    capped = softcap is not None or sinks_H is not None
    if cp is None or cp.size == 1:
        if mask is None and (at.documents is not None or at.positions.dim() > 1 or window is not None):
            mask = nn.visible(at.positions, at.positions, window, at.documents, at.documents)
        return nn.attention(q_BSHK, k_BTGK, v_BTGK, mask, scale=scale, softcap=softcap, sinks_H=sinks_H)
    if form == "balanced" and at.positions.dim() == 1:
        raise ValueError(
            "batch['positions']: got none, wanted int64 [B, S], since context='balanced' has the tokens in zigzag order"
            f"; give data.Batches(..., zigzag={cp.size}), which adds them, or choose context='ring'"
        )
    if scale is not None:  # the forms divide by sqrt(K)
        q_BSHK = q_BSHK * (scale * q_BSHK.shape[-1] ** 0.5)
    given = (q_BSHK, k_BTGK, v_BTGK, at.positions, at.documents, cp, window)
    if form == "gathered" or capped:
        return nn.gathered_attention(*given, softcap, sinks_H)
    if form == "ulysses":
        return nn.ulysses_attention(*given)
    return nn.ring_attention(*given, balanced=form == "balanced")


def positions_of(tokens_BS: Tensor, cp: Axis) -> Tensor:
    """int64 [S]: the positions of this rank's tokens, where cp splits the sequence in order."""
    S = tokens_BS.shape[1]
    positions_S = torch.arange(S, device=tokens_BS.device)
    if cp.size == 1:
        return positions_S
    return declare(positions_S + S * axis_index(cp, like=positions_S), cp, ("sharded", 0))


def require_form(form: Context | None, capped: bool, who: str) -> None:
    """ValueError for a form that there is not, or that cannot cap scores or hold sinks."""
    if form is not None and form not in FORMS:
        raise ValueError(f"{who}.context: got {form!r}, wanted one of {', '.join(FORMS)}")
    if capped and form not in (None, "gathered"):
        raise ValueError(f"{who}.context: got {form!r} with softcap or sinks, wanted 'gathered', which can do both")
