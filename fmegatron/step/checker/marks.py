"""Combination of operands over one axis: pending reductions, scale factors, mistakes, and what is unknown.

Proofs (findings at once): a pending sum plus a complete tensor, two pending sums multiplied, a pending sum in a smooth
function, values sharded in different ways. Proofs only if nothing corrects them on the way to an output (suspects): a
pending maximum in arithmetic, a pending sum that divides, is compared or clamped, or scales what is sharded. Open
(unproven): a rank's own term beside the sum over all ranks, terms chosen by the rank's index.

A mean over a sharded dim divides by the local size: the sum of these over the ranks is n times the mean. A sum of
replicas is n times too large. Both are right once they are divided by n, as `psum(x.mean()) / n` is, so neither is a
mistake before it arrives at an output, or where only the right number will do (an addition, a function).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.collectives import kinds, table
from fmegatron.step.checker.completion import (
    comes_from_another,
    is_added_up,
    may_be_completed,
    met_in_another_order,
    pieces_paired,
)
from fmegatron.step.checker.context import Scope, op_name, suspected
from fmegatron.step.checker.entered import not_entered
from fmegatron.step.checker.shares import NO_MEAN, is_one, is_share, no_mean, portion_after, shared
from fmegatron.step.checker.sizes import Known
from fmegatron.step.checker.values import (
    NOTHING,
    OWED,
    SUMMED,
    Excess,
    First,
    Mark,
    Pending,
    Somewhere,
    Suspect,
    Unknown,
    Value,
    Varying,
    Wrong,
)
from fmegatron.step.graph.nodes import items_of

Node = torch.fx.Node
FLIPPED = MappingProxyType({"max": "min", "min": "max"})
_TERMS = frozenset(("sum", "beside", "select"))  # kinds in which operands stand for terms, and a zero for none
# Functions of a pending sum that a right step may correct later (counts, ratios): suspects, no findings at once.
_CORRECTED = frozenset("clamp clamp_min clamp_max maximum minimum reciprocal sign sgn threshold".split())
# As many of these additions as there are other ranks make the sum complete, and a psum of it n times too large; a graph
# does not show whether their number was meant to be that of the ranks.
_RING = "adds terms of a sum that came from other ranks: whether a ring has made it complete cannot be told"
_COMPLETE = 'Use psum; or declare(x, axis, "replicated") behind the last one (forward="partial" if it is not complete)'
_BY_SIZE = "Divide by the size of the axis: axes[name].size knows that it is the number of ranks, 2 does not"
_BY_ROWS = "Write it for each row (x.expand(rows).sum()), or add it behind the sum, times the number of all rows"
_AS_MEAN = "right, where what is pending was multiplied by it, and by a number whether it was cannot be told"
_TIMES = "Write axes[name].size * x, before other factors: it knows that it is the number of ranks, 0.1 * it does not"
_SIZE = "by a size of a rank's part, which is another than that of one rank"
_ROWS_OVER = "divides a rank's own rows by the number of ranks, of which one has none"
_ROWS_TIMES = "multiplies a rank's own rows by the number of ranks"
_MEAN = "Leave the division out; or write the terms as means: x.mean(), or x.sum() / len(x), before that"
_ENTER = "enter(x, axis) what all ranks have, where each begins to use it as its own; that sums its gradient"
_OWN_TERM = "combines a term of a rank with the reduction over all ranks"
# Of a scaled argument these make something equally scaled, or not scaled at all.
_KEEPS = frozenset(("same", "beside", "abs"))
_DROPS = frozenset(("nan", "finite", "sign"))
_POWERS = MappingProxyType({"sqrt": (1, 2), "square": (2, 1), "inverse": (-1, 1)})


def strongest(scope: Scope, node: Node, values: Sequence[Value], axis: str, adds: bool = False) -> Mark | None:
    """What decides over all else, whatever the op does: a finding upstream, something unproven, a suspect.

    adds: the op adds values, or puts them side by side; what is added by the rank's index may be what a part lacks (the
    offset of a scan). Of blocks this may be what came from another rank, whatever the op does.
    """
    marks = [v.marks.get(axis) for v in values]
    wrong = next((m for m in marks if isinstance(m, Wrong)), None)
    if wrong is not None:
        return wrong
    open_ = [m for m in marks if isinstance(m, Unknown)]
    if open_:
        if scope.cuts and (found := pieces_paired(scope, node, axis)) is not None:
            return found
        if scope.reordered and (found := met_in_another_order(scope, node, values, axis)) is not None:
            return found
        origins = frozenset().union(*(m.origins for m in open_))
        equal = all(
            m.equal if isinstance(m, Unknown) else v.replicated(axis) for m, v in zip(marks, values, strict=True)
        )
        gradient = any(m.gradient for m in open_)
        return Unknown(origins, all(m.own for m in open_), any(m.factor for m in open_), equal, gradient)
    suspect = next((m for m in marks if isinstance(m, Suspect)), None)
    if suspect is None:
        return None
    # Of the first rank a part may be just the beginning of the whole.
    if any(isinstance(m, First) for m in marks) or _corrected(scope, node, suspect, axis):
        return scope.unknown(suspect.node, f"{suspect.what}; whether what corrects it does so is not known")
    if any(isinstance(m, Varying) for m in marks) and (adds or (suspect.blocks and _are_sent(scope, node, axis))):
        return scope.unknown(suspect.node, f"{suspect.what}; whether what corrects it does so is not known")
    own = any(isinstance(m, Pending) and m.kind in FLIPPED and m.birth in suspect.births for m in marks)
    return scope.unknown(suspect.node, f"{suspect.what}, and is combined with it again") if own else suspect


def _are_sent(scope: Scope, node: Node, axis: str) -> bool:
    """Whether what a node combines with a rank's own block came from another rank."""
    given = [n for n in node.all_input_nodes if isinstance(v := scope.values.get(n), Value) and v.is_(axis, Varying)]
    return any(comes_from_another(n, axis) for n in given)


