"""Microbatches: loss, gradients and metrics of a batch that is computed in parts, as those of the full batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fmegatron import tree
from fmegatron.step.batch_rows import cut_rows
from fmegatron.step.graph.nodes import meta_of, storage_of
from fmegatron.step.jit import jit
from fmegatron.step.output_buffers import barrier
from fmegatron.step.reduce import widened
from fmegatron.step.torch_private import FakeTensorMode, is_tracing, outside_of_tracing
from fmegatron.step.trace import trace

__all__ = ["accumulate"]


def accumulate(
    grad_fn: Callable, n: int, *, each: Callable | None = None, weight: str | None = None, dtype=torch.float32
) -> Callable:
    """`f(params, batch, *args)` that runs `grad_fn(params, microbatch, *args) -> ((loss, aux), grads)` n times.

    Args:
        grad_fn: as `value_and_grad` makes it.
        n: the number of microbatches. Of a batch, a tree of tensors, dim 0 of each (this rank's rows) is cut into n
            equal consecutive parts. Other leaves of the batch, and args, are the same for every microbatch: what must
            differ between them (the count of `nn.dropout`) is a leaf with rows. Under `DataParallel.batch_layout(...,
            microbatches=n)` microbatch m is the rows [m·B/n, (m+1)·B/n) of the full batch on every mesh; under another
            layout it is other rows on every mesh, which a loss that couples the rows of a microbatch shows. check, jit
            and simulate refuse such a layout where they know it; local tensors that were split by hand are
            taken as they are.
        each: applied to the gradients of every microbatch before they are added: the reduction that ZeRO-2 and 3 make
            each time.
        weight: the name of one number in aux, equal on all ranks, by which each microbatch counts. None: "tokens", the
            number of tokens that bear a loss, if aux has it: the result is the mean over all tokens however unevenly a
            mask spreads them; without it, microbatches count equally. A microbatch of weight 0 takes no part, whatever
            its loss is (0/0).
        dtype: in which gradients of lower precision are added up and returned, whatever they travelled in.

    The result is that of `grad_fn` on the full batch where loss and metrics are means or counts, each microbatch being
    normalized on its own:

        loss, gradients, floating-point leaves of aux   averaged by the weights of the microbatches
        integer leaves, and the weight itself           counts: summed
        leaves with rows of the batch on dim 0          concatenated
        Python numbers                                  what the full batch gives

    Where aux has leaves that are neither 0-d tensors nor text, `grad_fn` is traced once more, with the full batch, to
    see which they are.

    Inside jit the gradient of one microbatch is one opaque node, compiled once for any n.
    Raises ValueError when dim 0 does not divide by n; for a batch without tensors or without rows; for a weight that
    aux does not have, or that is not one number; and, naming the metric, where n microbatches cannot give what one
    does: a 0-d bool, a shape that depends on the number of rows in another way, a Python number that depends on data.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"accumulate: n: got {n!r}, wanted a whole number of microbatches, 1 or more")
    each = each or (lambda grads: grads)
    if n == 1:

        def once(params, batch, *args):
            require_parts(batch, 1)
            out, grads = grad_fn(params, batch, *args)
            loss, aux = out
            weight_of(loss, aux, weight)
            return out, each(grads)

        return once
    one_node, known = jit(_with_own_metrics(grad_fn)), {}

    def accumulated(params, batch, *args):
        require_parts(batch, n)
        run = one_node if is_tracing() else grad_fn
        _, leaves, spec = tree.flatten(batch)
        cut = [cut_rows(x, n) if isinstance(x, torch.Tensor) else [x] * n for x in leaves]
        total, weights, losses, metrics = None, [], [], []
        for parts in zip(*cut, strict=True):
            if total is not None:
                parts = _after(list(parts), tree.leaves(total))
            (loss, aux), grads = run(params, tree.unflatten(spec, list(parts)), *args)
            losses.append(loss)
            metrics.append(tree.flatten(aux))
            weights.append(weight_of(loss, aux, weight))
            grads = _weighted(tree.map(lambda g: widened(g, dtype), each(grads)), weights[-1])
            total = grads if total is None else tree.map(torch.add, total, grads)
        count = n if weights[0] is None else _not_zero(sum(weights[1:], weights[0]))
        kinds = _kinds(grad_fn, (params, batch, *args), metrics, weight, known)
        found = [
            _combined(kind, [flat[1][i] for flat in metrics], weights, count, dtype) for i, kind in enumerate(kinds)
        ]
        loss = _combined("mean", losses, weights, count, dtype)
        return (loss, tree.unflatten(metrics[0][2], found)), tree.map(lambda g: g / count, total)

    return accumulated


