"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2), torch's formula.

Symbols, paper to ours: β1, β2 -> b1, b2; m, v -> the same; α -> learning rate; λ -> weight_decay; t -> count + 1.
"""

import math
from collections.abc import Callable

import torch

from fmegatron import tree
from fmegatron.optim.from_transforms import Optimizer, optimizer
from fmegatron.optim.rates_in_state import Settable
from fmegatron.optim.recorded import recorded
from fmegatron.optim.scalars import per_dtype
from fmegatron.optim.schedule import Schedule
from fmegatron.optim.transform import Transform, Where, masked, stateless
from fmegatron.tree import structure

LearningRate = float | Schedule | Settable | Callable[[torch.Tensor], torch.Tensor]


@recorded
def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay: Where | None = None,
) -> Optimizer:
    """The AdamW optimizer; every leaf is one elementwise expression, which reads p, m, v and g once when it is
    compiled.

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g²
        p = (1 - lr·weight_decay) p  -  lr · m/(1 - b1ᵗ) / (√v/√(1 - b2ᵗ) + eps)

    Args:
        learning_rate: a number, a `Schedule`, `settable`, or a function of the count (0-d int64 -> 0-d tensor).
        b1: decay rate of the first moment, in [0, 1).
        b2: decay rate of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: λ, 0 or more.
        decay: which leaves decay, a function of the path or a list of regular expressions; by default
            matrices, and stacks of them (`Layout.is_matrix`), not norms and biases.

    Raises:
        ValueError: values outside of their range.
    """
    return optimizer(
        adam=scale_by_adam(b1, b2, eps),
        decay=add_decayed_weights(weight_decay, decay),
        rate=scale_by_learning_rate(learning_rate),
    )


@recorded
def scale_by_adam(b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8) -> Transform:
    """g -> m/(1 - b1ᵗ) / (√v/√(1 - b2ᵗ) + eps), with the moments {"m", "v"} as state."""
    checked_betas("adam", b1, b2, eps)

    def init(params: structure.Tree) -> structure.Tree:
        return {"m": tree.zeros_like(params), "v": tree.zeros_like(params)}

    def update(
        updates: structure.Tree, state: structure.Tree, params: structure.Tree, count: torch.Tensor
    ) -> tuple[structure.Tree, structure.Tree]:
        del params

        corrections_of = per_dtype(updates, lambda dtype: bias_corrections(b1, b2, count, dtype))

        def direction(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            correct_m, correct_root_v = corrections_of[m.dtype]
            return m * correct_m / (v.sqrt() * correct_root_v + eps)

        new_m = tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["m"], updates)
        new_v = tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state["v"], updates)
        return tree.map(direction, new_m, new_v), {"m": new_m, "v": new_v}

    return Transform(init, update)


@recorded
def add_decayed_weights(weight_decay: float, decay: Where | None = None) -> Transform:
    """u -> u + weight_decay·p on the leaves that `decay` selects; None: on matrices (see `adamw`)."""
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay: got {weight_decay}, wanted 0 or more, such as 0.1")
    if weight_decay == 0:
        return stateless(lambda updates, params, count: updates)
    add = stateless(lambda updates, params, count: tree.map(lambda u, p: u + weight_decay * p, updates, params))
    return masked(add, decay)


@recorded
def scale_by_learning_rate(learning_rate: LearningRate) -> Transform:
    """u -> -lr·u, where a schedule gives lr as a function of the count of updates done before (0, 1, 2 …).

    A `settable` rate is the transform's state.
    """
    checked_rate(learning_rate)
    if isinstance(learning_rate, Settable):

        def follow(
            updates: structure.Tree, state: structure.Tree, params: structure.Tree, count: torch.Tensor
        ) -> tuple[structure.Tree, structure.Tree]:
            rates = per_dtype(updates, lambda dtype: [-state["settable"].to(dtype)])
            return tree.map(lambda u: u * rates[u.dtype][0], updates), tree.map(torch.clone, state)

        return Transform(learning_rate.init, follow)
    if not callable(learning_rate):
        return stateless(lambda updates, params, count: tree.map(lambda u: u * -learning_rate, updates))

    def update(updates: structure.Tree, params: structure.Tree, count: torch.Tensor) -> structure.Tree:
        rates = per_dtype(updates, lambda dtype: [-torch.as_tensor(learning_rate(count)).to(count.device, dtype)])
        return tree.map(lambda u: u * rates[u.dtype][0], updates)

    return stateless(update)


def checked_rate(learning_rate: LearningRate) -> None:
    """ValueError for a number that is negative or not finite."""
    if callable(learning_rate) or isinstance(learning_rate, Settable):
        return
    if not (learning_rate >= 0 and math.isfinite(learning_rate)):
        raise ValueError(f"learning_rate: got {learning_rate}, wanted a finite number of 0 or more, or a schedule")


def checked_betas(who: str, b1: float, b2: float, eps: float) -> None:
    """ValueError for decay rates outside of [0, 1) or a negative eps."""
    for name, value in {"b1": b1, "b2": b2}.items():
        if not 0 <= value < 1:
            raise ValueError(
                f"{who}: {name}: got {value}, wanted 0 <= {name} < 1, such as {0.9 if name == 'b1' else 0.95}"
            )
    if not eps >= 0:
        raise ValueError(f"{who}: eps: got {eps}, wanted 0 or more, such as 1e-8")


def bias_corrections(
    b1: float, b2: float, count: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(1/(1 - b1ᵗ), 1/√(1 - b2ᵗ)) for t = count + 1: factors of the first moment and of the root of the second."""
    t = (count + 1).to(dtype)
    return _one_minus_power(b1, t).reciprocal(), _one_minus_power(b2, t).rsqrt()


def _one_minus_power(b: float, t: torch.Tensor) -> torch.Tensor:
    """1 - bᵗ without cancellation, so that float32 is enough."""
    return -torch.expm1(t * (math.log(b) if b else -math.inf))
