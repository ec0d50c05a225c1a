"""A progress bar for long saves and restores, independent of the code that it observes.

The bar looks from outside: the size of the files of a save that is under way, and what this process has read, as the
system counts it. So it costs the save nothing, and shows the work of all ranks and of writer processes, too.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

AFTER_S = 2.0  # what takes less shows no bar
_EVERY_S = 0.25


@contextlib.contextmanager
def progress(
    what: str,
    total_bytes: int,
    so_far: Callable[[], int | None],
    active: bool | None = None,
    after_s: float = AFTER_S,
    console: Console | None = None,
) -> Iterator[None]:
    """Show a bar on stderr while the block runs, if it runs longer than `after_s` seconds.

    so_far: bytes done, asked for a few times a second on a thread; None: unknown, the bar only pulses.
    active: whether to show it; None: if stderr is a terminal.  console: instead of stderr.
    """
    if not (_on_terminal() if active is None else active):
        yield
        return
    done = threading.Event()
    args = (what, total_bytes, so_far, after_s, console or Console(file=sys.stderr), done)
    thread = threading.Thread(target=_show, args=args, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _on_terminal() -> bool:
    """Whether stderr is one; a process may have none, or have closed it."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def _show(
    what: str, total: int, so_far: Callable[[], int | None], after_s: float, console: Console, done: threading.Event
) -> None:
    if done.wait(after_s):
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        while not done.wait(_EVERY_S):
            if (count := so_far()) is not None:
                bar.update(task, total=total, completed=min(count, total))


def read_from_now() -> Callable[[], int | None]:
    """Bytes that this process reads from now on, by read calls of any kind; None where the system does not count."""
    before = _bytes_read()

    def so_far() -> int | None:
        now = _bytes_read()
        return None if now is None or before is None else now - before

    return so_far


def _bytes_read() -> int | None:
    try:
        with open("/proc/self/io") as f:
            return int(next(line for line in f if line.startswith("rchar:")).split()[1])
    except (OSError, StopIteration, ValueError):
        return None
