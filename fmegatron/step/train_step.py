"""The standard training step, built from public parts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes, Precision, Wire, positions, reshard_many
from fmegatron.layout import DataParallel, Layout, Placed
from fmegatron.step.accumulate import accumulate
from fmegatron.step.batch_rows import rows_in_order
from fmegatron.step.check import Declared
from fmegatron.step.grad import loss_and_aux, reduce_gradients, value_and_grad
from fmegatron.step.trace import described

__all__ = ["State", "averaged_params", "build_train_step", "placements", "state_specs"]


class State(NamedTuple):
    """What a run carries from step to step: number of steps done (0-d int64), parameters, optimizer state."""

    step: Any
    params: Any
    opt: Any


def placements(param_layouts: Any, strategy: DataParallel) -> Placed:
    """Three trees of Layouts for a tree of the parameters' layouts at rest: theirs, the gradients', the optimizer's.

    Matrix optimizers (`optim.muon`) take `placements(...).optim` as their layouts.
    """
    grads = tree.map(strategy.grads_layout, param_layouts)
    return Placed(param_layouts, grads, tree.map(strategy.optim_layout, param_layouts))


def state_specs(param_specs: Any, optimizer: Any, strategy: DataParallel | None = None) -> State:
    """Specs of the full state, given those of the parameters: one definition for memory, layouts and checkpoint.

    `tree.init(state_specs(...), key, rank)` is the state at step 0: the parameters are those that `tree.init` draws of
    `param_specs` alone, on every mesh and under every strategy, and master copies equal them. With `given=params` it is
    the state at step 0 of parameters that are known already.
    strategy: how the optimizer's state is sharded beyond the parameters; None: exactly as they are.
    """
    mesh = tree.leaves(param_specs)[0].mesh
    step = tree.ArraySpec(Layout((), torch.int64, mesh), tree.Constant(0))
    params = tree.named(param_specs)
    return State(step, params, optimizer.init(_seen(params, strategy)))


def _seen(param_specs: Any, strategy: DataParallel | None) -> Any:
    """The parameters' specs as the optimizer sees them."""
    if strategy is None:
        return param_specs
    return tree.map(lambda spec: dataclasses.replace(spec, layout=strategy.optim_layout(spec.layout)), param_specs)


