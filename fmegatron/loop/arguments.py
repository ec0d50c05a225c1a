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
from fmegatron.loop.faults import Injection
from fmegatron.loop.windows import Window


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


def check_injections(faults: str, ranks: int, evaluates: bool) -> tuple[Injection, ...]:
    """The faults of a text; ValueError for one that cannot happen, a warning for one of a rank that is not.

    That is no error: a run that goes on with fewer ranks keeps its command line.
    """
    found = Injection.parse(faults)
    for fault in found:
        if fault.at == "evaluation" and not evaluates:
            raise ValueError(
                f"Run: inject: got {fault}, wanted a fault of another place in a run without evaluations; give "
                "evaluate=, or another at="
            )
        _warn_of_rank("inject", f"{fault}", fault.rank, ranks)
    return found


def check_windows(wanted: tuple[Window, ...], ranks: int) -> tuple[Window, ...]:
    """The windows; a warning for one of a rank that is not."""
    for window in wanted:
        _warn_of_rank("profile", window.name(), window.rank, ranks)
    return wanted


def check_hashes(every: int | None, layouts: Sequence[Layout], ranks: int) -> int | None:
    """The steps between comparisons of replicas; a warning where no array of numbers has any (ZeRO-3)."""
    if every is not None and ranks > 1 and not any(x.replicas > 1 and x.dtype.is_floating_point for x in layouts):
        text = f"Run: hash_every: got {every}, and a state whose arrays have no replicas on other ranks, wanted some: "
        warnings.warn(
            f"{text}nothing is compared; leave it out, or replicate over an axis", RuntimeWarning, stacklevel=3
        )
    return every


def _warn_of_rank(name: str, text: str, rank: int | None, ranks: int) -> None:
    if rank is not None and rank >= ranks:
        fix = f"give rank=0 to {ranks - 1}" if ranks > 1 else "give rank=0"
        text = f"Run: {name}: got {text}, wanted a rank below {ranks}: it will not happen; {fix}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
