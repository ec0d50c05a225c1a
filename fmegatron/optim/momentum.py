"""Stochastic gradient descent with optional momentum (Sutskever et al. 2013), torch's formula."""

import torch

from fmegatron import tree
from fmegatron.optim.adam import LearningRate, add_decayed_weights, scale_by_learning_rate
from fmegatron.optim.from_transforms import Optimizer, optimizer
from fmegatron.optim.recorded import recorded
from fmegatron.optim.transform import Transform, Where
from fmegatron.tree import structure


@recorded
def sgd(
    learning_rate: LearningRate,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay: Where | None = None,
) -> Optimizer:
    """SGD: p = p - lr·u, where u is g + weight_decay·p, or its momentum (see `accumulate_momentum`).

    The decay is an L2 penalty, as in torch.optim.SGD: it goes through the momentum.

    Args:
        learning_rate: a number, a `Schedule`, `settable`, or a function of the count (0-d int64 -> 0-d tensor).
        momentum: between 0 and 1; 0 for none.
        nesterov: look ahead along the momentum.
        weight_decay: λ, 0 or more.
        decay: which leaves decay, a function of the path or a list of regular expressions; by default
            matrices, and stacks of them (`Layout.is_matrix`), not norms and biases.

    Raises:
        ValueError: values outside of their range.
    """
    steps = {"decay": add_decayed_weights(weight_decay, decay)}
    if momentum or nesterov:
        steps["momentum"] = accumulate_momentum(momentum, nesterov)
    return optimizer(**steps, rate=scale_by_learning_rate(learning_rate))


@recorded
def accumulate_momentum(momentum: float, nesterov: bool = False) -> Transform:
    """m = momentum·m + g; g -> m, or with Nesterov's look-ahead g -> g + momentum·m. The state is the tree of m."""
    if not 0 < momentum < 1:
        raise ValueError(f"momentum: got {momentum}, wanted a number between 0 and 1, such as 0.9")

    def update(
        updates: structure.Tree, state: structure.Tree, params: structure.Tree, count: torch.Tensor
    ) -> tuple[structure.Tree, structure.Tree]:
        del params, count
        new = tree.map(lambda m, g: momentum * m + g, state, updates)
        return (tree.map(lambda m, g: g + momentum * m, new, updates) if nesterov else new), new

    return Transform(tree.zeros_like, update)