def build_train_step(
    loss_fn: Callable,
    optimizer: optim.Optimizer,
    layouts: Any,
    axes: Axes,
    *,
    strategy: DataParallel | None = None,
    precision: Precision | None = None,
    microbatches: int = 1,
    weight: str | None = None,
    numbered: bool = False,
    clip_norm: float | None = 1.0,
    together: int = 1 << 20,
) -> Callable:
    """A pure `train_step(state, batch) -> (state, metrics)`; wrap it in `jit(..., donate=0)`.

    Args:
        loss_fn: loss_fn(params, batch) -> (loss, metrics): `loss` is this rank's part, so that its plain sum over the
            data axes is the loss; metrics are 0-d tensors that are equal on all ranks, and gain "grad_norm" (before
            clipping).
        optimizer: a pair of pure functions (`optim`).
        layouts: of the parameters at rest.
        axes: of the mesh of the layouts, with the data axes of the strategy.
        strategy: how gradients and the optimizer's state are sharded beyond the parameters (`DataParallel`); the
            state's specs then are `state_specs(specs, optimizer, strategy)`, and its axes are those of `axes.data`.
            None: exactly as the parameters are.
        precision: in which dtypes gradients are reduced and added up (the model's own policy states how weights are
            gathered); None: as the backward makes them, and microbatches in fp32.
        microbatches: see `accumulate`. The batch is assigned by `strategy.batch_layout(shape, dtype, mesh,
            microbatches)`, so that microbatch m is the same rows on every mesh (`data.Batches.for_rank` does that, and
            `loop.train` refuses another layout of its; a tensor does not state which rows it has, so what was split by
            hand is taken as it is).
        weight: see `accumulate`; the loss is the mean over all tokens if the metrics have "tokens".
        numbered: loss_fn takes a third argument, samples: int64 [rows], the number of each of its rows among all rows
            of the run, step · B + row of B rows: the count of `nn.dropout`, the same on every mesh and for any
            microbatches.
        clip_norm: the largest global gradient norm, None for no clipping.
        together: bytes of the largest leaf that shares a collective with others; a larger one is a bucket by itself.

    The step raises ValueError, naming the leaf, when it is first called with parameters or an optimizer state that are
    not what `layouts` and `strategy` state (structure, local shape, dtype). ValueError at once for layouts of another
    mesh than that of `axes`, for a mesh with an axis that neither the strategy nor any layout knows, and for a strategy
    over other axes than `axes.data`, over which the loss is summed.

    No gradient is computed for parameters that the optimizer does not train (`Optimizer.trains`). A loss scale in the
    optimizer's state (`optim.skip_nonfinite`) multiplies the loss and is taken out of the reduced gradients, in fp32.
    The step declares its layouts, so that every jit of it on a mesh is checked (`step.check`).
    """

    @functools.wraps(loss_fn)
    def scaled_loss(trained: Any, batch: Any, frozen: Any, scale: torch.Tensor | None) -> Any:
        given = (batch["batch"], batch["samples"]) if numbered else (batch,)
        loss, metrics = loss_and_aux(loss_fn, loss_fn(tree.merge(trained, frozen), *given))
        if not isinstance(metrics, dict):
            raise ValueError(
                f"{described(loss_fn)}: its metrics: got {tree.in_words(metrics)}, wanted a dict of 0-d tensors; "
                'give each a name: return loss, {"accuracy": accuracy}'
            )
        return loss if scale is None else loss * scale.to(loss.dtype), metrics

    _require_arguments(optimizer, layouts, axes)
    strategy = strategy or DataParallel(axes.data)
    _require_known_axes(axes, strategy, layouts)
    trained_at = placements(tree.partition(layouts, optimizer.trains)[0], strategy)

    def reduce_each(grads: Any) -> Any:
        # With one microbatch there is nothing to accumulate: straight to where the optimizer wants it.
        to = trained_at.grads if microbatches > 1 else trained_at.optim
        return reduce_gradients(grads, trained_at.params, axes, to, wire, together)

    wire, summed = Wire(), torch.float32
    if precision is not None:
        wire, summed = precision.wires(trained_at.params), precision.accumulate
    grad_fn = value_and_grad(scaled_loss, None if precision is None else summed)
    grad_fn = accumulate(grad_fn, microbatches, each=reduce_each, weight=weight, dtype=summed)

    def train_step(state: State, batch: Any) -> tuple[State, dict]:
        _require_state(state, batch)
        # While tracing; inside a step all ranks have the same shapes.
        tree.check(state.params, layouts, 0, "state.params", "the layouts of build_train_step")
        tree.check(state.opt, opt_layouts, 0, "state.opt", "what the optimizer makes of the layouts")
        trained, frozen = tree.partition(state.params, optimizer.trains)
        scale = optimizer.loss_scale(state.opt)
        if numbered:
            batch = _with_samples(batch, state.step, strategy, axes, microbatches)
        (_, metrics), grads = grad_fn(trained, batch, frozen, scale)
        if "grad_norm" in metrics:
            raise ValueError(
                "metric 'grad_norm': got one of loss_fn, wanted another name, as the step reports the norm of all "
                "gradients under this one; rename yours, such as 'own_grad_norm'"
            )
        if microbatches > 1:
            grads = _moved(grads, trained_at.grads, trained_at.optim, axes, wire, together)
        if scale is not None:
            grads = tree.map(lambda g: _unscaled(g, scale), grads)
        norm = optim.global_norm(grads, trained_at.optim, axes)
        # Frozen leaves stay where they are: nothing of them is cut, and nothing gathered back.
        whole = _moved(trained, trained_at.params, trained_at.optim, axes, Wire(), together)
        params = tree.merge(whole, frozen)
        params, opt = optimizer.update(grads, state.opt, params, optim.GradNorm(norm, clip_norm))
        params, _ = tree.partition(params, optimizer.trains)
        params = tree.merge(_moved(params, trained_at.optim, trained_at.params, axes, Wire(), together), frozen)
        return State(state.step + 1, params, opt), {**metrics, "grad_norm": norm}

    specs = tree.map(lambda layout: tree.ArraySpec(layout, tree.Constant(0)), layouts)
    specs = state_specs(specs, optimizer, strategy)
    opt_layouts = tree.layouts(specs.opt)
    train_step.declared = Declared(specs, strategy.axes, microbatches)
    return train_step


def _require_state(state: Any, batch: Any) -> None:
    """ValueError for what has no step, params and opt, such as a dict of them or the parameters alone."""
    if _is_state(state):
        return
    fix = "draw one: tree.init(step.state_specs(specs, optimizer), key, rank)"
    if _is_state(batch):
        fix = "the second argument is one: call train_step(state, batch)"
    elif isinstance(state, dict) and set(state) == set(State._fields):
        fix = "give State(**it)"
    elif isinstance(state, tuple | list) and len(state) == len(State._fields):
        fix = "give State(*it)"
    raise ValueError(
        f"train_step: its first argument: got {tree.in_words(state)}, wanted a State(step, params, opt); {fix}"
    )


def _is_state(x: Any) -> bool:
    return all(hasattr(x, name) for name in State._fields)


