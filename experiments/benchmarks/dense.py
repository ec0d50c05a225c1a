"""Dense Llamas in bf16, to be planned for a GPU that is not here: 1 billion parameters on one, 8 billion on eight.

    python -m fmegatron.plan experiments/benchmarks/dense.py --mesh fsdp=1 --device h100 --passes
    python -m fmegatron.plan experiments/benchmarks/dense.py --mesh fsdp=8 --device h100 --passes --size=8b --layers=32

16,384 tokens a rank, AdamW with fp32 parameters and moments, clip at 1. The plan of 8b is continued from few layers.
"""

from dataclasses import dataclass

import torch

from fmegatron import loop, model, optim
from fmegatron.layout import Mesh

SIZES = {  # as those of gpu.py; 8b: Llama 3's
    "1b": {"dim": 2048, "heads": 16, "kv_heads": 8, "ffn_dim": 7168, "max_seq": 2048},
    "8b": {"dim": 4096, "heads": 32, "kv_heads": 8, "ffn_dim": 14336, "max_seq": 4096},
}
TOKENS, VOCABULARY = 16384, {"1b": 32768, "8b": 128256}


@dataclass(frozen=True)
class Config:
    """What is planned."""

    mesh: Mesh = Mesh()
    run: loop.Options = loop.Options("runs/dense")
    size: str = "1b"
    layers: int = 16
    save: str = "mincut"  # what a layer keeps for its backward: mincut, inputs
    strategy: str = "zero3"

    def __post_init__(self):
        if self.size not in SIZES:
            raise ValueError(f"Config.size: got {self.size!r}, wanted one of {', '.join(SIZES)}")


def describe(config):
    """The step of `model.build`, of 16,384 tokens on each rank."""
    sizes = SIZES[config.size]
    of = model.llama(VOCABULARY[config.size], layers=config.layers, compute_dtype=torch.bfloat16, **sizes)
    rows = (TOKENS // sizes["max_seq"] * config.mesh.size, sizes["max_seq"])
    return model.build(of, optim.adamw(3e-4), config.mesh, rows, strategy=config.strategy, save=config.save)


def read(config):
    """Raises ValueError: this is planned, not trained."""
    raise ValueError(f"dense.py: got a run of {config.size}, wanted a plan; gpu.py measures these shapes")


experiment = loop.Experiment(Config, describe, data=read)