def _corrected(scope: Scope, node: Node, suspect: Suspect, axis: str) -> bool:
    """Whether another operand is a rank's own factor or term, made of the reduction of what the suspect comes from."""
    values = [(n, scope.values.get(n)) for n in node.all_input_nodes]
    own = [n for n, v in values if isinstance(v, Value) and v.pending(axis)]
    births = suspect.births.union(*(birth.all_input_nodes for birth in suspect.births))
    return any(scope.corrects(n, axis, births) for n in own)


def pending_after(scope: Scope, node: Node, kind: str, values: Sequence[Value], axis: str) -> Mark | None:
    """The mark over an axis over which some operands are pending, and none is unknown or suspected."""
    terms = values[1:] if kind == "select" else values
    if kind in _TERMS:
        terms = [v for v in terms if v.constant != 0]
    pending = [mark for v in terms if isinstance(mark := v.marks.get(axis), Pending)]
    others = [v for v in terms if not v.pending(axis)]
    if any(v.is_(axis, Varying, First) for v in values):
        return scope.unknown(node, "combines a pending reduction with a value that depends on the rank's index")
    if kind == "select" and not values[0].replicated(axis):
        if not pending:
            condition = values[0].marks[axis]
            assert isinstance(condition, Pending), "one of the operands is pending, and no term"
            return _misused(scope, node, condition, axis, "is the condition")
        what = "picks from a pending sum by a condition that differs between ranks"
        return suspected(node, what, "reduce first, pick after", pending[0].birth)
    if not pending:  # all were zero
        return None
    first = pending[0]
    if kind == "same":
        return first
    if len({mark.kind for mark in pending}) > 1:
        return _misused(scope, node, first, axis, "is used")
    rule = _OF_SUMS if first.kind == "sum" else _OF_EXTREMA if first.kind in FLIPPED else _OF_FORMS
    return rule(scope, node, kind, values, axis, pending, others)


def _misused(scope: Scope, node: Node, mark: Pending, axis: str, how: str) -> Suspect:
    if mark.kind in ("root", "logsumexp"):
        assert mark.birth is not None, "no layout declares it: a node has made it"
        return suspected(mark.birth, "a pending sum goes into a non-linear op",
                         f"psum or reduce_scatter over {axis!r} before it", None)  # fmt: skip
    fix = f"{'psum' if mark.kind == 'sum' else 'pmax'} over {axis!r} before it"
    return suspected(node, f"a pending {mark.kind} {how}", fix, mark.birth)


