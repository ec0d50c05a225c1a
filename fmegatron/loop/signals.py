"""SIGTERM and Ctrl-C become a flag that the loop looks at between steps, where stopping is safe."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

# torchrun hands a Ctrl-C on to ranks that the terminal has signalled already; only a later one is a second Ctrl-C.
SECOND_CTRL_C_SECONDS = 1.0


@dataclass
class Stop:
    """Whether the run was asked to stop. Made by `catch`; `train` asks `agreed` after every step.

    signal: name of the signal that this rank received, None so far.
    interrupted: after agreement, whether any rank's request was a Ctrl-C.
    """

    signal: str | None = None
    interrupted: bool = False

    def agreed(self, world=None) -> bool:
        """True on all ranks when any rank was asked to stop. All ranks call it at the same step.

        world: a `collectives.World`, or None for one process. One small CPU all-reduce; no device synchronisation.
        """
        if world is None or world.size == 1:
            self.interrupted = self.signal == "SIGINT"
            return self.signal is not None
        if not world.any(self.signal is not None):
            return False
        # A second question, so that all ranks end in the same way whichever of them got the signal.
        self.interrupted = world.any(self.signal == "SIGINT")
        return True


@contextlib.contextmanager
def catch() -> Iterator[Stop]:
    """Within this block, the first SIGTERM or SIGINT only marks the `Stop`; the loop saves and leaves.

    At the end of the block an agreed Ctrl-C is raised as KeyboardInterrupt (exit status 130), after the loop has saved;
    after SIGTERM the program just goes on behind the block, and ends with status 0. A second Ctrl-C, at least a second
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
                os.write(2, f"\n{stop.signal}: stops after this step and saves (Ctrl-C again: at once)\n".encode())
        elif number == signal.SIGINT and time.monotonic() - first[0] >= SECOND_CTRL_C_SECONDS:
            raise KeyboardInterrupt("a second Ctrl-C: stopped at once, nothing saved since the last checkpoint")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop.interrupted or stop.signal == "SIGINT":
        raise KeyboardInterrupt("stopped by Ctrl-C")
