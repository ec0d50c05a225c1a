"""Where a step on many ranks stops meaning what the step on one rank means: line by line, without a rule per op.

For every node of the graph, `relate` looks for how the ranks' values make up the value of the same node on one rank:
equal on all ranks, concatenated, summed, or maximum, axis by axis. Meaning is lost at a node whose own values make up
nothing although those of all its inputs do.
"""

from __future__ import annotations

import difflib
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fmegatron.collectives import is_symbolic
from fmegatron.layout import Mesh

__all__ = ["Finding", "align", "blame", "relate"]


@dataclass(frozen=True)
class Finding:
    """A line of the user's code where meaning is lost. at: "file.py:12", op: the graph's op, what: in words."""

    at: str
    op: str
    what: str

    def __str__(self) -> str:
        return f"{self.at}: {self.op}: {self.what}"


# ---- relate ----------------------------------------------------------------------------------------------------------
def relate(
    values: list[torch.Tensor],
    reference: torch.Tensor,
    mesh: Mesh,
    parts: tuple[tuple[int, ...], ...] = (),
    tolerance: float = 1e-9,
) -> dict[str, Any] | None:
    """How one value per rank makes up `reference`, or None if it does not.

    -> per axis "equal", "sum", "max", ("concat", dim, stride) or ("concat", dim, sizes of interleaved parts). A stride
    s > 1 joins each of s consecutive pieces of the dim on its own: a view that merges a whole dim with a split one
    makes such shards. parts: sizes of the interleaved parts of global dims that are worth trying. tolerance: relative
    to the element and to the typical element.
    """
    names = [name for name in mesh.names if mesh[name] > 1]
    fits = _Fit(reference, tolerance)

    def search(values, count, found):  # values over names[:count], the last of these minor
        if count == 0:
            return found if fits(values[0]) else None
        name = names[count - 1]
        groups = _groups(values, mesh[name])
        same = all(fits.equal(other, group[0]) for group in groups for other in group[1:])
        if same:
            result = search([group[0] for group in groups], count - 1, {**found, name: "equal"})
            if result is not None:
                return result
        for how in _joins(values[0], reference, mesh[name], parts):
            if not (same and how == "max"):
                result = search([_join(group, how) for group in groups], count - 1, {**found, name: how})
                if result is not None:
                    return result
        return None

    return search(list(values), len(names), {})


def relates(
    values: list[torch.Tensor], reference: torch.Tensor, mesh: Mesh, how: dict, tolerance: float = 1e-9
) -> bool:
    """Whether the ranks' values make up `reference` in just this way (a result of `relate`)."""
    fits = _Fit(reference, tolerance)
    for name, kind in how.items():  # as relate found them: minor axes first
        groups = _groups(values, mesh[name])
        if kind == "equal" and not all(fits.equal(other, group[0]) for group in groups for other in group[1:]):
            return False
        values = [group[0] if kind == "equal" else _join(group, kind) for group in groups]
    return fits(values[0])


class _Fit:
    """Comparison with one reference, relative to the element and to the typical element."""

    def __init__(self, reference, tolerance):
        self.reference, self.tolerance = reference, tolerance
        magnitude = reference.double().abs().nan_to_num(0.0, 0.0, 0.0)
        nonzero = magnitude[magnitude > 0]
        self.limit = tolerance * (magnitude + (float(nonzero.median()) if nonzero.numel() else 0.0))

    def __call__(self, value):
        return self._close(value, self.reference, self.limit)

    def equal(self, a, b):
        """Whether two ranks hold the same."""
        return a is b or self._close(a, b, self.tolerance * b.double().abs())

    def _close(self, a, b, limit):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        # NaN must stand at the same places; where both are NaN or infinite the difference is NaN and counts as none
        if a.is_floating_point() and not torch.equal(a.isnan(), b.isnan()):
            return False
        return bool(((a.double() - b.double()).abs().nan_to_num(nan=0.0) <= limit).all())


def _groups(values, n):
    return [values[i : i + n] for i in range(0, len(values), n)]


def _joins(local, reference, n, parts):
    """The ways in which the values of n ranks might be put together, likely ones first."""
    if local.dim() == reference.dim() and local.shape != reference.shape:
        for dim in range(reference.dim()):
            size, wanted = local.shape[dim], reference.shape[dim]
            if size == wanted or size * n > wanted:
                continue
            for stride in (s for s in range(1, size + 1) if size % s == 0):
                yield "concat", dim, stride
            for sizes in parts:
                if sum(sizes) == wanted and all(part * size % wanted == 0 for part in sizes):
                    yield "concat", dim, sizes
    if reference.is_floating_point():
        yield "sum"
        yield "max"


