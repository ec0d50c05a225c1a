"""Clipping by the global norm: right on any mesh, with one collective for each distinct set of axes."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, psum
from fmegatron.collectives.known_ranks import require_one_rank
from fmegatron.layout import Layout
from fmegatron.optim.recorded import recorded
from fmegatron.optim.transform import Transform, stateless
from fmegatron.tree import arithmetic, structure


class GradNorm(NamedTuple):
    """What a step knows of its gradients when it hands them to an optimizer's update.

    value: their global norm before clipping, 0-d.  limit: the norm to which the update has to clip them; None: not.
    """

    value: torch.Tensor
    limit: float | None = None


def global_norm(grads: structure.Tree) -> torch.Tensor:
    """The Euclidean norm of all gradients as one vector: a 0-d tensor, the same on every rank, float32 or wider.

    The squares of a leaf are summed over the axes that split it and over no other; so a replicated leaf counts once.
    The leaves know their layouts, as `reduce_gradients` gives them, `tree.add`, `tree.subtract` and `tree.scale` keep
    them and `tree.place` states them; without any all are full, on one rank. ValueError names a leaf that is still a
    partial sum over an axis, as its norm would be wrong, one that knows no layout where there are several ranks, and
    leaves of two meshes.

        norm[] = √ Σ over sets A of axes:  psum over A of Σ over leaves split by A, in their dtype's working precision,
        of g·g
    """
    return _norm(grads, [tree.layout_of(grad) for grad in tree.leaves(grads)])


def norm_beside(grads: structure.Tree, params: structure.Tree) -> torch.Tensor:
    """`global_norm` of gradients in the layouts of the parameters, as an update is given them: a leaf that does not
    know its layout has that of its parameter."""
    pairs = zip(tree.leaves(grads), tree.leaves(params), strict=True)
    return _norm(grads, [tree.layout_of(grad) or tree.layout_of(param) for grad, param in pairs])


def _norm(grads: structure.Tree, layouts: list[Layout | None]) -> torch.Tensor:
    paths, leaves, _ = structure.flatten(grads)
    if not any(layouts):
        _require_one_rank(paths, leaves)
        return arithmetic.squared_norm(leaves).sqrt()
    groups: dict[tuple[str, ...], list[torch.Tensor]] = {}
    axes = _axes_of(layouts)
    for path, leaf, layout in zip(paths, leaves, layouts, strict=True):
        groups.setdefault(_split_axes(path, leaf, layout, axes), []).append(leaf)
    squares = [_summed(arithmetic.squared_norm(group), split, axes) for split, group in groups.items()]
    return functools.reduce(torch.add, squares).sqrt()


def group_norms(grads: structure.Tree, group_of: Callable[[str], str] | None = None) -> dict[str, torch.Tensor]:
    """`global_norm` of each group of leaves: {group_of(path): 0-d tensor}, for metrics.

    group_of: by default the first segment of the path, "blocks/mlp/w_down" -> "blocks". The squares of all groups that
    are split by the same axes travel together: as many collectives as one norm has. The global norm is
    √ Σ norm² of the result, so that a step that reports groups needs no further collective.
    """
    group_of = group_of or (lambda path: path.partition("/")[0])
    paths, leaves, _ = structure.flatten(grads)
    layouts = [tree.layout_of(leaf) for leaf in leaves]
    if not any(layouts):
        _require_one_rank(paths, leaves)
    axes = _axes_of(layouts)
    names = list(dict.fromkeys(map(group_of, paths)))
    squares: dict[tuple[str, ...], dict[str, list[torch.Tensor]]] = {}
    for path, leaf, layout in zip(paths, leaves, layouts, strict=True):
        split = _split_axes(path, leaf, layout, axes)
        squares.setdefault(split, {}).setdefault(group_of(path), []).append(leaf)
    totals: dict[str, torch.Tensor] = {}
    for split, groups in squares.items():
        wide = {name: arithmetic.squared_norm(group) for name, group in groups.items()}
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in wide.values()) else torch.float32
        stacked = torch.stack([x.to(dtype) for x in wide.values()])
        summed = _summed(stacked, split, axes)
        for name, square in zip(wide, summed.unbind(0), strict=True):
            totals[name] = totals[name] + square if name in totals else square
    return {name: totals[name].sqrt() for name in names}


def clip_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (norm + 1e-6)): the 0-d factor that makes gradients of this norm at most `max_norm` long.

    The same formula as torch.nn.utils.clip_grad_norm_; a norm that is not finite gives NaN or 0. ValueError when
    max_norm <= 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: got {max_norm}, wanted a number above 0, such as 1.0 (or do not clip)")
    return arithmetic.stored((max_norm / (norm + 1e-6)).clamp(max=1))[0]


def clip(grads: structure.Tree, norm: torch.Tensor, max_norm: float) -> structure.Tree:
    """The gradients times `clip_scale(norm, max_norm)`, in their own dtypes; compiled, part of the update's kernel."""
    return tree.scale(grads, clip_scale(norm, max_norm))


@recorded
def clip_by_global_norm(max_norm: float) -> Transform:
    """`clip` by `global_norm` as a transform, for the front of a chain: updates have the layouts of parameters."""
    return stateless(lambda updates, params, count: clip(updates, norm_beside(updates, params), max_norm))


def _require_one_rank(paths: list[str], leaves: list[torch.Tensor]) -> None:
    """Of gradients without any layout; one number is no part of another."""
    path = next((path for path, leaf in zip(paths, leaves, strict=True) if leaf.dim()), None)
    if path is not None:
        require_one_rank("global_norm", path, "gradient")


def _axes_of(layouts: list[Layout | None]) -> Axes | None:
    """The axes of the mesh of the first layout that is known."""
    known = next((layout for layout in layouts if layout is not None), None)
    return None if known is None else Axes(known.mesh)


def _summed(x: torch.Tensor, split: tuple[str, ...], axes: Axes | None) -> torch.Tensor:
    return psum(x, axes[split]) if split and axes is not None else x


def _split_axes(path: str, leaf: torch.Tensor, layout: Layout | None, axes: Axes | None) -> tuple[str, ...]:
    """axes: those of the leaves whose layouts are known; None: no leaf knows one, and all are full."""
    if axes is None:
        return ()
    if layout is None:
        if leaf.dim():
            raise ValueError(
                f"global_norm: {path}: got a gradient whose layout is not known among others that know theirs, wanted "
                "those of all; what was computed of a gradient is placed again: tree.place(grads, layouts)"
            )
        return ()
    axes.require({path: layout}, "global_norm")
    pending = [axis for axis in layout.unreduced if layout.mesh[axis] > 1]
    if pending:
        raise ValueError(
            f"global_norm: {path}: got {layout}, a sum that is still pending over {', '.join(pending)}, wanted it"
            " reduced; reshard it to its layout without `unreduced` first"
        )
    return tuple(axis for axis in layout.mesh.names if axis in layout.sharded)
