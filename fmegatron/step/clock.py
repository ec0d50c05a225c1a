"""Seconds of calls on a device, each waited for: what measured rates and peaks are made of."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["matmul_seconds", "seconds_of"]


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int = 5) -> list[float]:
    """Seconds of each of some calls, from an idle device to an idle device, behind one that is not counted."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    found = []
    for _ in range(rounds + 1):
        wait()
        began = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - began)
    return found[1:]


def matmul_seconds(device: torch.device, dtype: torch.dtype, n: int, rounds: int = 5) -> list[float]:
    """Seconds of each of some products of two n x n matrices."""
    a = torch.full((n, n), 0.5, dtype=dtype, device=device)
    out = torch.empty_like(a)
    return seconds_of(lambda: torch.mm(a, a, out=out), device, rounds)
