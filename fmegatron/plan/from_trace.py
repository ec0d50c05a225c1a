"""The exact plan: the memory of a step as Inductor schedules it for any mesh, without ranks, devices or compiling.

The step is traced, lowered and ordered for a world on paper, each of its graphs is scheduled by Inductor, and the
wrappers run on fake tensors (`plan.wrapper`), layers first: an opaque node counts with its own peak wherever it runs.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from fmegatron import tree
from fmegatron.collectives import World
from fmegatron.layout import Layout, Mesh
from fmegatron.plan.cuda import guard
from fmegatron.plan.cuda.devices import Device
from fmegatron.plan.cuda.kernels import Kernel, added, continued
from fmegatron.plan.paper import SizedWorld
from fmegatron.plan.stages import staged
from fmegatron.plan.torch_private import FakeTensorMode
from fmegatron.plan.wrapper import Counted, Held, counted
from fmegatron.step import Description, Overlap, buckets, jitted, opaque, passes
from fmegatron.step.graph import nodes
from fmegatron.step.overlap import schedule
from fmegatron.step.streamed import Streamed
from fmegatron.step.timelines import events, planned
from fmegatron.tree import checks, labels, structure

__all__ = ["Exact", "deep", "exact", "in_mib"]

# Depths that are scheduled in the place of a deeper model: Inductor writes a stack of up to 8 in another way.
_FEW = ((4, 10), (8, 14))  # the second where the first are too few: three dense layers of other kind, prefetches
_OTHERWISE = "plan all layers (exact), or give other depths (few=)"
_Calls = Mapping[str, tuple[int, ...]]
_SHOWN = 12  # groups of what is alive that are printed


class UnevenError(ValueError):
    """Layers that do not add the same at the depths that were counted, or no model of such a depth."""


@dataclass(frozen=True)
class Exact:
    """Memory of one rank in a step, and the lowered graph that it was counted in.

    state: bytes of the first argument at rest on the device, host: in host memory. batch: of the others. transient: the
    peak on the device above both. held: what is alive there, largest first. graph: lowered and ordered, of which
    `timeline` is. phases: part of the step -> its peak above the arguments. depth: (layers asked for, layers scheduled)
    where the peak was continued from shallower models, else None. seconds: of the processor, that the plan took.
    device: whose code it is of, and launches what that launches, in which groups of ranks it sends (axes -> ranks);
    None: the CPU. bound: how many times the peak of the order of the graph, which was counted, `transient` is, where
    that of overlap is not known but for its limit.
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
    host: int = 0
    device: Device | None = None
    kernels: tuple[Kernel, ...] = field(default=(), repr=False)
    groups: Mapping[str, int] = field(default_factory=dict)
    bound: float | None = None

    @property
    def peak(self) -> int:
        """Bytes of state, batch and transients together, on the device."""
        return self.state + self.batch + self.transient

    def timeline(self, rates: planned.Rates | None = None) -> events.Timeline:
        """What the step computes and sends when, on paper (`step.timeline`); of the last of `few` layers where the plan
        was continued. rates: None for unit durations."""
        return planned.planned(self.graph, rates, f"planned on {self.mesh or 'one rank'}")

    def __str__(self) -> str:
        lines = [
            f"exact, for {self.device.name if self.device else 'the CPU'}: {in_mib(self.peak)} on rank {self.rank} of "
            f"{self.mesh or 'one rank'}: state "
            f"{in_mib(self.state)}, batch {in_mib(self.batch)}, above them {in_mib(self.transient)}"
            f"{in_host(self.host)}"
        ]
        of = ""
        if self.bound is not None:
            lines.append(
                f"  at most: {self.bound:g} times what is above state and batch in the order of the graph, which was "
                "counted, since layers whose communication is moved do not add the same"
            )
        if self.depth is not None:
            top = max(self.phases, key=self.phases.__getitem__)
            few = " and ".join(map(str, self.depth[1]))
            lines.append(
                f"  continued to {self.depth[0]} layers from {few}, whose peaks were counted; it is in the {top}"
            )
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


def in_host(nbytes: int) -> str:
    """What is said of bytes in host memory: nothing where there are none."""
    return f"; in host memory {in_mib(nbytes)}" if nbytes else ""


class _How(NamedTuple):
    """What `jit` is given beside the step."""

    overlap: Overlap | bool
    donate: int | Sequence[int] | None
    patches: Mapping[str, Any] | None
    host_bytes: int
    device: Device | None = None


