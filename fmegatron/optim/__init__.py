"""optim: optimizers as pairs of pure functions (init, update), made by chaining transforms."""

from fmegatron.optim.adamw import (
    LearningRate,
    adamw,
    add_decayed_weights,
    neither_norm_nor_bias,
    scale_by_adam,
    scale_by_learning_rate,
)
from fmegatron.optim.clip import clip, clip_by_global_norm, clip_scale, global_norm
from fmegatron.optim.optimizer import Optimizer, optimizer, working_dtype
from fmegatron.optim.schedule import Schedule, constant, cosine, linear, wsd
from fmegatron.optim.sgd import accumulate_momentum, sgd
from fmegatron.optim.transform import Transform, chain, fill_absent, masked, path_predicate, stateless

__all__ = [
    "LearningRate",
    "Optimizer",
    "Schedule",
    "Transform",
    "accumulate_momentum",
    "adamw",
    "add_decayed_weights",
    "chain",
    "clip",
    "clip_by_global_norm",
    "clip_scale",
    "constant",
    "cosine",
    "fill_absent",
    "global_norm",
    "linear",
    "masked",
    "neither_norm_nor_bias",
    "optimizer",
    "path_predicate",
    "scale_by_adam",
    "scale_by_learning_rate",
    "sgd",
    "stateless",
    "wsd",
    "working_dtype",
]
