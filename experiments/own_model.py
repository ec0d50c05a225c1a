"""A model of one's own: attention that forgets, an own loss, an average of the parameters; on dp, fsdp and tp.

Claim    Attention without a softmax, whose heads forget at rates that they learn (gated retention, arXiv 2307.08621),
         learns the next byte, trained by a focal loss (arXiv 1708.02002).
Command  torchrun --nproc-per-node=4 experiments/own_model.py --mesh=fsdp=2,tp=2
         python -m fmegatron.check experiments/own_model.py --mesh dp=2,fsdp=4,tp=2
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from fmegatron import data, loop, model, nn, optim, step
from fmegatron.layout import Mesh
from fmegatron.loop import field

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = Mesh()
    run: loop.Options = loop.Options("runs/own_model", steps=1000)
    dim: int = 128
    layers: int = 4
    heads: int = 4
    vocab_multiple: int = 64  # to which the 256 bytes are rounded up: 66 for tp=3
    seq_len: int = 64
    focus: float = field(1.0, least=0)  # γ of the focal loss: 0 is the plain one
    batch_size: int = 32
    microbatches: int = field(1, resume="named", least=1)
    pipeline: step.Pipelining = step.Pipelining()  # of stages over an axis pp of the mesh
    lr: float = field(3e-3, resume="named", above=0)
    dtype: Literal["float32", "float64"] = "float32"


def retention(q_BHSK, k_BHSK, v_BHSK, forget_H):
    """What a position reads of those before it: its product with them, less for each position in between."""
    S = torch.arange(q_BHSK.shape[-2], device=q_BHSK.device)
    age_ST = (S[:, None] - S).to(q_BHSK.dtype)
    kept_HST = (-F.softplus(forget_H)[:, None, None] * age_ST.clamp(min=0)).exp().masked_fill(age_ST < 0, 0)
    return (q_BHSK @ k_BHSK.mT * q_BHSK.shape[-1] ** -0.5 * kept_HST) @ v_BHSK


@dataclass(frozen=True)
class Retention(model.Mixer):
    """A mixer: retention of several heads, each normed and gated; heads are split over tp."""

    heads: int

    def arrays(self, dim):
        wide = model.Array((dim, 4 * dim), ("fsdp", "tp"), parts=(dim,) * 4)  # q, k, v, gate
        forget = model.Array((self.heads,), ("tp",), init=-2.0)
        return {"wqkvg": wide, "forget": forget, "wo": model.Array((dim, dim), ("tp", "fsdp"))}

    def __call__(self, u_BSD, w, at):
        tp = at.axes["tp"]
        u_BSF = nn.column_parallel(u_BSD, w["wqkvg"], tp)
        q, k, v, gate = u_BSF.unflatten(-1, (4, self.heads // tp.size, -1)).permute(2, 0, 3, 1, 4)
        o_BHSK = nn.rms_norm(retention(q, k, v, w["forget"]), v.new_ones(v.shape[-1])) * F.silu(gate)
        return nn.row_parallel(o_BHSK.transpose(1, 2).flatten(2), w["wo"], tp)


def decoder(config):
    """(specs, loss_fn) on the mesh of the config."""
    dtype = getattr(torch, config.dtype)
    block = (model.Part("retention", Retention(config.heads)),)
    how = {"vocab_multiple": config.vocab_multiple, "param_dtype": dtype, "compute_dtype": dtype}
    of = model.Decoder(256, config.dim, (block,) * config.layers, config.seq_len, **how)
    specs = model.specs(of, config.mesh, strategy="hsdp")

    def loss_fn(params, batch):
        nll_BS, _ = model.token_losses(params, batch, of, save="mincut")
        focal_BS = (1 - (-nll_BS).exp()) ** config.focus * nll_BS  # what is known already counts less
        loss, nll = (step.mean(x.sum(), x.numel()) for x in (focal_BS, nll_BS))
        return loss, {"nll": nll}

    return specs, loss_fn


def describe(config):
    """The step, the specs of its state, the layouts of its batch."""
    (specs, loss_fn), shape = decoder(config), (config.batch_size, config.seq_len)
    rate = optim.cosine(config.lr, config.run.steps, warmup=config.run.steps // 10)
    optimizer = optim.averaged(optim.adamw(rate), decay=0.99)  # `step.averaged_params` gives what to sample with
    rows, parts = {"tokens": shape, "labels": shape}, config.pipeline.of(config.microbatches)
    return step.build(loss_fn, optimizer, specs, rows, microbatches=parts, shards=True)


def read(config):
    """The text as bytes."""
    ids = data.ByteTokenizer().encode(TEXT.read_text())
    return data.Batches(ids, config.batch_size, config.seq_len, config.run.seed)


experiment = loop.Experiment(Config, describe, read)

if __name__ == "__main__":
    loop.launch(experiment)
