"""A flat graph of tensors into a callable, by one of several backends."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from fmegatron.step.torch_private import (
    compile_flat_graph,
    functional_graph,
    has_cpp_compiler,
    lower_own,
    outside_of_tracing,
)

__all__ = ["BACKENDS", "IN_ORDER", "compile_graph", "usable_backend"]

BACKENDS = ("inductor", "compile", "aot_eager", "eager")
IN_ORDER = ("aot_eager", "eager")  # those that run the graph op by op


def usable_backend(backend: str, device: torch.device) -> str:
    """The backend to use here: without a C++ compiler, Inductor cannot make CPU code, and "aot_eager" runs instead.

    Raises ValueError for an unknown name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    if backend in ("inductor", "compile") and device.type == "cpu" and not has_cpp_compiler():
        warnings.warn(
            "no C++ compiler found: the step runs uncompiled (backend aot_eager). Install the package g++ (or clang), "
            "or set CXX, for full speed.",
            stacklevel=2,
        )
        return "aot_eager"
    return backend


def compile_graph(
    graph_module: torch.fx.GraphModule, fakes: list, backend: str, patches: dict | None = None
) -> Callable:
    """Compile a flat graph -> callable(*tensors) -> list of tensors.

    backend: "inductor" (standalone_compile: no guards, the lowest call overhead), "compile" (torch.compile of the graph
    module, the public spelling), "aot_eager" (AOTAutograd's graph, op by op), "eager" (the graph module itself).
    patches: values of torch._inductor.config for this graph alone.
    """
    patches = dict(patches or {})
    with outside_of_tracing(), torch.no_grad():
        if backend == "inductor":
            return compile_flat_graph(graph_module, fakes, patches)
        if backend == "compile":
            lower_own()
            return torch.compile(graph_module, fullgraph=True, dynamic=False, options=patches)
        if backend == "aot_eager":
            return functional_graph(graph_module, fakes)
        return graph_module
