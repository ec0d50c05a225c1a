"""Devices that CUDA code can be planned for, as their data sheets and `cudaGetDeviceProperties` have them."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch

__all__ = ["DEVICES", "Device"]

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Device:
    """One kind of GPU.

    memory: bytes in all. multiprocessors, l2: their number, and bytes of the cache that they share. shared,
    shared_optin: bytes of shared memory of a block, as it is and at most. flops: of dense bf16 products in a second,
    flops32: of fp32 ones without TF32, bandwidth: bytes of memory in a second, all of the data sheet. links: bytes that
    a device sends in a second to others of its node.
    """

    name: str
    major: int
    minor: int
    memory: int
    multiprocessors: int
    l2: int
    shared: int
    shared_optin: int
    flops: float
    flops32: float
    bandwidth: float
    links: float

    def rate(self, dtype: torch.dtype) -> float:
        """FLOP of products of a dtype in a second; of 8 bits on Ada and later twice those of 16, which A100 lacks."""
        if dtype.itemsize == 1:
            return 2 * self.flops if self.arch >= 89 else self.flops
        return self.flops if dtype.itemsize == 2 else self.flops32

    @property
    def workspace(self) -> int:
        """Bytes that torch keeps for cuBLAS on each stream that multiplies (ATen/cuda/CublasHandlePool.cpp)."""
        return 32 * _MIB if self.major >= 9 else (2 * 4096 + 8 * 16) * _KIB

    @property
    def arch(self) -> int:
        """90 for sm_90."""
        return 10 * self.major + self.minor

    @property
    def prefers_cudnn(self) -> bool:
        """Whether torch's builds for CUDA 13 take cuDNN's attention where they can (cuDNN above 9.15)."""
        return self.major in (9, 10)


DEVICES = MappingProxyType(
    {
        "a100": Device(
            "NVIDIA A100-SXM4-80GB",
            8,
            0,
            81152 * _MIB,
            108,
            40 * _MIB,
            48 * _KIB,
            163 * _KIB,
            312e12,
            19.5e12,
            2.039e12,
            3e11,
        ),
        "h100": Device(
            "NVIDIA H100 80GB HBM3",
            9,
            0,
            81559 * _MIB,
            132,
            50 * _MIB,
            48 * _KIB,
            227 * _KIB,
            989e12,
            67e12,
            3.35e12,
            4.5e11,
        ),
        "h200": Device(
            "NVIDIA H200", 9, 0, 143771 * _MIB, 132, 50 * _MIB, 48 * _KIB, 227 * _KIB, 989e12, 67e12, 4.8e12, 4.5e11
        ),
        "b200": Device(
            "NVIDIA B200", 10, 0, 183359 * _MIB, 148, 126 * _MIB, 48 * _KIB, 227 * _KIB, 2250e12, 75e12, 8e12, 9e11
        ),
    }
)
