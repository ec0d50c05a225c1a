"""The memory of one graph as Inductor runs it: its wrapper on fake tensors, under a mode that counts live storages.

Inductor decides what a graph keeps: which values are fused away, in which order the rest runs, when a buffer is freed
or reused. Its Python wrapper says all of this, line by line, so it is generated (no kernel is compiled) and run with
kernels that do nothing. What is seen: every buffer, what operators return, memory given back and reused. What is not:
scratch memory inside of libraries (a matrix product's packed panels, gloo's segments), and what malloc adds.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fmegatron.collectives import torch_private as of_collectives
from fmegatron.nn import tiled_attention
from fmegatron.plan.cuda import codegen, kernels
from fmegatron.plan.cuda.devices import Device
from fmegatron.plan.cuda.kernels import Kernel
from fmegatron.plan.torch_private import FakeTensorMode, TorchDispatchMode, Written, bound_wrapper, schedule
from fmegatron.step import lower, torch_private
from fmegatron.step.graph import nodes

__all__ = ["Counted", "Held", "counted", "made_by"]

_GRAIN = 512  # bytes to which CUDA's allocator rounds up (torch: kMinBlockSize)


@dataclass(frozen=True)
class Held:
    """Something that is alive at the peak.

    name: of the buffer in Inductor's wrapper of `graph` ("step", or the name of a layer's half). nbytes: of its memory.
    dtype, shape. at: the line of the step that it is made at; op: the operator there.
    """

    name: str
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: str
    op: str
    graph: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} of {self.op} at {self.at}, {self.name} of {self.graph}"


@dataclass
class Counted:
    """The memory of one call of a graph above its arguments.

    peak: bytes. held: what is alive there, largest first, with what is alive inside of the opaque node that runs.
    phases: name of a part of the graph -> its peak; parts lie between the first and last calls of layers, see
    `_Phases`. calls: "forward", "backward" -> what is alive at each call of a layer there, named as parts are.
    returned: bytes of its results. results: of each the operator that makes it, and its line. kernels: what a call of
    it launches, with what it calls; counted for a CUDA device.
    """

    peak: int
    held: tuple[Held, ...]
    phases: dict[str, int] = field(default_factory=dict)
    calls: dict[str, tuple[int, ...]] = field(default_factory=dict)
    returned: int = 0
    results: tuple[tuple[str, str], ...] = ()
    kernels: tuple[Kernel, ...] = ()


def counted(
    module: fx.GraphModule,
    fakes: list,
    patches: Mapping[str, Any],
    inside: Mapping[Any, Counted],
    label: str,
    device: Device | None = None,
    state: int = 0,
) -> Counted:
    """Schedule a lowered graph with Inductor and count the memory of its wrapper.

    Args:
        module: flat graph of tensors, all passes done.
        fakes: its arguments.
        patches: Inductor's settings for it.
        inside: operator of an opaque node -> the memory of one call of it, above its arguments.
        label: what the graph is, for the names of frames.
        device: of which it is the code; None: of the CPU.
        state: how many of its first arguments are the step's state.
    """
    module = lower.copy_module(module)
    for node in module.graph.nodes:
        node.meta["stack_trace"] = node.meta.get("at", "?")  # what torch keeps when it traces the graph again
    with contextlib.nullcontext() if device is None else codegen.there(device):
        written = schedule(module, fakes, dict(patches) if device is None else codegen.settings(patches))
        run = functools.partial(_run, written, fakes, f"<planned {label}>", inside, device, frozenset(range(state)))
        first = run(None)
        again = run(first.peak_at)
    assignments = _assignments(written.wrapper)
    held = []
    for name, tensor in again.names.items():
        op, at = _origin(assignments.get(name, name), written.buffers, inside)
        nbytes = again.sizes[tensor.untyped_storage()]
        held.append(Held(name, nbytes, tensor.dtype, tuple(tensor.shape), at, op, label))
    if again.running is not None and again.running in inside:
        held += inside[again.running].held
    held.sort(key=lambda one: -one.nbytes)
    results = tuple(made_by(node) for node in nodes.items_of(module.graph.output_node().args[0]))
    phases, done = first.phases, kernels.added(first.kernels)
    return Counted(first.peak, tuple(held), phases.found, phases.calls, first.returned, results, done)


def made_by(node: fx.Node) -> tuple[str, str]:
    """(operator, line) of what computes a node's value: not of an item taken, or of memory of its own given to it."""
    while node.target is operator.getitem:
        source = nodes.node_of(node.args[0])
        own = torch_private.opname(source.target) == "own"
        node = nodes.items_of(source.args[0])[nodes.int_of(node.args[1])] if own else source
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0], node.meta.get("at", "?")


def _made_on(line: str) -> str:
    """The name of what a line of a wrapper makes: "buf3", or "buf3 (scratch)" of what a library takes to fill it."""
    into = re.search(r"\bout=(\w+)", line)
    return f"{into[1]} (scratch)" if into else line.partition("=")[0].strip()


