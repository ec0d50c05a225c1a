"""What rules share while a graph is walked: the mesh, the values so far, and the list of findings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fmegatron.layout import Mesh
from fmegatron.step.check.findings import Finding


@dataclass
class Scope:
    """One walk over one graph."""

    mesh: Mesh
    values: dict = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unproven: dict[str, str] = field(default_factory=dict)

    def find(self, node: torch.fx.Node, axis: str, what: str, fix: str, birth: torch.fx.Node | None = None) -> None:
        """Note a finding at a node."""
        op = getattr(node.target, "_schema", None)
        name = op.name.split("::")[1] if op is not None else str(node.op)
        born = line_of(birth) if birth is not None else ""
        self.findings.append(Finding(line_of(node), name, axis, what, fix, born))


def line_of(node: torch.fx.Node) -> str:
    """file.py:line of a node."""
    return node.meta.get("at", "?")
