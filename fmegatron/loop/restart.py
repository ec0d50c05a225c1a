"""Restart in the process: after an exception on a rank all ranks meet again, and go on from the newest good state.

Interpreter, imports and the compiled step survive, so this takes a fraction of a new start. The communicators are
aborted and made again under the same names (`World.renew`). The state is read again: a step that donates has destroyed
its own when it fails, and ranks fail at different places. A rank whose process is gone (SIGKILL) cannot come; then the
others end, and torchrun starts all again. So it is where only a new process helps: after an error of CUDA, which every
later call repeats, and where memory was short, as one that goes on does not get all of it back.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fmegatron.collectives import World
from fmegatron.files import disk
from fmegatron.loop.config import UsageError
from fmegatron.loop.faults.notice import lost_peer, say
from fmegatron.loop.faults.pulse import Pulse
from fmegatron.loop.losses import BadLossError
from fmegatron.loop.nonfinite import NonFiniteError
from fmegatron.loop.onlookers import Onlooker

FINAL = (UsageError, BadLossError, NonFiniteError)  # these would come again, or are meant to end the run
_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
WORD_SECONDS = 3.0  # how long a rank that lost a connection waits for the word of the rank at the other end


@dataclass(frozen=True)
class Restart:
    """After which failures a run goes on. most: restarts in a row that do not get beyond the update that failed; 0:
    none, an exception ends the run.

    meet_s: seconds that the ranks have to meet again. Kept for restarts by torchrun, too (`started`).
    """

    most: int = 3  # restarts in the process, in a row, that get no further; 0: none
    meet_s: float = 60.0  # seconds that the ranks have to meet again

    def __post_init__(self):
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 0 or not self.meet_s > 0:
            got = f"most={self.most!r}, meet_s={self.meet_s!r}"
            raise ValueError(f"Restart: got {got}, wanted most of at least 0 and meet_s above 0")


class Restarts:
    """The restarts of one process. furthest: updates that any rank had finished when one of them failed."""

    def __init__(self, rules: Restart | None, world: World, pulse: Pulse):
        self.rules, self.world, self.pulse = rules, world, pulse
        self.furthest, self.idle, self.count = -1, 0, 0
        self._lock = threading.Lock()

    def listen(self) -> None:
        """From now on the report of another rank's failure ends what this rank waits for."""
        if self.rules is not None and self.world.size > 1:
            self.pulse.on_fault = self._wake

    def _wake(self, attempt: int) -> None:
        with self._lock:  # of a fault of before the ranks have met again nothing is to end any more
            if self.pulse.on_fault is not None and attempt == self.pulse.attempt:
                self.world.abort()

    def again(self, error: Exception, step: int, given_up: Callable[[], bool], began: bool = True) -> bool:
        """Whether the run goes on after this error, on all ranks; then the world is new. step: updates finished here.

        False: the error is to be raised, with a note where a new process would go on. given_up: whether the run is to
        end (a signal). began: whether the first update is finished here; before it a rank goes on only after the fault
        of another, which has finished it.
        """
        if fresh := needs_new_process(error):
            error.add_note(fresh)
            return False
        if self.rules is None or isinstance(error, FINAL) or not self._all_know(error, given_up, began):
            return False
        self.pulse.enter("restart", step)
        with self._lock:
            self.pulse.on_fault = None
        since = time.monotonic()
        word = self.pulse.fault() if self.world.size > 1 else f"{type(error).__name__}: {error}"
        try:
            self.world.renew(self.rules.meet_s, given_up)
        except (TimeoutError, RuntimeError) as late:
            error.add_note(f"No restart in the process: {late}")
            return False
        self.pulse.attempt += 1
        reached = -int(self.world.minimum(torch.tensor([-step])))
        self.idle = 1 if reached > self.furthest else self.idle + 1
        self.furthest = max(self.furthest, reached)
        if self.idle > self.rules.most:
            error.add_note(f"No restart in the process: {self.rules.most} did not get beyond update {self.furthest}.")
            return False
        self.count += 1
        if self.world.rank == 0:
            seconds = time.monotonic() - since
            say(f"restart {self.count} in the process, after {step} updates ({seconds:.2f} s to meet): {word}")
        return True

    def _all_know(self, error: Exception, given_up: Callable[[], bool], began: bool) -> bool:
        """Whether the failure is, or becomes, known to all ranks; an echo of another's is not reported as an own.

        A launcher that ends this process (`given_up`) has seen another end: no word comes any more.
        """
        if self.world.size == 1:
            return began
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone
            until = time.monotonic() + (WORD_SECONDS if lost_peer(error) else 0.0)
            while self.pulse.fault() is None and time.monotonic() < until and not given_up():
                time.sleep(0.05)
            if self.pulse.fault() is not None:
                return True
            if began and not lost_peer(error):  # one that was killed leaves no word
                return self.pulse.report(f"{type(error).__name__}: {error}")
        return False


def needs_new_process(error: BaseException | None) -> str:
    """Why only a new process goes on after an error, or after one that it came from, and what to do; "": this may."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, torch.AcceleratorError):
            return (
                "The device is lost to this process: only a new one goes on (torchrun --max-restarts). With "
                "CUDA_LAUNCH_BLOCKING=1 it names the line; an assert is mostly an id that a table does not have."
            )
        if isinstance(error, torch.OutOfMemoryError):
            return (
                "A new process begins with all of the memory (torchrun --max-restarts). For a step that needs less: "
                "more microbatches, save='inputs', more ranks; python -m fmegatron.plan says what it takes."
            )
        error = error.__cause__ or error.__context__
    return ""


def started(path: Path, step: int, rules: Restart | None, world: World) -> None:
    """Count starts of a job that is started again and again (by torchrun, or Slurm), and end it when none gets further.

    path: of the count, in the run's folder. step: where this start goes on. Raises RuntimeError on all ranks for more
    than `rules.most` restarts in a row that go on from the same step.
    """
    text = ""
    if world.rank == 0 and rules is not None:
        again = any(os.environ.get(name, "0") not in ("", "0") for name in _COUNTS)
        job = next((os.environ[name] for name in _JOBS if os.environ.get(name, "none") not in ("", "none")), None)
        before = {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            before = json.loads(disk.text_of(path))
        if not isinstance(before, dict) or type(before.get("restarts", 0)) is not int:
            before = {}  # a note of anybody's: the others wait for the word of this rank
        again = again or (job is not None and before.get("job") == job)  # a node counts only the restarts it caused
        count = before.get("restarts", 0) + 1 if again and before.get("step") == step else 0
        if count > rules.most:
            text = f"{count - 1} restarts went on from step {step}, and none got to a checkpoint behind it"
        start = json.dumps({"step": step, "restarts": count, "job": job})
        Onlooker(f"the count of starts in {path}")(path.write_text, f"{start}\n")
    if text := world.broadcast_text(text):
        raise RuntimeError(f"{path.parent}: {text}; look at what ended them, then start it by hand")