def exact(
    step: Callable | Description,
    state_specs: structure.Tree = None,
    batch_layouts: structure.Tree = None,
    mesh: Mesh | None = None,
    *,
    rank: int = 0,
    overlap: Overlap | bool = True,
    donate: int | Sequence[int] | None = 0,
    patches: Mapping[str, Any] | None = None,
    host_bytes: int = passes.Target.host_bytes,
    device: Device | None = None,
) -> Exact:
    """The memory that `jit(step, donate=..., world=..., overlap=...)` takes on one rank of a mesh, on the CPU or a
    CUDA device; state in host memory (`Layout.memory`) is counted apart.

    Args:
        step: train_step(state, batch) over symbolic axes; or a `step.Description`, alone: `exact(describe(config))`.
        state_specs: tree of Layouts or ArraySpecs of its first argument.
        batch_layouts: of the second.
        mesh: any size: nothing is started. None: that of the state.
        rank: whose shards. On a mesh with pp it decides which stages these are, and so what the table holds.
        overlap: as `jit` is given it.
        donate: as `jit` is given it.
        patches: as `jit` is given them.
        host_bytes: as `jit` is given them.
        device: of `plan.cuda.devices`, in a process with the guard and triton (`python -m fmegatron.plan --device`
            starts one): the peak is that of the code for it, with all that it launches. None: the CPU.

    Raises ValueError for a step that `jit` refuses to trace, and for layouts of another mesh; `plan.cuda.guard`'s
    GuardError, with what to run, for a device in another process.
    """
    how = _How(overlap, donate, patches, host_bytes, device)
    if isinstance(step, Description):
        function, state_specs, batch_layouts = step
    else:
        function = step
    flat = tree.leaves(_layouts(state_specs))
    if mesh is None and not flat:
        raise ValueError("exact: got no arrays, wanted those of the state; give exact(describe(config))")
    with _world(flat[0].mesh if mesh is None else mesh, rank, device) as world:
        return _exact(world, {}, function, (state_specs, batch_layouts), how)[0]


def _shallow(build: Callable[[int], Description], depth: int) -> Description:
    try:
        return build(depth)
    except ValueError as error:
        raise UnevenError(f"deep: got no model of {depth} layers: {error}; {_OTHERWISE}") from error


def deep(
    build: Callable[[int], Description],
    depth: int,
    mesh: Mesh,
    *,
    few: Sequence[int] | None = None,
    rank: int = 0,
    overlap: Overlap | bool = True,
    donate: int | Sequence[int] | None = 0,
    patches: Mapping[str, Any] | None = None,
    host_bytes: int = passes.Target.host_bytes,
    device: Device | None = None,
) -> Exact:
    """`exact` of a model of `depth` equal layers, at the cost of two shallow ones: O(1) of depth.

    The peaks of each part of the step (`plan.wrapper`) are counted at the two depths `few`, and what a layer adds there
    is added for the layers that are missing. In forward and backward that is what one call of a layer adds to what is
    alive; all must add the same, and the calls of the deeper graph be those of the shallower one with others put in.
    Before the first and behind the last layer (the update) it is what two depths say. Layers themselves are counted
    once. The bytes of the state are known at every depth, and must grow evenly up to `depth`. build(n) gives the
    `step.Description` of n layers. few: None: 4 and 10, where these do not do 8 and 14. Where these do not either, as
    what travels fills the room below the peak, the order of the graph is counted: with overlap the peak is at most
    `Overlap.peak` of it (`Exact.bound`). Other arguments are those of `exact`. A depth that is no more than 3/2 of the
    larger of `few` is counted itself.

    Raises ValueError where layers do not add the same, or none is a call of its own (`step.layers`, `model.loss`), so
    that nothing can be continued: plan all layers by `exact`.
    """
    how = _How(overlap, donate, patches, host_bytes, device)
    if few is None:
        return _deep_enough(build, depth, mesh, rank, how)
    few = tuple(few)
    if len(few) != 2 or few[0] < 4 or few[1] - few[0] < 4 or (few[1] - few[0]) % 2:
        raise ValueError(
            f"deep: got few={few}, wanted two depths from 4 on, 4 or more apart, by an even number; give some such as "
            f"{_FEW[0]}"
        )
    began = time.process_time()
    if depth <= few[-1] * 3 // 2:
        return exact(build(depth), mesh=mesh, rank=rank, **how._asdict())
    layers, missing = few[1] - few[0], depth - few[1]
    whole = build(depth)
    models = {n: _shallow(build, n) for n in few} | {depth: whole}
    states = [_bytes(of.state, rank) for of in models.values()]
    on_host = _bytes(whole.state, rank, "host")
    line = states[1] + missing * (states[1] - states[0]) / layers
    if abs(states[2] - line) > 0.002 * line:
        raise UnevenError(
            f"deep: got a state of {states[2]:,} bytes at {depth} layers, wanted {line:,.0f}, as {few[0]} and {few[1]} "
            f"layers have {states[0]:,} and {states[1]:,}; layers differ: {_OTHERWISE}"
        )
    known: dict[str, Counted] = {}
    counts, last = [], None
    for n in few:
        with _world(mesh, rank, device) as world:  # Inductor treats an operator that it has seen before in another way
            step, *given = models[n]
            last, found = _exact(world, known, step, given, how)
            counts.append(found)
    shallow, deeper = counts
    grows = {name: (value - shallow.phases.get(name, 0)) / layers for name, value in deeper.phases.items()}
    grows |= _of_layers(shallow.calls, deeper.calls, layers, missing, deeper.peak + missing * max(grows.values()))
    phases = {name: value + int(missing * grows[name]) for name, value in deeper.phases.items()}
    assert last is not None, "two depths"
    took = time.process_time() - began
    top = max(phases.values())
    done = continued(shallow.kernels, deeper.kernels, layers, missing)
    return replace(
        last,
        state=states[2],
        transient=top,
        phases=phases,
        depth=(depth, few),
        seconds=took,
        host=on_host,
        kernels=done,
    )


