"""What a thread is at, for errors and for the report of a hang."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["at_work", "doing_of"]


def at_work(doing: object, call: Callable, *args: Any) -> Any:
    """call(*args), which sends, receives or waits; a RuntimeError of it says what this rank was doing, and how long."""
    began = time.monotonic()
    try:
        return call(*args)
    except RuntimeError as error:
        raise RuntimeError(f"{doing}: failed after {time.monotonic() - began:.1f} s: {error}") from error


def doing_of(thread: int) -> str:
    """What a thread, by its number, is doing in `at_work`; empty: it is in none. From any thread."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is at_work.__code__:
            return str(frame.f_locals["doing"])
        frame = frame.f_back
    return ""
