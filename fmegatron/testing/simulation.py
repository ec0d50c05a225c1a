"""Simulated ranks: traces a step once, runs its graph for every rank in one process, and joins the results.

    axes = Axes(mesh)                                         # symbolic: no process group behind them
    sim = simulate(step, mesh, state, batch, layouts=(state_layouts, batch_layouts))
    sim.metrics["loss"]; sim.gather("0/params/head/w")        # global arrays; replicas were compared

The same step runs on real ranks unchanged. What is simulated is bit for bit what gloo ranks compute, up to the order
of additions in sums over more than two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fmegatron import tree
from fmegatron.layout import Layout, Mesh
from fmegatron.step import batch_rows, every_rank, opaque, second_device, trace, tracing, widen
from fmegatron.step.pipeline import entry
from fmegatron.testing.relate import numbers
from fmegatron.tree import checks, labels, structure

__all__ = ["Ranks", "Simulation", "join", "simulate", "split"]


class Ranks(list):
    """One tree of local tensors per rank of a mesh, in rank order; what `split` returns and `join` takes."""


# ---- global <-> local ------------------------------------------------------------------------------------------------
def split(values: structure.Tree, layouts: structure.Tree, mesh: Mesh | None = None) -> Ranks:
    """Cut a tree of global arrays into each rank's local tensors.

    Each knows its layout (`tree.layout_of`).
    layouts: the twin tree of Layouts (or of ArraySpecs); None for values that every rank of `mesh` holds in full. Ranks
    that hold the same boxes share one tensor. A pending sum is cut into unequal terms that add up to the value.
    Raises ValueError naming the path where the structures or shapes disagree.
    """
    return _split(values, layouts, mesh, "split: the value")


def _split(values, layouts, mesh, name) -> Ranks:
    paths, leaves, spec = structure.flatten(values)
    for path, x in zip(paths, leaves, strict=True):
        if not isinstance(x, torch.Tensor):
            raise ValueError(
                f"{name}: {path or 'its value'}: got {structure.in_words(x)}, wanted a tensor; make it one with "
                "torch.as_tensor, or bind a constant with functools.partial"
            )
    layouts = _layouts_of(paths, leaves, layouts, mesh, name)
    if mesh is None and not layouts:
        raise ValueError("split: got a tree without arrays, wanted mesh= with it")
    mesh = mesh or layouts[0].mesh
    local = [_split_leaf(f"{name}: {path}", *item) for path, *item in zip(paths, leaves, layouts, strict=True)]
    for of_ranks, layout in zip(local, layouts, strict=True):
        for x in of_ranks:
            labels.labelled(x, layout)
    return Ranks(structure.unflatten(spec, [ranks[r] for ranks in local]) for r in range(mesh.size))


def join(ranks: list, layouts: structure.Tree, mesh: Mesh | None = None, *, tolerance: float = 0.0) -> structure.Tree:
    """Put each rank's local tensors together to the tree of global arrays; the inverse of `split`.

    layouts: as for `split`; None where all ranks must hold the same. Pending sums are added up. Raises ValueError
    naming path and ranks where two replicas of a box differ by more than `tolerance` relative to the larger magnitude
    (default: by a single bit), or a local shape is not that of the layout.
    """
    flat = [structure.flatten(local) for local in ranks]
    paths, leaves, spec = flat[0]
    layouts = _layouts_of(paths, leaves, layouts, mesh, "join: the value", local=len(ranks))
    out = []
    for i, (path, layout) in enumerate(zip(paths, layouts, strict=True)):
        out.append(_join_leaf(path, [f[1][i] for f in flat], layout, tolerance))
    return structure.unflatten(spec, out)


def _layouts_of(paths, leaves, layouts, mesh, name, local=None):
    """One Layout per leaf; `None` in place of a tree means replicated."""
    if layouts is None:
        mesh = mesh or Mesh(rank=local or 1)
        return [Layout(tuple(x.shape), x.dtype, mesh) for x in leaves]
    got_paths, got, _ = structure.flatten(layouts)
    if got_paths != paths:
        difference = structure.structure_difference(dict.fromkeys(paths, 0), dict.fromkeys(got_paths, 0))
        raise ValueError(
            f"{name}: got another structure than that of its layouts, wanted the same; give one layout per array, and "
            f"None in place of a tree that all ranks hold:\n{difference}"
        )
    return [getattr(item, "layout", item) for item in got]


def _split_leaf(path, x, layout):
    if tuple(x.shape) != tuple(layout.shape):
        raise ValueError(
            f"{path}: got global shape {tuple(x.shape)}, wanted {tuple(layout.shape)} of {layout}; pass the full "
            "array, or per-rank trees as testing.Ranks"
        )
    weights, made, out = _terms(layout, x), {}, []
    for rank in range(layout.mesh.size):
        part = layout.mesh.index(rank, layout.unreduced) if layout.unreduced else 0
        key = (layout.boxes(rank), layout.local_shape(rank), part)
        if key not in made:
            made[key] = _local(x, layout, rank, key[0])
            if layout.unreduced:
                made[key] = weights[part](made[key])
        out.append(made[key])
    return out


def _local(x, layout, rank, boxes):
    make = torch.zeros if layout.padded else torch.empty
    local = make(layout.local_shape(rank), dtype=x.dtype, device=x.device)
    for box in boxes:
        box.view(local).copy_(x[box.slices])
    return local


def _terms(layout, x):
    """Per position along the pending axes, what share of the value is there; the shares are exact and unequal."""
    n = 1
    for axis in layout.unreduced:
        n *= layout.mesh[axis]
    if not x.is_floating_point():
        return [lambda v, i=i: v if i == 0 else torch.zeros_like(v) for i in range(n)]
    # 1/2, 1/4, ... with the rest at position 0: powers of two, so nothing is rounded
    shares = [2.0 ** -(i + 1) for i in range(n)]
    shares[0] += shares[-1]
    return [lambda v, s=share: v * s for share in shares] if n > 1 else [lambda v: v]


def _join_leaf(path, locals_, layout, tolerance):
    first = locals_[0]
    out = torch.zeros(layout.shape, dtype=first.dtype, device=first.device)
    held = {}  # (boxes, position along the pending axes) -> first rank that holds them, its tensor
    for rank, local in enumerate(locals_):
        if tuple(local.shape) != tuple(layout.local_shape(rank)):
            raise ValueError(
                f"{path}: got local shape {tuple(local.shape)} on rank {rank}, wanted "
                f"{tuple(layout.local_shape(rank))}, that of its layout {layout}"
            )
        boxes = layout.boxes(rank)
        part = layout.mesh.index(rank, layout.unreduced) if layout.unreduced else 0
        other, theirs = held.setdefault((boxes, part), (rank, local))
        both = (theirs, local)
        if layout.padded:  # padding is no element, and may differ
            both = (_true(theirs, boxes), _true(local, boxes))
        if theirs is not local and (worst := _disagreement(*both)) > tolerance:
            raise ValueError(
                f"{path}: got values of {layout} on ranks {other} and {rank} that differ by {worst:.1e} relative, "
                f"wanted the same; a sum over {_between(layout.mesh, other, rank)} is missing, or one rank did other "
                "work"
            )
    for (boxes, _), (_, local) in held.items():
        local = local.contiguous()
        for box in boxes:
            if layout.unreduced:
                out[box.slices] += box.view(local)
            else:
                out[box.slices] = box.view(local)
    return out


def _true(x, boxes):
    """The elements of a local tensor that are no padding, in a row."""
    x = x.contiguous()
    return torch.cat([x.new_zeros(0), *(box.view(x).reshape(-1) for box in boxes)])


def _disagreement(a, b):
    a, b = numbers(a), numbers(b)
    if a.numel() == 0 or a.dtype == b.dtype and torch.equal(a, b):
        return 0.0
    difference = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"))
    difference[a.isnan() & b.isnan()] = 0.0
    largest = torch.maximum(a.double().abs(), b.double().abs()).nan_to_num(nan=0.0, posinf=0.0).clamp_min(1e-300)
    return float((difference / largest).max())


def _between(mesh, a, b):
    here, there = mesh.coordinates(a), mesh.coordinates(b)
    return "+".join(name for name in mesh.names if here[name] != there[name])


# ---- simulate --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Simulation:
    """What the ranks computed in one call of a step.

    outputs: Ranks, each rank's result as the step returned it. layouts: flat list, one Layout per tensor leaf of the
    result. traced: the one graph that all ranks ran; flat: the same with its layers inlined. on_second_device: why the
    step fails where its arguments are on another device than the CPU, with the line, "" if it does not. `again` runs it
    on other values.
    """

    mesh: Mesh
    traced: tracing.Traced = field(repr=False)
    flat: fx.Graph = field(repr=False)
    outputs: Ranks = field(repr=False)
    layouts: list[Layout] = field(repr=False)
    inputs: list[list[torch.Tensor]] = field(repr=False)
    arg_layouts: tuple = field(repr=False)
    out_layouts: Any = field(repr=False, default=None)
    fp64: bool = False
    on_second_device: str = ""

    @property
    def paths(self) -> list[str]:
        """Names of the tensor leaves of the result, e.g. "0/params/head/w", "1/loss"."""
        return self.traced.out_paths

    def gather(self, path: str) -> torch.Tensor:
        """The global array of one leaf of the result. ValueError if replicas differ, or there is no such path."""
        if path not in self.paths:
            raise ValueError(
                f"gather: got path {path!r}, wanted one that the step returned: {', '.join(map(repr, self.paths))}"
                f"{structure.did_you_mean(path, self.paths)}"
            )
        i = self.paths.index(path)
        return _join_leaf(path, [_tensors(local)[i] for local in self.outputs], self.layouts[i], 0.0)

    def globals(self) -> structure.Tree:
        """The full result with global arrays in place of the ranks' parts; replicas are compared."""
        return self.traced.result([self.gather(path) for path in self.paths])

    @property
    def metrics(self) -> dict[str, float]:
        """The last item of the step's result as Python numbers (a step returns `(state, metrics)`)."""
        if not isinstance(self.outputs[0], tuple | list) or not self.outputs[0]:
            raise ValueError(
                f"metrics: got {structure.in_words(self.outputs[0])} as the step's result, wanted (state, metrics); "
                "gather(path) and globals() read any result"
            )
        last = [out[-1] for out in self.outputs]
        layouts = self.layouts[len(self.layouts) - len(_tensors(last[0])) :]
        paths, leaves, spec = structure.flatten(last[0])
        at = iter(zip(self.paths[len(self.paths) - len(layouts) :], layouts, strict=True))
        flat = [tree.leaves(one) for one in last]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                path, layout = next(at)
                leaves[i] = _join_leaf(path, [one[i] for one in flat], layout, 0.0).item()
        return structure.unflatten(spec, leaves)

    def again(self, *args: Any) -> Simulation:
        """Run the same graph on other arguments: global trees, or `Ranks` (`Ranks(o[0] for o in sim.outputs)`)."""
        ranks = _per_rank(args, self.arg_layouts, self.mesh)
        inputs = _flat_inputs(ranks, self.mesh)
        want = [tuple(f.shape) for f in self.traced.fakes]
        got = [tuple(xs[0].shape) for xs in inputs]
        if want != got:
            raise ValueError(
                f"again: got local shapes {got}, wanted {want}, for which the step was traced; call simulate again"
            )
        how = (self.arg_layouts, self.out_layouts, self.fp64, self.layouts)
        ran = _run(self.traced, self.flat, self.mesh, inputs, *how)
        return replace(ran, on_second_device=self.on_second_device)


