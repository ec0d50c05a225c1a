"""Every private name of torch that this room uses, in one place. Tried on torch 2.13."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
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

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "bound_wrapper",
    "compiled_kernels",
    "has_cuda_kernel",
    "pretended",
    "schedule",
]


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


# ---- a device that is not there --------------------------------------------------------------------------------------
class _NoGuard(contextlib.nullcontext):
    """What stands for a context of a current device."""

    def __init__(self, *_: object):
        super().__init__()
        self.idx, self.prev_idx = 0, -1


class _Driver:
    """What stands for Triton's driver while code is written."""

    def __init__(self, arch: int, shared: int, multiprocessors: int):
        self.arch = arch
        known = {"max_shared_mem": shared, "multiprocessor_count": multiprocessors}
        self.utils = mock.MagicMock(get_device_properties=lambda _: known)

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: object) -> int:
        return 0

    def get_device_interface(self):
        return torch.cuda


@contextlib.contextmanager
def pretended(properties: Any, shared: int) -> Iterator[None]:
    """Context in which Inductor writes code for a CUDA device that is not there. Needs triton, and the guard.

    properties: as `torch.cuda.get_device_properties` gives them. shared: bytes of shared memory of a block, at most.
    """
    import triton

    interface = importlib.import_module("torch._dynamo.device_interface").CudaInterface
    arch = 10 * properties.major + properties.minor
    triton.runtime.driver.set_active(_Driver(arch, shared, properties.multi_processor_count))
    on_cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "_get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "get_device_name": lambda *_: properties.name,
        "device": _NoGuard,
        "_DeviceGuard": _NoGuard,
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
    }
    of_interface: dict[str, Any] = {
        "is_available": staticmethod(lambda: True),
        "get_device_properties": staticmethod(lambda *_: properties),
        "get_compute_capability": staticmethod(lambda *_: arch),
    }
    of_worker = {
        "get_device_properties": staticmethod(lambda *_: properties),
        "current_device": staticmethod(lambda: 0),
    }
    # They make real tensors of the device, to trace patterns and to fold constants.
    passes = [importlib.import_module(f"torch._inductor.fx_passes.{name}") for name in ("fuse_attention", "pad_mm")]
    with contextlib.ExitStack() as stack:

        def put(where: object, values: dict[str, Any]) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(where, name, value, create=True))

        put(torch.cuda, on_cuda)
        put(interface, of_interface)
        put(interface.Worker, of_worker)
        put(torch.version, {"cuda": "13.0"})
        put(torch._C, {"_cuda_getCurrentRawStream": lambda _: 0})
        put(passes[0], {"_sfdp_init": _nothing})
        put(passes[1], {"_pad_mm_init": _nothing})
        yield


def compiled_kernels(path: Path, device: tuple[int, int, int], most: int) -> Iterator[tuple[str, Any]]:
    """(configuration, what triton made) of a kernel in a file, for each of the first that Inductor would try.

    device: of which kind: 90 for sm_90, bytes of shared memory of a block, multiprocessors.
    """
    import triton

    heuristics = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    triton.runtime.driver.set_active(_Driver(*device))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    here = mock.patch.object(heuristics.triton_helpers, "set_driver_to_gpu", _nothing)
    settings = importlib.import_module("torch._inductor.config").patch(use_static_triton_launcher=False)
    with here, settings:
        spec.loader.exec_module(module)
        tuned = next(x for x in vars(module).values() if isinstance(x, heuristics.CachingAutotuner))
        for config in tuned.configs[:most]:
            yield f"{config}", tuned._precompile_config(config).kernel


def has_cuda_kernel(op: Any) -> bool:
    """Whether an operator has a kernel for CUDA, of its own or one for every device."""
    has, name = torch._C._dispatch_has_kernel_for_dispatch_key, op.name()
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(has(name, key) for key in keys)
