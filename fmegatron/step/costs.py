"""The cost model of a strategy on each rank, from layouts: bytes of state, and a lower bound of bytes sent.

Nothing is traced and no rank is asked; `collectives_of` counts what a graph really sends, tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fmegatron import optim, tree
from fmegatron.layout import DataParallel, Layout
from fmegatron.step.state import placements, state_specs
from fmegatron.tree import spec, structure

__all__ = ["StateBytes", "Traffic", "WeightTransfer", "least_traffic", "least_transfers", "state_bytes"]


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


@dataclass(frozen=True)
class WeightTransfer:
    """What a rank sends at least of one leaf in a step. kind: "gather", "reduce" or "update"; over: the mesh axes;
    nbytes: in all; times: how often in a step."""

    path: str
    kind: str
    over: tuple[str, ...]
    nbytes: int
    times: int


def state_bytes(
    param_specs: structure.Tree,
    optimizer: optim.Optimizer,
    rank: int = 0,
    accumulate: torch.dtype = torch.float32,
) -> StateBytes:
    """Bytes of each kind of state on a rank, from layouts alone; full bytes / ranks where everything divides.

    Args:
        param_specs: as the model places parameters at rest; they know the strategy, by which gradients and the
            optimizer's state are sharded (`strategy_of`).
        optimizer: whose state is counted.
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
    strategy = spec.strategy_of(param_specs) or DataParallel()
    state = tree.layouts(state_specs(param_specs, optimizer, strategy))
    grads = placements(state.params, strategy).grads
    trained = [g for path, g in zip(tree.paths(grads), tree.leaves(grads), strict=True) if optimizer.trains(path)]
    return StateBytes(
        sum(_bytes(layout, rank) for layout in tree.leaves(state.params)),
        sum(_bytes(layout, rank, _wider(layout.dtype, accumulate)) for layout in trained),
        sum(_bytes(layout, rank) for layout in tree.leaves(state.opt)),
    )


def least_traffic(
    param_layouts: structure.Tree,
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
    total = {"gather": 0, "reduce": 0, "update": 0}
    more = {"gathers": gathers, "gather_dtype": gather_dtype, "reduce_dtype": reduce_dtype}
    for one in least_transfers(param_layouts, strategy, microbatches, **more, late_dtype=late_dtype, trains=trains):
        total[one.kind] += one.nbytes
    return Traffic(**total)


def least_transfers(
    param_layouts: structure.Tree,
    strategy: DataParallel,
    microbatches: int = 1,
    *,
    gathers: Callable[[str], int] = lambda path: 2,
    gather_dtype: Callable[[Layout], torch.dtype] = lambda layout: layout.dtype,
    reduce_dtype: Callable[[Layout], torch.dtype] = lambda layout: layout.dtype,
    late_dtype: Callable[[Layout], torch.dtype] | None = None,
    trains: Callable[[str], bool] = lambda path: True,
) -> Iterator[WeightTransfer]:
    """What `least_traffic` adds up, leaf by leaf, with the axes over which each of them travels. Arguments as there."""
    placed = placements(param_layouts, strategy)
    for path, p, g, o in zip(tree.paths(param_layouts), *map(tree.leaves, placed), strict=True):
        tokens = tuple(name for name in strategy.tokens if name in p.mesh)
        at_p, at_g, at_o = (_over(layout, strategy) for layout in (p, g, o))
        in_g, in_o = _without(at_g, at_p), _without(at_o, at_g)
        rest = _without(tokens, at_o)
        by_p, by_g, by_o, n = (p.mesh.extent(names) for names in (at_p, at_g, at_o, tokens))
        whole = math.prod(p.local_shape(0)) * by_p
        wire = reduce_dtype(p).itemsize
        late = wire
        if microbatches > 1:
            late = (late_dtype(p) if late_dtype else _wider(reduce_dtype(p), torch.float32)).itemsize
        times = microbatches * gathers(path)
        yield WeightTransfer(path, "gather", at_p, times * _all_but_one(whole * gather_dtype(p).itemsize, by_p), times)
        if not trains(path):
            continue
        each = microbatches * _all_but_one(whole * wire, by_g)
        yield WeightTransfer(path, "reduce", (*at_p, *in_g), each, microbatches)
        yield WeightTransfer(path, "reduce", in_o, _all_but_one(whole // by_g * late, by_o // by_g), 1)
        yield WeightTransfer(path, "reduce", rest, 2 * _all_but_one(whole // by_o * late, n // by_o), 1)
        more = _without(at_o, at_p)
        yield WeightTransfer(path, "update", more, _all_but_one(whole // by_p * p.dtype.itemsize, by_o // by_p), 1)


def _over(layout: Layout, strategy: DataParallel) -> tuple[str, ...]:
    """The data axes along which ranks hold different parts."""
    return tuple(name for name in layout.sharded if name in strategy.tokens)


def _without(axes: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in axes if name not in others)


def _all_but_one(nbytes: int, ways: int) -> int:
    """n - 1 of n equal parts."""
    return nbytes - nbytes // ways


def _bytes(layout: Layout, rank: int, dtype: torch.dtype | None = None) -> int:
    return math.prod(layout.local_shape(rank)) * (dtype or layout.dtype).itemsize


def _wider(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= other.itemsize else other