def _join(group, how):
    if how == "sum":
        return torch.stack(group).sum(0)
    if how == "max":
        return torch.stack(group).amax(0)
    _, dim, pieces = how
    size = group[0].shape[dim]
    if isinstance(pieces, int):
        pieces = [size // pieces] * pieces
    else:
        pieces = [part * size // sum(pieces) for part in pieces]
    cut = [x.split(pieces, dim) for x in group]
    return torch.cat([one[i] for i in range(len(pieces)) for one in cut], dim)


# ---- align -----------------------------------------------------------------------------------------------------------
# Ops that only look at the same elements in another shape: they lose nothing, but their result may be a kind of shard
# that `relate` does not know.
_LOOKS = frozenset(
    ("clone", "detach", "alias", "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "t", "transpose", "permute")
)
_KEEPS = _LOOKS | {"_to_copy", "index_select"}


def _is_item(node):
    """Whether a node is one of the results of a coalesced collective."""
    return node.target is operator.getitem and is_symbolic(node.args[0].target) is not None


def _sources(node):
    """The inputs of a node; of a result of a coalesced collective just the tensor that became it."""
    return [node.args[0].args[0][node.args[1]]] if _is_item(node) else node.all_input_nodes


def _call(node):
    """The node that says what is done: for a result of a coalesced collective, that collective."""
    return node.args[0] if _is_item(node) else node


def _name(node):
    node = _call(node)
    name = getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0] if node.op == "call_function" else node.meta.get("path", node.name)


def _token(node):
    return node.meta.get("at"), str(node.target)


def align(many: fx.Graph, one: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node of the graph over many ranks, the nodes of the graph of one rank that may be its twin, best first.

    The graphs differ: over axes of size 1 collectives leave no node, and torch elides ops on dims of size 1. Nodes are
    paired in order by (line, op); what lies on the same line with the same op is the second guess. A collective, and an
    op that only one graph has and that keeps values, stands for the twin of its input.
    """
    calls = [n for n in many.nodes if n.op == "call_function" and not is_symbolic(n.target)]
    others = [n for n in one.nodes if n.op == "call_function"]
    first_guess = {}
    matcher = difflib.SequenceMatcher(None, [_token(n) for n in calls], [_token(n) for n in others], autojunk=False)
    for block in matcher.get_matching_blocks():
        first_guess |= {calls[block.a + i]: others[block.b + i] for i in range(block.size)}
    same_line: dict[tuple, list[fx.Node]] = {}
    for node in others:
        same_line.setdefault(_token(node), []).append(node)
    placeholders = (g.find_nodes(op="placeholder") for g in (many, one))
    twins = {a: [b] for a, b in zip(*placeholders, strict=True)}
    for node in many.nodes:
        if node.op != "call_function":
            continue
        if _is_item(node):  # of a coalesced collective: it stands for the tensor that went in
            twins[node] = twins.get(_sources(node)[0], [])
            continue
        collective = is_symbolic(node.target)
        guesses = [first_guess[node]] if node in first_guess else []
        if not collective:
            guesses += [n for n in same_line.get(_token(node), ()) if n not in guesses]
        if not guesses and collective != "axis_index" and (collective or _name(node) in _KEEPS):
            guesses = twins.get(node.all_input_nodes[0], [])
        twins[node] = guesses
    return twins


# ---- blame -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Judged:
    """A node's state: "good" carries meaning; "unknown" depends on the rank's index, which means nothing by itself
    until a collective or `declare` ends that; "lost" loses it; "bad" comes after. how: what `relate` found, twin: with
    which node of the graph of one rank."""

    state: str
    how: dict | None = None
    twin: fx.Node | None = None


def blame(
    many: fx.Graph,
    values: dict[fx.Node, list],
    one: fx.Graph,
    reference: dict[fx.Node, list],
    mesh: Mesh,
    wrong: list[fx.Node],
    parts: tuple[tuple[int, ...], ...] = (),
) -> list[Finding]:
    """The nodes at which meaning is lost on the way to the `wrong` outputs, in the order of the graph.

    many, one: the graphs over the mesh and over one rank (`inline_layers`), values and reference: what `interpret`
    kept. A wrong output whose value does relate to one rank is itself a finding: it is returned in another form than
    its layout says.
    """
    twins = align(many, one)
    judged = _judge_all(many, values, reference, mesh, parts, twins)
    findings = _collect(many, judged, wrong)
    return findings or _collect(many, _judge_all(many, values, reference, mesh, parts, twins, strict=False), wrong)


def _collect(many, judged, wrong):
    reached, todo = set(), list(wrong)
    while todo:
        node = todo.pop()
        if node not in reached and judged[node].how is None:
            reached.add(node)
            todo += _sources(node)
    findings = []
    for node in many.nodes:
        if node in reached and judged[node].state == "lost":
            findings.append(Finding(node.meta.get("at", "?"), _name(node), _explain(node, judged)))
        elif node in wrong and judged[node].how is not None:
            what = f"returned as {_say(node, judged)}, which is not what its layout says"
            while _name(node) == "detach":
                node = node.args[0]
            findings.append(Finding(node.meta.get("at", "?"), _name(node), what))
    return findings


def _judge_all(many, values, reference, mesh, parts, twins, strict=True):
    judged: dict[fx.Node, _Judged] = {}
    seen: dict[tuple, list[dict]] = {}  # (local shape, shape on one rank) -> ways that were found; they recur
    for node in many.nodes:
        if node.op != "output":
            candidates = [t for t in twins.get(node, ()) if isinstance(reference[t][0], torch.Tensor)]
            before = {judged[n].state for n in _sources(node)}
            how, twin = None, None
            if isinstance(values[node][0], torch.Tensor):
                how, twin = _find_twin(values[node], candidates, reference, mesh, parts, seen, before)
            judged[node] = _judge(node, judged, before, how, twin, candidates, strict)
    return judged


def _find_twin(mine, candidates, reference, mesh, parts, seen, before):
    for twin in candidates:
        one = reference[twin][0]
        for how in seen.get((mine[0].shape, one.shape), ()):
            if relates(mine, one, mesh, how):
                return how, twin
    if not before & {"bad", "lost"}:  # after a fault there is probably nothing to find, and a search that fails is slow
        for twin in candidates:
            one = reference[twin][0]
            how = relate(mine, one, mesh, parts)
            if how is not None:
                seen.setdefault((mine[0].shape, one.shape), []).append(how)
                return how, twin
    return None, None


def _judge(node, judged, before, how, twin, candidates, strict):
    collective = is_symbolic(_call(node).target) if node.op == "call_function" else None
    if collective and collective.endswith("_many") and not _is_item(node):
        return _Judged("good")  # a list: its items are judged
    if collective == "axis_index":
        return _Judged("unknown")
    if how is not None or not before:  # no inputs: an argument, or a constant of the graph
        return _Judged("good", how, twin)
    if before & {"bad", "lost"}:
        return _Judged("bad")
    if collective or _ends_shard(node):
        # Its twin is that of its input, so it can be judged where the input has one, or had one before rank indices
        if candidates and ("unknown" in before or judged[_sources(node)[0]].how is not None or not strict):
            return _Judged("lost")
    elif "unknown" not in before and any(_corresponds(node, c, judged, strict) for c in candidates):
        return _Judged("lost")
    return _Judged("unknown" if "unknown" in before else "good")


def _corresponds(node, candidate, judged, strict):
    """Whether a node of the graph of one rank does the same with the same: same line and op, and the same inputs."""
    if _name(node) in _LOOKS or _token(node) != _token(candidate):
        return False
    twins = [
        judged[n].twin for n in node.all_input_nodes if n.all_input_nodes or judged[n].twin
    ]  # constants may differ
    theirs = {_seen_through(n) for n in candidate.all_input_nodes}
    return not strict or None not in twins and {_seen_through(t) for t in twins} <= theirs


def _seen_through(node):
    while node.op == "call_function" and _name(node) in _LOOKS:
        node = node.args[0]
    return node


def _ends_shard(node):
    """`shard` leaves three nodes: a view, index_select by the rank's index, squeeze; the last must mean something."""
    return _name(node) == "squeeze" and _name(node.args[0]) == "index_select" and _is_index(node.args[0].args[2])


def _is_index(node):
    while is_symbolic(node.target) is None and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return is_symbolic(node.target) == "axis_index"


def _say(node, judged):
    """How a good node's values make up those of one rank: "equal on all ranks", "a sum over dp since step.py:12"."""
    how = judged[node].how
    if not how:
        return "made from the rank's index" if judged[node].state == "unknown" else "without a counterpart"
    words, splits = [], {}
    for name, kind in how.items():
        if kind in ("sum", "max"):
            words.append(f"a {kind} over {name} since {_birth(node, name, kind, judged).meta.get('at', '?')}")
        elif kind != "equal":
            splits.setdefault(kind[1], []).insert(0, name)
    words += [f"split over {'·'.join(names)} on dim {dim}" for dim, names in splits.items()]
    return ", ".join(words) or "equal on all ranks"


def _birth(node, name, kind, judged):
    while True:
        before = [n for n in _sources(node) if (judged[n].how or {}).get(name) == kind]
        if not before:
            return node
        node = before[0]


def _explain(node, judged):
    inputs = "; ".join(f"{_name(n)} is {_say(n, judged)}" for n in _sources(node))
    node, sources = _call(node), _sources(node)
    collective = (is_symbolic(node.target) or "").removesuffix("_many")
    if collective == "declare":
        kind = f"sharded on dim {node.args[3]}" if node.args[2] == "sharded" else node.args[2]
        return f"declared {kind} over {'+'.join(node.args[1])}, but the ranks' values do not make that up ({inputs})"
    advice = ""
    if collective:
        how = judged[sources[0]].how or {}
        over = f" over {'+'.join(node.args[1])}"
        if collective in ("psum", "reduce_scatter") and all(how.get(name) == "equal" for name in node.args[1]):
            advice = "; its input is the same on all these ranks already, the sum is too large"
        elif collective in ("psum", "reduce_scatter") and not all(how.get(name) == "sum" for name in node.args[1]):
            advice = "; only a pending sum over these axes may be reduced over them: another axis is meant?"
    else:
        over = ""
        if any("sum" in (judged[n].how or {}).values() for n in sources):
            advice = "; reduce the sum first, or reduce it over fewer axes"
    return f"what it makes{over} is not the value of a single rank, though its input is ({inputs}){advice}"
