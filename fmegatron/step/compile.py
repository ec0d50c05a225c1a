"""Backends: compile a flat graph of tensors into a callable."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from fmegatron.step.compile_cache import compiler_settings, with_mended_cache
from fmegatron.step.lower import copy_module
from fmegatron.step.real_strides import with_copying_views
from fmegatron.step.torch_private import (
    compile_flat_graph,
    cpp_compiler,
    functional_graph,
    lower_own,
    outside_of_tracing,
    write_code,
)

__all__ = ["BACKENDS", "IN_ORDER", "compile_graph", "usable_backend"]

BACKENDS = ("inductor", "compile", "aot_eager", "eager")
IN_ORDER = ("aot_eager", "eager")  # those that run the graph op by op


def usable_backend(backend: str, device: torch.device) -> str:
    """The backend to use here: without a C++ compiler, Inductor cannot make CPU code, and "aot_eager" runs instead.

    Raises ValueError for an unknown name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, wanted one of {', '.join(BACKENDS)}")
    if backend in ("inductor", "compile") and device.type == "cpu" and cpp_compiler() is None:
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
    if backend not in IN_ORDER:
        patches = compiler_settings() | patches
    with outside_of_tracing(), torch.no_grad():
        if backend == "inductor":
            return with_mended_cache(lambda: compile_flat_graph(graph_module, fakes, patches))
        if backend == "compile":
            lower_own(graph_module)
            run = torch.compile(_of_vectors(graph_module), fullgraph=True, dynamic=False, options=patches)

            compiled = False

            def with_vectors(*tensors: torch.Tensor):
                nonlocal compiled
                vectors = [x if x.dim() else x.view(1) for x in tensors]
                # The first call compiles. A later one that fails may have written to what was donated.
                found = run(*vectors) if compiled else with_mended_cache(lambda: run(*vectors))
                compiled = True
                return found

            return with_vectors
        if backend == "aot_eager":
            return functional_graph(graph_module, fakes, with_copying_views)
        return with_copying_views(graph_module)


def _of_vectors(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph over tensors of one element where it had tensors without dims.

    Dynamo takes a double without dims for a number: it compiles again for each value, and forgets what is written to
    it.
    """
    copy = copy_module(graph_module)
    graph = copy.graph
    view, inputs = torch.ops.aten.view.default, graph.find_nodes(op="placeholder")
    for node in inputs:
        if node.meta["val"].dim():
            continue
        users = list(node.users)
        with graph.inserting_after(inputs[-1]):
            number = graph.call_function(view, (node, []))
        for user in users:
            if user.target is torch.ops.aten.copy_.default and user.args[0] is node:
                with graph.inserting_before(user):
                    user.args = (node, graph.call_function(view, (user.args[1], [1])))
            else:
                user.replace_input_with(node, number)
    graph.lint()
    write_code(copy)
    return copy
