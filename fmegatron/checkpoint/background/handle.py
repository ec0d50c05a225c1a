"""Handle: one save in flight, as the trainer sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from fmegatron.checkpoint.calls.ranks import Ranks
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.storage import Storage

_TIDY_S = 30.0


class Saver(Protocol):
    """What a Handle asks of the saves of this rank (flights.py)."""

    def bytes_written(self, number: int) -> int:
        """Of this save."""
        ...

    def poll(self) -> None:
        """Look how all pending saves stand."""

    def wait(self, ended: Callable[[], bool], what: str, so: str, timeout_s: float | None = None) -> None:
        """Poll until `ended()` on all ranks."""

    def abandon(self, handle: Handle) -> None:
        """Give a save up."""

    def reported(self, handle: Handle) -> None:
        """The failure of this save was raised."""


class Handle:
    """A save in flight: `poll()` once a step, `result()` to wait, `abandon()` to give it up: all ranks.

    text: the checkpoint's path or URL.  step: as given.  state: "pending", "durable", "failed" or "abandoned".
    bytes: what this rank staged.  staged_s: how long the call blocked.  durable_s: from the call until this rank knew
    the checkpoint to be durable; None before.
    """

    def __init__(self, flights: Saver, number: int, store: Store, world: Ranks, step: int | None):
        self.text, self.step, self.state = store.text, step, "pending"
        self.bytes, self.staged_s = 0, 0.0
        self.durable_s: float | None = None
        self.number, self.flights, self.store, self.world = number, flights, store, world
        self.what = f"saving the checkpoint {store.text}"
        self.began = time.perf_counter()
        self.root = ""  # of the hidden place
        self.draft: Storage | None = None  # the same on rank 0, with the lease of the save
        self.regions: set[int] = set()  # in the arena
        self.sent = self.written = self.told_to_commit = self.committed = self.stopped = False
        self.error: str | None = None  # of this rank, before all ranks know of it
        self.failure: str | None = None  # the same message on all ranks
        self.owns_saver = False
        self.tidy_s = _TIDY_S  # most seconds that the removal of its files is waited for, on rank 0

    def __repr__(self) -> str:
        return f"Handle({self.text}, {self.state})"

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; as far as this rank knows, nothing is communicated."""
        return self.state != "pending"

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes that this rank's writer has written, bytes in all); nothing is communicated."""
        written = self.bytes if self.written or self.state == "durable" else self.flights.bytes_written(self.number)
        return min(written, self.bytes), self.bytes

    def poll(self) -> bool:
        """Whether the checkpoint is durable. Never waits for the disk (but for the removal of what a save that failed
        has left: 30 s at most, 2 where its writer was held); one small all-reduce while saves are pending.

        All ranks call it at the same place, once a step. Raises RuntimeError on all of them, with the first failing
        rank's message, when this save or an earlier one of the same saver has failed. Training can go on, and save.
        """
        if not self.done:
            self.flights.poll()
        self._raise_failure()
        return self.state == "durable"

    def result(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is durable; all ranks call it.

        Raises RuntimeError on all ranks when the save failed or was abandoned, and TimeoutError on all ranks when
        `timeout_s` is over on one: then it is still pending. After Ctrl-C on one rank, KeyboardInterrupt there and
        RuntimeError on the others: it is still pending. A second Ctrl-C does not wait for the others.
        """
        self.flights.wait(lambda: self.done, self.what, "it is pending", timeout_s)
        self._raise_failure()

    def abandon(self) -> None:
        """Give the save up and leave nothing of it; all ranks call it. A save that has ended stays as it is.

        Waits until the ranks' writers have stopped (seconds). A commit that has already begun may still succeed.
        """
        self.flights.abandon(self)

    def _raise_failure(self) -> None:
        if self.state == "abandoned":
            raise RuntimeError(f"{self.what}: it was abandoned")
        if self.failure is not None:
            self.flights.reported(self)
            raise RuntimeError(self.failure)
