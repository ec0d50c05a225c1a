"""Lowering: symbolic collectives become functional collectives on process groups."""

from __future__ import annotations

import functools

import torch

from fmegatron.collectives import World, kinds, product_forms, real, table
from fmegatron.step.graph.nodes import int_of, items_of, meta_of, symbolic_nodes
from fmegatron.step.torch_private import graph_module_of, make_fx, outside_of_tracing

__all__ = ["RankInputs", "copy_module", "lower"]


class RankInputs:
    """The inputs that a lowered graph takes after its own: this rank's position along the axes that it asks for."""

    def __init__(self, axes: list[tuple[str, ...]], world: World | None):
        self.axes, self._world = axes, world

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        """They are made when a graph is compiled: lowering makes nothing on the device."""
        if not self.axes:
            return []
        assert self._world is not None, "`lower` has refused a graph that communicates"
        return [self._world.index_tensor(names) for names in self.axes]


def copy_module(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph in a module of its own, so that a pass can change it."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return graph_module_of(graph_module, graph)


def lower(
    graph_module: torch.fx.GraphModule, fakes: list, world: World | None, fake_mode, by_products: bool = False
) -> tuple:
    """(new graph module, fakes, RankInputs) with every symbolic collective replaced by real ones of `world`.

    by_products: those in a form in which torch finds the products beside them (`in_product_form`).

    `axis_index` becomes a placeholder after the others, so the graph is the same on all ranks.
    Raises ValueError when the graph communicates and there is no world, or a world of another mesh.
    """
    found = symbolic_nodes(graph_module.graph)
    if found and world is None:
        first = found[0]
        raise ValueError(
            f"{_collective(first).name} over {'+'.join(_axes(first))} at {first.meta.get('at', '?')}: got no "
            "world, wanted one, since the step communicates; give jit(..., world=connect(mesh)), or look at the step "
            "with fmegatron.testing.simulation"
        )
    if world is not None and found:
        kinds.require_mesh_of_graph(graph_module.graph, world.mesh, "jit", "the world")
    module = copy_module(graph_module)
    graph = module.graph
    snippets, index_inputs = {}, {}
    last_placeholder = next(reversed(graph.find_nodes(op="placeholder")), None)
    for node in symbolic_nodes(graph):
        axes = _axes(node)
        if kinds.collective_of(node.target) is table.AXIS_INDEX:
            if axes not in index_inputs:
                with graph.inserting_after(last_placeholder):
                    index_inputs[axes] = last_placeholder = graph.placeholder("index_" + "_".join(axes))
                last_placeholder.meta["val"] = node.meta["val"][0]
            results = [index_inputs[axes]] * len(items_of(node.args[0]))
        else:
            results = _inline(graph, node, axes, world, fake_mode, snippets, by_products)
        for item in list(node.users):  # operator.getitem, and nothing else takes a list apart
            item.replace_all_uses_with(results[int_of(item.args[1])])
            graph.erase_node(item)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    with outside_of_tracing(), fake_mode:
        device = None if world is None else world.device  # no index is asked for without a world
        extra = [torch.empty((), dtype=torch.int64, device=device) for _ in index_inputs]
    return module, [*fakes, *extra], RankInputs(list(index_inputs), world)


def _axes(node: torch.fx.Node) -> tuple[str, ...]:
    return tuple(items_of(node.args[1]))


def _collective(node: torch.fx.Node) -> kinds.Collective:
    """The collective of a symbolic node."""
    found = kinds.collective_of(node.target)
    assert found is not None, f"{node} is a symbolic collective"
    return found


def _inline(graph, node, axes, world, fake_mode, snippets, by_products) -> list[torch.fx.Node]:
    """Put the nodes that the real binding makes for one before it -> the results; made once per kind of call."""
    collective, rest = _collective(node), node.args[3:]
    counts = [x for x in rest if isinstance(x, torch.fx.Node)]
    given = [*node.args[0], *counts]
    fixed = [None if x in counts else x for x in rest]
    key = (collective, axes, len(counts), repr(fixed), tuple(meta_of(x.meta["val"]) for x in given))
    if key not in snippets:
        group, arguments = real.Group(world, axes), collective.read(fixed)
        form = product_forms.in_product_form(collective) if by_products else collective.real

        def on_group(*tensors: torch.Tensor) -> list[torch.Tensor]:
            own = iter(tensors[len(given) - len(counts) :])
            filled = [next(own) if x is None else x for x in arguments]
            return list(form(list(tensors[: len(given) - len(counts)]), group, *filled))

        group.name  # noqa: B018  a real group, so it is made before fake tensors rule
        with outside_of_tracing(), torch.no_grad(), fake_mode:
            fakes = [torch.empty_strided(*meta[:2], dtype=meta[2], device=meta[3]) for meta in key[-1]]
            snippets[key] = make_fx(on_group)(*fakes)
    snippet = snippets[key].graph
    mapped = dict(zip(snippet.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(node):
        for inner in snippet.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copy = graph.node_copy(inner, lambda n: mapped[n])
            copy.meta["at"] = node.meta.get("at", "?")
            copy.meta["symbolic"] = (
                collective.name if collective is table.REDUCE_SCATTER else None
            )  # what it is a part of
            copy.meta["collective"] = collective
            mapped[inner] = copy
    return [mapped[result] for result in snippet.output_node().args[0]]
