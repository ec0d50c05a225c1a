"""The graph of a call while it is recorded, and the mode that records its ops."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fmegatron import tree
from fmegatron.collectives import kinds
from fmegatron.step.torch_private import (
    FakeTensor,
    Op,
    ProxyTensor,
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    forget_constant,
    get_proxy_slot,
    graph_module_of,
    is_composite,
    name_detaches,
    name_for,
    recording,
    snapshot_fake,
    track_tensor_tree,
    without_functions,
)

__all__ = ["Recorder", "recorder_of"]


class Recorder:
    """The graph of a call that is recorded: `recorder.outputs(fn(*recorder.inputs(fakes)))`.

    graph_module: of it, once outputs are given.
    """

    def __init__(self, tracer: Any):
        self._tracer, self._count = tracer, 0
        self.graph_module: torch.fx.GraphModule | None = None

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same tensors, whose values are from now on placeholders of the graph, behind those that it has."""
        graph, names = self._tracer.graph, [f"arg{self._count + i}_1" for i in range(len(tensors))]
        first = next((node for node in graph.nodes if node.op != "placeholder"), None)
        with contextlib.nullcontext() if first is None else graph.inserting_before(first):
            proxies = [self._tracer.create_proxy("placeholder", name, (), {}) for name in names]
        with disable_proxy_modes_tracing():
            track_tensor_tree(list(tensors), proxies, constant=None, tracer=self._tracer)
        self._count += len(names)
        return list(tensors)

    def outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """What the graph returns, a list."""
        found = [get_proxy_slot(t, self._tracer, t, lambda slot: slot.proxy) for t in tensors]
        self._tracer.create_node("output", "output", (self._tracer.create_arg(found),), {})
        name_detaches(self._tracer.graph)  # as `make_fx` does
        self.graph_module = graph_module_of(self._tracer.root, self._tracer.graph)


class RecordingMode(ProxyTorchDispatchMode):
    """torch's mode that records, which calls `note` around each op: (op, arguments, keyword arguments, what records it
    and gives its result). Ops that need nothing of what torch does for symbols, constants and decompositions are
    recorded in a shorter way, into the same nodes; their kernels on fake tensors run without torch functions' modes."""

    def __init__(self, tracer: PythonKeyTracer, note: Callable):
        super().__init__(tracer, "real")
        self.note = note
        self.names: dict[Op, str | None] = {}  # of ops that are recorded so; None: not so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # autograd asks it of every value that it meets: no op, and no node
            return args[0].device

        def record(*args: Any, **kwargs: Any) -> Any:
            if kinds.collective_of(func):
                for x in tree.leaves(args[0]):
                    forget_constant(x, self.tracer)
            name = self._name(func)
            found = None if name is None else _nodes_in((args, kwargs), self.tracer.tensor_tracker)
            if found is None:
                return plain(func, types, args, kwargs)
            node = self.tracer.create_node("call_function", func, found[0], found[1], name)
            node.meta["original_aten"] = func
            with without_functions():
                out = func(*args, **kwargs)
            self._keep(out, node)
            return out

        plain: Callable = super().__torch_dispatch__
        return self.note(func, args, kwargs or {}, record)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether Dynamo goes to work under it: what a step compiles or loops with is part of the one graph."""
        return False

    def _name(self, op: Any) -> str | None:
        """How the nodes of an op are named that is recorded in the shorter way; None: it is not."""
        if op not in self.names:
            known = isinstance(op, Op) and op.namespace != "prim" and op not in _NOT_PLAIN and not is_composite(op)
            known = known and torch.Tag.data_dependent_output not in op.tags
            known = known and not getattr(self, "emulate_precision_casts", False)
            self.names[op] = name_for(self.tracer, op) if known else None
        return self.names[op]

    def _keep(self, out: Any, node: torch.fx.Node) -> None:
        """Let a node be that of what it gives."""
        if type(out) is FakeTensor:
            node.meta["val"] = snapshot_fake(out)
            self.tracer.tensor_tracker[out] = ProxyTensor(self.tracer.proxy(node), None)
        elif type(out) in (list, tuple) and all(type(x) is FakeTensor for x in out):
            meta = dict(node.meta)
            node.meta["val"] = type(out)(map(snapshot_fake, out))
            for i, (x, val) in enumerate(zip(out, node.meta["val"], strict=True)):
                item = self.tracer.graph.call_function(operator.getitem, (node, i))
                item.meta = {**meta, "val": val}
                self.tracer.tensor_tracker[x] = ProxyTensor(self.tracer.proxy(item), None)
        else:
            track_tensor_tree(out, self.tracer.proxy(node), constant=None, tracer=self.tracer)


_DEVICE = torch.ops.prim.device.default
_NOT_PLAIN = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.is_nonzero.default})
_PLAIN = frozenset({int, float, bool, complex, str, type(None)})
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}


def _nodes_in(x: Any, known: Any) -> Any:
    """Arguments with nodes in the place of tensors; None where something else is among them."""
    try:
        return _with_nodes(x, known)
    except LookupError:
        return None


def _with_nodes(x: Any, known: Any) -> Any:
    kind = type(x)
    if kind is FakeTensor:
        slot = known[x]
        if slot.constant is not None:
            raise LookupError
        return slot.proxy.node
    if kind in _PLAIN:
        return x
    if kind is tuple:
        return tuple([_with_nodes(one, known) for one in x])
    if isinstance(x, list):
        return [_with_nodes(one, known) for one in x]
    if isinstance(x, dict):
        return {key: _with_nodes(one, known) for key, one in x.items()}
    raise LookupError


@contextlib.contextmanager
def recorder_of(root: torch.nn.Module, note: Callable) -> Iterator[Recorder]:
    """Context in which the ops of this thread are recorded. root: of the graph. note: as of `RecordingMode`."""
    with recording(root, lambda tracer: RecordingMode(tracer, note)) as tracer:
        yield Recorder(tracer)