def require_parts(batch: Any, n: int) -> None:
    """ValueError, naming the leaf, unless every tensor of the batch can be cut into n parts and one has rows."""
    tensors = [(p, x) for p, x in zip(tree.paths(batch), tree.leaves(batch), strict=True) if torch.is_tensor(x)]
    if n > 1 and not tensors:
        raise ValueError(
            f"accumulate: got a batch without tensors, wanted rows to cut into {n} microbatches; give it one, or "
            "microbatches=1"
        )
    for path, x in tensors if n > 1 else ():
        if x.dim() == 0 or x.shape[0] % n:
            raise ValueError(
                f"batch leaf {path!r}: got local shape {tuple(x.shape)}, wanted a dim 0 that {n} microbatches divide; "
                + ("pass it as another argument, or expand it to one for each row" if x.dim() == 0 else
                   "choose a number of microbatches that divides this rank's rows")
            )  # fmt: skip
    if tensors and all(x.dim() and not x.shape[0] for _, x in tensors):
        path, x = tensors[0]
        raise ValueError(f"batch leaf {path!r}: got local shape {tuple(x.shape)}, wanted 1 row or more on dim 0")


def _after(parts: list, sums: list) -> list:
    """The next microbatch, which exists after the sums of the last ones do. Without this, the compiler makes one kernel
    of all the sums at the end, and the gradients of every microbatch are alive until then."""
    tensors = [i for i, x in enumerate(parts) if isinstance(x, torch.Tensor)]
    smallest = min(tensors, key=lambda i: parts[i].numel())
    parts[smallest] = functools.reduce(barrier, sums, parts[smallest])
    return parts


# ---- weights ---------------------------------------------------------------------------------------------------------
def weight_of(loss: torch.Tensor, aux: Any, name: str | None) -> torch.Tensor | None:
    """The number by which a microbatch counts, 0-d; None: all count equally."""
    known = aux if isinstance(aux, dict) else {}
    if name is not None and name not in known:
        raise ValueError(
            f"weight={name!r}: got metrics {', '.join(map(str, known)) or 'without any name'}, wanted one of that name"
            f"{tree.did_you_mean(name, [str(k) for k in known])}; None weighs by 'tokens' where there is one"
        )
    name = name or "tokens"
    found = known.get(name)
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return loss.new_full((), found, dtype=torch.float64 if isinstance(found, float) else torch.int64)
    if found is None or isinstance(found, torch.Tensor) and not found.dim() and found.dtype != torch.bool:
        return found
    got = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
    raise ValueError(
        f"metric {name!r}: got {got}, wanted one number, by which a microbatch counts among others; give the number "
        "(of tokens that bear a loss: mask.sum()), or rename the metric"
    )


def _weighted(values: Any, weight: torch.Tensor | None) -> Any:
    """A tree of tensors times a microbatch's weight; where that is 0, 0 instead of a NaN."""
    if weight is None:
        return values
    alive = weight != 0
    return tree.map(lambda x: torch.where(alive, x * weight.to(x.dtype), 0), values)


def _not_zero(total: torch.Tensor) -> torch.Tensor:
    """The sum of the weights as a divisor: 1 where there is nothing to divide."""
    return torch.where(total != 0, total, 1)


