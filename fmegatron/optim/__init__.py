"""Optimizers as pairs of pure functions (init, update), made by chaining gradient transforms.

`adamw`, `muon`, `lion` and `sgd` are ready to use; `grouped` trains groups of parameters in their own ways; `averaged`
and `skip_nonfinite` wrap an optimizer. `optim.contrib` has more. One of your own is a chain of transforms:

>>> import torch
>>> from fmegatron import optim, tree
>>> signs = optim.Transform(lambda params: {}, lambda g, state, params, count: (tree.map(torch.sign, g), state))
>>> opt = optim.optimizer(signs=signs, rate=optim.scale_by_learning_rate(optim.cosine(0.5, total=100)))
>>> params = {"w": torch.tensor([1.0, 2.0])}
>>> params, state = opt.update({"w": torch.tensor([3.0, -4.0])}, opt.init(params), params)
>>> params["w"].tolist(), state["count"].item()
([0.5, 2.5], 1)
"""

from fmegatron.optim.adamw import adamw, add_decayed_weights, scale_by_adam, scale_by_learning_rate
from fmegatron.optim.average import average_of, averaged
from fmegatron.optim.clip import GradNorm, clip, clip_by_global_norm, global_norm, group_norms
from fmegatron.optim.groups import Group, grouped
from fmegatron.optim.guard import Spike, skip_nonfinite
from fmegatron.optim.lion import lion, scale_by_lion
from fmegatron.optim.loss_scale import LossScale
from fmegatron.optim.muon import fused_parts, muon, scale_by_muon
from fmegatron.optim.optimizer import Optimizer, optimizer
from fmegatron.optim.schedule import Schedule, constant, cosine, linear, wsd
from fmegatron.optim.settable import set_rate, settable
from fmegatron.optim.sgd import accumulate_momentum, sgd
from fmegatron.optim.transform import Transform, chain

__all__ = [
    # optimizers, and what makes one
    "Optimizer",
    "Transform",
    "adamw",
    "lion",
    "muon",
    "optimizer",
    "sgd",
    # transforms
    "accumulate_momentum",
    "add_decayed_weights",
    "chain",
    "clip_by_global_norm",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    # groups of parameters
    "Group",
    "fused_parts",
    "grouped",
    # learning rates
    "Schedule",
    "constant",
    "cosine",
    "linear",
    "set_rate",
    "settable",
    "wsd",
    # norms of gradients
    "GradNorm",
    "clip",
    "global_norm",
    "group_norms",
    # an average of the parameters
    "average_of",
    "averaged",
    # steps that are skipped
    "LossScale",
    "Spike",
    "skip_nonfinite",
]
