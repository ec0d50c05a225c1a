"""Layers of a model, compiled once and used many times, with a policy of what is saved for the backward.

The layer's joint graph (outputs, then gradients) is traced once and cut in two by a policy; each half becomes
one opaque node (`fmegatron.step.opaque`). Recomputing is then right by construction: the backward is one node that
takes the gradient as an input, so no pass can merge the recomputation into the forward.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fmegatron import nn, tree
from fmegatron.collectives import Axes, Precision, known_ranks
from fmegatron.collectives.wires import Wire
from fmegatron.layout import Layout
from fmegatron.nn.first_gradient import first_only
from fmegatron.step.ambient import ambient
from fmegatron.step.graph.nodes import meta_of
from fmegatron.step.offload import from_host, is_worth_moving, to_host
from fmegatron.step.opaque import Entry
from fmegatron.step.partition import Partition, Policy, has_gradient, joint_graph, partition, require_policy
from fmegatron.step.pipeline import marks
from fmegatron.step.torch_private import outside_of_tracing
from fmegatron.step.tracing import described, line_here
from fmegatron.step.watched import Watched, Watching
from fmegatron.tree import structure

__all__ = ["Stack", "compiled_layer", "layer_layout", "layer_of", "layers", "remat", "unstack"]


# ---- a stack of layers -----------------------------------------------------------------------------------------------
def layers(
    block: Callable,
    params: structure.Tree,
    layouts: structure.Tree,
    axes: Axes,
    save: Policy | None = "mincut",
    *,
    precision: Precision | None = None,
    offload: int | None = None,
    reshard_after_forward: bool = True,
) -> Callable:
    """`run(x, *rest, **named) -> x`: a block applied once for each layer of a stack, as a pure function.

    Of a block that returns (x, more) it is `run(x, ...) -> (x, [more of each layer])`: more is a tree of tensors, such
    as a share of an auxiliary loss, and counts.

    `layers(block, params["blocks"], layouts["blocks"], axes)(x)` is `for w in stack: x = block(x, w)`, where w is one
    layer's weights, whole over the data axes: one all_gather for all its leaves before it runs, the transpose (one
    reduce_scatter of all gradients) in its backward. The block is compiled once, however many layers there are. Each
    layer is a block at which a stage of a pipeline may begin (`step.stage`).

    Args:
        block: block(x, weights, *rest, **named) -> x, or (x, more): a pure function of tensors; constants (a config, an
            axis) by functools.partial. rest and named: trees of tensors, the same for all layers, to which no gradient
            flows.
        params: tree of stacked tensors [L, ...], this rank's shards; `nn.Scaled` ones where they travel in 8 bits. Only
            of those that need a gradient (`requires_grad`) one is made and reduced.
        layouts: of the stacked tensors; dim 0 is not split.
        axes: Axes(mesh); weights are gathered over `axes.data`, and what tp splits stays split.
        save: what a layer keeps for its backward, see `compiled_layer`. None: the block is not compiled by itself; its
            ops are part of the graph around it, and everything that their backward reads is kept.
        precision: in which dtypes weights are gathered, used and their gradients reduced (`Precision.wires`); None: as
            they are.
        offload: bytes from which on what is kept waits in host memory, see `compiled_layer`.
        reshard_after_forward: whether the gathered weights of a layer are freed after it, and gathered again for its
            backward (ZeRO-3). False: gathered once and kept until the backward.

    Raises ValueError, naming the leaf, for a stack whose leaves differ in L, for a layout of another mesh, or one that
    splits dim 0, and for a block that returns something else.
    """
    axes.require(layouts, "layers")
    of_one = structure.map_with_path(_of_one_layer, layouts)
    wires = Wire() if precision is None else precision.wires(of_one)
    how = {"layouts": of_one, "axis": axes[axes.data], "wire": wires, "reshard_after_forward": reshard_after_forward}
    gather = functools.partial(nn.gather_tree, **how)
    ready = layer_of(block, gather, save, offload, reshard_after_forward)

    def run(x: Any, *rest: Any, **named: Any) -> Any:
        others = []
        for layer, weights in map(ready, unstack(params)):
            x = layer(marks.next_stage(x), weights, *rest, **named)
            if isinstance(x, tuple) and len(x) == 2:
                x, more = x
                others.append(more)
            if not isinstance(x, torch.Tensor):
                raise ValueError(
                    f"layers: the block {described(block)} returned {structure.in_words(x)}: got no tensor that the "
                    "next layer could take, wanted x or (x, more); put all else into one tree beside it"
                )
        return (x, others) if others else x

    return run


def layer_of(
    block: Callable, gather: Callable, save: Policy | None, offload: int | None, reshard_after_forward: bool
) -> Callable[[Any], tuple[Callable, Any]]:
    """shards of one layer -> (run, weights), for `run(x, weights, *rest)`: a block, compiled once for all its layers.

    gather: shards -> weights as the block takes them. The other arguments are those of `layers`. A layer that is
    compiled and frees its weights gathers them itself, and again for its backward.
    """
    if save is None:
        return lambda shards: (block, gather(shards))
    layer = compiled_layer(save, offload=offload)(block, gather if reshard_after_forward else None)
    return lambda shards: (layer, shards if reshard_after_forward else gather(shards))


def layer_layout(layout: Layout) -> Layout:
    """Layout of one layer of a stacked leaf: `[L, ...] -> [...]`. ValueError where dim 0 is split.

    A loss that is cut into stages is traced with the layers of all of them: pp, which splits them at rest, does not.
    """
    return _of_one_layer("layer_layout", layout)


def _of_one_layer(path: str, layout: Layout) -> Layout:
    layout = layout if known_ranks.recorded_stages() is None else layout.without("pp")
    if not layout.shape or layout.axes(0) or (layout.flat and not layout.flat_from):
        by_stages = "evaluate as the step does, with the `evaluate` of the value that `step.build` gives"
        fix = by_stages if layout.shape and layout.axes(0) == ("pp",) else "name the axis on another dim"
        raise ValueError(f"{path}: got {layout}, wanted a stack [L, ...] whose dim 0 is not split; {fix}")
    how = {"flat": layout.flat, "flat_from": max(0, layout.flat_from - 1), "padded": layout.padded}
    how |= {"lead": max(0, layout.lead - 1), "beside": layout.beside}
    return Layout(layout.shape[1:], layout.dtype, layout.mesh, layout.spec[1:], **how)


def unstack(stacked: structure.Tree) -> list:
    """The layers of a tree of stacked leaves, one `unbind` per leaf: its transpose is one stack, not L padded sums.

    A `Stack`, in the place of a leaf too, has those that it gives in turn.

    Raises ValueError, naming the path, for a leaf that has no layers, and where leaves differ in their number.
    """
    paths, leaves, spec = structure.flatten(stacked)
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Stack) and not (isinstance(leaf, torch.Tensor) and leaf.dim()):
            raise ValueError(
                f"unstack: {path!r}: got {structure.in_words(leaf)}, wanted a stack of layers [L, ...]; leave out of "
                "the tree what is no stack"
            )
    counts = {
        path: len(leaf) if isinstance(leaf, Stack) else leaf.shape[0] for path, leaf in zip(paths, leaves, strict=True)
    }
    if len(set(counts.values())) != 1:
        raise ValueError(f"unstack: got layers (dim 0) {counts or 'of no leaf'}, wanted the same number in each leaf")
    each = [list(leaf) if isinstance(leaf, Stack) else leaf.unbind(0) for leaf in leaves]
    return [structure.unflatten(spec, list(layer)) for layer in zip(*each, strict=True)]


@dataclass(frozen=True)
class Stack:
    """The weights of equal layers, arrays [L, ...], of which a rank holds a part of each layer.

    `for w in stack: x = block(x, w)` has those of one layer after the other, whole over the data axes; where they are
    gathered says the step (`step.regather`). `stack.run(block, x)` computes the same with the block compiled once.
    """

    shards: structure.Tree = field(repr=False)
    layouts: structure.Tree
    axes: Axes = field(repr=False)
    precision: Precision | None = None
    reshard_after_forward: bool = True

    def run(
        self,
        block: Callable,
        x: Any,
        *rest: Any,
        save: Policy | None = "mincut",
        offload: int | None = None,
        **named: Any,
    ) -> Any:
        """block(x, weights, *rest, **named) of each layer in turn, as `step.layers`.

        Args:
            block: a pure function of tensors, that returns x or (x, more).
            x: a tensor.
            *rest: trees of tensors, the same for all layers, to which no gradient flows.
            save: what a layer keeps for its backward (`step.compiled_layer`).
            offload: bytes from which on it waits in host memory.
            **named: as rest.
        """
        how = {"precision": self.precision, "offload": offload, "reshard_after_forward": self.reshard_after_forward}
        return layers(block, self.shards, self.layouts, self.axes, save, **how)(x, *rest, **named)

    def __len__(self) -> int:
        return tree.leaves(self.layouts)[0].shape[0]

    def __getitem__(self, index: Any) -> Any:
        """ValueError that names the user's line: an index per layer gathers each time, and there is no whole stack."""
        raise ValueError(self._instead_of(f"[{index!r}]"))

    def __getattr__(self, name: str) -> Any:
        """AttributeError with the same words: a stack is neither a dict of arrays nor one array."""
        if name.startswith("__"):  # Python's own protocols ask for them, of what is not built yet too
            raise AttributeError(name)
        raise AttributeError(self._instead_of(f".{name}"))

    def _instead_of(self, got: str) -> str:
        return (
            f"{line_here()}: got {got} of a stack of {len(self)} layers, wanted the layers in turn, each with "
            "its names: `for w in stack: x = block(x, w)`, or stack.run(block, x), which compiles the block once; "
            "one's own order is that of list(stack)"
        )

    def __iter__(self) -> Iterator[structure.Tree]:
        of_one = tree.map(layer_layout, self.layouts)
        wire = Wire() if self.precision is None else self.precision.wires(of_one)
        for shards in unstack(self.shards):
            yield nn.gather_tree(shards, of_one, self.axes[self.axes.data], wire, self.reshard_after_forward)