# ---- metrics ---------------------------------------------------------------------------------------------------------
def _with_own_metrics(grad_fn: Callable) -> Callable:
    """`grad_fn`, whose metrics share no memory with its arguments: a leaf of the batch is returned as a copy."""

    @functools.wraps(grad_fn)
    def with_grad(*args):
        (loss, aux), grads = grad_fn(*args)
        given = {storage_of(x) for x in tree.leaves(args) if isinstance(x, torch.Tensor)}
        shares = tree.map(lambda x: isinstance(x, torch.Tensor) and storage_of(x) in given, aux)
        return (loss, tree.map(lambda x, shared: x.clone() if shared else x, aux, shares)), grads

    return with_grad


def _kinds(grad_fn: Callable, args: tuple, metrics: list, weight: str | None, known: dict) -> list:
    """What each leaf of aux is: "mean", "count", "rows" (of the batch), or (value,) of one that is no tensor.

    metrics: of each microbatch (paths, leaves, structure).
    """
    (paths, leaves, structure), *others = metrics
    for other, _, other_structure in others:
        if other_structure != structure:
            raise ValueError(
                f"accumulate: got the metrics {', '.join(other) or 'none'} of one microbatch and "
                f"{', '.join(paths) or 'none'} of another, wanted equal names; return the same ones for every batch"
            )
    for path, *values in zip(paths, *(flat[1] for flat in metrics), strict=True):
        if not isinstance(values[0], torch.Tensor) and len(set(map(repr, values))) > 1:
            raise ValueError(
                f"metric {path!r}: got {', '.join(dict.fromkeys(map(repr, values)))} of {len(values)} microbatches, "
                "wanted one Python value that does not depend on data; return a tensor"
            )
    plain = all(isinstance(x, str) or isinstance(x, torch.Tensor) and not x.dim() for x in leaves)
    full = leaves if plain else _of_full_batch(grad_fn, args, known)
    return [
        _kind(path, x, whole, len(metrics), path == (weight or "tokens"))
        for path, x, whole in zip(paths, leaves, full, strict=True)
    ]


def _kind(path: str, x: Any, full: Any, n: int, is_weight: bool) -> Any:
    if not isinstance(x, torch.Tensor):
        return (full,)
    if x.shape != full.shape:
        if x.dim() and full.shape == (n * x.shape[0], *x.shape[1:]):
            return "rows"
        raise ValueError(
            f"metric {path!r}: got shape {tuple(x.shape)} of one of {n} microbatches and {tuple(full.shape)} of the "
            "full batch, wanted the same (of a mean or a count), or the rows of the batch on dim 0; reduce it to one"
        )
    if x.dtype == torch.bool:
        raise ValueError(
            f"metric {path!r}: got a bool, which may have to hold for one of {n} microbatches or for all, wanted a "
            "number; count it (x.long() is summed), or return a share (x.float() is averaged)"
        )
    return "mean" if (x.is_floating_point() or x.is_complex()) and not is_weight else "count"


def _of_full_batch(grad_fn: Callable, args: tuple, known: dict) -> list:
    """The leaves of aux for the full batch: fake tensors (their shapes count) and Python values."""
    _, leaves, spec = tree.flatten(args)
    key = spec, tuple(meta_of(x) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
    if key not in known:
        with outside_of_tracing():
            traced = trace(grad_fn, args, fake_mode=FakeTensorMode(allow_non_fake_inputs=True))
        (_, aux), _ = traced.result([node.meta["val"] for node in traced.outputs])
        known[key] = tree.leaves(aux)
    return known[key]


def _combined(kind: Any, values: list, weights: list, count: Any, dtype: torch.dtype) -> Any:
    """One metric of all microbatches."""
    if isinstance(kind, tuple):
        return kind[0]
    if kind == "rows":
        return torch.cat(values, 0)
    if kind == "count":
        return functools.reduce(torch.add, values)
    terms = [_weighted(widened(x, dtype), w) for x, w in zip(values, weights, strict=True)]
    return (functools.reduce(torch.add, terms) / count).to(values[0].dtype)
