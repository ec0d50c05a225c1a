"""Adafactor: second moments as an outer product of row and column means (Shazeer & Stern 2018, arXiv 1804.04235).

Symbols, paper to ours: R, C -> row, col (means where the paper's algorithm 4 has sums); β̂₂ₜ = 1 - tᶜ -> decay_power c;
d -> clip; ε₁ (of the squares) -> eps²; ε₂ -> eps2. torch.optim.Adafactor's formula.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import Layout
from fmegatron.optim.adam import LearningRate, add_decayed_weights, scale_by_learning_rate
from fmegatron.optim.from_transforms import Optimizer, optimizer
from fmegatron.optim.matrices import in_layout, layouts_of
from fmegatron.optim.recorded import recorded
from fmegatron.optim.scalars import per_dtype
from fmegatron.optim.transform import Transform, Where, path_predicate, stateless
from fmegatron.tree import ArraySpec, labels, structure


@recorded
def adafactor(
    learning_rate: LearningRate,
    *,
    decay_power: float = -0.8,
    clip: float = 1.0,
    eps: float = 1e-15,
    eps2: float = 1e-3,
    weight_decay: float = 0.0,
    decay: Where | None = None,
    factored: Where | None = None,
) -> Optimizer:
    """Adafactor: a matrix [m, n] has m + n numbers of state, and its step is relative to its size.

        p = (1 - lr·weight_decay) p - lr · max(eps2, rms(p)) · û / max(1, rms(û)/clip);  û from `scale_by_factored_rms`

    (algorithm 4 with the relative step size lr; torch caps lr by 1/√t: give a schedule for that). The leaves that
    `factored` selects (by default all) are stacks of matrices [..., m, n], others stacks of vectors [..., n]; every rms
    is that of one matrix or vector, so a stack of layers is updated as its layers would be.
    The rows of a flattened leaf are not to be seen in its ranges: it is gathered to look at it (and only it; a leaf is
    flattened when none of its dims can be shared out), so that state and steps are the same under every layout.
    Parameters know their layouts (specs, and the arrays of a state or a step); without any all are full, on one rank.

    Args:
        learning_rate: a number, a `Schedule`, `settable`, or a function of the count (0-d int64 -> 0-d tensor).
        decay_power: c in β̂₂ₜ = 1 - tᶜ, negative.
        clip: d, the largest rms of an update before it is scaled.
        eps: its square is the least second moment.
        eps2: ε₂, the least rms of a parameter that an update is scaled by.
        weight_decay: λ, 0 or more.
        decay: which leaves decay, a function of the path or a list of regular expressions; by default
            matrices, and stacks of them (`Layout.is_matrix`), not norms and biases.
        factored: which leaves are factored; by default matrices, and stacks of them (`Layout.is_matrix`).

    Raises:
        ValueError: values outside of their range.
    """
    if not clip > 0:
        raise ValueError(f"adafactor: clip: got {clip}, wanted a number above 0, such as 1.0")
    if not eps2 >= 0:
        raise ValueError(f"adafactor: eps2: got {eps2}, wanted 0 or more, such as 1e-3")
    is_matrix = _matrices(factored)

    def resize(updates: structure.Tree, params: structure.Tree, count: torch.Tensor) -> structure.Tree:
        del count
        layouts = layouts_of(params, "adafactor", updates)

        def one(path: str, u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            layout = layouts[path]
            opened = _opened(u, layout), _opened(p, layout)
            dims = 2 if is_matrix(path, u, layout) else min(1, opened[0].dim())
            size_u, size_p = _rms(opened, dims, layout)
            return _closed(opened[0] * (size_p.clamp(min=eps2) / (size_u / clip).clamp(min=1)), layout)

        return structure.map_with_path(one, updates, params)

    return optimizer(
        factored=scale_by_factored_rms(decay_power, eps, factored),
        size=stateless(resize),
        decay=add_decayed_weights(weight_decay, decay),
        rate=scale_by_learning_rate(learning_rate),
    )


@recorded
def scale_by_factored_rms(
    decay_power: float = -0.8,
    eps: float = 1e-15,
    factored: Where | None = None,
) -> Transform:
    """g -> g/√v with v = row·col/mean(row), the state {"row", "col", "full"} (algorithms 2 to 4).

        row[..., m] = b row + (1 - b) mean over n of g²;  col[..., n] = b col + (1 - b) mean over m of g²;  b = 1 - tᶜ

    where c = decay_power. Leaves that are not factored have their second moment in "full". row and col have the layout
    of the parameter's dims, and are full along axes that flatten it; a mean over a split dim is one psum over its axes.

    Args:
        decay_power: c, negative.
        eps: v and the mean of row are at least eps² (torch keeps the mean above its eps, 1.2e-7 for float32, which is
            more than the squares of most gradients of a large model).
        factored: which leaves are factored; by default matrices, and stacks of them (`Layout.is_matrix`).
    """
    if not decay_power < 0:
        raise ValueError(f"adafactor: decay_power: got {decay_power}, wanted a negative number, such as -0.8")
    if not eps >= 0:
        raise ValueError(f"adafactor: eps: got {eps}, wanted 0 or more, such as 1e-15")
    is_matrix = _matrices(factored)

    def part(x: structure.Tree, layouts: dict[str, Layout | None], wanted: bool) -> structure.Tree:
        return structure.map_with_path(
            lambda path, leaf: leaf if is_matrix(path, leaf, layouts[path]) == wanted else None, x
        )

    def init(params: structure.Tree) -> structure.Tree:
        layouts = layouts_of(params, "adafactor")
        matrices = part(params, layouts, True)
        state = {
            "row": structure.map_with_path(lambda path, leaf: _without_dim(leaf, -1, layouts[path]), matrices),
            "col": structure.map_with_path(lambda path, leaf: _without_dim(leaf, -2, layouts[path]), matrices),
            "full": tree.zeros_like(part(params, layouts, False)),
        }
        return {name: value for name, value in state.items() if tree.leaves(value)}

    def update(
        updates: structure.Tree, state: structure.Tree, params: structure.Tree, count: torch.Tensor
    ) -> tuple[structure.Tree, structure.Tree]:
        layouts = layouts_of(params, "adafactor", updates, state)
        weights = per_dtype(updates, lambda dtype: [(count + 1).to(torch.float64).pow(decay_power).to(dtype)])

        def mixed(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return old + (new - old) * weights[old.dtype][0]

        def scaled(g: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return g * v.clamp(min=eps * eps).rsqrt()

        def estimate(path: str, row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
            mean = _mean(row.unsqueeze(-1), -2, layouts[path])
            return row.unsqueeze(-1) * (col.unsqueeze(-2) / mean.clamp(min=eps * eps))

        out, new_state = part(updates, layouts, False), {}
        if "full" in state:
            new_state["full"] = tree.map(lambda v, g: mixed(v, g * g), state["full"], out)
            out = tree.map(lambda v, g: scaled(g, v), new_state["full"], out)
        if "row" in state:
            g = structure.map_with_path(lambda path, x: _opened(x, layouts[path]), part(updates, layouts, True))
            for name, dim in (("row", -1), ("col", -2)):
                means = structure.map_with_path(
                    lambda path, x, dim=dim: _mean(x * x, dim, layouts[path]).squeeze(dim), g
                )
                new_state[name] = tree.map(mixed, state[name], means)
            v = structure.map_with_path(estimate, new_state["row"], new_state["col"])
            directions = structure.map_with_path(lambda path, x, v: _closed(scaled(x, v), layouts[path]), g, v)
            out = tree.merge(directions, out)
        return out, new_state

    return Transform(init, update)


def _matrices(factored: Where | None) -> Callable[[str, Any, Layout | None], bool]:
    """(path, leaf, layout) -> whether its second moment is factored: it is selected, and has two dims or more."""
    selects = None if factored is None else path_predicate(factored)

    def is_matrix(path: str, leaf: Any, layout: Layout | None) -> bool:
        of = leaf if layout is None else layout
        return labels.is_matrix(of) if selects is None else selects(path) and len(of.shape) > 1

    return is_matrix


def _opened(x: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """A flattened leaf as the block that was flattened; others as they are."""
    return in_layout(x, layout, layout.replace(flat=())) if layout is not None and layout.flat else x


def _closed(x: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """The inverse of `_opened`; nothing is sent."""
    return in_layout(x, layout.replace(flat=()), layout) if layout is not None and layout.flat else x


def _without_dim(leaf: torch.Tensor | ArraySpec, dim: int, layout: Layout | None) -> torch.Tensor | ArraySpec:
    """Zeros in the shape and layout of a leaf without one of its last two dims."""

    def rest(items: tuple) -> tuple:
        return items[:-1] if dim == -1 else (*items[:-2], items[-1])

    if isinstance(leaf, ArraySpec):
        return leaf.replace(0.0, shape=rest(leaf.shape), spec=rest(leaf.layout.spec), flat=())
    shape = tuple(leaf.shape) if layout is None else layout.replace(flat=()).local_shape(0)
    return leaf.new_zeros(rest(shape))


def _mean(x: torch.Tensor, dim: int, layout: Layout | None) -> torch.Tensor:
    """Mean over a dim that may be split: `x[..., m_a, n] -> y[..., 1, n]`, one psum over a."""
    if layout is None:
        return x.mean(dim, keepdim=True)
    return _summed(x.sum(dim, keepdim=True), layout, layout.axes(dim)) / layout.shape[dim]


def _rms(xs: tuple[torch.Tensor, ...], dims: int, layout: Layout | None) -> tuple[torch.Tensor, ...]:
    """√(mean of x²) of each, over the last `dims` dims, kept as dims of size 1: one psum for all."""
    last = tuple(range(-dims, 0))
    sums = torch.stack([x.square().sum(last, keepdim=True) if dims else x.square() for x in xs])
    if layout is not None:
        sums = _summed(sums, layout, tuple(axis for dim in last for axis in layout.axes(dim)))
    shape = xs[0].shape if layout is None else layout.shape
    return (sums / math.prod(shape[len(shape) - dims :])).sqrt().unbind(0)


def _summed(x: torch.Tensor, layout: Layout, names: tuple[str, ...]) -> torch.Tensor:
    """psum over those of the axes that have more than one rank."""
    split = tuple(name for name in layout.mesh.names if name in names and layout.mesh[name] > 1)
    return psum(x, Axes(layout.mesh)[split]) if split else x
