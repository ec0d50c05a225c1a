"""What the node of a pipeline runs: the same as its uncut graph, by stages.

The graph of the entry is that of the step without stages: stacks are gathered over pp, the gradients of all
microbatches are computed one after the other, and each rank keeps those of what it holds. It is what a check reads.
What runs is the table: each rank the parts of its stages. Leaves that pp splits otherwise than by layers (the ends:
embedding, norm, head) are brought together before, and let go where no stage reads them; behind, the terms of their
gradients are reduced to where they rest. At the end all ranks of pp sum the terms of leaves that all of them hold, and
what metrics are made of, too.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmegatron.collectives import Axes, World, ops, resharding, wires
from fmegatron.layout import Layout, Split
from fmegatron.step.batch_rows import cut_rows
from fmegatron.step.opaque import Entry, Replay
from fmegatron.step.operators import defined, free_name
from fmegatron.step.passes import Target
from fmegatron.step.pipeline.cut import GRADS, Parts
from fmegatron.step.pipeline.pairs import faces, paired
from fmegatron.step.pipeline.parts import layer_of
from fmegatron.step.pipeline.run import Held, on_paper, over_ranks
from fmegatron.step.pipeline.table import Message, Table, units
from fmegatron.step.reduce import raw_gradient_layout
from fmegatron.step.torch_private import graph_module_of, outside_of_tracing
from fmegatron.step.tracing import make_fakes, trace

__all__ = ["BoundPipeline", "PipelineEntry", "Plan"]


@dataclass(eq=False)
class Plan:
    """How a pipeline computes the gradients of a batch.

    takes: the paths of the node's inputs: "0/..." parameters, "1/..." the batch, others as they are. grads: the paths
    of the gradients that it gives behind the metrics of each microbatch, one for each parameter, in order. layouts: of
    the parameters. inner: the same without pp. dtypes: of the sums of gradients. data: the axes over which gradients
    are pending sums. gradients: whether there are any; else forwards alone. root: the module whose constants the graphs
    read. fakes: of the inputs. layers: {what a part takes or gives: (path of the parameter, its layer)}.
    """

    table: Table
    parts: Parts
    takes: list[str]
    layouts: dict[str, Layout]
    inner: dict[str, Layout]
    dtypes: dict[str, torch.dtype]
    axes: Axes
    data: tuple[str, ...]
    gradients: bool
    root: Any
    fakes: list
    fake_mode: Any
    name: str
    _entries: dict[tuple[str, int], Entry] = field(default_factory=dict)
    _pairs: dict[tuple[tuple[str, int], ...], Entry] = field(default_factory=dict)
    _faces: dict[tuple[tuple[str, int], ...], tuple] = field(default_factory=dict)
    _blocks: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    _reads: dict[int, set[str]] = field(default_factory=dict)
    _first: Entry | None = None
    _last: Entry | None = None

    def __post_init__(self):
        named = {name for part in self.parts.of.values() for name in (*part.takes, *part.gives)}
        self.layers = {name: _layer(name) for name in named}
        found = self.layers.values()
        self.stacks = {path for path, layer in found if layer is not None and self._pp_on_layers(path)}

    def _pp_on_layers(self, path: str) -> bool:
        return "pp" in self.layouts[path].axes(0)

    def entry(self, kind: str, stage: int) -> Entry:
        """What computes a part: made once."""
        if (kind, stage) not in self._entries:
            module = graph_module_of(self.root, self.parts.of[kind, stage].graph)
            # What a layer's backward keeps between its halves is of the mode in which they were made.
            fakes = make_fakes([n.meta["val"] for n in module.graph.find_nodes(op="placeholder")], self.fake_mode)
            self._entries[kind, stage] = Entry.make(f"{self.name}_{kind}{stage}", module, fakes, self.fake_mode)
        return self._entries[kind, stage]

    def of_steps(self, steps: tuple[tuple[str, int], ...]) -> Entry:
        """What computes a part, or those that run as one in a pair: made once."""
        if len(steps) == 1:
            return self.entry(*steps[0])
        if steps not in self._pairs:
            label = f"{self.name}_{'_'.join(f'{kind}{stage}' for kind, stage in steps)}"
            self._pairs[steps] = paired(self.root, self.parts, steps, label, self.fake_mode)
        return self._pairs[steps]

    def faces(self, steps: tuple[tuple[str, int], ...]) -> tuple[list, list]:
        """[(kind of a part, names)] of what parts that run as one take, and of what they give."""
        if steps not in self._faces:
            both = faces(self.parts, steps)
            groups = (itertools.groupby(pairs, operator.itemgetter(0)) for pairs in both)
            takes, gives = ([(kind, [name for _, name in of]) for kind, of in each] for each in groups)
            self._faces[steps] = takes, gives
        return self._faces[steps]

    def runs(self, rank: int) -> list[list[tuple[tuple[str, int], ...]]]:
        """Of each action or pair of a rank what it runs, one after the other: the parts (kind, stage) in each."""
        kinds, found = iter(self.table.parts(rank)), []
        for unit in units(self.table, rank):
            steps = [(kind, action.stage) for action in unit for kind in next(kinds)]
            steps = [step for step in steps if self.parts.of[step].gives]
            found.append([tuple(steps)][: len(steps)] if len(unit) > 1 else [(step,) for step in steps])
        return found

    def splits(self, path: str) -> bool:
        """Whether pp splits the layers of a parameter, so that a rank computes those that it holds."""
        return path in self.stacks

    def blocks(self, path: str, rank: int) -> dict[int, int]:
        """{layer of a stacked parameter that a rank of pp holds: its place there}, in this order."""
        layout = self.layouts[path]
        if (path, rank) not in self._blocks and not self.splits(path):
            self._blocks[path, rank] = {layer: layer for layer in range(layout.shape[0])}
        if (path, rank) not in self._blocks:
            found = sorted(layout.segments(layout.mesh.rank(pp=rank), 0), key=lambda s: s.local)
            held = [s.start + i for s in found for i in range(s.length)]
            self._blocks[path, rank] = {layer: at for at, layer in enumerate(held)}
        return self._blocks[path, rank]

    @property
    def summed(self) -> list[str]:
        """The parameters that all ranks of pp hold: the terms of their gradients are summed over it."""
        return [path for path, layout in self.layouts.items() if "pp" not in layout.sharded]

    @property
    def brought(self) -> list[str]:
        """The parameters that pp splits otherwise: each stage that reads one has it in full."""
        return [path for path, layout in self.layouts.items() if "pp" in layout.sharded and not self.splits(path)]

    def reads(self, rank: int) -> set[str]:
        """The parameters that the stages of a rank of pp read."""
        if rank not in self._reads:
            parts = [part for (_, stage), part in self.parts.of.items() if self.table.place[stage] == rank]
            named = {name for part in parts for name in part.takes}
            self._reads[rank] = {self.layers[name][0] for name in named if layer_of(name)[0].startswith("0/")}
        return self._reads[rank]

    def sides(self) -> list[tuple[int, str, int]]:
        """(stage, name, microbatch) of what metrics are made of, in the order in which it is exchanged."""
        named = [(stage, name) for stage, names in enumerate(self.parts.sides) for name in names]
        return [(stage, name, i) for stage, name in named for i in range(self.table.microbatches)]

    def like(self, kind: str, stage: int, name: str) -> torch.Tensor:
        """A fake tensor like a value that a part gives."""
        part = self.parts.of[kind, stage]
        outs: Any = part.graph.output_node().args[0]
        return outs[part.gives.index(name)].meta["val"]

    def require_placement(self, who: str) -> None:
        """ValueError, naming the leaf, where a stage reads a layer that its rank does not hold."""
        for (kind, stage), part in self.parts.of.items():
            rank = self.table.place[stage]
            for name in (*part.takes, *(part.gives if kind in "WR" else ())):
                path, layer = _layer(name)
                if not layer_of(name)[0].startswith(("0/", GRADS)) or not self.splits(path):
                    continue
                assert layer is not None, f"{path}: one that is not taken apart is brought"
                if layer not in self.blocks(path, rank):
                    held = [r for r in range(self.table.ranks) if layer in self.blocks(path, r)]
                    raise ValueError(
                        f"{who}: {path!r}: got {self.layouts[path]}, by which layer {layer} rests on rank {held[0]} of "
                        f"pp, wanted it on rank {rank}, which computes it in stage {stage}; split the stack as stages "
                        f"are placed: {self._split_of(path)}, padded, or give other stages"
                    )
        for name in self.parts.metrics.takes:
            path, layer = _layer(name)
            if layer_of(name)[0].startswith("0/") and (layer is not None or path not in self.summed):
                raise ValueError(
                    f"{who}: got a metric or a penalty of the parameter {path!r} itself, "
                    "wanted it made of values of one stage; compute it outside of the loss"
                )

    def _split_of(self, path: str) -> Split:
        """How the layers of a parameter are split where they rest with their stages."""
        layers: list[set] = [set() for _ in self.parts.sides]
        for (kind, stage), part in self.parts.of.items():
            layers[stage] |= {_layer(name)[1] for name in part.takes if _layer(name)[0] == path and kind[0] in "FG"}
        return Split("pp", sizes=tuple(map(len, layers)), order=tuple(self.table.place))

    def first(self) -> Entry | None:
        """What all ranks of pp run before the table: their parts of what is brought together -> these in full; None
        where there is nothing."""
        if self._first is None and self.brought:
            src, dst = ([of[path] for path in self.brought] for of in (self.layouts, self.inner))
            fakes = tuple(self.fakes[self.takes.index(f"0/{path}")] for path in self.brought)
            with outside_of_tracing():
                traced = trace(lambda *xs: resharding.reshard_many(xs, src, dst, self.axes), fakes, mesh=self.axes.mesh)
            self._first = Entry.make(f"{self.name}_begin", traced.graph_module, traced.fakes, traced.fake_mode)
        return self._first

    def last(self) -> Entry:
        """What all ranks of pp run behind the table: (inputs, sides, terms) -> [metrics of each microbatch, sums]."""
        if self._last is None:
            metrics, n = self.parts.metrics, self.table.microbatches
            module = graph_module_of(self.root, metrics.graph)
            sides = self.sides()
            shapes = [self.like("F", stage, name) for stage, name, _ in sides]
            buffers = [self.buffer_like(path) for path in self.terms]
            summed = len(self.summed) if self.gradients else 0
            of = [(path, self.dtypes[path]) for path in self.terms[summed:]]
            have = [raw_gradient_layout(self.inner[path], self.data).replace(dtype=dtype) for path, dtype in of]
            have = [layout.replace(unreduced=(*layout.unreduced, "pp")) for layout in have]
            want = [raw_gradient_layout(self.layouts[path], self.data).replace(dtype=dtype) for path, dtype in of]

            def finish(inputs, given, terms):
                terms, ends = terms[:summed], terms[summed:]
                wire = [x.to(torch.uint8) if x.dtype == torch.bool else x for x in (*given, *terms)]
                together = ops.psum_many(wire, self.axes["pp"]) if wire else []
                known = {
                    (name, i): x.to(like.dtype) for (_, name, i), x, like in zip(sides, together, shapes, strict=False)
                }
                found = []
                for i in range(n):
                    values = [
                        known[name, i] if (name, i) in known else self.of_microbatch(inputs, name, i)
                        for name in metrics.takes
                    ]
                    found += Replay(module).run(*values)
                ends = resharding.reshard_many(ends, have, want, self.axes)
                return [x.clone() for x in found], together[len(sides) :], ends

            with outside_of_tracing():
                traced = trace(finish, (self.fakes, shapes, buffers), mesh=self.axes.mesh)
            self._last = Entry.make(f"{self.name}_end", traced.graph_module, traced.fakes, traced.fake_mode)
        return self._last

    @property
    def terms(self) -> list[str]:
        """The parameters to whose gradients stages of several ranks may add, in the order in which they are summed."""
        return [*self.summed, *self.brought] if self.gradients else []

    def shape(self, path: str) -> torch.Size:
        """The shape of a parameter, and of the sum of its gradients, where a stage reads it."""
        return torch.Size((self.layouts if self.splits(path) else self.inner)[path].local_shape(0))

    def buffer_like(self, path: str) -> torch.Tensor:
        """A fake tensor like the sum of the gradients of a parameter."""
        device = self.fakes[self.takes.index(f"0/{path}")].device
        like = torch.empty(self.shape(path), dtype=self.dtypes[path], device="meta")
        return make_fakes([like], self.fake_mode)[0].to(device)

    def of_microbatch(self, inputs: Any, path: str, i: int) -> Any:
        """What microbatch i reads of an input."""
        x = inputs[self.takes.index(path)]
        return cut_rows(x, self.table.microbatches)[i] if path.startswith("1/") else x


def _layer(name: str) -> tuple[str, int | None]:
    """(path of the parameter, its layer) of an input or a gradient."""
    whole, layer = layer_of(name)
    return whole.removeprefix(GRADS if whole.startswith(GRADS) else "0/"), layer


class RankOfPipeline:
    """One rank of pp: its leaves, the sums of its gradients, and how its parts are run.

    inputs: of the node. brought: in full what `Plan.first` gives; what no stage of this rank reads is not kept. run:
    (entry of a part, values) -> what it gives. Values are tensors, or those of several ranks: `each` applies a function
    of tensors to them.
    """

    def __init__(self, plan: Plan, rank: int, inputs: list, brought: Sequence, run: Callable, each: Callable):
        self.plan, self.rank, self.inputs, self.each = plan, rank, dict(zip(plan.takes, inputs, strict=True)), each
        self.sums = dict[str, Any]()
        self._rows, self._totals = dict[str, Any](), dict[str, Any]()  # made once: each microbatch asks for all of them
        for path, whole in zip(plan.brought, brought, strict=True):
            if path in plan.reads(rank):
                self.inputs[f"0/{path}"] = whole
        self.held = Held(
            plan.table, plan.parts, rank, plan.faces, functools.partial(self._run, run), self.given, self.add, self.plus
        )

    def _run(self, run: Callable, steps: tuple[tuple[str, int], ...], values: list) -> Any:
        part = self.plan.of_steps(steps)
        if steps[0][0] == "R":
            pairs = zip(values, part.fakes, strict=True)
            values = [self.each(lambda x, dtype=like.dtype: x.to(dtype), value) for value, like in pairs]
        return run(part, values)

    def sum_of(self, path: str) -> Any:
        """The sum of the gradients of a parameter, so far."""
        if path not in self.sums:
            shape, dtype = self.plan.shape(path), self.plan.dtypes[path]
            self.sums[path] = self.each(
                lambda x: torch.zeros(shape, dtype=dtype, device=x.device), self.inputs[f"0/{path}"]
            )
        return self.sums[path]

    def given(self, name: str, i: int) -> Any:
        """An input of a part."""
        if name.startswith("1/") and name in self.inputs:
            if name not in self._rows:
                n, x = self.plan.table.microbatches, self.inputs[name]
                self._rows[name] = [self.each(lambda x, i=i: x.chunk(n, 0)[i], x) for i in range(n)]
            return self._rows[name][i]
        if name not in self.inputs:
            path, layer = self.plan.layers[name]
            assert layer is not None, f"{name} is an input"
            at = self.plan.blocks(path, self.rank)[layer]
            self.inputs[name] = self.each(lambda x: x[at], self.inputs[f"0/{path}"])
        return self.inputs[name]

    def add(self, name: str, value: Any, _: int) -> None:
        """Add a term to the gradient of a parameter, or of one of its layers."""
        if name not in self._totals:
            path, layer = self.plan.layers[name]
            total = self.sum_of(path)
            at = None if layer is None else self.plan.blocks(path, self.rank)[layer]
            self._totals[name] = total if at is None else self.each(lambda x: x[at], total)
        self.each(torch.Tensor.add_, self._totals[name], value)

    def plus(self, total: Any, value: Any) -> Any:
        """A sum of gradients over microbatches, in the dtype of the sums; a new one where there is none."""
        if total is None:
            return self.each(lambda x: x.to(wires.wide(x.dtype), copy=True), value)
        return self.each(torch.Tensor.add_, total, value)

    def shares(self) -> tuple[list, list]:
        """(what metrics are made of, zeros where another rank makes it; the terms that are summed over pp)."""
        plan, like = self.plan, next(iter(self.inputs.values()))
        sides = []
        for stage, name, i in plan.sides():
            if plan.table.place[stage] == self.rank:
                sides.append(self.held.sides[name, i])
            else:
                v = plan.like("F", stage, name)
                sides.append(self.each(lambda x, v=v: torch.zeros(v.shape, dtype=v.dtype, device=x.device), like))
        return sides, [self.sum_of(path) for path in plan.terms]

    def results(self, last: list) -> list:
        """What the node gives, of what all ranks gave each other at the end."""
        plan = self.plan
        count = len(last) - len(plan.terms)
        together = dict(zip(plan.terms, last[count:], strict=True))
        paths = plan.layouts if plan.gradients else ()
        return [*last[:count], *(together[path] if path in together else self.sum_of(path) for path in paths)]


class PipelineEntry(Entry):
    """The entry of a pipeline's node. plan: how its graph is computed by stages."""

    plan: Plan | None = None

    def bind(self, target: Target) -> Any:
        """The parts of this rank, compiled for a target, with an operator."""
        world = target.world
        assert self.plan is not None, "who made it knows how it is computed"
        if world is None:
            raise ValueError(
                f"{self.plan.name}: got no world, wanted one, as a pipeline runs on several ranks; give "
                "jit(..., world=connect(mesh)), or look at the step with fmegatron.testing.simulate"
            )
        known = world.compiled.setdefault(self, {})
        if target not in known:
            known[target] = BoundPipeline(self, target, world, free_name(f"{self.name}_"))
        return known[target]