# ---- one layer -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Halves:
    """The two entries of a layer at given shapes, how the caller's tensors go in and how the results are nested."""

    parts: Partition
    spec: Any
    forward: Entry
    backward: Entry
    read: Watched


@dataclass(frozen=True, repr=False)
class CompiledLayer:
    """What `compiled_layer(...)(fn, prepare)` returns: call it like the function.

    watching: what its traces have read. halves: (structure, shapes) -> the compiled pair.
    """

    fn: Callable
    prepare: Callable | None
    save: Policy
    offload: int | None
    name: str
    watching: Watching = field(compare=False)
    halves: dict[Any, _Halves] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        return f"compiled_layer({self.name})"

    def __call__(self, x: torch.Tensor, shards: Any, /, *rest: Any, **named: Any) -> Any:
        """What fn returns, differentiable in x and shards (`compiled_layer`)."""
        _require_tensors(self.fn, x, shards, (rest, named))
        weights, trained = self._weights(x, shards)
        inputs = (x, weights, rest, named)
        key = (structure.flatten(inputs)[2], tuple(map(meta_of, tree.leaves(inputs))), trained, ambient())
        known = self.halves.get(key)
        if known is None or known.read.changed() is not None:
            seen = self.watching.begin()
            with outside_of_tracing():
                with joint_graph(inputs, f"layer {described(self.fn)}", trained, seen) as call:
                    given, of, others, by_name = call.given
                    call.result = self.fn(given, of, *others, **by_name)
            self.halves[key] = _cut(call.joint, self.save, self.name, self.watching.end(seen))
        else:
            known.read.noted_around()
        specs = tuple(structure.flatten(given)[2] for given in (shards, (rest, named)))
        pair, leaves = self.halves[key], (*tree.leaves(shards), *tree.leaves(inputs[2:]))
        return structure.unflatten(pair.spec, list(_Layer.apply(self, pair, tree.leaves(weights), specs, x, *leaves)))

    def _weights(self, x: torch.Tensor, shards: Any) -> tuple[Any, tuple[bool, ...]]:
        """(the weights, for each leaf whether a gradient of it is made).

        Where nothing asks for a gradient, as in an evaluation, those of all are in the pair, which is then the one of
        training. That of x always is: the first of several layers shares the pair of the others.
        """
        with torch.enable_grad():  # autograd knows which of the prepared weights depend on a trained shard
            weights = shards if self.prepare is None else self.prepare(shards)
        asked = x.requires_grad or any(t.requires_grad for t in tree.leaves(shards))
        trained = tuple(w.requires_grad if asked else has_gradient(w) for w in tree.leaves(weights))
        return weights, trained


