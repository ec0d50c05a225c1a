"""Where numbers go: a table for people, JSON lines for programs; what else there is stands in `services.py`.

A logger is anything with `write(step, values)` and `close()`. Files are opened at the first write, so that a logger may
be made on every rank and `Log` may write on one. One that has `resume(step)` is called with the step from which a run
goes on, before it writes.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fmegatron.files import whole
from fmegatron.loop.meter import QUIET
from fmegatron.loop.metrics import COUNT
from fmegatron.loop.training import StepInfo


class Loggers:
    """Several loggers as one; silent where `active` is false. A context manager that closes them.

    after: the step from which the run goes on; loggers that have `resume(step)` are called with it.

    >>> with Loggers(Table(), active=True) as log:
    ...     log(1, {"loss": 4.1743, "tokens_per_second": 12345.6})
      step      loss  tokens/s
         1    4.1743    12,346
    """

    def __init__(self, *loggers, active: bool = True, after: int = 0):
        self.loggers = loggers if active else ()
        for logger in self.loggers:
            if hasattr(logger, "resume"):
                logger.resume(after)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` (name -> number) as of `step` to every logger."""
        for logger in self.loggers:
            logger.write(step, values)

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *exception) -> None:
        for logger in self.loggers:
            logger.close()


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
        self._file: IO[str] | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record and hand it to the system, so that it survives the death of this process."""
        file = self._file = self._file or self._open()
        record = {"step": step, "run": self._run, "time": round(time.time(), 3), **self.labels, **values}
        file.write(_line(record) + "\n")
        file.flush()

    def _open(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            old = read_metrics(self.path)
        except FileNotFoundError:  # and no other error, or the record of a run would be lost to a disk that hiccups
            old = []
        kept = [record for record in old if record["step"] <= self.after]
        whole.write_whole(self.path, "".join(_line(record) + "\n" for record in kept).encode())
        self._run = 1 + max((record.get("run", 0) for record in kept), default=-1)
        return self.path.open("a")

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The records of a JSON lines file, in order; a torn last line is left out. Numbers that are not finite are floats.

    Raises ValueError naming file and line when a line before the last is no JSON object with a step.
    """
    records, lines = [], Path(path).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["step"]
            if "nonfinite" in record:
                record |= {name: float(text) for name, text in record.pop("nonfinite").items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # JSONDecodeError is a ValueError
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: got {line[:60]!r}, wanted a JSON object with a step") from error
        records.append(record)
    return records


def progress(infos: Iterable[StepInfo], steps: int, active: bool = True) -> Iterator[StepInfo]:
    """Hand on what `train` yields, moving a bar on the terminal; without a terminal, or inactive, only hand on.

    Lines that are printed meanwhile appear above the bar.
    """
    if not (active and sys.stdout.isatty()):
        yield from infos
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=RichConsole(file=sys.stdout), transient=True) as bar:
        task = bar.add_task("training", total=steps)
        for info in infos:
            bar.update(task, completed=info.step)
            yield info


def _line(record: Mapping[str, Any]) -> str:
    """One record as JSON, which has no numbers that are not finite."""
    values = {name: value if isinstance(value, str | int) else float(value) for name, value in record.items()}
    odd = {name: str(value) for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    if odd:
        values |= {**dict.fromkeys(odd), "nonfinite": odd}
    return json.dumps(values, allow_nan=False)


def _number(name: str, value: float) -> str:
    if value != value or name.endswith(("loss", "seconds")):
        return f"{value:.4f}"
    if name.endswith("tokens_per_second") or (value == int(value) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _width(name: str) -> int:
    return max(len(dict(Table.SHORT).get(name, name)), 8) + 2
