"""Partitioning of a layer's joint graph into forward and backward, by a policy of what is saved between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from fmegatron import tree
from fmegatron.collectives import torch_private
from fmegatron.step.graph.nodes import declared_in, items_of
from fmegatron.step.lower import copy_module
from fmegatron.step.opaque import Replay
from fmegatron.step.purity import require_pure
from fmegatron.step.torch_private import (
    UNSAFE_VIEW,
    FakeTensorMode,
    Op,
    extract_subgraph,
    fx_traceback,
    graph_module_of,
    inductor_decompositions,
    make_fx,
    mark_backward,
    min_cut,
    opname,
    outside_of_tracing,
)
from fmegatron.step.tracing import make_fakes, record, recorded
from fmegatron.tree import structure

__all__ = [
    "Joint",
    "Partition",
    "Policy",
    "base_of",
    "functional",
    "has_gradient",
    "joint_graph",
    "partition",
    "require_policy",
]

_VIEWS = ("view", "_unsafe_view")
_MADE = "fmegatron_made_again"
Policy = str | float | Callable


@dataclass
class Joint:
    """A layer's joint graph: placeholders are its inputs, then gradients of its outputs; output is [*ys, *gradients].

    spec: how the outputs are nested. differentiable: positions of the inputs that have a gradient, in the order of the
    gradients; none if no output has one. taken: positions of the outputs whose gradients the placeholders are.
    """

    graph_module: torch.fx.GraphModule
    inputs: list
    tangents: list
    spec: Any
    differentiable: list[int]
    taken: list[int]
    fake_mode: Any


@dataclass
class Partition:
    """forward: (*inputs) -> [*ys, *residuals]; backward: (*residuals, *kept inputs, *gradients of ys) -> gradients.

    kept_inputs: positions of the layer's inputs that the backward takes again. differentiable, taken: as in `Joint`.
    residual_bytes: what is saved per call besides inputs.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    forward_fakes: list
    backward_fakes: list
    kept_inputs: list[int]
    differentiable: list[int]
    taken: list[int]
    residual_bytes: int


class Call:
    """A call of a layer that is recorded.

    given: its arguments, as they were given to `joint_graph`. result: what the layer returns; who makes the call sets
    it. joint: its graph, behind the context.
    """

    given: tuple[Any, Any, tuple, dict]
    result: Any
    joint: Joint


@contextlib.contextmanager
def joint_graph(inputs: tuple[Any, Any, tuple, dict], name: str, trained: Sequence[bool], reads=None) -> Iterator[Call]:
    """Record a call `fn(x, weights, *rest, **named) -> tree of ys` together with the gradients of x and of the weights
    that are trained, one bool for each leaf of them. Whoever opens the context makes the call:

        with joint_graph((x, weights, rest, named), "layer", trained) as call:
            x, weights, rest, named = call.given
            call.result = fn(x, weights, *rest, **named)
        call.joint

    The graph is made functional behind it: autograd's formulas contain in-place ops, and the partitioner needs a
    functional graph; functionalizing refuses `requires_grad_`, so the gradients are recorded before.
    """
    tensors, spec = tree.leaves(inputs), structure.flatten(inputs)[2]
    differentiable = [has_gradient(inputs[0]), *trained]
    differentiable += [False] * (len(tensors) - len(differentiable))
    mode, call = FakeTensorMode(), Call()
    fakes = make_fakes(tensors, mode)
    with record(mode, name, reads=reads) as recorder:
        primals = [t.detach().requires_grad_(d) for t, d in zip(recorder.inputs(fakes), differentiable, strict=True)]
        call.given = cast("tuple[Any, Any, tuple, dict]", structure.unflatten(spec, primals))
        yield call
        paths, ys, nesting = structure.flatten(call.result)
        for path, y in zip(paths, ys, strict=True) if ys else [("", call.result)]:
            if not isinstance(y, torch.Tensor):
                raise ValueError(
                    f"{name}: its result{f' {path!r}' if path else ''}: got {structure.in_words(y)}, wanted a tensor; "
                    "return tensors, in any nesting"
                )
        # Whole numbers, detached values and constants have no gradient, whatever they are made of
        taken = [i for i, y in enumerate(ys) if y.requires_grad]
        wanted = [i for i, d in enumerate(differentiable) if d and taken]
        with outside_of_tracing(), mode:
            tangents = [torch.empty(ys[i].shape, dtype=ys[i].dtype, device=ys[i].device) for i in taken]
        recorder.inputs(tangents)
        grads = []
        if wanted:
            mark_backward([ys[i].grad_fn for i in taken])
            grads = torch.autograd.grad(
                [ys[i] for i in taken], [primals[i] for i in wanted], tangents, allow_unused=True
            )
            grads = [
                torch.zeros_like(primals[i]) if g is None else g.contiguous()
                for i, g in zip(wanted, grads, strict=True)
            ]
        recorder.outputs([*[y.detach() for y in ys], *grads])
    raw = recorded(recorder, name)
    x, weights, rest, named = inputs
    require_pure(raw, [*tree.paths((x, weights, *rest)), *tree.paths(named), *["gradient"] * len(taken)])
    graph_module = functional(raw, (fakes, tangents), mode, inductor_decompositions())
    call.joint = Joint(graph_module, fakes, tangents, nesting, wanted, taken, mode)


