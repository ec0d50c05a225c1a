"""optim: optimizers as pairs of pure functions (init, update), made by chaining transforms."""

from fmegatron.optim.adafactor import adafactor, scale_by_factored_rms
from fmegatron.optim.adamw import (
    LearningRate,
    adamw,
    add_decayed_weights,
    neither_norm_nor_bias,
    scale_by_adam,
    scale_by_learning_rate,
)
from fmegatron.optim.blockwise import Blockwise, float8, float16, int8
from fmegatron.optim.clip import clip, clip_by_global_norm, clip_scale, global_norm, group_norms, joint_norm, top_level
from fmegatron.optim.compressed import Bfloat16, Float32, NoMaster, Remainder, compressed
from fmegatron.optim.grids import Dynamic, Floating, Linear
from fmegatron.optim.groups import Group, grouped, scale_by_rates
from fmegatron.optim.guard import Spike, skip_nonfinite
from fmegatron.optim.lion import lion, scale_by_lion
from fmegatron.optim.loss_scale import LossScale, loss_scale_of
from fmegatron.optim.matrices import dealt_layout, on_whole_matrices
from fmegatron.optim.muon import fused_parts, is_hidden_matrix, muon, orthogonalize, scale_by_muon
from fmegatron.optim.mup import mup_init, mup_multipliers
from fmegatron.optim.offload import Offloaded, chunks_of, offload_schedule, to_host
from fmegatron.optim.optimizer import Optimizer, every_path, optimizer, working_dtype
from fmegatron.optim.rounding import join_master, split_master, stochastic_bfloat16
from fmegatron.optim.schedule import Schedule, constant, cosine, linear, wsd
from fmegatron.optim.sgd import accumulate_momentum, sgd
from fmegatron.optim.soap import scale_by_soap, soap
from fmegatron.optim.transform import (
    Transform,
    chain,
    fill_absent,
    masked,
    merge,
    partition,
    path_predicate,
    stateless,
)

__all__ = [
    "Bfloat16",
    "Blockwise",
    "Dynamic",
    "Float32",
    "Floating",
    "Group",
    "LearningRate",
    "Linear",
    "LossScale",
    "NoMaster",
    "Offloaded",
    "Optimizer",
    "Remainder",
    "Schedule",
    "Spike",
    "Transform",
    "accumulate_momentum",
    "adafactor",
    "adamw",
    "add_decayed_weights",
    "chain",
    "chunks_of",
    "clip",
    "clip_by_global_norm",
    "clip_scale",
    "compressed",
    "constant",
    "cosine",
    "dealt_layout",
    "every_path",
    "fill_absent",
    "float16",
    "float8",
    "fused_parts",
    "global_norm",
    "group_norms",
    "grouped",
    "int8",
    "is_hidden_matrix",
    "join_master",
    "joint_norm",
    "linear",
    "lion",
    "loss_scale_of",
    "masked",
    "merge",
    "muon",
    "mup_init",
    "mup_multipliers",
    "neither_norm_nor_bias",
    "on_whole_matrices",
    "optimizer",
    "orthogonalize",
    "partition",
    "path_predicate",
    "scale_by_adam",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_rates",
    "scale_by_soap",
    "offload_schedule",
    "sgd",
    "skip_nonfinite",
    "soap",
    "split_master",
    "stateless",
    "stochastic_bfloat16",
    "to_host",
    "top_level",
    "working_dtype",
    "wsd",
]
