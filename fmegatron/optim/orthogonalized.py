"""Muon: momentum whose matrices are orthogonalized (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Symbols, theirs to ours: μ -> momentum; B -> m; NS5 -> `orthogonalize`; (a, b, c) -> COEFFICIENTS.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from fmegatron import tree
from fmegatron.layout import Layout
from fmegatron.optim.adam import LearningRate, scale_by_adam
from fmegatron.optim.from_transforms import Optimizer
from fmegatron.optim.groups import Group, grouped, whole_segments
from fmegatron.optim.matrices import layouts_of, on_whole_matrices
from fmegatron.optim.recorded import recorded
from fmegatron.optim.transform import Transform, Where, path_predicate
from fmegatron.tree import labels, structure

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Rounding of a Gram matrix grows with each step on it: with bf16 three leave the singular values in [0.65, 1.2], five
# do not (up to 270).
_AT_ONCE = 3
_SCALES = ("original", "rms", "none")
Parts = int | tuple[int, ...]


@recorded
def muon(
    learning_rate: LearningRate,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    scale: str = "rms",
    parts: Sequence[tuple[str, Parts]] | None = None,
    share: tuple[str, ...] = (),
    matrices: Where | None = None,
    rules: Sequence[tuple[str, Group]] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> Optimizer:
    """Muon for the hidden matrices, AdamW for everything else, on any mesh.

    With scale="rms" one learning rate serves both. Vectors (norms, biases) do not decay. Parameters know their layouts
    (specs, and the arrays of a state or a step); without any all are full, on one rank.

    Args:
        learning_rate: a number, a `Schedule`, `settable`, or a function of the count (0-d int64 -> 0-d tensor).
        momentum: decay rate of the momentum, in [0, 1).
        nesterov: look ahead along the momentum.
        weight_decay: λ, 0 or more.
        scale: the size of an update (`scale_by_muon`).
        parts: leaves whose last dim is made of several matrices (`scale_by_muon`); None: as their layouts state.
        share: further axes over which the matrices are divided (`scale_by_muon`).
        matrices: the leaves that `scale_by_muon` updates, a function of the path or a list of regular expressions; by
            default the matrices, and stacks of them (`Layout.is_matrix`), that `is_hidden_matrix` names.
        rules: those of `grouped` (rates, decay, frozen leaves).
        dtype: of Muon's iteration, and of what is exchanged for it (`scale_by_muon`).
    """
    selects = path_predicate(is_hidden_matrix if matrices is None else matrices)
    return grouped(
        learning_rate,
        rules,
        weight_decay=weight_decay,
        choose=lambda path: "muon" if selects(path) else "adam",
        vectors="adam" if matrices is None else None,
        muon=scale_by_muon(momentum, nesterov, scale=scale, parts=parts, share=share, dtype=dtype),
        adam=scale_by_adam(),
    )


@recorded
def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    *,
    scale: str = "rms",
    parts: Sequence[tuple[str, Parts]] | None = None,
    share: tuple[str, ...] = (),
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Transform:
    """g -> scale · orthogonalize(u) for stacks of matrices g[..., in, out], with the momentum m as state.

        m = momentum·m + (1 - momentum)·g;  u = momentum·m + (1 - momentum)·g with Nesterov, else m

    The momentum is in the parameter's layout, which the parameter knows; full matrices are made and divided among
    ranks by `on_whole_matrices`.
    The iteration costs the same however many tokens a step has: beside the 6 FLOPs of a step for each token and
    parameter it is 2.5 (n = 4 m) to 5 (n = m) times m / tokens, shared by the ranks (measured in experiments/LOG.md).

    Args:
        momentum: decay rate of the momentum, in [0, 1).
        nesterov: look ahead along the momentum.
        scale: for a weight that is used as x @ w: "original": √max(1, out/in) (Jordan); "rms": 0.2·√max(in, out), which
            makes an update as large as AdamW's (Liu et al. 2025, arXiv 2502.16982, eq. 4); "none": 1.
        parts: rules (pattern over full segments of the path, sizes of the consecutive parts of the last dim or their
            number): each part is a matrix of its own. Fused QKV by (q, kv, kv), or by the number of heads; gate and up
            by 2. None: as the layouts state (`Layout.beside`: of a decoder q, k, v and gate, up). (): all are one.
        share: further axes over which the matrices are divided.
        steps: of the iteration, 1 to 99.
        eps: the least norm that a matrix is divided by.
        dtype: of the iteration, and of what is exchanged for it, for float32 leaves; float64 leaves stay float64. bf16
            also on CPU: 4 times as fast as float32 where it has AVX-512-BF16.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"muon: momentum: got {momentum}, wanted 0 <= momentum < 1, such as 0.95")
    if scale not in _SCALES:
        raise ValueError(f"muon: scale: got {scale!r}, wanted one of {', '.join(_SCALES)}")
    if not 1 <= steps < 100:
        raise ValueError(f"muon: steps: got {steps}, wanted 1 to 99, such as 5")
    table = None if parts is None else [(whole_segments(pattern), part) for pattern, part in parts]

    def sizes_of(path: str, leaf: torch.Tensor, layout: Layout | None) -> tuple[int, ...] | None:
        if table is None:
            return None if layout is None else layout.beside or None
        found = next((part for pattern, part in table if pattern.search(path)), 1)
        return None if found == 1 else _sizes(found, (leaf if layout is None else layout).shape[-1], path)

    def init(params: structure.Tree) -> structure.Tree:
        layouts = layouts_of(params, "muon")

        def one(path: str, leaf: Any) -> Any:
            layout = layouts[path]
            if not labels.is_matrix(leaf if layout is None else layout):
                raise ValueError(
                    f"muon: {path}: got shape {tuple(leaf.shape)}, wanted matrices [..., in, out]; leave it to AdamW"
                    " with `matrices`"
                )
            return tree.zeros_like(leaf)

        return structure.map_with_path(one, params)

    def update(
        updates: structure.Tree, state: structure.Tree, params: structure.Tree, count: torch.Tensor
    ) -> tuple[structure.Tree, structure.Tree]:
        del count
        new = tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state, updates)
        ahead = tree.map(lambda m, g: momentum * m + (1 - momentum) * g, new, updates) if nesterov else new

        paths, leaves, spec = structure.flatten(ahead)
        known = layouts_of(params, "muon", updates, state)
        layouts = [known[path] for path in paths]
        narrow = [u if u.dtype == torch.float64 else u.to(dtype) for u in leaves]  # before the exchange: half the bytes
        done = on_whole_matrices(
            lambda x: orthogonalize(x, steps, eps),
            narrow,
            layouts,
            share,
            [sizes_of(*each) for each in zip(paths, leaves, layouts, strict=True)],
            lambda rows, columns: _factor(scale, rows, columns),
        )
        return structure.unflatten(spec, [y.to(u.dtype) for y, u in zip(done, leaves, strict=True)]), new

    return Transform(init, update)