def has_gradient(t: torch.Tensor) -> bool:
    """Whether its dtype is one of tensors that have gradients."""
    return t.is_floating_point() or t.is_complex()


def functional(graph_module, fakes: Sequence, mode, decompositions: Any = None) -> torch.fx.GraphModule:
    """The same graph without in-place ops, under decompositions; every node keeps its line. fakes: (the first of
    what it takes, the others). Without either it is a copy: nothing is traced again."""
    if decompositions is None and not any(map(_is_mutable, graph_module.graph.nodes)):
        found = copy_module(graph_module)
        found.graph.eliminate_dead_code()
        return found
    for node in graph_module.graph.nodes:
        node.meta["stack_trace"] = node.meta.get("at", "?")
        if shape := _shape_by_ranks(node):
            node.meta["custom"] = {**node.meta.get("custom", {}), _MADE: shape}

    def replay(primals, tangents):  # the partitioner separates inputs by these two names
        return Replay(graph_module).run(*primals, *tangents)

    with torch.no_grad(), mode, fx_traceback.preserve_node_meta():
        found = make_fx(torch.func.functionalize(replay, remove="mutations"), decomposition_table=decompositions)(
            *fakes
        )
    found.graph.eliminate_dead_code()
    for node in found.graph.nodes:
        node.meta["at"] = node.meta.get("stack_trace") or "?"
        if shape := node.meta.get("custom", {}).get(_MADE):
            node.meta["made"] = shape
        assert not _is_mutable(node), f"{node.target} survived functionalization"
    return found


def _shape_by_ranks(node: Any) -> tuple:
    """Of the numbers that a view is given, those that are made of numbers of ranks alone, and of what (`tracing`)."""
    if not isinstance(node.target, Op) or opname(node.target) not in _VIEWS:
        return ()
    return tuple((n, made) for n, made in node.meta.get("made", ()) if made and made[1] and not made[0] and not made[2])


def _is_mutable(node: Any) -> bool:
    return isinstance(node.target, Op) and torch_private.schema_of(node.target).is_mutable


def require_policy(save: Any) -> None:
    """ValueError for what is no policy of `compiled_layer`."""
    if isinstance(save, bool) or not (
        callable(save)
        or (isinstance(save, int | float) and 0 <= save <= 1)
        or (isinstance(save, str) and save in ("mincut", "inputs", "all"))
    ):
        raise ValueError(
            f"compiled_layer: got save={save!r}, wanted 'mincut', 'inputs', 'all', a number from 0 to 1, or a function "
            "of a graph node"
        )


