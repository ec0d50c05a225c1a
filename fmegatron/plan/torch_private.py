"""Every private name of torch that this room uses, in one place. Tried on torch 2.13."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._inductor
from torch._functorch import config as _functorch_config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.dependencies import MemoryDep, WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron.step import torch_private

__all__ = [
    "FakeTensorMode",
    "Launch",
    "TorchDispatchMode",
    "Written",
    "bound_wrapper",
    "compiled_kernels",
    "compiled_launch",
    "has_cuda_kernel",
    "pretended",
    "schedule",
]


_HALF = frozenset({torch.bfloat16, torch.float16})


class _Scheduled(BaseException):
    """Inductor has written its wrapper: what would follow compiles and loads it."""


class Launch(NamedTuple):
    """One launch of a Triton kernel, in the order of the wrapper.

    name: of the kernel. read, written: name of a buffer or an argument -> bytes of it that are read and written, each
    element once. buffers: that are made, one after the other.
    """

    name: str
    read: dict[str, int]
    written: dict[str, int]
    buffers: tuple[str, ...]


class Written(NamedTuple):
    """What Inductor writes for a graph.

    wrapper: Python. buffers: name of one -> the fx nodes that it is made of, which are Inductor's own and carry
    "stack_trace" of those that they come from. launches: of Triton kernels, none on a CPU.
    """

    wrapper: str
    buffers: dict[str, set]
    launches: list[Launch]


def schedule(graph_module: torch.fx.GraphModule, fakes: list, patches: dict) -> Written:
    """What Inductor writes for a flat graph: traced, lowered, fused and ordered as for a run; nothing is compiled."""
    torch_private.lower_own(graph_module)
    found: list[Written] = []
    launches: list[Launch] = []

    def written(code: str) -> None:
        graph = V.graph
        buffers = {name: set(getattr(buffer, "origins", ())) for name, buffer in graph.name_to_buffer.items()}
        found.append(Written(code, buffers, launches))
        raise _Scheduled

    launch = TritonKernel.call_kernel

    def noted(kernel: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        launches.append(_launch_of(kernel, name))
        return launch(kernel, name, *args, **kwargs)

    # Not force_disable_caches: each compile would make a folder, and leave it when it is ended here.
    apart = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    options = {"config_patches": {**patches, **apart}}
    hook = mock.patch.object(GraphLowering, "save_output_code", staticmethod(written))
    noting = mock.patch.object(TritonKernel, "call_kernel", noted)
    uncached = _functorch_config.patch(enable_autograd_cache=False)
    with hook, noting, uncached, torch.no_grad():
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


def _launch_of(kernel: Any, name: str) -> Launch:
    """What a kernel that is about to be launched moves: of each buffer the elements that its indices name, once."""
    nodes = kernel.features.scheduler_nodes()
    made = tuple(name for node in nodes for name in node.get_buffer_names())
    inner = {*V.graph.removed_buffers, *kernel.removed_buffers}
    moved: list[dict[str, dict[Any, int]]] = [{}, {}]
    for node in nodes:
        for of, dependencies in zip(moved, (node.read_writes.reads, node.read_writes.writes), strict=True):
            for one in dependencies:
                if one.name in inner or (of is moved[0] and one.name in made) or isinstance(one, WeakDep):
                    continue  # inside of the kernel, or an order alone
                by_index = isinstance(one, MemoryDep)
                key, count = (one.index, _elements(one)) if by_index else ("all", int(V.graph.get_numel(one.name)))
                of.setdefault(one.name, {})[key] = count

    def nbytes(of: dict[str, dict[Any, int]]) -> dict[str, int]:
        most = {name: int(V.graph.get_numel(name)) for name in of}
        return {
            name: min(sum(indices.values()), most[name]) * V.graph.get_dtype(name).itemsize
            for name, indices in of.items()
        }

    return Launch(name, nbytes(moved[0]), nbytes(moved[1]), made)


def _elements(access: Any) -> int:
    """How many elements an access of a loop names: the product of the ranges that its index depends on; of an index
    that is read from memory, of all ranges."""
    known = dict(zip(access.var_names, access.size, strict=True))
    within = set(known) if access.is_indirect() else access.index.free_symbols
    total = 1
    for symbol, size in known.items():
        total *= int(size) if symbol in within else 1
    return total


class _Kernel:
    """Stands for a compiled kernel, and for its methods: does nothing, and says that it was launched."""

    def __init__(self, name: str, launched: Callable[[str], None]):
        self._name, self._launched = name, launched

    def __getattr__(self, name: str) -> Callable:
        return self if name == "run" else _nothing

    def __call__(self, *args, **kwargs) -> None:
        self._launched(self._name)


class _Compiler:
    """Stands for Inductor's compiler of kernels: each of its methods gives a kernel that does nothing."""

    def __init__(self, launched: Callable[[str], None]):
        self._launched = launched

    def __getattr__(self, name: str) -> Callable:
        return lambda *args, **kwargs: _Kernel(str(args[0]) if args else name, self._launched)


