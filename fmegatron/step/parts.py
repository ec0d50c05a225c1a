"""A loss as sums and counts: what a loss_fn returns, and how it is added up over ranks and microbatches, and divided.

def loss_fn(params, batch):
    nll, lse = ...  # [B, S], of this rank's rows
    w = batch["mask"]
    return {"lm": mean((nll * w).sum(), w.sum()), "z": 1e-4 * mean((lse.square() * w).sum(), w.sum())}

loss = sum over the parts of weight * (sum of totals) / (sum of counts)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmegatron.collectives import Axes, axes, ops, psum
from fmegatron.step.graph.nodes import user_line
from fmegatron.step.tracing import as_count_of_number, as_of, described, line_here
from fmegatron.tree import arithmetic, structure

__all__ = [
    "Part",
    "Shown",
    "before",
    "finished",
    "lines_of",
    "mean",
    "means",
    "parts_of",
    "require_names",
    "require_same",
    "summed",
    "terms",
    "weight_differs",
]


# ---- what a loss_fn returns ------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """weight * total / count of the whole batch, all ranks and microbatches. `mean` makes it, `0.1 * part` weighs it.

    total: a sum over this rank's rows of this microbatch; floating, 0-d, or of the shape of a Part among the weights.
    count: what the sum of the totals is divided by; a 0-d tensor of these rows, or a number that is equal on all ranks
    and for all microbatches. weights: factors: numbers, 0-d tensors that are equal on all ranks and for all
    microbatches (a schedule; several microbatches refuse one of the batch), and Parts, of which the mean over the whole
    batch is meant, without gradient. over: the axes along which total and count are still to be summed; None: all data
    axes.
    """

    total: Tensor
    count: Tensor | float
    weights: tuple[Any, ...] = ()
    over: tuple[str, ...] | None = None
    line: str = ""  # that made it, for findings of a check

    def __mul__(self, weight: float | Tensor | Part) -> Part:
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number and not isinstance(weight, Part) and not (isinstance(weight, Tensor) and not weight.dim()):
            got = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else structure.in_words(weight)
            raise ValueError(
                f"weight of a part: got {got}, wanted a number, a 0-d tensor that is equal on all ranks, or another "
                "mean; what differs from token to token is multiplied before the total is summed"
            )
        # `weight * part` and `part * weight` are one loss: what has a gradient is the part, whichever stands first.
        if isinstance(weight, Part) and weight.total.requires_grad and not self.total.requires_grad:
            return weight * self
        return dataclasses.replace(self, weights=(*self.weights, weight))

    __rmul__ = __mul__

    def __add__(self, other: object) -> Part:
        raise ValueError(
            f"a mean and {structure.in_words(other)}: got their sum, wanted both by name, as each has its own count; "
            'return a dict of them: {"lm": lm, "z": 0.1 * z}'
        )

    __radd__ = __add__


def mean(total: Tensor, count: Tensor | float, over: Sequence[str] | str | None = None) -> Part:
    """`total / count` of the whole batch, for a loss_fn or its metrics: sums over this rank's rows, never divided.

    The step adds up totals and counts over data ranks and microbatches, in fp64, and divides once; where nothing
    counts, the part is NaN and has no gradient.

    Args:
        total: the sum over these rows, a 0-d floating tensor: `(nll * mask).sum()`. Of another shape only with a weight
            of that shape: `E * (mean(probs_E, tokens) * mean(load_E, K * tokens))`.
        count: how much counts, a 0-d tensor of these rows (`mask.sum()`: bool sums, whole numbers, fp32 and fp64), or a
            number that is equal on all ranks and for all microbatches (`nll.numel()`). Without gradient.
        over: the axes along which both are still to be summed; None: all data axes. A loss of whole rows on a mesh that
            splits sequences is equal on the ranks of cp: then those of the rows alone, `("dp", "fsdp")`.

    Raises ValueError for a total that is not floating, a count of another shape, of 16 bits or with a gradient, or one
    that is none.
    """
    if not isinstance(total, Tensor) or not total.is_floating_point():
        raise ValueError(
            f"mean: total: got {structure.in_words(total)}, wanted a floating tensor, the sum over these rows"
        )
    if isinstance(count, Tensor):
        if count.dim():
            raise ValueError(f"mean: count: got shape {tuple(count.shape)}, wanted one number; take its .sum()")
        if count.dtype == torch.bool or count.is_complex():
            raise ValueError(f"mean: count: got {count.dtype}, wanted a number; take the .sum() of the mask")
        if count.is_floating_point() and count.dtype.itemsize < 4:
            raise ValueError(
                f"mean: count: got {count.dtype}, in which 256 + 1 is 256, wanted float32 or whole numbers; "
                "mask.sum() of a bool, or mask.float().sum()"
            )
        if count.requires_grad:
            raise ValueError(
                "mean: count: got one with a gradient, wanted one without, as the gradient of a mean here is that of "
                "its total; count.detach() where the count is meant as a number; a loss that also learns what it "
                "divides by is a plain scalar, summed with psum (docs/losses.md)"
            )
    elif isinstance(count, bool) or not isinstance(count, int | float) or not math.isfinite(count):
        raise ValueError(f"mean: count: got {structure.in_words(count)}, wanted a 0-d tensor or a finite number")
    over = (over,) if isinstance(over, str) else over if over is None else tuple(over)
    return Part(total, count, (), over, user_line(line_here()))


def parts_of(loss_fn: Callable, loss: Any) -> dict[str, Part] | None:
    """{name: Part} of the loss that loss_fn returned, {"loss": part} of a Part; None of anything else."""
    if isinstance(loss, Part):
        return {"loss": loss}
    if not isinstance(loss, dict) or not any(isinstance(part, Part) for part in loss.values()):
        return None
    for name, part in loss.items():
        if not isinstance(part, Part) or not isinstance(name, str):
            raise ValueError(
                f"{described(loss_fn)}: part {name!r} of its loss: got {structure.in_words(part)}, wanted "
                "step.mean(total, count); what is no part of the loss goes behind it: return parts, metrics"
            )
    if "loss" in loss and len(loss) > 1:
        raise ValueError(
            f"{described(loss_fn)}: got a part named 'loss' beside others, wanted another name, as the step shows "
            "their sum under this one; rename it, such as 'lm'"
        )
    return dict(loss)


def require_names(loss_fn: Callable, parts: Mapping[str, Part], metrics: Mapping[str, Any]) -> None:
    """ValueError for metrics that are no dict, and for one with the name of one that the step makes of the parts."""
    if not isinstance(metrics, dict):
        raise ValueError(
            f"{described(loss_fn)}: beside parts: got {structure.in_words(metrics)}, wanted a dict of metrics"
        )
    taken = {"loss", *parts, *(f"{name}/count" for name in parts)} & set(metrics)
    if taken:
        name = min(taken)
        raise ValueError(
            f"metric {name!r}: got one of {described(loss_fn)}, wanted another name, as the step shows the mean of a "
            "part, its count or the loss under this one; leave it out, or rename it"
        )


# ---- sums ------------------------------------------------------------------------------------------------------------
def before(parts: Mapping[str, Part], axes: Axes) -> dict[str, dict[str, Tensor]]:
    """{axes: {name: value}} of one microbatch: what must be known of the whole batch before the first backward."""
    found: dict[str, dict[str, Tensor]] = {}

    def add(key: str, value: Any, part: Part) -> None:
        if isinstance(value, Tensor):
            found.setdefault(_over(part, axes).key, {})[key] = value.detach().double()

    for name, part in parts.items():
        add(f"{name}/count", _count_as_terms(part, axes), part)
        for i, weight in enumerate(part.weights):
            if isinstance(weight, Part):
                _require_simple(f"{name}: weight {i}", weight)
                add(f"{name}/total of weight {i}", _as_terms(weight, weight.total, axes), weight)
                add(f"{name}/count of weight {i}", _count_as_terms(weight, axes), weight)
    return found


def lines_of(parts: Iterable[Part], axes: Axes) -> dict[str, str]:
    """{axes: the lines that made what is summed over them}, for findings of a check."""
    found: dict[str, dict[str, None]] = {}
    for part in parts:
        for one in (part, *(w for w in part.weights if isinstance(w, Part))):
            found.setdefault(_over(one, axes).key, {})[one.line] = None
    return {key: f"{', '.join(lines)} (in step.mean, {_SUMS})" for key, lines in found.items()}


_SUMS = "which sums it over the ranks itself: give each rank its own part, or over= for whole rows"


def summed(
    found: Sequence[Mapping[str, Mapping[str, Tensor]]], axes: Axes, lines: Mapping[str, str]
) -> dict[str, Tensor]:
    """{name: sum over microbatches and ranks}: one psum of one small fp64 vector for each set of axes (mostly one)."""
    sums: dict[str, Tensor] = {}
    for over, first in found[0].items():
        values = [functools.reduce(operator.add, [one[over][name] for one in found]) for name in first]
        with as_of(lines[over]):
            vector = torch.cat([v.reshape(-1) for v in values])
            together = psum(vector, axes[tuple(over.split("+")) if over else ()]).split([v.numel() for v in values])
        sums |= {name: v.view(one.shape) for name, v, one in zip(first, together, values, strict=True)}
    return sums


class Shown(NamedTuple):
    """Of one microbatch, what is added up to be shown: a tree, as a trace returns it.

    totals: {axes: {"part NAME", "metric NAME", "count NAME": fp64}}, undivided, so that a check proves their sum.
    factors: {name: the weights that are no Parts}. counts: {name: count of the whole batch}, where it is a number, of
    parts, of metrics and of the means among weights. dtypes: of the means. lines: `lines_of`. made_at: {name: the line
    that made it}, for errors. numbers: {name: (count that is shown, its factors: numbers of ranks along each
    axis, and of microbatches)} of parts whose count is one.
    """

    totals: dict[str, dict[str, Tensor]]
    factors: dict[str, list[Any]]
    counts: dict[str, float]
    dtypes: dict[str, torch.dtype]
    lines: dict[str, str]
    made_at: dict[str, str]
    numbers: dict[str, tuple[float, tuple[int, ...]]]


def terms(
    parts: Mapping[str, Part], metrics: Mapping[str, Part], sums: Mapping[str, Tensor], axes: Axes, n: int
) -> tuple[Tensor, Shown]:
    """(this rank's share of the loss, differentiable, a pending sum; what is shown) of one of n microbatches."""
    loss, shown = None, Shown({}, {}, {}, {}, lines_of([*parts.values(), *metrics.values()], axes), {}, {})
    for name, part in parts.items():
        total = _as_terms(part, _total(name, part, sums, axes, n), axes)
        count = _count(f"{name}/count", part, sums, axes, n)
        numbers = [w for w in part.weights if not isinstance(w, Part)]
        share = functools.reduce(operator.mul, numbers, _inverse(count))
        term = total * (share.to(total.dtype) if isinstance(share, Tensor) else share)
        loss = term if loss is None else loss + term
        shown.factors[name] = [w.detach() if isinstance(w, Tensor) else w for w in numbers]
        for i, weight in enumerate(part.weights):
            if isinstance(weight, Part) and not isinstance(weight.count, Tensor):
                key = f"{name}/count of weight {i}"
                shown.counts[key], shown.made_at[key] = _count(key, weight, sums, axes, n), weight.line
        _note(shown, "part", name, total, part, axes, count)
        if not isinstance(part.count, Tensor):
            times = (*_over(part, axes).axis.sizes, n)
            shown.numbers[name] = float(part.count) * math.prod(times), times
    for name, part in metrics.items():
        _require_simple(f"metric {name!r}", part)
        if part.total.dim():
            raise ValueError(f"metric {name!r}: got a total of shape {tuple(part.total.shape)}, wanted its sum")
        count = part.count if isinstance(part.count, Tensor) else _count("", part, sums, axes, n)
        total = _as_terms(part, part.total.to(arithmetic.working_dtype(part.total.dtype)), axes)
        _note(shown, "metric", name, total, part, axes, count)
        if isinstance(count, Tensor):  # of no gradient, and so not known before
            shown.totals[_over(part, axes).key][f"count {name}"] = _count_as_terms(part, axes).double()
    assert loss is not None, "a loss has parts"
    return loss, shown


def _note(shown: Shown, kind: str, name: str, total: Tensor, part: Part, axes: Axes, count: Any) -> None:
    shown.totals.setdefault(_over(part, axes).key, {})[f"{kind} {name}"] = total.detach().double()
    shown.dtypes[name], shown.made_at[name] = total.dtype, part.line
    if not isinstance(count, Tensor):
        shown.counts[name] = count


def finished(found: Sequence[Shown], sums: Mapping[str, Tensor], axes: Axes) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of all microbatches and ranks: "loss", each part's mean by its name and its "NAME/count"."""
    loss: Any = 0
    means, counts, first = {}, {}, found[0]
    values = summed([one.totals for one in found], axes, first.lines)
    for key, value in values.items():
        kind, _, name = key.partition(" ")
        if kind == "count":
            continue
        count = first.counts[name] if name in first.counts else None
        if count is not None:
            count = torch.full((), count, dtype=torch.float64, device=value.device)
        else:
            count = sums[f"{name}/count"] if kind == "part" else values[f"count {name}"]
        quotient, alive = value / count, count != 0
        means[name] = torch.where(alive, quotient, torch.nan).to(first.dtypes[name])
        if kind == "part":
            counts[f"{name}/count"] = count
            if name in first.numbers:
                number, times = first.numbers[name]
                with as_count_of_number(times):
                    counts[f"{name}/count"] = torch.full_like(count, number)
            factor = functools.reduce(operator.mul, first.factors[name], 1.0)
            loss = loss + torch.where(alive, quotient, 0) * factor
    dtype = functools.reduce(torch.promote_types, [first.dtypes[name] for name in first.factors])
    loss = loss.to(dtype)
    return loss, {"loss": loss} | means | counts | {"loss": loss}


def weight_differs(who: str, what: str) -> ValueError:
    """The error of a weight that is not the same for all microbatches. what: which one, and how that is known."""
    return ValueError(
        f"{who}: {what}, wanted one that is the same for all microbatches, as the loss of the whole batch has one "
        "weight; of the batch, take a mean: step.mean(total, count) * part, whose value over the whole batch is meant; "
        "multiply what differs into the total; or take microbatches=1"
    )


def require_same(who: str, found: Sequence[Shown]) -> None:
    """ValueError, naming the part, for weights, and for counts that are numbers, which differ between microbatches that
    have been computed outside of a trace; inside of one `step.cut` looks at what they are made of."""
    first, *others = found
    for name, given in first.factors.items():
        for i, one in enumerate(given):
            values = [one, *(other.factors[name][i] for other in others)]
            if not all(_equal(one, value) for value in values):
                shown = ", ".join(f"{float(value):.6g}" for value in values)
                raise weight_differs(who, f"part {name!r} (of {first.made_at[name]}): got the weights {shown}")
    for name, count in first.counts.items():
        counts = [count, *(other.counts[name] for other in others)]
        if len(set(counts)) > 1:
            raise ValueError(
                f"{who}: part {name!r} (of {first.made_at[name]}): got a count that is another number in each "
                "microbatch, wanted a 0-d tensor of these rows, which are added up; leave out .item() and int(): "
                "mask.sum()"
            )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b) or bool(a.isnan() & b.isnan())
    return bool(a == b or a != a and b != b)


