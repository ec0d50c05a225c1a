"""The peers of the parallel benchmark, as their tutorials say: FSDP2 with compiled layers, DDP with torch.compile.

Both return the mean loss over all ranks, as ours does. Every rank builds the whole model first (the start values are
ours), which neither the times nor the peaks of a step see.
"""

import torch
import torch.distributed as dist
from peers.decoder import Peer, training_step
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def fsdp2_step(config, params, lr: float, backend: str):
    """(step(batch) -> loss, model): layers compiled, then `fully_shard` on each and on the root with its defaults.

    So layers are gathered again in the backward (`reshard_after_forward`), the root (embedding, norm, head) is not.
    """
    model = Peer(config).to(config.param_dtype).load(params)
    for block in model.blocks:
        block.compile(backend=backend)
        fully_shard(block)
    fully_shard(model)
    return _over_ranks(training_step(model, model, lr)), model


def ddp_step(config, params, lr: float, backend: str):
    """(step(batch) -> loss, model): DistributedDataParallel, buckets as gradient views, then torch.compile."""
    model = Peer(config).to(config.param_dtype).load(params)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _over_ranks(training_step(torch.compile(parallel, backend=backend), model, lr)), model


def _over_ranks(step):
    def mean_loss(batch):
        loss = step(batch)
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        return loss / dist.get_world_size()

    return mean_loss


def bucket_bytes(model: torch.nn.Module) -> int:
    """Bytes of DDP's buckets: they hold every gradient from construction on, so no peak of a step shows them."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
