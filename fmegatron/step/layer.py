"""Compiled layers: compiled once, used many times, with a policy of what is saved for the backward.

The layer's joint graph (outputs, then gradients) is traced once and cut in two by a policy; each half becomes
one opaque node (`fmegatron.step.opaque`). Recomputing is then right by construction: the backward is one node that
takes the gradient as an input, so no pass can merge the recomputation into the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron import tree
from fmegatron.step.graph.nodes import meta_of
from fmegatron.step.offload import from_host, is_worth_moving, to_host
from fmegatron.step.opaque import Entry
from fmegatron.step.partition import Partition, Policy, joint_graph, partition, require_policy
from fmegatron.step.torch_private import outside_of_tracing
from fmegatron.step.trace import described

__all__ = ["compiled_layer", "remat"]


@dataclass(frozen=True)
class _Halves:
    """The two entries of a layer at given shapes, and how the caller's tensors go in."""

    parts: Partition
    forward: Entry
    backward: Entry


def compiled_layer(save: Policy = "mincut", label: str | None = None, offload: int | None = None) -> Callable:
    """A transformer of layers: `layer(fn, prepare=None) -> g(x, shards, *rest, **named)`, differentiable in x, shards.

    fn(x, weights, *rest, **named) -> y: a pure function; x and y tensors, weights, rest and named trees of tensors (no
    gradient flows to these: ValueError for a tensor there that needs one). prepare(shards) -> weights: runs outside of
    the opaque node, once before the forward and again before the backward, so gathered weights live only while a layer
    runs (ZeRO-3); its collectives stay visible in the step's graph, and its transpose (the reduce-scatter) is applied
    to the gradients. None: the shards are the weights.
    y has memory of its own, also where fn returns an argument, a view, or a value that the backward reads (one copy);
    it has no gradient where fn's has none. Gradients of gradients are refused: ValueError in the second backward.

    save: what the forward keeps for the backward.
      "mincut"    what AOTAutograd's min-cut partitioner chooses, as torch.compile would
      "inputs"    only inputs: everything is computed again (rematerialization)
      "all"       every value that the backward reads
      0.0 to 1.0  min-cut under that share of the activation memory
      callable    node -> bool, picks among "all"
    offload: what is kept besides weights goes to host memory and comes back for the backward, each value of at least
    so many bytes (`step.offload`); 0: all, so that a layer keeps nothing on its device. None: nothing is moved.
    Equal layers share one compiled pair, however many there are.
    """

    require_policy(save)
    if offload is not None and (isinstance(offload, bool) or not isinstance(offload, int) or offload < 0):
        raise ValueError(f"compiled_layer: got offload={offload!r}, wanted bytes, such as 1 << 20, or None")

    def transform(fn: Callable, prepare: Callable | None = None) -> Callable:
        halves: dict[Any, _Halves] = {}
        if not callable(fn):
            raise ValueError(f"compiled_layer: got {tree.in_words(fn)}, wanted a function fn(x, weights, *rest) -> y")
        name = label or getattr(getattr(fn, "func", fn), "__name__", "layer")
        words = f"layer {described(fn)}"

        def build(x, weights, rest) -> _Halves:
            weight_leaves, rest_leaves = tree.leaves(weights), tree.leaves(rest)
            weight_spec, rest_spec = tree.flatten(weights)[2], tree.flatten(rest)[2]
            count = 1 + len(weight_leaves)

            def flat(*tensors):
                w = tree.unflatten(weight_spec, list(tensors[1:count]))
                others, named = tree.unflatten(rest_spec, list(tensors[count:]))
                return fn(tensors[0], w, *others, **named)

            tensors = [x, *weight_leaves, *rest_leaves]
            paths = [*tree.paths((x, weights, *rest[0])), *tree.paths(rest[1])]
            with outside_of_tracing():
                differentiable = [i < count and _has_gradient(t) for i, t in enumerate(tensors)]
                joint = joint_graph(flat, tensors, differentiable, words, paths)
                parts = partition(joint, save)
            forward = Entry.make(f"{name}_fwd", parts.forward, parts.forward_fakes, joint.fake_mode)
            backward = Entry.make(f"{name}_bwd", parts.backward, parts.backward_fakes, joint.fake_mode)
            return _Halves(parts, forward, backward)

        def halves_for(x, weights, rest) -> _Halves:
            leaves, spec = tree.leaves((x, weights, rest)), tree.flatten((x, weights, rest))[2]
            key = (spec, tuple(map(meta_of, leaves)))
            if key not in halves:
                halves[key] = build(x, weights, rest)
            return halves[key]

        class Layer(torch.autograd.Function):
            @staticmethod
            def forward(ctx, specs, x, *leaves):
                shard_spec, rest_spec, n = specs
                shards, rest = tree.unflatten(shard_spec, list(leaves[:n])), tree.unflatten(rest_spec, list(leaves[n:]))
                with torch.no_grad():
                    weights = shards if prepare is None else prepare(shards)
                pair = halves_for(x, weights, rest)
                y, *residuals = pair.forward.op([x, *tree.leaves(weights), *leaves[n:]])
                ctx.pair, ctx.specs, ctx.needs_x = pair, specs, 0 in pair.parts.kept_inputs
                kept = [x, *residuals] if ctx.needs_x else residuals
                ctx.moved = [offload is not None and is_worth_moving(t, offload) for t in kept]
                there, y = to_host([t for t, moved in zip(kept, ctx.moved, strict=True) if moved], y)
                if not pair.parts.differentiable:
                    y = y.detach()  # prims.convert_element_type gives a leaf that needs a gradient, also under no_grad
                    ctx.mark_non_differentiable(y)
                there = iter(there)
                ctx.save_for_backward(
                    *leaves, *[next(there) if moved else t for t, moved in zip(kept, ctx.moved, strict=True)]
                )
                return y

            @staticmethod
            def backward(ctx, g):
                shard_spec, rest_spec, n = ctx.specs
                count = n + rest_spec.num_leaves
                leaves, residuals = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
                residuals = [from_host(t, g) if moved else t for t, moved in zip(residuals, ctx.moved, strict=True)]
                x = residuals.pop(0) if ctx.needs_x else None
                shard_leaves = [t.detach().requires_grad_(_has_gradient(t)) for t in leaves[:n]]
                with torch.enable_grad():
                    shards = tree.unflatten(shard_spec, shard_leaves)
                    weights = tree.leaves(shards if prepare is None else prepare(shards))
                inputs = [x, *[w.detach() for w in weights], *leaves[n:]]
                kept = [inputs[i] for i in ctx.pair.parts.kept_inputs]
                grads = dict(
                    zip(
                        ctx.pair.parts.differentiable,
                        ctx.pair.backward.op([*residuals, *kept, g.contiguous()]),
                        strict=True,
                    )
                )
                grad_weights = [grads.get(i + 1) for i in range(len(weights))]
                if prepare is None:
                    grad_shards = grad_weights
                else:
                    pairs = [(w, gw) for w, gw in zip(weights, grad_weights, strict=True) if w.requires_grad]
                    wanted = [t for t in shard_leaves if t.requires_grad]
                    taken = [None] * len(wanted)
                    if pairs and wanted:  # else no weight depends on a shard
                        given = [w for w, _ in pairs], wanted, [gw for _, gw in pairs]
                        taken = torch.autograd.grad(*given, allow_unused=True)
                    taken = iter(taken)
                    grad_shards = [next(taken) if t.requires_grad else None for t in shard_leaves]
                grads = [grads.get(0), *grad_shards]
                if torch.is_grad_enabled():  # create_graph=True
                    grads = _NotTwice.apply(words, torch.zeros((), requires_grad=True), *grads)
                return None, *grads, *[None] * rest_spec.num_leaves

        def apply(x, shards, /, *rest, **named):
            shard_paths, shard_leaves, shard_spec = tree.flatten(shards)
            rest_paths, rest_leaves, rest_spec = tree.flatten((rest, named))
            for path, t in [("x", x), *((f"shards {p!r}", t) for p, t in zip(shard_paths, shard_leaves, strict=True))]:
                if not isinstance(t, torch.Tensor):
                    raise ValueError(
                        f"{words}: {path}: got {tree.in_words(t)}, wanted a tensor; give fn its constants with "
                        "functools.partial, and other arrays behind the shards"
                    )
            for path, t in zip(rest_paths, rest_leaves, strict=True):
                if not isinstance(t, torch.Tensor) or t.requires_grad:
                    got = "a tensor that needs a gradient" if isinstance(t, torch.Tensor) else tree.in_words(t)
                    raise ValueError(
                        f"{words}: argument {path[2:]!r} after the shards: got {got}, wanted a tensor without a "
                        "gradient; make what needs one part of the shards, or detach it; bind what is no tensor with "
                        "functools.partial"
                    )
            return Layer.apply((shard_spec, rest_spec, len(shard_leaves)), x, *shard_leaves, *rest_leaves)

        apply.__qualname__, apply.halves = f"compiled_layer({name})", halves
        return apply

    return transform


def _has_gradient(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


class _NotTwice(torch.autograd.Function):
    """Gradients of a layer, which are constants to autograd: another gradient of them would be silently zero."""

    @staticmethod
    def forward(ctx, name, _, *grads):
        ctx.name = name
        return tuple(None if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx, *_):
        raise ValueError(
            f"{ctx.name}: got a gradient of its gradient, wanted first gradients only: its backward is one "
            "compiled node; call the plain function where second gradients are taken"
        )


def remat(fn: Callable, prepare: Callable | None = None, save: Policy = "inputs") -> Callable:
    """`fn(x, weights, *rest) -> y` that keeps only what `save` states and computes the rest again in the backward."""
    return compiled_layer(save)(fn, prepare)