def means(parts: Mapping[str, Part], axes: Axes) -> dict[str, Tensor]:
    """{name: mean over all ranks, "NAME/count": its count} of a batch, for an evaluation.

        def heldout_step(params, batch):
            parts, _ = model.loss(params, batch, decoder)
            return step.means({"heldout_loss": parts["lm"]}, axes)

    `loop.evaluate` weighs the means of several batches by their counts. Numbers among the weights are left out.
    """
    named = dict(parts) if isinstance(parts, Mapping) else {}
    if not named or not all(isinstance(part, Part) for part in named.values()):
        raise ValueError(f"means: got {structure.in_words(parts)}, wanted {{name: step.mean(total, count)}}")
    sums = summed([before(named, axes)], axes, lines_of(named.values(), axes))
    _, found = finished([terms(named, {}, sums, axes, 1)[1]], sums, axes)
    return {name: value for name, value in found.items() if name != "loss" or name in named}


# ---- of one part -----------------------------------------------------------------------------------------------------
class _Over(NamedTuple):
    key: str
    axis: axes.Axis


def _over(part: Part, axes: Axes) -> _Over:
    if part.over is not None:
        wrong = [name for name in part.over if axes.mesh[name] > 1 and name not in axes.data]
        if wrong:
            raise ValueError(
                f"mean: over: got {part.over} on the mesh {axes.mesh}, wanted some of the data axes {axes.data}, over "
                "which losses are summed; leave out " + ", ".join(map(repr, wrong))
            )
    axis = axes[axes.data if part.over is None else part.over]
    return _Over("+".join(axis.names), axis)


