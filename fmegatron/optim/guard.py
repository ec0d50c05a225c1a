"""Update guards: steps with non-finite gradients, or with spikes of their norm, are skipped inside the graph."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron import tree
from fmegatron.optim.clipping import GradNorm, norm_beside
from fmegatron.optim.from_transforms import Optimizer
from fmegatron.optim.loss_scale import LossScale, scalar
from fmegatron.optim.recorded import recorded
from fmegatron.tree import arithmetic, labels, structure


@dataclass(frozen=True)
class Spike:
    """A step is a spike when its gradient norm is above `factor` times the running mean of the norms.

    The mean is mean = decay·mean + (1 - decay)·min(norm, factor·mean), corrected as Adam's moments are; so it follows
    a lasting change, skipped or not, and cannot lock itself in. The first `warmup` steps are never spikes.
    """

    factor: float = 5.0
    decay: float = 0.99
    warmup: int = 100

    def __post_init__(self) -> None:
        if not (self.factor > 1 and 0 < self.decay < 1 and self.warmup >= 1):
            raise ValueError(f"Spike: got {self}, wanted factor > 1, 0 < decay < 1 and warmup >= 1")

    def init(self, like: torch.Tensor | tree.ArraySpec) -> dict[str, Any]:
        """{"mean": float64, "seen": int64 norms that it is made of}, 0-d; specs for a spec."""
        return {"mean": scalar(like, 0.0, torch.float64), "seen": scalar(like, 0, torch.int64)}

    def update(self, state: dict[str, torch.Tensor], norm: torch.Tensor) -> tuple[torch.Tensor, dict]:
        """(whether the norm is one to be used, 0-d bool; the new state); a norm that is not finite changes nothing."""
        mean, seen, norm = state["mean"], state["seen"], norm.to(torch.float64)
        limit = self.factor * mean / -torch.expm1(seen.clamp(min=1) * math.log(self.decay))
        limit = torch.where(seen < self.warmup, math.inf, limit)
        finite = norm.isfinite()
        new = self.decay * mean + (1 - self.decay) * torch.minimum(norm, limit)
        return norm <= limit, {"mean": torch.where(finite, new, mean), "seen": seen + finite}


@recorded
def skip_nonfinite(
    opt: Optimizer,
    *,
    clip_norm: float | None = None,
    spike: Spike | None = None,
    loss_scale: LossScale | None = None,
) -> Optimizer:
    """`opt`, but for a step whose gradients are not all finite, parameters and state stay bit for bit as they were.

    All ranks make one decision, by the global norm of the gradients (a norm that overflows counts as not finite), in
    the graph and without asking the host. The state is {"opt": …, "skipped": 0-d int64, "norm": 0-d float64, the last
    norm}, and "spike" and "loss_scale" when these are wanted.

    The norm that comes with the gradients (`Update`) is judged; without one it is computed here (`global_norm`, of
    gradients in the layouts of the parameters). `opt` clips to the limit, after the norm is judged: a norm that was
    clipped before has no spikes.

    Args:
        opt: the optimizer.
        clip_norm: the gradients are clipped to it, by the same norm (the lower of it and of the step's own clip_norm).
        spike: skip spikes of the norm too.
        loss_scale: `build_train_step` multiplies the loss by the state's scale (`Optimizer.loss_scale`) and divides the
            gradients; here the scale is only moved on.
    """

    def init(params: structure.Tree) -> structure.Tree:
        like = tree.leaves(params)[0]
        state = {"opt": opt.init(params), "skipped": scalar(like, 0, torch.int64)}
        state["norm"] = scalar(like, 0.0, torch.float64)
        more = {"spike": spike, "loss_scale": loss_scale}
        return state | {name: value.init(like) for name, value in more.items() if value is not None}

    def trained(x: structure.Tree) -> structure.Tree:
        return tree.partition(x, opt.trains)[0]

    def update(
        grads: structure.Tree, state: structure.Tree, params: structure.Tree, norm: GradNorm | None = None
    ) -> tuple[structure.Tree, structure.Tree]:
        grads = trained(grads)
        value, limit = norm or (norm_beside(grads, trained(params)), None)
        limit = min((x for x in (clip_norm, limit) if x is not None), default=None)
        finite = value.isfinite()
        used, more = finite, {}
        if loss_scale is not None:
            more["loss_scale"] = loss_scale.update(state["loss_scale"], finite)
        if spike is not None:
            usual, more["spike"] = spike.update(state["spike"], value)
            used = finite & usual
        used = arithmetic.stored(used)[0]
        new_params, new_opt = opt.update(grads, state["opt"], params, GradNorm(value, limit))

        def chosen(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
            return labels.alike(torch.where(used, new, old), old)

        kept = tree.merge(tree.map(chosen, trained(new_params), trained(params)), params)
        skipped = state["skipped"] + used.logical_not()
        return kept, {
            "opt": tree.map(chosen, new_opt, state["opt"]),
            "skipped": skipped,
            "norm": value.to(torch.float64),
            **more,
        }

    def factor(state: structure.Tree) -> torch.Tensor | None:
        return opt.loss_scale(state["opt"]) if loss_scale is None else state["loss_scale"]["factor"]

    def applied(before: structure.Tree, after: structure.Tree) -> torch.Tensor:
        own, inner = after["skipped"] == before["skipped"], opt.applied(before["opt"], after["opt"])
        return own if inner is None else own & inner

    return opt._replace(init=init, update=update, loss_scale=factor, applied=applied)