def _sums(scope, node, kind, values, axis, pending, others) -> Mark | None:
    first, local_mean = pending[0], any(v.excess[axis].power for v in values if axis in v.excess)
    if kind in _TERMS:
        owed = all(v.portion.get(axis) in OWED or v.portion.get(axis) == "total" for v in values if v.pending(axis))
        others = [v for v in others if not (v.replicated(axis) and _is_term(v, axis, owed))]
        if kind != "select" and len(pending) > 1 and any(_came(mark.birth) for mark in pending):
            return scope.unknown(node, _RING, _COMPLETE)
        if not others:
            return not_entered(scope, node, axis) or first
        vague = [mark for v in others if isinstance(mark := v.marks.get(axis), Somewhere)]
        if any(mark.or_sum or mark.reduced for mark in vague):
            return scope.vague(node, "adds a pending sum and a value that is sharded or a pending sum")
        if any(not v.replicated(axis) for v in others):
            what = f"adds a pending sum and a value that is {_state(others, axis)}"
            if kind == "sum" and local_mean and is_added_up(node):  # to each of a rank's rows the mean of them
                return scope.vague(node, what, "psum it first")
            backward = first.birth is not None and first.birth.meta.get("backward")
            return suspected(node, what, _ENTER if backward else "psum it first", first.birth)
        if kind == "sum" and local_mean:
            return scope.unknown(node, _OWN_TERM) if _own_reduction(scope, node, axis, first.birth) else first
        if _own_reduction(scope, node, axis, first.birth):
            return scope.unknown(node, _OWN_TERM)
        what, fix = (
            "adds a pending sum and a complete value, which then counts once per rank",
            "reduce first, add after",
        )
        maybe = {v.portion.get(axis) for v in others} & {"maybe", "equal", "rows"}
        if maybe:
            rows = maybe == {"rows"}
            of = "multiplied by counts a rank's rows" if rows else "divided by is theirs"
            why = f"{what}, unless the number that it was {of}"
            return scope.unknown(node, why, _BY_ROWS if rows else _BY_SIZE)._replace(gradient=maybe != {"maybe"})
        if all(v.constant is not None for v in others):
            return suspected(node, what, fix, first.birth)
        if _averaged(node, axis):
            return scope.unknown(node, f"{what}, and their sum is divided by the number of ranks: {_AS_MEAN}", _TIMES)
        return Wrong(node, what, fix, first.birth)
    if kind in ("product", "quotient"):
        if kind == "quotient" and values[1].pending(axis):
            birth = values[1].marks[axis].birth
            mark = suspected(node, "divides by a pending sum", f"psum over {axis!r} before it", birth)
            return scope.unknown(node, _OWN_TERM) if _corrected(scope, node, mark, axis) else mark
        if len(pending) > 1:
            what, fix = "multiplies two pending sums", "reduce one of them first"
            return suspected(node, what, fix, first.birth) if local_mean else Wrong(node, what, fix, first.birth)
        if all(v.replicated(axis) for v in others):
            return first
        what = f"multiplies a pending sum by a value that is {_state(others, axis)}"
        return suspected(node, what, "reduce first", first.birth)
    if kind in ("nan", "finite"):
        return Pending("max" if kind == "nan" else "min", node)
    if kind == "sqrt":
        return Pending("root", node)
    if kind in ("compare", "inverse") or op_name(node).removeprefix("_foreach_").rstrip("_") in _CORRECTED:
        return suspected(node, "a pending sum goes into a non-linear op",
                         f"psum or reduce_scatter over {axis!r} before it", first.birth)  # fmt: skip
    what, fix = "a pending sum goes into a non-linear op", f"psum or reduce_scatter over {axis!r} before it"
    return suspected(node, what, fix, first.birth) if local_mean else Wrong(node, what, fix, first.birth)


