"""Arrays on their way to a device of CUDA: through page-locked memory, on a stream of its own; the host does not wait.

A copy on the stream that computes would begin when all that was launched there is done. On a stream of its own it
begins at once, and what reads the arrays waits for it on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from fmegatron.tree import labels, structure

__all__ = ["Arrivals", "Streams"]


class Streams:
    """What is asked of a device of CUDA by what copies beside the stream that computes. Tests give another."""

    def __init__(self, device: torch.device):
        self.device = device

    def enter_thread(self) -> None:
        """The device becomes the current one of this thread."""
        torch.cuda.set_device(self.device)

    def new(self) -> Any:
        """A stream beside the others."""
        return torch.cuda.Stream(self.device)

    def current(self) -> Any:
        """The stream that computes in this thread."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> contextlib.AbstractContextManager:
        """In it torch launches, and takes memory, on that stream."""
        return torch.cuda.stream(stream)

    def mark(self, stream: Any) -> Any:
        """An event: that all is done which was launched on the stream so far."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def follow(self, stream: Any, event: Any) -> None:
        """What is launched on the stream from now on begins behind the event; the host does not wait."""
        stream.wait_event(event)

    def used_on(self, x: torch.Tensor, stream: Any) -> None:
        """The memory of a tensor is not given away before the stream has done what is launched on it so far."""
        x.record_stream(stream)

    def is_done(self, event: Any) -> bool:
        """Whether an event has come."""
        return event.query()

    def wait(self, event: Any) -> None:
        """The host waits for an event."""
        event.synchronize()

    def copy(self, into: torch.Tensor, x: torch.Tensor) -> None:
        """Copy on the current stream; the host does not wait where its memory is page-locked."""
        into.copy_(x, non_blocking=True)

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory of the device, uint8, which the current stream gives back in turn."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in page-locked memory, which is not given away before copies from it are done."""
        return x.pin_memory()

    def is_pinned(self, x: torch.Tensor) -> bool:
        """Whether a tensor is in page-locked memory."""
        return x.is_pinned()

    def bring(self, x: torch.Tensor, wait: bool) -> torch.Tensor:
        """A tensor on the device, copied on the current stream. wait: until it is there."""
        return x.to(self.device, non_blocking=not wait)


class Arrivals:
    """What brings trees to a device: `come(*begin(values))`, or `arrivals(values)`, which is both.

    Tensors that are there already stay, and what is no tensor; layouts that are known stay known. What is pinned
    already is its owner's, who may write it next, so it is waited for.
    """

    def __init__(self, device: torch.device, streams: Callable[[torch.device], Streams] = Streams):
        self.device, self._make, self._streams, self._stream = device, streams, None, None

    def enter_thread(self) -> None:
        """The device becomes the current one of a thread, which begins with the first of all."""
        if self.device.type == "cuda" and self.device.index is not None:
            self._streams_here().enter_thread()

    def begin(self, values: structure.Tree) -> tuple[structure.Tree, Any]:
        """(the tree on the device, the event of its arrival; None: it is there). From any thread."""
        if self.device.type != "cuda":
            return structure.map(lambda x: self._moved(x, lambda y: y.to(self.device)), values), None
        streams = self._streams_here()
        with streams.on(self._stream):
            there = structure.map(lambda x: self._moved(x, self._sent), values)
            return there, streams.mark(self._stream)

    def come(self, values: structure.Tree, event: Any) -> structure.Tree:
        """The tree that `begin` gave, for what is launched next in this thread."""
        if event is not None and self._streams is not None:
            stream = self._streams.current()
            self._streams.follow(stream, event)
            for x in structure.leaves(values):
                if isinstance(x, torch.Tensor):
                    self._streams.used_on(x, stream)
        return values

    def __call__(self, values: structure.Tree) -> structure.Tree:
        """The tree on the device, for what is launched next in this thread."""
        return self.come(*self.begin(values))

    def _streams_here(self) -> Streams:
        if self._streams is None:
            self._streams = self._make(self.device)
            self._stream = self._streams.new()
        return self._streams

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        streams = self._streams_here()
        own = x.device.type == "cpu" and not streams.is_pinned(x)
        return streams.bring(streams.pinned(x) if own else x, wait=not own)

    def _moved(self, x: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if not isinstance(x, torch.Tensor) or x.device == self.device:
            return x
        layout, there = labels.layout_of(x), move(x)
        return there if layout is None else labels.labelled(there, layout)
