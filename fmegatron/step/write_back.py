"""Write-back: new values of donated leaves are copied or gathered into the old memory at the end of a graph.

ZeRO-1 and ZeRO-2 end a step with a gather of every updated parameter into memory that it has already: such a gather
writes in place, without a buffer or a copy. The old value is overwritten while the step still runs, so all that reads
it must come before the gather by dependence: no order of the graph would do, because a compiler computes what it fuses
where the last of its readers stands.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import fx

from fmegatron.collectives import torch_private
from fmegatron.step.graph.memory import memory_of
from fmegatron.step.graph.nodes import (
    is_layer,
    is_start,
    is_view,
    is_wait,
    items_of,
    meta_of,
    meta_text,
    node_of,
    written_by,
)
from fmegatron.step.graph.order import ancestors
from fmegatron.step.lower import copy_module
from fmegatron.step.output_buffers import in_own_memory
from fmegatron.step.torch_private import Op, opname
from fmegatron.step.tracing import Traced

__all__ = ["behind_aliases", "donated_leaves", "read_before", "write_back", "writes_last"]

# Computed where they stand, like layers and collectives.
_FIXED = ("mm", "bmm", "addmm", "baddbmm", "from_host")


def donated_leaves(traced: Traced, args, donate) -> dict[int, int]:
    """Output index -> input index, for every tensor leaf of the donated arguments; checked before compiling."""
    donated: dict[int, int] = {}
    for position in donate:
        if not 0 <= position < len(args):
            raise ValueError(
                f"donate: got position {position}, wanted one of the function's {len(args)} arguments, counted from 0"
            )
        inputs = {p: i for i, p in enumerate(traced.in_paths) if _under(p, str(position))}
        outputs = {p: i for i, p in enumerate(traced.out_paths)}
        if traced.out_tree.type is tuple:
            outputs = {p: i for p, i in outputs.items() if _under(p, str(position))}
        elif len(donate) > 1:
            raise ValueError(f"donate: got {donate} and one result, wanted a tuple with a result for each; return one")
        else:  # the full result stands for the donated argument
            outputs = {f"{position}/{p}" if p else str(position): i for p, i in outputs.items()}
        missing, extra = sorted(set(inputs) - set(outputs)), sorted(set(outputs) - set(inputs))
        if missing or extra:
            raise ValueError(
                f"result {position}: got missing leaves {missing[:5] or 'none'}, additional leaves "
                f"{extra[:5] or 'none'}, wanted those of argument {position}, which is donated; return the same leaves"
            )
        for path, i in inputs.items():
            old, new = meta_of(traced.fakes[i]), meta_of(traced.outputs[outputs[path]].meta["val"])
            if old[0] != new[0] or old[2:] != new[2:]:
                raise ValueError(
                    f"donated leaf {path!r}: got a new value of {meta_text(new)}, wanted {meta_text(old)} as before; "
                    "cast or reshape the new value, or do not donate"
                )
            donated[outputs[path]] = i
    return donated


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def write_back(graph_module, donated: Mapping[int, int], in_order: bool) -> torch.fx.GraphModule:
    """Write new values into the old leaves at the end of the graph; the copy folds into the kernel that makes it, or
    into the gather that brings it.

    Before the first write every output and every new value is brought out of the inputs' memory (`in_own_memory`), else
    a step that swaps two leaves would leave both equal. in_order: whether the graph runs op by op.
    """
    copy = copy_module(graph_module)
    graph = copy.graph
    output = graph.output_node()
    outs = list(items_of(output.args[0]))
    inputs = graph.find_nodes(op="placeholder")
    old = {i: inputs[position] for i, position in donated.items() if behind_aliases(outs[i]) is not inputs[position]}
    with graph.inserting_before(output):
        gather = _gather_in_place(graph, {i: (leaf, outs[i]) for i, leaf in old.items()})
    written = {i: leaf for i, leaf in old.items() if gather is None or leaf not in items_of(gather.args[0])}
    kept = [i for i in range(len(outs)) if i not in donated]
    with graph.inserting_before(gather or output):
        new = [behind_aliases(outs[i]) for i in written]
        kept, new = in_own_memory(graph, [outs[i] for i in kept], new, [*written.values()], in_order)
    with graph.inserting_before(output):
        for leaf, value in zip(written.values(), new, strict=True):
            graph.call_function(torch.ops.aten.copy_.default, (leaf, value))
    output.args = (kept,)
    _forget(graph, [outs[i] for i in old if i not in written])
    graph.lint()
    copy.recompile()
    return copy


def writes_last(graph_module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[int], bool]:
    """(a graph that returns, behind its outputs, what `write_back` would write; the positions of the inputs to write it
    into; whether the graph then writes into no input at all, so that nothing is lost when it fails)."""
    copy = copy_module(graph_module)
    graph = copy.graph
    inputs, output = graph.find_nodes(op="placeholder"), graph.output_node()
    ours = [n for n in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default) if n.args[0] in inputs]
    positions = [inputs.index(node.args[0]) for node in ours]
    output.args = ([*items_of(output.args[0]), *(node.args[1] for node in ours)],)
    for node in ours:
        graph.erase_node(node)
    graph.lint()
    copy.recompile()
    return copy, positions, not any(source in inputs for node in graph.nodes for source in written_by(node))


def behind_aliases(node: torch.fx.Node) -> torch.fx.Node:
    """The node of which this one is only another name (detach of a detach ...)."""
    while node.op == "call_function" and node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        node = node_of(node.args[0])
    return node


def _gather_in_place(graph: fx.Graph, new: dict[int, tuple[fx.Node, fx.Node]]) -> fx.Node | None:
    """Write outputs of the graph into placeholders by the gathers that make them, where that may be: the node that does
    it, whose first argument is the list of these placeholders; None if it may be nowhere.

    new: key -> (placeholder, output). It may if the output is nothing but views of what arrived, made for this leaf
    alone; if what is sent has memory of its own; and if all that reads the leaf, or is fused with what does, is needed
    to compute what these gathers send. Inserted where the graph inserts; `_forget` removes the gathers before it.
    """
    outputs, inputs = list(items_of(graph.output_node().args[0])), {n: n.all_input_nodes for n in graph.nodes}
    found: dict[int, tuple[fx.Node, fx.Node, str]] = {}
    for key, (leaf, value) in new.items():
        start = _gather_behind(value)
        if start is None or not leaf.meta["val"].is_contiguous() or len(value.users) + outputs.count(value) != 2:
            continue
        sent_by = node_of(start.args[0])
        memory = memory_of([sent_by])[sent_by]
        if not isinstance(memory, fx.Node) or memory.op != "placeholder":
            found[key] = leaf, sent_by, str(start.args[2])
    while True:  # without one that may not, others may not either
        sent = {x for _, x, _ in found.values()}
        needed = sent | ancestors(sent, inputs)
        late = [key for key, (leaf, *_) in found.items() if not read_before(leaf, needed, sent)]
        if not late:
            break
        for key in late:
            del found[key]
    if not found:
        return None
    # One node: what is sent is computed for it, and a compiler computes some of it again for every other reader.
    leaves, mine, groups = (list(column) for column in zip(*found.values(), strict=True))
    return graph.call_function(torch.ops.fmegatron_step.gather_into.default, (leaves, mine, groups))


def read_before(
    leaf: fx.Node, needed: set[fx.Node], sent: set[fx.Node], apart: Collection[fx.Node] = frozenset()
) -> bool:
    """Whether all nodes that read a leaf, or are computed together with one that does, are needed for what is sent; but
    for those `apart`."""
    todo, seen = [leaf], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        users = [user for user in node.users if user not in apart]
        if any(user not in needed for user in users):
            return False
        todo += [user for user in users if user not in sent and not _is_fixed(user)]
    return True


def _is_fixed(node: fx.Node) -> bool:
    """Whether a node is computed where it stands: no compiler puts it off to fuse it with its readers."""
    return is_layer(node) or is_start(node) or opname(node.target) in _FIXED


def _forget(graph: fx.Graph, values: list[fx.Node]) -> None:
    """Remove values that nothing uses any more, with the gathers that made them: a wait alone is never dead code."""
    for value in values:
        start, node = _gather_behind(value), value
        while not node.users:
            before = node_of(node.args[0])
            graph.erase_node(node)
            if node is start:
                break
            node = before


def _gather_behind(value: fx.Node) -> fx.Node | None:
    """The all-gather whose result, as it is in memory, is this value."""
    node, made = value, value.meta.get("val")
    if made is None:
        return None
    while not is_wait(node):
        taken = node.target is operator.getitem  # one of a split: the only one, if it has all elements
        if not (_only_views(node) or (taken and _only_views(node_of(node.args[0])))) or not _lies_alike(node, made):
            return None
        before = node_of(node.args[0])
        node = node_of(before.args[0]) if taken else before
        if len(node.users) != 1:
            return None
    start = node_of(node.args[0])
    fits = _lies_alike(node, made) and node.meta["val"].dtype == made.dtype
    return start if fits and opname(start.target) == "all_gather_into_tensor" else None


def _only_views(node: fx.Node) -> bool:
    """Whether a node is a view and changes nothing; an op that writes in place returns its argument too."""
    return is_view(node) and isinstance(node.target, Op) and not torch_private.schema_of(node.target).is_mutable


def _lies_alike(node: fx.Node, like: torch.Tensor) -> bool:
    return node.meta["val"].is_contiguous() and node.meta["val"].numel() == like.numel()


# ---- the op ----------------------------------------------------------------------------------------------------------
def _gather_into(wholes: list[torch.Tensor], mine: list[torch.Tensor], groups: list[str]) -> None:
    for whole, x, name in zip(wholes, mine, groups, strict=True):
        _gather_one(whole.view(-1), x.reshape(-1), torch_private.group_named(name))


def _gather_one(whole: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    if whole.device.type != "cpu":
        dist.all_gather_into_tensor(whole, mine, group=group)
        return
    # gloo copies what it gathers twice; from peer to peer it lands where it belongs.
    parts, rank = whole.chunk(group.size()), group.rank()
    others = [r for r in range(group.size()) if r != rank]
    works = [dist.irecv(parts[r], dist.get_global_rank(group, r), group) for r in others]
    works += [dist.isend(mine, dist.get_global_rank(group, r), group) for r in others]
    parts[rank].copy_(mine)
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


def _define_ops() -> torch.library.Library:
    library = torch.library.Library("fmegatron_step", "FRAGMENT")
    library.define("gather_into(Tensor(a!)[] wholes, Tensor[] mine, str[] groups) -> ()")
    library.impl("gather_into", _gather_into, "CompositeExplicitAutograd")
    library.impl("gather_into", lambda wholes, mine, groups: None, "Meta")
    return library


_LIBRARY = _define_ops()
