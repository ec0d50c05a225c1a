"""Gradient transforms: pairs of pure functions that chain, in the manner of optax.

A transform sees leaves in working precision (float32, or float64 where the parameter is; `optim.optimizer` takes care
of it). Leaves of a tree may be absent: None, which optree treats as an empty node, stands at their place.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fmegatron import tree
from fmegatron.optim.recorded import recorded
from fmegatron.tree import labels, structure

Where = Callable[[str], bool] | Sequence[str]


class Transform(NamedTuple):
    """Two pure functions.

    init(params) -> state: the state for a tree of tensors; for a tree of ArraySpecs, the ArraySpecs of that state.
    update(updates, state, params, count) -> (updates, state): `updates` is the gradient, or what the transform before
    made of it; `count` (0-d int64) is the number of updates done before this one. The last transform's result is added
    to the parameters. A transform without state has the state {}.
    text: the call that made it, which is its repr.
    by_dims: whether what it does depends on which parameters are matrices (`Layout.is_matrix`).
    """

    init: Callable[[structure.Tree], structure.Tree]
    update: Callable[
        [structure.Tree, structure.Tree, structure.Tree, torch.Tensor], tuple[structure.Tree, structure.Tree]
    ]
    text: str = ""
    by_dims: bool = False

    def __repr__(self) -> str:
        return self.text or f"Transform of {self.update.__module__}"


def stateless(update: Callable[[structure.Tree, structure.Tree, torch.Tensor], structure.Tree]) -> Transform:
    """A transform without state, from a function (updates, params, count) -> updates."""
    return Transform(lambda params: {}, lambda updates, state, params, count: (update(updates, params, count), state))


@recorded
def chain(*unnamed: object, **transforms: Transform) -> Transform:
    """Apply transforms one after the other, in the order written; the names become the first part of the state's paths.

    `chain(adam=scale_by_adam(), rate=scale_by_learning_rate(1e-3))` has the state {"adam": …}: transforms without state
    leave no entry. ValueError for transforms without a name, and for what is no transform.
    """
    require_named("chain", unnamed, transforms)

    def init(params: structure.Tree) -> structure.Tree:
        states = {name: transform.init(params) for name, transform in transforms.items()}
        return {name: state for name, state in states.items() if tree.leaves(state)}

    def update(
        updates: structure.Tree, state: structure.Tree, params: structure.Tree, count: torch.Tensor
    ) -> tuple[structure.Tree, structure.Tree]:
        new_state = {}
        for name, transform in transforms.items():
            updates, new = transform.update(updates, state.get(name, {}), params, count)
            if name in state:
                new_state[name] = new
        return updates, new_state

    return Transform(init, update, by_dims=any(transform.by_dims for transform in transforms.values()))


def require_named(who: str, unnamed: tuple, transforms: dict) -> None:
    """ValueError for transforms that are given by position, and for what is no Transform, with the call that works."""
    if unnamed:
        raise ValueError(
            f"{who}: got {len(unnamed)} arguments without a name, wanted each transform by name, under which its "
            f"state is saved; {who}(adam=optim.scale_by_adam(), rate=optim.scale_by_learning_rate(1e-3))"
        )
    for name, transform in transforms.items():
        if not isinstance(transform, Transform):
            fix = "give scale_by_adam() and the like; averaged, compressed and skip_nonfinite wrap an Optimizer"
            raise ValueError(f"{who}: {name}: got {structure.in_words(transform)}, wanted a Transform; {fix}")


@recorded
def masked(transform: Transform, where: Where | None) -> Transform:
    """Apply a transform to the leaves that `where` selects; the others pass unchanged and have no state.

    `where` is a function of the path ("blocks/mlp/w_down") or a list of regular expressions, of which one must be found
    in it; None: matrices, and stacks of them (`Layout.is_matrix`).
    """
    if where is None:
        return masked_by(transform, lambda path, leaf: labels.is_matrix(leaf))._replace(by_dims=True)
    selects = path_predicate(where)
    return masked_by(transform, lambda path, leaf: selects(path))


def masked_by(transform: Transform, selects: Callable[[str, Any], bool]) -> Transform:
    """`masked` by a function of path and parameter: a tensor or an ArraySpec."""

    def init(params: structure.Tree) -> structure.Tree:
        return transform.init(structure.map_with_path(lambda path, p: p if selects(path, p) else None, params))

    def update(
        updates: structure.Tree, state: structure.Tree, params: structure.Tree, count: torch.Tensor
    ) -> tuple[structure.Tree, structure.Tree]:
        mine = structure.map_with_path(lambda path, u, p: u if selects(path, p) else None, updates, params)
        if not tree.leaves(mine):
            return updates, state
        own = structure.map_with_path(lambda path, p: p if selects(path, p) else None, params)
        changed, state = transform.update(mine, state, own, count)
        return tree.merge(changed, updates), state

    return Transform(init, update)


def path_predicate(where: Where) -> Callable[[str], bool]:
    """`where` as a function of the path: a function is returned as it is, regular expressions are searched for.

    >>> path_predicate(["w$", "^head/"])("blocks/w"), path_predicate(["^w"])("blocks/w")
    (True, False)
    """
    if callable(where):
        return where
    if isinstance(where, str):
        raise ValueError(f"where: got the path pattern {where!r}, wanted a list of patterns: [{where!r}]")
    if not isinstance(where, Iterable):
        fix = '[""] is every leaf' if where is True else "[] is none"
        raise ValueError(f"where: got {where!r}, wanted a function of the path, or a list of patterns of paths; {fix}")
    patterns = [re.compile(pattern) for pattern in where]
    return lambda path: any(pattern.search(path) for pattern in patterns)
