"""Signals become flags that the loop looks at between steps, where stopping and saving are safe."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

# torchrun hands a Ctrl-C on to ranks that the terminal has signalled already; only a later one is a second Ctrl-C.
SECOND_CTRL_C_SECONDS = 1.0
ALWAYS = ("SIGTERM", "SIGINT")  # save and stop
TOLD_TO_END = "Meanwhile this process was sent SIGTERM."
OTHERS = (("SIGUSR1", "save"), ("SIGHUP", "stop"))  # batch systems announce the end of a job so (Slurm's --signal)


@dataclass
class Stop:
    """Whether the run was asked to stop, or to save. Made by `catch`; `train` asks all ranks after every step.

    signal: name of the signal that this rank received, None so far; or why it asks, in words (`Until`).
    interrupted: after an answer that is yes, whether any rank's request was a Ctrl-C.
    save: whether this rank was asked to save and go on. saving: after an answer, whether any rank was.
    """

    signal: str | None = None
    interrupted: bool = False
    save: bool = False
    saving: bool = False

    def ask(self, world=None, *flags: bool) -> Callable[[], tuple[bool, ...]]:
        """Ask all ranks whether any was asked to stop; the answer comes by calling what is returned, now or later.

        The answer is (stop, *flags), each true on all ranks when it is on any. A loop by hand asks at the same step on
        all ranks: `if stop.ask(world)()[0]: break`. It waits for the others only when the answer is read.
        world: a `collectives.World`, or None for one process. flags: other questions that travel with this one.
        """
        save, self.save = self.save, False
        asked = (self.signal is not None, self.signal == "SIGINT", *flags, save)
        answer = world.ask(*asked) if world is not None else lambda: asked

        def read() -> tuple[bool, ...]:
            stop, interrupted, *others, self.saving = answer()
            self.interrupted = self.interrupted or interrupted
            return stop, *others

        return read


@contextlib.contextmanager
def catch(others: Mapping[str, str] | None = None) -> Iterator[Stop]:
    """Within this block, the first SIGTERM or SIGINT only marks the `Stop`; the loop saves and leaves.

    others: what further signals ask for, "stop" or "save" (and go on); default: SIGUSR1 to save, SIGHUP to stop. One
    that the process ignores (nohup) stays ignored, but for SIGUSR1: under `trap '' USR1` torchrun survives a signal
    that the batch system sends to all processes of a job, and its ranks save.

    At the end of the block an agreed Ctrl-C is raised as KeyboardInterrupt (exit status 130), after the loop has saved;
    in IPython and notebooks it is not, so that the rest of the cell runs: `StepInfo.stopping` states what happened.
    After SIGTERM the program just goes on behind the block, and ends with status 0; an error that leaves the block gets
    a note of it (`told_to_end`). A second Ctrl-C, at least a second after the first, is raised at once: nothing more is
    saved, and complete checkpoints stay as they are.
    Outside the main thread, where Python allows no handlers, the `Stop` is never set.
    """
    stop, first = Stop(), [float("inf")]
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    asked = {**dict.fromkeys(ALWAYS, "stop"), **(dict(OTHERS) if others is None else others)}
    for name, what in asked.items():
        if not hasattr(signal, name) or what not in ("stop", "save"):
            raise ValueError(f"catch: got {name!r}: {what!r:.40}, wanted the name of a signal: 'stop' or 'save'")

    def again(number) -> bool:
        """Whether it is a second Ctrl-C, of which torchrun makes a SIGTERM."""
        return number == signal.SIGINT or (number == signal.SIGTERM and stop.signal == "SIGINT")

    def on_signal(number, frame):
        del frame
        name = signal.Signals(number).name
        if asked[name] == "save":
            stop.save = True
            _write(f"{name}: saves after this step or the next, and goes on")
        elif stop.signal is None:
            stop.signal, first[0] = name, time.monotonic()
            _write(f"{name}: stops after this step or the next, and saves (Ctrl-C again: at once)")
        elif again(number) and time.monotonic() - first[0] >= SECOND_CTRL_C_SECONDS:
            raise KeyboardInterrupt("a second Ctrl-C: stopped at once, nothing saved since the last checkpoint")

    before = {}
    for name in asked:
        number = getattr(signal, name)
        if name in (*ALWAYS, "SIGUSR1") or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, on_signal)
    try:
        yield stop
    except Exception as error:
        if stop.signal == "SIGTERM":
            error.add_note(TOLD_TO_END)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if (stop.interrupted or stop.signal == "SIGINT") and not is_interactive():
        raise KeyboardInterrupt("stopped by Ctrl-C: the step under way was finished")


def told_to_end(error: BaseException) -> bool:
    """Whether SIGTERM came before this error left `catch`: whoever started this process need not wait for it."""
    return TOLD_TO_END in getattr(error, "__notes__", ())


def _write(text: str) -> None:
    """On rank 0; not print(), as the handler may have interrupted one."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"\n{text}\n".encode())


def is_interactive() -> bool:
    """Whether this process runs cells of IPython or a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None
