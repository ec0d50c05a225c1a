"""The exact plan: the memory of a step as Inductor schedules it for any mesh, without ranks, devices or compiling.

The step is traced, lowered and ordered for a world on paper, each of its graphs is scheduled by Inductor, and the
wrappers run on fake tensors (`plan.wrapper`), layers first: an opaque node counts with its own peak wherever it runs.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fmegatron import tree
from fmegatron.layout import Layout, Mesh
from fmegatron.plan.paper import SizedWorld
from fmegatron.plan.setting import Described
from fmegatron.plan.torch_private import FakeTensorMode
from fmegatron.plan.wrapper import Counted, Held, counted
from fmegatron.step import Overlap, Rates, Timeline
from fmegatron.step.graph.nodes import opaque_entries
from fmegatron.step.jit import Compiled
from fmegatron.step.passes import Program, Target
from fmegatron.step.timeline import planned

__all__ = ["Exact", "deep", "exact", "in_mib"]

_FEW = (4, 6, 8)  # depths that are scheduled in the place of a deeper model
_SHOWN = 12  # groups of what is alive that are printed


@dataclass(frozen=True)
class Exact:
    """Memory of one rank in a step, and the lowered graph that it was counted in.

    state: bytes of the first argument at rest. batch: of the others. transient: the peak above both. held: what is
    alive there, largest first. graph: lowered and ordered, of which `timeline` is. phases: part of the step -> its peak
    above the arguments. depth: (layers asked for, layers scheduled) where the peak was continued from shallower models,
    else None. seconds: of the processor, that the plan took.
    """

    mesh: Mesh
    rank: int
    state: int
    batch: int
    transient: int
    held: tuple[Held, ...]
    graph: fx.Graph = field(repr=False)
    phases: Mapping[str, int] = field(repr=False)
    depth: tuple[int, tuple[int, ...]] | None = None
    seconds: float = 0.0

    @property
    def peak(self) -> int:
        """Bytes of state, batch and transients together."""
        return self.state + self.batch + self.transient

    def timeline(self, rates: Rates | None = None) -> Timeline:
        """What the step computes and sends when, on paper (`step.timeline`); of the last of `few` layers where the plan
        was continued. rates: None for unit durations."""
        return planned(self.graph, rates, f"planned on {self.mesh or 'one rank'}")

    def __str__(self) -> str:
        lines = [
            f"exact: {in_mib(self.peak)} on rank {self.rank} of {self.mesh or 'one rank'}: state "
            f"{in_mib(self.state)}, batch {in_mib(self.batch)}, above them {in_mib(self.transient)}"
        ]
        of = ""
        if self.depth is not None:
            lines.append(f"  continued to {self.depth[0]} layers from {', '.join(map(str, self.depth[1]))}")
            of = f" of {self.depth[1][-1]} layers"
        lines.append(f"  alive at the peak{of}:")
        groups: dict[str, list[Held]] = {}
        for one in self.held:
            groups.setdefault(f"{one.op} {one.at} {one.dtype} {one.shape}", []).append(one)
        ordered = sorted(groups.values(), key=lambda group: -sum(one.nbytes for one in group))
        for group in ordered[:_SHOWN]:
            count = f"{len(group)} x " if len(group) > 1 else ""
            lines.append(f"  {in_mib(sum(one.nbytes for one in group)):>14s}  {count}{group[0]}")
        if rest := [one for group in ordered[_SHOWN:] for one in group]:
            lines.append(f"  {in_mib(sum(one.nbytes for one in rest)):>14s}  in {len(rest)} others")
        return "\n".join(lines)


def in_mib(nbytes: float) -> str:
    """Bytes in MiB, for people."""
    return f"{nbytes / 2**20:,.1f} MiB"


def exact(
    step: Callable,
    state_specs: tree.Tree,
    batch_layouts: tree.Tree,
    mesh: Mesh,
    *,
    rank: int = 0,
    overlap: Overlap | None = None,
    donate: int | Sequence[int] | None = 0,
    patches: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Exact:
    """The memory that `jit(step, donate=..., world=..., overlap=...)` takes on one rank of a mesh, on the CPU.

    Args:
        step: train_step(state, batch) over symbolic axes, as an experiment's `describe` gives it.
        state_specs: tree of Layouts or ArraySpecs of its first argument.
        batch_layouts: of the second.
        mesh: any size: nothing is started.
        rank: whose shards.
        overlap: as `jit` is given it.
        donate: as `jit` is given it.
        patches: as `jit` is given them.
        options: as `jit` is given them.

    Raises ValueError for a step that `jit` refuses to trace, and for layouts of another mesh.
    """
    with _world(mesh, rank) as world:
        return _exact(world, {}, step, state_specs, batch_layouts, overlap, donate, patches, options)


def deep(
    build: Callable[[int], Described],
    depth: int,
    mesh: Mesh,
    *,
    few: Sequence[int] = _FEW,
    rank: int = 0,
    overlap: Overlap | None = None,
    donate: int | Sequence[int] | None = 0,
    patches: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Exact:
    """`exact` of a model of `depth` equal layers, at the cost of shallow ones: O(1) of depth.

    The peaks of each part of the step (`plan.wrapper`) are counted at the depths `few`, whose differences must be the
    same and even (the backward is looked at in halves); what a layer adds there is then added for the layers that are
    missing. build(n) gives (step, state_specs, batch_layouts) of n layers. The other arguments are those of `exact`. A
    depth that is no more than 3/2 of the largest of `few` is counted itself.

    Raises ValueError where the peaks do not grow evenly, so that nothing can be continued: plan all layers by `exact`.
    """
    few = tuple(few)
    steps = {b - a for a, b in itertools.pairwise(few)}
    if len(few) != 3 or few[0] < 4 or len(steps) != 1 or min(steps) <= 0 or min(steps) % 2:
        raise ValueError(
            f"deep: got few={few}, wanted three depths from 4 on at equal, even distances; give some such as {_FEW}"
        )
    how = (overlap, donate, patches, options)
    began = time.process_time()
    with _world(mesh, rank) as world:
        known: dict[Any, Counted] = {}
        if depth <= few[-1] * 3 // 2:
            return _exact(world, known, *build(depth), *how)
        found = [_exact(world, known, *build(n), *how) for n in few]
    state, batch = _bytes(build(depth)[1], rank), found[0].batch
    missing = (depth - few[2]) // (few[2] - few[1])
    phases, changes = {}, {}
    for name in found[-1].phases:
        a, b, c = (one.phases.get(name, 0) for one in found)
        phases[name] = c + (depth - few[2]) * (c - b) // (few[2] - few[1])
        changes[name] = abs((c - b) - (b - a))
    top = max(phases.values(), default=0)
    for name, value in phases.items():  # a part that does not grow evenly yet must stay below the peak if it goes on so
        if changes[name] > 0.02 * value and (value == top or value + missing * changes[name] > top):
            counts = ", ".join(str(one.phases.get(name, 0)) for one in found)
            raise ValueError(
                f"deep: {name}: got peaks of {counts} bytes with {', '.join(map(str, few))} layers, wanted them to "
                "grow evenly; plan all layers (exact), or give other depths (few=)"
            )
    last = found[-1]
    took = time.process_time() - began
    return Exact(mesh, rank, state, batch, top, last.held, last.graph, phases, (depth, few), took)


def _exact(world, known, step, state_specs, batch_layouts, overlap, donate, patches, options) -> Exact:
    began = time.process_time()
    layouts = [_layouts(state_specs), _layouts(batch_layouts)]
    for which, given in zip(("state", "batch"), layouts, strict=True):
        tree.require_mesh(given, world.mesh, f"plan: the {which}", "the mesh of the plan")
    with FakeTensorMode():
        arguments = tuple(tree.map(lambda layout: _local(layout, world.rank), given) for given in layouts)
    target = Target(world, "inductor", tuple(sorted((patches or {}).items())), overlap)
    positions = () if donate is None else (donate,) if isinstance(donate, int) else tuple(donate)
    compiled = Compiled(step, arguments, positions, target, None, dict(options or {}))
    found = _count(compiled.program, dict(options or {}), known, "step")
    graph = compiled.stages["overlap"].graph
    state, batch = (_bytes(given, world.rank) for given in layouts)
    took = time.process_time() - began
    return Exact(world.mesh, world.rank, state, batch, found.peak, found.held, graph, found.phases, None, took)


def _count(program: Program, options: Mapping[str, Any], known: dict[Any, Counted], label: str) -> Counted:
    """The memory of a program, its layers first. known: operator -> what is counted already."""
    for bound in opaque_entries(program.graph_module.graph):
        if bound.op not in known:
            known[bound.op] = _count(bound.program, {}, known, bound.label)
    target = program.target
    order = target.overlap.options if target.overlap else {}
    return counted(program.graph_module, program.fakes, {**dict(target.patches), **order, **options}, known, label)


def _world(mesh: Mesh, rank: int) -> SizedWorld:
    if not 0 <= rank < mesh.size:
        raise ValueError(f"plan: got rank={rank}, wanted one of 0 to {mesh.size - 1} of the mesh {mesh}")
    return SizedWorld(mesh, rank)


def _layouts(given: tree.Tree) -> tree.Tree:
    return tree.map(lambda leaf: leaf if isinstance(leaf, Layout) else leaf.layout, given)


def _local(layout: Layout, rank: int) -> torch.Tensor:
    return torch.empty(layout.local_shape(rank), dtype=layout.dtype)


def _bytes(given: tree.Tree, rank: int) -> int:
    return sum(math.prod(x.local_shape(rank)) * x.dtype.itemsize for x in tree.leaves(_layouts(given)))
