"""Random numbers of training inside of a decoder: dropout, jitter and noise, the same bits on every mesh.

A number depends on the key of the run, the token (its sample among all of the run, its document and its position), the
block, the part of the block and the feature. All of that is data or a constant, so no mask depends on a rank, on how
sequences are dealt, on microbatches, or on whether a block is computed again in the backward.
Legend: B batch, S sequence, D width, H heads of this rank, T keys, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fmegatron import nn, tree
from fmegatron.collectives import random_words, shard
from fmegatron.layout import Layout
from fmegatron.model.arrays import TokenContext
from fmegatron.nn import routing
from fmegatron.nn.tiled_attention import Dropped

__all__ = ["draws_of", "dropped", "dropping", "jittered", "noisy", "require_rate"]


def draws_of(
    samples_B: Tensor | None, positions: Tensor, documents_BS: Tensor | None, key: int, longest: int, depths: int
) -> Callable[[int], Tensor | None]:
    """depth -> `TokenContext.draws` of this rank's tokens, for each of so many depths; None without samples.

    Tokens of one row that have equal documents and positions draw equal numbers.

    Args:
        samples_B: int64, the number of each row among all rows of the run
        (`step.build_train_step(with_sample_ids=True)`). positions: int64 [S] or [B, S].
        documents_BS: int64; None: a row is one.
        key: of the run.
        longest: positions are below it.
        depths: how many.
    """
    if samples_B is None:
        return lambda depth: None
    within = positions if documents_BS is None else documents_BS * longest + positions
    first_BS, key = samples_B[:, None] * 2**32 + within * depths, tree.fold_in(key, "draws")
    return lambda depth: (first_BS + depth) ^ key


def dropped(x_BSD: Tensor, rate: float, name: str, at: TokenContext) -> Tensor:
    """x with dropout of its elements; x itself where nothing is drawn. name: of what it is, unique in a block."""
    if not rate or at.draws is None:
        return x_BSD
    return nn.dropout(x_BSD, rate, key=tree.fold_in(0, name), count=_own(at, x_BSD))


def jittered(u_BSD: Tensor, eps: float, at: TokenContext) -> Tensor:
    """A router's argument (`nn.jittered`); itself where nothing is drawn."""
    if not eps or at.draws is None:
        return u_BSD
    return routing.jittered(u_BSD, eps, key=tree.fold_in(0, "router jitter"), count=_own(at, u_BSD))


def noisy(logits_BSE: Tensor, std: float, at: TokenContext) -> Tensor:
    """A router's logits (`nn.noisy`); themselves where nothing is drawn."""
    if not std or at.draws is None:
        return logits_BSE
    return routing.noisy(logits_BSE, std, key=tree.fold_in(0, "router noise"), count=_own(at, logits_BSE))


def dropping(rate: float, at: TokenContext) -> Callable[[Tensor, Tensor], Dropped] | None:
    """`nn.attention(dropped=)`, of queries [B, S, H, K] and keys [B, T, G, K]: dropout of the weights p[B, S, H, T]
    with which this rank's heads read the keys, in order.

    Raises ValueError where cp splits the sequence: a rank of a ring never has all the keys of a query.
    """
    draws_BS, axes = at.draws, at.axes
    if not rate or draws_BS is None:
        return None
    if axes.sequence.size > 1:
        raise ValueError(
            f"Attention.dropout: got {rate} on the mesh {axes.mesh}, which splits sequences, wanted 0, since no rank "
            "has all keys of a query; set it to 0 (Part.dropout stays), or choose a mesh without cp"
        )
    tp = axes["tp"]

    def drop(q_BSHK: Tensor, k_BTGK: Tensor) -> Dropped:
        one_H = q_BSHK[0, 0, :, 0]
        heads_H = random_words.positions(
            one_H, Layout((one_H.shape[0] * tp.size,), one_H.dtype, axes.mesh, (tp.names,)), axes
        )
        words = random_words.beginnings(tree.fold_in(0, "attention"), "dropout", draws_BS)
        return Dropped(torch.cat([word[None] for word in words]), heads_H * k_BTGK.shape[1], rate)

    return drop


def require_rate(rate: float, field: str) -> None:
    """ValueError for what is no probability."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(f"{field}: got {rate!r}, wanted a probability from 0 to 1")


def _own(at: TokenContext, x_BSX: Tensor) -> Tensor:
    """`TokenContext.draws` of the tokens of x, which may be this tp rank's part of the sequence."""
    assert at.draws is not None
    return shard(at.draws, at.axes["tp"], 1) if at.splits(x_BSX) else at.draws
