"""Exponential moving average (EMA) of the parameters, in the state of any optimizer."""

from __future__ import annotations

import torch

from fmegatron import tree
from fmegatron.optim.clipping import GradNorm
from fmegatron.optim.from_transforms import Optimizer
from fmegatron.optim.recorded import recorded
from fmegatron.tree import arithmetic, structure


@recorded
def averaged(opt: Optimizer, decay: float) -> Optimizer:
    """`opt`, whose state also has the average of the parameters, as its entry "average".

        average = decay·average + (1 - decay)·p, after each update; it begins as the parameters

    The average has the paths of the trained parameters and is laid out as the optimizer sees them, float64 for float64
    parameters and float32 for all others, of whose master copies it is the average where the state has them.
    `step.averaged_params` gives the parameters to evaluate with. Wrap the optimizer itself, and put `compressed` and
    `skip_nonfinite` around.

    Raises ValueError for a decay outside of [0, 1) and, from `init`, for an optimizer whose state has an average.

    >>> params = {"w": torch.tensor([1.0])}
    >>> from fmegatron import optim
    >>> opt = averaged(optim.sgd(1.0), decay=0.75)
    >>> params, state = opt.update({"w": torch.tensor([4.0])}, opt.init(params), params)
    >>> params["w"].item(), state["average"]["w"].item()
    (-3.0, 0.0)
    """
    if not 0 <= decay < 1:
        raise ValueError(f"averaged: decay: got {decay}, wanted 0 <= decay < 1, such as 0.999")

    def trained(params: structure.Tree) -> structure.Tree:
        return tree.partition(params, opt.trains)[0]

    def init(params: structure.Tree) -> structure.Tree:
        state = opt.init(params)
        if "average" in state:
            raise ValueError('averaged: got an optimizer with the state "average", wanted one without; average once')
        return {**state, "average": tree.copies(trained(params), arithmetic.working_dtype)}

    def update(
        grads: structure.Tree, state: structure.Tree, params: structure.Tree, norm: GradNorm | None = None
    ) -> tuple[structure.Tree, structure.Tree]:
        inner = {name: value for name, value in state.items() if name != "average"}
        params, new = opt.update(grads, inner, params, norm)
        master = dict(zip(tree.paths(new.get("master", {})), tree.leaves(new.get("master", {})), strict=True))

        def one(path: str, average: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            own = master.get(path, p)
            own = own if own.dtype == average.dtype else p.to(average.dtype)  # a master may be stored in parts
            return decay * average + (1 - decay) * own

        return params, {**new, "average": structure.map_with_path(one, state["average"], trained(params))}

    return opt._replace(init=init, update=update)


def average_of(state: structure.Tree) -> structure.Tree:
    """The average in the state of an optimizer that `averaged` made, through its guards. ValueError without one."""
    inner = state
    while "average" not in inner:
        if not (isinstance(inner, dict) and "opt" in inner):
            raise ValueError(
                f"average_of: got {structure.in_words(state)} without an average, wanted the state of an optimizer "
                "that keeps one; make it with optim.averaged(optimizer, decay)"
            )
        inner = inner["opt"]
    return inner["average"]
