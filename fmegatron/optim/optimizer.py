"""Optimizers: a chain of transforms, one count, and master copies for parameters of low precision."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmegatron import tree
from fmegatron.layout import Layout
from fmegatron.optim.transform import Transform, chain, fill_absent
from fmegatron.tree import ArraySpec

Tree = Any
_RESERVED = ("count", "master")


def every_path(path: str) -> bool:
    """True: the choice of all leaves."""
    del path
    return True


class Optimizer(NamedTuple):
    """Two pure functions; nothing is changed in place, and nothing in the state is a Python number.

    init(params) -> state for a tree of tensors; for a tree of ArraySpecs, the ArraySpecs of that state: the same
    structure. update(grads, state, params) -> (new_params, new_state): both of the structure, shapes and dtypes that
    came in. `params` may be any part of the tree for which the state was made (one layer's shards), because every leaf
    is updated on its own.

    The state is a dict: "count" (0-d int64, the updates done), one entry for each transform that has state, and
    "master", the float32 copies of those parameters that are kept in a lower precision (no entry when there is none).

    trains(path) tells which parameters are updated at all: frozen ones have no state, need no gradient (None may stand
    in its place) and come back from `update` as the tensors that they were.

    judges_norm: whether `update` looks at the global norm of the gradients (`skip_nonfinite`). Such an update takes two
    keywords more, so that a step that knows the norm need not have it computed twice, and must not clip before it is
    judged: update(grads, state, params, norm=norm, max_norm=clip_norm) with gradients that are not clipped yet.
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]
    trains: Callable[[str], bool] = every_path
    judges_norm: bool = False


def optimizer(**transforms: Transform) -> Optimizer:
    """The optimizer that adds to the parameters what a chain of transforms makes of the gradients.

    All arithmetic is in working precision: float64 for float64 parameters, float32 for all others, whose float32 master
    copy the state keeps and whose parameters are the rounded master. ValueError for a transform named "count" or
    "master"; `init` raises it for complex parameters, naming the path.
    """
    if taken := sorted(set(_RESERVED) & set(transforms)):
        raise ValueError(
            f"optimizer: a transform is named {taken[0]!r}, which the state uses itself; choose another name"
        )
    inner = chain(**transforms)

    def init(params: Tree) -> Tree:
        leaves = tree.leaves(params)
        if not leaves:
            raise ValueError(
                "optimizer: got parameters without a single tensor or ArraySpec, so there is nothing to update"
            )
        for path, leaf in zip(tree.paths(params), leaves, strict=True):
            if leaf.dtype.is_complex:
                raise ValueError(
                    f"optimizer: {path}: got {leaf.dtype}, wanted a real floating-point dtype: moments, masters and "
                    "decay are defined for real numbers; keep real and imaginary part as a last dim of 2 "
                    "(torch.view_as_real) and join them in the loss (torch.view_as_complex)"
                )
        narrow = tree.map(lambda p: None if p.dtype == working_dtype(p.dtype) else p, params)
        master = tree.copies(narrow, working_dtype)
        state = {"count": _count_like(leaves[0]), **inner.init(fill_absent(master, params))}
        return state | {"master": master} if tree.leaves(master) else state

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        count, master = state["count"], state.get("master")
        working = params if master is None else fill_absent(master, params)
        grads = tree.map(lambda w, g: g.to(w.dtype), working, grads)
        updates, new_inner = inner.update(grads, state, working, count)
        working = tree.add(working, updates)
        new_state = {"count": count + 1, **new_inner}
        if master is not None:
            new_state["master"] = tree.map(lambda p, w: None if p.dtype == w.dtype else w, params, working)
        return tree.map(lambda p, w: w.to(p.dtype), params, working), new_state

    return Optimizer(init, update)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a parameter is updated: float64 for float64, float32 for float32 and everything narrower.

    >>> working_dtype(torch.bfloat16), working_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def _count_like(leaf: torch.Tensor | ArraySpec) -> torch.Tensor | ArraySpec:
    if isinstance(leaf, ArraySpec):
        return ArraySpec(Layout((), torch.int64, leaf.mesh))
    return torch.zeros((), dtype=torch.int64, device=leaf.device)
