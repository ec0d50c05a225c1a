"""The pieces that ops take of a dim: whether they are all of it together."""

from __future__ import annotations

import itertools

import torch

from fmegatron.step.checker.context import Scope, op_name
from fmegatron.step.graph.nodes import int_of, node_of

__all__ = ["covering", "dim_of"]

Node = torch.fx.Node
_ALL = frozenset(("split", "split_with_sizes", "unsafe_split", "unbind"))
_SOME = frozenset(("slice", "select"))


def covering(scope: Scope, node: Node, dim: int) -> list[Node]:
    """The pieces, here and of others that are used, that are all of a dim and nothing twice; else []."""
    source, pieces = node_of(node.args[0]), []
    size, taken = source.meta["val"].shape[dim], []
    for user in source.users:
        name = op_name(user) if user.op == "call_function" else ""
        if name not in _ALL | _SOME or user not in scope.live or dim_of(user) % source.meta["val"].dim() != dim:
            continue
        pieces += [user] if name in _SOME else [item for item in user.users if item in scope.live]
        if name == "select":
            taken.append(int_of(user.args[2]) % size)
        elif name == "slice":
            taken += range(*slice(*(*user.args[2:], None, None, None)[:3]).indices(size))
        else:
            sizes = [1 if name == "unbind" else part.shape[dim] for part in user.meta["val"]]
            ends = list(itertools.accumulate(sizes, initial=0))
            used = {int_of(item.args[1]) for item in user.users if item in scope.live}
            taken += [at for i in used for at in range(ends[i], ends[i + 1])]
    return pieces if sorted(taken) == list(range(size)) else []


def dim_of(node: Node) -> int:
    at = 2 if op_name(node) in ("split", "split_with_sizes", "unsafe_split") else 1
    return int_of(node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0))