def simulate(
    step: Callable,
    mesh: Mesh,
    *args: Any,
    layouts: tuple | None = None,
    out_layouts: structure.Tree = None,
    fp64: bool = False,
) -> Simulation:
    """Run `step(*args)` on every rank of `mesh`, in this process, and return a `Simulation`.

    Args:
        step: a pure function whose collectives work over symbolic axes (`Axes(mesh)`); it is traced once, on rank 0's
            local shapes.
        mesh: of the ranks.
        args: one tree each, of global arrays (which are split by `layouts`) or `Ranks` of local trees.
        layouts: per argument the tree of its Layouts, or None for an argument that every rank holds in full.
        out_layouts: the layouts of the result, same structure, None for replicated parts. Left out: an item of the
            result (or the result itself) that has the structure and local shapes of an argument has that argument's
            layouts, everything else must be the same on all ranks: right for `(state, batch) -> (state, metrics)`.
        fp64: whether all floating-point arithmetic is done in torch.float64, whatever the dtypes of the step and of its
            arguments; results are then the same on all meshes to about 1e-12. Arguments with layouts may be in
            torch.float64 too, as another simulation's results are: the step is that of the dtypes of the layouts.

    Raises ValueError where trees, layouts and mesh do not fit, or ranks have different local shapes; and for a batch
    that a step cuts into microbatches, where the layout assigns its rows in another way than
    `DataParallel.batch_layout(..., microbatches)` (`Ranks` without a layout are taken as they are).

    >>> from fmegatron.collectives import Axes, psum
    >>> from fmegatron.layout import Layout, Mesh
    >>> mesh = Mesh(dp=4)
    >>> dp = Axes(mesh)["dp"]
    >>> x = torch.arange(8.0)
    >>> sim = simulate(lambda x: psum(x.sum(), dp), mesh, x, layouts=(Layout((8,), x.dtype, mesh, ("dp",)),))
    >>> sim.globals(), len(sim.outputs)
    (tensor(28.), 4)
    """
    if not (layouts is None or isinstance(layouts, tuple | list)):
        raise ValueError(
            f"simulate: layouts: got {structure.in_words(layouts)}, wanted a tuple of one tree per argument"
        )
    layouts = (None,) * len(args) if layouts is None else tuple(layouts)
    if len(layouts) != len(args):
        raise ValueError(
            f"simulate: got {len(layouts)} trees of layouts, wanted {len(args)}, one per argument; None: replicated"
        )
    for i, one in enumerate((*layouts, out_layouts)):
        of = f"simulate: {f'layouts[{i}]' if i < len(layouts) else 'out_layouts'}"
        checks.require_mesh([x for x in tree.leaves(one) if x is not None], mesh, of, "the ranks")
    ranks = _per_rank(args, layouts, mesh)
    given = tuple(_known(arg[0], of, fp64) for arg, of in zip(ranks, layouts, strict=True))
    traced = trace(step, given, mesh=mesh)
    batch_rows.require_rows(traced, _input_layouts(ranks, layouts), "simulate: the arguments")
    fault = second_device.on_second_device(traced, step, given) if mesh.size > 1 else None
    other = "" if fault is None else f"{fault[0]}: made without a device; on a second device {fault[1]}"
    traced = widen.widened(traced) if fp64 else traced
    flat = opaque.inline_layers(traced.graph_module.graph, lambda one: not isinstance(one, entry.PipelineEntry))
    ran = _run(traced, flat, mesh, _flat_inputs(ranks, mesh), layouts, out_layouts, fp64)
    return replace(ran, on_second_device=other)


