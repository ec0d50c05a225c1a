"""A decoder with windowed attention, learned sinks and label smoothing, split over tp by heads, columns and vocabulary.

Claim    Attention over the last 16 positions, with a learned logit of each head that takes its share of the softmax,
         trains under tensor parallelism with the losses of one rank.
Command  torchrun --nproc-per-node=2 experiments/windowed.py --config_mesh=tp=2
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from fmegatron import data, loop, nn, optim, step, tree
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import DataParallel, Mesh

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"
RULES = [
    ("embed|head", ("tp", "fsdp")),  # [vocabulary, D]
    ("wqkv", (None, "fsdp", None, "tp")),  # [layer, D, (q, k, v), H·K]
    ("up", (None, "fsdp", "tp")),
    ("wo|down", (None, "tp", "fsdp")),
    ("sinks", (None, "tp")),
]
INIT = [(r"\w+_norm", tree.ones), ("sinks", tree.zeros), (".*", tree.Normal(0.02))]


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = loop.field(Mesh(), resume="named")  # axes dp, fsdp and tp
    run: str = loop.field("runs/windowed", resume="free")
    dim: int = 128
    layers: int = 4
    heads: int = 4
    seq_len: int = 64
    window: int = loop.field(16, least=1)  # positions that a head sees, its own included
    smoothing: float = loop.field(0.1, resume="named", least=0)  # share of the target that all bytes have in common
    batch_size: int = 32
    steps: int = loop.field(1000, resume="named", least=1)
    lr: float = loop.field(3e-3, resume="named", above=0)
    every: int = loop.field(100, resume="free", least=1)  # steps between checkpoints
    backend: Literal["inductor", "aot_eager", "eager"] = loop.field("inductor", resume="named")


def attention(q_BSHK, k_BSHK, v_BSHK, sinks_H, window):
    """Softmax over the last `window` positions and over a sink, whose share of the values is zero."""
    S = torch.arange(q_BSHK.shape[1], device=q_BSHK.device)
    unseen_ST = (S > S[:, None]) | (S <= S[:, None] - window)
    scores_BHST = torch.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK) * q_BSHK.shape[-1] ** -0.5
    scores_BHST = scores_BHST.masked_fill(unseen_ST, -torch.inf)
    total_BHS1 = torch.logaddexp(scores_BHST.logsumexp(-1, keepdim=True), sinks_H[:, None, None])
    return torch.einsum("bhst,bthk->bshk", (scores_BHST - total_BHS1).exp(), v_BSHK)


def describe(config: Config):
    """(train_step, specs of its state, layouts of its batch), for `main`, `fmegatron.check` and `fmegatron.parity`."""
    D, L, K, axes = config.dim, config.layers, config.dim // config.heads, Axes(config.mesh)
    blocks = {"attention_norm": (L, D), "wqkv": (L, D, 3, D), "sinks": (L, config.heads), "wo": (L, D, D)}
    blocks |= {"mlp_norm": (L, D), "up": (L, D, 4 * D), "down": (L, 4 * D, D)}
    shapes = {"embed": (256, D), "blocks": blocks, "final_norm": (D,), "head": (256, D)}
    specs = tree.specs(shapes, config.mesh, RULES, INIT)
    layouts, tp, data_axis = tree.layouts(specs), axes["tp"], axes[axes.data]

    def block(x_BSD, w, cos_Sh, sin_Sh):
        qkv = nn.column_parallel(nn.rms_norm(x_BSD, w["attention_norm"]), w["wqkv"].flatten(1), tp)
        q, k, v = qkv.unflatten(-1, (3, -1, K)).unbind(2)
        q, k = nn.apply_rope(q, cos_Sh, sin_Sh), nn.apply_rope(k, cos_Sh, sin_Sh)
        x_BSD = x_BSD + nn.row_parallel(attention(q, k, v, w["sinks"], config.window).flatten(2), w["wo"], tp)
        u_BSF = nn.column_parallel(nn.rms_norm(x_BSD, w["mlp_norm"]), w["up"], tp)
        return x_BSD + nn.row_parallel(F.gelu(u_BSF), w["down"], tp)

    def loss_fn(params, batch):
        embed, norm, head = (nn.gather_tree(params[k], layouts[k], data_axis) for k in ("embed", "final_norm", "head"))
        angles = nn.rope_angles(torch.arange(config.seq_len, device=embed.device), K, dtype=embed.dtype)
        run = step.layers(block, params["blocks"], layouts["blocks"], axes)
        x_BSD = run(nn.embed(batch["tokens"], embed, tp), *angles)
        logits_BSV = nn.column_parallel(nn.rms_norm(x_BSD, norm), head.t(), tp)
        nll_BS, lse_BS = nn.cross_entropy(logits_BSV, batch["labels"], tp)
        even_BS = lse_BS - psum(logits_BSV.sum(-1), tp) / 256  # the loss of a target that is all bytes
        loss_BS = (1 - config.smoothing) * nll_BS + config.smoothing * even_BS
        loss = loss_BS.sum() / (loss_BS.numel() * data_axis.size)
        return loss, {"loss": psum(loss.detach(), data_axis)}

    optimizer = optim.adamw(optim.cosine(config.lr, config.steps, warmup=config.steps // 10))
    train_step = step.build_train_step(loss_fn, optimizer, layouts, axes)
    rows = DataParallel().batch_layout((config.batch_size, config.seq_len), torch.int64, config.mesh)
    return train_step, step.state_specs(specs, optimizer), {"tokens": rows, "labels": rows}


def main(config: Config) -> dict[str, float]:
    """Train, or go on; returns the last metrics."""
    with loop.set_up():
        world, (train_step, specs, _) = connect(config.mesh), describe(config)
        train_step = step.jit(train_step, donate=0, world=world, backend=config.backend)
        ids = data.ByteTokenizer().encode(TEXT.read_text())
        run = loop.Run(config.run, train_step, specs, world=world, settings=config, save_every=config.every)
    for _ in run(data.Batches(ids, config.batch_size, config.seq_len, seed=0), config.steps):
        pass
    return run.metrics


if __name__ == "__main__":
    loop.launch(main, Config)