class _Extern:
    """Stands for kernels of libraries, which write into `out`; what they take meanwhile is made and dropped."""

    def __init__(self, called: Callable[..., None]):
        self._called = called

    def __getattr__(self, name: str) -> Callable:
        def kernel(*args, out=None, **kwargs):
            if out is None:  # it makes its result itself: the operator does so too, and is seen
                return getattr(torch.ops.aten, name)(*args, **kwargs)
            self._called(name, args, out)
            if out.is_cpu and out.dtype in _HALF and _sums_apart(*args[-2:]):
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


def _empty_on_cuda(size, stride, dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _seen_as(x: torch.Tensor, size, stride, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)


def bound_wrapper(
    source: str,
    file: str,
    launched: Callable[[str], None] = _nothing,
    called: Callable[..., None] = _nothing,
) -> Callable[[list], Any]:
    """The function `call(arguments)` of a wrapper, with nothing behind its kernels: for fake tensors.

    file: the name of its code, by which its frames are known. launched: is given the name of each kernel of its own
    that runs, called: the name, the arguments and `out` of each kernel of a library.
    """
    maker = "async_compile = AsyncCompile()"
    assert maker in source, "the wrapper makes its kernels with AsyncCompile"
    names: dict[str, Any] = {"__name__": file, "planned_compiler": _Compiler(launched)}
    code: CodeType = compile(source.replace(maker, "async_compile = planned_compiler"), file, "exec")
    exec(code, names)
    names |= {
        "empty_strided_cpu": _empty,
        "empty_strided_cpu_pinned": _empty,
        "empty_strided_cuda": _empty_on_cuda,
        "copy_if_misaligned": _itself,
        "assert_size_stride": _nothing,
        "assert_alignment": _nothing,
        "reinterpret_tensor": _seen_as,
        "extern_kernels": _Extern(called),
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
        "set_device": lambda *_: None,
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


def compiled_launch(launch: Any, device: tuple[int, int, int]) -> Any:
    """What triton makes of a kernel as it would be launched, without the launch; tensors may be fake.

    launch: kernel, grid, arguments, settings. device: as of `compiled_kernels`.
    """
    import triton
    from triton.runtime.jit import MockTensor

    def shown(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(shown, x))
        return MockTensor(x.dtype, list(x.shape)) if isinstance(x, torch.Tensor) else x

    triton.runtime.driver.set_active(_Driver(*device))
    return launch.kernel.warmup(*map(shown, launch.arguments), grid=launch.grid, **launch.settings)


def has_cuda_kernel(op: Any) -> bool:
    """Whether an operator has a kernel for CUDA, of its own or one for every device."""
    has, name = torch._C._dispatch_has_kernel_for_dispatch_key, op.name()
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(has(name, key) for key in keys)