def _extrema(scope, node, kind, values, axis, pending, others) -> Mark | None:
    """A maximum passes what rises, a minimum is one of the negative."""
    first, alone = pending[0], len(pending) == 1 and all(v.replicated(axis) for v in others)
    flipped = Pending(FLIPPED[first.kind], first.birth)
    if kind == "beside" and all(v.replicated(axis) for v in others):  # the maximum of what all have is what they have
        return first
    if kind in ("rising", "sqrt"):
        return first
    if kind == "falling":
        return flipped
    if kind in ("nan", "finite"):
        return Pending("max" if kind == "nan" else "min", node)
    if kind in FLIPPED and (kind == first.kind or len(pending) == 1) and all(v.replicated(axis) for v in others):
        return first
    if alone and kind in ("sum", "select"):
        return first
    if alone and kind == "compare":
        if op_name(node) in ("eq", "ne"):
            return scope.unknown(node, f"compares a rank's own {first.kind} with another value")
        rises = values[0].pending(axis) == (op_name(node) in ("gt", "ge"))
        return first if rises else flipped
    if alone and (kind == "product" or (kind == "quotient" and values[0].pending(axis))):
        factor = others[0].constant
        if factor is None and not may_be_completed(scope, node, axis):
            return _misused(scope, node, first, axis, "is multiplied")
        if factor is None:
            return scope.unknown(node, f"multiplies a pending {first.kind} by a value of unknown sign")
        return first if factor >= 0 else flipped
    return _misused(scope, node, first, axis, "is used")


def _forms(scope, node, kind, values, axis, pending, others) -> Mark | None:
    """Norms of parts and logarithms of sums of parts: what undoes them leaves a pending sum."""
    first, alone = pending[0], len(pending) == 1 and all(v.replicated(axis) for v in others)
    if first.kind == "root" and kind == "abs":
        return first
    if first.kind == "root" and kind == "square":
        return Pending("sum", first.birth)
    if first.kind == "root" and alone and (kind == "product" or (kind == "quotient" and values[0].pending(axis))):
        return first
    if first.kind == "logsumexp" and kind == "rising" and op_name(node) == "exp":
        return Pending("sum", first.birth)
    if first.kind == "logsumexp" and alone and kind == "sum":
        return first
    if kind == "beside" and not others:
        return first
    return _misused(scope, node, first, axis, "is used")


_OF_SUMS, _OF_EXTREMA, _OF_FORMS = _sums, _extrema, _forms


def _averaged(node: Node, axis: str) -> bool:
    """Whether a node is summed over the ranks as it is, and that sum divided by their number: a mean of what each has,
    as of weights after a step of their own."""
    sums = [n for n in node.users if kinds.collective_of(n.target) is table.PSUM and axis in items_of(n.args[1])]
    items = [item for one in sums for item in one.users]
    return any(user.meta.get("ranks", NOTHING).get(axis) for item in items for user in item.users)


def _is_term(v: Value, axis: str, owed: bool) -> bool:
    """Whether what all ranks have is a term of a sum over them: rows that were counted, 1/n of a value, or a gradient
    beside others of which the sum is still to be made."""
    return v.equal_terms or is_share(v, axis) or (owed and v.portion.get(axis) in OWED)


def _came(birth: Node | None) -> bool:
    """Whether a term of a sum came from another rank."""
    return birth is not None and kinds.collective_of(birth.target) is table.PPERMUTE


def _own_reduction(scope: Scope, node: Node, axis: str, birth: Node | None) -> bool:
    """Whether what is added to a pending sum is made of its reduction over the ranks."""
    values = [(n, scope.values.get(n)) for n in node.all_input_nodes]
    complete = [n for n, v in values if isinstance(v, Value) and v.replicated(axis)]
    return birth is not None and any(scope.corrects(n, axis, frozenset((birth,))) for n in complete)


def _state(values: Sequence[Value], axis: str) -> str:
    return next(v.state(axis) for v in values if not v.replicated(axis))


def raised(x: Value, axes: Iterable[str], power: Fraction | int, node: Node, what: str, **more: Any) -> Value:
    """A value that is too large by the sizes of these axes to a power; more: as in `Excess`."""
    excess = dict(x.excess)
    for axis in axes:
        new = Excess(Fraction(power), node, what, **more)
        old = excess.pop(axis, None)
        new = new if old is None else old._replace(power=old.power + power)
        if new.power or new.doubt is not None:
            excess[axis] = new
    return replace(x, excess=excess or NOTHING)


