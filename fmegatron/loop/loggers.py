"""Where numbers go: a table for people, JSON lines for programs; what else there is stands in `services.py`.

A logger is anything with `write(step, values)` and `close()`. Files are opened at the first write, so that a logger may
be made on every rank and `Log` may write on one. One that has `resume(step)` is called with the step from which a run
goes on, before it writes. What a logger raises is a warning, the first time, and never ends a run.
"""

import math
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fmegatron.files import whole
from fmegatron.loop.json_lines import Lines, metrics_line, metrics_record, read_lines
from fmegatron.loop.meter import QUIET
from fmegatron.loop.metrics import COUNT
from fmegatron.loop.onlookers import Onlooker
from fmegatron.loop.training import StepInfo


class Loggers:
    """Several loggers as one; silent where `active` is false. A context manager that closes them.

    after: the step from which the run goes on; loggers that have `resume(step)` are called with it. What a logger
    raises in `resume`, `write` or `close` is a RuntimeWarning, the first time; its end counts them.

    >>> with Loggers(Table(), active=True) as log:
    ...     log(1, {"loss": 4.1743, "tokens_per_second": 12345.6})
      step      loss  tokens/s
         1    4.1743    12,346
    """

    def __init__(self, *loggers, active: bool = True, after: int = 0):
        self.loggers = loggers if active else ()
        self._onlookers = [Onlooker(f"the logger {_name(logger)}") for logger in self.loggers]
        for logger, onlooker in zip(self.loggers, self._onlookers, strict=True):
            if hasattr(logger, "resume"):
                onlooker(logger.resume, after)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` (name -> number) as of `step` to every logger."""
        for logger, onlooker in zip(self.loggers, self._onlookers, strict=True):
            onlooker(logger.write, step, dict(values))  # of its own: it may change it

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *exception) -> None:
        for logger, onlooker in zip(self.loggers, self._onlookers, strict=True):
            onlooker(logger.close)
            onlooker.summary()


class Table:
    """A line of numbers on stdout for each record, with a header now and then; odd records get a line in words.

    The first record of several numbers gives the columns. hide: names that are not shown, as those of counts are not
    ("lm/count").
    """

    HEADER_EVERY = 20
    SHORT = (("tokens_per_second", "tokens/s"), ("learning_rate", "lr"), ("seconds", "s/step"))

    def __init__(self, hide: tuple[str, ...] = ("tokens", *QUIET)):
        self.hide, self._columns, self._rows = hide, None, 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Print one row, or `100  heldout_loss 1.7321` for a record that has not the columns of the table."""
        values = {name: value for name, value in values.items() if name not in self.hide and not name.endswith(COUNT)}
        if self._columns is None and len(values) > 1:
            self._columns = tuple(values)
        if tuple(values) != self._columns:
            words = ", ".join(f"{name} {_number(name, value)}" for name, value in values.items())
            print(f"{step:>6}  {words}", flush=True)
            return
        if self._rows % self.HEADER_EVERY == 0:
            print(f"{'step':>6}" + "".join(f"{dict(self.SHORT).get(name, name):>{_width(name)}}" for name in values))
        self._rows += 1
        print(f"{step:>6}" + "".join(f"{_number(name, v):>{_width(name)}}" for name, v in values.items()), flush=True)

    def close(self) -> None:
        """Nothing to close."""


class JsonLines:
    """A JSON object per line and record, `{"step": .., "run": .., "time": .., name: number, ...}`, appended to a file.

    after: the step that the run starts from. Records of later steps, which a run that was resumed writes again, and a
    last line that was torn by a crash, are dropped at the first write; so no step stands in the file twice.
    `run` counts the starts: 0 for the first, 1 after the first resume. `time` is seconds since 1970. labels (such as
    mesh="fsdp2·tp2") stand in every record. JSON has no NaN and no infinity: such a number is written as null, and its
    text under "nonfinite": `{"step": 7, "loss": null, "nonfinite": {"loss": "nan"}}`; `read_metrics` gives it back.
    """

    def __init__(self, path: str | os.PathLike, after: int = 0, **labels: str):
        self.path, self.after, self.labels, self._run = Path(path), after, labels, 0
        self._lines: Lines | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record and hand it to the system, so that it survives the death of this process."""
        self._lines = self._lines or self._open()
        record = {"step": step, "run": self._run, "time": round(time.time(), 3), **self.labels, **values}
        self._lines.append(metrics_line(record))

    def _open(self) -> Lines:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            old = _read(self.path)
        except FileNotFoundError:  # and no other error, or the record of a run would be lost to a disk that hiccups
            old = []
        kept = [(line, record) for line, record in old if record["step"] <= self.after]
        whole.write_whole(self.path, "".join(f"{line}\n" for line, _ in kept).encode())
        runs = [record["run"] for _, record in kept if isinstance(record.get("run"), int)]
        self._run = 1 + max(runs, default=-1)
        return Lines(self.path)

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The records of a JSON lines file, in order; a torn last line is left out. Numbers that are not finite are floats.

    A line before the last that is no JSON object with a step is left out with a RuntimeWarning, which names file and
    line. ValueError for a file of several lines none of which is a record.
    """
    return [record for _, record in _read(path)]


def _read(path: str | os.PathLike) -> list[tuple[str, dict]]:
    """(line, record) of each, with the words of `read_metrics`."""
    found, bad = read_lines(path, metrics_record)
    last = len(found) + len(bad)
    if not found and last > 1:
        raise ValueError(f"{path}:1: got no line that is a record, wanted JSON objects with a step; give metrics.jsonl")
    torn = [number for number in bad if number < last]
    if torn:
        lines = ", ".join(map(str, torn[:8])) + f" and {len(torn) - 8} more" * (len(torn) > 8)
        text = f"{path}:{lines}: got no record, torn by a crash or of another kind, wanted JSON objects with a step"
        warnings.warn(f"{text}; left out", RuntimeWarning, stacklevel=3)
    return found


def progress(infos: Iterable[StepInfo], steps: int, active: bool = True) -> Iterator[StepInfo]:
    """Hand on what `train` yields, moving a bar on the terminal; without a terminal, or inactive, only hand on.

    Lines that are printed meanwhile appear above the bar.
    """
    terminal = Onlooker("the progress bar")
    if not (active and sys.stdout is not None and terminal(sys.stdout.isatty)):  # without a console there is none
        yield from infos
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=RichConsole(file=sys.stdout), transient=True)
    terminal(bar.start)
    try:
        task = bar.add_task("training", total=steps)
        for info in infos:
            terminal(bar.update, task, completed=info.step)
            yield info
    finally:
        terminal(bar.stop)


def _number(name: str, value: float) -> str:
    if value != value or name.endswith(("loss", "seconds")):
        return f"{value:.4f}"
    whole_number = abs(value) >= 1000 and math.isfinite(value) and value == int(value)
    if name.endswith("tokens_per_second") or whole_number:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _width(name: str) -> int:
    return max(len(dict(Table.SHORT).get(name, name)), 8) + 2


def _name(logger: Any) -> str:
    """Of a logger in a warning: its class, and the file that it writes."""
    return f"{type(logger).__name__} of {logger.path}" if isinstance(logger, JsonLines) else type(logger).__name__
