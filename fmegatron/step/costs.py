"""The cost model of a strategy on each rank, from layouts: bytes of state, and a lower bound of bytes sent.

Nothing is traced and no rank is asked; `collectives_of` counts what a graph really sends, tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fmegatron import optim, tree
from fmegatron.layout import DataParallel, Layout
from fmegatron.step.state import placements, state_specs

__all__ = ["StateBytes", "Traffic", "least_traffic", "state_bytes"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank: parameters at rest, gradients while they are accumulated, the optimizer's full state."""

    params: int
    grads: int
    optim: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step: to gather parameters for use, to reduce gradients, to gather the update."""

    gather: int
    reduce: int
    update: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.gather + self.reduce + self.update


def state_bytes(
    param_specs: tree.Tree,
    optimizer: optim.Optimizer,
    strategy: DataParallel,
    rank: int = 0,
    accumulate: torch.dtype = torch.float32,
) -> StateBytes:
    """Bytes of each kind of state on a rank, from layouts alone; full bytes / ranks where everything divides.

    Args:
        param_specs: as the model places parameters at rest under `strategy`.
        optimizer: whose state is counted.
        strategy: how gradients and that state are sharded.
        rank: whose bytes.
        accumulate: dtype of gradients between microbatches (wider ones keep theirs); only leaves that the optimizer
            trains have any.

        kind        ZeRO-0   1        2        3        HSDP      hybrid
        params      W        W        W        W/n      W/inner   W/inner
        grads       G        G        G/n      G/n      G/inner   G/inner
        optim       S        S/n      S/n      S/n      S/inner   S/(inner·outer)

    n: extent of the data axes. W, G, S: bytes of the full arrays (over tp, of this rank's part of them).
    Source: Megatron-FSDP's `--data-parallel-sharding-strategy`.
    """
    state = tree.layouts(state_specs(param_specs, optimizer, strategy))
    grads = placements(state.params, strategy).grads
    trained = [g for path, g in zip(tree.paths(grads), tree.leaves(grads), strict=True) if optimizer.trains(path)]
    return StateBytes(
        sum(_bytes(layout, rank) for layout in tree.leaves(state.params)),
        sum(_bytes(layout, rank, _wider(layout.dtype, accumulate)) for layout in trained),
        sum(_bytes(layout, rank) for layout in tree.leaves(state.opt)),
    )


def least_traffic(
    param_layouts: tree.Tree,
    strategy: DataParallel,
    microbatches: int = 1,
    *,
    gathers: Callable[[str], int] = lambda path: 2,
    gather_dtype: Callable[[Layout], torch.dtype] = lambda layout: layout.dtype,
    reduce_dtype: Callable[[Layout], torch.dtype] = lambda layout: layout.dtype,
    late_dtype: Callable[[Layout], torch.dtype] | None = None,
    trains: Callable[[str], bool] = lambda path: True,
) -> Traffic:
    """The fewest bytes that a rank can send in a step of a strategy: n - 1 of n parts of what each reduction needs.

    Args:
        param_layouts: of the parameters at rest.
        strategy: how gradients and the optimizer's state are sharded.
        microbatches: of a step.
        gathers: how often a leaf is gathered in a microbatch (2: once forward, once backward; 1: kept between the two).
        gather_dtype: in which a leaf travels.
        reduce_dtype: in which its gradient travels.
        late_dtype: in which gradients travel that were accumulated over several microbatches; None: in the wider of
            reduce_dtype and fp32 (`Precision.reduce`, where a policy names one).
        trains: as `Optimizer.trains`; the gradients and updates of other leaves do not travel.

    With w elements of a leaf that is full over the n data ranks, and p, g, o of them that shard parameters, gradients
    and optimizer state (p divides g divides o divides n):

        gather   each microbatch   w · (1 - 1/p) · gathers
        reduce   each microbatch   w · (1 - 1/g)              to the shard that is accumulated
                 once              w/g · (1 - g/o)            from there to the optimizer's shard
                 once              w/o · (1 - o/n) · 2        the sum over ranks that hold the same shard
        update   once              w/p · (1 - p/o)            from the optimizer's shard to the parameter's

    All are lower bounds of the collective in question (Chan et al. 2007, "Collective communication: theory, practice,
    and experience", table 1), met by rings. Sums of loss and norm (a few bytes) are left out.
    """
    gather = reduce = update = 0
    placed = placements(param_layouts, strategy)
    for path, p, g, o in zip(tree.paths(param_layouts), *map(tree.leaves, placed), strict=True):
        n = math.prod(p.mesh[name] for name in strategy.tokens if name in p.mesh)
        by_p, by_g, by_o = (_ways(layout, strategy) for layout in (p, g, o))
        whole = math.prod(p.local_shape(0)) * by_p
        wire = reduce_dtype(p).itemsize
        late = wire
        if microbatches > 1:
            late = (late_dtype(p) if late_dtype else _wider(reduce_dtype(p), torch.float32)).itemsize
        gather += microbatches * gathers(path) * _all_but_one(whole * gather_dtype(p).itemsize, by_p)
        if not trains(path):
            continue
        reduce += microbatches * _all_but_one(whole * wire, by_g)
        reduce += _all_but_one(whole // by_g * late, by_o // by_g)
        reduce += 2 * _all_but_one(whole // by_o * late, n // by_o)
        update += _all_but_one(whole // by_p * p.dtype.itemsize, by_o // by_p)
    return Traffic(gather, reduce, update)


def _all_but_one(nbytes: int, ways: int) -> int:
    """n - 1 of n equal parts."""
    return nbytes - nbytes // ways


def _ways(layout: Layout, strategy: DataParallel) -> int:
    """Number of ranks along the data axes that hold different parts."""
    return layout.mesh.extent(tuple(name for name in layout.sharded if name in strategy.tokens))


def _bytes(layout: Layout, rank: int, dtype: torch.dtype | None = None) -> int:
    return math.prod(layout.local_shape(rank)) * (dtype or layout.dtype).itemsize


def _wider(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= other.itemsize else other