def scaled(
    scope: Scope, node: Node, x: Value, factor: float, over: Mapping[str, Fraction], divides: bool = False
) -> Value:
    """A value times a number. over: {axis: power} of the numbers of ranks whose product it is, which are taken out of
    an excess; empty for another number, which may have been meant to, 2 on two ranks among them, which is 2 on four as
    well. A sum of replicas is divided at once, if at all: by n, or by n times another count. divides: written as a
    division."""
    back = node.meta.get("backward")
    if back:  # a gradient begins as much too large as its loss is
        over = {a: power for a, power in over.items() if x.portion.get(a) not in OWED}
        if not over and factor:
            return x
    means = [a for a, power in over.items() if power <= -1 and a not in x.excess and no_mean(x, a)]
    if means:
        for axis in means:
            x = raised(x, [axis], over[axis], node, NO_MEAN, loose=True)
        over = {a: power for a, power in over.items() if a not in means}
        return scaled(scope, node, x, factor, over, divides) if over else x
    new = [a for a, power in over.items() if power == 1 and a not in x.excess and x.pending(a, "sum")]
    times = [a for a in new if x.portion.get(a) in (None, "rows", *OWED, *SUMMED)]
    if times:  # terms of which a sum is n times too large, as those of a mean are: they are divided behind the sum
        x = raised(x, times, 1, node, "terms of a sum over the ranks, times their number: too large by it")
        over = {a: power for a, power in over.items() if a not in times}
        return scaled(scope, node, x, factor, over, divides) if over else x
    split = [a for a in over if not back and a not in x.excess and a not in x.marks and a not in x.portion]
    if split := [a for a in split if over[a] in (-1, 1) and not x.replicated(a)]:  # rows: the sum over them is as wrong
        x = raised(x, [a for a in split if over[a] == 1], 1, node, _ROWS_TIMES, loose=True)
        x = raised(x, [a for a in split if over[a] == -1], -1, node, _ROWS_OVER, loose=True)
        over = {a: power for a, power in over.items() if a not in split}
        return scaled(scope, node, x, factor, over, divides) if over else x
    if divides and not over and abs(factor) != 1:  # sum / ranks / rows
        rows = [a for a, e in x.excess.items() if e.power == -1 and e.what == NO_MEAN]
        left = {a: e for a, e in x.excess.items() if a not in rows}
        x = replace(x, excess=left or NOTHING, portion={**x.portion, **dict.fromkeys(rows, "number")}) if rows else x
    too_large_over = [a for a, e in x.excess.items() if e.power]
    if not too_large_over:
        return portion_after(scope, x, factor, over, divides, divides and not back)
    if over:
        left = {a: e._replace(power=e.power + over.get(a, 0)) for a, e in x.excess.items()}
        left = {a: e for a, e in left.items() if e.power or e.doubt is not None}
        return shared(replace(x, excess=left or NOTHING), {a: p for a, p in over.items() if a not in x.excess})
    sizes = [
        math.prod(int(scope.mesh[a]) ** float(x.excess[a].power) for a in axes)
        for count in range(len(too_large_over), 0, -1)
        for axes in itertools.combinations(too_large_over, count)
    ]
    meant = divides or any(is_one(abs(factor) * size) for size in sizes)
    if abs(factor) == 1:
        return x
    x = portion_after(scope, x, factor, over, divides, divides and not back)
    divisor = 1 / abs(factor) if factor else 0.0
    whole = round(divisor) if meant and divisor > 1.5 and is_one(divisor / round(divisor)) else 0
    excess = {}
    for axis, e in x.excess.items():
        holds = e.unused and whole and whole % scope.mesh[axis] == 0
        excess[axis] = e._replace(loose=True, sure=e.sure and not holds, unused=False)
    return replace(x, excess=excess)


def sized(scope: Scope, node: Node, x: Value, known: Known) -> Value:
    """A value times a number that is made of sizes of a rank's parts. In a gradient nothing begins by it: what is too
    large of its loss is of it."""
    back = node.meta.get("of_gradient")
    over = {a: power for a, power in known.over.items() if not (back and x.portion.get(a) in OWED)}
    left = dict(x.excess)
    for axis, power in over.items():
        portion = x.portion.get(axis)
        if axis in left:
            e = left.pop(axis)
            e = e._replace(power=e.power + power, loose=e.loose or not known.sure)
            if e.power or e.doubt is not None:
                left[axis] = e
        elif x.replicated(axis) and power == -1 and portion in ("total", "mean"):  # a count of the rows, times n
            left[axis] = Excess(power, node, _SIZE, loose=not known.sure)
        elif x.replicated(axis) and (power == -1 or (portion in ("exact", "either") and power == 1)):
            x = shared(x, {axis: power})
        elif not back and portion != "mixed" and not x.is_(axis, Unknown, Wrong, Suspect, Varying):
            left[axis] = Excess(power, node, _SIZE, loose=not known.sure)
    return replace(x, excess=left or NOTHING)


