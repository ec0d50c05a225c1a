"""Microbatches: loss, gradients and metrics of a batch that is computed in parts, as those of the full batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fmegatron import tree
from fmegatron.collectives import Axes
from fmegatron.layout import rank_counts
from fmegatron.step.batch_rows import cut_rows
from fmegatron.step.cut import OneNode
from fmegatron.step.gradient import Gradient, LossFn
from fmegatron.step.graph.nodes import meta_of
from fmegatron.step.output_buffers import barrier
from fmegatron.step.parts import finished, require_same, summed
from fmegatron.step.reduce import widened
from fmegatron.step.signature import require_constants, signature_of
from fmegatron.step.torch_private import FakeTensorMode, is_tracing, outside_of_tracing
from fmegatron.step.tracing import described, trace
from fmegatron.tree import structure

__all__ = ["Batch", "accumulate", "accumulated", "alone", "gradient_of", "name_of", "of_microbatches", "require_parts"]


def accumulate(
    loss_fn: Callable,
    n: int,
    *,
    each: Callable | None = None,
    weight: str | None = None,
    dtype: torch.dtype = torch.float32,
    axes: Axes | None = None,
    twice: bool = False,
) -> Callable:
    """`f(params, batch, *args) -> ((loss, aux), grads)`: `value_and_grad(loss_fn)` of a batch in n microbatches.

    Args:
        loss_fn: loss_fn(params, microbatch, *args) -> loss or (loss, aux), as `value_and_grad` takes it.
        n: the number of microbatches. Of a batch, a tree of tensors, dim 0 of each (this rank's rows) is cut into n
            equal consecutive parts. Other leaves of the batch, and args, are the same for every microbatch: what must
            differ between them (the count of `nn.dropout`) is a leaf with rows. Under `DataParallel.batch_layout(...,
            microbatches=n)` microbatch m is the rows [m·B/n, (m+1)·B/n) of the full batch on every mesh; under another
            layout it is other rows on every mesh, which a loss that couples the rows of a microbatch shows. check, jit
            and simulate refuse such a layout where they know it; local tensors that were split by hand are
            taken as they are.
        each: applied to the gradients of every microbatch before they are added: the reduction that ZeRO-2 and 3 make
            each time.
        weight: of a loss that is a scalar, the name of one number in aux, equal on all ranks, by which each microbatch
            counts. None: "tokens", the number of tokens that bear a loss, if aux has it: the result is the mean over
            all tokens however unevenly a mask spreads them; without it, microbatches count equally. A microbatch of
            weight 0 takes no part, whatever its loss is (0/0).
        dtype: in which gradients of lower precision are added up and returned, whatever they travelled in.
        axes: over whose data axes parts are added up, as of `value_and_grad`.
        twice: counts may depend on parameters, for one more forward pass of all microbatches.

    A loss of parts (`step.mean`) is exact for any n: totals and counts are added up over microbatches too, and divided
    once. A loss that is a scalar is normalized in each microbatch on its own, and the result is that of the full batch
    where loss and metrics are means or counts:

        loss, gradients, floating-point leaves of aux   averaged by the weights of the microbatches
        integer leaves, and the weight itself           counts: summed
        leaves with rows of the batch on dim 0          concatenated
        Python numbers                                  what the full batch gives

    Where aux has leaves that are neither 0-d tensors nor text, loss_fn is traced once more, with the full batch, to
    see which they are.

    Inside jit the gradient of one microbatch is one opaque node, compiled once for any n; the counts of all are known
    before the first, by the part of its graph that makes them (`step.cut`). Outside of jit a loss of parts runs its
    forward passes twice.
    Raises ValueError when dim 0 does not divide by n; for a batch without tensors or without rows; inside jit, naming
    it, for a count that depends on parameters, unless twice; for a weight of a part that is not the same for all
    microbatches (inside jit: that depends on the batch); for a weight that aux does not have, or that is not one
    number; and, naming the metric, where n microbatches cannot give what one does: a 0-d bool, a shape that depends on
    the number of rows in another way, a Python number that depends on data.
    """
    if not callable(loss_fn):
        raise ValueError(
            f"accumulate: got {structure.in_words(loss_fn)}, wanted a function loss_fn(params, batch, *args)"
        )
    of = LossFn(loss_fn, axes, None, n=n)
    several = accumulated(of, each, weight, dtype, twice)

    @functools.wraps(loss_fn)
    def with_grad(params, batch, *args):
        require_parts(batch, n)
        if n > 1:
            loss, aux, grads, _ = several(params, batch, args, None)
            return (loss, aux), grads if each else of.known(grads, params)
        with of.differentiated(params, beside=(batch, args)) as call:
            call.returned = loss_fn(call.params, batch, *args)
        loss, aux, grads, _ = alone(of, call.gradient, params, weight)
        return (loss, aux), grads if each is None else each(grads)

    return with_grad


def accumulated(of: LossFn, each: Callable | None, weight: str | None, dtype: torch.dtype, twice: bool) -> Callable:
    """`f(params, batch, args, scale) -> (loss, aux, grads, whether the loss is that of the whole batch)`: `accumulate`,
    with several microbatches, of a loss that is multiplied by `scale`, 0-d or None, before it is differentiated."""
    if isinstance(of.n, bool) or not isinstance(of.n, int) or of.n < 1:
        raise ValueError(f"accumulate: n: got {of.n!r}, wanted a whole number of microbatches, 1 or more")
    each, n, nodes, full = each or (lambda grads: grads), of.n, {}, {}

    def several(params, batch, args, scale):
        require_parts(batch, n)
        _, leaves, spec = structure.flatten(batch)
        cut = [cut_rows(x, n) if isinstance(x, torch.Tensor) else [x] * n for x in leaves]
        batches, total, weights, found = [list(parts) for parts in zip(*cut, strict=True)], None, [], []
        calls = [(params, structure.unflatten(spec, parts), args, scale) for parts in batches]
        sums, gradient = (_traced if is_tracing() else _eager)(of, calls, nodes, twice)
        for parts in batches:
            if total is not None:
                parts = _after(parts, tree.leaves(total))
            one = gradient((params, structure.unflatten(spec, parts), args, scale), sums)
            found.append(one)
            if one.shown:
                _require_no_weight(weight)
            # The totals of parts were divided by the counts of all: no weight, and no division behind the loop.
            weights.append(None if one.shown else weight_of(one.loss, one.aux, weight))
            grads = _weighted(tree.map(lambda g: widened(g, dtype), each(one.grads)), weights[-1])
            total = grads if total is None else tree.map(torch.add, total, grads)
        batch = Batch((params, batch, *args), sums, full)
        return of_microbatches(of, batch, found, weights, total, weight=weight, dtype=dtype)

    return several


class Batch(NamedTuple):
    """Of the full batch: the arguments, {name: sum over all microbatches}, and what was seen of it."""

    args: tuple
    sums: Mapping[str, torch.Tensor]
    known: dict


def of_microbatches(
    of: LossFn, batch: Batch, found: list[Gradient], weights: list, total: Any, *, weight, dtype
) -> tuple[Any, Any, structure.Tree, bool]:
    """What `accumulated` gives, of the gradients of all microbatches.

    weights: of a scalar loss, by which they count; None: equally, or parts. total: the weighted sum of the gradients.
    """
    n = len(found)
    count = n if weights[0] is None else _not_zero(sum(weights[1:], weights[0]))
    metrics = [structure.flatten(one.aux) for one in found]
    kinds = _kinds(of, batch.args, metrics, weight, batch.known)
    leaves = [_combined(kind, [flat[1][i] for flat in metrics], weights, count, dtype) for i, kind in enumerate(kinds)]
    aux = structure.unflatten(metrics[0][2], leaves)
    if shown := [one.shown for one in found if one.shown]:
        if not is_tracing():
            require_same(described(of.loss_fn), shown)
        loss, means = finished(shown, batch.sums, of.axes_of(batch.args[0]))
        return loss, {**means, **aux}, total, True
    loss = _combined("mean", [one.loss for one in found], weights, count, dtype)
    return loss, aux, tree.map(lambda g: g / count, total), False


def alone(of: LossFn, found: Gradient, params, weight: str | None) -> tuple[Any, Any, structure.Tree, bool]:
    """What `accumulated` gives, of the gradient of the only microbatch there is."""
    if found.shown:
        _require_no_weight(weight)
    else:
        weight_of(found.loss, found.aux, weight)  # an error where several microbatches would be one
    (loss, aux), grads = of.whole(found, params)
    return loss, aux, grads, bool(found.shown)


def _traced(of: LossFn, calls: list[tuple], nodes: dict, twice: bool) -> tuple[dict, Callable]:
    """(sums of all microbatches, the gradient of one given them): one opaque node, traced once."""
    leaves, spec = tree.leaves(calls[0]), structure.flatten(calls[0])[2]
    key = (spec, tuple(signature_of(leaves, labels=True)))
    try:
        known = key in nodes
    except TypeError:
        require_constants(calls[0])
        raise
    if not known:
        nodes[key] = OneNode(
            functools.partial(gradient_of, of), calls[0], name_of(of.loss_fn), described(of.loss_fn), twice
        )
    node = nodes[key]
    if node.counts is None:
        return {}, node.gradient
    early = [node.before(call) for call in calls]
    return summed([one.before for one in early], of.axes_of(calls[0][0]), early[0].lines), node.gradient


def _eager(of: LossFn, calls: list[tuple], nodes: dict, twice: bool) -> tuple[dict, Callable]:
    """The same where nothing is traced: the counts of parts are those of a forward pass of each microbatch, and so may
    depend on parameters. Whether there are any is seen at the first call, whose gradient is used if not."""
    del twice
    done = []
    if "counted" not in nodes:
        first = gradient_of(of, *calls[0])
        nodes["counted"] = bool(first.before)
        done = [] if first.before else [first]
    sums = {}
    if nodes["counted"]:
        early, lines = zip(*(of.before(params, (batch, *args)) for params, batch, args, _ in calls), strict=True)
        sums = summed(early, of.axes_of(calls[0][0]), lines[0])
    return sums, lambda call, sums: done.pop() if done else gradient_of(of, *call, sums=sums)


def gradient_of(of: LossFn, params, batch, args, scale, sums: dict | None = None) -> Gradient:
    """The gradient of one microbatch."""
    return of.gradient(params, (batch, *args), scale=scale, sums=sums)


def _require_no_weight(weight: str | None) -> None:
    if weight is not None:
        raise ValueError(
            f"weight={weight!r}: got a loss of parts, which have counts of their own, wanted none; leave weight out"
        )


def name_of(fn: Callable) -> str:
    """The name of a function, for operators and errors."""
    return getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)


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
            f"{structure.did_you_mean(name, [str(k) for k in known])}; None weighs by 'tokens' where there is one"
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
def _kinds(of: LossFn, args: tuple, metrics: list, weight: str | None, known: dict) -> list:
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
    full = leaves if plain else _of_full_batch(of, args, known)
    return [
        _kind(path, x, whole, len(metrics), path == (weight or "tokens"))
        for path, x, whole in zip(paths, leaves, full, strict=True)
    ]


def _kind(path: str, x: Any, full: Any, n: int, is_weight: bool) -> Any:
    if not isinstance(x, torch.Tensor):
        return (rank_counts.plain(full),)
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


def _of_full_batch(of: LossFn, args: tuple, known: dict) -> list:
    """The leaves of aux for the full batch: fake tensors (their shapes count) and Python values."""
    _, leaves, spec = structure.flatten(args)
    key = spec, tuple(meta_of(x) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
    if key not in known:
        with outside_of_tracing():
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            traced = trace(lambda params, *rest: of.gradient(params, rest), args, fake_mode=mode)
        known[key] = tree.leaves(traced.result([node.meta["val"] for node in traced.outputs]).aux)
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
