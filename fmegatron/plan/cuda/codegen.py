"""The code that Inductor writes for a graph on a CUDA device that is not there: a wrapper with Triton kernels."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

from fmegatron.plan.cuda.devices import Device
from fmegatron.plan.cuda.lowered import Graph
from fmegatron.plan.torch_private import pretended, schedule

__all__ = ["Code", "settings", "there", "written"]

# It would fold constants and time kernels on real tensors of the device, or start processes.
_APART = MappingProxyType(
    {"joint_graph_constant_folding": False, "triton.autotune_at_compile_time": False, "compile_threads": 1}
)


@dataclass(frozen=True)
class Code:
    """The code of a graph.

    wrapper: Python, which launches. kernels: name -> source of a Triton kernel. launches: of those in one call.
    calls: operators and library kernels that the wrapper calls -> how often; of opaque nodes without the digest.
    """

    wrapper: str
    kernels: Mapping[str, str]
    launches: int
    calls: Mapping[str, int]


def written(graph: Graph, device: Device) -> Code:
    """Let Inductor write a graph's code for a device. Needs triton, and a process with the guard (`guard.environment`).

    Raises what Inductor raises where it cannot.
    """
    with there(device):
        return read(schedule(graph.module, graph.fakes, settings(graph.settings)).wrapper)


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for code of a device that is not there."""
    return {**given, **_APART}


def there(device: Device) -> contextlib.AbstractContextManager[None]:
    """Context in which Inductor writes code for a device."""
    properties = SimpleNamespace(
        name=device.name,
        type="cuda",
        major=device.major,
        minor=device.minor,
        total_memory=device.memory,
        multi_processor_count=device.multiprocessors,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=1 << 16,
        shared_memory_per_block=device.shared,
        shared_memory_per_block_optin=device.shared_optin,
        shared_memory_per_multiprocessor=device.shared_optin + 1024,
        L2_cache_size=device.l2,
        gcnArchName="",
        uuid="0",
        is_integrated=0,
        is_multi_gpu_board=0,
    )
    return pretended(properties, device.shared_optin)


def read(wrapper: str) -> Code:
    """What a wrapper holds and calls."""
    kernels = dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", wrapper, re.DOTALL))
    body = wrapper[wrapper.rindex("def call(") :]
    called = re.findall(r"(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+)\(", body)
    calls = collections.Counter(re.sub(r"_[0-9a-f]{16}\w*", "", name) for name in called)
    return Code(wrapper, kernels, len(re.findall(r"\.run\(", body)), dict(sorted(calls.items())))