def orthogonalize(
    x: torch.Tensor,
    steps: int = 5,
    eps: float = 1e-7,
) -> torch.Tensor:
    """The nearest orthogonal matrix U Vᵀ of each x = U S Vᵀ, roughly: singular values end in about 0.7 to 1.2.

    x[..., m, n] -> the same shape and dtype. The Newton-Schulz iteration of degree 5 from X = x/‖x‖, with A = X Xᵀ:
    X = a X + (b A + c A²) X (Jordan et al. 2024; transposed first when m > n, so that A is the smaller Gram matrix). A
    zero matrix stays zero.

    That is 4 m² n + 2 m³ FLOPs a step. Where n >= 2 m, three steps at a time are done on Gram matrices only
    (`_steps_on_gram`): 5 steps cost 8 m² n + 28 m³ instead of 20 m² n + 10 m³.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    X = (x.mT if tall else x).reshape(-1, min(x.shape[-2:]), max(x.shape[-2:]))
    X = X / X.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=eps)
    if X.shape[-1] >= 2 * X.shape[-2]:
        for done in range(0, steps, _AT_ONCE):
            X = _steps_on_gram(X, min(_AT_ONCE, steps - done))
    else:
        for _ in range(steps):
            A = torch.bmm(X, X.mT)
            X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return (X.mT if tall else X).reshape(x.shape)


def _steps_on_gram(X: torch.Tensor, steps: int) -> torch.Tensor:
    """Steps of the iteration in which only the first and the last product have the long side of X[k, m, n].

    Each step multiplies X from the left by aI + Z, Z = b A + c A², and so A by it from both sides; all of these are
    polynomials of the first A and commute. Their product is q I + W. The identity is kept apart, where bf16 is exact.
    """
    a, b, c = COEFFICIENTS
    A = torch.bmm(X, X.mT)
    q, W = 1.0, None
    for step in range(steps):
        Z = torch.baddbmm(A, A, A, beta=b, alpha=c)
        W = Z if W is None else torch.baddbmm(a * W + q * Z, Z, W)
        q *= a
        if step < steps - 1:
            half = torch.baddbmm(A, Z, A, beta=a)
            A = torch.baddbmm(half, half, Z, beta=a)
    return X if W is None else torch.baddbmm(X, W, X, beta=q)


def is_hidden_matrix(path: str) -> bool:
    """The default choice among matrices, by use, which no dims show: no router, embedding (table), head.

    >>> [is_hidden_matrix(path) for path in ("blocks/mlp/w_down", "blocks/moe/router", "embed/table", "head/w")]
    [True, False, False, False]
    """
    return re.search(r"router|embed|table|(?:^|/)(?:lm_)?head(?:/|$)", path, re.IGNORECASE) is None


def _sizes(parts: Parts, columns: int, path: str) -> tuple[int, ...]:
    """The sizes of the parts of a last dim; ValueError where they do not make it up."""
    sizes = (columns // parts,) * parts if isinstance(parts, int) else tuple(parts)
    if sum(sizes) != columns:
        raise ValueError(
            f"muon: {path}: got parts {parts} of a last dim of size {columns}, wanted sizes that sum to it, or a"
            " number that divides it"
        )
    return sizes


def _factor(scale: str, rows: int, columns: int) -> float:
    if scale == "original":
        return math.sqrt(max(1.0, columns / rows))
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "rms" else 1.0
