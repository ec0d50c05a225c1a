"""The table of rules by op name; an op without one is decomposed, and what remains is unproven.

Nothing here may hang or guess: what a rule says is compared with the shapes that the graph has, and where they disagree
nothing is claimed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.collectives import collective_of
from fmegatron.collectives.torch_private import schema_of
from fmegatron.step.check import (
    collectives,
    fused,
    lookups,
    made,
    moves,
    pointwise,
    products,
    reductions,
    rowwise,
)
from fmegatron.step.check.atoms import UNIFORM, Misfit, plain, size_of
from fmegatron.step.check.combine import strongest
from fmegatron.step.check.scope import GO_ON, Rule, Rules, Scope, Signature
from fmegatron.step.check.values import Suspect, Value
from fmegatron.step.torch_private import overload_name

RULES: Rules = MappingProxyType(
    {
        **made.RULES,
        **pointwise.RULES,
        **moves.RULES,
        **reductions.RULES,
        **products.RULES,
        **lookups.RULES,
        **fused.RULES,
        **rowwise.RULES,
    }
)
# How ops on lists name what the ops on single tensors call otherwise.
_ALIKE = MappingProxyType({"scalar": "other", "scalars": "other", "tensor": "other"})
# What a rule that meets something it was not made for may raise: the op is unproven then, and the report says so.
_FAULTS = (Misfit, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def value_after(scope: Scope, node: torch.fx.Node) -> Any:
    """The Value (or list of them) of a call_function node, None where no rule covers it."""
    if node.target is operator.getitem:
        source = scope.values[node.args[0]]
        return source[node.args[1]] if isinstance(source, list) else source
    signature = scope.signatures.get(node.target)
    if signature is None:
        signature = scope.signatures[node.target] = _signature(node.target)
    if signature.rule is None:
        return None
    given = dict(signature.defaults)
    for name, argument in zip(signature.names, node.args, strict=False):
        given[name] = _with_values(scope, argument)
    for name, argument in node.kwargs.items():
        given[name] = _with_values(scope, argument)
    try:
        found = signature.rule(scope, node, given)
    except _FAULTS as fault:
        return unproven(scope, node, f"internal: its rule fails ({type(fault).__name__}: {fault}); please report it")
    if found is None or _fits(found, node.meta.get("val")):
        return found
    return unproven(scope, node, f"internal: its rule gives {_sizes(found)}, not the shape it has; please report it")


def unproven(scope: Scope, node: torch.fx.Node, why: str, fix: str = GO_ON) -> Any:
    """Nothing is claimed about the result over the axes that come in: what is equal on all ranks stays so."""
    sources = [scope.values.get(n) for n in node.all_input_nodes]
    flat = [v for s in sources for v in (s if isinstance(s, Sequence) else [s]) if v is not None]
    axes = sorted(frozenset().union(*(v.axes() for v in flat)))
    if not axes and any(v.constant != 0 and atom.axes is UNIFORM for v in flat for dim in v.dims for atom in dim):
        # Ones in the shape of a shard are a part of larger ones as well, and so may be what is made of them.
        axes = sorted(name for name in scope.mesh.names if scope.mesh[name] > 1)
    marks = {axis: strongest(scope, node, flat, axis) or scope.unknown(node, why, fix) for axis in axes}
    marks |= {axis: scope.unknown(node, why, fix) for axis, mark in marks.items() if isinstance(mark, Suspect)}

    def blank(meta: Any) -> Value | None:
        return Value(tuple(plain(n) for n in meta.shape)).marked(marks) if isinstance(meta, torch.Tensor) else None

    found = node.meta.get("val")  # an op that only writes returns nothing
    return [blank(m) for m in found] if isinstance(found, (list, tuple)) else blank(found)


def _fits(found: Any, meta: Any) -> bool:
    if isinstance(found, Value):
        if not isinstance(meta, torch.Tensor):
            return False
        dims, shape = found.dims, meta.shape
        if len(dims) != len(shape):
            return False
        for dim, n in zip(dims, shape, strict=True):
            if (dim[0].size if len(dim) == 1 else size_of(dim)) != n:
                return False
        return True
    if isinstance(found, list) and isinstance(meta, (list, tuple)):
        return len(found) >= len(meta) and all(v is None or _fits(v, m) for v, m in zip(found, meta, strict=False))
    return found is None or isinstance(found, list)  # of an op that only writes: what it writes


def _sizes(found: Any) -> str:
    values = found if isinstance(found, list) else [found]
    return ", ".join(str(tuple(map(size_of, v.dims))) for v in values if v is not None)


def _with_values(scope: Scope, argument: Any) -> Any:
    if isinstance(argument, torch.fx.Node):
        return scope.values[argument]
    return [_with_values(scope, a) for a in argument] if isinstance(argument, (list, tuple)) else argument


def _signature(target: Any) -> Signature:
    arguments = schema_of(target).arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return Signature(schema_of(target).name, tuple(a.name for a in arguments), defaults, _rule_of(target))


def _rule_of(target: Any) -> Rule | None:
    if collective_of(target):
        return collectives.rule
    name = schema_of(target).name.partition("::")[2]
    name = name.rstrip("_") if schema_of(target).is_mutable else name
    overload = f"{name}.{overload_name(target)}"
    if name.startswith("_foreach_"):
        rule = _of_elements(name.removeprefix("_foreach_"), True)
        return rule and _each(rule)
    elements = torch.Tag.pointwise in target.tags
    rule = RULES.get(overload) or RULES.get(name) or _of_elements(name, elements)
    return _of_numbers(rule) if elements and rule is not None and not schema_of(target).is_mutable else rule


def _of_elements(name: str, pointwise_op: bool) -> Rule | None:
    if name in RULES or not pointwise_op:
        return RULES.get(name)
    return pointwise.gradient if name.endswith("_backward") else pointwise.function


def _of_numbers(rule: Rule) -> Rule:
    """The rule of a pointwise op; of numbers that are known, the number that it makes is known."""

    def known(scope: Scope, node: torch.fx.Node, given: dict) -> Any:
        out = rule(scope, node, given)
        operands = [v for v in given.values() if isinstance(v, Value)]
        if out is None or not operands or operands[0].constant is None:
            return out
        return pointwise.with_number(scope, node, operands, out)

    return known


def _each(rule: Rule) -> Rule:
    """The rule of an op on lists of tensors, from that on single ones."""

    def each(scope: Scope, node: torch.fx.Node, given: dict) -> list[Value]:
        given = {_ALIKE.get(k, k): v for k, v in given.items()}
        count = max(len(v) for v in given.values() if _is_tensors(v))
        listed = {k for k, v in given.items() if isinstance(v, list) and len(v) == count}
        return [rule(scope, node, {k: (v[i] if k in listed else v) for k, v in given.items()}) for i in range(count)]

    return each


def _is_tensors(argument: Any) -> bool:
    return isinstance(argument, list) and any(isinstance(a, Value) for a in argument)
