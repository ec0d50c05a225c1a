"""What `Run` is given, checked when it is made: a policy of another type would be noticed only when it is needed.

>>> from fmegatron.loop.options import Options
>>> check_policies(options=(3600, Options, "Options(steps=1000)"))
Traceback (most recent call last):
ValueError: Run: options: got 3600, wanted a loop.Options or None; write options=loop.Options(steps=1000)
"""

import warnings
from collections.abc import Sequence
from typing import Any

from fmegatron.layout import Layout


def check_policies(**given: tuple[Any, type, str]) -> None:
    """ValueError for a value that is neither None nor of its type. given: (value, type, an example of it), by name."""
    for name, (value, wanted, example) in given.items():
        if value is not None and not isinstance(value, wanted):
            package = wanted.__module__.split(".")[1]
            raise ValueError(
                f"Run: {name}: got {value!r:.60}, wanted a {package}.{wanted.__name__} or None; write "
                f"{name}={package}.{example}"
            )


def check_loggers(loggers: Any) -> tuple[Any, ...]:
    """The loggers; ValueError for what has no `write` and `close`, and for a class in the place of a logger."""
    if not isinstance(loggers, Sequence) or isinstance(loggers, str):
        raise ValueError(
            f"Run: loggers: got {loggers!r:.60}, wanted a list of them; write policies=loop.Policies(loggers=[logger])"
        )
    for logger in loggers:
        if isinstance(logger, type) or not all(callable(getattr(logger, name, None)) for name in ("write", "close")):
            raise ValueError(
                f"Run: loggers: got {logger!r:.60}, wanted objects with write(step, values) and close(); such as "
                "loop.TensorBoard('runs/a/tensorboard')"
            )
    return tuple(loggers)


def check_hashes(every: int | None, layouts: Sequence[Layout], ranks: int) -> int | None:
    """The steps between comparisons of replicas; a warning where no array of numbers has any (ZeRO-3)."""
    if every is not None and ranks > 1 and not any(x.replicas > 1 and x.dtype.is_floating_point for x in layouts):
        text = f"Run: hash_every: got {every}, and a state whose arrays have no replicas on other ranks, wanted some: "
        warnings.warn(
            f"{text}nothing is compared; leave it out, or replicate over an axis", RuntimeWarning, stacklevel=3
        )
    return every
