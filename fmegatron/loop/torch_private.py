"""Every private name of torch that the loop uses, in one place."""

import os

import torch

_ENTRIES = 200_000  # allocations and frees that a snapshot holds, the newest


def record_memory(on: bool) -> None:
    """Begin, or end, to note each allocation of CUDA memory and the Python lines that made it."""
    if on:
        torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def write_memory(path: str | os.PathLike) -> None:
    """Write what `record_memory` noted as a pickle for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(os.fspath(path))
