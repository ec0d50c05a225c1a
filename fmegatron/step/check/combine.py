"""Combination of several operands over one axis: which are valid, which are mistakes, which are unknown.

Proofs (findings at once): a pending sum plus a complete tensor, two pending sums multiplied, a pending sum in a smooth
function, values sharded in different ways. Proofs only if nothing corrects them on the way to an output (suspects): a
pending maximum in arithmetic, a pending sum that divides, is compared or clamped, or scales what is sharded. Open
(unproven): a rank's own term beside the sum over all ranks, terms chosen by the rank's index.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch

from fmegatron.step.check.scope import Scope, op_name, suspected
from fmegatron.step.check.values import First, Mark, Pending, Somewhere, Suspect, Unknown, Value, Varying, Wrong

Node = torch.fx.Node
FLIPPED = MappingProxyType({"max": "min", "min": "max"})
TERMS = frozenset(("sum", "beside", "select"))  # kinds in which operands stand for terms, and a zero for none
# Functions of a pending sum that a right step may correct later (counts, ratios): suspects, no findings at once.
_CORRECTED = frozenset("clamp clamp_min clamp_max maximum minimum reciprocal sign sgn threshold".split())
_OWN_TERM = "combines a term of a rank with the reduction over all ranks"


def strongest(scope: Scope, node: Node, values: Sequence[Value], axis: str, adds: bool = False) -> Mark | None:
    """What decides over all else, whatever the op does: a finding upstream, something unproven, a suspect.

    adds: the op adds values; what is added by the rank's index may be what a part lacks (the offset of a scan).
    """
    marks = [v.marks.get(axis) for v in values]
    wrong = next((m for m in marks if isinstance(m, Wrong)), None)
    if wrong is not None:
        return wrong
    open_ = [m for m in marks if isinstance(m, Unknown)]
    if open_:
        origins = frozenset().union(*(m.origins for m in open_))
        return Unknown(origins, all(m.own for m in open_), any(m.factor for m in open_))
    suspect = next((m for m in marks if isinstance(m, Suspect)), None)
    if suspect is None:
        return None
    first = any(isinstance(m, First) for m in marks)  # of the first rank a part may be just the beginning of the whole
    if first or (adds and any(isinstance(m, Varying) for m in marks)) or _corrected(scope, node, suspect, axis):
        return scope.unknown(suspect.node, f"{suspect.what}; whether what corrects it does so is not known")
    own = any(isinstance(m, Pending) and m.kind in FLIPPED and m.birth in suspect.births for m in marks)
    return scope.unknown(suspect.node, f"{suspect.what}, and is combined with it again") if own else suspect


def _corrected(scope: Scope, node: Node, suspect: Suspect, axis: str) -> bool:
    """Whether another operand is a rank's own factor or term, made of the reduction of what the suspect comes from."""
    values = [(n, scope.values.get(n)) for n in node.all_input_nodes]
    own = [n for n, v in values if isinstance(v, Value) and v.pending(axis)]
    births = suspect.births.union(*(birth.all_input_nodes for birth in suspect.births))
    return any(scope.corrects(n, axis, births) for n in own)


def pending_after(scope: Scope, node: Node, kind: str, values: Sequence[Value], axis: str) -> Mark | None:
    """The mark over an axis over which some operands are pending, and none is unknown or suspected."""
    terms = values[1:] if kind == "select" else values
    if kind in TERMS:
        terms = [v for v in terms if v.constant != 0]
    pending = [v.marks[axis] for v in terms if v.pending(axis)]
    others = [v for v in terms if not v.pending(axis)]
    if any(v.is_(axis, Varying, First) for v in values):
        return scope.unknown(node, "combines a pending reduction with a value that depends on the rank's index")
    if kind == "select" and not values[0].replicated(axis):
        if not pending:
            return _misused(scope, node, values[0].marks[axis], axis, "is the condition")
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
        return suspected(mark.birth, "a pending sum goes into a non-linear op",
                         f"psum or reduce_scatter over {axis!r} before it", None)  # fmt: skip
    fix = f"{'psum' if mark.kind == 'sum' else 'pmax'} over {axis!r} before it"
    return suspected(node, f"a pending {mark.kind} {how}", fix, mark.birth)


def _sums(scope, node, kind, values, axis, pending, others) -> Mark | None:
    first, local_mean = pending[0], any(v.excess[axis].power for v in values if axis in v.excess)
    if kind in TERMS:
        others = [v for v in others if not ((v.equal_terms or v.portion.get(axis) == "exact") and v.replicated(axis))]
        if not others:
            return first
        if any(isinstance(v.marks.get(axis), Somewhere) and v.marks[axis].or_sum for v in others):
            return scope.unknown(node, "adds a pending sum and a value that is sharded or a pending sum")
        if any(not v.replicated(axis) for v in others):
            return suspected(node, f"adds a pending sum and a value that is {_state(others, axis)}",
                             "psum it first", first.birth)  # fmt: skip
        if kind == "sum" and local_mean:
            return scope.unknown(node, _OWN_TERM) if _own_reduction(scope, node, axis, first.birth) else first
        if _own_reduction(scope, node, axis, first.birth):
            return scope.unknown(node, _OWN_TERM)
        what, fix = (
            "adds a pending sum and a complete value, which then counts once per rank",
            "reduce first, add after",
        )
        if any(v.portion.get(axis) == "maybe" for v in others):
            return scope.unknown(node, f"{what}, unless it was divided by their number before")
        if all(v.constant is not None for v in others):
            return suspected(node, what, fix, first.birth)
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


def _own_reduction(scope: Scope, node: Node, axis: str, birth: Node | None) -> bool:
    """Whether what is added to a pending sum is made of its reduction over the ranks."""
    values = [(n, scope.values.get(n)) for n in node.all_input_nodes]
    complete = [n for n, v in values if isinstance(v, Value) and v.replicated(axis)]
    return birth is not None and any(scope.corrects(n, axis, frozenset((birth,))) for n in complete)


def _state(values: Sequence[Value], axis: str) -> str:
    return next(v.state(axis) for v in values if not v.replicated(axis))
