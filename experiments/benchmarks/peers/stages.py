"""The peers of the pipeline benchmark: the same decoder by torch.distributed.pipelining, as its tutorial says."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers.decoder import Peer, fused_adamw
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble


class Stage(nn.Module):
    """Some blocks of a `Peer`; the first with its embedding, the last with norm and head."""

    def __init__(self, whole: Peer, blocks: range, first: bool, last: bool):
        super().__init__()
        self.embed = whole.embed if first else None
        self.blocks = nn.ModuleList(whole.blocks[i] for i in blocks)
        self.norm, self.head = (whole.norm, whole.head) if last else (None, None)
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


def staged_step(config, params, lr: float, backend: str | None, microbatches: int, vee: bool):
    """step(batch) -> loss on all ranks: 1F1B, or ZB-V with two stages a rank. backend: of the blocks; None: eager.

    ZB-V takes no compiled stages (torch 2.13: pytorch#161904).
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, count = Peer(config).to(config.param_dtype).load(params), ranks * (2 if vee else 1)
    own = (rank, count - 1 - rank) if vee else (rank,)
    cuts = [config.layers * i // count for i in range(count + 1)]
    modules = [Stage(whole, range(cuts[i], cuts[i + 1]), i == 0, i == count - 1) for i in own]
    for module in modules if backend else ():
        for block in module.blocks:
            block.compile(backend=backend)
    stages = [PipelineStage(of, i, count, torch.device("cpu")) for i, of in zip(own, modules, strict=True)]

    def loss_of(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = (
        ScheduleZBVZeroBubble(stages, microbatches, loss_of) if vee else Schedule1F1B(stages[0], microbatches, loss_of)
    )
    held = nn.ModuleList(modules)
    optimizer, last = fused_adamw(held, lr), count - 1 in own

    def step(batch):
        losses: list[torch.Tensor] = []
        given = (batch["tokens"],) if 0 in own else ()
        more = {"target": batch["labels"], "losses": losses} if last else {}
        schedule.step(*given, **more)
        square = sum(p.grad.square().sum() for p in held.parameters())
        loss = torch.stack(losses).mean().detach() if last else square.new_zeros(())
        both = torch.stack([square, loss])
        dist.all_reduce(both)
        scale = (1.0 / (both[0].sqrt() + 1e-6)).clamp(max=1.0)
        for p in held.parameters():
            p.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return both[1]

    return step
