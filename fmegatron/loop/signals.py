"""SIGTERM and Ctrl-C become a flag that the loop looks at between steps, where stopping is safe."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# torchrun hands a Ctrl-C on to ranks that the terminal has signalled already; only a later one is a second Ctrl-C.
SECOND_CTRL_C_SECONDS = 1.0


@dataclass
class Stop:
    """Whether the run was asked to stop. Made by `catch`; `train` asks all ranks after every step.

    signal: name of the signal that this rank received, None so far.
    interrupted: after an answer that is yes, whether any rank's request was a Ctrl-C.
    """

    signal: str | None = None
    interrupted: bool = False

    def ask(self, world=None, *flags: bool) -> Callable[[], tuple[bool, ...]]:
        """Ask all ranks whether any was asked to stop; the answer comes by calling what is returned, now or later.

        The answer is (stop, *flags), each true on all ranks when it is on any. A loop by hand asks at the same step on
        all ranks: `if stop.ask(world)()[0]: break`. It waits for the others only when the answer is read.
        world: a `collectives.World`, or None for one process. flags: other questions that travel with this one.
        """
        asked = (self.signal is not None, self.signal == "SIGINT", *flags)
        answer = world.ask(*asked) if world is not None else lambda: asked

        def read() -> tuple[bool, ...]:
            stop, interrupted, *others = answer()
            self.interrupted = self.interrupted or interrupted
            return stop, *others

        return read


@contextlib.contextmanager
def catch() -> Iterator[Stop]:
    """Within this block, the first SIGTERM or SIGINT only marks the `Stop`; the loop saves and leaves.

    At the end of the block an agreed Ctrl-C is raised as KeyboardInterrupt (exit status 130), after the loop has saved;
    in IPython and notebooks it is not, so that the rest of the cell runs: `StepInfo.stopping` states what happened.
    After SIGTERM the program just goes on behind the block, and ends with status 0. A second Ctrl-C, at least a second
    after the first, is raised at once: nothing more is saved, and complete checkpoints stay as they are.
    Outside the main thread, where Python allows no handlers, the `Stop` is never set.
    """
    stop, first = Stop(), [float("inf")]
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number, frame):
        del frame
        if stop.signal is None:
            stop.signal, first[0] = signal.Signals(number).name, time.monotonic()
            if os.environ.get("RANK", "0") == "0":  # not print(): the handler may have interrupted one
                os.write(
                    2,
                    f"\n{stop.signal}: stops after this step or the next, and saves (Ctrl-C again: at once)\n".encode(),
                )
        elif number == signal.SIGINT and time.monotonic() - first[0] >= SECOND_CTRL_C_SECONDS:
            raise KeyboardInterrupt("a second Ctrl-C: stopped at once, nothing saved since the last checkpoint")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if (stop.interrupted or stop.signal == "SIGINT") and not _is_interactive():
        raise KeyboardInterrupt("stopped by Ctrl-C: the step under way was finished")


def _is_interactive() -> bool:
    """Whether this process runs cells of IPython or a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None
