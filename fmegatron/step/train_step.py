"""One update: `value_and_grad`, and the standard training step, built from public parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes, Precision, Wire, positions
from fmegatron.layout import DataParallel, Layout
from fmegatron.step.accumulate import accumulate, require_parts, weight_of
from fmegatron.step.batch_rows import rows_in_order
from fmegatron.step.reduce import raw_gradient_layout, reduce_gradients, widened
from fmegatron.step.state import State, moved, placements, require_optimizer, require_state, state_specs
from fmegatron.step.torch_private import is_tracing, mark_backward
from fmegatron.step.trace import described
from fmegatron.tree.labels import labelled
from fmegatron.tree.spec import strategy_of

__all__ = ["build_train_step", "value_and_grad"]


def value_and_grad(loss_fn: Callable, dtype: torch.dtype | None = None, **of_jax: Any) -> Callable:
    """`loss_fn(params, *args) -> (loss, aux)` becomes `f(params, *args) -> ((loss, aux), grads)`.

    params: a tree of tensors; grads: the same tree, each leaf with the shape and dtype of its parameter (zeros for a
    parameter that the loss does not use). loss: a 0-d tensor. aux: a tree, returned without its gradient history.
    A loss_fn that returns only the loss gives aux = {}. Keyword arguments go to loss_fn.
    Gradients of parameters that know their layouts know theirs, as `reduce_gradients` takes them: pending sums over the
    data axes that do not split the parameter, for a loss that is this rank's part of a sum over them.
    Raises ValueError, naming loss_fn's line, for a result that is none of these, and for a loss without a gradient.
    dtype: floating parameters that are narrower are cast to it before they are differentiated, so that their gradients
    have it: sums that were reduced in fp32 are not rounded to the 16 bits of a parameter. None: as the parameters are.
    """
    _require_own_arguments(dtype, of_jax)
    if not callable(loss_fn):
        raise ValueError(f"value_and_grad: got {tree.in_words(loss_fn)}, wanted a function loss_fn(params, *args)")
    return _with_grad(loss_fn, dtype, _anything)


def _anything(aux: Any) -> None:
    """No aux is refused."""


def _with_grad(loss_fn: Callable, dtype: torch.dtype | None, require: Callable) -> Callable:
    """`value_and_grad`, which gives aux to `require` as loss_fn returned it."""

    @functools.wraps(loss_fn)
    def with_grad(params, *args, **named):
        paths, leaves, spec = tree.flatten(params)
        if not leaves:
            raise ValueError(
                f"{described(loss_fn)}: its parameters: got {tree.in_words(params)}, wanted a tree with a tensor in it"
            )
        for path, leaf in zip(paths, leaves, strict=True):
            if not isinstance(leaf, torch.Tensor):
                module = "; of a module: dict(module.named_parameters())" if isinstance(leaf, torch.nn.Module) else ""
                raise ValueError(
                    f"parameter {path!r}: got {tree.in_words(leaf)}, wanted a tensor; pass constants as another "
                    f"argument{module}"
                )
            if not leaf.is_floating_point() and not leaf.is_complex():
                raise ValueError(
                    f"parameter {path!r}: got {leaf.dtype}, which has no gradient, wanted a floating dtype; pass it as "
                    "another argument, not among the parameters"
                )
        known = [tree.layout_of(leaf) for leaf in leaves]
        leaves = [(leaf if dtype is None else widened(leaf, dtype)).detach().requires_grad_() for leaf in leaves]
        known = [layout and layout.replace(dtype=leaf.dtype) for leaf, layout in zip(leaves, known, strict=True)]
        leaves = list(map(_knowing, leaves, known))
        with torch.enable_grad():
            loss, aux = loss_and_aux(loss_fn, loss_fn(tree.unflatten(spec, leaves), *args, **named))
            require(aux)
            _require_gradient(loss_fn, loss)
            if is_tracing():
                mark_backward([loss.grad_fn])
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)]
        grads = [_knowing(g.detach(), layout and _raw(layout)) for g, layout in zip(grads, known, strict=True)]
        return (loss.detach(), tree.map(_without_history, aux)), tree.unflatten(spec, grads)

    return with_grad


def _knowing(x: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    return x if layout is None else labelled(x, layout)


def _raw(layout: Layout) -> Layout:
    """The layout of a parameter's gradient, where the loss is this rank's part of a sum over the data axes."""
    return raw_gradient_layout(layout, Axes(layout.mesh).data)


_OF_JAX = MappingProxyType(
    {
        "has_aux": "leave it out: aux is given whenever loss_fn returns (loss, aux), and is {} otherwise",
        "argnums": "leave it out: the first argument is differentiated; put all of them into it, as one tree",
    }
)


def _require_own_arguments(dtype: Any, others: dict) -> None:
    """ValueError for arguments of other libraries' functions of this name, with what takes their place."""
    if not others and isinstance(dtype, torch.dtype | None):
        return
    name, value = next(iter(others.items()), ("argnums" if isinstance(dtype, int | tuple) else "dtype", dtype))
    fix = _OF_JAX.get(name, "arguments of loss_fn go to the function that value_and_grad returns")
    raise ValueError(f"value_and_grad: got {name}={value!r}, wanted a loss_fn and perhaps a torch dtype; {fix}")


