"""Blame: the first line where a step on many ranks stops meaning what it means on one rank, without a rule per op.

For every node of the graph, `relate` looks for how the ranks' values make up the value of the same node on one rank:
equal on all ranks, concatenated, summed, or maximum, axis by axis. Meaning is lost at a node whose own values make up
nothing although those of all its inputs do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from fmegatron.collectives import kinds, table
from fmegatron.layout import Layout, Mesh
from fmegatron.step.graph import nodes
from fmegatron.testing.align import LOOKS, align, call_of, is_shard_end, name_of, seen_through, sources_of, token_of
from fmegatron.testing.relate import relate, relates

__all__ = ["Finding", "Kept", "blame"]


@dataclass(frozen=True)
class Finding:
    """A line of the user's code where meaning is lost. at: "file.py:12", op: the graph's op, what: the message."""

    at: str
    op: str
    what: str

    def __str__(self) -> str:
        return f"{self.at}: {self.op}: {self.what}"


@dataclass(frozen=True)
class _Judged:
    """A node's state. how: what `relate` found; twin: with which node of the graph of one rank.

    "good"   carries meaning: it relates, or is an argument or a constant
    "plain"  nothing is known: the graph of one rank has no such node, or it is a kind of shard that has no name
    "index"  depends on the rank's index, which means nothing by itself until a collective or `declare` ends that
    "lost"   loses meaning: it could relate, what it is made of does, and it does not
    "bad"    comes after that
    """

    state: str
    how: dict | None = None
    twin: fx.Node | None = None


class Kept(NamedTuple):
    """A graph (`inline_layers`), and what `interpret` kept of it: of each node the values of all ranks."""

    graph: fx.Graph
    values: dict[fx.Node, list]


def blame(
    many: Kept,
    one: Kept,
    mesh: Mesh,
    wrong: dict[fx.Node, Layout],
    parts: tuple[tuple[int, ...], ...] = (),
    tolerance: float = 1e-10,
    called_at: str = "",
) -> list[Finding]:
    """The nodes at which meaning is lost on the way to the `wrong` outputs, in the order of the graph.

    Args:
        many: the graph over the mesh.
        one: the graph over one rank.
        mesh: of the ranks.
        wrong: outputs that differ, with their layouts; one whose value relates to one rank in another way is itself a
            finding.
        parts: as of `relate`.
        tolerance: as of `relate`.
        called_at: `Traced.called_at`, a line that is none of the step's; what is there is named by the last line of the
            step on the way to it.
    """
    judging = _Judging(many, one, mesh, parts, tolerance, called_at)
    return judging.findings(wrong, strict=True) or judging.findings(wrong, strict=False)


class _Judging:
    """All nodes of a graph, judged in order."""

    def __init__(self, many: Kept, one: Kept, mesh: Mesh, parts, tolerance, called_at):
        self.called_at = nodes.user_line(called_at)
        self.many, self.values, self.reference, self.mesh = many.graph, many.values, one.values, mesh
        self.parts, self.twins, self.tolerance = parts, align(many.graph, one.graph), tolerance
        self.seen = {}  # (local shape, shape on one rank) -> ways that were found; they recur
        self.judged: dict[fx.Node, _Judged] = {}

    def findings(self, wrong: dict, strict: bool) -> list[Finding]:
        """strict: only nodes of which all inputs have a known twin can lose meaning."""
        for node in self.many.nodes:
            if node.op != "output":
                self.judged[node] = self._judge(node, strict)
        reached, todo = set(), list(wrong)
        while todo:
            node = todo.pop()
            if node not in reached:
                reached.add(node)
                todo += [n for n in sources_of(node) if self.judged[n].how is None]
        found = [self._lost(node) for node in self.many.nodes if node in reached and self.judged[node].state == "lost"]
        found += [self._returned(node, layout) for node, layout in wrong.items() if self._contradicts(node, layout)]
        return list(dict.fromkeys(found)) or self._of_indices(reached)

    # ---- states ------------------------------------------------------------------------------------------------------
    def _judge(self, node, strict) -> _Judged:
        candidates = [t for t in self.twins.get(node, ()) if isinstance(self.reference[t][0], torch.Tensor)]
        before = {self.judged[n].state for n in sources_of(node)}
        collective = kinds.collective_of(call_of(node).target)
        if collective is table.AXIS_INDEX:
            return _Judged("index")
        how, twin = None, None
        if isinstance(self.values[node][0], torch.Tensor):
            by_itself = "index" in before and not (collective or is_shard_end(node))
            how, twin = self._find_twin(self.values[node], candidates[:1] if by_itself else candidates, before)
            if by_itself and "max" in (how or {}).values():  # of the ranks' own values one is often the largest
                how, twin = None, None
        if how is not None or not before:  # no inputs: an argument, or a constant of the graph
            return _Judged("good", how, twin)
        if before & {"bad", "lost"}:
            return _Judged("bad")
        state = "index" if "index" in before else "plain"
        if collective or is_shard_end(node):
            # Its twin is that of its input, so it can be judged where the input has one, or had one before rank indices
            known = self.judged[sources_of(node)[0]].how is not None
            return _Judged("lost" if candidates and (state == "index" or known or not strict) else state)
        if state == "plain" and any(self._corresponds(node, c, strict) for c in candidates):
            return _Judged("lost")
        return _Judged(state)

    def _find_twin(self, mine, candidates, before):
        for twin in candidates:
            one = self.reference[twin][0]
            for how in self.seen.get((mine[0].shape, one.shape), ()):
                if relates(mine, one, self.mesh, how, self.tolerance):
                    return how, twin
        if before & {"bad", "lost"}:  # after a fault there is probably nothing to find, and a search that fails is slow
            return None, None
        for twin in candidates:
            one = self.reference[twin][0]
            how = relate(mine, one, self.mesh, self.parts, self.tolerance)
            if how is not None:
                self.seen.setdefault((mine[0].shape, one.shape), []).append(how)
                return how, twin
        return None, None

    def _corresponds(self, node, candidate, strict) -> bool:
        """Whether a node of the graph of one rank does the same with the same: same line and op, the same inputs."""
        if name_of(node) in LOOKS or token_of(node) != token_of(candidate):
            return False
        inputs = [n for n in node.all_input_nodes if n.all_input_nodes or self.judged[n].twin]  # constants may differ
        known = (self.judged[n].twin for n in inputs)
        twins = {seen_through(twin) for twin in known if twin is not None}
        theirs = {seen_through(n) for n in candidate.all_input_nodes}
        return not strict or bool(twins or not inputs) and twins <= theirs

    # ---- findings ----------------------------------------------------------------------------------------------------
    def _lost(self, node) -> Finding:
        made = self._region(node, "plain")
        suspects = list({call_of(n): n for n in made if kinds.collective_of(call_of(n).target)}.values())
        entries = self._entries([node])
        if suspects:  # collectives that the graph of one rank does not have: all that is known is what is made of them
            also = "".join(f", or {name_of(n)} at {self._at(n)}" for n in suspects[1:])
            what = f"what {name_of(node)} at {self._at(node)} makes of it is not the value of a single rank{also}"
            return Finding(self._at(suspects[0]), name_of(suspects[0]), what)
        collective = kinds.collective_of(call_of(node).target)
        if entries and collective is not table.DECLARE and not is_shard_end(node):
            return self._index_entered(
                entries[0], f"{name_of(node)} at {self._at(node)} makes no value of a single rank of it"
            )
        return Finding(self._at(node), name_of(node), self._explain(node, collective, entries))

    def _returned(self, node, layout) -> Finding:
        what = f"returned as {self._say(node)}, which is not what its layout says: {layout}"
        node = self._in_step(node)
        while name_of(node) == "detach":
            node = self._in_step(node.args[0])
        return Finding(self._at(node), name_of(node), what)

    def _contradicts(self, node, layout) -> bool:
        """Whether a value that relates does so in another way than its layout; else it differs by rounding."""
        for name, how in (self.judged[node].how or {}).items():
            wanted = "sum" if name in layout.unreduced else "concat" if name in layout.sharded else "equal"
            if wanted != (how if isinstance(how, str) else how[0]):
                return True
        return False

    def _of_indices(self, reached) -> list[Finding]:
        """Outputs that are made from the rank's index, where nothing else is wrong."""
        last = [n for n in self.many.nodes if n in reached and self.judged[n].state == "index"][-1:]
        so = "it is returned, so every rank returns its own value"
        found = [self._index_entered(n, so) for n in self._entries(last)]
        return list({finding.what: finding for finding in reversed(found)}.values())[::-1]  # the first of each index

    def _index_entered(self, node, so) -> Finding:
        near = [call_of(n) for n in [node, *self._region(node, "index")]]
        indices = [n for n in near if kinds.collective_of(n.target) is table.AXIS_INDEX]
        of = f" of {'+'.join(indices[0].args[1])} at {self._at(indices[0])}" if indices else ""
        what = f"depends on the rank's index{of}, and {so}; end it by shard, psum or declare, or leave it out"
        return Finding(self._at(node), name_of(node), what)

    def _region(self, node, state) -> list:
        """The nodes of a state before a node, up to those of another state, in the order of the graph."""
        found, todo = set(), list(sources_of(node))
        while todo:
            n = todo.pop()
            if n not in found and self.judged[n].state == state:
                found.add(n)
                todo += sources_of(n)
        return [n for n in self.many.nodes if n in found]

    def _entries(self, nodes) -> list:
        """Where the rank's index first meets a value that means something, on the way to nodes; or the index itself."""
        made = [n for node in nodes for n in [*self._region(node, "index"), node]]
        made = [n for n in made if any(self.judged[m].state == "index" for m in [n, *sources_of(n)])]
        meets = [
            n
            for n in made
            if any(self.judged[m].how for m in sources_of(n) if m.all_input_nodes or m.op != "call_function")
        ]
        return meets or made[:1]

    def _at(self, node) -> str:
        return self._in_step(node).meta.get("at", "?")

    def _in_step(self, node):
        """The node, or the last one before it that is on a line of the step."""
        last = node
        while last.op == "call_function" and nodes.user_line(last.meta.get("at", "?")) == self.called_at:
            sources = sources_of(last)
            if not sources:
                return node
            kinds = self._pending(last)
            last = next((n for n in sources if kinds and kinds == self._pending(n)), sources[0])
        return last if last.op == "call_function" else node

    def _pending(self, node) -> dict:
        return {name: kind for name, kind in (self.judged[node].how or {}).items() if kind in ("sum", "max")}

    # ---- words -------------------------------------------------------------------------------------------------------
    def _say(self, node) -> str:
        """How a good node's values make up those of one rank: "equal on all ranks", "a sum over dp since a.py:12"."""
        how = self.judged[node].how
        if not how:
            return "made from the rank's index" if self.judged[node].state == "index" else "without a counterpart"
        words, splits = [], {}
        for name, kind in how.items():
            if kind in ("sum", "max"):
                words.append(f"a {kind} over {name} since {self._at(self._birth(node, name, kind))}")
            elif kind != "equal":
                splits.setdefault(kind[1], []).insert(0, name)
        words += [f"split over {'·'.join(names)} on dim {dim}" for dim, names in splits.items()]
        return ", ".join(words) or "equal on all ranks"

    def _birth(self, node, name, kind):
        while True:
            before = [n for n in sources_of(node) if (self.judged[n].how or {}).get(name) == kind]
            if not before:
                return node
            node = before[0]

    def _explain(self, node, collective, entries) -> str:
        there = self._at(node)
        lines = {n: self._at(n) for n in sources_of(node) if n.op == "call_function"}
        where = {n: f" at {at}" for n, at in lines.items() if at != there}
        inputs = "; ".join(f"{name_of(n)}{where.get(n, '')} is {self._say(n)}" for n in sources_of(node))
        node, sources = call_of(node), sources_of(node)
        if collective is table.DECLARE:
            kind = f"sharded on dim {node.args[4]}" if node.args[3] == "sharded" else node.args[3]
            since = f"; the rank's index enters at {self._at(entries[0])}" if entries else ""
            return (
                f"declared {kind} over {'+'.join(node.args[1])}, but the ranks' values do not make that up "
                f"({inputs}{since})"
            )
        over = f" over {'+'.join(node.args[1])}" if collective else ""
        advice = ""
        if collective in (table.PSUM, table.REDUCE_SCATTER):
            how = self.judged[sources[0]].how or {}
            if all(how.get(name) == "equal" for name in node.args[1]):
                advice = "; its input is the same on all these ranks already, the sum is too large"
            elif not all(how.get(name) == "sum" for name in node.args[1]):
                advice = "; only a pending sum over these axes may be reduced over them: another axis is meant?"
        elif not collective and any("sum" in (self.judged[n].how or {}).values() for n in sources):
            advice = "; reduce the sum first, or reduce it over fewer axes"
        return f"what it makes{over} is not the value of a single rank, though its input is ({inputs}){advice}"
