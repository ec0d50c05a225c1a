"""Write-back: copies the new values of donated leaves into the old memory at the end of a graph."""

from __future__ import annotations

import torch

from fmegatron.step.arrive import forget, gather_in_place
from fmegatron.step.fresh import in_own_memory
from fmegatron.step.graph.nodes import meta_of, meta_text, written_by
from fmegatron.step.lower import copy_module
from fmegatron.step.trace import Traced

__all__ = ["donated_leaves", "write_back", "writes_last"]


def donated_leaves(traced: Traced, args, donate) -> dict[int, int]:
    """Output index -> input index, for every tensor leaf of the donated arguments; checked before compiling."""
    donated: dict[int, int] = {}
    for position in donate:
        if not 0 <= position < len(args):
            raise ValueError(f"donate={position}, but the function takes {len(args)} arguments")
        inputs = {p: i for i, p in enumerate(traced.in_paths) if _under(p, str(position))}
        outputs = {p: i for i, p in enumerate(traced.out_paths)}
        if traced.out_tree.type is tuple:
            outputs = {p: i for p, i in outputs.items() if _under(p, str(position))}
        elif len(donate) > 1:
            raise ValueError(f"donate={donate}, but the function returns one result, no tuple with one for each")
        else:  # the result as a whole stands for the donated argument
            outputs = {f"{position}/{p}" if p else str(position): i for p, i in outputs.items()}
        missing, extra = sorted(set(inputs) - set(outputs)), sorted(set(outputs) - set(inputs))
        if missing or extra:
            raise ValueError(
                f"argument {position} is donated, so result {position} must have the same leaves; "
                f"missing from the result: {missing[:5] or 'none'}; only in the result: {extra[:5] or 'none'}"
            )
        for path, i in inputs.items():
            old, new = meta_of(traced.fakes[i]), meta_of(traced.outputs[outputs[path]].meta["val"])
            if old[0] != new[0] or old[2:] != new[2:]:
                raise ValueError(
                    f"donated leaf {path!r} changes: was {meta_text(old)}, would become {meta_text(new)}; "
                    "cast or reshape the new value, or do not donate"
                )
            donated[outputs[path]] = i
    return donated


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def write_back(graph_module, donated: dict[int, int], in_order: bool) -> torch.fx.GraphModule:
    """Write new values into the old leaves at the end of the graph; the copy folds into the kernel that makes it, or
    into the gather that brings it.

    Before the first write every output and every new value is brought out of the inputs' memory (`in_own_memory`), else
    a step that swaps two leaves would leave both equal. in_order: whether the graph runs op by op.
    """
    copy = copy_module(graph_module)
    graph = copy.graph
    output = graph.output_node()
    outs = list(output.args[0])
    inputs = graph.find_nodes(op="placeholder")
    old = {i: inputs[position] for i, position in donated.items() if _behind_aliases(outs[i]) is not inputs[position]}
    with graph.inserting_before(output):
        gather = gather_in_place(graph, {i: (leaf, outs[i]) for i, leaf in old.items()})
    written = {i: leaf for i, leaf in old.items() if gather is None or leaf not in gather.args[0]}
    kept = [i for i in range(len(outs)) if i not in donated]
    with graph.inserting_before(gather or output):
        kept, new = in_own_memory(graph, [outs[i] for i in kept], [outs[i] for i in written], in_order)
    with graph.inserting_before(output):
        for leaf, value in zip(written.values(), new, strict=True):
            graph.call_function(torch.ops.aten.copy_.default, (leaf, value))
    output.args = (kept,)
    forget(graph, [outs[i] for i in old if i not in written])
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
    output.args = ([*output.args[0], *(node.args[1] for node in ours)],)
    for node in ours:
        graph.erase_node(node)
    graph.lint()
    copy.recompile()
    return copy, positions, not any(source in inputs for node in graph.nodes for source in written_by(node))


def _behind_aliases(node: torch.fx.Node) -> torch.fx.Node:
    """The node of which this one is only another name (detach of a detach ...)."""
    while node.op == "call_function" and node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        node = node.args[0]
    return node
