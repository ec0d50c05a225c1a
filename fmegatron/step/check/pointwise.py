"""Rules for ops on single elements: which of them a pending sum may pass."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.step.check.arithmetic import elementwise
from fmegatron.step.check.scope import Rules, Scope, as_value
from fmegatron.step.check.shapes import expanded
from fmegatron.step.check.values import Atom, Value, canonical, plain, size_of


def same(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """neg, clone, detach: what it was, element for element."""
    x = given["self"] if "self" in given else given["x"]
    return replace(x, ramp=False, index_of=(), constant=None) if node.target is torch.ops.aten.neg.default else x


def cast(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """A cast between floats (fp8 too) is taken for exact; one to whole numbers or truth values is not linear."""
    x, before, after = given["self"], node.args[0].meta["val"].dtype, node.meta["val"].dtype
    linear = before == after or after.is_floating_point or not before.is_floating_point and after != torch.bool
    return x if linear or x.settled else elementwise(scope, node, "function", [x])


def copied(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """x.copy_(src): the new value, in the shape of x."""
    return expanded(given["src"], [size_of(dim) for dim in given["self"].dims])


def sums(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """add, sub, rsub; arange(n) + n * axis_index is known for what it is."""
    pair = [given["self"], given["other"]]
    if node.target is torch.ops.aten.add.Tensor and None not in map(as_value, pair):
        found = positions(*pair) or positions(*pair[::-1])
        if found is not None:
            return found
    return elementwise(scope, node, "sum", [as_value(a) or _zero(a) for a in pair])


def positions(ramp: Value, index: Value) -> Value | None:
    """arange(n) + n * axis_index is the arange of the whole dim, sharded over the axis; None when it is not that."""
    if ramp.ramp and index.index_of and len(ramp.dims) == 1 and index.scale == size_of(ramp.dims[0]):
        return Value((plain(index.scale, index.index_of),))
    return None


def product(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """mul; a multiple of axis_index stays one."""
    a, b = given["self"], given["other"]
    if isinstance(a, Value) and a.index_of and isinstance(b, int):
        return replace(a, scale=a.scale * b)
    return elementwise(scope, node, "product", [as_value(a), as_value(b)])


def quotient(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """div without rounding; with rounding it is a function like others."""
    pair = [as_value(given["self"]), as_value(given["other"])]
    return elementwise(scope, node, "function" if given.get("rounding_mode") else "quotient", pair)


def where(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """where(condition, self, other)."""
    return _selected(scope, node, given["condition"], given["self"], given["other"])


def masked_fill(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """masked_fill(self, mask, value)."""
    return _selected(scope, node, given["mask"], given["self"], given["value"])


def _selected(scope, node, condition, a, b):
    return elementwise(scope, node, "select", [condition, *(as_value(x) or _zero(x) for x in (a, b))])


def _zero(number: object) -> Value | None:
    """A literal zero takes no part in a sum; any other number is None."""
    return Value((), constant=0) if isinstance(number, (int, float)) and number == 0 else None


def multiply_add(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """fma(a, b, c) = a b + c."""
    both = elementwise(scope, node, "product", [as_value(given["a"]), as_value(given["b"])])
    return elementwise(scope, node, "sum", [both, as_value(given["c"])])


def add_product(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """addcmul = self + value tensor1 tensor2."""
    both = elementwise(scope, node, "product", [given["tensor1"], given["tensor2"]])
    return elementwise(scope, node, "sum", [given["self"], both])


def add_quotient(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """addcdiv = self + value tensor1 / tensor2."""
    both = elementwise(scope, node, "quotient", [given["tensor1"], given["tensor2"]])
    return elementwise(scope, node, "sum", [given["self"], both])


def interpolated(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """lerp = self + weight (end - self): a sum, times a weight."""
    both = elementwise(scope, node, "sum", [given["self"], given.get("end", given.get("tensors1"))])
    weight = as_value(given.get("weight", given.get("weights")))
    return both if weight is None else elementwise(scope, node, "product", [both, weight])


def gradient(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """gelu_backward and the like: linear in the gradient, which comes first."""
    first, *others = [v for v in given.values() if isinstance(v, Value)]
    rest = elementwise(scope, node, "function", others) if others else None
    return elementwise(scope, node, "product", [first, rest])


def function(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Any other pointwise op is not linear: comparisons, roots, bit operations and shifts of hashes, ..."""
    return elementwise(scope, node, "function", [v for v in given.values() if isinstance(v, Value)])


def same_bits(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """x.view(dtype): the bits of elements; the last dim grows or shrinks with the size of an element."""
    x = elementwise(scope, node, "function", [given["self"]])
    before, after = node.args[0].meta["val"].dtype.itemsize, node.meta["val"].dtype.itemsize
    if before == after or not x.dims:
        return x
    last = x.dims[-1]
    if before > after:
        return x.with_dims((*x.dims[:-1], (*last, Atom(before // after, ()))))
    n, first = after // before, last[0] if last else Atom(1)
    if len(last) == 1 and first.plain and not first.cuts and first.size % n == 0:
        return x.with_dims((*x.dims[:-1], canonical((Atom(first.size // n, first.axes),))))
    if len(last) > 1 and last[-1].size % n == 0 and not last[-1].sharded:
        return x.with_dims((*x.dims[:-1], (*last[:-1], Atom(last[-1].size // n, last[-1].axes))))
    return None


RULES: Rules = MappingProxyType(
    dict.fromkeys(
        "neg clone contiguous alias detach lift_fresh_copy conj positive barrier to_host from_host".split(), same
    )
    | dict.fromkeys(("_to_copy", "to"), cast)
    | dict.fromkeys(("add", "sub", "rsub"), sums)
    | {
        "copy": copied,
        "mul": product,
        "div": quotient,
        "where": where,
        "masked_fill": masked_fill,
        "fma": multiply_add,
        "addcmul": add_product,
        "addcdiv": add_quotient,
        "lerp": interpolated,
        "gelu_backward": gradient,
        "silu_backward": gradient,
        "sigmoid_backward": gradient,
        "__or__": function,
        "__and__": function,
        "__xor__": function,
        "floor_divide": function,
        "view.dtype": same_bits,
    }
)
