"""Mixture of experts: tokens go to the ranks that hold their experts, through these, and back.

A step's shapes are fixed, how many rows go where is data. Each rank sends a token at most once to another one, however
many of its experts are there; gates go with it, and what comes back is the gated sum over that rank's experts.

Legend: B batch, S sequence, T tokens of this rank, D width, K experts of a token, E experts, X = E/n experts of this
rank, n ranks of ep; A rows that leave, R rows that come, M rows of experts (a row that came, once for each expert), P
places for the rows from one rank to another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.collectives import all_to_all, axes, ops, psum
from fmegatron.collectives.ops import declare
from fmegatron.nn.routing import Routing
from fmegatron.tree import structure

__all__ = ["Apply", "dropless", "expert_weights", "most_rows", "with_capacity"]


class Apply(Protocol):
    """apply(w, x[M, D], ends[X], expert[M]) -> y[M, D]: this rank's experts on rows that are sorted by expert."""

    def __call__(self, w: structure.Tree, x_MD: Tensor, ends_X: Tensor, expert_M: Tensor, /) -> Tensor:
        """w: weights. ends: int32, where the rows of each expert end (`nn.grouped_matmul`). expert: of each
        row, in [0, X).

        Rows behind the last end are no tokens: their results are not used.
        """
        ...


def most_rows(tokens: int, ep: axes.Axis, top_k: int, experts: int) -> int:
    """Rows of experts that one rank has at most: all tokens of all ranks of ep choose as many of its experts as they
    can. tokens: of one rank."""
    return ep.size * tokens * min(top_k, experts // ep.size)


def expert_weights(w: structure.Tree, ep: axes.Axis, token_axes: axes.Axis) -> structure.Tree:
    """The weights of this rank's experts `w[X, ...]`, for rows of all ranks of ep: their gradient is complete over ep,
    and a pending sum over the other ones of the axes that split the tokens. Of a number for all
    experts it is such a sum over ep, too."""
    rest = token_axes.only(tuple(name for name in token_axes.names if name not in ep.names))

    def one(x: Tensor) -> Tensor:
        of_experts = declare(x, ep, backward=("sharded", 0) if x.dim() else "partial")
        return declare(of_experts, rest, backward="partial")

    return tree.map(one, w)


# ---- rows and their places -------------------------------------------------------------------------------------------
class _Index(NamedTuple):
    """Which row each of A places has, the places of each of N rows (-1: none), and how many places are in use: a
    number, or for places of equal parts [n A/n] as many numbers."""

    row_A: Tensor
    place_NC: Tensor
    used: Tensor


def _taken(x_ND: Tensor, index: _Index) -> Tensor:
    """`x[N, D] -> y[A, D]`, the row of each place. Places that are not in use hold any rows. Transpose: `_summed`."""
    return _Taken.apply(x_ND, *index)


def _summed(y_AD: Tensor, index: _Index) -> Tensor:
    """`y[A, D] -> x[N, D]`, for each row the sum over its places. Transpose: `_taken`, with zeros where none is."""
    return _Summed.apply(y_AD, *index)


class _Taken(torch.autograd.Function):
    # A pair of gathers: the transpose of an index is an addition at places, which is slow where these are many.
    @staticmethod
    def forward(ctx, x, *index):
        ctx.save_for_backward(*index)
        return x.index_select(0, index[0])

    @staticmethod
    def backward(ctx, g):
        return _summed(g, _Index(*ctx.saved_tensors)), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, *index):
        ctx.save_for_backward(*index)
        place_NC = index[1]
        found = y.index_select(0, place_NC.flatten().clamp(min=0)).unflatten(0, place_NC.shape)
        return torch.where((place_NC >= 0)[..., None], found, 0).sum(1)

    @staticmethod
    def backward(ctx, g):
        index = _Index(*ctx.saved_tensors)
        places = index.row_A.shape[0] // (index.used.shape[0] if index.used.dim() else 1)
        used_A = (torch.arange(places, device=g.device) < index.used[..., None]).flatten()
        return torch.where(used_A[:, None], _taken(g, index), 0), None, None, None


def _to_ranks(goes_Tn: Tensor, places: int) -> _Index:
    """Tokens sorted by destination, each once for every rank that it goes to."""
    T, n = goes_Tn.shape
    goes_F = goes_Tn.t().flatten()
    row_A = goes_F.logical_not().to(torch.int8).argsort(stable=True)[:places] % T
    place_F = torch.where(goes_F, goes_F.cumsum(0) - 1, -1)
    return _Index(row_A, place_F.view(n, T).t(), goes_F.sum())


