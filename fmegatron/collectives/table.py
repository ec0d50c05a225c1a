"""The table of collectives: one entry each, with the two local ops on the rank's index and on types (`declare`).

In the notation of the scaling book: `x[S_a]` is sharded over axis a on dim S, `x{U_a}` is a partial sum over a, no mark
is replicated. What a rank sends is what ring algorithms send, n - 1 of n parts of the full array (twice for sums).
"""

from __future__ import annotations

import functools
import math

import torch

from fmegatron.collectives import real
from fmegatron.collectives.kinds import REPLICATED, Collective, Own, Partial, Permuted, RankIndex, Sharded, Terms
from fmegatron.collectives.places import Place
from fmegatron.collectives.wires import wide

__all__ = ["ALL_GATHER", "ALL_TO_ALL", "ALL_TO_ALL_ROWS", "AXIS_INDEX", "COLLECTIVES", "DECLARE", "PMAX", "PPERMUTE"]
__all__ += ["CUT", "PSUM", "REDUCE_SCATTER"]


def _dtype_of_sum(x, exact):
    return wide(x.dtype) if exact else x.dtype


def _sum(xs, exact):
    return functools.reduce(torch.add, [x.to(_dtype_of_sum(x, exact)) for x in xs])


# x{U_a} -> x; the sum is used identically on all ranks, so its gradient is complete already
PSUM = Collective(
    "psum",
    "bool exact",
    type=lambda exact: (Partial("sum"), REPLICATED),
    result=lambda x, sizes, exact: x.new_empty(x.shape, dtype=_dtype_of_sum(x, exact)),
    real=real.psum,
    simulated=lambda xs, sizes, exact: [_sum(xs, exact)] * len(xs),
    transpose=lambda gs, axis, exact: gs,
    sent=lambda nbytes, n: 2 * (n - 1) * nbytes / n,
    functional="all_reduce",
)

# the elementwise maximum; no gradient passes
PMAX = Collective(
    "pmax",
    "",
    type=lambda: (Partial("max"), REPLICATED),
    real=lambda xs, group: [real.all_reduced(x, "max", group) for x in xs],
    simulated=lambda xs, sizes: [functools.reduce(torch.maximum, xs)] * len(xs),
    sent=PSUM.sent,
)

# x[S_a] -> x[S]
ALL_GATHER = Collective(
    "all_gather",
    "Place[] places",
    type=lambda place: (Sharded(place), REPLICATED),
    result=lambda x, sizes, place: x.new_empty(place.whole_shape(x.shape, sizes)),
    real=real.all_gather,
    simulated=lambda xs, sizes, place: [place.whole(torch.stack(xs), sizes).contiguous()] * len(xs),
    transpose=lambda gs, axis, places: REDUCE_SCATTER.emit(gs, axis, places, False),
    sent=lambda nbytes, n: (n - 1) * nbytes,
    functional="all_gather_into_tensor",
)

# x[S]{U_a} -> x[S_a]
REDUCE_SCATTER = Collective(
    "reduce_scatter",
    "Place[] places, bool exact",
    type=lambda place, exact: (Partial("sum"), Sharded(place)),
    result=lambda x, sizes, place, exact: x.new_empty(place.shard_shape(x.shape, sizes), dtype=_dtype_of_sum(x, exact)),
    real=real.reduce_scatter,
    simulated=lambda xs, sizes, place, exact: [
        piece.clone() for piece in place.pieces(_sum(xs, exact), sizes).unbind(0)
    ],
    transpose=lambda gs, axis, places, exact: ALL_GATHER.emit(gs, axis, places),
    sent=lambda nbytes, n: (n - 1) * nbytes / n,
    functional="reduce_scatter_tensor",
)


def _own_pieces(xs, sizes, place, indices):
    return [place.pieces(x, sizes)[int(index)].clone() for x, index in zip(xs, indices, strict=True)]


# x[S] -> x[S_a] by a place that pads: this rank's part of a replicated value, zeros behind it. index: `axis_index`, so
# that the graph does not depend on the rank
CUT = Collective(
    "cut",
    "Place[] places, Tensor index",
    type=lambda place, index: (REPLICATED, Sharded(place)),
    result=lambda x, sizes, place, index: x.new_empty(place.shard_shape(x.shape, sizes)),
    real=lambda xs, group, places, index: [
        place.pieces(x, group.sizes).index_select(0, index.view(1)).squeeze(0)
        for x, place in zip(xs, places, strict=True)
    ],
    simulated=_own_pieces,
    transpose=lambda gs, axis, places, index: ALL_GATHER.emit(gs, axis, places),
    sent=None,
)


