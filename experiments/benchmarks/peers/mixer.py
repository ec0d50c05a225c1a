"""The peer of experiments/mixer.py: the same model, data, average and checkpoints, as FSDP2's and DCP's tutorials say.

torchrun --nproc-per-node=4 experiments/benchmarks/peers/mixer.py --dp=2 --fsdp=2
"""

import argparse
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TEXT = Path(__file__).parents[3] / "data" / "tinyshakespeare.txt"


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    dp: int = 1
    fsdp: int = 1
    folder: str = "runs/mixer-fsdp2"
    dim: int = 128
    layers: int = 4
    seq_len: int = 64
    batch_size: int = 32
    steps: int = 1000
    lr: float = 3e-3
    decay: float = 0.99
    every: int = 100
    backend: str = "inductor"


class Block(nn.Module):
    """Mix positions, each with those before it, then channels."""

    def __init__(self, dim, seq_len):
        super().__init__()
        self.position_norm, self.channel_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.first, self.last = (nn.Parameter(torch.empty(seq_len, seq_len)) for _ in range(2))
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        x = x + self.last.tril() @ F.gelu(self.first.tril() @ self.position_norm(x))
        return x + self.down(F.gelu(self.up(self.channel_norm(x))))


class Mixer(nn.Module):
    """Returns the mean loss of the tokens."""

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(256, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim, config.seq_len) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, 256, bias=False)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.final_norm(x)).flatten(0, 1), labels.flatten())


def batch_at(text, config, number):
    """This rank's rows of windows of the text, drawn by the number of the batch."""
    starts = torch.randint(
        len(text) - config.seq_len, (config.batch_size,), generator=torch.Generator().manual_seed(number)
    )
    rows = torch.stack([text[at : at + config.seq_len + 1] for at in starts[dist.get_rank() :: dist.get_world_size()]])
    return rows[:, :-1], rows[:, 1:]


def mean_over_ranks(loss):
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


@torch.no_grad()
def held_out_loss(model, average, text, config):
    """The loss of the average of the weights, which take the place of the newest ones for a while."""
    newest = [p.clone() for p in model.parameters()]
    for p, a in zip(model.parameters(), average.values(), strict=True):
        p.copy_(a)
    loss = sum(mean_over_ranks(model(*batch_at(text, config, i))) for i in range(4)) / 4
    model.reshard()  # after a forward without a backward the root still is gathered
    for p, old in zip(model.parameters(), newest, strict=True):
        p.copy_(old)
    return loss


def main(config):
    """Train, or go on; evaluates the average of the weights."""
    mesh = init_device_mesh("cpu", (config.dp, config.fsdp), mesh_dim_names=("dp", "fsdp"))
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    text, held_out = text.split([len(text) - len(text) // 10, len(text) // 10])
    torch.manual_seed(0)
    model = Mixer(config)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    for block in model.blocks:
        block.compile(backend=config.backend)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, betas=(0.9, 0.95), weight_decay=0.1)
    average, start = {name: p.detach().clone() for name, p in model.named_parameters()}, 0
    saved = sorted(Path(config.folder).glob("step_*/.metadata"))
    if saved:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "average": average, "step": 0}
        dcp.load(state, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start = state["step"]
    warmup = config.steps // 10
    for step in range(start + 1, config.steps + 1):
        decayed = 0.5 + 0.5 * math.cos(math.pi * max(step - 1 - warmup, 0) / (config.steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(step / max(warmup, 1), decayed)
        loss = model(*batch_at(text, config, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 1 - config.decay)
        if step == 1 or step % 10 == 0:
            log(f"step {step}: loss {mean_over_ranks(loss):.4f}")
        if step % config.every == 0 or step == config.steps:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "average": average, "step": step}
            dcp.save(state, checkpoint_id=Path(config.folder) / f"step_{step:08d}")
            log(f"step {step}: held-out loss {held_out_loss(model, average, held_out, config):.4f}")


def log(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for item in fields(Config):
        parser.add_argument(f"--{item.name}", type=item.type, default=item.default)
    dist.init_process_group("gloo")
    main(Config(**vars(parser.parse_args())))
    dist.destroy_process_group()