def _to_ranks_in_parts(goes_Tn: Tensor, places: int) -> _Index:
    """As `_to_ranks`, with as many places for each destination, of which the first are in use."""
    goes_nT = goes_Tn.t()
    row_nP = goes_nT.logical_not().to(torch.int8).argsort(stable=True, dim=1)[:, :places]
    place_nT, first_n = goes_nT.cumsum(1) - 1, torch.arange(goes_nT.shape[0], device=goes_nT.device) * places
    place_nT = torch.where(goes_nT & (place_nT < places), place_nT + first_n[:, None], -1)
    return _Index(row_nP.flatten(), place_nT.t(), goes_Tn.sum(0).clamp(max=places))


def _to_experts(local_RK: Tensor, counts_X: Tensor, places: int) -> tuple[_Index, _Index]:
    """Rows sorted by expert, each once for every expert that it goes to, and the same of their choices [R K].

    local: 1 + this rank's expert, 0: none.
    """
    X, K = counts_X.shape[0], local_RK.shape[1]
    key_F = torch.where(local_RK > 0, local_RK - 1, X).flatten()
    order_F = key_F.argsort(stable=True)
    place_F = order_F.argsort()  # the inverse of a permutation
    place_F = torch.where((key_F < X) & (place_F < places), place_F, -1)
    used, choice_M = counts_X.sum(), order_F[:places]
    return _Index(choice_M // K, place_F.view(-1, K), used), _Index(choice_M, place_F[:, None], used)


# ---- dropless --------------------------------------------------------------------------------------------------------
def dropless(
    x_BSD: Tensor,
    routing: Routing,
    w: structure.Tree,
    apply: Apply,
    ep: axes.Axis,
    data: axes.Axis,
    sequence: axes.Axis,
    rows: int | None = None,
    chunks: int = 1,
    remat: Callable[[Callable], Callable] | None = None,
    pair_rows: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Every token through each expert that it chose -> (y[B, S, D], {"overflow", "sent"}), as x is sharded.

    y = Σ_k gate_k expert_k(x). The statistics are int64 terms of sums over data and sequence. overflow: rows for which
    there was no room; with any, y is NaN on all ranks, so that loss and gradients are, and the step is refused like
    every other that is not finite (`optim.skip_nonfinite`, `loop.nonfinite`). sent: rows given to the exchange, those
    for the rank itself included.

    Args:
        x_BSD: this rank's tokens, B split over data and S over sequence.
        routing: of each token the gates and experts [B, S, K] of its choices; the last dim of probs is E, all experts.
        w: the weights of this rank's experts, by `expert_weights`.
        apply: this rank's experts (`Apply`).
        ep: the axis that holds experts, made of axes of data and sequence.
        data: over which the batch is split.
        sequence: over which sequences are split; size 1 where they are not.
        rows: M, which a rank has room for, in one chunk; None: as many as there can be (`most_rows`).
        chunks: so many parts of a rank's tokens go one after the other: with n of them, room for the worst case is
            room for as many rows as all tokens have when they are balanced.
        remat: what makes of fn(x, weights, *rest) a function that computes it again in the backward (`step.remat`), so
            that the memory of a chunk is free when the next one begins; None: as it is.
        pair_rows: rows that a rank sends to another one, always as many, of which those that it has are read: then no
            count of rows is read on the host, which waits for a device of CUDA else, in each exchange. What has no room
            overflows. Of balanced tokens T K/n are enough, T tokens of a chunk always are. None: as many as there are.

    Raises ValueError where the experts cannot be shared out over ep, the chunks do not divide the tokens, or ep has
    axes that split no tokens.
    """
    gates_BSK, experts_BSK, experts = routing.gates, routing.experts, routing.probs.shape[-1]
    (B, S, D), K = x_BSD.shape, experts_BSK.shape[-1]
    _require_experts(experts, ep, data, sequence)
    if chunks < 1 or B * S % chunks:
        raise ValueError(f"dropless: got chunks={chunks} of {B * S} tokens of a rank, wanted a divisor of these")
    tokens = B * S // chunks
    most = most_rows(tokens, ep, K, experts)
    rows, pair_rows = most if rows is None else min(rows, most), None if ep.size == 1 else pair_rows
    x_BSD, gates_BSK, experts_BSK = (_own(v, data, sequence) for v in (x_BSD, gates_BSK, experts_BSK))
    parts = zip(*(v.reshape(B * S, -1).chunk(chunks) for v in (x_BSD, gates_BSK, experts_BSK)), strict=True)
    run = functools.partial(_one_chunk, apply=apply, experts=experts, ep=ep, rows=rows, pair_rows=pair_rows)
    run = run if remat is None else remat(run)
    found = [run(x_TD, {"gates": gates_TK, "w": w}, experts_TK) for x_TD, gates_TK, experts_TK in parts]
    y_BSD = _sharded(torch.cat([y_TD for y_TD, _, _ in found]).view(B, S, D), data, sequence)
    over, sent = (_terms(torch.stack(values).sum(), data, sequence) for values in list(zip(*found, strict=True))[1:])
    if rows < most or (pair_rows is not None and pair_rows < tokens):
        refused = psum(psum(over, data), sequence) > 0
        y_BSD = y_BSD * torch.where(refused, torch.nan, 1.0).to(y_BSD.dtype)
    return y_BSD, {"overflow": over, "sent": sent}


def _one_chunk(
    x_TD: Tensor,
    weights: dict,
    experts_TK: Tensor,
    *,
    apply: Apply,
    experts: int,
    ep: axes.Axis,
    rows: int,
    pair_rows: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y[T, D], rows for which there was no room, rows given to the exchange) of this rank's tokens."""
    (T, K), n, gates_TK = experts_TK.shape, ep.size, weights["gates"]
    X = experts // n
    if n == 1:
        y_TD, needed = _through(x_TD, gates_TK, experts_TK + 1, X, weights["w"], apply, rows)
        return y_TD, (needed - rows).clamp(min=0), torch.zeros_like(needed)
    rank_TK = experts_TK // X
    goes_Tn = (rank_TK[..., None] == torch.arange(n, device=x_TD.device)).any(1)
    send_n = goes_Tn.sum(0)
    if pair_rows is None:
        index, R = _to_ranks(goes_Tn, T * min(K, n)), min(rows, n * T)
        recv_n = all_to_all(send_n, ep, 0, 0)
        to_A = (torch.arange(index.row_A.shape[0], device=x_TD.device)[:, None] >= send_n.cumsum(0)).sum(1)
        late = recv_n.sum() - R
        exchange = functools.partial(ops.all_to_all_rows, send=send_n, recv=recv_n, axis=ep, rows=R)
        back = functools.partial(exchange, send=recv_n, recv=send_n, rows=index.row_A.shape[0])
    else:
        index = _to_ranks_in_parts(goes_Tn, P := min(pair_rows, T))
        to_A = torch.arange(n * P, device=x_TD.device) // P
        late = (send_n - P).clamp(min=0).sum()
        exchange = back = functools.partial(all_to_all, axis=ep, split_dim=0, concat_dim=0)
    there_AK = rank_TK.index_select(0, index.row_A) == to_A[:, None]
    local_AK = torch.where(there_AK, experts_TK.index_select(0, index.row_A) % X + 1, 0)
    gates_AK = torch.where(there_AK, _taken(gates_TK, index), 0)
    came_RD, gates_RK, local_RK = [exchange(v) for v in (_taken(x_TD, index), gates_AK, local_AK)]
    y_RD, needed = _through(came_RD, gates_RK, local_RK, X, weights["w"], apply, rows)
    return _summed(back(y_RD), index), torch.maximum(needed - rows, late).clamp(min=0), index.used.sum()


def _through(came_RD, gates_RK, local_RK, X, w, apply, rows):
    """(rows that came through their experts: the gated sum over these, rows of experts that this takes)."""
    counts_X = (local_RK.flatten()[:, None] == torch.arange(1, X + 1, device=came_RD.device)).sum(0)
    index, choices = _to_experts(local_RK, counts_X, rows)
    ends_X = counts_X.cumsum(0).clamp(max=rows).to(torch.int32)
    y_MD = apply(w, _taken(came_RD, index), ends_X, _expert_of_rows(ends_X, rows))
    return _summed(y_MD * _taken(gates_RK.reshape(-1, 1), choices).to(y_MD.dtype), index), counts_X.sum()


def _expert_of_rows(ends_X: Tensor, rows: int) -> Tensor:
    """The expert of each row; behind the last end the last one."""
    row_M = torch.arange(rows, device=ends_X.device)
    return (row_M[:, None] >= ends_X).sum(1).clamp(max=ends_X.shape[0] - 1)


# ---- capacity --------------------------------------------------------------------------------------------------------
def with_capacity(
    x_BSD: Tensor,
    routing: Routing,
    w: structure.Tree,
    apply: Apply,
    ep: axes.Axis,
    data: axes.Axis,
    capacity: int,
    room_B: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `dropless`, but an expert takes at most `capacity` tokens of a sequence, those with the largest gates.

    -> (y[B, S, D], {"dropped": int64 terms of a sum over data, choices that were dropped}). Each expert gets capacity
    rows of every sequence, padded; the same are dropped on every mesh. Source: GShard, arXiv 2006.16668, section 2.2.

    Args:
        x_BSD: this rank's tokens, B split over data, sequences in full.
        routing: of each token the gates [B, S, K], at least 0, and experts of its choices; the last dim of probs is E.
        w: the weights of this rank's experts, by `expert_weights`.
        apply: this rank's experts (`Apply`).
        ep: the axis that holds experts, made of axes of data.
        data: over which the batch is split.
        capacity: tokens of a sequence that an expert takes, such as ceil(1.25 S K / E); at most S.
        room_B: int64, the same of sequences of which a part is padding; None: capacity, of all.

    Raises ValueError as `dropless`, and for a capacity that is not from 1 to S.
    """
    gates_BSK, experts_BSK, experts = routing.gates, routing.experts, routing.probs.shape[-1]
    (B, S, D), n, C = x_BSD.shape, ep.size, capacity
    _require_experts(experts, ep, data, data.only(()))
    if not 1 <= C <= S:
        raise ValueError(f"with_capacity: got capacity={C}, wanted 1 to {S}, the tokens of a sequence")
    x_BSD, gates_BSK, experts_BSK = (declare(v, data, "own", 0) for v in (x_BSD, gates_BSK, experts_BSK))
    hot_BSKE = experts_BSK[..., None] == torch.arange(experts, device=x_BSD.device)
    gates_BSE = torch.where(hot_BSKE, gates_BSK[..., None], 0).sum(2)
    rank_BSE = torch.where(hot_BSKE.any(2), gates_BSE.detach(), -torch.inf)
    best_BCE, token_BCE = rank_BSE.topk(C, 1)
    taken_BCE = best_BCE >= 0
    if room_B is not None:
        place_C = torch.arange(C, device=x_BSD.device)
        taken_BCE = taken_BCE & (place_C < declare(room_B, data, "own", 0)[:, None])[..., None]
    gates_ER = torch.where(taken_BCE, gates_BSE.gather(1, token_BCE), 0).permute(2, 0, 1).flatten(1)
    token_BCE = token_BCE + S * torch.arange(B, device=x_BSD.device)[:, None, None]
    token_F = token_BCE.permute(2, 0, 1).flatten()
    there_ERD = x_BSD.flatten(0, 1).index_select(0, token_F).view(experts, B * C, D)
    came_MD = all_to_all(there_ERD, ep, 0, 1).flatten(0, 1)
    ends_X = torch.arange(1, experts // n + 1, device=x_BSD.device, dtype=torch.int32) * (n * B * C)
    y_MD = apply(w, came_MD, ends_X, _expert_of_rows(ends_X, came_MD.shape[0]))
    back_ERD = all_to_all(y_MD.view(experts // n, -1, D), ep, 1, 0)
    gated_FD = (back_ERD * gates_ER[..., None].to(back_ERD.dtype)).flatten(0, 1)
    y_BSD = gated_FD.new_zeros(B * S, D).index_add(0, token_F, gated_FD).view(B, S, D)
    dropped = (experts_BSK >= 0).sum() - taken_BCE.sum()
    return declare(y_BSD, data, ("sharded", 0)), {"dropped": declare(dropped, data, "partial")}


# ---- borders ---------------------------------------------------------------------------------------------------------
def _own(x_BS: Tensor, data: axes.Axis, sequence: axes.Axis) -> Tensor:
    return declare(declare(x_BS, data, "own", 0), sequence, "own", 1)


def _sharded(x_BS: Tensor, data: axes.Axis, sequence: axes.Axis) -> Tensor:
    return declare(declare(x_BS, data, ("sharded", 0)), sequence, ("sharded", 1))


def _terms(x: Tensor, data: axes.Axis, sequence: axes.Axis) -> Tensor:
    return declare(declare(x, data, "partial"), sequence, "partial")


def _require_experts(experts: int, ep: axes.Axis, data: axes.Axis, sequence: axes.Axis) -> None:
    if experts % ep.size:
        raise ValueError(
            f"moe: got {experts} experts over {ep} of size {ep.size}, wanted as many on each rank; choose an ep that "
            "divides them"
        )
    if others := [name for name in ep.names if name not in data.names + sequence.names]:
        raise ValueError(
            f"moe: got experts over {others[0]!r}, whose ranks all have the same tokens, wanted axes of data and "
            "sequence, or every row would be sent several times; name it among those of the data, Axes(mesh, data=...) "
            "and the strategy, or split the sequence over it (collectives.shard) first"
        )