def _per_rank(args, layouts, mesh):
    out = []
    for i, (arg, wanted) in enumerate(zip(args, layouts, strict=True)):
        ranks = arg if isinstance(arg, Ranks) else _split(arg, wanted, mesh, f"simulate: argument {i}")
        if len(ranks) != mesh.size:
            raise ValueError(
                f"simulate: argument {i}: got trees for {len(ranks)} ranks, wanted {mesh.size}, one per rank of {mesh}"
            )
        out.append(ranks)
    return out


def _known(local, layouts, fp64):
    """One rank's part of an argument as a step is traced with it: it knows its layouts, and has their dtypes."""
    known = _by_path(layouts)

    def one(path, x):
        layout = known.get(path)
        if layout is None or not isinstance(x, torch.Tensor):
            return x
        own = x.detach()
        return labels.labelled(own.to(layout.dtype) if fp64 and own.is_floating_point() else own, layout)

    return structure.map_with_path(one, local)


def _by_path(layouts):
    """{path: Layout} of a tree of Layouts or specs, or of None."""
    found = zip(tree.paths(layouts), tree.leaves(layouts), strict=True) if layouts is not None else ()
    return {path: getattr(item, "layout", item) for path, item in found}


def _input_layouts(ranks, layouts):
    """The layout of each tensor of the arguments, None of those that have none."""
    found = []
    for local, wanted in zip(ranks, layouts, strict=True):
        known = _by_path(wanted)
        for path, leaf in zip(*structure.flatten(local[0])[:2], strict=True):
            if isinstance(leaf, torch.Tensor):
                found.append(known.get(path))
    return found


