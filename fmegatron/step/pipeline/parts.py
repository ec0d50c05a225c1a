"""A graph before it is cut: seeds as constants, terms of sums by stage, backwards of compiled layers in two."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fmegatron.collectives import kinds, torch_private
from fmegatron.step.graph.nodes import RUNS, entry_of, items_of, user_line
from fmegatron.step.opaque import Entry
from fmegatron.step.partition import bases_of
from fmegatron.step.torch_private import Op, extract_subgraph, graph_module_of, opname

__all__ = [
    "extracted",
    "layer_of",
    "linear_in",
    "reach",
    "seeds_as_constants",
    "split_backwards",
    "summing",
    "terms_by_stage",
    "without_declarations",
]

_aten = torch.ops.aten
_SAME = ("detach", "alias", "_to_copy", "convert_element_type")  # or in another dtype
_MOVES = ("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "clone", "neg", "sum", "unsqueeze")
_PIECES = ("squeeze", "select", "slice", "split", "split_with_sizes", "unbind", "repeat", "mean")
# Ops by the arguments of which they are linear, one at a time; gradients of ops (`..._backward`) are, of what comes in.
_LINEAR = MappingProxyType(
    {
        **dict.fromkeys((*_SAME, *_MOVES, *_PIECES), (0,)),
        **dict.fromkeys(("mul", "mm", "bmm"), (0, 1)),
        **dict.fromkeys(("div", "_softmax_backward_data", "_log_softmax_backward_data"), (0,)),
        **dict.fromkeys(("flip", "cumsum", "roll", "tril", "triu"), (0,)),
    }
)
# The argument of which an op is linear where another one is zero: (the one, the other).
_BESIDE_ZERO = MappingProxyType(
    {
        "constant_pad_nd": ((0, 2),),
        "masked_fill": ((0, 2),),
        "where": ((1, 2), (2, 1)),
        **dict.fromkeys(("scatter_add", "index_add"), ((3, 0),)),
        **dict.fromkeys(("index_put", "_unsafe_index_put"), ((2, 0),)),
        "slice_scatter": ((1, 0),),
        "select_scatter": ((1, 0),),
    }
)
# Of these only shape, dtype and device of the first argument count: they are full of a value.
_LIKE = MappingProxyType({"ones_like": 1, "zeros_like": 0, "new_zeros": 0, "new_ones": 1, "full_like": None})


def reach(outputs: Iterable[Any], stop: Callable[[Any], bool]) -> tuple[set[Any], set[Any]]:
    """(what outputs are made of, where that stopped)."""
    todo, nodes, met = list(outputs), set(), set()
    while todo:
        n = todo.pop()
        if stop(n):
            met.add(n)
        elif n not in nodes:
            nodes.add(n)
            todo += n.all_input_nodes
    return nodes, met


def extracted(takes: Sequence[fx.Node], nodes: Sequence[fx.Node], gives: Sequence[fx.Node]) -> fx.Graph:
    """A graph of these nodes of another one, in their order, which takes some as inputs. (torch's own looks at each
    node of the graph for each part.)"""
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for n in takes:
        copied[n] = graph.placeholder(n.name)
        copied[n].meta = dict(n.meta)
    for n in nodes:
        copied[n] = graph.node_copy(n, copied.__getitem__)
    graph.output(tuple([copied[n] for n in gives]))
    return graph


def seeds_as_constants(graph: fx.Graph) -> None:
    """`ones_like(loss)` reads a shape alone: the seed of the backward does not depend on the loss."""
    nodes: list[Any] = list(graph.nodes)
    for n in nodes:
        if opname(n.target) in _LIKE and isinstance(n.meta.get("val"), torch.Tensor):
            v, fill = n.meta["val"], _LIKE[opname(n.target)]
            fill = n.args[1] if fill is None else fill
            with graph.inserting_before(n):
                new = graph.call_function(
                    _aten.full.default, (list(v.shape), fill), {"dtype": v.dtype, "device": v.device}
                )
            new.meta = dict(n.meta)
            n.replace_all_uses_with(new)
            graph.erase_node(n)


def without_declarations(graph: fx.Graph) -> None:
    """Take out what is stated for a check alone (`declare`, `as_terms`): it is its operand, and perhaps reads, of the
    forward of several stages, what it is stated by. Changes the graph."""
    for n in list(graph.nodes):
        collective = kinds.collective_of(n.target)
        if collective is not None and collective.name == "declare":
            for item in list(n.users):
                item.replace_all_uses_with(n.args[0][item.args[1]])
                graph.erase_node(item)
            graph.erase_node(n)


def layer_of(name: str) -> tuple[str, int | None]:
    """(path, i) of "layer i of path", (path, None) of another path."""
    found = re.fullmatch(r"layer (\d+) of (.*)", name, re.DOTALL)
    return (name, None) if found is None else (found[2], int(found[1]))


def terms_by_stage(graph: fx.Graph, node: Any, home: dict[fx.Node, set[int]], who: str) -> dict[int, fx.Node]:
    """{stage: its term} of a gradient to which perhaps several stages add, as to a table that is tied: sums are taken
    apart, and what is linear is applied to each term. home: of each node the stages that it is made of; new ones are
    added. ValueError for what is no sum of terms of one stage each."""
    stages = home[node]
    if len(stages) <= 1:
        return {next(iter(stages), 0): node}
    if node.target in (_aten.add.Tensor, _aten.sub.Tensor) and len(node.args) == 2 and not node.kwargs:
        found: dict[int, fx.Node] = {}
        for x in node.args:
            for s, term in _terms_of(graph, x, home, stages, who).items():
                if x is node.args[1] and node.target is _aten.sub.Tensor:
                    with graph.inserting_after(max(node, term)):
                        negative = graph.call_function(_aten.neg.default, (term,))
                    negative.meta, home[negative], term = dict(node.meta), {s}, negative
                found[s] = _sum(graph, home, s, node, found[s], term) if s in found else term
        return found
    at = next((i for i in linear_in(node) if _alone(node, i, home)), None)
    if at is not None:
        terms = terms_by_stage(graph, node.args[at], home, who)
        return {s: _noted(graph, home, s, node, _put(node.args, at, term)) for s, term in terms.items()}
    if node.target in (_aten.stack.default, _aten.cat.default):
        each = [_terms_of(graph, x, home, stages, who) for x in node.args[0]]
        return {s: _joined(graph, home, s, node, [one.get(s) for one in each]) for s in sorted(stages)}
    if node.target is operator.getitem:
        whole, i = node.args
        if summing(whole) is not None:
            return _through(graph, node, whole, i, home, who)
        at = next((k for k in linear_in(whole) if _alone(whole, k, home)), None)
        if at is not None:
            terms = terms_by_stage(graph, whole.args[at], home, who)
            of_each = {s: _noted(graph, home, s, whole, _put(whole.args, at, term)) for s, term in terms.items()}
            return {s: _noted(graph, home, s, node, (of_one, i)) for s, of_one in of_each.items()}
    raise ValueError(
        f"{who}: got a gradient of stages {', '.join(map(str, sorted(stages)))} together ({node.target} at "
        f"{user_line(node.meta.get('at', '?'))}), wanted a sum of one term for each stage, as nothing skips a stage: "
        "read x = step.stage(x, n), and not the x before; another value goes from block to block with it (torch.cat), "
        "or is detached; a stack is taken apart once"
    )


def _terms_of(graph: fx.Graph, node: Any, home: dict[fx.Node, set[int]], stages: set[int], who: str) -> dict:
    """`terms_by_stage` of one of several values of these stages; what no stage makes (of a penalty on parameters) is
    with the first of them."""
    return terms_by_stage(graph, node, home, who) if home[node] else {min(stages): node}


def _sum(graph, home, stage: int, like: Any, one: fx.Node, other: fx.Node) -> fx.Node:
    """one + other, behind both and what it is like."""
    with graph.inserting_after(max(like, one, other)):
        new = graph.call_function(_aten.add.Tensor, (one, other))
    new.meta, home[new] = dict(like.meta), {stage}
    return new


def summing(node: Any) -> str | None:
    """The name of the sum over ranks that a node is, if it is one: of each of several values."""
    collective = kinds.collective_of(node.target)
    return None if collective is None or collective.name not in ("reduce_scatter", "psum") else collective.name


def linear_in(node: Any) -> tuple[int, ...]:
    """The arguments of which a node is linear, one at a time."""
    name = opname(node.target)
    if isinstance(node.target, Op) and node.target.namespace == "aten" and name.endswith("_backward"):
        schema = torch_private.schema_of(node.target)
        return (0,) if schema.arguments[0].name.startswith("grad") else ()
    if name == "index_put" and node.args[3:] != (True,):
        return ()
    beside = [one for one, zero in _BESIDE_ZERO.get(name, ()) if _is_zero(node, zero)]
    return (*_LINEAR.get(name, ()), *beside)


def _is_zero(node: Any, at: int) -> bool:
    """Whether an argument is 0, or full of it; left out, it is."""
    x = node.args[at] if len(node.args) > at else 0
    if isinstance(x, fx.Node) and opname(x.target) in ("full", "scalar_tensor"):
        x = x.args[len(x.args) - 1]
    return isinstance(x, int | float) and x == 0


def _put(args: tuple, at: int, value: Any) -> tuple:
    """Arguments with another one at a place."""
    return (*args[:at], value, *args[at + 1 :])


def _alone(node: Any, at: int, home: dict[fx.Node, set[int]]) -> bool:
    """Whether this argument of a node is the only one that values of stages are in."""
    others = [x for x in node.all_input_nodes if x is not node.args[at]]
    return isinstance(node.args[at], fx.Node) and node.args.count(node.args[at]) == 1 and not any(map(home.get, others))


def _joined(graph, home, stage: int, like: Any, terms: list) -> fx.Node:
    """Tensors side by side, zeros for those to which a stage adds nothing."""
    filled = []
    for x, term in zip(like.args[0], terms, strict=True):
        if term is None:
            v = x.meta["val"]
            with graph.inserting_before(like):
                term = graph.call_function(
                    _aten.full.default, (list(v.shape), 0), {"dtype": v.dtype, "device": v.device}
                )
            term.meta, home[term] = dict(x.meta), set()
        filled.append(term)
    return _noted(graph, home, stage, like, (filled, *like.args[1:]), filled)


def _through(graph, node, whole, i, home, who) -> dict[int, fx.Node]:
    """The terms of one of the results of a sum over ranks."""
    count, found = len(whole.args[0]), {}
    rest = [[x[i]] if isinstance(x, list | tuple) and len(x) == count else x for x in whole.args[3:]]
    for s, term in terms_by_stage(graph, whole.args[0][i], home, who).items():
        with graph.inserting_after(max(node, term)):
            of_one = graph.call_function(whole.target, ([term], *whole.args[1:3], *rest), dict(whole.kwargs))
        of_one.meta = {**whole.meta, "val": [whole.meta["val"][i]]}
        with graph.inserting_after(of_one):
            found[s] = graph.call_function(operator.getitem, (of_one, 0))
        found[s].meta = dict(node.meta)
        home[of_one] = home[found[s]] = {s}
    return found


def _noted(
    graph: fx.Graph, home: dict[fx.Node, set[int]], stage: int, like: Any, args: tuple, more: Sequence = ()
) -> fx.Node:
    """A node as `like`, of other arguments, behind it and them (and `more` within them)."""
    with graph.inserting_after(max([like, *(x for x in (*args, *more) if isinstance(x, fx.Node))])):
        new = graph.call_function(like.target, args, dict(like.kwargs))
    new.meta = dict(like.meta)
    home[new] = {stage}
    return new


# ---- compiled layers -------------------------------------------------------------------------------------------------
def split_backwards(graph: fx.Graph) -> None:
    """Make two nodes of the backward of each compiled layer: the gradient of its input, and those of its weights, which
    another part of the pipeline computes. Equal backwards have one pair of entries."""
    pairs: dict[Entry, tuple] = {}
    for node in [n for n in graph.nodes if entry_of(n) is not None and entry_of(n).gradients]:
        entry = entry_of(node)
        if entry not in pairs:
            pairs[entry] = _halves(entry)
        (of_input, first), (of_weights, second) = pairs[entry]
        given = items_of(node.args[0])
        with graph.inserting_before(node):
            dx, *between = _call(graph, node, of_input, [given[i] for i in first])
            rest = _call(graph, node, of_weights, [*(given[i] for i in second), *between])
        for user in list(node.users):
            user.replace_all_uses_with([dx, *rest][user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def _halves(entry: Entry) -> tuple[tuple[Entry, list[int]], tuple[Entry, list[int]]]:
    """((entry of the gradient of the input, and of what the other needs of it; its inputs among those of both), (entry
    of the gradients of the weights; of its inputs the first, behind which come these values))."""
    graph = entry.graph_module.graph
    inputs: list[Any] = graph.find_nodes(op="placeholder")
    dx, *rest = items_of(graph.output_node().args[0])
    of_gradient = set(inputs[len(inputs) - entry.gradients :])
    for n in graph.nodes:
        if any(m in of_gradient for m in n.all_input_nodes):
            of_gradient.add(n)
    nodes, _ = reach([dx], lambda n: n in inputs)
    shared = {n for n in nodes if n in of_gradient}
    _, met = reach(rest, lambda n: n in inputs or n in shared)
    between = [n for n in bases_of(n for n in graph.nodes if n in met and n in shared) if n not in inputs]
    _, first = reach([dx, *between], lambda n: n in inputs)
    _, second = reach(rest, lambda n: n in inputs or n in between)
    takes = [[n for n in inputs if n in used] for used in (first, second)]

    def made(label: str, given: list, gives: list) -> Entry:
        module = graph_module_of(entry.graph_module, extract_subgraph(graph, given, gives, label))
        name = f"{entry.name.rpartition('_')[0]}_{label}"
        return Entry.make(name, module, [n.meta["val"] for n in given], entry.fake_mode)

    of_input, of_weights = made("dx", takes[0], [dx, *between]), made("dw", [*takes[1], *between], rest)
    places = [[inputs.index(n) for n in given] for given in takes]
    return (of_input, places[0]), (of_weights, places[1])


def _call(graph: fx.Graph, like: fx.Node, entry: Entry, given: list) -> list[fx.Node]:
    """A node that runs an entry -> its results."""
    outs = items_of(entry.graph_module.graph.output_node().args[0])
    node = graph.call_function(entry.op, (given,))
    node.meta = {**like.meta, "val": [n.meta["val"] for n in outs], RUNS: entry}
    items = []
    for i, out in enumerate(outs):
        items.append(graph.call_function(operator.getitem, (node, i)))
        items[-1].meta = {**like.meta, "val": out.meta["val"]}
        items[-1].meta.pop(RUNS)
    return items
