"""Progress of a first call: a line on stderr with what of a step is being traced or compiled, if that takes long."""

from __future__ import annotations

import builtins
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

__all__ = ["AFTER_S", "progress"]

AFTER_S = 2.0  # what takes less shows no line
_EVERY_S = 0.5


@contextlib.contextmanager
def progress(
    name: str, hint: str = "", active: bool | None = None, after_s: float = AFTER_S, out: TextIO | None = None
) -> Iterator[Callable[[str], None]]:
    """Within the block, `tell(text)` sets what is shown, once the block has run for `after_s` seconds.

    Args:
        name: of the function that is compiled.
        hint: shown behind the seconds.
        active: whether to show anything; None: if stderr is a terminal, or in a notebook.
        after_s: seconds.
        out: instead of stderr.
    """
    into = out or sys.stderr
    if not (into.isatty() or hasattr(builtins, "__IPYTHON__") if active is None else active):
        yield lambda text: None
        return
    done, said, start = threading.Event(), [""], time.perf_counter()

    def show() -> None:
        if done.wait(after_s):
            return
        width = 0
        while True:
            line = f"{name}: {said[0]}, {time.perf_counter() - start:.0f} s{hint}"
            into.write(f"\r{line:<{width}}")  # spaces over what a longer line has left
            into.flush()
            width = max(width, len(line))
            if done.wait(_EVERY_S):
                break
        into.write(f"\r{'':{width}}\r")
        into.flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield lambda text: said.__setitem__(0, text)
    finally:
        done.set()
        thread.join()
