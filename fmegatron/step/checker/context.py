"""Context of a check: the mesh, the values so far, findings with their lines, and reasons why a value is unknown."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fmegatron.collectives import kinds, table, torch_private
from fmegatron.layout import Layout, Mesh
from fmegatron.step.checker.values import Suspect, Unknown, Value, number
from fmegatron.step.graph.nodes import items_of, node_of, written_by

_MOVED = frozenset("slice select view unsqueeze squeeze permute transpose clone detach cat neg mul getitem".split())
_SHOWN = 3  # so many names of outputs are written out
# rule(scope, node, arguments by the names of the op's schema, with Values in place of tensors) -> the Value of the
# result, a list of them where the op has several results, or None where the rule does not cover this use.
Rule = Callable[["Scope", torch.fx.Node, dict[str, Any]], Any]
Rules = Mapping[str, Rule]
GO_ON = (
    "Go on: write it with other ops, say what it is (declare), vouch for the line (allow), or prove the step on "
    "simulated ranks (testing.assert_parity)"
)


@dataclass(frozen=True)
class Finding:
    """One mistake: where (file.py:line; of the forward for nodes of the backward), which op, over which mesh axis; axis
    is "" for one that is none of an axis.

    what: what is wrong.  fix: what would be right.  born: the line from which on the value was a pending sum, or "".
    """

    at: str
    op: str
    axis: str
    what: str
    fix: str
    born: str = ""

    def __str__(self) -> str:
        since = f" (pending since {self.born})" if self.born else ""
        over = f" over {self.axis!r}" if self.axis else ""
        return f"{self.at}: {self.op}{over}: {self.what}{since}. Fix: {self.fix}"


@dataclass(frozen=True)
class Unproven:
    """A line at which the rules end, and what is not proven because of it.

    at, op: as in `Finding`.  axes: over which of them.  why: what no rule can decide.  fix: how to go on.  outputs:
    paths of the result that depend on it ("0/params/w", "1/loss").
    """

    at: str
    op: str
    axes: tuple[str, ...]
    why: str
    fix: str
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.outputs[:_SHOWN])
        more = f" and {len(self.outputs) - _SHOWN} more" if len(self.outputs) > _SHOWN else ""
        axes = " and ".join(map(repr, self.axes))
        return f"{self.at}: unproven: {self.op} over {axes}: {self.why}; so {names}{more} may be wrong. {self.fix}"


@dataclass(frozen=True)
class Report:
    """findings: proofs of mistakes, in graph order.  unproven: what no rule can decide, with the outputs it concerns.
    silenced: findings and unproven lines that the caller vouches for, with the reason.  found: (number of an output,
    its layout), of outputs that may have any and are proven to have that of the array in whose place they stand.
    on_second_device: why the step fails where its arguments are on another device than the CPU, with the line, "" if it
    does not: it may be right where it runs, so it is no finding.
    """

    findings: tuple[Finding, ...]
    unproven: tuple[Unproven, ...] = ()
    silenced: tuple[tuple[Finding | Unproven, str], ...] = ()
    found: tuple[tuple[int, Layout], ...] = ()
    on_second_device: str = ""

    @property
    def ok(self) -> bool:
        """Whether all outputs are proven: nothing was found, and nothing is open."""
        return not self.findings and not self.unproven

    @property
    def unproven_outputs(self) -> tuple[str, ...]:
        """Paths of the result of which nothing is claimed, each once."""
        return tuple(dict.fromkeys(path for one in self.unproven for path in one.outputs))

    def __str__(self) -> str:
        lines = [str(f) for f in self.findings] or ["no findings"]
        lines += map(str, self.unproven)
        lines += [
            f"{f.at}: silenced ({reason}): {f.what if isinstance(f, Finding) else f.why}" for f, reason in self.silenced
        ]
        lines += [self.on_second_device] if self.on_second_device else []
        return "\n".join(lines)

    def require(self, what: str = "step") -> Report:
        """This report, or ValueError with all findings. What is unproven is no mistake: it raises nothing."""
        if self.findings:
            head = f"{what}: {len(self.findings)} finding{'s' * (len(self.findings) > 1)} of the check of collectives:"
            raise ValueError("\n  ".join([head, *map(str, self.findings)]))
        return self


class Signature(NamedTuple):
    """What is the same in all calls of one op: its name, names and defaults of its arguments, its rule (None: none)."""

    op: str
    names: tuple[str, ...]
    defaults: dict[str, Any]
    rule: Rule | None


class Reason(NamedTuple):
    """Why nothing is known of a value: the fields of `Unproven` that do not depend on the outputs."""

    at: str
    op: str
    why: str
    fix: str


class Doubt(NamedTuple):
    """Why some outputs (bits) may be wrong though nothing shows it, by axis."""

    marks: Mapping[str, Unknown]
    outputs: int


@dataclass
class Scope:
    """One interpretation of a graph; the graph inside a compiled layer has `values` of its own and shares the rest."""

    mesh: Mesh
    values: dict[torch.fx.Node, Any] = field(default_factory=dict)
    live: set[torch.fx.Node] = field(default_factory=set)
    findings: dict[Finding, int] = field(default_factory=dict)  # with the number of its node in order
    order: dict[torch.fx.Node, int] = field(default_factory=dict)
    reasons: dict[Reason, int] = field(default_factory=dict)
    signatures: dict[Any, Signature] = field(default_factory=dict)
    layers: dict[torch.fx.Graph, list[tuple]] = field(default_factory=dict)  # calls: (arguments, results)
    levels: dict[tuple, dict[torch.fx.Node, int]] = field(default_factory=dict)  # see `corrects`
    pieces: dict[Any, torch.fx.Graph | None] = field(default_factory=dict)  # what ops are made of
    outputs: dict[torch.fx.Node, int] = field(default_factory=dict)  # see `reached`
    sizes: dict[tuple[str, int], Any] = field(default_factory=dict)  # (name of a node, dim) -> see `sizes.note`
    asked: dict[int, set] = field(default_factory=dict)  # see `sizes.note`
    ahead: dict[torch.fx.Node, Any] = field(default_factory=dict)  # values of nodes that come, see `ahead.py`
    ranges: dict[torch.fx.Node, Any] = field(default_factory=dict)  # see `ranges.py`
    turns: dict[torch.fx.Node, Any] = field(default_factory=dict)  # see `turns.py`
    beside: set[torch.fx.Node] = field(default_factory=set)  # nodes that have such operands
    chunks: dict[Any, Any] = field(default_factory=dict)  # see `chunks`
    positions: Any = None  # see `positions.py`; None: of a graph that has none
    depth: int = 0  # of ops that are made of others
    completed: dict[tuple, bool] = field(default_factory=dict)  # see `completion.py`
    reordered: dict[int, torch.fx.Node] = field(
        default_factory=dict
    )  # reason -> node that turns a part round in itself
    cuts: dict[int, tuple] = field(default_factory=dict)  # reason -> (node, dim, begin) of a piece of every shard
    doubts: list[Doubt] = field(default_factory=list)  # see `doubt`
    top: torch.fx.Graph | None = None  # the graph that is checked, that of no layer
    views: dict[tuple, Any] = field(default_factory=dict)  # (line, shapes before and after) -> dims of what was viewed

    def reached(self, node: torch.fx.Node) -> int:
        """The outputs of its graph that are made of a node, as bits."""
        if node not in self.outputs:
            for one in reversed(node.graph.nodes):
                if one.op == "output":
                    self.outputs.update((n, 1 << i) for i, n in enumerate(one.all_input_nodes))
                    continue
                bits = self.outputs.get(one, 0)
                for user in one.users:
                    bits |= self.outputs.get(user, 0)
                self.outputs[one] = bits
        return self.outputs[node]

    def doubted(self, output: int, axis: str) -> frozenset[int]:
        """Reasons why an output, by its number, may be wrong though nothing shows it: what it is a gradient of is."""
        found = [
            doubt.marks[axis].origins for doubt in self.doubts if axis in doubt.marks and doubt.outputs >> output & 1
        ]
        return frozenset().union(*found)

    def doubt(self, node: torch.fx.Node, marks: Mapping[str, Unknown]) -> bool:
        """Note that all that is made of a node may be wrong though nothing shows it; False where what is made of it is
        not known: in the graph of a layer."""
        if self.depth or node.graph is not self.top:
            return False
        todo, seen = [node], {node}
        while todo:
            new = [user for user in todo.pop().users if user not in seen]
            seen.update(new)
            todo += new
        outputs = -1 if any(map(written_by, seen)) else self.reached(node)  # what shares written memory is no user
        self.doubts.append(Doubt(marks, outputs))
        return True

    def find(self, node: torch.fx.Node, axis: str, what: str, fix: str, birth: torch.fx.Node | None = None) -> None:
        """Note a finding at a node, when what came of it has arrived at an output."""
        born = line_of(birth) if birth is not None else ""
        finding = Finding(line_of(node), op_name(node), axis, what, fix, born)
        self.findings.setdefault(finding, self.order.get(node, len(self.order)))

    def unknown(self, node: torch.fx.Node, why: str, fix: str = GO_ON, own: bool = False) -> Unknown:
        """The mark of what no rule can decide from a node on; own: as in `Unknown`."""
        reason = Reason(line_of(node), op_name(node), why, fix)
        return Unknown(frozenset((self.reasons.setdefault(reason, len(self.reasons)),)), own)

    def vague(self, node: torch.fx.Node, why: str, fix: str = GO_ON) -> Unknown:
        """The mark of what an op does to a value of which shapes leave open on which dim it is sharded. The gradient of
        a linear op shows nothing of that value, so what is open of a loss is open of its gradient."""
        return self.unknown(node, why, fix)._replace(gradient=True)

    def reason(self, origin: int) -> Reason:
        """The reason of that number."""
        return list(self.reasons)[origin]

    def corrects(self, node: torch.fx.Node, axis: str, births: frozenset[torch.fx.Node]) -> bool:
        """Whether a node depends on a reduction over the axis of what came from one of `births`."""
        # 0: does not come from a birth, 1: does, 2: through a collective over the axis. Each node is looked at once.
        levels = self.levels.setdefault((births, axis), dict.fromkeys(births, 1))
        todo = [node]
        while todo:
            one = todo[-1]
            ahead = [] if one in levels else [n for n in one.all_input_nodes if n not in levels]
            todo += ahead
            if ahead:
                continue
            todo.pop()
            if one not in levels:
                level = max([levels[n] for n in one.all_input_nodes], default=0)
                levels[one] = 2 if level and _communicates(one, axis) else level
        return levels[node] == 2


def _communicates(node: torch.fx.Node, axis: str) -> bool:
    collective = kinds.collective_of(node.target)
    return collective is not None and collective.sent is not None and axis in items_of(node.args[1])


def goes_round(node: torch.fx.Node, axis: str) -> bool:
    """Whether a piece of a part is sent to the next rank of the axis: what comes there may complete another part."""
    todo, seen = list(node.users), set()
    while todo:
        one = todo.pop()
        if one in seen or one.op != "call_function":
            continue
        seen.add(one)
        if kinds.collective_of(one.target) is table.PPERMUTE and axis in items_of(one.args[1]):
            return True
        if op_name(one) in _MOVED:
            todo += one.users
    return False


def line_of(node: torch.fx.Node) -> str:
    """file.py:line of a node."""
    return node.meta.get("at", "?")


def op_name(node: torch.fx.Node) -> str:
    """The name of a node's op, without namespace and overload: "add"."""
    if node.target is operator.getitem:  # one of several results
        return op_name(node_of(node.args[0]))
    schema = torch_private.schema_of(node.target)
    return schema.name.partition("::")[2] if schema is not None else str(node.op)


def shape_of(node: torch.fx.Node) -> tuple[int, ...]:
    """The local shape of a node's result."""
    return tuple(node.meta["val"].shape)


def as_value(argument: Any) -> Value:
    """An argument that may be a tensor or a number."""
    return argument if isinstance(argument, Value) else number(argument)


def suspected(node: torch.fx.Node, what: str, fix: str, birth: torch.fx.Node | None = None) -> Suspect:
    """The mark of a part of a rank that is used, at a node, as if it were all there is."""
    births = frozenset([birth] if birth is not None else [node, *node.all_input_nodes])
    return Suspect(node, what, fix, birth, births)
