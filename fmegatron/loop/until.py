"""Until: why a run may end before its last update: so many hours, a metric that is good enough, a file that appears."""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fmegatron import tree
from fmegatron.files.look import is_there


@dataclass(frozen=True)
class Until:
    """The first of these that is true ends the run after a step, on all ranks, with a checkpoint and status 0.

    hours: since the run began in this process. file: a path; rank 0 looks for it at log points, and so it is not a
    wait of each step. metric: name of a metric of the log or of an evaluation, and `at_most` or `at_least`.

    >>> Until(metric="heldout_loss", at_most=1.5).reached({"heldout_loss": 1.47}, seconds=0.0)
    'heldout_loss is 1.47, at most 1.5 was wanted'
    """

    hours: float = math.inf
    file: str | os.PathLike | None = None
    metric: str | None = None
    at_most: float | None = None
    at_least: float | None = None
    began: float = field(default_factory=time.monotonic, repr=False, compare=False)

    def __post_init__(self):
        if not self.hours > 0:
            raise ValueError(f"Until: hours: got {self.hours!r}, wanted a number above 0")
        if (self.metric is None) != (self.at_most is None and self.at_least is None):
            raise ValueError(f"Until: got {self}, wanted metric with at_most or at_least, or none of the three")

    def reached(self, metrics: Mapping[str, Any], seconds: float | None = None, look: bool = False) -> str | None:
        """Why the run ends now, None when it goes on. seconds: since it began. look: for the file."""
        seconds = time.monotonic() - self.began if seconds is None else seconds
        if seconds > 3600 * self.hours:
            return f"{seconds / 3600:.4g} hours have passed, {self.hours:g} were given"
        if look and self.file is not None and is_there(os.fspath(self.file)):
            return f"{os.fspath(self.file)} is there"
        value = metrics.get(self.metric) if self.metric is not None else None
        if value is not None and self.at_most is not None and value <= self.at_most:
            return f"{self.metric} is {value:g}, at most {self.at_most:g} was wanted"
        if value is not None and self.at_least is not None and value >= self.at_least:
            return f"{self.metric} is {value:g}, at least {self.at_least:g} was wanted"
        return None

    def unknown(self, metrics: Mapping[str, Any]) -> str | None:
        """In words, that the metric is none of these; None when it is one, or none is asked for."""
        if self.metric is None or self.metric in metrics:
            return None
        near = tree.did_you_mean(self.metric, list(metrics))
        return f"Until: metric: got {self.metric!r}, wanted one of {', '.join(metrics)}{near}; it will not end the run"
