"""Every private name of torch that step and testing use, in one place. Tried on torch 2.11, 2.13 and 2.14.

Nothing else in the room imports from a module with a leading underscore; when torch moves something, it is mended here.
"""

import contextlib
import functools
import importlib
import logging
import operator
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, cast

import torch
import torch._decomp
import torch._inductor
from torch._dynamo import convert_frame
from torch._functorch import config as _functorch_config
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import _extract_graph_with_inputs_outputs, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import _symbolic_trace
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    _MakefxTracer,
    _set_make_fx_tracer,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    snapshot_fake,
    track_tensor_tree,
)
from torch.fx.experimental.proxy_tensor import _ProxyTensor as ProxyTensor
from torch.fx.experimental.proxy_tensor import make_fx as _make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import register_pytree_node as register_node

try:
    from torch._inductor.cpp_builder import get_cpp_compiler
except ImportError:
    get_cpp_compiler = None
try:
    from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
except ImportError:  # lines of backward nodes are lost without it, nothing else
    setup_stacktrace_preservation_hooks = None

__all__ = [
    "OWN_LOWERING",
    "SETTINGS",
    "UNSAFE_VIEW",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "Op",
    "ProxyTensor",
    "ProxyTorchDispatchMode",
    "PythonKeyTracer",
    "TorchDispatchMode",
    "below_autograd",
    "compiling",
    "compile_flat_graph",
    "cpp_compiler",
    "decomposition_of",
    "disable_proxy_modes_tracing",
    "extract_subgraph",
    "forget_compiled",
    "forget_constant",
    "forget_operator",
    "functional_graph",
    "fx_traceback",
    "get_proxy_slot",
    "graph_module_of",
    "inductor_decompositions",
    "inductor_default_folder",
    "inductor_folder",
    "is_composite",
    "last_call_of",
    "last_recorded",
    "is_tracing",
    "loop_of",
    "lower_own",
    "make_fx",
    "mark_backward",
    "min_cut",
    "name_detaches",
    "name_for",
    "opname",
    "outside_of_tracing",
    "overload_name",
    "profiled_events",
    "quiet_about_shapes",
    "reaches_before",
    "recording",
    "register_node",
    "snapshot_fake",
    "storage_number",
    "storage_uses",
    "tensor_uses",
    "track_tensor_tree",
    "version_of",
    "without_functions",
    "write_code",
]

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
Op = torch._ops.OpOverload  # what the target of a graph's node is, if it is an operator of torch
# Without a function of Python around them: they are asked of every leaf in every call of a donated step.
tensor_uses = cast("Any", torch.Tensor)._use_count  # not in torch's stubs
storage_uses = torch._C._storage_Use_Count
storage_number = operator.attrgetter("_cdata")
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")  # a count of the writes into its memory
without_functions = torch._C.DisableTorchFunction  # context: no mode hears of functions
overload_name: Callable[[Op], str] = operator.attrgetter("_overloadname")  # "default", "Tensor"


def opname(op) -> str:
    """The name of an operator without namespace and overload: "all_reduce"; empty for what is no operator."""
    return getattr(op, "_opname", "")


def profiled_events(profile: torch.profiler.profile) -> list[Any]:
    """The events that a profile, which has ended, has recorded, as the library kineto reports them."""
    recorded = profile.profiler
    assert recorded is not None and recorded.kineto_results is not None, "the profile has run"
    return recorded.kineto_results.events()  # of a type that torch's stubs describe in part