def _deep_enough(build: Callable[[int], Description], depth: int, mesh: Mesh, rank: int, how: _How) -> Exact:
    """`deep` of the first depths that do; else of the order of the graph, above which overlap takes so much at most."""
    uneven: UnevenError | None = None
    for few in _FEW:
        try:
            return deep(build, depth, mesh, few=few, rank=rank, **how._asdict())
        except UnevenError as error:
            uneven = error
    assert uneven is not None, "none of them does"
    most = schedule.overlap_of(how.overlap)
    if most is None or most.peak is None or mesh.size == 1:
        raise uneven
    try:
        found = deep(build, depth, mesh, rank=rank, **how._replace(overlap=False)._asdict())
    except UnevenError:
        raise uneven from None
    return replace(found, transient=math.ceil(most.peak * found.transient), bound=most.peak)


def _of_layers(shallow: _Calls, deeper: _Calls, layers: int, missing: int, top: float) -> dict[str, float]:
    """By how many bytes the peak of each part between layers grows with each layer.

    layers: how many more the deeper graph has. missing: how many are to be added; equal layers may differ by so much
    that it comes to 2 % of the peak, about `top`.
    """
    if not deeper:
        raise UnevenError(f"deep: got a step without layers that are compiled once, wanted calls of them; {_OTHERWISE}")
    adds = {}
    for name, live in deeper.items():
        a, b = ([y - x for x, y in itertools.pairwise(calls)] for calls in (shallow.get(name, ()), live))
        more = len(b) - len(a)
        adds[name] = _put_in(a, b, layers, 0.02 * top / missing) if more > 0 and more % layers == 0 else None
        if adds[name] is None:
            raise UnevenError(
                f"deep: {name}: got {b} bytes more from call to call, and {a} with {layers} layers fewer, wanted "
                f"layers that add the same; {_OTHERWISE}"
            )
    grows = {}
    for name, live in deeper.items():
        outer = name.removesuffix("forward")
        if outer == name:
            continue
        before = (live[0] - shallow[name][0]) / layers
        forward, backward = before + adds[name], adds.get(f"{outer}backward", 0.0)
        grows |= {name: max(before, forward), f"{outer}turn": forward}
        grows[f"{outer}backward"] = forward + max(backward, 0.0) / 2  # its first half
        grows[f"{outer}late backward"] = forward + max(backward, backward / 2)
    return grows


def _put_in(shallow: list[int], deeper: list[int], layers: int, allowed: float) -> float | None:
    """What a layer adds: the mean of the steps that the deeper list has beside those of the shallower one, if these are
    equal, by ones or twos; else None. allowed: by how much they may differ.

    A buffer that is taken again or not, by chance, makes other steps differ.
    """
    more = len(deeper) - len(shallow)
    period = 2 * more // layers

    def apart(at: int) -> tuple[bool, int]:
        """(whether those put in there differ, how far the steps are that both have), the least is best."""
        others = zip(shallow, deeper[:at] + deeper[at + more :], strict=True)
        windows = [sum(deeper[i : i + period]) for i in range(at, at + more - period + 1)]
        return max(windows) - min(windows) > 2 * allowed, sum(abs(x - y) for x, y in others)

    at = min(range(len(shallow) + 1), key=apart)
    differ, of_both = apart(at)
    even = not differ and of_both <= 0.15 * sum(map(abs, deeper))
    return sum(deeper[at : at + more]) / layers if even else None


