"""What counts as a bad loss, as values: a spike above the running median, a loss that does not move; and what follows.

    Faults(nonfinite="roll back", spike=LossSpike(4.0, then="roll back"), stuck=LossStuck(500, then="raise"))

The losses of all updates are looked at, in one transfer per log point. What follows is one of `ACTIONS`:

"warn"       go on
"skip"       take the update back. It needs a step that does not donate its state, and waits for the device and for all
             ranks after every update; `optim.skip_nonfinite` skips within the step, and costs nothing
"roll back"  go on from the newest checkpoint of before (`Run` only), and skip the data of the updates that were bad
"rerun"      run the updates since the newest checkpoint again, and end with what that shows (`Run` only; `rerun.py`)
"raise"      end on all ranks
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass

ACTIONS = ("warn", "skip", "roll back", "rerun", "raise")


class BadLossError(RuntimeError):
    """Training stopped, or is to be rolled back, because of its losses. first, last: the updates that were bad."""

    def __init__(self, message: str, first: int, last: int):
        super().__init__(message)
        self.first, self.last = first, last


class RollBack(BadLossError):
    """The state of before update `first` is wanted back, and other data than that of updates first .. last."""


class RunAgain(BadLossError):
    """The updates since the newest checkpoint are to be run again, up to this one, whose state is `state`."""

    state = None


@dataclass(frozen=True)
class LossSpike:
    """A loss above `factor` times the median of the `window` losses before it that were none.

    The first `warmup` losses of a process are never spikes. For losses above 0. then: one of `ACTIONS`. factor 0: no
    loss is one.
    """

    factor: float = 3.0  # times the median of the losses before; 0: nothing is a spike
    window: int = 64  # losses
    warmup: int = 16  # losses that are never spikes
    then: str = "roll back"  # warn, skip, roll back, rerun, raise

    def __post_init__(self):
        check_action("LossSpike: then", self.then)
        if not ((self.factor > 1 or self.factor == 0) and self.window >= 1 and 1 <= self.warmup <= self.window):
            got = f"factor={self.factor!r}, window={self.window!r}, warmup={self.warmup!r}"
            raise ValueError(f"LossSpike: got {got}, wanted factor > 1 (or 0: none) and 1 <= warmup <= window")


@dataclass(frozen=True)
class LossStuck:
    """The losses of `updates` updates whose medians of the first and of the second half differ by less than `least`.

    least: relative. A loss that does not move is mostly a rate of 0, gradients that do not arrive, or data that is the
    same. then: one of `ACTIONS`, but "skip". updates 0: nothing is looked at.
    """

    updates: int = 1000  # whose halves are compared; 0: none
    least: float = 1e-4  # relative difference of their medians
    then: str = "raise"  # warn, roll back, rerun, raise

    def __post_init__(self):
        check_action("LossStuck: then", self.then)
        if self.then == "skip" or self.updates == 1 or self.updates < 0 or not self.least > 0:
            got = f"updates={self.updates!r}, least={self.least!r}, then={self.then!r}"
            raise ValueError(
                f"LossStuck: got {got}, wanted updates >= 2 (or 0: none), least > 0, and another action than 'skip'"
            )


def check_action(name: str, value: str) -> None:
    """ValueError for what is none of `ACTIONS`."""
    if value not in ACTIONS:
        raise ValueError(f"{name}: got {value!r:.60}, wanted one of {', '.join(ACTIONS)}")


@dataclass(frozen=True)
class BadLoss:
    """What follows on which losses of `train`.

    nonfinite: when loss or grad_norm of a log point is not finite, and numbers of the state neither, one of `ACTIONS`:
    "raise" NonFiniteError on all ranks, which names step and leaves (on several ranks one step later), or "warn", or
    another. Where the state is finite (an optimizer skipped the update), rank 0 warns and training goes on.
    spike: what a loss that is too high is, and what follows; None: nothing. stuck: the same for one that does not move.
    """

    nonfinite: str = "raise"
    spike: LossSpike | None = None
    stuck: LossStuck | None = None

    def __post_init__(self):
        check_action("BadLoss: nonfinite", self.nonfinite)


@dataclass(frozen=True)
class Finding:
    """A bad loss: the update, what is wrong in words, and the action."""

    step: int
    text: str
    then: str


class LossWatch:
    """The losses so far, of which each new one is judged. `see` in the order of the updates."""

    def __init__(self, spike: LossSpike | None = None, stuck: LossStuck | None = None):
        self.spike, self.stuck = spike, stuck
        self._usual: deque[float] = deque(maxlen=spike.window if spike else 1)
        self._all: deque[float] = deque(maxlen=stuck.updates if stuck else 1)

    def __bool__(self) -> bool:
        return self.spike is not None or self.stuck is not None

    def see(self, step: int, loss: float) -> Finding | None:
        """What is wrong with the loss of this update. One that is not finite is no matter of this class."""
        if not math.isfinite(loss):
            return None
        if self.spike is not None and len(self._usual) >= self.spike.warmup:
            median = statistics.median(self._usual)
            if loss > self.spike.factor * median:
                text = (
                    f"loss is {loss:.6g}, {loss / median:.3g} times the median {median:.6g} of the {len(self._usual)}"
                )
                return Finding(step, f"{text} before it (a spike from {self.spike.factor:g} on)", self.spike.then)
        self._usual.append(loss)
        self._all.append(loss)
        if self.stuck is not None and len(self._all) == self.stuck.updates:
            losses = list(self._all)
            half = len(losses) // 2
            before, after = statistics.median(losses[:half]), statistics.median(losses[half:])
            if abs(after - before) < self.stuck.least * max(abs(before), 1e-300):
                self._all.clear()
                text = f"loss does not move: {before:.6g} and {after:.6g} are the medians of the halves of the last"
                return Finding(step, f"{text} {len(losses)} updates", self.stuck.then)
        return None
