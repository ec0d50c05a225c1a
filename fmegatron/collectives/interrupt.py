"""Deferred Ctrl-C: SIGINT is held during a critical section and raised at its end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

try:  # without the enums that the public functions make of what they are given and return: 5 us a block, not 20
    import _signal as handlers
except ImportError:
    import signal as handlers

__all__ = ["held_interrupt"]

_SIGINT = int(signal.SIGINT)


@contextlib.contextmanager
def held_interrupt() -> Iterator[list[BaseException]]:
    """Inside, the first Ctrl-C is put into the list, so that a rank can report it to the others, and raised at the end.

    A second one is raised at once. A handler of the user's own that does not raise is called, and nothing is held. A
    block within a block has the same list. Only the main thread is ever interrupted; others hold nothing.
    """
    pressed: list[BaseException] = []
    before = handlers.getsignal(_SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(before) or hasattr(before, "held"):
        yield getattr(before, "held", pressed)
        return

    def handler(number, frame):
        if pressed:
            before(number, frame)
        else:
            try:
                before(number, frame)
            except BaseException as error:
                pressed.append(error)

    handler.held = pressed
    handlers.signal(_SIGINT, handler)
    try:
        yield pressed
    except Exception as error:
        if pressed:
            raise pressed[0] from error
        raise
    finally:
        handlers.signal(_SIGINT, before)
    if pressed:
        raise pressed[0]
