"""Rules for ops on single elements: which of them a pending sum or maximum may pass.

What an op does to a pending value is given by its kind (`marks.py`): a sum passes what is linear, a maximum what rises
or falls. Taken for exact, not proven: casts of a pending sum between dtypes (counts in floats are integers), and
that a sum over the ranks is finite where its terms are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.step.checker import sizes
from fmegatron.step.checker.ahead import gradient_of_logcumsumexp
from fmegatron.step.checker.arithmetic import elementwise
from fmegatron.step.checker.context import GO_ON, Rule, Rules, Scope, as_value, op_name, shape_of
from fmegatron.step.checker.dims import Atom, canonical, folds_of, joined, numbers_along, plain, size_of
from fmegatron.step.checker.entered import not_entered
from fmegatron.step.checker.marks import FLIPPED, raised, scaled, sized
from fmegatron.step.checker.movement import expanded
from fmegatron.step.checker.shares import counted_rows, is_share
from fmegatron.step.checker.values import (
    NOTHING,
    First,
    Mark,
    Pending,
    Somewhere,
    Suspect,
    Unknown,
    Value,
    Varying,
    Wrong,
    counted,
    filled,
    number,
)
from fmegatron.step.graph.nodes import node_of
from fmegatron.step.torch_private import outside_of_tracing

Node = torch.fx.Node
_KEEPS_WHOLE = frozenset(
    "add sub rsub mul sum neg abs clone detach alias view _unsafe_view reshape expand unsqueeze squeeze permute"
    " transpose t _to_copy convert_element_type slice select index_select cumsum maximum minimum amax amin psum"
    " where ones zeros full"
    " ones_like zeros_like scalar_tensor scatter_add index_add".split()
)
_RISING = (
    "exp exp2 expm1 log log2 log10 log1p relu relu6 sigmoid tanh erf floor ceil round trunc atan asinh asin sinh"
    " softplus hardtanh hardsigmoid elu leaky_relu logit fix"
)


def same(scope: Scope, node: Node, given: dict) -> Value:
    """clone, detach, barrier: what it was, element for element."""
    return given["self"] if "self" in given else given["x"]


def lifted(scope: Scope, node: Node, given: dict) -> Value:
    """A tensor of Python's numbers, which may be a size of a rank's part."""
    return _of_sizes(scope, node, given["self"]) if "parts" in node.meta else given["self"]


def negated(scope: Scope, node: Node, given: dict) -> Value:
    """neg: a pending maximum becomes a pending minimum."""
    return _negative(replace(given["self"], ramp=False, index_of=()))


def _negative(x: Value) -> Value:
    flipped = {
        axis: Pending(FLIPPED[mark.kind], mark.birth)
        for axis, mark in x.marks.items()
        if isinstance(mark, Pending) and mark.kind in FLIPPED
    }
    constant = None if x.constant is None else -x.constant
    dims = tuple([tuple([_flipped(atom) for atom in dim]) if folds_of(dim) else dim for dim in x.dims])
    return replace(x, dims=dims, marks={**x.marks, **flipped} if flipped else x.marks, constant=constant)


def _flipped(atom: Atom) -> Atom:
    if atom.fold is None or atom.fold.kind not in FLIPPED:
        return atom
    return atom._replace(fold=atom.fold._replace(kind=FLIPPED[atom.fold.kind]))


def cast(scope: Scope, node: Node, given: dict) -> Value:
    """A cast between floats is taken for exact (fp8 too). One of a pending sum to integers is exact for whole
    numbers, and open for others; one to truth values is a comparison."""
    x = given["self"] if "self" in given else given["a"]  # prims.convert_element_type, in compiled layers, has an a
    before, after = node_of(node.args[0]).meta["val"].dtype, node.meta["val"].dtype
    if x.settled or before == after or after.is_floating_point or after.is_complex:
        return x
    if after == torch.bool:
        return elementwise(scope, node, "compare", [x, number(0)])
    sums = [axis for axis in x.having(Pending) if x.pending(axis, "sum")]
    if not sums or _whole(node_of(node.args[0])):
        return x
    why = "a cast to whole numbers rounds each rank's term of a pending sum, unless it is whole"
    return x.marked({axis: scope.unknown(node, why, f"psum before the cast. {GO_ON}") for axis in sums})


def _whole(node: Node) -> bool:
    """Whether a float holds integers, as it was made of truth values and of integers by sums and products."""
    todo, seen = [node], set()
    while todo:
        one = todo.pop()
        value = one.meta.get("val")
        if one in seen or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        seen.add(one)
        numbers = [a for a in (*one.args, *one.kwargs.values()) if isinstance(a, float)]
        if one.op != "call_function" or op_name(one) not in _KEEPS_WHOLE or any(a % 1 for a in numbers):
            return False
        todo += one.all_input_nodes
    return True


def copied(scope: Scope, node: Node, given: dict) -> Value:
    """x.copy_(src): the new value, in the shape of x."""
    return expanded(given["src"], [size_of(dim) for dim in given["self"].dims])


def sums(scope: Scope, node: Node, given: dict) -> Value:
    """add, sub, rsub; arange(n) + n * axis_index is known for what it is."""
    a, b, op = as_value(given["self"]), as_value(given["other"]), op_name(node)
    if op == "add" and (a.index_of or b.index_of):
        found = positions(a, b) or positions(b, a)
        if found is not None:
            return found
    alpha = given.get("alpha", 1)
    if isinstance(alpha, (int, float)) and alpha != 1:
        b = _times(scope, node, b, alpha)
    if op == "sub":
        b = _negative(b)
    elif op == "rsub":
        a = _negative(a)
    return elementwise(scope, node, "sum", [a, b])


def positions(ramp: Value, index: Value) -> Value | None:
    """arange(n) + n * axis_index, in any shape, is the arange of the full array, sharded over the axis on the first
    dim; None when it is not that."""
    count = math.prod([size_of(dim) for dim in ramp.dims])
    if not (ramp.ramp and index.index_of and ramp.dims and index.scale == count):
        return None
    first = next((d for d, dim in enumerate(ramp.dims) if size_of(dim) > 1), 0)
    dims = [plain(size_of(dim), index.index_of if d == first else ()) for d, dim in enumerate(ramp.dims)]
    return Value(tuple(dims))


def product(scope: Scope, node: Node, given: dict) -> Value:
    """mul; a multiple of axis_index stays one."""
    a, b = given["self"], given["other"]
    if isinstance(a, Value) and a.index_of and isinstance(b, int):
        return replace(a, scale=a.scale * b)
    if getattr(node.meta["val"], "dtype", None) == torch.bool:  # a list has none
        return elementwise(scope, node, "min", [as_value(a), as_value(b)])
    if len(node.args) == 2 and node.args[0] is node.args[1]:
        return elementwise(scope, node, "square", [a])
    return _product(scope, node, as_value(a), as_value(b))


def _product(scope: Scope, node: Node, a: Value, b: Value) -> Value:
    for x, factor in ((a, b), (b, a)):
        if factor.constant is not None and factor.settled:
            return _times(scope, node, x, factor.constant, factor)
    return elementwise(scope, node, "product", [a, b])


def _times(scope: Scope, node: Node, x: Value, factor: float, of: Value | None = None, divides: bool = False) -> Value:
    """x times a number (of: a tensor of that number; divides: written as a division)."""
    ranks = node.meta.get("ranks") or (of.ranks if of is not None else NOTHING)
    known, times = None, number(factor) if of is None else of
    if "scales" in node.meta:
        known = sizes.Known({a: -p if divides else p for a, p in node.meta["scales"].items()}, not node.meta["scales"])
    elif "parts" in node.meta:
        known = sizes.of_factor(scope, node, factor, divides)
    elif of is not None and of.ranks:
        known = sizes.of_tensor(scope, of, divides)
    if known is None and divides and scope.asked and not ranks and not node.meta.get("of_gradient"):
        asked = sizes.as_asked(scope, node, 1 / factor)
        totals = [axis for axis in asked if x.portion.get(axis) == "total" and axis not in x.marks]
        known = sizes.Known(dict.fromkeys(totals, Fraction(1)), False) if totals else None
    if known is not None:
        return elementwise(scope, node, "product", [sized(scope, node, x, known), times])
    if ranks and scope.asked and (beside := sizes.beside_rows(scope, ranks, factor, divides)):
        x = scaled(scope, node, x, beside.of_ranks, beside.over, divides) if beside.over else x
        return elementwise(scope, node, "product", [x, times])
    over, rest = sizes.of_ranks(scope, ranks, factor, divides) if ranks else (NOTHING, 1)
    again = {} if rest == 1 else {axis: power + 1 for axis, power in over.items() if power < -1}
    if again:  # by a count of all rows, and by their number again
        x = scaled(scope, node, x, rest, NOTHING, True)
        for powers in (dict.fromkeys(again, Fraction(-1)), again):
            x = scaled(scope, node, x, 1.0, powers, divides)
    else:
        x = scaled(scope, node, x, factor / rest, over, divides)
        x = scaled(scope, node, x, rest, NOTHING, divides) if rest != 1 else x
    x = counted_rows(scope, x, factor) if not (divides or over or x.constant is not None) else x
    return elementwise(scope, node, "product", [x, times])


def quotient(scope: Scope, node: Node, given: dict) -> Value:
    """div without rounding; with rounding it is a function like others."""
    a, b = as_value(given["self"]), as_value(given["other"])
    if given.get("rounding_mode"):
        return elementwise(scope, node, "rising" if (b.constant or -1) > 0 else "function", [a, b])
    if b.constant and b.settled:
        of = replace(b, constant=1 / b.constant) if b.dims or b.ranks else None
        out = _times(scope, node, a, 1 / b.constant, of, divides=True)
        is_mean = node.meta.get("sizes") == "rows" and not node.meta["backward"]
        return _mean_of_rows(scope, node, out) if is_mean else out
    return elementwise(scope, node, "quotient", [a, b])


def _mean_of_rows(scope: Scope, node: Node, total: Value) -> Value:
    """A sum that torch divides by the rows that it was given, as a mean over a sharded dim is."""
    pending = sorted(total.having(Pending))
    if len(pending) <= 1:
        return raised(total, pending, 1, node, "mean over a sharded dim divides by the local size only")
    why = "divides by a rank's own rows: which of the axes shard them cannot be told"
    return total.marked({axis: scope.unknown(node, why) for axis in pending})


def selection(condition: str, then: str, otherwise: str) -> Rule:
    """The rule of an op that takes elements of one argument where a condition holds, and else of another."""
    return lambda scope, node, given: elementwise(
        scope, node, "select", [as_value(given[name]) for name in (condition, then, otherwise)]
    )


def multiply_add(scope: Scope, node: Node, given: dict) -> Value:
    """fma(a, b, c) = a b + c."""
    return elementwise(scope, node, "sum", [_product(scope, node, given["a"], given["b"]), given["c"]])


def add_product(scope: Scope, node: Node, given: dict) -> Value:
    """addcmul = self + value tensor1 tensor2."""
    both = _product(scope, node, as_value(given["tensor1"]), as_value(given["tensor2"]))
    return elementwise(scope, node, "sum", [given["self"], _weighted(scope, node, both, given.get("value", 1))])


def add_quotient(scope: Scope, node: Node, given: dict) -> Value:
    """addcdiv = self + value tensor1 / tensor2."""
    both = elementwise(scope, node, "quotient", [as_value(given["tensor1"]), as_value(given["tensor2"])])
    return elementwise(scope, node, "sum", [given["self"], _weighted(scope, node, both, given.get("value", 1))])


def _weighted(scope: Scope, node: Node, x: Value, by: Any) -> Value:
    return _times(scope, node, x, by) if isinstance(by, (int, float)) and by != 1 else x


def interpolated(scope: Scope, node: Node, given: dict) -> Value:
    """lerp = self + weight (end - self): a sum, times a weight."""
    both = elementwise(scope, node, "sum", [given["self"], given["end" if "end" in given else "tensors1"]])
    weight = given.get("weight", given.get("weights"))
    return _product(scope, node, both, weight) if isinstance(weight, Value) else both


def gradient(scope: Scope, node: Node, given: dict) -> Value:
    """gelu_backward and the like: linear in the gradient, which comes first."""
    first, *others = [v for v in given.values() if isinstance(v, Value)]
    rest = elementwise(scope, node, "function", others) if others else number(1)
    return elementwise(scope, node, "product", [first, rest])


def power(scope: Scope, node: Node, given: dict) -> Value:
    """pow: squares and roots are known for what they are."""
    base, exponent = given["self"], given["exponent"]
    kind = (
        {2: "square", 0.5: "sqrt", -1: "inverse"}.get(exponent, "function") if not isinstance(exponent, Value) else ""
    )
    if isinstance(exponent, (int, float)) and isinstance(base, Value):
        return base if exponent == 1 else elementwise(scope, node, kind, [base])
    return elementwise(scope, node, "function", [as_value(base), as_value(exponent)])


def logical(scope: Scope, node: Node, given: dict) -> Value:
    """or, and, not: the maximum, the minimum, the opposite of truth values; of integers functions of bits."""
    op, operands = op_name(node), [as_value(v) for k, v in given.items() if k in ("self", "other")]
    kind = next((kind for word, kind in (("or", "max"), ("and", "min"), ("not", "falling")) if word in op), "function")
    if any(n.meta["val"].dtype != torch.bool for n in node.all_input_nodes) or "xor" in op:
        kind = "compare" if op.startswith("logical") else "function"
    return elementwise(scope, node, kind, operands)


def compared(scope: Scope, node: Node, given: dict) -> Value:
    """eq, gt, ...: only of axis_index == 0 more is known: it is true on one rank."""
    a, b = as_value(given["self"]), as_value(given["other"])
    if len(node.args) == 2 and node.args[0] is node.args[1]:  # x == x: where it is a number
        return elementwise(scope, node, "nan" if op_name(node) == "ne" else "finite", [a])
    if b.constant is not None and abs(b.constant) == math.inf and not b.dims:
        return elementwise(scope, node, "nan" if op_name(node) == "eq" else "finite", [a])
    if op_name(node) == "eq" and a.index_of and a.scale == 1 and b.constant == 0:
        return Value(a.dims, dict.fromkeys(a.index_of, First()))
    return elementwise(scope, node, "compare", [a, b])


def absolute(scope: Scope, node: Node, given: dict) -> Value:
    """abs; before a comparison with infinity (isfinite, isinf) it leaves what is compared as it is."""
    users = [user for user in node.users if user in scope.live]
    if users and all(op_name(u) in ("eq", "ne", "lt") and u.args[1:] == (math.inf,) for u in users):
        return given["self"]
    gradient_of_logcumsumexp(scope, node, given["self"])
    return elementwise(scope, node, "abs", [given["self"]])


def function_of(kind: str):
    """The rule of a function of that kind, whatever its further arguments are."""

    def rule(scope: Scope, node: Node, given: dict) -> Value:
        operands = [v for v in given.values() if isinstance(v, Value)]
        return elementwise(scope, node, kind if len(operands) == 1 else "function", operands)

    return rule


def of_two(kind: str):
    """The rule of the larger or smaller of two, or of a bound: clamp(min=) is the larger, clamp(max=) the smaller."""

    def rule(scope: Scope, node: Node, given: dict) -> Value:
        operands = [as_value(given[k]) for k in ("self", "other", "min", "max") if given.get(k) is not None]
        two = "rising" if len(operands) == 1 or all(v.constant is not None for v in operands[1:]) else kind
        out = elementwise(scope, node, two, operands if two == kind else operands[:1])
        at_zero = all(v.constant == 0 for v in operands[1:])  # of equal terms it leaves equal terms, as relu does
        return replace(out, equal_terms=True) if at_zero and operands[0].equal_terms else out

    return rule


function = function_of("function")


def same_bits(scope: Scope, node: Node, given: dict) -> Value | None:
    """x.view(dtype): the bits of elements; the last dim grows or shrinks with the size of an element."""
    x = elementwise(scope, node, "function", [given["self"]])
    before, after = node_of(node.args[0]).meta["val"].dtype.itemsize, node.meta["val"].dtype.itemsize
    if before == after or not x.dims:
        return x
    last = joined(x.dims[-1])
    if before > after:
        return x.with_dims((*x.dims[:-1], (*last, Atom(before // after, ()))))
    n, first = after // before, last[0] if last else Atom(1)
    if len(last) == 1 and first.plain and not first.cuts and first.size % n == 0:
        return x.with_dims((*x.dims[:-1], canonical((Atom(first.size // n, first.axes),))))
    if len(last) > 1 and last[-1].size % n == 0 and not last[-1].sharded:
        return x.with_dims((*x.dims[:-1], (*last[:-1], Atom(last[-1].size // n, last[-1].axes))))
    return None


def with_number(scope: Scope, node: Node, operands: Sequence[Value], out: Value) -> Value:
    """The result of a pointwise op, with the number that it is where all operands are numbers that are known."""
    if out.marks or any([v.constant is None or v.marks for v in operands]):
        return out
    known = iter([v.constant for v in operands if v.constant is not None])
    assert callable(node.target), "it is the function of a call"

    def scalar(n: Node) -> torch.Tensor:
        return torch.full((), next(known), dtype=n.meta["val"].dtype)

    with outside_of_tracing(), torch.no_grad():
        args, kwargs = torch.fx.map_arg((node.args, {k: v for k, v in node.kwargs.items() if k != "device"}), scalar)
        result = node.target(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or result.dim():
        return out
    terms = any([v.equal_terms for v in operands])
    return replace(out, dims=tuple(map(numbers_along, out.dims)), constant=result.item(), equal_terms=terms)


# ---- rules -----------------------------------------------------------------------------------------------------------
def constant(scope: Scope, node: Node, given: dict) -> Value:
    """zeros, ones_like, full, fill_ ...: one number everywhere; what memory of `empty` holds counts as equal.

    The gradient of a loss that is n times too large begins as ones of the loss, and is as much too large.
    """
    name = op_name(node)
    value = given.get("fill_value", given.get("value", given.get("s")))
    value = 0 if "zero" in name else 1 if "ones" in name else value
    number_ = value if isinstance(value, (int, float)) else None
    if number_ is not None and (name.endswith("_like") or name.rstrip("_") in ("fill", "zero")):
        out = _like(scope, given["self"], number_)
    else:  # a number that the step writes may count what a rank has
        out = filled(shape_of(node), number_)
        out = replace(out, equal_terms=bool(out.constant) and not name.endswith("_like"))
        out = _of_sizes(scope, node, out) if "parts" in node.meta else out
    ranks = node.meta.get("ranks")
    if (
        ranks and out.constant and sizes.of_ranks(scope, ranks, out.constant, False) == (ranks, 1)
    ):  # and not a size of its shape
        out = replace(out, ranks=ranks)
    if name != "ones_like" or out.dims:
        return out
    loss = given["self"]
    shares = [a for a in scope.mesh.names if is_share(loss, a)]
    numbers = ("number", "maybe", "equal")
    as_wrong = {a: m for a, m in loss.marks.items() if isinstance(m, Suspect) and m.gradient}
    wrong = {a: m for a, m in loss.marks.items() if isinstance(m, (Suspect, Wrong)) and a not in as_wrong}
    why = "a gradient of that is none of the whole"  # which may not show in it
    doubts = {a: scope.unknown(m.node, f"{m.what}; {why}") for a, m in wrong.items()}
    known = not doubts or scope.doubt(node, doubts)
    parts = sorted({*loss.having(Pending), *(wrong if known else ())})  # of each rank's own term, right or wrong
    owed = {a: "owed, of a mean" if loss.portion.get(a) in numbers else "owed" for a in parts}
    excess = {a: e for a, e in loss.excess.items() if a not in shares}
    # Divided by a number that may be that of the ranks, what all have alike may be 1/n: so may its gradient be.
    maybe = {a: p for a, p in loss.portion.items() if p in ("maybe", "equal") and loss.replicated(a)}
    out = replace(out, excess=excess or NOTHING, portion={**maybe, **owed, **dict.fromkeys(shares, "owed")})
    open_: dict[str, Mark | None] = {a: mark for a in shares if (mark := not_entered(scope, node, a)) is not None}
    open_ |= as_wrong if known else {**as_wrong, **doubts}
    return out.marked(open_ | {a: m for a, m in loss.marks.items() if isinstance(m, Unknown) and m.gradient})


def _of_sizes(scope: Scope, node: Node, x: Value) -> Value:
    """Numbers in a shape that is made of sizes of other values, or that are such a size."""
    found = sizes.shape_of_parts(scope, node, shape_of(node))
    if found and None not in found:
        return replace(x, dims=found, equal_terms=False)
    known = sizes.of_factor(scope, node, x.constant, False) if x.constant and not x.dims else None
    if known is None or not known.sure:
        return x
    share = {axis: "exact" for axis, power in known.over.items() if power == -1}
    return replace(x, ranks=known.over, equal_terms=False, portion=share)


def _like(scope: Scope, x: Value, number: float) -> Value:
    """One number everywhere in the shape of a value: of all that one rank has, or of a rank's part, as that is."""
    dims = tuple([numbers_along(dim) for dim in x.dims])
    if not number or not x.marks or not x.dims:
        return Value(dims, constant=number)
    marks: dict[str, Mark] = {}
    for axis, mark in x.marks.items():
        if isinstance(mark, (Suspect, Wrong)):
            marks[axis] = scope.unknown(mark.node, f"{mark.what}; whether what has its shape is a part")
        elif isinstance(mark, (Somewhere, Varying)) or (isinstance(mark, Unknown) and not mark.factor):
            marks[axis] = mark
    return Value(dims, marks, constant=None if marks else number)


