"""The hardware of a rank: peak FLOP/s of its device, its memory and energy, read without waiting for the device."""

import ctypes
import re
import resource
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fmegatron.step import clock

# Dense bf16 FLOP/s that the makers state, by the name that the driver gives; the first match counts.
TABLE = (
    (r"\bB200\b", 2250e12),
    (r"\bH200\b", 989.4e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835.5e12),
    (r"\bH100\b", 989.4e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA10\b", 125e12),
    (r"\bMI300X\b", 1307.4e12),
)


@dataclass(frozen=True)
class Peak:
    """The most FLOP/s of one rank's device, and where the number is from: it is the basis of MFU."""

    flops: float
    source: str

    def __post_init__(self):
        if isinstance(self.flops, bool) or not isinstance(self.flops, int | float) or not 0 < self.flops < float("inf"):
            raise ValueError(f"Peak: flops: got {self.flops!r:.60}, wanted a finite number above 0, such as 989e12")

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.4g} TFLOP/s, {self.source}"


def peak_of(device: torch.device, dtype: torch.dtype | None = None) -> Peak:
    """Of the table for dense bf16 products on a device that it knows, else of a matrix product that is measured here.

    dtype: of the products; None: bf16 on an accelerator, fp32 on the CPU. Measuring takes some tenths of a second and
    waits for the device, so it is for set-up.
    """
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        if flops := of_table(name):
            return Peak(flops, f"dense bf16 of {name} (table)")
    return measured_peak(device, dtype)


def of_table(name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the driver's name, None of one that is not in the table.

    >>> of_table("NVIDIA H100 80GB HBM3"), of_table("NVIDIA A10G")
    (989400000000000.0, None)
    """
    return next((flops for pattern, flops in TABLE if re.search(pattern, name)), None)


def measured_peak(device: torch.device, dtype: torch.dtype, size: int | None = None) -> Peak:
    """FLOP/s of the best of some products of two square matrices. size: default 1024 on a CPU, else 8192."""
    n = size or (1024 if device.type == "cpu" else 8192)
    seconds = min(clock.matmul_seconds(device, dtype, n))
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    name, more = str(dtype).removeprefix("torch."), ""
    if device.type == "cuda" and dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        more = "; without TF32, which torch.set_float32_matmul_precision('high') takes"
    return Peak(2 * n**3 / seconds, f"product of {n} x {n} in {name} on {where} (measured{more})")


class _Mallinfo2(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]  # noqa: RUF012


def memory_reader(device: torch.device) -> tuple[Callable[[], int], str]:
    """(function that reads bytes, what they are) for a device: on CUDA the peak that torch has allocated there since
    the process began; on a CPU the heap of the process that is in use now, as glibc counts it, or where there is no
    glibc its largest resident memory so far. Reading costs microseconds and waits for nothing."""
    if device.type == "cuda":
        return lambda: torch.cuda.max_memory_allocated(device), f"peak allocated on {device}"
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        unit = 1 if sys.platform == "darwin" else 1024
        return (
            lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
            "largest resident memory of the process",
        )
    mallinfo2.restype = _Mallinfo2

    def read() -> int:
        found = mallinfo2()
        return found.uordblks + found.hblkhd

    return read, "heap of the process in use"


def energy_reader(device: torch.device) -> Callable[[], float] | None:
    """A function that reads the joules that a CUDA device has taken since its driver was loaded, by NVML.

    None where there is no CUDA, no package nvidia-ml-py, or a device that does not count. A read takes about a
    millisecond of the host, and the device does not notice.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        index = torch.cuda.current_device() if device.index is None else device.index
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (pynvml.NVMLError, AttributeError, RuntimeError):
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


def spread(seconds: list[float]) -> tuple[float, float]:
    """(median, slowest over median) of times."""
    middle = statistics.median(seconds)
    return middle, max(seconds) / max(middle, 1e-12)
