"""What watches a run never ends it: its first failure is a warning, the others are counted, and the run goes on.

A logger whose server does not answer, a disk without room for a line, a terminal that is gone: none of them is a reason
to lose an update, nor is one that would end the process (`sys.exit` of a service). What computes (a step, an
evaluation, a source) is no onlooker, and its errors are raised; so is KeyboardInterrupt, which people press.
"""

import warnings
from collections.abc import Callable
from typing import Any


class Onlooker:
    """One thing that watches. name: of it, in a warning. failed, of `calls`: how many of its calls have raised."""

    def __init__(self, name: str):
        self.name, self.calls, self.failed = name, 0, 0

    def __call__(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What function(*args, **named) returns; None where it raises: a RuntimeWarning the first time."""
        self.calls += 1
        try:
            return function(*args, **named)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.failed += 1
            if self.failed == 1:
                why = f"{type(error).__name__}: {_text(error)}"
                _warn(f"{self.name}: {why}; training goes on without it, and it is tried again")
        return None

    def summary(self) -> None:
        """At its end: a RuntimeWarning that counts, where more than one call has raised."""
        if self.failed > 1:
            _warn(f"{self.name}: {self.failed} of {self.calls} calls failed; what they were given is not there")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # an error of others, whose text cannot be made
        return f"(no text: {type(other).__name__})"


def _warn(text: str) -> None:
    """A RuntimeWarning, which is raised where warnings are errors; none where stderr is closed."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    except Warning:
        raise
    except Exception:  # of a showwarning
        return