def compiled_layer(save: Policy = "mincut", label: str | None = None, offload: int | None = None) -> Callable:
    """A transformer of layers: `layer(fn, prepare=None) -> g(x, shards, *rest, **named)`, differentiable in x, shards.

    fn(x, weights, *rest, **named) -> y: a pure function; x a tensor, y a tensor or a tree of them (gradients flow from
    all that have one: not from whole numbers and what is detached), weights, rest and named trees of tensors (no
    gradient flows to the last two: ValueError for a tensor there that needs one). prepare(shards) -> weights: runs
    outside of the opaque node, once before the forward and again before the backward, so gathered weights live only
    while a layer runs (ZeRO-3); its collectives stay visible in the step's graph, and its transpose (the
    reduce-scatter) is applied to the gradients. None: the shards are the weights.
    Gradients are made and reduced of the shards that need one (`requires_grad`) alone: those of a frozen base cost
    nothing.
    y has memory of its own, also where fn returns an argument, a view, or a value that the backward reads (one copy);
    it has no gradient where fn's has none. With `offload`, what reads the first tensor of y runs after the copies.
    Gradients of gradients are refused: ValueError in the second backward.

    save: what the forward keeps for the backward.
      "mincut"    what AOTAutograd's min-cut partitioner chooses, as torch.compile would
      "inputs"    only inputs: everything is computed again (rematerialization)
      "all"       every value that the backward reads
      0.0 to 1.0  min-cut under that share of the activation memory
      callable    node -> bool, picks among "all"
    offload: what is kept besides weights goes to host memory and comes back for the backward, each value of at least
    so many bytes (`step.offload`); 0: all, so that a layer keeps nothing on its device. None: nothing is moved.
    Equal layers share one compiled pair, however many there are. `layers` runs a whole stack of them.
    """
    require_policy(save)
    if offload is not None and (isinstance(offload, bool) or not isinstance(offload, int) or offload < 0):
        raise ValueError(f"compiled_layer: got offload={offload!r}, wanted bytes, such as 1 << 20, or None")
    return functools.partial(_of_function, save, label, offload)


