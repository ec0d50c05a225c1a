"""Weights as values: a tensor, or what stands for one in a product, such as a matrix and low-rank pairs beside it.

Every product with a parameter is `matmul` or `grouped_matmul`, so a mixer does not know which kind it has. The kinds
are NamedTuples, nodes in the trees of tensors, layouts and specs alike: gathers, masks of an optimizer and paths of a
checkpoint take them as they are.  Legend: D rows, F columns, r rank, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.collectives import Axes, axes, enter
from fmegatron.nn.grouped import grouped_mm
from fmegatron.nn.scaled import Scaled
from fmegatron.tree import structure

__all__ = ["LowRank", "Pair", "Weight", "dense", "entered", "grouped_matmul", "matmul"]


class Pair(NamedTuple):
    """Two factors of a matrix [.., D, F]: a [.., D, r] and b [.., r, F], tensors, or layouts or specs of them. (lora_A
    and lora_B of PEFT, transposed.)"""

    a: structure.Tree
    b: structure.Tree


class LowRank(NamedTuple):
    """`base + scale · [a_0 b_0, a_1 b_1, ..]`: a matrix, or one for each expert, [.., D, F], and what is trained of it.

    base: a tensor, or another such value. pairs: one for each of the matrices that lie side by side in the columns, in
    their order; the widths of the b's are those of the matrices. scale: fp32, 0-d; in a stack of layers [L].

    `x @ w` is `matmul(x, w)`. It has no other arithmetic: TypeError for w + y, w * y and w[i], which of a plain tuple
    would be something without an error.
    """

    base: structure.Tree
    pairs: tuple[Pair, ...]
    scale: structure.Tree

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return matmul(x, self)

    def _refused(self, *_: Any) -> NoReturn:
        raise TypeError(f"LowRank: got arithmetic with a sum of factors, wanted a product x @ w; {_FIX}")

    # not those of a tuple, which adds and repeats its elements
    __add__ = __mul__ = __rmul__ = _refused  # pyright: ignore[reportAssignmentType]  as said above
    __radd__ = __sub__ = __rsub__ = __truediv__ = __neg__ = __matmul__ = _refused

    def __getitem__(self, index: int | slice) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]  as above
        raise TypeError(f"LowRank: got [{index!r:.40}] of a sum of factors, wanted a product x @ w; {_FIX}")

    def __getattr__(self, name: str) -> NoReturn:  # what a tensor has and a tuple has not
        raise AttributeError(f"LowRank: got .{name} of a sum of factors, wanted a product x @ w; {_FIX}")


_FIX = "write nn.matmul(x, w) for it, nn.dense(w) where the matrix itself is needed, nn.entered(w, tp) for enter(w, tp)"

Weight = Tensor | Scaled | LowRank


def matmul(x: Tensor, w: Weight) -> Tensor:
    """`x[.., D] @ w[D, F] -> y[.., F]`, for a tensor or another value of a weight.

    Of a `LowRank` `x @ base + scale · (x a) b`. The dense sum is never made: it would be as cheap in the forward, but
    the backward would need the gradient of the dense matrix, a third of a step, to get those of a and b.
    """
    if isinstance(w, LowRank):
        return matmul(x, w.base) + _beside([_scaled(x @ a, w) @ b for a, b in w.pairs])
    return x @ (w.value if isinstance(w, Scaled) else w)


def grouped_matmul(x_ND: Tensor, w_EDF: Weight, ends_E: Tensor) -> Tensor:
    """`x[N, D], w[E, D, F] -> y[N, F]`: row i of group e is x_i w_e; rows behind the last group are zeros.

    x and w have one floating dtype. Of rows behind the last group neither x nor their gradients are read: they may be
    anything. bf16 is `torch._grouped_mm`, other dtypes are products one by one in one opaque op.

    Args:
        x_ND: rows, sorted by group.
        w_EDF: a matrix for each group.
        ends_E: int32, where the rows of each group end, ascending and at most N: cumsum of the counts.

    Raises ValueError for shapes and dtypes that do not fit.
    """
    if isinstance(w_EDF, LowRank):
        parts = [grouped_mm(_scaled(grouped_mm(x_ND, a, ends_E), w_EDF), b, ends_E) for a, b in w_EDF.pairs]
        return grouped_matmul(x_ND, w_EDF.base, ends_E) + _beside(parts)
    return grouped_mm(x_ND, w_EDF.value if isinstance(w_EDF, Scaled) else w_EDF, ends_E)


def dense(w: Weight) -> Tensor:
    """The matrix itself, of a tensor that tensor: for what is no product, such as a table that is looked up."""
    if isinstance(w, Scaled):
        return w.value
    if not isinstance(w, LowRank):
        return w
    added, base = _beside([a @ b for a, b in w.pairs]), dense(w.base)
    scale = w.scale.to(added.dtype)
    return base + added * scale.view(*scale.shape, *[1] * (added.dim() - scale.dim()))


def entered(w: Weight, axis: axes.Axis) -> Weight:
    """`enter` of every array of a weight that all ranks of the axis hold and use for other tokens or columns each:
    their gradients are sums over the axis."""
    return tree.map(lambda x: enter(x, axis), w)


def of_products(w: structure.Tree, layouts: structure.Tree, gathered: axes.Axis) -> structure.Tree:
    """Weights that were gathered over an axis, as products take them.

    Where an axis still splits the base of a `LowRank` and not a factor of it, the factor meets other columns (or rows)
    on every rank, so that its gradient is a sum over that axis: it is entered. (A column-parallel base has a whole a, a
    row-parallel one a whole b.)
    """

    def one(of: Any, w: Any) -> Any:
        if not isinstance(of, LowRank):
            return w
        split = [name for name in _bottom(of).sharded if name not in gathered.names]
        axes = Axes(gathered.mesh, gathered.world)

        def factor(layout: Any, x: Tensor) -> Tensor:
            return enter(x, axes[tuple(name for name in split if name not in layout.sharded)])

        return LowRank(one(of.base, w.base), tree.map(factor, of.pairs, w.pairs), w.scale)

    return tree.map(one, layouts, w, is_leaf=lambda x: isinstance(x, LowRank))


def _bottom(of: Any) -> Any:
    while isinstance(of, LowRank):
        of = of.base
    return of


def _scaled(y: Tensor, w: LowRank) -> Tensor:
    return y * w.scale.to(y.dtype)


def _beside(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