def _exact(
    world: SizedWorld, known: dict[str, Counted], step: Callable, given: Sequence[structure.Tree], how: _How
) -> tuple[Exact, Counted]:
    began = time.process_time()
    layouts = [_layouts(specs) for specs in given]
    for which, given in zip(("state", "batch"), layouts, strict=True):
        checks.require_mesh(given, world.mesh, f"plan: the {which}", "the mesh of the plan")
    with FakeTensorMode():
        arguments = tuple(tree.map(lambda layout: _local(layout, world), given) for given in layouts)
    patches = tuple(sorted((how.patches or {}).items()))
    target = passes.Target(world, "inductor", patches, schedule.overlap_of(how.overlap), how.host_bytes)
    positions = () if how.donate is None else (how.donate,) if isinstance(how.donate, int) else tuple(how.donate)
    compiled = jitted.Compiled(step, arguments, positions, target)
    found = _count(compiled.program, known, "step", how.device, len(tree.leaves(layouts[0])))
    graph = compiled.stages["overlap"].graph
    groups = {name.removeprefix("fmegatron:"): ranks for name, ranks in world.opened().items()}
    state, batch = (_bytes(given, world.rank) for given in layouts)
    on_host = sum(_bytes(given, world.rank, "host") for given in layouts)
    took = time.process_time() - began
    plan = Exact(
        mesh=world.mesh,
        rank=world.rank,
        state=state,
        batch=batch,
        transient=found.peak,
        held=found.held,
        graph=graph,
        phases=found.phases,
        seconds=took,
        host=on_host,
        device=how.device,
        kernels=found.kernels,
        groups=groups,
    )
    return plan, found


def _count(
    program: passes.Program, known: dict[str, Counted], label: str, device: Device | None, state: int = 0
) -> Counted:
    """The memory of a program, its layers first. known: name of a graph, by its content -> what is counted already."""
    inside = {}
    for bound in nodes.opaque_entries(program.graph_module.graph):
        if bound.name not in known:
            known[bound.name] = _count_of(bound, known, device)
        inside[bound.op] = known[bound.name]
    return counted(program.graph_module, program.fakes, dict(program.settings), inside, label, device, state)


def _count_of(bound: Any, known: dict[str, Counted], device: Device | None) -> Counted:
    """The memory of what an opaque node runs."""
    if isinstance(bound, Streamed):
        return _streamed(bound, device)
    if isinstance(bound, opaque.Bound):
        return _count(bound.program, known, bound.label, device)
    return staged(bound, lambda part: _count_of(part, known, device))


def _streamed(update: Streamed, device: Device | None) -> Counted:
    """The memory on the device of an update of leaves in host memory: of two buckets that were fetched, and of what
    leaves the one that is updated; of those that are updated on the host none."""
    pieces = {}
    for key, code in update.codes.items():
        here = None if any(x.device.type == "cpu" for x in code.fakes) else device  # an update on the host
        pieces[key] = counted(code.module, code.fakes, dict(update.how.patches), {}, "piece", here)
    every = [(piece.part, piece.shape) for bucket in update.table for piece in bucket]
    fetched = [sum(_fetched(update, piece) for piece in bucket) for bucket in update.table]
    peak = 0
    for i, bucket in enumerate(update.table):
        live = sum(fetched[i : i + 2])
        for piece in bucket:
            code, at = update.codes.get((piece.part, piece.shape)), update.places[piece.part]
            if code is None or update.parts[piece.part].on_host:
                continue
            peak = max(peak, live + pieces[piece.part, piece.shape].peak)
            outs = nodes.items_of(code.module.graph.output_node().args[0])
            live += sum(out.meta["val"].nbytes for out, stored in zip(outs, at.stored, strict=True) if stored)
        peak = max(peak, live)
    held = Held("buckets", peak, torch.uint8, (peak,), "host", update.label, "step")
    done = added(one for key in every if key in pieces for one in pieces[key].kernels)
    return Counted(peak, (held,), kernels=done)


def _fetched(update: Streamed, piece: buckets.Piece) -> int:
    """Bytes of a piece that are fetched."""
    fetched = () if update.parts[piece.part].on_host else update.parts[piece.part].fetched
    return math.prod(piece.shape) * sum(node.meta["val"].element_size() for node in fetched)


def _world(mesh: Mesh, rank: int, device: Device | None) -> SizedWorld:
    if not 0 <= rank < mesh.size:
        raise ValueError(f"plan: got rank={rank}, wanted one of 0 to {mesh.size - 1} of the mesh {mesh}")
    if device is not None:
        guard.require_process(device)
    return SizedWorld(mesh, rank, "cpu" if device is None else torch.device("cuda", 0))


def _layouts(given: structure.Tree) -> structure.Tree:
    return tree.map(lambda leaf: leaf if isinstance(leaf, Layout) else leaf.layout, given)


def _local(layout: Layout, world: World) -> torch.Tensor:
    device = "cpu" if layout.on_host else world.device
    return labels.labelled(torch.empty(layout.local_shape(world.rank), dtype=layout.dtype, device=device), layout)


def _bytes(given: structure.Tree, rank: int, memory: str = "device") -> int:
    return sum(x.local_nbytes(rank) for x in tree.leaves(_layouts(given)) if x.on_host == (memory == "host"))
