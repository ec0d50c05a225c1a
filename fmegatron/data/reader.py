"""Read-ahead: the batches that a loop will ask for next are made in a thread while a step runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Thread
from typing import Any

from fmegatron.data.contract import Placed, Source, require_source
from fmegatron.tree import arrivals, structure

_LOOK_S = 1.0  # how often one who waits looks whether the thread is alive


class Reader:
    """`reader(n)` is `source.at(n)`, made before it was asked for; see `ahead`.

    waited: seconds that callers waited for batches so far.
    """

    def __init__(self, source: Source, depth: int, to: arrivals.Arrivals | None) -> None:
        self.waited = 0.0
        self._source, self._depth, self._arrivals = source, depth, to
        self._ready: dict[int, tuple[Any, Exception | None, Any]] = {}  # number -> batch, error, event
        self._wanted = range(0)
        self._closed, self._changed = False, Condition()
        self._thread = Thread(target=self._make, name="fmegatron-data-ahead", daemon=True)
        self._thread.start()

    def __call__(self, number: int) -> structure.Tree:
        """The batch of a number: at once where it follows the one before, else as long as it takes to make it.

        Raises what `source.at(number)` raised; RuntimeError where the thread has ended, or `close` was called.
        """
        began = time.perf_counter()
        with self._changed:
            self._want(range(number, number + self._depth + 1))
            while number not in self._ready:
                if self._closed:
                    raise RuntimeError(f"data.ahead: batch {number} was asked for after close(); make another reader")
                if not self._thread.is_alive():
                    raise RuntimeError(
                        f"data.ahead: the thread that reads has ended before batch {number} was made; see its output, "
                        "and start the run again"
                    )
                self._changed.wait(_LOOK_S)
            batch, error, event = self._ready[number]
            self._want(range(number + 1, number + self._depth + 1))
        self.waited += time.perf_counter() - began
        if error is not None:
            raise error
        return batch if self._arrivals is None else self._arrivals.come(batch, event)

    def close(self) -> None:
        """Make no more batches. A batch in the making is finished by the thread, which ends then."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _want(self, numbers: range) -> None:
        self._wanted = numbers
        self._ready = {n: x for n, x in self._ready.items() if n in numbers}
        self._changed.notify_all()

    def _make(self) -> None:
        """What the thread does: the first batch that is wanted and not there, until it is closed."""
        if self._arrivals is not None:
            self._arrivals.enter_thread()
        while True:
            with self._changed:
                while not self._closed and all(n in self._ready for n in self._wanted):
                    self._changed.wait()
                if self._closed:
                    return
                number = next(n for n in self._wanted if n not in self._ready)
            try:
                result = self._moved(self._source.at(number))
            except Exception as error:  # it belongs to the step that needs the batch
                result = None, error, None
            with self._changed:
                if not self._closed and number in self._wanted:
                    self._ready[number] = result
                self._changed.notify_all()

    def _moved(self, batch: Any) -> tuple[Any, Exception | None, Any]:
        """The batch on its way to the device, without an error, and the event of its arrival."""
        there, event = (batch, None) if self._arrivals is None else self._arrivals.begin(batch)
        return there, None, event


@contextmanager
def ahead(source: Source, depth: int = 2) -> Iterator[Reader]:
    """The batches of a source, with n + 1 … n + depth made in a thread while n is used.

        with data.ahead(batches) as batch_at:
            for n in range(steps):
                state, metrics = step(state, batch_at(n))

    Batches and their order are those of `source.at`; what it raises is raised by the call that asks for that batch. To
    a CUDA device (`loop.own_rows`) the copy goes through pinned memory and does not wait. Seconds that the caller
    waited are in `.waited`. Raises ValueError for a depth below 1, and for what is no source.
    """
    require_source(source, "ahead")
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"ahead: depth: got {depth!r}, wanted a number of batches of 1 or more")
    to = None
    if isinstance(source, Placed):
        source, to = source.source, source.arrivals
    reader = Reader(source, depth, to)
    try:
        yield reader
    finally:
        reader.close()
