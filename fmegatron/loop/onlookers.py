"""What watches a run never ends it: its first failure is a warning, the others are counted, and the run goes on.

A logger whose server does not answer, a disk without room for a line, a terminal that is gone: none of them is a reason
to lose an update. What computes (a step, an evaluation, a source) is no onlooker, and its errors are raised.
"""

import warnings
from collections.abc import Callable
from typing import Any


class Onlooker:
    """One thing that watches. name: of it, in a warning. failed, of `calls`: how many of its calls have raised."""

    def __init__(self, name: str):
        self.name, self.calls, self.failed = name, 0, 0

    def __call__(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What function(*args, **named) returns; None where it raises an Exception: a RuntimeWarning the first time."""
        self.calls += 1
        try:
            return function(*args, **named)
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                text = (
                    f"{self.name}: {type(error).__name__}: {error}; training goes on without it, and it is tried again"
                )
                warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None

    def summary(self) -> None:
        """At its end: a RuntimeWarning that counts, where more than one call has raised."""
        if self.failed > 1:
            text = f"{self.name}: {self.failed} of {self.calls} calls failed; what they were given is not there"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
