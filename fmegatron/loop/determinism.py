"""Deterministic mode: the same bits from the same step in every process of a machine; as it was before, afterwards."""

import contextlib
import os
from collections.abc import Iterator

import torch

# cuBLAS's workspace, and one algorithm and protocol for NCCL, so that ranks always sum in the same order.
VARIABLES = (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple"))


@contextlib.contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    """Within this block the same step gives the same bits in every process of the same machine; slower on CUDA.

    torch chooses deterministic kernels, and an op that has none is an error (`use_deterministic_algorithms`). Variables
    that are set already stay. cuBLAS and NCCL read theirs once, before the first product on a device and when the first
    communicator is made: on CUDA enter the block before `connect`. A step never draws from a generator.
    on: where false, nothing happens.
    """
    if not on:
        yield
        return
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, added = torch.backends.cudnn.benchmark, [name for name, _ in VARIABLES if name not in os.environ]
    try:
        os.environ.update({name: value for name, value in VARIABLES if name in added})
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)
        torch.backends.cudnn.benchmark = benchmark
        for name in added:
            os.environ.pop(name, None)
