"""Every private name of torch that this room uses, in one place. Tried on torch 2.13."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch._inductor
from torch._functorch import config as _functorch_config
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron.step import torch_private

__all__ = ["FakeTensorMode", "TorchDispatchMode", "bound_wrapper", "schedule"]


_HALF = frozenset({torch.bfloat16, torch.float16})


class _Scheduled(BaseException):
    """Inductor has written its wrapper: what would follow compiles and loads it."""


def schedule(graph_module: torch.fx.GraphModule, fakes: list, patches: dict) -> tuple[str, dict[str, set]]:
    """(the Python wrapper that Inductor generates for a flat graph, buffer name -> the fx nodes that it is made of).

    Traced, lowered, fused and ordered as for a run; no kernel is compiled. The nodes are Inductor's own, which carry
    "stack_trace" of those that they come from.
    """
    torch_private.lower_own(graph_module)
    found: list[tuple[str, dict[str, set]]] = []

    def written(code: str) -> None:
        graph = V.graph
        buffers = {name: set(getattr(buffer, "origins", ())) for name, buffer in graph.name_to_buffer.items()}
        found.append((code, buffers))
        raise _Scheduled

    # Not force_disable_caches: each compile would make a folder, and leave it when it is ended here.
    apart = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    options = {"config_patches": {**patches, **apart}}
    hook = mock.patch.object(GraphLowering, "save_output_code", staticmethod(written))
    uncached = _functorch_config.patch(enable_autograd_cache=False)
    with hook, uncached, torch.no_grad():
        try:
            torch._inductor.standalone_compile(
                graph_module, fakes, dynamic_shapes="from_example_inputs", options=options
            )
        except _Scheduled:
            pass
    if not found:
        raise ValueError(
            "plan: got no wrapper of Inductor, wanted its Python code; it must not be set to write C++ or to load what "
            "it compiled before"
        )
    return found[0]


class _Kernel:
    """Stands for a compiled kernel, and for its methods: does nothing."""

    def __getattr__(self, name: str) -> Callable:
        return _nothing

    def __call__(self, *args, **kwargs) -> None:
        return None


class _Compiler:
    """Stands for Inductor's compiler of kernels: each of its methods gives a kernel that does nothing."""

    def __getattr__(self, name: str) -> Callable:
        return lambda *args, **kwargs: _Kernel()


class _Extern:
    """Stands for kernels of libraries, which write into `out`; what they take meanwhile is made and dropped."""

    def __getattr__(self, name: str) -> Callable:
        def kernel(*args, out=None, **kwargs):
            if out is not None and out.dtype in _HALF and _sums_apart(*args[-2:]):
                torch.empty(out.numel(), dtype=torch.float32)
            return out

        return kernel


def _sums_apart(a: object, b: object) -> bool:
    """Whether a product of 16-bit matrices makes its sums in fp32 memory of their own: transposed times plain, where
    the processor has no instructions for it (measured, torch 2.13)."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or min(a.dim(), b.dim()) < 2:
        return False
    transposed = a.stride(-2) == 1 and a.stride(-1) > 1 and b.stride(-1) == 1
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return transposed and not (supported is not None and supported())


def _nothing(*args, **kwargs) -> None:
    return None


def _empty(size, stride, dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _seen_as(x: torch.Tensor, size, stride, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)


def bound_wrapper(source: str, file: str) -> Callable[[list], Any]:
    """The function `call(arguments)` of a wrapper, with nothing behind its kernels: for fake tensors.

    file: the name of its code, by which its frames are known.
    """
    maker = "async_compile = AsyncCompile()"
    assert maker in source, "the wrapper makes its kernels with AsyncCompile"
    names: dict[str, Any] = {"__name__": file, "planned_compiler": _Compiler()}
    code: CodeType = compile(source.replace(maker, "async_compile = planned_compiler"), file, "exec")
    exec(code, names)
    names |= {
        "empty_strided_cpu": _empty,
        "empty_strided_cpu_pinned": _empty,
        "assert_size_stride": _nothing,
        "assert_alignment": _nothing,
        "reinterpret_tensor": _seen_as,
        "extern_kernels": _Extern(),
    }
    return names["call"]