class BoundPipeline:
    """A pipeline on real ranks: as `opaque.Bound`, of the parts of this rank."""

    def __init__(self, entry: PipelineEntry, target: Target, world: World, name: str):
        assert entry.plan is not None, "who made it knows how it is computed"
        self.plan, self.target, self.world, self.graph_module = entry.plan, target, world, entry.graph_module
        self.name, self.label = entry.name, entry.name.rpartition("_")[0]
        self.rank = world.index(("pp",))
        self.parts = {
            part: part.bind(target)
            for steps in dict.fromkeys(steps for unit in self.plan.runs(self.rank) for steps in unit)
            for part in [self.plan.of_steps(steps)]
        }
        first = self.plan.first()
        self.begin, self.end = None if first is None else first.bind(target), self.plan.last().bind(target)
        self.op, self.library = defined("fmegatron_compiled", name, self, entry.out_meta)

    def part(self, *steps: tuple[str, int]) -> Any:
        """A part of any rank (or a pair of them), as this rank's are: through the passes, not compiled."""
        return self.plan.of_steps(steps).bind(self.target)

    @property
    def beside(self) -> int:
        """Bytes that a call takes beside its arguments and results, as planned: not known yet, of one part."""
        return max((bound.beside for bound in self.parts.values()), default=0)

    def compile(self) -> None:
        """Compile the parts of this rank if that is not done yet."""
        for bound in (*self.parts.values(), self.begin, self.end):
            if bound is not None:
                bound.compile()

    def run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The table, on this rank."""
        plan = self.plan
        given = [tensors[plan.takes.index(f"0/{path}")] for path in plan.brought]
        with torch.no_grad():
            rank = RankOfPipeline(
                plan,
                self.rank,
                list(tensors),
                () if self.begin is None else self.begin.op(given),
                lambda part, values: self.parts[part].op(values),
                _apply,
            )
            over_ranks(rank.held, self.world, self.like)
            return rank.results(self.end.op([*tensors, *(x for xs in rank.shares() for x in xs)]))

    def on_paper(self, inputs: list, brought: Sequence, part: Callable) -> RankOfPipeline:
        """This rank, whose parts are run by `part` (entry, values)."""
        return RankOfPipeline(self.plan, self.rank, inputs, brought, part, _apply)

    def walk(self, rank: RankOfPipeline, before: Callable[[str, list[torch.Tensor]], None]) -> list[torch.Tensor]:
        """`run.on_paper` of this rank."""
        return on_paper(rank.held, self.like, before)

    def like(self, message: Message) -> torch.Tensor:
        """A tensor like what a message carries."""
        pair = (self.plan.parts.forward if message.kind == "F" else self.plan.parts.backward)[message.stage]
        assert pair is not None, "a message has a value"
        v = self.plan.like(message.kind, message.stage, pair[0])
        return torch.empty(v.shape, dtype=v.dtype, device=self.world.device)


def _apply(function: Callable, *values: Any) -> Any:
    return function(*values)