def _assignments(source: str) -> dict[str, str]:
    """Names of a wrapper that are items of others -> the item: {"buf7": "buf5[2]"}."""
    return dict(re.findall(r"^\s*(\w+) = (\w+\[\d+\])", source, re.MULTILINE))


def _origin(name: str, origins: Mapping[str, set], inside: Mapping[Any, Counted]) -> tuple[str, str]:
    """(operator, line) of what a buffer is made of last; of a layer's result, inside of the layer."""
    whole, _, item = name.removesuffix(" (scratch)").removesuffix("]").partition("[")
    found = [n for n in origins.get(whole, ()) if n.meta.get("stack_trace", "?") != "?"]
    if item:
        for node in found:
            if node.target in inside:
                return inside[node.target].results[int(item)]
    found = [node for node in found if node.target not in inside] or found  # not what reads it
    if not found:
        return "?", "?"
    position = {n: i for i, n in enumerate(found[0].graph.nodes)}
    last = max(found, key=lambda n: position.get(n, -1))
    return made_by(last)[0], last.meta["stack_trace"]


# ---- running it ------------------------------------------------------------------------------------------------------
def _run(
    written: Written,
    fakes: list,
    file: str,
    inside: Mapping[Any, Counted],
    device: Device | None,
    state: frozenset[int],
    look_at: int | None,
) -> _Counting:
    """Run a wrapper on tensors like the fakes. look_at: the event at which the names of what is alive are read."""
    mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None) or FakeTensorMode()
    with mode:
        arguments = [torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=f.device) for f in fakes]
        counting = _Counting(arguments, written, file, inside, look_at)
        counting.device, counting.state = device, frozenset(f"arg{i}_1" for i in state)
        call = bound_wrapper(written.wrapper, file, counting.launched, counting.called)
        with counting:
            results = call(list(arguments))
    mine = {r.untyped_storage() for r in results if isinstance(r, torch.Tensor)}
    counting.returned = sum(counting.sizes[s] for s in mine if counting.sizes.get(s))
    return counting