def _of_function(save, label, offload, fn: Callable, prepare: Callable | None = None, *others) -> CompiledLayer:
    if not callable(fn) or others:
        raise ValueError(
            f"compiled_layer: got {structure.in_words(fn)}, wanted a function fn(x, weights, *rest) -> y; the layer of "
            "a function is compiled_layer(save=...)(fn), and is called with (x, weights, *rest)"
        )
    name = label or getattr(getattr(fn, "func", fn), "__name__", "layer")
    return CompiledLayer(fn, prepare, save, offload, name, Watching(fn, name))


def remat(fn: Callable, prepare: Callable | None = None, save: Policy = "inputs") -> Callable:
    """`fn(x, weights, *rest) -> y` that keeps only what `save` states and computes the rest again in the backward."""
    return compiled_layer(save)(fn, prepare)


def _require_tensors(fn: Callable, x: Any, shards: Any, rest: Any) -> None:
    """ValueError, naming the argument, for what is no tensor, and for a gradient that would have nowhere to go."""
    shard_paths, shard_leaves, _ = structure.flatten(shards)
    for path, t in [("x", x), *((f"shards {p!r}", t) for p, t in zip(shard_paths, shard_leaves, strict=True))]:
        if not isinstance(t, torch.Tensor):
            raise ValueError(
                f"layer {described(fn)}: {path}: got {structure.in_words(t)}, wanted a tensor; give fn its constants "
                "with functools.partial, and other arrays behind the shards"
            )
    for path, t in zip(*structure.flatten(rest)[:2], strict=True):
        if not isinstance(t, torch.Tensor) or t.requires_grad:
            got = "a tensor that needs a gradient" if isinstance(t, torch.Tensor) else structure.in_words(t)
            raise ValueError(
                f"layer {described(fn)}: argument {path[2:]!r} after the shards: got {got}, wanted a tensor without a "
                "gradient; make what needs one part of the shards, or detach it; bind what is no tensor with "
                "functools.partial"
            )


