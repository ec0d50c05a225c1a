"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv 2409.11321, algorithms 3 and 4).

Symbols, paper to ours: L, R -> left, right; Q_L, Q_R -> left_basis, right_basis; M, V -> m, v (V in the basis);
β1, β2 -> b1, b2; β_shampoo -> b2 as in the paper; f = 1.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fmegatron import tree
from fmegatron.optim.adam import LearningRate, bias_corrections, checked_betas, scale_by_adam
from fmegatron.optim.from_transforms import Optimizer
from fmegatron.optim.groups import Group, grouped
from fmegatron.optim.matrices import dealt_layout, in_layout, layouts_of
from fmegatron.optim.orthogonalized import is_hidden_matrix
from fmegatron.optim.recorded import recorded
from fmegatron.optim.scalars import per_dtype
from fmegatron.optim.transform import Transform, Where, path_predicate
from fmegatron.tree import ArraySpec, structure

_SIDES = ("left", "right")
_RIDGE = 1e-6  # of the mean eigenvalue: keeps the basis of what no gradient has reached as it was


@recorded
def soap(
    learning_rate: LearningRate,
    *,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    max_dim: int = 10000,
    weight_decay: float = 0.1,
    matrices: Where | None = None,
    rules: Sequence[tuple[str, Group]] = (),
) -> Optimizer:
    """SOAP for the hidden matrices, AdamW for everything else, on any mesh.

    Vectors (norms, biases) do not decay. Parameters know their layouts (specs, and the arrays of a state or a step);
    without any all are full, on one rank.

    Args:
        learning_rate: a number, a `Schedule`, `settable`, or a function of the count (0-d int64 -> 0-d tensor).
        b1: decay rate of the first moment.
        b2: decay rate of the second moment and of the preconditioners.
        eps: added to the root of the second moment.
        max_dim: a longer side of a matrix has no basis (`scale_by_soap`).
        weight_decay: λ, 0 or more.
        matrices: the leaves that `scale_by_soap` updates, a function of the path or a list of regular expressions; by
            default the matrices, and stacks of them (`Layout.is_matrix`), that `is_hidden_matrix` names.
        rules: those of `grouped`.
    """
    selects = path_predicate(is_hidden_matrix if matrices is None else matrices)
    return grouped(
        learning_rate,
        rules,
        weight_decay=weight_decay,
        choose=lambda path: "soap" if selects(path) else "adam",
        vectors="adam" if matrices is None else None,
        soap=scale_by_soap(b1, b2, eps, max_dim),
        adam=scale_by_adam(b1, b2, eps),
    )