def counter(scope: Scope, node: Node, given: dict) -> Value:
    """arange, eye, linspace ...: the same numbers on all ranks."""
    return counted(shape_of(node), given.get("start", 0) == 0 and given.get("step", 1) == 1 and "n" not in given)


def philox(scope: Scope, node: Node, given: dict) -> list[Value]:
    """Numbers from a seed and an offset that are tensors: the same wherever these are -> (numbers, next offset)."""
    source = elementwise(scope, node, "function", [given["seed"], given["offset"]])
    return [source.with_dims(plain(n) for n in node.meta["val"][0].shape), source]


RULES: Rules = MappingProxyType(
    dict.fromkeys("clone contiguous alias detach conj positive barrier to_host from_host".split(), same)
    | dict.fromkeys(("_to_copy", "to", "convert_element_type"), cast)
    | dict.fromkeys(("add", "sub", "rsub"), sums)
    | dict.fromkeys(_RISING.split(), function_of("rising"))
    | dict.fromkeys("isnan isinf isposinf isneginf".split(), function_of("nan"))
    | dict.fromkeys("__or__ __and__ __xor__".split(), logical)
    | {f"{head}_{tail}": logical for head in ("bitwise", "logical") for tail in ("or", "and", "xor", "not")}
    | dict.fromkeys("eq ne gt ge lt le".split(), compared)
    | dict.fromkeys(("maximum", "fmax", "clamp_min"), of_two("max"))
    | dict.fromkeys(("minimum", "fmin", "clamp_max"), of_two("min"))
    | {
        "max.other": of_two("max"),
        "min.other": of_two("min"),
        "clamp": of_two("function"),
        "neg": negated,
        "lift_fresh_copy": lifted,
        "copy": copied,
        "mul": product,
        "div": quotient,
        "where": selection("condition", "self", "other"),
        "masked_fill": selection("mask", "value", "self"),
        "fma": multiply_add,
        "addcmul": add_product,
        "addcdiv": add_quotient,
        "lerp": interpolated,
        "pow": power,
        "sqrt": function_of("sqrt"),
        "square": function_of("square"),
        "reciprocal": function_of("inverse"),
        "abs": absolute,
        "sign": function_of("sign"),
        "sgn": function_of("sign"),
        "isfinite": function_of("finite"),
        "gelu_backward": gradient,
        "silu_backward": gradient,
        "sigmoid_backward": gradient,
        "floor_divide": function,
        "view.dtype": same_bits,
    }
    | dict.fromkeys(
        "full zeros ones empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like zero"
        " fill scalar_tensor empty_strided new_empty_strided".split(),
        constant,
    )
    | dict.fromkeys("arange iota eye linspace tril_indices triu_indices".split(), counter)
    | {"philox_rand": philox}
)