def partition(joint: Joint, policy: Policy) -> Partition:
    """Choose what is saved and cut; see `compiled_layer` for the policies."""
    graph_module = joint.graph_module
    names_saved = _min_cut_names(joint, policy)  # may replace the graph, so nodes are read afterwards
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    primals, tangents = placeholders[: len(joint.inputs)], placeholders[len(joint.inputs) :]
    outputs = items_of(graph.output_node().args[0])
    ys, grads = outputs[: joint.spec.num_leaves], outputs[joint.spec.num_leaves :]
    if policy == "inputs":
        wanted = list(primals)
    elif names_saved is not None:
        wanted = [n for n in graph.nodes if n.name in names_saved and n not in tangents]
    else:
        wanted = _read_by_backward(graph, ys)
        if callable(policy):
            wanted = [n for n in wanted if base_of(n).op == "placeholder" or policy(base_of(n))] + list(primals)
    wanted = [n for n in bases_of(wanted) if n not in tangents]
    probe = extract_subgraph(graph, wanted + tangents, grads, "backward")
    used = {p.name for p in probe.find_nodes(op="placeholder") if p.users}
    kept = [n for n in wanted if n.op == "placeholder" and n.name in used]
    residuals = [n for n in wanted if n.op != "placeholder" and n.name in used]

    def part(inputs, outputs, which):
        return graph_module_of(graph_module, _without_unread(extract_subgraph(graph, inputs, outputs, which)))

    def values(nodes):
        return [n.meta["val"] for n in nodes]

    return Partition(
        forward=part(list(primals), [*ys, *residuals], "forward"),
        backward=part(residuals + kept + tangents, grads, "backward"),
        forward_fakes=values(primals),
        backward_fakes=values(residuals + kept + tangents),
        kept_inputs=[primals.index(n) for n in kept],
        differentiable=joint.differentiable,
        taken=joint.taken,
        residual_bytes=sum(v.numel() * v.element_size() for v in values(residuals)),
    )


def _without_unread(graph: torch.fx.Graph) -> torch.fx.Graph:
    """torch keeps what nobody reads where its kernel might draw random numbers: the attention whose results are saved
    would be computed once more in the backward, by a backend that runs the graph op by op."""
    for node in reversed(graph.nodes):
        seeded = isinstance(node.target, Op) and torch.Tag.nondeterministic_seeded in node.target.tags
        if seeded and not node.users and not torch_private.schema_of(node.target).is_mutable:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return graph


def _min_cut_names(joint: Joint, policy: Policy) -> set[str] | None:
    if not (policy == "mincut" or isinstance(policy, int | float)):
        return None
    budget = float(policy) if isinstance(policy, int | float) else 1.0
    # Below 1 torch measures what each op costs, by running it: no ops of a step that is being traced.
    with outside_of_tracing(), torch.no_grad(), joint.fake_mode:
        given = [joint.inputs, joint.tangents]
        _, backward = min_cut(joint.graph_module, given, joint.spec.num_leaves, budget)
    return {n.name for n in backward.graph.find_nodes(op="placeholder")}


def _read_by_backward(graph, ys) -> list:
    """Every value of the forward that a node of the backward reads."""
    forward, todo = set(), list(ys)
    while todo:
        node = todo.pop()
        if node not in forward:
            forward.add(node)
            todo += node.all_input_nodes
    return [n for n in graph.nodes if n in forward and any(u not in forward and u.op != "output" for u in n.users)]


def _is_view(node) -> bool:
    """Whether a node shares memory with its argument once Inductor has compiled it."""
    if getattr(node.target, "__name__", "") == "getitem":
        return _is_view(node.args[0])
    if not isinstance(node.target, Op):
        return False
    if node.target is torch.ops.aten.clone.default:  # Inductor drops such a clone
        return node.meta["val"].stride() == node.args[0].meta["val"].stride()
    if node.target is UNSAFE_VIEW:
        return True
    return any(r.alias_info is not None for r in torch_private.schema_of(node.target).returns)


def base_of(node: Any) -> Any:
    """What a view looks at. Views are never saved: outputs of an opaque node alias neither inputs nor each other."""
    while node.op == "call_function":
        stated = declared_in(node)
        if stated is None and not _is_view(node):
            break
        node = node.args[0] if stated is None else stated
    return node


def bases_of(nodes) -> list:
    """Bases without repeats; a node with several outputs (attention) is saved output by output."""
    bases = list(dict.fromkeys(map(base_of, nodes)))
    split = [m for n in bases for m in (n.users if isinstance(n.meta["val"], (tuple, list)) else [n])]
    return list(dict.fromkeys(split))
