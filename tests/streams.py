"""A device that does what was launched as late as it may: streams and events without CUDA.

Nothing of a stream is done before somebody waits for it, and of other streams only what it has to follow. So what reads
before a copy has come sees what the memory held before, and what writes before one has left changes what it brings.
"""

import contextlib
import threading
from dataclasses import dataclass, field

import torch

from fmegatron.tree.arrivals import Streams


@dataclass(eq=False)
class Stream:
    """What was launched: functions, and events of other streams that they come behind. done: how many are through."""

    name: str
    launched: list = field(default_factory=list)
    done: int = 0


@dataclass(frozen=True)
class Event:
    """That the first of a stream are through."""

    stream: Stream
    count: int


class Late(Streams):
    """waits: how often the host has. used: (tensor, stream) of `used_on`. threads: that entered. held: pinned."""

    def __init__(self, device=None):
        super().__init__(device or torch.device("cuda", 0))
        self.compute, self._thread = Stream("compute"), threading.local()
        self.streams, self.waits, self.threads, self.used, self.held = [self.compute], 0, 0, [], []

    def enter_thread(self):
        """As `Streams.enter_thread`."""
        self.threads += 1

    def new(self):
        """As `Streams.new`."""
        self.streams.append(Stream(f"stream {len(self.streams)}"))
        return self.streams[-1]

    def current(self):
        """As `Streams.current`."""
        return self.compute

    @contextlib.contextmanager
    def on(self, stream):
        """As `Streams.on`."""
        before, self._thread.here = self.here, stream
        yield
        self._thread.here = before

    @property
    def here(self):
        """The stream of `on`, in this thread."""
        return getattr(self._thread, "here", self.compute)

    def mark(self, stream):
        """As `Streams.mark`."""
        return Event(stream, len(stream.launched))

    def follow(self, stream, event):
        """As `Streams.follow`."""
        stream.launched.append(event)

    def used_on(self, x, stream):
        """As `Streams.used_on`."""
        self.used.append((x, stream))

    def pinned(self, x):
        """As `Streams.pinned`: what is copied by the host is copied at once."""
        return x.clone()

    def is_pinned(self, x):
        """As `Streams.is_pinned`: one of `held`."""
        return any(x is y for y in self.held)

    def bring(self, x, wait):
        """As `Streams.bring`: NaN, or 255, until it has come."""
        there = torch.full_like(x, torch.nan if x.is_floating_point() else 111)
        self.copy(there, x)
        if wait:
            self.wait(self.mark(self.here))
        return there

    def copy(self, into, x):
        """As `Streams.copy`."""
        self.launch(lambda: into.copy_(x))

    def room(self, nbytes):
        """As `Streams.room`."""
        return torch.full((nbytes,), 111, dtype=torch.uint8)

    def launch(self, function, stream=None):
        """A function on a stream; None: on that of `on`."""
        (stream or self.here).launched.append(function)

    def is_done(self, event):
        """As `Streams.is_done`."""
        return event.stream.done >= event.count

    def wait(self, event):
        """As `Streams.wait`: the host waits."""
        self.waits += 1
        self.do(event)

    def do(self, event):
        """Do what an event is behind, and no more."""
        while event.stream.done < event.count:
            one = event.stream.launched[event.stream.done]
            event.stream.done += 1
            if isinstance(one, Event):
                self.do(one)
            else:
                one()

    def finish(self):
        """Do all that was launched."""
        for stream in self.streams:
            self.do(self.mark(stream))


class There(torch.Tensor):
    """A tensor that says that it is on a device of CUDA."""

    is_cpu, is_cuda, device = False, True, torch.device("cuda", 0)


def there(x):
    """A copy of a tensor, on that device."""
    return x.clone().as_subclass(There)