def graph_module_of(root, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of this graph. It writes its Python code when it is first called or asked for it: most are changed by
    the next pass before, and code that is never run is a fifth of the time of a trace."""
    return _LazyGraphModule(root, graph)


def write_code(module: torch.fx.GraphModule) -> None:
    """Let a module of `graph_module_of` write its code now: Dynamo cannot follow a call that does it."""
    module.recompile()
    _LazyGraphModule.force_recompile(module)


def make_fx(function, **settings):
    """torch's make_fx, whose module writes its code when it is first called (`graph_module_of`). What detaches is
    `aten.detach` in its graph, as torch before 2.14 has it; from then on torch writes `aten.alias` there."""

    def traced(*args):
        with _use_lazy_graph_module(True):
            module = _make_fx(function, **settings)(*args)
        name_detaches(module.graph)
        return module

    return traced


def name_detaches(graph: torch.fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
        node.target = torch.ops.aten.detach.default


@contextlib.contextmanager
def recording(root: torch.nn.Module, mode_of: Callable) -> Iterator[PythonKeyTracer]:
    """Context in which the ops of this thread are recorded as torch's make_fx does, which calls a function itself; here
    whoever opens the context calls it, and stands right above it in the stack.

    root: of the graph; it says for which ranks it is recorded. mode_of: a tracer -> the mode that records. Shapes are
    constants: there are no symbols for which make_fx cleans a graph up.
    """
    made = _MakefxTracer(None, "real", False, False, False, False, True)
    before = _symbolic_trace._is_fx_tracing_flag
    with made._init_modes_from_inputs(recording, ()):
        tracer = cast("PythonKeyTracer", made.fx_tracer)
        # What fx.Tracer.trace sets before it calls a function.
        tracer.root, tracer.tensor_attrs = root, {}
        tracer.graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
        made.proxy_mode = mode_of(tracer)
        _symbolic_trace._is_fx_tracing_flag = True
        try:
            with made.torch_fn_metadata_mode, made.proxy_mode, disable_autocast_cache(), _set_make_fx_tracer(made):
                yield tracer
        finally:
            _symbolic_trace._is_fx_tracing_flag = before


def name_for(tracer: PythonKeyTracer, op: Op) -> str:
    """How make_fx names the nodes of an operator."""
    return tracer.graph._target_to_str(op.overloadpacket.__name__)


def is_composite(op: Op) -> bool:
    """Whether an operator has a kernel that is made of others, whatever the device."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def is_tracing() -> bool:
    """True while make_fx records (in this thread)."""
    return get_proxy_mode() is not None


def last_call_of(op: Op) -> torch.fx.Node | None:
    """Where make_fx records (in this thread), the node of the newest call of an operator."""
    mode = get_proxy_mode()
    nodes = () if mode is None else reversed(mode.tracer.graph.nodes)
    return next((node for node in nodes if node.target is op), None)


def last_recorded() -> torch.fx.Node | None:
    """Where make_fx records (in this thread), the newest node."""
    mode = get_proxy_mode()  # `reversed` is no iterator in 2.11
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def reaches_before(root: torch.Tensor, began: torch.fx.Node | None) -> bool:
    """Where make_fx records, whether the history of a tensor leads to a leaf of autograd's that was recorded before a
    node, or was it: a gradient by it may be asked for later."""
    mode, seen, todo = get_proxy_mode(), set(), [root.grad_fn]
    while mode is not None and began is not None and todo:
        at = todo.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        todo += [function for function, _ in at.next_functions]
        leaf = getattr(at, "variable", None)
        slot = None if leaf is None else get_proxy_slot(leaf, mode.tracer, None)
        if slot is not None and not began < slot.proxy.node:
            return True
    return False


def forget_constant(x: Any, tracer: PythonKeyTracer) -> None:
    """While it is recorded: that a tensor was made of Python numbers. On such tensors torch would run an op at once,
    which a symbolic collective refuses."""
    for known in (x, get_proxy_slot(x, tracer, None)):
        if known is not None and hasattr(known, "constant"):
            known.constant = None


def forget_operator(namespace: str, name: str) -> None:
    """Let torch.ops look an operator up again; torch 2.11 keeps what it knew of one whose library was collected."""
    if (known := vars(getattr(torch.ops, namespace))).pop(name, None) and name in known["_dir"]:
        known["_dir"].remove(name)


outside_of_tracing = _disable_current_modes  # context: ops run for real although an outer trace is active


@contextlib.contextmanager
def quiet_about_shapes():
    """Context without torch's log of an op whose arguments do not fit, a traceback of 20 lines and more for an error
    that is raised anyway. Only this message, only in this thread; all others of that logger pass."""
    here, logger = threading.get_ident(), logging.getLogger(FakeTensorMode.__module__)

    def passes(record):
        return record.thread != here or not str(record.msg).startswith("failed while attempting to run meta")

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def compiling() -> contextlib.AbstractContextManager:
    """torch's own lock of its compiler: it patches itself for the whole process while it traces and compiles."""
    return convert_frame.compile_lock


def loop_of(func) -> str | None:
    """The name of an operator of torch that runs functions as graphs of their own; None for any other function."""
    loops = ("cond", "while_loop", "scan", "associative_scan", "map_impl", "switch")
    return func.name() if isinstance(func, HigherOrderOperator) and func.name() in loops else None


def below_autograd(run):
    """`run` without autograd's dispatch keys. torch makes its first call of compiled code under a mode (a check of
    aliases) that hides them from the ops inside; Dynamo guards on the keys, and would compile again at the second call.
    """

    def below(*tensors):
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return run(*tensors)

    return below


def mark_backward(roots) -> None:
    """Let the nodes that autograd is about to record for these grad_fns carry the number of their forward op."""
    roots = [root for root in roots if root is not None]
    if setup_stacktrace_preservation_hooks is not None and roots:
        setup_stacktrace_preservation_hooks(roots)


def inductor_decompositions():
    """The table under which Inductor's partitioner wants a joint graph."""
    return select_decomp_table()


def decomposition_of(op):
    """The function that makes an operator of others, as torch has it for its compiler, or None."""
    found = torch._decomp.decomposition_table.get(op)
    return op.decompose if found is None and is_composite(op) else found


def min_cut(joint, inputs, outputs: int, budget: float):
    """(forward, backward) modules of a joint graph, cut where the fewest bytes are saved under an activation budget.

    outputs: how many of those of the graph are results of the forward; the others are gradients.

    Unlike torch.compile's default, a pointwise value is made again even where a matmul reads it in the backward (the
    normed input, the product in SwiGLU): measured at the same time and 0.8 of the peak (experiments/LOG.md).
    """
    with _functorch_config.patch(activation_memory_budget=budget, ban_recompute_materialized_backward=False):
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=outputs)