def _tensors(values):
    return [x for x in tree.leaves(values) if isinstance(x, torch.Tensor)]


def _flat_inputs(ranks, mesh):
    """Per tensor leaf of the arguments, the list of its values on the ranks."""
    flat = [[x for arg in ranks for x in _tensors(arg[rank])] for rank in range(mesh.size)]
    inputs = [list(values) for values in zip(*flat, strict=True)]
    for i, values in enumerate(inputs):
        if len({tuple(v.shape) for v in values}) > 1:
            path = tree.paths(tuple(arg[0] for arg in ranks))[i]
            raise ValueError(
                f"simulate: argument {path}: got local shapes {sorted({tuple(v.shape) for v in values})}, wanted one "
                "shape on all ranks, which have one graph; choose sizes that divide evenly"
            )
    return inputs


def _run(traced, flat, mesh, inputs, arg_layouts, out_layouts, fp64, flat_layouts=None):
    inputs = [widen.wide_column(column) for column in inputs] if fp64 else inputs
    values, _ = every_rank.interpret(flat, mesh, inputs)
    outputs = Ranks(traced.result([xs[rank] for xs in values]) for rank in range(mesh.size))
    if flat_layouts is None:
        flat_layouts = infer_out_layouts(traced, outputs[0], mesh, arg_layouts, out_layouts)
    return Simulation(mesh, traced, flat, outputs, flat_layouts, inputs, arg_layouts, out_layouts, fp64)


