"""A pipeline in the place of microbatches: the gradients of a batch, computed by stages."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, resharding
from fmegatron.layout import Mesh
from fmegatron.step.batch_rows import cut_rows
from fmegatron.step.cut import OneNode
from fmegatron.step.gradient import LossFn
from fmegatron.step.microbatches import (
    Batch,
    accumulate,
    gradient_of,
    name_of,
    of_microbatches,
    require_parts,
    weight_of,
)
from fmegatron.step.opaque import Entry
from fmegatron.step.partition import functional
from fmegatron.step.parts import summed
from fmegatron.step.pipeline.cut import GRADS, blocks_of, cut, with_outputs, without_marks
from fmegatron.step.pipeline.entry import PipelineEntry, Plan
from fmegatron.step.pipeline.options import Pipeline, Pipelining, Scheduled, by_stages
from fmegatron.step.pipeline.table import forwards
from fmegatron.step.reduce import raw_gradient_layout, widened
from fmegatron.step.signature import signature_of
from fmegatron.step.torch_private import FakeTensorMode, graph_module_of, is_tracing, outside_of_tracing
from fmegatron.step.tracing import described, trace
from fmegatron.tree import labels, structure

__all__ = ["evaluated", "pipelined", "staged"]


def pipelined(
    loss_fn: Callable,
    pipeline: int | Pipelining | Pipeline,
    *,
    dtype: torch.dtype = torch.float32,
    axes: Axes | None = None,
) -> Callable:
    """`f(params, batch, *args) -> ((loss, aux), grads)`: `accumulate(loss_fn, microbatches)`, computed by stages.

    The same arguments, and the same result to the order of sums. loss_fn says where blocks begin, `step.stage(x, n)`.
    On a mesh where pp is 1 it is `accumulate`.

    Args:
        loss_fn: as `accumulate` takes it. A loss that is a scalar is the mean over equal microbatches; where rows count
            differently (a mask) it is parts, `step.mean(total, count)`.
        pipeline: the table of actions, whose microbatches the batch is cut into, and the blocks of each stage; or
            `Pipelining(...).of(microbatches)`, whose stages are cut when the blocks have been counted; their number
            alone is 1F1B.
        dtype: in which gradients of lower precision are added up and returned.
        axes: over whose data axes parts are added up, as of `value_and_grad`.

    A stacked leaf [L, ...] that pp splits on dim 0 is computed where it rests: a rank holds the blocks of its stages,
    in their order, `Split("pp", sizes=stages, order=table.place)`, padded where stages are uneven. Other leaves that pp
    splits (the ends: embedding, norm, head) are gathered over it once, kept by the ranks whose stages read them, and
    their gradients are reduced to where they rest; those that are on all ranks of pp have them summed.
    Runs inside a jit, of parameters that know their layouts. Raises ValueError for what cannot be cut (no marks, a
    value that skips a stage, a backward that reads several stages), for blocks that do not rest with their stage, for a
    scalar with "tokens" beside it, and for counts that depend on parameters.
    """
    if not callable(loss_fn):
        raise ValueError(
            f"pipelined: got {structure.in_words(loss_fn)}, wanted a function loss_fn(params, batch, *args)"
        )
    if isinstance(pipeline, int):
        pipeline = Pipelining().of(pipeline)
    n, _ = by_stages(pipeline, Mesh())
    without = accumulate(loss_fn, n, dtype=dtype, axes=axes)
    assert not isinstance(pipeline, Pipelining) or isinstance(pipeline, Scheduled), "it has their number"
    several = staged(LossFn(loss_fn, axes, None, n=n), pipeline, dtype)

    @functools.wraps(loss_fn)
    def with_grad(params, batch, *args):
        known = next((x for x in map(tree.layout_of, tree.leaves(params)) if x is not None), None)
        mesh = known.mesh if known is not None else None if axes is None else axes.mesh
        if mesh is None or mesh["pp"] == 1:
            return without(params, batch, *args)
        loss, aux, grads, _ = several(params, batch, args, None)
        return (loss, aux), grads

    return with_grad


def evaluated(loss_fn: Callable, pipeline: Scheduled | Pipeline, axes: Axes | None = None) -> Callable:
    """`f(params, batch) -> (loss, metrics, whether the loss is of the batch)` by the forwards of the stages alone, on a
    mesh with pp: of sums and counts also their means and "NAME/count", as `pipelined` gives them."""
    several = staged(LossFn(loss_fn, axes, None, n=pipeline.microbatches), pipeline, torch.float32, gradient=False)

    def f(params, batch):
        loss, metrics, _, whole = several(params, batch, (), None)
        return loss, metrics, whole

    return f


def staged(of: LossFn, pipeline: Scheduled | Pipeline, dtype: torch.dtype, gradient: bool = True) -> Callable:
    """What `accumulated` is: `f(params, batch, args, scale) -> (loss, aux, grads, whether the loss is of the batch)`,
    on a mesh with pp. gradient: False for the loss alone, without grads."""
    nodes, full = {}, {}
    who = f"pipelined {described(of.loss_fn)}"

    def several(params, batch, args, scale):
        layouts = [layout for layout in map(tree.layout_of, tree.leaves(params)) if layout is not None]
        if not is_tracing() or len(layouts) < len(tree.leaves(params)):
            raise ValueError(
                f"{who}: got {'parameters whose layouts are not known' if is_tracing() else 'a call outside of a jit'},"
                " wanted a jitted step of placed ones; step.jit(train_step, donate=0, world=world), "
                "tree.place(params, layouts)"
            )
        if there := [layout for layout in layouts if layout.on_host]:
            raise ValueError(
                f"{who}: got a parameter in host memory, {there[0]}, wanted those of a pipeline on the device, as its "
                'actions copy none; leave "params" out of memory='
            )
        ranks = layouts[0].mesh["pp"]
        if isinstance(pipeline, Pipeline) and ranks != (table := pipeline.table).ranks:
            raise ValueError(
                f"{who}: got {table.name}, a table of {table.ranks} ranks, on {layouts[0].mesh}, wanted one of {ranks},"
                " the size of pp; make it for this mesh"
            )
        require_parts(batch, pipeline.microbatches)
        leaves, spec = tree.leaves((params, batch, args, scale)), structure.flatten((params, batch, args, scale))[2]
        key = (spec, tuple(signature_of(leaves, labels=True)))
        if key not in nodes:
            nodes[key] = _Node(of, pipeline, (params, batch, args, scale), dtype, gradient, who)
        return nodes[key](params, batch, args, scale, full)

    return several


def _slashed(path: str) -> str:
    """The path of a leaf; of parameters, a batch or gradients that are one tensor, with the empty path of a leaf."""
    return f"{path}/" if path in ("0", "1", GRADS.removesuffix("/")) else path


class _Node:
    """The gradients of a batch of this signature, or its loss alone: traced, cut and made one node."""

    def __init__(
        self,
        of: LossFn,
        pipeline: Scheduled | Pipeline,
        call: tuple,
        dtype: torch.dtype,
        with_gradient: bool,
        who: str,
    ):
        self.with_gradient = with_gradient
        self.of, self.n, self.dtype, self.who = of, pipeline.microbatches, dtype, who
        params, batch, args, scale = call
        layouts = dict(zip(tree.paths(params), tree.leaves(tree.layouts(params)), strict=True))
        self.inner = {path: layout.without("pp") for path, layout in layouts.items()}
        mesh = next(iter(layouts.values())).mesh
        self.axes = axes = Axes(mesh)
        data = (of.axes or axes).data
        self.raw = [raw_gradient_layout(layout, data) for layout in layouts.values()]
        self.whole = self._whole(params)
        name = name_of(of.loss_fn)
        gradient = functools.partial(gradient_of, of)
        self.one = one = OneNode(
            gradient, (self.whole, self._micro(batch)[0], args, scale), name, who, False, stages=True
        )
        mode, self.gives = one.entry.fake_mode, [_slashed(path) for path in one.gives]
        with outside_of_tracing():
            marked = functional(one.entry.graph_module, (one.entry.fakes, []), mode)
            if not with_gradient:
                shown = [i for i, path in enumerate(self.gives) if not path.startswith(GRADS)]
                marked = graph_module_of(marked, with_outputs(marked.graph, shown))
                self.gives = [self.gives[i] for i in shown]
        takes = [*map(_slashed, one.traced.in_paths), *(f"sum {sum_}" for sum_ in one.sums)]
        self.shown = [path for path in self.gives if not path.startswith(GRADS)]
        if isinstance(pipeline, Scheduled):
            pipeline = pipeline.on(mesh["pp"], blocks_of(marked.graph, who))
        table = pipeline.table if with_gradient else forwards(pipeline.table)
        apart = {
            (kind, action.stage)
            for rank, row in enumerate(table.rows)
            for action, kinds in zip(row, table.parts(rank), strict=True)
            for kind in kinds
            if kind[0] in "GR"
        }
        with outside_of_tracing(), mode:
            parts = cut(marked.graph, takes, self.gives, pipeline.stages, who, apart)
        plain = graph_module_of(marked, without_marks(marked.graph))
        self.plain = Entry.make(name, plain, one.entry.fakes, mode)
        fakes = one.entry.fakes
        dtypes = {
            path: torch.promote_types(x.dtype, dtype) if x.dtype.itemsize < dtype.itemsize else x.dtype
            for path, x in zip(layouts, tree.leaves(self.whole), strict=True)
        }
        given = (
            tree.leaves(params),
            self._tensors(batch),
            self._tensors((args, scale)),
            fakes[len(one.traced.fakes) :],
        )
        with outside_of_tracing():
            self.uncut = trace(functools.partial(self._uncut, list(layouts.values()), takes), given, mesh=mesh)
        digest = hashlib.sha256(repr((pipeline, with_gradient, layouts)).encode()).hexdigest()[:8]
        self.entry = PipelineEntry.make(
            f"{name}_pipeline_{digest}", self.uncut.graph_module, self.uncut.fakes, self.uncut.fake_mode
        )
        fakes = self.uncut.fakes
        how = (self.inner, dtypes, axes, data, with_gradient, marked)
        plan = Plan(table, parts, takes, layouts, *how, fakes, mode, name)
        plan.require_placement(who)
        self.entry.plan = self.entry.plan or plan

    def _whole(self, params: Any) -> Any:
        """Parameters like these, with all layers of stacks."""
        with outside_of_tracing(), FakeTensorMode():
            found = [
                labels.labelled(torch.empty(layout.local_shape(0), dtype=x.dtype, device=x.device), layout)
                for x, layout in zip(tree.leaves(params), self.inner.values(), strict=True)
            ]
        return structure.unflatten(structure.flatten(params)[2], found)

    def _micro(self, batch: Any) -> list:
        _, leaves, spec = structure.flatten(batch)
        rows = [cut_rows(x, self.n) if isinstance(x, torch.Tensor) else [x] * self.n for x in leaves]
        return [structure.unflatten(spec, list(parts)) for parts in zip(*rows, strict=True)]

    def _tensors(self, values: Any) -> list[torch.Tensor]:
        return [x for x in tree.leaves(values) if isinstance(x, torch.Tensor)]

    def _uncut(self, layouts: list, takes: list[str], params: list, batch: list, others: list, sums: list) -> list:
        """The same without stages: [metrics of each microbatch, gradients]."""
        inner, data = list(self.inner.values()), (self.of.axes or self.axes).data
        full = resharding.reshard_many(params, layouts, inner, self.axes)
        rows = [cut_rows(x, self.n) for x in batch]
        shown, total = [], None
        for i in range(self.n):
            outs = self.plain([*full, *(x[i] for x in rows), *others, *sums])
            found = dict(zip(self.gives, outs, strict=True))
            shown += [found[path] for path in self.shown]
            grads = [widened(x, self.dtype) for path, x in found.items() if path.startswith(GRADS)]
            total = grads if total is None else list(map(torch.add, total, grads))
        if not self.with_gradient:
            return shown
        assert total is not None, "a batch has microbatches"
        have = [raw_gradient_layout(x, data).replace(dtype=g.dtype) for x, g in zip(inner, total, strict=True)]
        want = [raw_gradient_layout(x, data).replace(dtype=g.dtype) for x, g in zip(layouts, total, strict=True)]
        return [*shown, *resharding.reshard_many(total, have, want, self.axes)]

    def __call__(self, params, batch, args, scale, full: dict) -> tuple[Any, Any, Any, bool]:
        sums, one, one_gives = {}, self.one, list(map(_slashed, self.one.gives))
        calls = [(params, rows, args, scale) for rows in self._micro(batch)]
        if one.counts is not None:
            early = [one.before(call) for call in calls]
            sums = summed([found.before for found in early], self.of.axes_of(params), early[0].lines)
        given = [sums[name] for name in one.sums]
        outs = self.entry([*self._tensors((params, batch, args, scale)), *given])
        count = len(self.shown)
        grads = outs[self.n * count :]
        found = []
        for i in range(self.n):
            shown = dict(zip(self.shown, outs[i * count : (i + 1) * count], strict=True))
            rest = iter(grads)
            found.append(one.result([shown.get(path) if path in shown else next(rest, None) for path in one_gives]))
        for gradient in found:
            if not gradient.shown and weight_of(gradient.loss, gradient.aux, None) is not None:
                raise ValueError(
                    f"{self.who}: got a scalar loss with 'tokens' beside it, by which microbatches would be weighed, "
                    "wanted sums and counts, whose counts are known before the first backward; return "
                    "step.mean(total, count)"
                )
        nested = structure.flatten(params)[2]
        given = Batch((self.whole, batch, *args), sums, full)
        total = structure.unflatten(nested, grads) if self.with_gradient else {}
        loss, aux, total, whole = of_microbatches(
            self.of, given, found, [None] * self.n, total, weight=None, dtype=self.dtype
        )
        if not self.with_gradient:
            return loss, aux, {}, whole
        pairs = zip(tree.leaves(total), self.raw, strict=True)
        known = [labels.labelled(g, layout.replace(dtype=g.dtype)) for g, layout in pairs]
        return loss, aux, structure.unflatten(nested, known), whole
