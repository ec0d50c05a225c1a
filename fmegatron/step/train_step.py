"""One update: the standard training step, built from public parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes, Precision, psum, random_words
from fmegatron.collectives.wires import Wire
from fmegatron.layout import DataParallel, Layout
from fmegatron.optim import clipping
from fmegatron.step.batch_rows import rows_in_order
from fmegatron.step.gradient import LossFn
from fmegatron.step.microbatches import accumulated, alone, require_parts
from fmegatron.step.offload import brought, fetched, on_device, stored
from fmegatron.step.pipeline.options import Pipeline, Pipelining, Scheduled, by_stages
from fmegatron.step.pipeline.pipeline import staged
from fmegatron.step.reduce import known_as, reduced_to
from fmegatron.step.state import State, lying_as, moved, placements, require_optimizer, require_state, state_specs
from fmegatron.step.tracing import described
from fmegatron.tree import arithmetic, spec, structure

__all__ = ["build_train_step"]


def build_train_step(
    loss_fn: Callable,
    optimizer: optim.Optimizer,
    layouts: structure.Tree,
    axes: Axes | None = None,
    *,
    strategy: DataParallel | None = None,
    precision: Precision | None = None,
    microbatches: int | Pipelining | Pipeline = 1,
    weight: str | None = None,
    twice: bool = False,
    with_sample_ids: bool = False,
    clip_norm: float | None = 1.0,
    post_update: Callable[[Any, dict], tuple[Any, dict]] | None = None,
    bucket_bytes: int = 1 << 20,
) -> Callable:
    """A pure `train_step(state, batch) -> (state, metrics)`; wrap it in `jit(..., donate=0)`.

    Args:
        loss_fn: loss_fn(params, batch) -> loss or (loss, metrics). The loss is `step.mean(total, count)`, or a dict of
            such parts, `{"lm": mean(...), "z": 1e-4 * mean(...)}`: sums over this rank's rows, which the step adds up
            over ranks and microbatches and divides once. Or it is a 0-d tensor, this rank's part, so that its plain sum
            over the data axes is the loss. Metrics are 0-d tensors that are equal on all ranks, or beside parts means
            too. They gain "grad_norm" (before clipping; NaN where the loss is not finite), and of parts "loss",
            the mean of each by its name, and "NAME/count".
        optimizer: a pair of pure functions (`optim`).
        layouts: of the parameters at rest, or their specs, which know the strategy.
        axes: of the mesh of the layouts, with the data axes of the strategy; None: these.
        strategy: how gradients and the optimizer's state are sharded beyond the parameters (`DataParallel`); the
            state's specs then are `state_specs(specs, optimizer, strategy)`, and its axes are those of `axes.data`.
            None: that of the specs; where they state none, exactly as the parameters are.
        precision: in which dtypes gradients are reduced and added up (the model's own policy states how weights are
            gathered); None: as the backward makes them, and microbatches in fp32.
        microbatches: see `accumulate`. The batch is assigned by `strategy.batch_layout(shape, dtype, mesh,
            microbatches)`, so that microbatch m is the same rows on every mesh (`loop.Run` and `loop.own_rows` do
            that, and a jit refuses another layout of arrays that know theirs).
            On a mesh with pp they are computed by stages (`step.pipelined`): of an int by 1F1B with balanced ones,
            of `Pipelining(...).of(n)` as these options say, of a `Pipeline` by its table; where pp is 1 all of these
            are that number.
        weight: of a loss that is a tensor, see `accumulate`; it is the mean over all tokens if the metrics have
            "tokens".
        twice: counts may depend on the parameters with several microbatches, for one more forward pass of each.
        with_sample_ids: loss_fn takes a third argument, samples: int64 [rows], the number of each of its rows among all
            rows of the run, step · B + row of B rows: the count of `nn.dropout`, the same on every mesh and for any
            microbatches.
        clip_norm: the largest global gradient norm, None for no clipping.
        post_update: post_update(params, metrics) -> (params, metrics): what no gradient decides, such as the biases
            that balance experts (`model.post_update`); after the update, with the metrics of the full batch. Where the
            norm of the gradients is not finite, and where the optimizer refuses the update (`optim.skip_nonfinite`),
            it changes no parameter.
        bucket_bytes: bytes of the largest leaf that shares a collective with others; a larger one is
            a bucket by itself.

    The step raises ValueError, naming the leaf, when it is first called with parameters or an optimizer state that are
    not what `layouts` and `strategy` state (structure, local shape, dtype). ValueError at once for layouts of another
    mesh than that of `axes`, for a mesh with an axis that neither the strategy nor any layout knows, and for a strategy
    over other axes than `axes.data`, over which the loss is summed.

    No gradient is computed for parameters that the optimizer does not train (`Optimizer.trains`). A loss scale in the
    optimizer's state (`optim.skip_nonfinite`) multiplies the loss and is taken out of the reduced gradients, in fp32.
    """

    require_optimizer(optimizer, "build_train_step")
    strategy = strategy or spec.strategy_of(layouts)
    layouts = _layouts_of(layouts)
    if axes is None:
        mesh = tree.leaves(layouts)[0].mesh
        axes = Axes(mesh) if strategy is None else Axes(mesh, data=mesh.axes(strategy.tokens))
    _require_arguments(layouts, axes)
    strategy = strategy or DataParallel(axes.data)
    microbatches, pipeline = _microbatches(microbatches, axes, weight, twice)
    _require_known_axes(axes, strategy, layouts)
    trained_at = placements(tree.map(on_device, tree.partition(layouts, optimizer.trains)[0]), strategy)
    wires, summed = (
        (Wire(), torch.float32) if precision is None else (precision.wires(trained_at.params), precision.accumulate)
    )

    @functools.wraps(loss_fn)
    def of_trained(trained: Any, batch: Any, frozen: Any) -> Any:
        """The loss as a function of what is trained, of numbered rows: where there is any of these."""
        given = (batch["batch"], batch["samples"]) if with_sample_ids else (batch,)
        return loss_fn(tree.merge(trained, brought(frozen, batch)), *given)

    def reduced(grads: Any) -> Any:
        # With one microbatch there is nothing to accumulate: straight to where the optimizer wants it.
        to = trained_at.grads if microbatches > 1 and pipeline is None else trained_at.optim
        return reduced_to(grads, trained_at.params, axes, to, wires, bucket_bytes)

    def with_microbatches(loss: Callable) -> tuple[LossFn, Callable]:
        cast = None if precision is None else summed
        of = LossFn(loss, axes, cast, functools.partial(_require_metrics, loss_fn), microbatches)
        if pipeline is not None:
            return of, staged(of, pipeline, summed)
        return of, accumulated(of, reduced, weight, summed, twice)

    plain, general = with_microbatches(loss_fn), with_microbatches(of_trained)

    def train_step(state: State, batch: Any) -> tuple[State, dict]:
        require_state(state, batch)
        # While tracing; inside a step all ranks have the same shapes.
        tree.check(state.params, layouts, 0, "state.params", "the layouts of build_train_step")
        tree.check(state.opt, opt_layouts, 0, "state.opt", "what the optimizer makes of the layouts")
        require_parts(batch, microbatches)
        trained, frozen = tree.partition(state.params, optimizer.trains)
        scale = optimizer.loss_scale(state.opt)
        if with_sample_ids:
            batch = _with_samples(batch, state.step, strategy, axes, microbatches)
        (of, several), more = (general, (frozen,)) if with_sample_ids or tree.leaves(frozen) else (plain, ())
        if pipeline is not None:
            if tree.leaves(frozen):
                raise ValueError(
                    f"build_train_step: got a pipeline and parameters that the optimizer does not train "
                    f"({tree.paths(frozen)[0]!r}), wanted all trained, as stages know those that they train alone; "
                    "leave the pipeline out"
                )
            loss, metrics, grads, whole = several(trained, batch, more, scale)
            grads = reduced(grads)
        elif microbatches == 1:
            with of.differentiated(trained, scale, beside=state.step) as call:
                call.returned = of.loss_fn(call.params, batch, *brought(more, state.step))
            loss, metrics, grads, whole = alone(of, call.gradient, trained, weight)
            grads = reduced(grads)
        else:
            loss, metrics, grads, whole = several(trained, batch, more, scale)
            grads = moved(grads, trained_at.grads, trained_at.optim, axes, wires, bucket_bytes)
        if scale is not None:
            grads = tree.map(lambda g: _unscaled(g, scale), grads)
        grads = known_as(grads, trained_at.optim)
        norm = optim.global_norm(grads)
        # A loss that is not finite makes an update bad, whatever its gradients are.
        loss = loss if whole else psum(loss, axes[axes.data])
        norm = torch.where(loss.isfinite(), norm, torch.nan)
        # Frozen leaves stay where they are: nothing of them is cut, and nothing gathered back.
        there = moved(fetched(trained, norm), trained_at.params, trained_at.optim, axes, Wire(), bucket_bytes)
        params = tree.merge(known_as(there, trained_at.optim), frozen)
        held = fetched(state.opt, norm)  # what is in host memory, which the pass "stream" cuts into pieces
        params, opt = optimizer.update(grads, held, params, clipping.GradNorm(norm, clip_norm))
        opt = stored(opt, state.opt)
        params, _ = tree.partition(params, optimizer.trains)
        params = tree.merge(moved(params, trained_at.optim, trained_at.params, axes, Wire(), bucket_bytes), frozen)
        if post_update is not None:
            after, metrics = post_update(params, metrics)
            moves, applied = norm.isfinite(), optimizer.applied(state.opt, opt)
            moves = moves if applied is None else moves & applied
            params = tree.map(lambda new, old: new if new is old else torch.where(moves, new, old), after, params)
        new = State(state.step + 1, stored(params, state.params), opt)
        return lying_as(new, state), {**metrics, "grad_norm": norm}

    specs = tree.map(lambda layout: tree.ArraySpec(layout, 0), layouts)
    specs = state_specs(specs, optimizer, strategy)
    opt_layouts = tree.layouts(specs.opt)
    return train_step


def _require_metrics(loss_fn: Callable, metrics: Any) -> None:
    """ValueError for metrics that are no dict, or that have the name of one of the step's."""
    if not isinstance(metrics, dict):
        raise ValueError(
            f"{described(loss_fn)}: its metrics: got {structure.in_words(metrics)}, wanted a dict of 0-d tensors; "
            'give each a name: return loss, {"accuracy": accuracy}'
        )
    if "grad_norm" in metrics:
        raise ValueError(
            "metric 'grad_norm': got one of loss_fn, wanted another name, as the step reports the norm of all "
            "gradients under this one; rename yours, such as 'own_grad_norm'"
        )


