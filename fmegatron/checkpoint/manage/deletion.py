"""Deletion in the background: a thread removes what was withdrawn, and reports failures later."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_MOST = 64  # directories that wait to be removed


class Deleter:
    """Removes what is condemned already, one after another, on a thread that lives while there is something to remove.

    What it does not get to (the program ends, the disk refuses) stays condemned and is removed by a later run.
    """

    def __init__(self, most: int = _MOST):
        self._waiting: queue.Queue[tuple[str, Callable[[threading.Event], None]]] = queue.Queue(most)
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stop, self._lock = threading.Event(), threading.Condition()
        self._texts: list[str] = []  # of what waits or is being removed
        self._thread: threading.Thread | None = None

    @property
    def full(self) -> bool:
        """Whether so much waits already that nothing should be added now."""
        return self._waiting.full()

    def add(self, text: str, remove: Callable[[threading.Event], None]) -> None:
        """Call `remove(stop)` soon; it returns early when `stop` is set. text: its name, for messages."""
        with self._lock:
            self._texts.append(text)
        self._waiting.put((text, remove))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="checkpoint deletion")
                self._thread.start()

    def waiting(self) -> list[str]:
        """Names of what waits to be removed, or is being removed."""
        with self._lock:
            return list(self._texts)

    def failures(self) -> list[str]:
        """Failures since the last call; they are reported here only."""
        found = []
        while not self._failures.empty():
            found.append(self._failures.get())
        return found

    def close(self, wait_s: float = 60.0) -> None:
        """Finish, or after `wait_s` seconds leave the rest to a later run; returns soon after that."""
        thread = self._thread
        if thread is not None:
            thread.join(wait_s)
            self._stop.set()
            thread.join(1.0)
        self._stop.set()

    def _work(self) -> None:
        while True:
            with self._lock:
                try:
                    text, remove = self._waiting.get_nowait()
                except queue.Empty:
                    self._thread = None
                    return
            try:
                if not self._stop.is_set():
                    remove(self._stop)
            except Exception as error:  # of any kind: the deletions that follow must still run
                self._failures.put(f"{text}: could not be deleted ({error}); a later run will try again")
            with self._lock:
                self._texts.remove(text)
                self._lock.notify_all()