def _require_arguments(optimizer: Any, layouts: Any, axes: Any) -> None:
    """ValueError for what is none of these, and for layouts of another mesh than that of the axes."""
    if not isinstance(axes, Axes):
        raise ValueError(f"build_train_step: axes: got {tree.in_words(axes)}, wanted Axes(mesh)")
    if isinstance(optimizer, optim.Transform):
        raise ValueError(
            "build_train_step: optimizer: got an optim.Transform, wanted an optim.Optimizer; make one of it and a "
            "rate: optim.optimizer(direction=transform, rate=optim.scale_by_learning_rate(1e-3))"
        )
    if not isinstance(optimizer, optim.Optimizer):
        raise ValueError(
            f"build_train_step: optimizer: got {tree.in_words(optimizer)}, wanted an optim.Optimizer, such as "
            "optim.adamw(1e-3); Optimizer(init, update) makes one of two functions of your own"
        )
    for path, leaf in zip(tree.paths(layouts), tree.leaves(layouts), strict=True):
        if not isinstance(leaf, Layout):
            raise ValueError(
                f"build_train_step: layouts: {path}: got {tree.in_words(leaf)}, wanted a Layout; tree.layouts(specs) "
                "has those of specs"
            )
    axes.require(layouts, "build_train_step: layouts")


def _require_known_axes(axes: Axes, strategy: DataParallel, layouts: Any) -> None:
    """ValueError for an axis over which gradients would silently stay a partial sum, or work be repeated."""
    mesh = tree.leaves(layouts)[0].mesh
    used = {*strategy.axes, *(name for layout in tree.leaves(layouts) for name in layout.sharded)}
    for name in mesh.names:
        if mesh[name] > 1 and name not in used:
            raise ValueError(
                f"build_train_step: mesh {mesh}: got the axis {name!r}, which is none of the strategy's axes "
                f"{strategy.axes} and shards no parameter, wanted a use of each axis; give a strategy over it, "
                f"DataParallel({(*strategy.axes, name)}, ...), or a mesh without it"
            )
    if set(axes[axes.data].names) != {name for name in strategy.axes if name in axes.mesh and axes.mesh[name] > 1}:
        raise ValueError(
            f"build_train_step: axes: got data axes {axes.data}, wanted those of the strategy, {strategy.axes}; give "
            f"Axes(mesh, data={strategy.axes})"
        )


def _with_samples(batch: Any, step: torch.Tensor, strategy: DataParallel, axes: Axes, microbatches: int) -> dict:
    """{"batch", "samples"}: the batch, and the number of each of this rank's rows among all rows of the run."""
    rows = {p: x.shape[0] for p, x in zip(tree.paths(batch), tree.leaves(batch), strict=True) if _has_rows(x)}
    if len(set(rows.values())) != 1:
        raise ValueError(f"batch: got rows (dim 0) {rows or 'of no leaf'}, wanted one number of them to be numbered")
    like = next(x for x in tree.leaves(batch) if _has_rows(x))
    count = like.shape[0] * axes.mesh.extent([name for name in strategy.axes if name in axes.mesh])
    layout = strategy.batch_layout((count,), torch.int64, axes.mesh, microbatches)
    numbers = positions(like.new_empty(like.shape[0]), layout, axes)
    batch = tree.map(lambda x: rows_in_order(x, microbatches, strategy.axes) if _has_rows(x) else x, batch)
    return {"batch": batch, "samples": step * count + numbers}


def _has_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0


def averaged_params(state: State, layouts: Any, axes: Axes, strategy: DataParallel | None = None) -> Any:
    """The average of the parameters (`optim.averaged`) in the place of the parameters: same layouts, same dtypes.

    A pure function that communicates where the strategy shards the optimizer's state beyond the parameters: call it
    inside the jitted step that evaluates. Parameters that are not trained are those of the state.

    Args:
        state: of the run, whose optimizer keeps an average.
        layouts: of the parameters at rest.
        axes: of their mesh.
        strategy: as `build_train_step` was given it.
    """
    average = optim.average_of(state.opt)
    paths = set(tree.paths(average))
    at = placements(tree.partition(layouts, paths.__contains__)[0], strategy or DataParallel(axes.data))
    trained, frozen = tree.partition(state.params, paths.__contains__)
    average = tree.map(lambda a, p: a.to(p.dtype), average, trained)
    return tree.merge(_moved(average, at.optim, at.params, axes, Wire(), 1 << 20), frozen)


def _moved(values: Any, sources: Any, targets: Any, axes: Axes, wire: Any, together: int) -> Any:
    _, leaves, spec = tree.flatten(values)
    wires = wire if isinstance(wire, Wire) else tree.leaves(wire)
    return tree.unflatten(spec, reshard_many(leaves, tree.leaves(sources), tree.leaves(targets), axes, wires, together))


def _unscaled(g: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """g / scale in fp32 or wider, where it cannot underflow."""
    dtype = tree.working_dtype(g.dtype)
    return g.to(dtype) / scale.to(dtype)
