"""Attention of a decoder over a sequence that `cp` splits: which form it has, and what each form can do."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fmegatron import nn
from fmegatron.collectives import Axis, all_gather, axis_index, declare
from fmegatron.model.arrays import At

Context = Literal["ring", "balanced", "gathered", "ulysses"]
FORMS: tuple[Context, ...] = ("ring", "balanced", "gathered", "ulysses")


def attend_over(
    form: Context,
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    at: At,
    cp: Axis,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Causal attention of the queries of this rank to the keys of all: `q[B, S_cp, H, K] -> o[B, S_cp, H, K]`.

    Args:
        form: "ring"; "balanced": a ring whose ranks have the sequence in the order of `nn.zigzag`; "gathered": of keys
            and values; "ulysses": heads exchanged for positions.
        q_BSHK: queries.
        k_BSGK: keys.
        v_BSGK: values.
        at: positions and documents of this rank's tokens.
        cp: what splits the sequence.
        window: of positions; None: all before.
        scale: of q·k; None: 1 / sqrt(K).

    Raises ValueError for "balanced" and tokens whose positions the batch does not have.
    """
    if form == "balanced" and at.positions.dim() == 1:
        raise ValueError(
            "batch['positions']: got none, wanted int64 [B, S], since context='balanced' has the tokens in zigzag order"
            f"; give data.Batches(..., zigzag={cp.size}), which adds them, or choose context='ring'"
        )
    if scale is not None:  # the forms divide by sqrt(K)
        q_BSHK = q_BSHK * (scale * q_BSHK.shape[-1] ** 0.5)
    given = (q_BSHK, k_BSGK, v_BSGK, at.positions, at.documents, cp, window)
    if form == "gathered":
        return nn.gathered_attention(*given)
    if form == "ulysses":
        return nn.ulysses_attention(*given)
    return nn.ring_attention(*given, balanced=form == "balanced")


def all_keys(k_BSGK: Tensor, v_BSGK: Tensor, at: At, cp: Axis) -> tuple[Tensor, Tensor, At]:
    """Keys, values, positions and documents of the full sequence."""
    documents = None if at.documents is None else all_gather(at.documents, cp, 1)
    full = At(all_gather(at.positions, cp, -1), documents)
    return all_gather(k_BSGK, cp, 1), all_gather(v_BSGK, cp, 1), full


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
