"""Vocabulary-parallel lookup.  Legend: B batch, S sequence, V vocabulary rows, D model width."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron.collectives import axes, axis_index, ops, psum, reduce_scatter, shard
from fmegatron.nn.weight import Weight, dense


def local_ids(ids: Tensor, rows: int, tp: axes.Axis) -> Tensor:
    """Vocabulary ids as this rank counts them: 0 .. rows-1 are its own, everything else another rank's (any shape)."""
    return ids if tp.size == 1 else ids - axis_index(tp, like=ids) * rows


def embed(
    tokens_BS: Tensor,
    table_VD: Weight,
    tp: axes.Axis,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
) -> Tensor:
    """Rows of a table that is split over tp by vocabulary: each rank looks up its own rows, the others add zero.

    `tokens[B, S]@R(tp), table[V_tp, D] -> x[B, S, D]@R(tp)`; with sequence_parallel `-> x[B, S_tp, D]`.
    Transpose: dx arrives replicated (psum: identity; reduce_scatter: all_gather), and each rank adds the rows it owns
    into its own part of the table's gradient, complete.
    vocab_size: rows of all ranks that are no padding of the table; None: all. An id outside of them gives NaN, on every
    mesh.
    """
    table_VD = dense(table_VD)
    rows = table_VD.shape[0]
    known_BS = (tokens_BS >= 0) & (tokens_BS < (vocab_size or rows * tp.size))
    outside_BS1 = torch.where(known_BS, 0.0, torch.nan).to(table_VD.dtype)[..., None]
    if tp.size == 1:
        return F.embedding(tokens_BS.clamp(0, rows - 1), table_VD) + outside_BS1
    ids_BS = local_ids(tokens_BS, rows, tp)
    own_BS = (ids_BS >= 0) & (ids_BS < rows)
    # Ids differ by rank on purpose: what the lookup's transpose makes is this rank's rows of the table's gradient.
    table_VD = ops.declare(table_VD, tp, backward=("sharded", 0))
    x_BSD = F.embedding(ids_BS.clamp(0, rows - 1), table_VD) * own_BS[..., None].to(table_VD.dtype) + outside_BS1
    x_BSD = ops.declare(x_BSD, tp, forward="partial")  # exactly one rank is not zero
    return reduce_scatter(x_BSD, tp, 1) if sequence_parallel else psum(x_BSD, tp)


def positions(positions_S: Tensor, table_TD: Weight, tp: axes.Axis, sequence_parallel: bool = False) -> Tensor:
    """Rows of a table of learned positions that every rank has: `positions[S], table[T, D] -> x[S, D]@R(tp)`.

    With sequence_parallel `-> x[S_tp, D]`, and [B, S_tp, D] of positions [B, S]. Transpose: the gradient arrives
    replicated (of a part of the sequence: all_gather makes it full), so the table's is complete.
    """
    x_SD = F.embedding(positions_S, dense(table_TD))
    return shard(x_SD, tp, -2) if sequence_parallel else x_SD