def extract_subgraph(graph, inputs, outputs, name: str):
    """The part of a joint graph between `inputs` and `outputs` (lists of nodes)."""
    descriptions: list[Any] = [None] * len(outputs)  # of outputs, which only error texts name
    return _extract_graph_with_inputs_outputs(graph, inputs, outputs, descriptions, name, ignore_must_be_in_fw_bw=True)


def compile_flat_graph(graph_module, fakes, config_patches: dict):
    """Inductor on a flat graph of tensors -> callable(*tensors) -> list; no Dynamo, no guards."""
    lower_own(graph_module)
    return torch._inductor.standalone_compile(
        graph_module, fakes, dynamic_shapes="from_example_inputs", options={"config_patches": config_patches}
    )


def lower_own(graph_module) -> None:
    """Teach Inductor the operators of ours that a graph calls, before it compiles the graph.

    It learns an operator from the first call that it meets, and treats what was made before as if nothing read it in
    memory: the order of buffers, and with it the peak, would depend on what the process had compiled.
    """
    _lower_own()
    lowering, graph = (importlib.import_module(f"torch._inductor.{name}") for name in ("lowering", "graph"))
    for node in graph_module.graph.nodes:
        op = node.target
        if isinstance(op, Op) and op.namespace.startswith("fmegatron") and op not in lowering.lowerings:
            constraint = lowering.tag_to_layout_constraint(graph.get_layout_constraint_tag(op, with_default=True))
            lowering.make_fallback(op, layout_constraint=constraint, warn=False)


# Of the lowering of `fmegatron_step::own`: add one when it changes. It stands in the graph, by which Inductor's cache
# on disk knows what it has compiled: else code of an older lowering would run.
OWN_LOWERING = 2


