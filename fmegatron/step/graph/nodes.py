"""Facts about graph nodes: collectives and waits, compiled layers, views, what a node writes, its source line."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fmegatron.collectives import kinds, table, torch_private
from fmegatron.step.torch_private import Op, opname, storage_number

__all__ = [
    *("OPAQUE", "RUNS", "entry_of", "int_of", "is_layer", "is_light", "is_start", "is_view", "is_wait", "items_of"),
    *("kind", "meta_of", "meta_text", "node_of", "opaque_entries", "start_of", "storage_of"),
    *("symbolic_nodes", "user_line", "waits_of", "written_by"),
]

RUNS = "runs"  # meta of an opaque node: what it runs
OPAQUE = ("fmegatron_layer", "fmegatron_compiled")  # namespaces of the operators of opaque nodes, traced and lowered
_WAIT = "wait_tensor"
_OURS = frozenset({"ppermute", "all_to_all_rows"})  # that start an exchange whose sizes are not in the graph
_MAY_BE_VIEWS = frozenset({"_unsafe_view", "reshape", "contiguous"})
_LIGHT = frozenset({"cat", "stack", "clone", "_to_copy", "_unsafe_view", "barrier", "full", "arange", "scalar_tensor"})
_LIGHT |= {"pack", "unpack", "amax"}  # several dtypes in one buffer; scales of what travels in 8 bits


def node_of(argument: object) -> fx.Node:
    """An argument of a node where its op takes a tensor: the node that computes it."""
    assert isinstance(argument, fx.Node), argument
    return argument


def items_of(argument: object) -> Sequence[Any]:
    """An argument of a node where its op takes a list: its items."""
    assert isinstance(argument, (list, tuple)), argument
    return argument


def int_of(argument: object) -> int:
    """An argument of a node where its op takes a constant integer, such as the position of a result."""
    assert isinstance(argument, int), argument
    return argument


def _c10d_name(node: fx.Node) -> str | None:
    namespace = getattr(node.target, "namespace", "")
    if namespace == "_c10d_functional" or (namespace == "fmegatron_real" and opname(node.target) in _OURS):
        return opname(node.target)
    return None


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return _c10d_name(node) == _WAIT


def is_start(node: fx.Node) -> bool:
    """Whether a node starts a collective."""
    return _c10d_name(node) not in (None, _WAIT)


def is_layer(node: fx.Node) -> bool:
    """Whether a node is a compiled layer (or another graph that is compiled on its own)."""
    return entry_of(node) is not None


def kind(node: fx.Node) -> str:
    """ "gather", "scatter" (reduce-scatter), "reduce" (all-reduce) or "exchange", of a node that starts one."""
    name = node.meta.get("symbolic") or _c10d_name(node)  # an exact reduce-scatter is an exchange with sums behind it
    assert name is not None, f"{node} starts a collective"
    for word, prefix in (("gather", "all_gather"), ("scatter", "reduce_scatter"), ("reduce", "all_reduce")):
        if name.startswith(prefix):
            return word
    return "exchange"


def start_of(wait: fx.Node) -> fx.Node:
    """The node that starts the collective that a wait is for."""
    source = node_of(wait.args[0])
    return source if is_start(source) else node_of(source.args[0])


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits for a collective; a coalesced one has one for each of its tensors."""
    found = []
    for user in start.users:
        found += [user] if is_wait(user) else [w for w in user.users if is_wait(w)]
    return found


def is_light(node: fx.Node) -> bool:
    """Whether a node only lays out, casts or makes values element by element: no work that could hide communication."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, Op) or torch_private.schema_of(node.target).is_mutable or is_start(node):
        return False
    if is_layer(node):
        return False
    name = opname(node.target)
    return torch.Tag.pointwise in node.target.tags or name in _LIGHT or is_wait(node) or is_view(node)


def is_view(node: fx.Node) -> bool:
    """Whether a node's value is in the memory of its first argument."""
    return isinstance(node.target, Op) and _returns_a_view(node.target)


@functools.cache
def _returns_a_view(op: Op) -> bool:
    return opname(op) in _MAY_BE_VIEWS or any(r.alias_info is not None for r in torch_private.schema_of(op).returns)


def entry_of(node: fx.Node) -> Any:
    """What the opaque node runs (`step.opaque`: an Entry, in a lowered graph a Bound), or None of another node."""
    found = node.meta.get(RUNS)
    opaque = isinstance(node.target, Op) and node.target.namespace in OPAQUE
    assert opaque == (found is not None), f"{node}: an opaque node, and no other, holds what it runs"
    return found


def opaque_entries(graph: fx.Graph) -> list:
    """The distinct entries that a graph calls, in order of first use."""
    return list(dict.fromkeys(e for e in map(entry_of, graph.nodes) if e is not None))


def meta_of(t: torch.Tensor) -> tuple:
    """What a graph is specialized to: shape, stride, dtype, device."""
    return t.shape, t.stride(), t.dtype, t.device


def meta_text(meta: tuple) -> str:
    """What `meta_of` gave as text, without the stride: "float32[2, 4] on cpu"."""
    shape, _, dtype, device = meta
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def storage_of(t: torch.Tensor) -> int:
    """A number that is equal for tensors that share their memory, fake ones too."""
    return storage_number(t.untyped_storage())


def symbolic_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The symbolic collectives of a graph, in order."""
    return [n for n in graph.nodes if kinds.collective_of(n.target)]


def declared_in(node: fx.Node) -> fx.Node | None:
    """The tensor about which a node states something (`collectives.declare`), in whose memory it is; else None."""
    source = node.args[0] if node.op == "call_function" and node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or kinds.collective_of(source.target) is not table.DECLARE:
        return None
    return items_of(source.args[0])[int_of(node.args[1])]


def user_line(at: str) -> str:
    """The user's part of a node's line "exp.py:21 (in fmegatron/nn/norm.py:19) (backward)"."""
    return at.partition(" (")[0]


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes into whose memory a node writes, given by position or by name, alone or in lists (`_foreach_add_`)."""
    schema = torch_private.schema_of(node.target)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    by_name = ((a, node.kwargs[a.name]) for a in schema.arguments if a.name in node.kwargs)
    found = []
    for argument, given in [*zip(schema.arguments, node.args, strict=False), *by_name]:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += given if isinstance(given, (list, tuple)) else [given]
    return [source for source in found if isinstance(source, fx.Node)]
