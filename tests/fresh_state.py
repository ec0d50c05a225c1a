"""The state of a step for parameters that a test has made itself."""

import torch

from fmegatron import tree
from fmegatron.step import State


def fresh_state(params, optimizer) -> State:
    """No step done, these parameters, and the optimizer's state for them."""
    device = tree.leaves(params)[0].device
    return State(torch.zeros((), dtype=torch.int64, device=device), params, optimizer.init(params))