def _microbatches(
    given: int | Pipelining | Pipeline, axes: Axes, weight: str | None, twice: bool
) -> tuple[int, Scheduled | Pipeline | None]:
    """(how many there are, the pipeline that computes them). ValueError for what a pipeline cannot do."""
    count, pipeline = by_stages(given, axes.mesh)
    if pipeline is not None and (weight is not None or twice):
        what = f"weight={weight!r}" if weight is not None else "twice=True"
        raise ValueError(
            f"build_train_step: got a pipeline and {what}, wanted counts that are known before the first backward; "
            "return step.mean(total, count) from the loss, and leave it out"
        )
    return count, pipeline


def _layouts_of(layouts: Any) -> Any:
    """The Layouts of Layouts or specs; ValueError for other leaves, and for a tree without any."""
    for path, leaf in zip(tree.paths(layouts), tree.leaves(layouts), strict=True):
        if not isinstance(leaf, Layout | tree.ArraySpec):
            raise ValueError(
                f"build_train_step: layouts: {path}: got {structure.in_words(leaf)}, wanted a Layout or an ArraySpec; "
                "tree.specs(shapes, mesh) makes specs of shapes"
            )
    if not tree.leaves(layouts):
        raise ValueError("build_train_step: layouts: got a tree without leaves, wanted those of the parameters")
    return tree.layouts(layouts)


