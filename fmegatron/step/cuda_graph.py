"""A compiled step as one CUDA graph: all its kernels and collectives are recorded once, and launched by one call.

A recorded graph reads and writes the addresses that it has seen. Donation writes new values in place, so the leaves of
a donated state keep theirs from call to call; all else that a call is given is copied into memory of the graph, and
what it returns beside the state is copied out of it. The first call at the addresses of a state runs as it would
without a graph, which loads kernels and opens communicators; the second is recorded. A state at other addresses (of a
restore) is seen for the first time, and what was recorded before is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Protocol

import torch
from torch import fx

from fmegatron.collectives import World
from fmegatron.step import opaque
from fmegatron.step.donation import Donation
from fmegatron.step.graph.nodes import entry_of, opaque_entries
from fmegatron.step.lines import warn_users
from fmegatron.step.torch_private import Op, opname

__all__ = ["OnDevice", "Recorded", "Recorder", "recorder_on"]

_CHANGES = 3  # of the addresses, after which it is said that nothing is gained

# Operators of ours during which the host waits, or makes memory of its own, and what to do without.
_WAITS = MappingProxyType(
    {
        "fmegatron_real::all_to_all_rows": "counts of rows are read on the host; fix their number: MoE(pair_rows=...)",
        "fmegatron_nn::grouped_mm": "ends of groups are read on the host; compute experts in bf16",
        "fmegatron_step::to_host": "values travel to host memory; leave out offload",
        "fmegatron_step::from_host": "values travel from host memory; leave out offload",
        "fmegatron_step::rooms_on_host": "values travel to host memory; leave out offload",
        "fmegatron_step::rooms": "values travel from host memory; leave out memory, and offload",
    }
)


class Recorder(Protocol):
    """How a device records what it is to do."""

    def record(self, run: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """(what `run()` returns, what does all of it again at the same addresses); nothing is done while it is
        recorded."""
        ...


class OnDevice:
    """Graphs of a device of CUDA, each with memory of its own."""

    def __init__(self, device: torch.device):
        self.device = device

    def record(self, run: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """See `Recorder`. Other threads, as those that read data ahead, may go on with theirs."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = run()
        return outs, graph.replay


def recorder_on(device: torch.device, graph: fx.Graph, world: World | None) -> Recorder:
    """What records a lowered graph on a device.

    Raises ValueError, with the line, for a device that is not of CUDA, for a step in which the host waits or has work
    of its own, and for one that communicates by other means than NCCL.
    """
    if device.type != "cuda":
        raise ValueError(f"jit: cuda_graph: got a step on {device}, wanted one on a device of CUDA; leave it out")
    for node in _all_nodes(graph):
        name = f"{node.target.namespace}::{opname(node.target)}" if isinstance(node.target, Op) else ""
        entry, why = entry_of(node), _WAITS.get(name)
        if entry is not None and not isinstance(entry, opaque.Bound):
            why = "the host has work of its own (state in host memory, a pipeline); leave that out"
        if why is not None:
            at = node.meta.get("at", "?")
            raise ValueError(f"jit: cuda_graph: got {node.name} at {at}, wanted nothing on the host, but {why}")
    if world is not None and world.size > 1 and not world.on_nccl:
        raise ValueError(
            f"jit: cuda_graph: got {world} without NCCL, wanted it, as others are not recorded; leave it out"
        )
    return OnDevice(device)


def _all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Of a graph and of the layers that it calls."""
    yield from graph.nodes
    for entry in opaque_entries(graph):
        if isinstance(entry, opaque.Bound):
            yield from _all_nodes(entry.graph_module.graph)


class Recorded:
    """`run(*tensors) -> list of tensors`, recorded in its second call with the same addresses of what it donates.

    donation: of what is written in place. world: whose communicators it has, if any. recordings: how many there were.
    """

    def __init__(self, run: Callable, donation: Donation, recorder: Recorder, world: World | None = None):
        self.run, self.recorder, self.world = run, recorder, world
        self.donated, self.what = frozenset(donation.positions), donation.leaves[0].name
        self.recordings = self.changes = 0
        self._at: tuple[int, ...] | None = None  # where the donated leaves were in the last call
        # What the recorded graph reads beside the donated leaves. Those it knows by address alone: to have one here
        # would keep the next call from writing into its memory.
        self._given: dict[int, torch.Tensor] = {}
        self._outs: list[torch.Tensor] = []
        self._again: Callable[[], None] | None = None

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """What run returns, in memory that no later call writes."""
        at = (0 if self.world is None else self.world.begun, *(tensors[i].data_ptr() for i in sorted(self.donated)))
        if at != self._at:
            self._forget(self._at is not None)
            result, self._at = list(self.run(*tensors)), at
            return result
        if self._again is None:
            self._given = {i: x.clone() for i, x in enumerate(tensors) if i not in self.donated}
            given = [self._given.get(i, x) for i, x in enumerate(tensors)]
            self._outs, self._again = self.recorder.record(lambda: list(self.run(*given)))
            self.recordings += 1
        else:
            for i, own in self._given.items():
                own.copy_(tensors[i], non_blocking=True)
        self._again()
        return [x.clone() for x in self._outs]

    def _forget(self, changed: bool) -> None:
        """Give the memory of what was recorded back."""
        self._given, self._outs, self._again, self._at = {}, [], None, None
        self.changes += changed
        if changed and self.changes == _CHANGES:
            warn_users(
                f"{self.what}: cuda_graph: got donated arrays at other addresses {_CHANGES} times (reported once), "
                "wanted the state that the call before has returned; such a call runs without a graph"
            )
