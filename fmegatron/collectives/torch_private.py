"""Every private name of torch that this room uses, in one place. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, cast, overload

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d, _functorch  # pyright: ignore[reportAttributeAccessIssue]  has no stub
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # a str to type checkers only, in newer releases only

__all__ = [
    "allow_symmetric_memory",
    "flight_record",
    "functional_ops",
    "group_named",
    "is_transformed",
    "recorded_graph",
    "recorded_node",
    "recorded_root",
    "register_group",
    "register_work",
    "schema_of",
    "unregister_group",
]


@overload
def schema_of(op: OpOverload) -> torch.FunctionSchema: ...
@overload
def schema_of(op: object) -> torch.FunctionSchema | None: ...
def schema_of(op: object) -> torch.FunctionSchema | None:
    """What an operator takes and returns (name, arguments, returns, is_mutable); None for what is no operator."""
    return getattr(op, "_schema", None)


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work in this thread."""
    return _functorch.peek_interpreter_stack() is not None


def flight_record() -> bytes | None:
    """The last collectives of this process over NCCL, as torch's flight recorder pickles them; None without NCCL."""
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    if dump is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    try:
        return dump()
    except RuntimeError:  # the recorder is off
        return None


def allow_symmetric_memory(name: str) -> None:
    """Let a group's ranks read each other's buffers; newer releases need no such call, and warn of it."""
    module = importlib.import_module("torch.distributed._symmetric_memory")  # takes a second, and few need it
    allow = getattr(module, "enable_symm_mem_for_group", None)
    if allow is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            allow(name)


def functional_ops():
    """torch's functional collectives, as `torch.ops.NAMESPACE`; there is none without `torch.distributed`."""
    return torch.ops._c10d_functional


def recorded_root() -> torch.nn.Module | None:
    """The module from which make_fx, or who records as it does, takes names of attributes; None: nothing records."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.root


def recorded_graph() -> torch.fx.Graph | None:
    """The graph that make_fx, or who records as it does, records; None: nothing records."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def recorded_node(x: torch.Tensor) -> torch.fx.Node | None:
    """Of the graph that is recorded the node whose result a tensor is; None: of none."""
    mode = get_proxy_mode()
    return None if mode is None else get_proxy_slot(x, mode.tracer, None, lambda slot: slot.proxy.node)


def group_named(name: str) -> dist.ProcessGroup:
    """The group that torch knows under a name. Raises RuntimeError for an unknown one."""
    return _distributed_c10d._resolve_process_group(cast("GroupName", name))


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let torch's functional collectives know a group by a name, the same on all ranks."""
    _distributed_c10d._register_process_group(cast("GroupName", name), group)


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Let `wait_tensor` of a tensor, or of a view of its memory, wait for a collective that writes it."""
    _distributed_c10d._register_work(tensor, work)


def unregister_group(name: str) -> None:
    """Forget the name."""
    _distributed_c10d._unregister_process_group(cast("GroupName", name))
