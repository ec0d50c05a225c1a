"""A step traced and lowered on fake tensors of a CUDA device, as `jit` does before it compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fmegatron import tree
from fmegatron.layout import Layout
from fmegatron.plan.paper import SizedWorld
from fmegatron.plan.torch_private import FakeTensorMode
from fmegatron.step import Overlap, jitted, passes
from fmegatron.step.graph import nodes
from fmegatron.step.overlap import schedule
from fmegatron.step.streamed import Streamed
from fmegatron.tree import labels, structure

__all__ = ["CUDA", "Graph", "graphs", "lowered"]

CUDA = torch.device("cuda", 0)


def lowered(
    step: Callable,
    arguments: tuple[structure.Tree, ...],
    world: SizedWorld,
    *,
    overlap: Overlap | bool = True,
    donate: tuple[int, ...] = (0,),
    patches: Mapping[str, Any] | None = None,
) -> jitted.Compiled:
    """`jit(step, donate=..., world=..., overlap=...)` on one rank of a mesh of CUDA devices, up to where it compiles.

    arguments: trees of Layouts or ArraySpecs. world: on `CUDA`. Raises ValueError for a step that `jit` refuses, and
    RuntimeError for one that makes a real tensor of the device meanwhile, as there is none.
    """
    with FakeTensorMode():
        given = tuple(tree.map(lambda leaf: _local(leaf, world.rank), specs) for specs in arguments)
    settings = tuple(sorted((patches or {}).items()))
    target = passes.Target(world, "inductor", settings, schedule.overlap_of(overlap))
    return jitted.Compiled(step, given, donate, target)


def _local(leaf: Any, rank: int) -> torch.Tensor:
    layout = leaf if isinstance(leaf, Layout) else leaf.layout
    where: dict[str, Any] = {"device": "cpu", "pin_memory": False} if layout.on_host else {"device": CUDA}
    return labels.labelled(torch.empty(layout.local_shape(rank), dtype=layout.dtype, **where), layout)


class Graph:
    """One of the graphs that a step compiles: itself, a half of a layer, or a piece of an update in host memory.

    label: "step", or of the layer. calls: how often the step calls it. settings: Inductor's, for it.
    """

    def __init__(self, label: str, module: fx.GraphModule, fakes: list, settings: Mapping[str, Any]):
        self.label, self.module, self.fakes, self.settings = label, module, fakes, dict(settings)
        self.calls = 1


def graphs(program: passes.Program) -> list[Graph]:
    """All graphs of a lowered step, inner ones first, each once."""
    found: dict[str, Graph] = {}

    def walk(program: passes.Program, label: str, calls: int) -> None:
        for node in program.graph_module.graph.nodes:
            bound = nodes.entry_of(node)
            if bound is None:
                continue
            if bound.name in found:
                found[bound.name].calls += calls
            elif isinstance(bound, Streamed):
                for i, code in enumerate({id(code): code for code in bound.codes.values()}.values()):
                    name = f"{bound.name}.{i}"
                    found[name] = Graph(
                        f"piece {i} of the {bound.label}", code.module, code.fakes, dict(bound.how.patches)
                    )
            else:
                walk(bound.program, bound.label, calls)
                found[bound.name] = found.pop(f"{id(bound.program)}")
        name = "step" if label == "step" else f"{id(program)}"
        found[name] = Graph(label, program.graph_module, program.fakes, program.settings)
        found[name].calls = calls

    walk(program, "step", 1)
    return [*found.values()]
