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

from fmegatron.moved import no_name as _no_name
from fmegatron.optim.adam import adamw, add_decayed_weights, scale_by_adam, scale_by_learning_rate
from fmegatron.optim.average import averaged
from fmegatron.optim.clipping import clip, clip_by_global_norm, global_norm
from fmegatron.optim.from_transforms import Optimizer, optimizer
from fmegatron.optim.groups import Group, grouped
from fmegatron.optim.guard import skip_nonfinite
from fmegatron.optim.loss_scale import LossScale
from fmegatron.optim.momentum import sgd
from fmegatron.optim.orthogonalized import muon
from fmegatron.optim.rates_in_state import set_rate, settable
from fmegatron.optim.schedule import constant, cosine, linear, wsd
from fmegatron.optim.sign_descent import lion
from fmegatron.optim.transform import Transform, chain

__all__ = [
    "Group",
    "LossScale",
    "Optimizer",
    "Transform",
    "adamw",
    "add_decayed_weights",
    "averaged",
    "chain",
    "clip",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "global_norm",
    "grouped",
    "linear",
    "lion",
    "muon",
    "optimizer",
    "scale_by_adam",
    "scale_by_learning_rate",
    "set_rate",
    "settable",
    "sgd",
    "skip_nonfinite",
    "wsd",
]

globals()["__getattr__"] = _no_name(__name__)
