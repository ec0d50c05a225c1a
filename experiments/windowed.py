"""A decoder with windowed attention, learned sinks and label smoothing, split over tp by heads, columns and vocabulary.

Claim    Attention over the last 16 positions, with a learned logit of each head that takes what no position deserves,
         trains under tensor parallelism as on one rank.
Command  torchrun --nproc-per-node=2 experiments/windowed.py --config_mesh=tp=2
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fmegatron import data, loop, nn, optim, step, tree
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import DataParallel, Mesh
from fmegatron.loop import field

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"
RULES = [
    ("embed|head", ("tp", "fsdp")),  # dim 0 is the vocabulary
    ("wqkv", (None, "fsdp", None, "tp")),  # [layer, D, (q, k, v), H·K]
    ("up", (None, "fsdp", "tp")),
    ("wo|down", (None, "tp", "fsdp")),
    ("sinks", (None, "tp")),
]


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = field(Mesh(), resume="named")  # axes dp, fsdp and tp
    run: str = field("runs/windowed", resume="free")
    dim: int = 128
    layers: int = 4
    heads: int = 4
    seq_len: int = 64
    window: int = field(16, least=1)  # positions that a head sees, its own included
    smoothing: float = field(0.1, resume="named", least=0)  # share of the target that all bytes have in common
    batch_size: int = 32
    steps: int = field(1000, resume="named", least=1)
    lr: float = field(3e-3, resume="named", above=0)
    every: int = field(100, resume="free", least=1)  # steps between checkpoints
    dtype: Literal["float32", "float64"] = "float32"
    backend: Literal["inductor", "aot_eager", "eager"] = field("inductor", resume="named")


def attention(q_BHSK, k_BHSK, v_BHSK, sinks_H, window):
    """Softmax over the last `window` positions and over a sink, whose share of the values is zero."""
    scores_BHST = q_BHSK @ k_BHSK.mT * q_BHSK.shape[-1] ** -0.5
    S = torch.arange(q_BHSK.shape[-2], device=q_BHSK.device)
    age_ST = S[:, None] - S
    scores_BHST = scores_BHST.masked_fill((age_ST < 0) | (age_ST >= window), -torch.inf)
    sinks_BHS1 = sinks_H[:, None, None].expand(*scores_BHST.shape[:-1], 1)
    return torch.cat([scores_BHST, sinks_BHS1], -1).softmax(-1)[..., :-1] @ v_BHSK


def model(config: Config):
    """(specs, loss_fn) of the decoder on the mesh of the config."""
    D, L, K, axes = config.dim, config.layers, config.dim // config.heads, Axes(config.mesh)
    blocks = {"attention_norm": (L, D), "wqkv": (L, D, 3, D), "sinks": (L, config.heads), "wo": (L, D, D)}
    blocks |= {"mlp_norm": (L, D), "up": (L, D, 4 * D), "down": (L, 4 * D, D)}
    shapes = {"embed": (256, D), "blocks": blocks, "final_norm": (D,), "head": (256, D)}
    init, dtype = (
        [(r"\w+_norm", tree.ones), ("sinks", tree.zeros), (".*", tree.Normal(0.02))],
        getattr(torch, config.dtype),
    )
    specs, tp, batch_axes = tree.specs(shapes, config.mesh, RULES, init, dtype), axes["tp"], axes[axes.data]

    def block(x_BSD, w, cos_Sh, sin_Sh):
        u_BSD = nn.rms_norm(x_BSD, w["attention_norm"])
        qkv_BSZ = nn.column_parallel(u_BSD, w["wqkv"].flatten(1), tp)
        q, k, v = qkv_BSZ.unflatten(-1, (3, -1, K)).unbind(2)
        q, k = nn.apply_rope(q, cos_Sh, sin_Sh), nn.apply_rope(k, cos_Sh, sin_Sh)
        o_BHSK = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), w["sinks"], config.window)
        x_BSD = x_BSD + nn.row_parallel(o_BHSK.transpose(1, 2).flatten(2), w["wo"], tp)
        u_BSF = nn.column_parallel(nn.rms_norm(x_BSD, w["mlp_norm"]), w["up"], tp)
        return x_BSD + nn.row_parallel(torch.nn.functional.gelu(u_BSF), w["down"], tp)

    def loss_fn(params, batch):
        params = nn.gather_tree(params, tree.layouts(specs), batch_axes)
        angles = nn.rope_angles(torch.arange(config.seq_len, device=batch["tokens"].device), K, dtype=dtype)
        x_BSD = nn.embed(batch["tokens"], params["embed"], tp)
        for i in range(L):
            x_BSD = block(x_BSD, tree.map(lambda w, i=i: w[i], params["blocks"]), *angles)
        logits_BSV = nn.column_parallel(nn.rms_norm(x_BSD, params["final_norm"]), params["head"].t(), tp)
        nll_BS, lse_BS = nn.cross_entropy(logits_BSV, batch["labels"], tp)
        even_BS = lse_BS - psum(logits_BSV.sum(-1), tp) / 256  # the loss of a target that is all bytes
        parts = torch.stack([nll_BS.sum(), even_BS.sum()]) / (nll_BS.numel() * batch_axes.size)
        loss, nll = (1 - config.smoothing) * parts[0] + config.smoothing * parts[1], parts[0].detach()
        return loss, {"loss": psum(loss.detach(), batch_axes), "nll": psum(nll, batch_axes)}

    return specs, loss_fn


def describe(config: Config):
    """(train_step, specs of its state, layouts of its batch), for `main`, `fmegatron.check` and parity."""
    specs, loss_fn = model(config)
    optimizer = optim.adamw(optim.cosine(config.lr, config.steps, warmup=config.steps // 10))
    train_step = step.build_train_step(loss_fn, optimizer, tree.layouts(specs), Axes(config.mesh))
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
