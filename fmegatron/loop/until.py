"""Until: why a run may end before its last update: so many hours, a metric that is good enough, a file that appears."""

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fmegatron.files import disk
from fmegatron.loop.config import check
from fmegatron.tree import structure


@dataclass(frozen=True)
class Until:
    """The first of these that is true ends the run after a step, on all ranks, with a checkpoint and status 0.

    hours: since the run began in this process. file: a path; rank 0 looks for it at log points, and so it is not a
    wait of each step. metric: name of a metric of the log or of an evaluation, and `at_most` or `at_least`.
    signals: what signals beside SIGTERM and SIGINT ask for (`catch`): to stop, or to save and go on.

    >>> Until(metric="heldout_loss", at_most=1.5).reached({"heldout_loss": 1.47}, seconds=0.0)
    'heldout_loss is 1.47, at most 1.5 was wanted'
    """

    hours: float = math.inf  # since the run began in this process
    file: str | None = None  # a path: the run ends when it is there
    metric: str | None = None  # of the log or an evaluation, with at_most or at_least
    at_most: float | None = None  # of the metric: the run ends when it is no more
    at_least: float | None = None  # of the metric: the run ends when it is no less
    signals: tuple[str, ...] = ("SIGUSR1=save", "SIGHUP=stop")  # save: and go on

    def __post_init__(self):
        check(self)
        if not self.hours > 0:
            raise ValueError(f"Until: hours: got {self.hours!r}, wanted a number above 0")
        if (self.metric is None) != (self.at_most is None and self.at_least is None):
            given = {name: getattr(self, name) for name in ("metric", "at_most", "at_least")}
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
            raise ValueError(f"Until: got {shown}, wanted metric with at_most or at_least, or none of the three")
        for text in self.signals:
            name, _, what = text.partition("=")
            if what not in ("save", "stop") or name not in signal.Signals.__members__:
                near = structure.did_you_mean(name, list(signal.Signals.__members__))
                raise ValueError(
                    f"Until: signals: got {text!r:.60}, wanted NAME=save or NAME=stop, such as SIGUSR1=save{near}"
                )

    def asked(self) -> dict[str, str]:
        """What signals ask for, by their names, as `catch` takes it."""
        return dict(text.split("=", 1) for text in self.signals)

    def reached(self, metrics: Mapping[str, Any], seconds: float, look: bool = False) -> str | None:
        """Why the run ends now, None when it goes on. seconds: since it began. look: for the file."""
        if seconds > 3600 * self.hours:
            return f"{seconds / 3600:.4g} hours have passed, {self.hours:g} were given"
        if look and self.file is not None and disk.is_there(self.file):
            return f"{self.file} is there"
        value = metrics.get(self.metric) if self.metric is not None else None
        if value is not None and self.at_most is not None and value <= self.at_most:
            return f"{self.metric} is {value:g}, at most {self.at_most:g} was wanted"
        if value is not None and self.at_least is not None and value >= self.at_least:
            return f"{self.metric} is {value:g}, at least {self.at_least:g} was wanted"
        return None
