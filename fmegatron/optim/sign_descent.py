"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""

import torch

from fmegatron import tree
from fmegatron.optim.adam import LearningRate, add_decayed_weights, scale_by_learning_rate
from fmegatron.optim.from_transforms import Optimizer, optimizer
from fmegatron.optim.recorded import recorded
from fmegatron.optim.transform import Transform, Where
from fmegatron.tree import structure


@recorded
def lion(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.1,
    decay: Where | None = None,
) -> Optimizer:
    """Lion with decoupled weight decay: p = p - lr·(sign(b1 m + (1 - b1) g) + weight_decay·p).

    Half the state of AdamW; its paper takes a learning rate 3 to 10 times smaller and a decay as much larger.

    Args:
        learning_rate: a number, a `Schedule`, `settable`, or a function of the count (0-d int64 -> 0-d tensor).
        b1: weight of the momentum in the direction, in [0, 1).
        b2: decay rate of the momentum, in [0, 1).
        weight_decay: λ, 0 or more.
        decay: which leaves decay, a function of the path or a list of regular expressions; by default
            matrices, and stacks of them (`Layout.is_matrix`), not norms and biases.

    Raises:
        ValueError: values outside of their range.
    """
    return optimizer(
        lion=scale_by_lion(b1, b2),
        decay=add_decayed_weights(weight_decay, decay),
        rate=scale_by_learning_rate(learning_rate),
    )


@recorded
def scale_by_lion(b1: float = 0.9, b2: float = 0.99) -> Transform:
    """g -> sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g; the state is the tree of m."""
    for name, value in {"b1": b1, "b2": b2}.items():
        if not 0 <= value < 1:
            raise ValueError(
                f"lion: {name}: got {value}, wanted 0 <= {name} < 1, such as {0.9 if name == 'b1' else 0.99}"
            )

    def update(
        updates: structure.Tree, state: structure.Tree, params: structure.Tree, count: torch.Tensor
    ) -> tuple[structure.Tree, structure.Tree]:
        del params, count
        directions = tree.map(lambda m, g: (b1 * m + (1 - b1) * g).sign(), state, updates)
        return directions, tree.map(lambda m, g: b2 * m + (1 - b2) * g, state, updates)

    return Transform(tree.zeros_like, update)