def _cut(joint: Any, save: Policy, name: str, read: Watched) -> _Halves:
    parts = partition(joint, save)
    forward = Entry.make(f"{name}_fwd", parts.forward, parts.forward_fakes, joint.fake_mode)
    backward = Entry.make(f"{name}_bwd", parts.backward, parts.backward_fakes, joint.fake_mode)
    if parts.differentiable[:1] == [0]:
        backward.gradients = len(parts.taken)
    return _Halves(parts, joint.spec, forward, backward, read)


class _Layer(torch.autograd.Function):
    """The two halves as one differentiable function of x and the shards."""

    @staticmethod
    def forward(ctx, layer: CompiledLayer, pair: _Halves, weights: list, specs: tuple, x, *leaves):
        rest = leaves[specs[0].num_leaves :]
        out, count = pair.forward([x, *weights, *rest]), pair.spec.num_leaves
        ys, residuals = out[:count], out[count:]
        ctx.layer, ctx.pair, ctx.specs, ctx.needs_x = layer, pair, specs, 0 in pair.parts.kept_inputs
        # What prepare gives back as it was given, such as shards of one rank, needs no second call and no transpose.
        ctx.prepared = len(weights) != specs[0].num_leaves or any(map(operator.is_not, weights, leaves))
        kept = [x, *residuals] if ctx.needs_x else residuals
        ctx.moved = [layer.offload is not None and is_worth_moving(t, layer.offload) for t in kept]
        there, ys[0] = to_host([t for t, moved in zip(kept, ctx.moved, strict=True) if moved], ys[0])
        others = [i for i in range(count) if i not in pair.parts.taken or not pair.parts.differentiable]
        for i in others:
            ys[i] = ys[i].detach()  # prims.convert_element_type gives a leaf that needs a gradient, also under no_grad
        ctx.mark_non_differentiable(*[ys[i] for i in others])
        there = iter(there)
        kept = [next(there) if moved else t for t, moved in zip(kept, ctx.moved, strict=True)]
        ctx.save_for_backward(*leaves, *kept)
        return tuple(ys)

    @staticmethod
    def backward(ctx, *gs):
        (shard_spec, rest_spec), layer, parts = ctx.specs, ctx.layer, ctx.pair.parts
        n, count = shard_spec.num_leaves, shard_spec.num_leaves + rest_spec.num_leaves
        leaves, residuals = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        residuals = [
            from_host(t, gs[parts.taken[0]]) if moved else t for t, moved in zip(residuals, ctx.moved, strict=True)
        ]
        x = residuals.pop(0) if ctx.needs_x else None
        shards = weights = leaves[:n]
        if ctx.prepared:
            needs = ctx.needs_input_grad[5:]
            shards = [t.detach().requires_grad_(need) for t, need in zip(shards, needs, strict=False)]
            with torch.enable_grad():
                weights = tree.leaves(layer.prepare(structure.unflatten(shard_spec, shards)))
        inputs = [x, *weights, *leaves[n:]]
        given = [*residuals, *[inputs[i] for i in parts.kept_inputs], *[gs[i].contiguous() for i in parts.taken]]
        grads = dict(zip(parts.differentiable, ctx.pair.backward(given), strict=True))
        of_weights = [grads.get(i + 1) for i in range(len(weights))]
        of_shards = _through(weights, of_weights, shards) if ctx.prepared else of_weights
        grads = [grads.get(0), *of_shards]
        grads = first_only(f"layer {described(layer.fn)}", grads)
        return None, None, None, None, *grads, *[None] * rest_spec.num_leaves


def _through(weights: list, grads: list, shards: list) -> list:
    """Gradients of the shards, given those of the weights that were prepared of them: the transpose of `prepare`."""
    pairs = [(w, g) for w, g in zip(weights, grads, strict=True) if w.requires_grad]
    wanted = [t for t in shards if t.requires_grad]
    taken = [None] * len(wanted)
    if pairs and wanted:  # else no weight depends on a shard
        taken = torch.autograd.grad([w for w, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    taken = iter(taken)
    return [next(taken) if t.requires_grad else None for t in shards]