def excess_after(
    scope: Scope, node: Node, kind: str, values: Sequence[Value]
) -> tuple[Mapping[str, Excess], dict[str, Mark]]:
    """Of an op on several operands: the excess of its result, and marks where it has none that makes sense."""
    axes = sorted(set().union(*(v.excess for v in values)))
    kept, marks = {}, {}
    for axis in axes:
        have = [v.excess.get(axis) for v in values]
        given = [e for e in have if e is not None]
        loose, sure = any(e.loose for e in given), all(e.sure for e in given)
        first = max(given, key=lambda e: e.power != 0)
        doubt = next((e.doubt for e in given if e.doubt is not None), None)
        first = first._replace(loose=loose, sure=sure, unused=kind in ("same", "beside") and first.unused, doubt=doubt)
        if not any(e.power for e in given):
            kept[axis] = first
            continue
        if kind in _DROPS:
            continue
        if kind in ("product", "quotient"):
            signs = [1] + [-1 if kind == "quotient" else 1] * (len(have) - 1)
            power = sum(s * e.power for s, e in zip(signs, have, strict=True) if e is not None)
            if power or doubt is not None:
                kept[axis] = first._replace(power=Fraction(power))
            continue
        if kind in _POWERS:
            kept[axis] = first._replace(power=first.power * Fraction(*_POWERS[kind]))
            continue
        terms = values[1:] if kind == "select" else values
        terms = [v for v in terms if v.constant != 0] if kind in ("sum", "select", "compare", "max", "min") else terms
        powers = {v.excess[axis].power if axis in v.excess else Fraction(0) for v in terms}
        if kind in (*_KEEPS, "sum", "select", "max", "min", "compare") and len(powers) == 1:
            if kind != "compare":
                kept[axis] = first
            continue
        if kind == "sum" and (power := _of_sum(terms, axis)) is not None:
            if power or doubt is not None:
                kept[axis] = first._replace(power=power)
            continue
        # Whatever they were divided by, they are of different size; a gradient may have been with its loss, unseen.
        if all(axis in v.portion and v.portion[axis] not in OWED for v in terms):
            first = first._replace(sure=True)
        marks[axis] = too_large(scope, node, axis, first)
    return kept or NOTHING, marks


def _of_sum(terms: Sequence[Value], axis: str) -> Fraction | None:
    """The power of a sum over the ranks to which each adds these terms, where it is one: what all of them have is added
    as often, so a complete value fits a mean, and 1/n of one fits a sum."""
    powers = [v.excess[axis].power if axis in v.excess else Fraction(0) for v in terms]
    of_sum = {power + (not v.pending(axis)) for v, power in zip(terms, powers, strict=True)}
    fits = len(of_sum) == 1 and all(v.pending(axis, "sum") or v.replicated(axis) for v in terms)
    return of_sum.pop() if fits else None


def too_large(scope: Scope, node: Node, axis: str, e: Excess) -> Mark:
    """The mark of a value with an excess that is used where only the right number will do."""
    if not e.power:
        assert e.doubt is not None, "an excess of power 0 is kept for its doubt"
        return Unknown(frozenset((e.doubt,)), factor=True, gradient=True)
    if e.what == NO_MEAN:
        return scope.unknown(e.node, e.what, _MEAN)._replace(factor=True, gradient=True)
    if e.loose and not e.sure:
        why = f"{e.what}, and whether the numbers that it is multiplied by make up for that cannot be told"
        fix = f"Divide by axes[{axis!r}].size alone, next to it"
        return scope.unknown(e.node, why, fix)._replace(factor=True, gradient=True)
    fix = "remove it" if e.sure else "sum, psum, then divide by the global size"
    return Suspect(e.node, e.what, fix, None, frozenset())  # what mends it is a division, which would have been seen
