"""Donation under Inductor: a leaf that becomes a permutation of what is written at indices of its old value.

What Inductor writes in place into the memory of a leaf, and reads at other indices, it may fuse with the write of the
new value: an element is then overwritten before it is read.
"""

import random

import pytest
import torch

from fmegatron.step import jit
from tests.pairs import few

F64 = torch.float64
PUTS = {
    "index_put": lambda x, i, v: x.index_put((i,), v),
    "index_add": lambda x, i, v: x.index_add(0, i, v),
    "index_copy": lambda x, i, v: x.index_copy(0, i, v),
    "scatter": lambda x, i, v: x.scatter(0, i[:, None].expand_as(v), v),
    "slice_scatter": lambda x, i, v: x.slice_scatter(v, 0, 1, 3),
    "assigned": lambda x, i, v: _assigned(x.clone(), v),
}
MOVES = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "transposed": lambda x: x.t(),
    "cat": lambda x: torch.cat([x[2:], x[:2]]),
    "gathered": lambda x: x[torch.tensor([3, 1, 0, 2])] + 1,
}


def _assigned(to, v):
    to[1:3] = v
    return to


def old():
    return torch.arange(16, dtype=F64).view(4, 4) - 3


AT, NEW = torch.tensor([0, 2]), torch.full((2, 4), 9.0, dtype=F64)


def different(step, state, *args):
    """Where the donated step of Inductor differs from plain torch."""
    want, beside = step({k: x.clone() for k, x in state.items()}, *args)
    got, other = jit(step, donate=0)({k: x.clone() for k, x in state.items()}, *args)
    found = [k for k in want if not torch.equal(got[k], want[k])]
    return found + [f"beside {k}" for k in beside if not torch.equal(other[k], beside[k])]


@pytest.mark.medium
def test_a_leaf_becomes_a_permutation_of_a_value_put_into_it():
    """7 of 15 were wrong."""
    forms = {f"{put}, {move}": (PUTS[put], MOVES[move]) for put in PUTS for move in MOVES}

    def f(state, i, v):
        return {k: move(put(state[k], i, v)).contiguous() for k, (put, move) in forms.items()}, {"sum": v.sum()}

    assert different(f, {k: old() for k in forms}, AT, NEW) == []


@pytest.mark.slow
def test_a_leaf_becomes_a_view_of_its_permutation():
    """The new value is a copy in another order, seen through a view: it was written while the old one was read."""

    def f(state):
        x = state["x"].view(2, 2, 2, 2)
        return {
            "x": x.permute(2, 1, 0, 3).reshape(4, 4),
            "y": state["y"].view(2, 8).t().reshape(4, 4),
            "z": (state["z"].view(8, 2).t() + 1).reshape(4, 4).t(),
            "w": state["x"].view(2, 8).t().reshape(4, 4),
        }, {"z": state["z"].view(8, 2).t().reshape(4, 4)}

    assert different(f, {name: old() for name in "xyzw"}) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_permutation_is_returned_beside_the_leaf():
    """The reader at another index is not what is written."""

    def f(state, i, v):
        written = {k: put(state[k], i, v) for k, put in PUTS.items()}
        return {k: x * 2 for k, x in written.items()}, {k: x.flip(0) + x.t() for k, x in written.items()}

    assert different(f, {k: old() for k in PUTS}, AT, NEW) == []


def program(seed):
    """A random step of a few leaves: each becomes what views, permutations and writes at indices make of them."""
    draw = random.Random(seed)
    ops = [*PUTS.values()] * 2 + [lambda x, i, v, move=move: move(x) for move in MOVES.values()]
    ops += [lambda x, i, v: x * 2 + 1, lambda x, i, v: x.reshape(2, 8).flip(1).view(4, 4), lambda x, i, v: x + x.t()]
    ops += [lambda x, i, v: x.masked_fill(x > 4, -1.0), lambda x, i, v: x.cumsum(0), lambda x, i, v: x.clone()]
    plan = [(draw.randrange(4 + n), draw.choice(ops), draw.randrange(4 + n)) for n in range(12)]
    added, ends = [draw.random() < 0.2 for _ in plan], [draw.randrange(2, 16) for _ in range(8)]

    def f(state, i, v):
        values = [*state.values()]
        for (at, op, other), both in zip(plan, added, strict=True):
            values.append(op(values[at], i, v) + values[other] if both else op(values[at], i, v))
        new = {k: values[n] * 1 for k, n in zip(state, ends, strict=False)}
        return new, {str(n): values[n] for n in ends[4:]}

    return f


@pytest.mark.medium
@pytest.mark.parametrize("seed", few(3, [(seed,) for seed in range(60)]))
def test_random_programs_of_writes_and_permutations(seed):
    assert different(program(seed), {name: old() * n for n, name in enumerate("abcd", 1)}, AT, NEW) == []
