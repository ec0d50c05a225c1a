"""Gradients inside a pure step: value_and_grad, and the reduction that a layout asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, Wire, reshard_many
from fmegatron.layout import DataParallel, Layout
from fmegatron.step.torch_private import is_tracing, mark_backward
from fmegatron.step.trace import described

__all__ = ["loss_and_aux", "raw_gradient_layout", "reduce_gradients", "value_and_grad"]


def value_and_grad(loss_fn: Callable, dtype: torch.dtype | None = None, **of_jax: Any) -> Callable:
    """`loss_fn(params, *args) -> (loss, aux)` becomes `f(params, *args) -> ((loss, aux), grads)`.

    params: a tree of tensors; grads: the same tree, each leaf with the shape and dtype of its parameter (zeros for a
    parameter that the loss does not use). loss: a 0-d tensor. aux: a tree, returned without its gradient history.
    A loss_fn that returns only the loss gives aux = {}. Keyword arguments go to loss_fn.
    Raises ValueError, naming loss_fn's line, for a result that is none of these, and for a loss without a gradient.
    dtype: floating parameters that are narrower are cast to it before they are differentiated, so that their gradients
    have it: sums that were reduced in fp32 are not rounded to the 16 bits of a parameter. None: as the parameters are.
    """
    _require_own_arguments(dtype, of_jax)
    if not callable(loss_fn):
        raise ValueError(f"value_and_grad: got {tree.in_words(loss_fn)}, wanted a function loss_fn(params, *args)")

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
        leaves = [(leaf if dtype is None else widened(leaf, dtype)).detach().requires_grad_() for leaf in leaves]
        with torch.enable_grad():
            loss, aux = loss_and_aux(loss_fn, loss_fn(tree.unflatten(spec, leaves), *args, **named))
            _require_gradient(loss_fn, loss)
            if is_tracing():
                mark_backward([loss.grad_fn])
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)]
        return (loss.detach(), tree.map(_without_history, aux)), tree.unflatten(spec, [g.detach() for g in grads])

    return with_grad


_OF_JAX = (
    ("has_aux", "leave it out: aux is given whenever loss_fn returns (loss, aux), and is {} otherwise"),
    ("argnums", "leave it out: the first argument is differentiated; put all of them into it, as one tree"),
)


def _require_own_arguments(dtype: Any, others: dict) -> None:
    """ValueError for arguments of other libraries' functions of this name, with what takes their place."""
    if not others and isinstance(dtype, torch.dtype | None):
        return
    name, value = next(iter(others.items()), ("argnums" if isinstance(dtype, int | tuple) else "dtype", dtype))
    fix = dict(_OF_JAX).get(name, "arguments of loss_fn go to the function that value_and_grad returns")
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


def raw_gradient_layout(layout: Layout, data_axes: tuple[str, ...]) -> Layout:
    """Layout of a parameter's gradient as autograd leaves it: a pending sum over the data axes that do not shard it."""
    return DataParallel(data_axes).grads_layout(layout)


def reduce_gradients(
    grads: Any,
    layouts: Any,
    axes: Axes,
    to: Any = None,
    wire: Any = Wire(),  # noqa: B008  a frozen value
    together: int = 0,
) -> Any:
    """Sum the gradients of replicas over `axes.data`: from `raw_gradient_layout` to the layout of the parameter.

    Args:
        grads: the tree of gradients, as autograd leaves them.
        layouts: of the parameters.
        axes: of their mesh.
        to: a tree of other layouts to bring them to (`Placed.grads`, `Placed.optim`): where one of them is sharded by
            an axis over which the gradient is a pending sum, the sum is a reduce-scatter; where it is still pending,
            nothing. None: the parameters' own.
        wire: in which dtype sums are made and arrive (a `Wire`, or a tree of them: `Precision.wires`).
        together: up to how many bytes leaves share a collective (`reshard_many`); 0: each leaf travels alone.
    """
    axes.require(layouts, "reduce_gradients: layouts")
    _, leaves, spec = tree.flatten(grads)
    targets = tree.leaves(layouts if to is None else to)
    sources = [raw_gradient_layout(layout, axes.data) for layout in tree.leaves(layouts)]
    wires = wire if isinstance(wire, Wire) else tree.leaves(wire)
    return tree.unflatten(spec, reshard_many(leaves, sources, targets, axes, wires, together))


def widened(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a dtype unless its own is as wide."""
    return x.to(dtype) if x.dtype.itemsize < dtype.itemsize else x
