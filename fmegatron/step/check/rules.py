"""The rule of each op, looked up by its name. An op that stands in no family's table is reported as unproven."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.collectives import is_symbolic
from fmegatron.step.check import coalesced, collectives, fused, lookups, made, moves, pointwise, products, reductions
from fmegatron.step.check.scope import Rule, Rules, Scope, Signature, line_of
from fmegatron.step.check.values import Value, plain

RULES: Rules = MappingProxyType(
    {
        **made.RULES,
        **pointwise.RULES,
        **moves.RULES,
        **reductions.RULES,
        **products.RULES,
        **lookups.RULES,
        **fused.RULES,
    }
)


def value_after(scope: Scope, node: torch.fx.Node) -> Any:
    """The Value (or list of them) of a call_function node."""
    if node.target is operator.getitem:
        source = scope.values[node.args[0]]
        return source[node.args[1]] if isinstance(source, list) else source
    signature = scope.signatures.get(node.target)
    if signature is None:
        signature = scope.signatures[node.target] = _signature(node.target)
    given = dict(signature.defaults)
    for name, argument in zip(signature.names, node.args, strict=False):
        given[name] = _with_values(scope, argument)
    for name, argument in node.kwargs.items():
        given[name] = _with_values(scope, argument)
    found = signature.rule(scope, node, given) if signature.rule is not None else None
    return found if found is not None else _unproven(scope, node)


def _with_values(scope: Scope, argument: Any) -> Any:
    if isinstance(argument, torch.fx.Node):
        return scope.values[argument]
    return [_with_values(scope, a) for a in argument] if isinstance(argument, (list, tuple)) else argument


def _signature(target: Any) -> Signature:
    arguments = target._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return Signature(target._schema.name, tuple(a.name for a in arguments), defaults, _rule_of(target))


def _rule_of(target: Any) -> Rule | None:
    if is_symbolic(target):
        return {**collectives.RULES, **coalesced.RULES}[is_symbolic(target)]
    name = target._schema.name.partition("::")[2]
    name = name.rstrip("_") if target._schema.is_mutable else name
    overload = f"{name}.{target._overloadname}"
    if name.startswith("_foreach_"):
        return _each(_of_elements(name.removeprefix("_foreach_"), True))
    rule = RULES.get(overload) or RULES.get(name) or _of_elements(name, torch.Tag.pointwise in target.tags)
    if rule is None and torch.Tag.nondeterministic_seeded in target.tags:
        return made.drawn_alike if name.endswith("_like") or target._schema.is_mutable else made.drawn
    return rule


def _of_elements(name: str, pointwise_op: bool) -> Rule | None:
    if name in RULES or not pointwise_op:
        return RULES.get(name)
    return pointwise.gradient if name.endswith("_backward") else pointwise.function


def _each(rule: Rule) -> Rule:
    """The rule of an op on lists of tensors, from that on single ones."""

    def each(scope: Scope, node: torch.fx.Node, given: dict) -> list[Value]:
        count = max(len(v) for v in given.values() if _is_tensors(v))
        listed = {k for k, v in given.items() if isinstance(v, list) and len(v) == count}
        return [rule(scope, node, {k: (v[i] if k in listed else v) for k, v in given.items()}) for i in range(count)]

    return each


def _is_tensors(argument: Any) -> bool:
    return isinstance(argument, list) and any(isinstance(a, Value) for a in argument)


def _unproven(scope: Scope, node: torch.fx.Node) -> Any:
    """Nothing is claimed about the result over the axes that come in; the report lists the op."""
    scope.unproven.setdefault(str(node.target), line_of(node))
    sources = [scope.values[n] for n in node.all_input_nodes]
    flat = [v for s in sources for v in (s if isinstance(s, Sequence) else [s]) if v is not None]
    unknown = frozenset().union(*(v.axes() for v in flat))

    def blank(meta: Any) -> Value | None:
        return Value(tuple(plain(n) for n in meta.shape), tainted=unknown) if isinstance(meta, torch.Tensor) else None

    found = node.meta.get("val")  # an op that only writes returns nothing
    return [blank(m) for m in found] if isinstance(found, (list, tuple)) else blank(found)
