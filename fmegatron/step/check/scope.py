"""What rules share while a graph is walked: the mesh, the values so far, and the list of findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fmegatron.layout import Mesh
from fmegatron.step.check.findings import Finding
from fmegatron.step.check.values import Value

# rule(scope, node, arguments by the names of the op's schema, with Values in place of tensors) -> the Value of the
# result, a list of them where the op has several results, or None where the rule does not cover this use.
Rule = Callable[["Scope", torch.fx.Node, dict[str, Any]], Any]
Rules = Mapping[str, Rule]


class Signature(NamedTuple):
    """What is the same in all calls of one op: its name, names and defaults of its arguments, its rule (None: none)."""

    op: str
    names: tuple[str, ...]
    defaults: dict[str, Any]
    rule: Rule | None


@dataclass
class Scope:
    """One walk over one graph; the graph inside a compiled layer has `values` of its own and shares the rest."""

    mesh: Mesh
    values: dict[torch.fx.Node, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unproven: dict[str, str] = field(default_factory=dict)
    signatures: dict[Any, Signature] = field(default_factory=dict)
    layers: dict[torch.fx.Graph, list[tuple]] = field(default_factory=dict)  # calls: (arguments, results)

    def find(self, node: torch.fx.Node, axis: str, what: str, fix: str, birth: torch.fx.Node | None = None) -> None:
        """Note a finding at a node."""
        born = line_of(birth) if birth is not None else ""
        self.findings.append(Finding(line_of(node), op_name(node), axis, what, fix, born))


def line_of(node: torch.fx.Node) -> str:
    """file.py:line of a node."""
    return node.meta.get("at", "?")


def op_name(node: torch.fx.Node) -> str:
    """The name of a node's op, without namespace and overload: "add"."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else str(node.op)


def shape_of(node: torch.fx.Node) -> tuple[int, ...]:
    """The local shape of a node's result."""
    return tuple(node.meta["val"].shape)


def as_value(argument: Any) -> Value | None:
    """An argument that may be a tensor or a number: numbers are None."""
    return argument if isinstance(argument, Value) else None