@recorded
def scale_by_soap(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    max_dim: int = 10000,
) -> Transform:
    """g -> Q_L Adam(Q_Lᵀ g Q_R) Q_Rᵀ for stacks of matrices g[..., m, n], each with a basis of its own.

        L = b2 L + (1 - b2) g gᵀ;  Q_L = QR(L Q_L).Q;  R, Q_R likewise, of gᵀ g    (Q is the identity before step 1)
        M = b1 M + (1 - b1) g;  M', g' = Q_Lᵀ M Q_R, Q_Lᵀ g Q_R;  V = b2 V + (1 - b2) g'²
        result: Q_L [M'/(1 - b1ᵗ) / (√V/√(1 - b2ᵗ) + eps)] Q_Rᵀ

    State: {"m", "v", "left", "right", "left_basis", "right_basis"}; a side longer than max_dim has none and keeps the
    identity (the paper's one-sided form). Different from the paper: the basis is refreshed before it is used, not
    after, so that V never lives in the identity's basis; and fused leaves (q, k, v) are one matrix.

    The basis takes one step of power iteration in every update. To do it in every k-th one only, a graph would have to
    ask the host, or compute it and throw it away: so it costs 2(m³ + n³) for the products and about 8/3(m³ + n³) for QR
    (Householder; one LAPACK or cuSOLVER call for a stack), beside 2mn(m + n) for L and R and 6mn(m + n) for the turns.

    The state is in `dealt_layout`: a stack of matrices is assigned to the ranks that hold pieces of them, and only g
    and the result travel, as one all_to_all each. Where the stack does not divide, ranks have copies and do the same
    work.

    Args:
        b1: decay rate of the first moment, in [0, 1).
        b2: decay rate of the second moment and of L and R, in [0, 1).
        eps: added to the root of the second moment.
        max_dim: a longer side has no basis.
    """
    checked_betas("soap", b1, b2, eps)

    def sides(shape: tuple[int, ...]) -> list[str]:
        return [side for side, size in zip(_SIDES, shape[-2:], strict=True) if size <= max_dim]

    def init(params: structure.Tree) -> structure.Tree:
        layouts = layouts_of(params, "soap")

        def whole(path: str, leaf: Any) -> Any:
            layout = layouts[path]
            shape = leaf.shape if layout is None else layout.shape
            if len(shape) < 2:
                raise ValueError(
                    f"soap: {path}: got shape {tuple(shape)}, wanted matrices [..., m, n]; leave it to AdamW with"
                    " `matrices`"
                )
            dealt = None if layout is None else dealt_layout(layout)
            if isinstance(leaf, ArraySpec):
                return leaf.replace(0.0) if dealt is None else ArraySpec(dealt.replace(dtype=leaf.dtype))
            return leaf.new_zeros(leaf.shape if dealt is None else dealt.local_shape(0))

        zeros = structure.map_with_path(whole, params)
        state = {"m": zeros, "v": tree.zeros_like(zeros)}
        for side in _SIDES:
            square = structure.map_with_path(
                lambda path, x, side=side: _square(x, side) if side in sides(x.shape) else None, zeros
            )
            state |= {side: square, f"{side}_basis": tree.zeros_like(square)}
        return {name: value for name, value in state.items() if tree.leaves(value)}

    def update(
        updates: structure.Tree, state: structure.Tree, params: structure.Tree, count: torch.Tensor
    ) -> tuple[structure.Tree, structure.Tree]:
        layouts = layouts_of(params, "soap", updates, state)

        def scalars(dtype: torch.dtype) -> list[torch.Tensor]:
            return [*bias_corrections(b1, b2, count, dtype), (count == 0).to(dtype)]

        scalars_of = per_dtype(updates, scalars)
        paths, leaves, spec = structure.flatten(updates)
        states = {name: dict(zip(tree.paths(x), tree.leaves(x), strict=True)) for name, x in state.items()}
        out, new = [], {name: {} for name in state}
        for path, g in zip(paths, leaves, strict=True):
            layout = layouts[path]
            dealt = None if layout is None else dealt_layout(layout)
            whole = in_layout(g, layout, dealt)
            mine = {name: values[path] for name, values in states.items() if path in values}
            direction, changed = _one(whole, mine, scalars_of[g.dtype], b1, b2, eps)
            out.append(in_layout(direction, dealt, layout))
            for name, value in changed.items():
                new[name][path] = value
        filled = {
            name: structure.map_with_path(lambda path, old, name=name: new[name][path], value)
            for name, value in state.items()
        }
        return structure.unflatten(spec, out), filled

    return Transform(init, update)


def _one(g: torch.Tensor, state: dict, scalars: tuple[torch.Tensor, ...], b1: float, b2: float, eps: float):
    """(the direction, the new state) of one leaf of full matrices g[..., m, n]."""
    correct_m, correct_root_v, first = scalars
    x = g.reshape(-1, *g.shape[-2:])
    new, bases = {}, {}
    for side in _SIDES:
        if side not in state:
            continue
        gram = torch.bmm(x, x.mT) if side == "left" else torch.bmm(x.mT, x)
        size = gram.shape[-1]
        statistics = b2 * state[side].view(-1, size, size) + (1 - b2) * gram
        eye = torch.eye(size, dtype=x.dtype, device=x.device)
        before = state[f"{side}_basis"].view(-1, size, size) + first * eye
        ridge = _RIDGE / size * (statistics * eye).sum((-2, -1), keepdim=True)
        bases[side] = torch.linalg.qr(torch.baddbmm(ridge * before, statistics, before)).Q
        new[side] = statistics.view(state[side].shape)
        # LAPACK's columns are one after another; a state that does not keep its strides is another signature for jit.
        new[f"{side}_basis"] = bases[side].contiguous().view(state[side].shape)

    def turned(y: torch.Tensor, back: bool) -> torch.Tensor:
        if "left" in bases:
            y = torch.bmm(bases["left"] if back else bases["left"].mT, y)
        if "right" in bases:
            y = torch.bmm(y, bases["right"].mT if back else bases["right"])
        return y

    new["m"] = b1 * state["m"] + (1 - b1) * g
    rotated = turned(x, back=False)
    v = b2 * state["v"].view(x.shape) + (1 - b2) * rotated * rotated
    new["v"] = v.view(g.shape)
    direction = turned(new["m"].view(x.shape), back=False) * correct_m / (v.sqrt() * correct_root_v + eps)
    return turned(direction, back=True).view(g.shape), new


def _square(leaf: torch.Tensor | ArraySpec, side: str) -> torch.Tensor | ArraySpec:
    """Zeros [..., m, m] or [..., n, n] for a leaf of full matrices [..., m, n]."""
    size = leaf.shape[-2 if side == "left" else -1]
    if isinstance(leaf, ArraySpec):
        return leaf.replace(shape=(*leaf.shape[:-2], size, size))
    return leaf.new_zeros((*leaf.shape[:-2], size, size))
