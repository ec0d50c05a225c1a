"""Output buffers: dense memory for each output, shared with no input and no other output.

Where a graph runs op by op, its operators determine where values are. Inductor drops copies that
change nothing (clone, a cast there and back, x * ones, a cat of one) and computes in the memory of inputs that are
written later (index_put), so there it is asked when it has decided: the operator `own` takes all outputs at the end of
a graph, and is lowered to copies of those whose memory is not theirs alone (`torch_private.lower_own`). It takes the
inputs that are written as well (`_read_to_the_end`).
"""

from __future__ import annotations

import operator

import torch

from fmegatron.step.graph.memory import memory_of
from fmegatron.step.graph.nodes import items_of, written_by
from fmegatron.step.graph.order import ancestors
from fmegatron.step.torch_private import OWN_LOWERING, outside_of_tracing

__all__ = ["barrier", "in_own_memory", "with_own_outputs"]


def in_own_memory(graph: torch.fx.Graph, outs: list, written: list, into: list, in_order: bool) -> tuple[list, list]:
    """The same values as (outputs, values that are written into inputs at the end), where the graph inserts.

    outs get memory of their own; written may share it, because it is copied from, but not with an input. into: the
    inputs that `written` are written into. in_order: whether the graph runs op by op.
    """
    if in_order:
        return _copied_where_shared(graph, outs, written)
    values = [*outs, *written]
    if not values:
        return [], []
    old = _read_to_the_end(graph, dict(zip(into, written, strict=True)))
    node = graph.call_function(torch.ops.fmegatron_step.own.default, (values, old, OWN_LOWERING))
    node.meta["val"] = [_copy_of(value) for value in values]
    own = [graph.call_function(operator.getitem, (node, i)) for i in range(len(values))]
    for value, like in zip(own, node.meta["val"], strict=True):
        value.meta["val"] = like
    return own[: len(outs)], own[len(outs) :]


def _read_to_the_end(graph: torch.fx.Graph, new: dict[torch.fx.Node, torch.fx.Node]) -> list[torch.fx.Node]:
    """The inputs whose old value must be there until all is computed. new: input -> the value that it is given.

    Inductor writes at indices (index_put, a slice) in the memory of an input that nothing reads any more and that is
    overwritten later. Its scheduler then no longer sees that what reads this memory at other indices (flip) has to be
    over before the new value is written, and may do both in one loop. So an input is written once at most: in place
    only by the very node that makes its new value of it, and only if all others that read it come before that one.
    """
    before = {node: node.all_input_nodes for node in graph.nodes}
    memory = memory_of(graph.nodes)
    changed = {memory[source] for node in graph.nodes for source in written_by(node)}

    def written_once(leaf: torch.fx.Node, value: torch.fx.Node) -> bool:
        if value not in leaf.users or memory[value] in changed:
            return False
        others = set(leaf.users) - {value}
        return not others or others <= ancestors([value], before)

    return [leaf for leaf, value in new.items() if not written_once(leaf, value)]


def _copied_where_shared(graph: torch.fx.Graph, outs: list, written: list) -> tuple[list, list]:
    memory, taken, found = memory_of([*outs, *written]), set(), []
    for value in outs:
        shared = memory[value] in taken or _is_input(memory[value])
        taken.add(memory[value])
        found.append(_barrier_node(graph, value) if shared or not _is_dense(value) else value)
    return found, [_barrier_node(graph, value) if _is_input(memory[value]) else value for value in written]


def _is_input(memory) -> bool:
    return isinstance(memory, torch.fx.Node) and memory.op in ("placeholder", "get_attr")


def _is_dense(value: torch.fx.Node) -> bool:
    """Whether a copy of it has the same strides: not so what is expanded, or has gaps."""
    return _copy_of(value).stride() == value.meta["val"].stride()


def _copy_of(value: torch.fx.Node) -> torch.Tensor:
    with outside_of_tracing():
        return torch.empty_like(value.meta["val"])


def _barrier_node(graph: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Node:
    node = graph.call_function(torch.ops.fmegatron_step.barrier.default, (value, value))
    node.meta.update(value.meta | {"val": _copy_of(value)})
    return node


def with_own_outputs(graph_module: torch.fx.GraphModule) -> None:
    """Change a graph that runs op by op so that every output has memory of its own."""
    graph = graph_module.graph
    output = graph.output_node()
    outs = list(items_of(output.args[0]))
    with graph.inserting_before(output):
        own, _ = in_own_memory(graph, outs, [], [], in_order=True)
    if own != outs:
        output.args = (own,)
        graph_module.recompile()


# ---- copies that no compiler pass removes ----------------------------------------------------------------------------
def _define_ops():
    library = torch.library.Library("fmegatron_step", "DEF")
    library.define("barrier(Tensor x, Tensor after) -> Tensor")
    library.impl("barrier", lambda x, after: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("fmegatron_step::barrier", lambda x, after: torch.empty_like(x), lib=library)
    library.define("own(Tensor[] xs, Tensor[] old, int version) -> Tensor[]")
    library.impl("own", lambda xs, old, version: [x.clone() for x in xs], "CompositeExplicitAutograd")
    torch.library.register_fake(
        "fmegatron_step::own", lambda xs, old, version: [torch.empty_like(x) for x in xs], lib=library
    )
    return library


_LIBRARY = _define_ops()


def barrier(x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """A copy of x that is made after `after` exists; opaque, as Inductor drops `clone` and reorders writes."""
    return torch.ops.fmegatron_step.barrier(x, after)
