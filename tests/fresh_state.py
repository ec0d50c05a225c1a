"""The state of a step for parameters that a test has made itself."""

import torch

from fmegatron import tree
from fmegatron.layout import Layout
from fmegatron.step import State


def fresh_state(params, optimizer) -> State:
    """No step done, these parameters, and the optimizer's state for them, as they are laid out, where they know it."""
    leaves = tree.leaves(params)
    state = State(torch.zeros((), dtype=torch.int64, device=leaves[0].device), params, optimizer.init(params))
    if not all(map(tree.layout_of, leaves)):
        return state
    specs = tree.map(lambda x: tree.ArraySpec(tree.layout_of(x)), params)
    step = Layout((), torch.int64, tree.layout_of(leaves[0]).mesh)
    return tree.place(state, State(step, specs, optimizer.init(specs)))
