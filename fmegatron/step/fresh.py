"""Outputs with memory of their own: which of them a compiler could turn into another name of an input.

Inductor (2.13) drops a copy that changes nothing: clone, a cast there and back, x * ones, a slice that takes all, a cat
of one. Dropped before a write into the old memory, `{"a": b.clone(), "b": a.clone()}` leaves both equal; dropped at
the end of an opaque layer, the layer's output and its input are one buffer, which the graph around it uses twice.
"""

from __future__ import annotations

import operator

import torch

from fmegatron.step.trace import written_by

__all__ = ["barrier", "copied_inputs", "with_fresh_outputs"]

_SAME_PLACE = frozenset(
    "alias detach clone lift_fresh _to_copy convert_element_type device_put pow ceil floor round trunc".split()
)
_MOVES = frozenset("cat stack copy slice_scatter select_scatter repeat constant_pad_nd _unsafe_view".split())
_NEUTRAL = frozenset(("add", "sub", "mul", "div"))  # with 0 or 1, or with a constant tensor


def copied_inputs(node: torch.fx.Node) -> dict[torch.fx.Node, bool]:
    """The placeholders whose values an output may be, element for element: placeholder -> whether elements moved.

    Errs towards more: an output in vain costs one copy of it. Only inputs of the output's dtype count.
    """
    value, written = node.meta["val"], _writes(node.graph)
    found: dict[torch.fx.Node, bool] = {}
    todo, seen = [(node, False)], set()
    while todo:
        at, moved = todo.pop()
        if (at, moved) in seen:
            continue
        seen.add((at, moved))
        if at.op == "placeholder":
            if at.meta["val"].dtype == value.dtype and at.meta["val"].numel() >= value.numel():
                found[at] = found.get(at, False) or moved
            continue
        sources, moves = _sources(at)
        todo += [(source, moved or moves) for source in sources]
        todo += [(source, True) for write in written.get(_storage(at), ()) for source in _sources(write)[0]]
    return found


def _sources(node) -> tuple[list, bool]:
    """(the arguments that a node may be a copy of, whether it may place their elements elsewhere)."""
    if node.target is operator.getitem:
        return [node.args[0]], True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [], False
    name = schema.name.partition("::")[2]
    if schema.is_mutable:
        name = name.removesuffix("_")
    elif any(r.alias_info is not None for r in schema.returns) and name not in _SAME_PLACE:
        return list(node.args[:1]), True
    if name == "copy":
        return [node.args[1]], False
    if name in _SAME_PLACE or name in _MOVES:
        return node.all_input_nodes, name in _MOVES
    if name in _NEUTRAL:
        numbers = [x for x in node.args[:2] if not isinstance(x, torch.fx.Node)]
        derived = [x for x in node.all_input_nodes if _from_input(x)]
        return (derived, False) if len(derived) == 1 and all(n in (0, 1) for n in numbers) else ([], False)
    return [], False


def _from_input(node) -> bool:
    """Whether a value depends on an input, other than on its shape."""
    todo, seen = [node], set()
    while todo:
        at = todo.pop()
        if at.op == "placeholder":
            return True
        name = getattr(at.target, "__name__", "").split(".")[0]
        if at not in seen and not name.endswith("_like") and not name.startswith("new_"):
            todo += at.all_input_nodes
        seen.add(at)
    return False


def _storage(node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _writes(graph) -> dict[int, list]:
    """Storage -> the nodes that write into it."""
    found: dict[int, list] = {}
    for node in graph.nodes:
        for source in written_by(node):
            found.setdefault(_storage(source), []).append(node)
    return found


def with_fresh_outputs(graph_module: torch.fx.GraphModule) -> None:
    """Change a graph of a layer so that no output shares memory with an input or with an output before it."""
    graph = graph_module.graph
    output = graph.output_node()
    fresh: list[torch.fx.Node] = []
    storages: set[int | None] = set()
    for node in output.args[0]:
        value = node
        if _storage(node) in storages or copied_inputs(node):
            with graph.inserting_before(output):
                value = graph.call_function(torch.ops.fmegatron_step.barrier.default, (node, node))
            value.meta.update(node.meta)
        storages.add(_storage(node))
        fresh.append(value)
    if fresh != list(output.args[0]):
        output.args = (fresh,)
        graph_module.recompile()


# ---- a copy that no compiler pass removes ----------------------------------------------------------------------------
def _define_barrier():
    library = torch.library.Library("fmegatron_step", "DEF")
    library.define("barrier(Tensor x, Tensor after) -> Tensor")
    library.impl("barrier", lambda x, after: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("fmegatron_step::barrier", lambda x, after: torch.empty_like(x), lib=library)
    return library


_LIBRARY = _define_barrier()


def barrier(x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """A copy of x that is made after `after` exists; opaque, as Inductor drops `clone` and reorders writes."""
    return torch.ops.fmegatron_step.barrier(x, after)