def loss_and_aux(loss_fn: Callable, out: Any) -> tuple[Any, Any]:
    """(loss, aux) of what loss_fn returned: both, or the loss alone. ValueError for other numbers of values."""
    if isinstance(out, tuple) and len(out) == 2:
        return out
    if isinstance(out, tuple | list):
        raise ValueError(
            f"{described(loss_fn)}: its result: got {tree.in_words(out)}, wanted loss or (loss, aux); "
            "put all else that it returns into aux, a dict"
        )
    return out, {}


def _require_gradient(loss_fn: Callable, loss: Any) -> None:
    """ValueError unless a gradient of the loss can be taken."""
    if not isinstance(loss, torch.Tensor):
        got, fix = tree.in_words(loss), "keep it a tensor: no .item(), no float()"
        if loss is None:
            fix = "return it"
        elif isinstance(loss, dict):
            fix = "return the loss first and the rest behind it: return out['loss'], out"
    elif loss.dim() != 0:
        got, fix = f"a tensor of shape {tuple(loss.shape)}", "take its .mean() or .sum()"
    elif not loss.is_floating_point():
        got, fix = f"a tensor of {loss.dtype}", "counts, argmax and complex numbers have no gradient to follow"
    elif not loss.requires_grad:
        got = "a 0-d tensor without a gradient: it depends on no parameter, or it was detached"
        fix = "look for .detach(), .data, torch.no_grad(), argmax, comparisons and whole numbers on its way"
    else:
        return
    raise ValueError(
        f"{described(loss_fn)}: the loss: got {got}, wanted a 0-d floating tensor that depends on the parameters; {fix}"
    )