def _require_arguments(layouts: Any, axes: Any) -> None:
    """ValueError for what is none, and for layouts of another mesh than that of the axes."""
    if not isinstance(axes, Axes):
        raise ValueError(f"build_train_step: axes: got {structure.in_words(axes)}, wanted Axes(mesh)")
    axes.require(layouts, "build_train_step: layouts")


def _require_known_axes(axes: Axes, strategy: DataParallel, layouts: Any) -> None:
    """ValueError for an axis over which gradients would silently stay a partial sum, or work be repeated."""
    mesh = tree.leaves(layouts)[0].mesh
    used = {*strategy.tokens, *(name for layout in tree.leaves(layouts) for name in layout.sharded)}
    for name in mesh.names:
        if mesh[name] > 1 and name not in used:
            raise ValueError(
                f"build_train_step: mesh {mesh}: got the axis {name!r}, which is none of the strategy's axes "
                f"{strategy.axes} and shards no parameter, wanted a use of each axis; give a strategy over it, "
                f"DataParallel({(*strategy.axes, name)}, ...), or a mesh without it"
            )
    if set(axes[axes.data].names) != {name for name in strategy.tokens if name in axes.mesh and axes.mesh[name] > 1}:
        known = tuple(name for name in strategy.tokens if name in axes.mesh)
        raise ValueError(
            f"build_train_step: axes: got data axes {axes.data}, wanted those of the strategy, {known}; give "
            f"Axes(mesh, data={known})"
        )


def _with_samples(batch: Any, step: torch.Tensor, strategy: DataParallel, axes: Axes, microbatches: int) -> dict:
    """{"batch", "samples"}: the batch, and the number of each of this rank's rows among all rows of the run."""
    rows = {p: x.shape[0] for p, x in zip(tree.paths(batch), tree.leaves(batch), strict=True) if _has_rows(x)}
    if len(set(rows.values())) != 1:
        raise ValueError(f"batch: got rows (dim 0) {rows or 'of no leaf'}, wanted one number of them to be numbered")
    like = next(x for x in tree.leaves(batch) if _has_rows(x))
    count = like.shape[0] * axes.mesh.extent([name for name in strategy.axes if name in axes.mesh])
    layout = strategy.batch_layout((count,), torch.int64, axes.mesh, microbatches)
    numbers = random_words.positions(like.new_empty(like.shape[0]), layout, axes)
    batch = tree.map(lambda x: rows_in_order(x, microbatches, strategy.axes) if _has_rows(x) else x, batch)
    return {"batch": batch, "samples": step * count + numbers}


def _has_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0


def _unscaled(g: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """g / scale in fp32 or wider, where it cannot underflow."""
    dtype = arithmetic.working_dtype(g.dtype)
    return g.to(dtype) / scale.to(dtype)
