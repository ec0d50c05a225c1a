"""The exponential moving average of the parameters, as part of an optimizer's state (Polyak & Juditsky 1992)."""

from __future__ import annotations

from fmegatron import tree
from fmegatron.optim.clip import GradNorm
from fmegatron.optim.optimizer import Optimizer
from fmegatron.tree import Tree


def averaged(opt: Optimizer, decay: float = 0.999) -> Optimizer:
    """`opt`, which also keeps an average of the parameters: average = decay·average + (1 - decay)·new parameters.

    The state is {"opt": …, "average": a tree as the parameters that are trained}, in float32 (float64 for float64
    parameters). It begins as the parameters, and has their layouts as the optimizer sees them; `step.averaged_params`
    gives the parameters to evaluate with. Parameters are updated as by `opt` alone. ValueError unless 0 <= decay < 1.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"averaged: got decay={decay}, wanted 0 <= decay < 1, such as 0.999")

    def trained(params: Tree) -> Tree:
        return tree.partition(params, opt.trains)[0]

    def init(params: Tree) -> Tree:
        return {"opt": opt.init(params), "average": tree.copies(trained(params), tree.working_dtype)}

    def update(grads: Tree, state: Tree, params: Tree, norm: GradNorm | None = None) -> tuple[Tree, Tree]:
        params, new = opt.update(grads, state["opt"], params, norm)
        average = tree.map(lambda a, p: decay * a + (1 - decay) * p.to(a.dtype), state["average"], trained(params))
        return params, {"opt": new, "average": average}

    return opt._replace(init=init, update=update, loss_scale=lambda state: opt.loss_scale(state["opt"]))


def average_of(state: Tree) -> Tree:
    """The average in the state of an optimizer that `averaged` made, through what wraps it. ValueError without one."""
    inner = state
    while "average" not in inner:
        if not (isinstance(inner, dict) and "opt" in inner):
            raise ValueError(
                f"average_of: got {tree.in_words(state)} without an average, wanted the state of an optimizer that "
                "keeps one; make it with optim.averaged(optimizer, decay)"
            )
        inner = inner["opt"]
    return inner["average"]