def infer_out_layouts(
    traced: tracing.Traced, result: Any, mesh: Mesh, arg_layouts: tuple, out_layouts: Any
) -> list[Layout]:
    """One Layout per tensor leaf of a step's result: what `simulate` documents for its argument out_layouts."""
    if out_layouts is None:
        pieces = list(result) if type(result) is tuple else [result]
        found = [_like_an_argument(piece, arg_layouts) for piece in pieces]
        out_layouts = tuple(found) if type(result) is tuple else found[0]
    pieces = zip(result, out_layouts, strict=True) if type(result) is tuple else [(result, out_layouts)]
    flat = []
    for piece, wanted in pieces:
        tensors = [(p, x) for p, x in zip(*structure.flatten(piece)[:2], strict=True) if isinstance(x, torch.Tensor)]
        flat += _layouts_of([p for p, _ in tensors], [x for _, x in tensors], wanted, mesh, "simulate: the result")
    return flat


def _like_an_argument(piece, arg_layouts):
    paths, leaves, _ = structure.flatten(piece)
    for layouts in arg_layouts:
        if layouts is None or not paths:
            continue
        names, items, _ = structure.flatten(layouts)
        items = [getattr(item, "layout", item) for item in items]
        if names == paths and all(
            isinstance(x, torch.Tensor) and tuple(x.shape) == tuple(item.local_shape(0))
            for x, item in zip(leaves, items, strict=True)
        ):
            return layouts
    return None