@functools.cache
def _lower_own() -> None:
    """The operator `fmegatron_step::own` (`step.output_buffers`)."""
    # Loaded when something is compiled: it takes a second, which processes that compile nothing need not wait.
    lowering = importlib.import_module("torch._inductor.lowering")
    ir, virtualized = lowering.ir, lowering.V

    def place_of(x):
        """(the box that has the memory of x, what is in it): a buffer, or what is to be computed into one."""
        box = None
        while isinstance(x, (ir.MutableBox, ir.BaseView)):
            box, x = (x if isinstance(x, ir.StorageBox) else box), x.data
        return box, x

    def is_own(inner) -> bool:
        """Whether memory is made for this value alone; what is not known is not its own."""
        if not isinstance(inner, ir.Buffer):
            return isinstance(inner, ir.Loops)  # not computed yet: a buffer of its own, if one is made
        plain = type(inner.get_output_spec()) in (ir.FixedLayout, ir.FlexibleLayout)
        return plain and not isinstance(inner, ir.InputBuffer) and not inner.get_inputs_that_alias_output()

    def written_into(node) -> dict[int, str]:
        """The values of `own` that are copied into an input next, and into which."""
        found = {}
        for item in node.users:
            for user in item.users:
                if user.target is torch.ops.aten.copy_.default and user.args[1] is item:
                    found[item.args[1]] = user.args[0].target
        return found

    def own(xs, old, _):  # nothing is done with the old values: that they are read keeps their memory unchanged
        target, taken, values = written_into(virtualized.graph.current_node), set(), []
        for i, x in enumerate(xs):
            box, inner = place_of(x)
            name = inner.get_name() if isinstance(inner, ir.Buffer) else None
            in_place = i in target and x.data is box and name == target[i]  # a new value that is there already
            shared = i not in target and (name or id(box)) in taken
            if shared or not (in_place or is_own(inner)):
                x = lowering.clone(x)
                x.realize()
            elif i not in target:
                taken.add(name or id(box))
            elif box is not None and x.data is not box and isinstance(inner, ir.Loops):
                # `copy_` asks a view how it is computed before it has all that reads the input computed: of its old
                # value, at other indices than those that are written in the same loop.
                box.realize()
            values.append(x)
        return values

    lowering.register_lowering(torch.ops.fmegatron_step.own.default, type_promotion_kind=None)(own)


def functional_graph(graph_module, fakes, last: Callable):
    """What AOTAutograd makes of a flat graph of tensors, run op by op -> callable(*tensors) -> list; no Dynamo.

    last: a pass over the graph that runs, module -> module.

    The "aot_eager" of torch.compile goes through Dynamo, which takes a double without dims for a number: it forgets
    what is written into one, and it keeps every graph for as long as the process lives.
    """

    def as_it_is(functional, inputs):
        return make_boxed_func(last(functional).forward)

    compiler = cast("Any", as_it_is)  # torch's type asks for attributes that it reads of Inductor's own only
    return aot_module_simplified(
        graph_module, fakes, fw_compiler=compiler, decompositions={}, keep_inference_input_mutations=True
    )


def cpp_compiler() -> str | None:
    """The command with which Inductor compiles for the CPU here, None if there is none."""
    if get_cpp_compiler is None:
        return None
    try:
        with contextlib.redirect_stderr(sys.stdout):
            found = get_cpp_compiler()
    except InvalidCxxCompiler:
        return None
    return found if shutil.which(found) is not None else None


def inductor_folder() -> str:
    """Where Inductor keeps what it compiled."""
    return importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()


def inductor_default_folder() -> str:
    """Where it would without a setting; headers that it has compiled are there always."""
    return importlib.import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir()


def forget_compiled() -> None:
    """Empty Inductor's caches in memory, which know files of the folder by name."""
    importlib.import_module("torch._inductor.utils").clear_caches()


# ---- settings --------------------------------------------------------------------------------------------------------
def _autocast_on(kind: str):
    return lambda: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _precision_of(backend: str, op: str):
    get = torch._C._get_fp32_precision_getter
    return lambda: "ieee" if (found := get(backend, op)) == "none" else found


def _device():
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None  # it is a mode


# What to read in every call, of what changes the numbers of a function: without Python functions around where there is
# a choice.
SETTINGS = MappingProxyType(
    {
        "autocast on cpu": _autocast_on("cpu"),
        "autocast on cuda": _autocast_on("cuda"),
        "default dtype": torch.get_default_dtype,
        "default device": _device,
        "deterministic algorithms": torch._C._get_deterministic_algorithms,
        "deterministic algorithms that only warn": torch._C._get_deterministic_algorithms_warn_only,
        "filling of empty memory": torch._C._get_deterministic_fill_uninitialized_memory,
        **{
            f"fp32 precision of {backend} {op}": _precision_of(backend, op)
            for backend, op in (("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
        },
        "reduced precision of bf16 sums on cuda": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        "reduced precision of fp16 sums on cuda": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        "cudnn": torch._C._get_cudnn_enabled,
        "deterministic cudnn": torch._C._get_cudnn_deterministic,
        "mkldnn": torch._C._get_mkldnn_enabled,
        "flash attention": torch._C._get_flash_sdp_enabled,
        "attention that saves memory": torch._C._get_mem_efficient_sdp_enabled,
        "plain attention": torch._C._get_math_sdp_enabled,
        "attention by cudnn": torch._C._get_cudnn_sdp_enabled,
    }
)
