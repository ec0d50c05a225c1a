"""Donated leaves that a gather brings are gathered in place: no buffer for the whole, and no copy out of it.

ZeRO-1 and ZeRO-2 end a step with a gather of every updated parameter into memory that it has already.
"""

from __future__ import annotations

import operator

import torch
import torch.distributed as dist
from torch import fx

from fmegatron.step.overlap.roles import is_view, is_wait

__all__ = ["forget", "gather_in_place"]


def gather_in_place(graph: fx.Graph, leaf: fx.Node, value: fx.Node) -> bool:
    """Write `value` into the placeholder `leaf` by the gather that makes it, if it is one: views of what arrived, for
    nothing else. Inserted where the graph inserts; `forget` removes the gather that stood before.
    """
    start = _gather_behind(value)
    if start is None or not leaf.meta["val"].is_contiguous():
        return False
    x, _, group = start.args
    graph.call_function(torch.ops.fmegatron_step.gather_into.default, (leaf, x, group))
    return True


def forget(graph: fx.Graph, values: list[fx.Node]) -> None:
    """Remove values that nothing uses any more, with the gathers that made them: a wait alone is never dead code."""
    for value in values:
        start, node = _gather_behind(value), value
        while not node.users:
            before = node.args[0]
            graph.erase_node(node)
            if node is start:
                break
            node = before


def _gather_behind(value: fx.Node) -> fx.Node | None:
    """The all-gather whose result, as it lies in memory, is this value."""
    node, made = value, value.meta.get("val")
    if made is None:
        return None
    while not is_wait(node):
        taken = node.target is operator.getitem  # one of a split: the only one, if it has all elements
        if not (is_view(node) or (taken and is_view(node.args[0]))) or not _lies_alike(node, made):
            return None
        node = node.args[0].args[0] if taken else node.args[0]
        if len(node.users) != 1:
            return None
    start = node.args[0]
    fits = _lies_alike(node, made) and node.meta["val"].dtype == made.dtype
    return start if fits and getattr(start.target, "_opname", "") == "all_gather_into_tensor" else None


def _lies_alike(node: fx.Node, like: torch.Tensor) -> bool:
    return node.meta["val"].is_contiguous() and node.meta["val"].numel() == like.numel()


# ---- the op ----------------------------------------------------------------------------------------------------------
def _gather_into(whole: torch.Tensor, mine: torch.Tensor, group_name: str) -> None:
    group = torch._C._distributed_c10d._resolve_process_group(group_name)
    flat, mine = whole.view(-1), mine.reshape(-1)
    if whole.device.type != "cpu":
        dist.all_gather_into_tensor(flat, mine, group=group)
        return
    # gloo copies what it gathers twice; from peer to peer it lands where it belongs.
    parts, rank = flat.chunk(group.size()), group.rank()
    others = [r for r in range(group.size()) if r != rank]
    works = [dist.irecv(parts[r], dist.get_global_rank(group, r), group) for r in others]
    works += [dist.isend(mine, dist.get_global_rank(group, r), group) for r in others]
    parts[rank].copy_(mine)
    for work in works:
        work.wait()


def _define_ops() -> torch.library.Library:
    library = torch.library.Library("fmegatron_step", "FRAGMENT")
    library.define("gather_into(Tensor(a!) whole, Tensor mine, str group) -> ()")
    library.impl("gather_into", _gather_into, "CompositeExplicitAutograd")
    library.impl("gather_into", lambda whole, mine, group: None, "Meta")
    return library


_LIBRARY = _define_ops()
