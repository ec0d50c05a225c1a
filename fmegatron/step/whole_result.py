"""The result of a step that donates a State and returns it in its place, without a look at each leaf."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import optree

from fmegatron import tree
from fmegatron.step.state import State, Unseen
from fmegatron.step.tracing import Traced

__all__ = ["Whole"]


class Whole:
    """How the result of a step is made whose first argument and first result are a State that it may take whole."""

    def __init__(self, traced: Traced, state: optree.PyTreeSpec, others: list[optree.PyTreeSpec]):
        self.state, self.others, self.alone = state, others, traced.out_tree.type is not tuple
        self.static = traced.out_static[state.num_leaves :]

    @classmethod
    def of(cls, traced: Traced, donated: Mapping[int, int], args: tuple, donate: Sequence[int]) -> Whole | None:
        """None for a step whose leaves have to be looked at one by one: of another donated argument than a State in
        place 0, of one that holds other things than tensors, and of one whose leaves do not return in their order."""
        if tuple(donate) != (0,) or type(args[0]) is not State:
            return None
        state, *others = traced.out_tree.children() if traced.out_tree.type is tuple else [traced.out_tree]
        in_order = list(donated.items()) == [(i, i) for i in range(state.num_leaves)]
        if state.type is not State or not in_order or len(tree.leaves(args[0])) != state.num_leaves:
            return None
        return cls(traced, state, others)

    def result(self, leaves: list, outs: Sequence) -> Any:
        """The result of a call. leaves: of the State, with new values. outs: the other tensors that it returned."""
        state = State.unseen(Unseen(self, leaves, self.state))
        if self.alone:
            return state
        rest, static = iter(outs), iter(self.static)
        found = []
        for spec in self.others:
            values = [next(rest) if s is None else s[0] for s in itertools.islice(static, spec.num_leaves)]
            found.append(optree.tree_unflatten(spec, values))
        return (state, *found)