def _exchanged_shape(x, sizes, split_dim, concat_dim):
    shape, n = list(x.shape), math.prod(sizes)
    shape[split_dim] //= n
    shape[concat_dim] *= n
    return x.new_empty(shape)


def _exchanged(xs, sizes, split_dim, concat_dim):
    parts = [x.chunk(len(xs), split_dim) for x in xs]
    return [torch.cat([part[i] for part in parts], concat_dim) for i in range(len(xs))]


# x[S, C_a] -> x[S_a, C]
ALL_TO_ALL = Collective(
    "all_to_all",
    "int[] split_dims, int[] concat_dims",
    type=lambda split, concat: (Sharded(Place((concat,))), Sharded(Place((split,)))),
    result=_exchanged_shape,
    real=real.all_to_all,
    simulated=_exchanged,
    transpose=lambda gs, axis, splits, concats: ALL_TO_ALL.emit(gs, axis, concats, splits),
    sent=REDUCE_SCATTER.sent,
    functional="all_to_all_single",
)


def _exchanged_rows(xs, sizes, sends, recvs, given, rows):
    for r, recv in enumerate(recvs):
        for s, send in enumerate(sends):
            if int(send[r]) != int(recv[s]):
                raise ValueError(
                    f"all_to_all_rows: got {int(recv[s])} rows that index {r} expects of index {s}, wanted the "
                    f"{int(send[r])} that it sends; exchange the counts: recv = all_to_all(send, axis, 0, 0)"
                )
    sent = []
    for x, send in zip(xs, sends, strict=True):
        total = int(send.sum())
        sent.append(real.filled_up(x, total)[:total].split(send.tolist()))
    return [real.filled_up(torch.cat([parts[r] for parts in sent]), rows)[:rows] for r in range(len(xs))]


# own rows [N, ...], sorted by destination, send[i] of them to index i -> own rows [rows, ...], sorted by source,
# recv[i] of them from index i, then zeros. Rows that do not fit are not there. What comes back of rows that were not
# there is zeros. given: N
ALL_TO_ALL_ROWS = Collective(
    "all_to_all_rows",
    "Tensor send, Tensor recv, int given, int rows",
    type=lambda send, recv, given, rows: (Own(), Own()),
    result=lambda x, sizes, send, recv, given, rows: x.new_empty((rows, *x.shape[1:])),
    real=real.all_to_all_rows,
    simulated=_exchanged_rows,
    transpose=lambda gs, axis, send, recv, given, rows: ALL_TO_ALL_ROWS.emit(gs, axis, recv, send, rows, given),
    sent=REDUCE_SCATTER.sent,
)

# rank i has the value of rank i - shift
PPERMUTE = Collective(
    "ppermute",
    "int shift",
    type=lambda shift: (None, Permuted()),
    real=real.ppermute,
    simulated=lambda xs, sizes, shift: [xs[(i - shift) % len(xs)].clone() for i in range(len(xs))],
    transpose=lambda gs, axis, shift: PPERMUTE.emit(gs, axis, -shift),
    sent=lambda nbytes, n: nbytes,
)

# the rank's position along the axes, a number on the device of the tensor; lowering makes it an input of the graph
AXIS_INDEX = Collective(
    "axis_index",
    "",
    type=lambda: (None, RankIndex()),
    result=lambda like, sizes: like.new_empty((), dtype=torch.int64),
    real=lambda likes, group: [torch.full((), group.index, dtype=torch.int64, device=x.device) for x in likes],
    simulated=lambda likes, sizes: [torch.tensor(i, device=x.device) for i, x in enumerate(likes)],
    sent=None,
)


def _declared(kind, dim):
    stated = {"own": Own(), "partial": Partial("sum"), "replicated": REPLICATED, "sharded": Sharded(Place((dim,))),
              "terms": Terms(False, bool(dim)), "terms of": Terms(True, bool(dim))}  # fmt: skip
    return None, stated[kind]


# x -> x, and a statement about it
DECLARE = Collective(
    "declare",
    "str kind, int dim",
    type=_declared,
    result=lambda x, sizes, kind, dim: x.new_empty_strided(x.shape, x.stride()),  # x itself: no copy, no other strides
    real=lambda xs, group, kind, dim: xs,
    simulated=lambda xs, sizes, kind, dim: xs,
    sent=None,
)

COLLECTIVES = (PSUM, PMAX, ALL_GATHER, REDUCE_SCATTER, CUT, ALL_TO_ALL, ALL_TO_ALL_ROWS, PPERMUTE, AXIS_INDEX, DECLARE)
