"""What padding of shards is (`Layout.padded`): per value and axis the number that all of it is, or that it is unknown.

It comes in by layouts as zeros, and by reduce-scatters and cuts of a `Place` that pads. A gather by such a place leaves
it out. In between the rules below state what an op makes of it. They are a table, not samples: of numbers that are all
known an op is computed; where an operand is the same on all ranks and not known, it is taken as a finite number that is
not zero, for elsewhere it met true elements, which are then no numbers either. A sum over a dim with padding is right
where that is zero, a mean is not, and the padding of a state must stay zero.

A value whose elements are all one number is that number in its padding too, if it has any. Zeros (the gradient of a
parameter that is not used) are as well a shard with padding as one without: nothing is noted of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.collectives import kinds
from fmegatron.collectives.places import Place
from fmegatron.step.checker.context import Scope, op_name
from fmegatron.step.checker.values import NOTHING, Mark, Padding, Pending, Suspect, Unknown, Value, Wrong
from fmegatron.step.graph.nodes import items_of
from fmegatron.step.torch_private import Op, outside_of_tracing

Node = torch.fx.Node
Number = float | None


@dataclass(frozen=True)
class _Finite:
    """An operand that is the same on all ranks: one finite number, not zero, that is not known."""


FINITE = _Finite()
Operand = Number | _Finite  # None: anything
_OPEN = (Wrong, Unknown, Suspect)
_NOWHERE = (-1, -1)  # as `Padding.moved`: on no dim from which it would come back
_ANYTHING = Padding(None)
_ZERO = Padding(0.0)
# Elements go elsewhere, or get another dtype or shape: padding is what it was.
_MOVES = frozenset(
    "view _unsafe_view reshape _reshape_alias t transpose permute unsqueeze squeeze expand clone detach alias slice"
    " split split_with_sizes unbind select cat stack _to_copy copy contiguous convert_element_type lift_fresh_copy"
    " index_select constant_pad_nd".split()
)
# A reduction over padding that is this number changes nothing.
_NEUTRAL = MappingProxyType(
    {"sum": 0.0, "linalg_vector_norm": 0.0, "norm": 0.0, "any": 0.0, "all": 1.0, "prod": 1.0, "count_nonzero": 0.0}
)
_OF_ZEROS = frozenset(("sum", "linalg_vector_norm", "norm", "any", "mean", "amax", "amin", "prod"))
_PRODUCTS = frozenset("mm bmm mv dot addmm baddbmm addmv".split())
_FIX = "gather it by its layout first, or divide a sum by the number of true elements"
_BY_LAYOUT = "nn.gather_tree with the layout of the leaf, or Place.of(layout, axes), leaves it out"


_AFTER = ("barrier", "to_host", "from_host")  # the first argument, after the others


# ---- the table: padding after a pointwise op whose operands are not all known numbers --------------------------------
def _zero_times(factors: Sequence[Operand]) -> bool:
    return 0.0 in factors and None not in factors


def _mul(a: Operand, b: Operand, *rest: Operand) -> Number:
    return 0.0 if _zero_times((a, b)) else None


def _div(a: Operand, b: Operand, *rest: Operand) -> Number:
    return 0.0 if a == 0.0 and b is not None and b != 0.0 else None


def _addcmul(a: Operand, b: Operand, c: Operand, *rest: Operand) -> Number:
    return 0.0 if a == 0.0 and _zero_times((b, c)) else None


def _addcdiv(a: Operand, b: Operand, c: Operand, *rest: Operand) -> Number:
    return 0.0 if a == 0.0 and _div(b, c) == 0.0 else None


def _lerp(a: Operand, b: Operand, weight: Operand, *rest: Operand) -> Number:
    return 0.0 if a == b == 0.0 and weight is not None else None


def _where(condition: Operand, a: Operand, b: Operand, *rest: Operand) -> Number:
    if isinstance(condition, float):
        chosen = a if condition else b
        return chosen if isinstance(chosen, float) else None
    return a if isinstance(a, float) and a == b else None


def _masked_fill(a: Operand, mask: Operand, value: Operand, *rest: Operand) -> Number:
    return _where(mask, value, a)


TABLE: Mapping[str, Callable[..., Number]] = MappingProxyType(
    {
        **{"mul": _mul, "div": _div, "true_divide": _div, "addcmul": _addcmul, "addcdiv": _addcdiv, "lerp": _lerp},
        **{"where": _where, "masked_fill": _masked_fill},
    }
)


# ---- nodes -----------------------------------------------------------------------------------------------------------
def after(scope: Scope, node: Node, inputs: list[Node], found: Any) -> Any:
    """The result of a node with what its padding is, by that of what it is made of."""
    if kinds.collective_of(node.target):
        return _of_collective(scope, node, found)
    sources: list[Value] = []
    pads = False
    for n in inputs:
        value = scope.values.get(n)
        for v in value if isinstance(value, list) else (value,):
            if v is not None:
                sources += (v,)
                pads = pads or v.pads
    if not pads or found is None:  # as nearly always
        return found
    padded = sorted({axis for v in sources for axis in v.pads})
    if op_name(node) in _AFTER:
        return replace(found, pads=sources[0].pads) if isinstance(found, Value) else found
    if isinstance(found, list):
        return [v if v is None else _one(scope, node, v, sources, padded) for v in found]
    return _one(scope, node, found, sources, padded)


def overwritten(value: Value, before: Value, new: Value | None) -> Value:
    """A value of which a part was written."""
    axes = {*before.pads, *(new.pads if new is not None else ())}
    if value.constant == 0 or not axes:
        return value
    pads = {axis: _held(before, axis) for axis in axes}
    kept = [axis for axis, one in pads.items() if one is not None and new is not None and one == _held(new, axis)]
    return replace(value, pads={axis: pads[axis] if axis in kept else _ANYTHING for axis in axes})


def _held(value: Value, axis: str) -> Padding | None:
    """The padding of a value over an axis: of one that is a number everywhere that number. None where it has none."""
    number = value.constant
    return value.pads.get(axis) or (Padding(float(number)) if isinstance(number, int | float) else None)


def _one(scope: Scope, node: Node, out: Value, sources: list[Value], padded: list[str]) -> Value:
    name, pads, marks = op_name(node).rstrip("_"), {}, {}
    pointwise = isinstance(node.target, Op) and torch.Tag.pointwise in node.target.tags
    for axis in padded:
        if out.is_(axis, *_OPEN) or out.constant == 0:
            continue
        if out.constant is not None:
            pads[axis] = Padding(float(out.constant))
            continue
        mine = [v.pads[axis] for v in sources if axis in v.pads]
        dims = {p.moved for p in mine} - {None}
        moved = None if not dims else dims.pop() if len(dims) == 1 else _NOWHERE
        if name in _MOVES or pointwise:
            number = _common(node, sources, axis) if name in _MOVES else _pointwise(scope, node, name, axis)
            pads[axis] = Padding(number, moved)
        elif bool(out.shards(axis)) or (axis in out.marks and not out.is_(axis, Pending)):
            zeros = all(p.number == 0 for p in mine)
            pads[axis] = Padding(0.0 if zeros and name in _OF_ZEROS | _PRODUCTS else None, moved)
            if moved and not (zeros and name in _PRODUCTS | {"sum", "linalg_vector_norm", "norm"}):
                marks[axis] = scope.unknown(node, f"{name} of a value with padding that an all_to_all has moved")
        else:
            marks[axis] = _consumed(scope, node, name, mine)
    return replace(out.marked({a: m for a, m in marks.items() if m is not None}), pads=pads or NOTHING)


def _consumed(scope: Scope, node: Node, name: str, mine: list[Padding]) -> Mark | None:
    """The mark of a value in which padding and elements were taken together, over an axis; None where that is right."""
    if name == "mean":
        return Wrong(node, "a mean over a dim whose shards have padding counts it", _FIX)
    neutral = 0.0 if name in _PRODUCTS else _NEUTRAL.get(name)
    if "norm" in name and len(node.args) > 1 and isinstance(node.args[1], (int, float)) and node.args[1] < 0:
        neutral = None
    if neutral is not None and all(p.number == neutral for p in mine):
        return None
    known = {p.number for p in mine}
    what = f"which is {known.pop()}" if len(known) == 1 and None not in known else "which may be anything"
    return scope.unknown(node, f"{name} over a dim whose shards have padding, {what}")


def _common(node: Node, sources: list[Value], axis: str) -> Number:
    """The number that padding is in all of them, and what else is put beside it."""
    name = op_name(node).rstrip("_")
    if name in ("copy", "index_select"):  # what is copied or chosen, not what it is copied to or chosen by
        sources = sources[-1:] if name == "copy" else sources[:1]
    numbers = {v.pads[axis].number if axis in v.pads else v.constant for v in sources}
    if name == "constant_pad_nd":
        value = node.args[2] if len(node.args) > 2 else 0.0
        numbers.add(float(value) if isinstance(value, (bool, int, float)) else None)
    return numbers.pop() if len(numbers) == 1 else None


def _operand(value: Value, axis: str) -> Operand:
    if axis in value.pads:
        return value.pads[axis].number
    if value.constant is not None:
        return float(value.constant)
    return None if axis in value.axes() else FINITE


def _pointwise(scope: Scope, node: Node, name: str, axis: str) -> Number:
    """What a pointwise op makes of padding; None: anything."""
    of_nodes = {n: _operand(scope.values[n], axis) for n in node.all_input_nodes}
    known = {n: number for n, number in of_nodes.items() if isinstance(number, float)}
    if len(known) == len(of_nodes):
        return _computed(node, known)
    rule = TABLE.get(name)
    if rule is None:
        return None
    operands = [of_nodes[a] if isinstance(a, Node) else a for a in node.args]
    return rule(*[float(a) if isinstance(a, (bool, int, float)) else a for a in operands])


def _computed(node: Node, numbers: Mapping[Node, float]) -> Number:
    """A pointwise op of known numbers; None where it makes no finite number, or is no function of numbers alone."""

    def scalar(n: Node) -> torch.Tensor:
        return torch.full((), numbers[n], dtype=n.meta["val"].dtype)

    if "generator" in node.kwargs or not callable(node.target) or op_name(node) in ("bernoulli", "rand_like"):
        return None
    with outside_of_tracing(), torch.no_grad():
        kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}
        args, kwargs = torch.fx.map_arg((node.args, kwargs), scalar)
        made = node.target(*args, **kwargs)
    if not isinstance(made, torch.Tensor) or made.dim():
        return None
    number = float(made.item())
    return number if math.isfinite(number) else None


# ---- collectives -----------------------------------------------------------------------------------------------------
def _of_collective(scope: Scope, node: Node, found: Any) -> Any:
    collective, axes = kinds.collective_of(node.target), tuple(items_of(node.args[1]))
    xs = [scope.values[n] for n in items_of(node.args[0])]
    assert collective is not None, "`after` has found one"
    own = collective.each(node.args[3:], len(xs))
    places = [next((p for p in mine if isinstance(p, Place)), None) for mine in own]
    if not any(x.pads for x in xs) and not any(place and (place.true or place.assigned) for place in places):
        return found
    sizes = tuple(scope.mesh[axis] for axis in axes)
    out = []
    for x, y, place, mine in zip(xs, found, places, own, strict=True):
        padding = () if place is None else place.padding_axes(axes, sizes)
        exchange = (mine[0], mine[1]) if collective.name == "all_to_all" else _NOWHERE
        out.append(_moved(scope, node, collective.name, x, y, axes, padding, exchange))
    return out


def _moved(
    scope: Scope, node: Node, name: str, x: Value, out: Value, axes: tuple[str, ...], padding: tuple[str, ...],
    exchange: tuple[int, int],
) -> Value:  # fmt: skip
    """padding: the axes of the place along which shards have padding. exchange: the dims that an all_to_all splits and
    gathers."""
    pads, marks = dict(x.pads), {}
    if out.constant == 0:
        return out
    if name in ("psum", "reduce_scatter"):  # of terms: of zeros it is zero, of other numbers another
        pads = {a: p if p.number == 0 else _ANYTHING for a, p in pads.items()}
    elif name in ("all_to_all_rows", "ppermute", "axis_index"):
        pads = {} if name == "axis_index" else dict.fromkeys(pads, _ANYTHING)
    for axis in axes:
        held = pads.pop(axis, None)
        if name in ("reduce_scatter", "cut") and axis in padding:
            pads[axis] = _ZERO
        elif name == "all_gather" and held is None and axis in padding:
            if not out.is_(axis, *_OPEN) and x.constant is None and not x.is_(axis, *_OPEN):
                what = "a gather leaves out the end of shards that have no padding"
                marks[axis] = Wrong(node, what, "give the place of the value's own layout: Place.of(layout, axes)")
        elif name == "all_gather" and held is not None and axis not in padding:
            marks[axis] = Wrong(node, "a gather brings padding along with the shards", _BY_LAYOUT)
        elif name == "all_gather" and held is not None and held.moved:
            marks[axis] = scope.unknown(node, "a gather of shards whose padding an all_to_all has moved")
        elif name == "all_to_all" and held is not None:
            back = held.moved == exchange
            pads[axis] = Padding(
                held.number, None if back else (exchange[1], exchange[0]) if held.moved is None else _NOWHERE
            )
        elif name in ("declare", "pmax") and held is not None:
            pads[axis] = held
        elif held is not None and name != "all_gather":
            marks[axis] = scope.unknown(node, f"{name} of shards with padding over {axis!r}")
    out = out.marked({a: m for a, m in marks.items() if not out.is_(a, *_OPEN)})
    return replace(out, pads=pads or NOTHING)


# ---- outputs ---------------------------------------------------------------------------------------------------------
def at_output(scope: Scope, node: Node, value: Value, want: Value, axis: str, path: str) -> Mark | None:
    """What is wrong with the padding of an output over an axis, of which nothing else is; None for nothing."""
    if value.constant == 0 or axis in value.marks:
        return None
    got = _held(value, axis)
    if axis not in want.pads:
        if got is not None and value.constant is None and axis in want.sharded:
            return Wrong(node, f"the output {path} has padding, its layout has none", "give it the layout that it has")
        return None
    if got is None or got.number is None:
        return scope.unknown(node, f"the padding of the output {path} may be anything, where its layout has zeros")
    if got.number != 0:
        what = f"the padding of the output {path} is {got.number}, zeros must stay zeros"
        return Wrong(node, what, "leave zeros as they are, or give an eps that is not 0")
    if got.moved:
        return scope.unknown(node, f"the padding of the output {path} went through an all_to_all")
    return None