def _without_history(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


# ---- the standard step -----------------------------------------------------------------------------------------------
def build_train_step(
    loss_fn: Callable,
    optimizer: optim.Optimizer,
    layouts: tree.Tree,
    axes: Axes | None = None,
    *,
    strategy: DataParallel | None = None,
    precision: Precision | None = None,
    microbatches: int = 1,
    weight: str | None = None,
    numbered: bool = False,
    clip_norm: float | None = 1.0,
    settle: Callable[[Any, dict], tuple[Any, dict]] | None = None,
    together: int = 1 << 20,
) -> Callable:
    """A pure `train_step(state, batch) -> (state, metrics)`; wrap it in `jit(..., donate=0)`.

    Args:
        loss_fn: loss_fn(params, batch) -> (loss, metrics): `loss` is this rank's part, so that its plain sum over the
            data axes is the loss; metrics are 0-d tensors that are equal on all ranks, and gain "grad_norm" (before
            clipping).
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
        weight: see `accumulate`; the loss is the mean over all tokens if the metrics have "tokens".
        numbered: loss_fn takes a third argument, samples: int64 [rows], the number of each of its rows among all rows
            of the run, step · B + row of B rows: the count of `nn.dropout`, the same on every mesh and for any
            microbatches.
        clip_norm: the largest global gradient norm, None for no clipping.
        settle: settle(params, metrics) -> (params, metrics): what no gradient decides, such as the biases that balance
            experts (`model.settled`); after the update, with the metrics of the full batch. Where the norm of the
            gradients is not finite it changes no parameter.
        together: bytes of the largest leaf that shares a collective with others; a larger one is a bucket by itself.

    The step raises ValueError, naming the leaf, when it is first called with parameters or an optimizer state that are
    not what `layouts` and `strategy` state (structure, local shape, dtype). ValueError at once for layouts of another
    mesh than that of `axes`, for a mesh with an axis that neither the strategy nor any layout knows, and for a strategy
    over other axes than `axes.data`, over which the loss is summed.

    No gradient is computed for parameters that the optimizer does not train (`Optimizer.trains`). A loss scale in the
    optimizer's state (`optim.skip_nonfinite`) multiplies the loss and is taken out of the reduced gradients, in fp32.
    """

    require_optimizer(optimizer, "build_train_step")
    strategy = strategy or strategy_of(layouts)
    layouts = _layouts_of(layouts)
    if axes is None:
        mesh = tree.leaves(layouts)[0].mesh
        axes = Axes(mesh) if strategy is None else Axes(mesh, data=mesh.axes(strategy.tokens))
    _require_arguments(layouts, axes)
    strategy = strategy or DataParallel(axes.data)
    _require_known_axes(axes, strategy, layouts)
    trained_at = placements(tree.partition(layouts, optimizer.trains)[0], strategy)
    wires, summed = (
        (Wire(), torch.float32) if precision is None else (precision.wires(trained_at.params), precision.accumulate)
    )

    @functools.wraps(loss_fn)
    def of_trained(trained: Any, batch: Any, frozen: Any, scale: torch.Tensor | None) -> Any:
        """The loss as a function of what is trained, of numbered rows, scaled: where there is any of these."""
        given = (batch["batch"], batch["samples"]) if numbered else (batch,)
        loss, metrics = loss_and_aux(loss_fn, loss_fn(tree.merge(trained, frozen), *given))
        return loss if scale is None else loss * scale.to(loss.dtype), metrics

    def reduced(grads: Any) -> Any:
        # With one microbatch there is nothing to accumulate: straight to where the optimizer wants it.
        to = trained_at.grads if microbatches > 1 else trained_at.optim
        return reduce_gradients(grads, trained_at.params, axes, to, wires, together)

    def gradient_of(loss: Callable) -> Callable:
        gradient = _with_grad(loss, None if precision is None else summed, functools.partial(_require_metrics, loss_fn))
        if microbatches is not True and microbatches == 1:  # nothing to accumulate
            return gradient
        return accumulate(gradient, microbatches, each=reduced, weight=weight, dtype=summed)

    plain, general = gradient_of(loss_fn), gradient_of(of_trained)

    def train_step(state: State, batch: Any) -> tuple[State, dict]:
        require_state(state, batch)
        # While tracing; inside a step all ranks have the same shapes.
        tree.check(state.params, layouts, 0, "state.params", "the layouts of build_train_step")
        tree.check(state.opt, opt_layouts, 0, "state.opt", "what the optimizer makes of the layouts")
        require_parts(batch, microbatches)
        trained, frozen = tree.partition(state.params, optimizer.trains)
        scale = optimizer.loss_scale(state.opt)
        if numbered:
            batch = _with_samples(batch, state.step, strategy, axes, microbatches)
        if numbered or scale is not None or tree.leaves(frozen):
            (loss, metrics), grads = general(trained, batch, frozen, scale)
        else:
            (loss, metrics), grads = plain(trained, batch)
        if microbatches > 1:
            grads = moved(grads, trained_at.grads, trained_at.optim, axes, wires, together)
        else:
            weight_of(loss, metrics, weight)  # an error where microbatches would be one
            grads = reduced(grads)
        if scale is not None:
            grads = tree.map(lambda g: _unscaled(g, scale), grads)
        norm = optim.global_norm(grads, trained_at.optim, axes)
        # Frozen leaves stay where they are: nothing of them is cut, and nothing gathered back.
        whole = moved(trained, trained_at.params, trained_at.optim, axes, Wire(), together)
        params = tree.merge(whole, frozen)
        params, opt = optimizer.update(grads, state.opt, params, optim.GradNorm(norm, clip_norm))
        params, _ = tree.partition(params, optimizer.trains)
        params = tree.merge(moved(params, trained_at.optim, trained_at.params, axes, Wire(), together), frozen)
        if settle is not None:
            after, metrics = settle(params, metrics)
            params = tree.map(
                lambda new, old: new if new is old else torch.where(norm.isfinite(), new, old), after, params
            )
        return State(state.step + 1, params, opt), {**metrics, "grad_norm": norm}

    specs = tree.map(lambda layout: tree.ArraySpec(layout, tree.Constant(0)), layouts)
    specs = state_specs(specs, optimizer, strategy)
    opt_layouts = tree.layouts(specs.opt)
    return train_step


def _require_metrics(loss_fn: Callable, metrics: Any) -> None:
    """ValueError for metrics that are no dict, or that have the name of one of the step's."""
    if not isinstance(metrics, dict):
        raise ValueError(
            f"{described(loss_fn)}: its metrics: got {tree.in_words(metrics)}, wanted a dict of 0-d tensors; "
            'give each a name: return loss, {"accuracy": accuracy}'
        )
    if "grad_norm" in metrics:
        raise ValueError(
            "metric 'grad_norm': got one of loss_fn, wanted another name, as the step reports the norm of all "
            "gradients under this one; rename yours, such as 'own_grad_norm'"
        )


def _layouts_of(layouts: Any) -> Any:
    """The Layouts of Layouts or specs; ValueError for other leaves, and for a tree without any."""
    for path, leaf in zip(tree.paths(layouts), tree.leaves(layouts), strict=True):
        if not isinstance(leaf, Layout | tree.ArraySpec):
            raise ValueError(
                f"build_train_step: layouts: {path}: got {tree.in_words(leaf)}, wanted a Layout or an ArraySpec; "
                "tree.specs(shapes, mesh) makes specs of shapes"
            )
    if not tree.leaves(layouts):
        raise ValueError("build_train_step: layouts: got a tree without leaves, wanted those of the parameters")
    return tree.layouts(layouts)


def _require_arguments(layouts: Any, axes: Any) -> None:
    """ValueError for what is none, and for layouts of another mesh than that of the axes."""
    if not isinstance(axes, Axes):
        raise ValueError(f"build_train_step: axes: got {tree.in_words(axes)}, wanted Axes(mesh)")
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
    numbers = positions(like.new_empty(like.shape[0]), layout, axes)
    batch = tree.map(lambda x: rows_in_order(x, microbatches, strategy.axes) if _has_rows(x) else x, batch)
    return {"batch": batch, "samples": step * count + numbers}


def _has_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0


def _unscaled(g: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """g / scale in fp32 or wider, where it cannot underflow."""
    dtype = tree.working_dtype(g.dtype)
    return g.to(dtype) / scale.to(dtype)
