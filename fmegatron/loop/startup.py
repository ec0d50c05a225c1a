"""The arithmetic of a run, printed before its first step, so that a wrong number is seen before it costs a night."""

import math
import resource
import sys

import torch

from fmegatron import tree
from fmegatron.layout import Layout
from fmegatron.tree import structure


def startup(
    params: structure.Tree,
    tokens: Layout,
    steps: int,
    start: int = 0,
    *,
    microbatches: int = 1,
    flops_per_token: float | None = None,
    in_all: int | None = None,
) -> str:
    """Lines about what is going to run: mesh, parameters, memory per rank, batch, tokens, FLOPs.

    Args:
        params: tree of Layouts of the parameters (not of the full state).
        tokens: Layout of a batch of tokens, all ranks together: [sequences, tokens of each].
        steps: the last update.
        start: updates done before.
        microbatches: parts of a batch.
        flops_per_token: forward and backward; None counts 6 for each parameter (every matrix: 2 forward, 4 backward).
        in_all: tokens that all updates read; None: each of them as many as this batch.

    Raises:
        ValueError: the batch cannot be cut into equal parts for the data ranks and microbatches.
    """
    (batch_size, seq_len), (data_ranks, sequence_ranks) = tokens.shape, tokens.shard_counts[:2]
    parts = data_ranks * microbatches
    if batch_size % parts:
        raise ValueError(
            f"batch_size: got {batch_size}, wanted a multiple of {parts} ({data_ranks} data ranks x {microbatches} "
            f"microbatches); try {math.ceil(batch_size / parts) * parts}"
        )
    leaves: list[Layout] = tree.leaves(params)
    mesh = leaves[0].mesh
    parameters = sum(math.prod(layout.shape) for layout in leaves)
    rank_bytes = max(sum(layout.local_nbytes(rank) for layout in leaves) for rank in {0, mesh.size - 1})
    count = batch_size * seq_len
    left = max(0, steps - start) * count if in_all is None else in_all
    done = f" (more than the {steps:,} that were asked for are done)" if start > steps else ""
    flops = 6 * parameters if flops_per_token is None else flops_per_token
    return "\n".join(
        (
            f"mesh         {mesh or 'one rank'}: {mesh.size} rank{'s' * (mesh.size > 1)}",
            f"parameters   {parameters:,} in {len(leaves)} leaves, {_bytes(rank_bytes)} of them on a rank",
            f"batch        {batch_size} x {seq_len} = {count:,} tokens per step; {batch_size // parts} x "
            f"{seq_len // sequence_ranks} per rank and microbatch "
            f"({data_ranks} data ranks, {microbatches} microbatches)",
            f"steps        {start:,} to {max(start, steps):,}: {left:,} tokens{done}",
            f"FLOPs        {flops * count:.3g} per step, {flops * left:.3g} in all",
        )
    )


def memory(planned_bytes: float | None, device: torch.device, seconds: float) -> str:
    """A line about the first update: its time, and the peak of this rank's memory beside what was planned.

    device: on CUDA the peak that torch has allocated there; else the largest resident memory of the process so far,
    which has the interpreter, its libraries and the compiler in it.
    """
    if device.type == "cuda":
        peak, what = torch.cuda.max_memory_allocated(device), "allocated on the device"
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak, what = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident, with the compiler"
    planned = "" if planned_bytes is None else f", {_bytes(planned_bytes)} planned"
    return f"first step   {seconds:.2f} s with compiling; peak of this rank {_bytes(peak)} ({what}){planned}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