class _Phases:
    """The peak of each part of a graph: "start", "forward", "turn", "backward", "late backward", "end".

    Between the first and the last call of an opaque node whose name has "_fwd_" is the forward, of "_bwd_" the
    backward, whose second half is apart. Where layers are alike, the peak of each part grows by the same with each of
    them, which `deep` uses. A call of an opaque node that has parts itself counts by each of them.
    """

    def __init__(self, inside: Mapping[Any, Counted]):
        self.events: list[tuple[str, int, Any]] = []
        self.inside = inside

    def add(self, kind: str, live: int, op: Any) -> None:
        self.events.append((kind, live, op))

    @property
    def found(self) -> dict[str, int]:
        at = {kind: [i for i, e in enumerate(self.events) if e[0] == kind] for kind in ("F", "B")}
        peaks: dict[str, int] = {}
        for i, (_, live, op) in enumerate(self.events):
            part = self._part(i, at["F"], at["B"])
            within = self.inside[op].phases if op is not None else {}
            several = {f"{part}: {name}": live + more for name, more in within.items()} if len(within) > 1 else {}
            alone = 0 if op is None else self.inside[op].peak
            for name, value in (several or {part: live + alone}).items():
                peaks[name] = max(peaks.get(name, 0), value)
        return peaks

    @property
    def calls(self) -> dict[str, tuple[int, ...]]:
        """What is alive at each call of a layer, by the names of parts; of a graph inside, where it is called last."""
        at = {kind: [i for i, e in enumerate(self.events) if e[0] == kind] for kind in ("F", "B")}
        found: dict[str, tuple[int, ...]] = {}
        for name, kind in (("forward", "F"), ("backward", "B")):
            if at[kind]:
                found[name] = tuple(self.events[i][1] for i in at[kind])
        for i, (_, live, op) in enumerate(self.events):
            part = self._part(i, at["F"], at["B"])
            within = {} if op is None else self.inside[op].calls
            found |= {f"{part}: {name}": tuple(live + more for more in calls) for name, calls in within.items()}
        return found

    @staticmethod
    def _part(i: int, forward: list[int], backward: list[int]) -> str:
        if not forward or i < forward[0]:
            return "start"
        if i <= forward[-1] and (not backward or i < backward[0]):
            return "forward"
        if not backward or i < backward[0]:
            return "turn" if backward else "end"
        if i > backward[-1]:
            return "end"
        return "backward" if i <= backward[len(backward) // 2] else "late backward"


class _Counting(TorchDispatchMode):
    """Sum of the live storages that are made under it; an opaque node adds its own peak while it runs."""

    def __init__(
        self, arguments: list, written: Written, file: str, inside: Mapping[Any, Counted], look_at: int | None
    ):
        super().__init__()
        self.live = self.peak = self.events = self.peak_at = self.returned = 0
        self.sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        for t in arguments:
            self.sizes[t.untyped_storage()] = 0  # views of arguments are no memory
        self.written, self.lines, self.launches = written, written.wrapper.splitlines(), iter(written.launches)
        self.file, self.inside, self.look_at = file, inside, look_at
        self.names: dict[str, torch.Tensor] = {}
        self.running: Any = None
        self.phases = _Phases(inside)
        self.device: Device | None = None
        self.state: frozenset[str] = frozenset()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch_private.opname(func) == "wait_tensor":  # its fake form makes a new tensor, the real one waits
            return args[0]
        known = self.inside.get(func)
        more = known.peak if known is not None else _scratch(func, args, self.device)
        name = str(func)
        kind = "F" if "_fwd_" in name else "B" if "_bwd_" in name else ""
        if known is not None or more:
            self._event(kind, self.live + more, func if known is not None else None)
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage() not in self.sizes:
                self._made(t)
        if known is not None:
            self.kernels += known.kernels
        elif self.device is not None and not _only_looks(func):
            self.called(torch_private.opname(func), [*args, *(kwargs or {}).values()], out, func)
        return out

    def launched(self, name: str) -> None:
        """A Triton kernel runs."""
        if self.device is None:
            return
        launch = next(self.launches, None)
        if launch is None or launch.name != name:
            raise ValueError(
                f"plan: got the launch of {name} in {self.file}, wanted {launch and launch.name}, the next that was "
                "noted; plan without --device"
            )
        made = [_origin(buffer, self.written.buffers, self.inside) for buffer in launch.buffers]
        origin = next((one for one in reversed(made) if one != ("?", "?")), ("?", "?"))
        self.kernels.append(kernels.launched(self._label, self.device, launch, origin, self.state))

    def called(self, name: str, arguments: Sequence[Any], results: Any, op: Any = None) -> None:
        """A kernel of a library runs."""
        if self.device is None:
            return
        line = self.lines[self._frame().f_lineno - 1]
        made = re.search(r"\bout=(\w+)", line)
        _, at = _origin(made[1] if made else line.partition("=")[0].strip(), self.written.buffers, self.inside)
        op = getattr(torch.ops.aten, name, None) if op is None else op
        found = kernels.called(self._label, self.device, op, name, arguments, results, at)
        self.kernels += [] if found is None else [found]

    @property
    def _label(self) -> str:
        return self.file.removeprefix("<planned ").removesuffix(">")

    def _made(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        size = storage.nbytes()
        if self.device is not None:
            size = -(-size // _GRAIN) * _GRAIN if t.is_cuda else 0  # what is in host memory is counted apart
        self.sizes[storage] = size
        self.live += size
        weakref.finalize(storage, self._gone, size)
        self._event("", self.live, None, t)

    def _gone(self, size: int) -> None:
        self.live -= size

    def _event(self, kind: str, live: int, op: Any, new: torch.Tensor | None = None) -> None:
        self.events += 1
        self.phases.add(kind, self.live if op is not None else live, op)
        if live > self.peak:
            self.peak, self.peak_at = live, self.events
        if self.look_at == self.events:
            self.names, self.running = self._alive(new), op

    def _frame(self) -> Any:
        """The wrapper's frame."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        assert frame is not None, "the wrapper is running"
        return frame

    def _alive(self, new: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Names in the wrapper's frame -> tensors, one for each storage that counts. new: has no name yet."""
        frame = self._frame()
        found: dict[Any, tuple[str, torch.Tensor]] = {}
        for name, value in frame.f_locals.items():
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, torch.Tensor) and self.sizes.get(item.untyped_storage()):
                    found.setdefault(item.untyped_storage(), (name, item))
        if new is not None:
            line = self.lines[frame.f_lineno - 1]
            found.setdefault(new.untyped_storage(), (_made_on(line), new))
        return {name: t for name, t in found.values()}


def _only_looks(func: Any) -> bool:
    """Whether an operator launches nothing: it makes memory, or sees memory in another way."""
    schema = of_collectives.schema_of(func)
    assert schema is not None, "an operator"
    looks = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return looks or torch_private.opname(func) in ("empty", "empty_strided", "_reshape_alias")


def _scratch(func: Any, args: tuple, device: Device | None) -> int:
    """Bytes that an operator takes while it runs, besides its results."""
    if getattr(func, "namespace", "") == "fmegatron_real" and re.fullmatch(
        "ppermute|all_to_all_rows", torch_private.opname(func)
    ):
        return args[0].numel() * args[0].element_size()  # a copy of what is sent
    if device is not None:
        return kernels.scratch(func, args)
    return tiled_attention.scratch(args) if torch_private.opname(func).startswith("tiled_attention") else 0