def _as_terms(part: Part, total: Tensor, axes: Axes) -> Tensor:
    """A total as a term of the sum over the ranks: what all of them have, a term for each of equal counts.

    Where each rank counts 1, it is divided by their number alone, so that a check sees that means of each one's rows
    become the mean of all.
    """
    axis = _over(part, axes).axis
    with as_of(part.line):
        total = ops.as_terms(total, axis, part.count)
        return total / axis.size if _counts_one(part) and axis.size > 1 else total


def _count_as_terms(part: Part, axes: Axes) -> Any:
    """A count as a term of the sum over the ranks: of rows that all of them have as many of."""
    if not isinstance(part.count, Tensor):
        return part.count
    with as_of(part.line):
        return ops.as_terms(part.count, _over(part, axes).axis, part.count)


def _counts_one(part: Part) -> bool:
    return not isinstance(part.count, Tensor) and part.count == 1


def _require_simple(what: str, part: Part) -> None:
    if part.weights:
        raise ValueError(f"{what}: got a mean with weights, wanted one without; multiply its total, or the loss's part")


def _count(key: str, part: Part, sums: Mapping[str, Tensor], axes: Axes, n: int) -> Any:
    """The count of the whole batch. A number stands for each rank and microbatch: no psum of it (1: `_as_terms`). It
    knows of which sizes and numbers of ranks it is made, so that a check sees whether it counts all rows."""
    if isinstance(part.count, Tensor):
        return sums[key]
    return float(n) if _counts_one(part) else _over(part, axes).axis.size * part.count * n


