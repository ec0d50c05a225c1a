"""The usual training step, built from parts that are all public: write your own where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout
from fmegatron.step.check import Declared
from fmegatron.step.grad import accumulate, reduce_gradients, value_and_grad

__all__ = ["State", "build_train_step", "init_state", "state_specs"]


class State(NamedTuple):
    """What a run carries from step to step: number of steps done (0-d int64), parameters, optimizer state."""

    step: Any
    params: Any
    opt: Any


def state_specs(param_specs: Any, optimizer: Any) -> State:
    """Specs of the whole state, given those of the parameters: one definition for memory, layouts and checkpoint."""
    mesh = tree.leaves(param_specs)[0].mesh
    step = tree.ArraySpec(Layout((), torch.int64, mesh), tree.Constant(0))
    return State(step, param_specs, optimizer.init(param_specs))


def init_state(params: Any, optimizer: Any) -> State:
    """The state at step 0 for given parameters (local shards)."""
    device = tree.leaves(params)[0].device
    return State(torch.zeros((), dtype=torch.int64, device=device), params, optimizer.init(params))


def build_train_step(
    loss_fn: Callable,
    optimizer: Any,
    layouts: Any,
    axes: Axes,
    *,
    data_axes: tuple[str, ...] = ("dp", "fsdp"),
    microbatches: int = 1,
    clip_norm: float | None = 1.0,
) -> Callable:
    """A pure `train_step(state, batch) -> (state, metrics)`; wrap it in `jit(..., donate=0)`.

    loss_fn(params, batch) -> (loss, metrics): `loss` is this rank's part, so that its plain sum over the data axes is
    the loss; metrics are 0-d tensors that are alike on all ranks. layouts: of the parameters. clip_norm: largest global
    gradient norm, None for no clipping. The metrics gain "grad_norm" (before clipping).

    The step raises ValueError, naming the leaf, when it is first called with parameters that are not what `layouts`
    says (structure, local shape, dtype).

    No gradient is computed for parameters that the optimizer does not train (`Optimizer.trains`). A loss scale in the
    optimizer's state (`optim.skip_nonfinite`) multiplies the loss and is taken out of the reduced gradients, in fp32.
    The step declares its layouts, so that every jit of it on a mesh is checked (`step.check`).
    """

    def scaled_loss(trained: Any, batch: Any, frozen: Any, scale: torch.Tensor | None) -> Any:
        out = loss_fn(optim.merge(trained, frozen), batch)
        loss, metrics = out if isinstance(out, tuple) else (out, {})
        return loss if scale is None else loss * scale.to(loss.dtype), metrics

    trains = getattr(optimizer, "trains", optim.every_path)
    grad_fn = accumulate(value_and_grad(scaled_loss), microbatches)
    layouts_of_trained = optim.partition(layouts, trains)[0]

    def train_step(state: State, batch: Any) -> tuple[State, dict]:
        tree.check(state.params, layouts, rank=0)  # while tracing; shapes are alike on all ranks inside a step
        trained, frozen = optim.partition(state.params, trains)
        scale = optim.loss_scale_of(state.opt)
        (_, metrics), grads = grad_fn(trained, batch, frozen, scale)
        grads = reduce_gradients(grads, layouts_of_trained, axes, data_axes)
        if scale is not None:
            grads = tree.map(lambda g: _unscaled(g, scale), grads)
        norm = optim.global_norm(grads, layouts_of_trained, axes)
        if clip_norm is not None:
            grads = optim.clip(grads, norm, clip_norm)
        params, opt = optimizer.update(grads, state.opt, state.params)
        return State(state.step + 1, params, opt), {**metrics, "grad_norm": norm}

    specs = tree.map(lambda layout: tree.ArraySpec(layout, tree.Constant(0)), layouts)
    train_step.declared = Declared(state_specs(specs, optimizer), data_axes)
    return train_step


def _unscaled(g: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """g / scale in fp32 or wider, where it cannot underflow."""
    dtype = optim.working_dtype(g.dtype)
    return g.to(dtype) / scale.to(dtype)