def _inverse(count: Any) -> Any:
    """1 / count; 0 where nothing counts, so that no gradient is 0/0."""
    if not isinstance(count, Tensor):
        return 1 / count if count else 0.0
    alive = count != 0
    return torch.where(alive, 1 / torch.where(alive, count, 1), 0)


def _total(name: str, part: Part, sums: Mapping[str, Tensor], axes: Axes, n: int) -> Tensor:
    """The total, 0-d, times the means among the weights, element by element. Differentiable, a pending sum."""
    total = part.total.to(arithmetic.working_dtype(part.total.dtype))
    shapes = {w.total.shape for w in part.weights if isinstance(w, Part)}
    if total.dim() and total.shape not in shapes or any(shape not in ((), total.shape) for shape in shapes):
        raise ValueError(
            f"part {name!r}: got a total of shape {tuple(total.shape)}"
            + "".join(f" times a mean of shape {tuple(shape)}" for shape in shapes)
            + ", wanted one number, or the shape of a mean that it is multiplied with; take the .sum() of the total"
        )
    for i, weight in enumerate(part.weights):
        if isinstance(weight, Part):
            count = _count(f"{name}/count of weight {i}", weight, sums, axes, n)
            whole = sums[f"{name}/total of weight {i}"]
            total = total * (whole * _inverse(count)).to(total.dtype)
    return total.sum() if total.dim() else total
