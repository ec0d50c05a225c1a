"""Where numbers go: a table for people, JSON lines for programs, TensorBoard, Weights & Biases.

A logger is anything with `write(step, values)` and `close()`. Files are opened at the first write, so that a logger may
be made on every rank and `Log` may write on one.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fmegatron.loop.train import StepInfo


class Log:
    """Several loggers as one; silent where `active` is false. A context manager that closes them.

    >>> with Log(Table(), active=True) as log:
    ...     log(1, {"loss": 4.1743, "tokens_per_second": 12345.6})
      step      loss  tokens/s
         1    4.1743    12,346
    """

    def __init__(self, *loggers, active: bool = True):
        self.loggers = loggers if active else ()

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` (name -> number) as of `step` to every logger."""
        for logger in self.loggers:
            logger.write(step, values)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *exception) -> None:
        for logger in self.loggers:
            logger.close()


class Table:
    """A line of numbers on stdout for each record, with a header now and then; odd records get a line in words.

    The first record of several numbers gives the columns. hide: names that are not shown.
    """

    HEADER_EVERY = 20
    SHORT = (("tokens_per_second", "tokens/s"), ("learning_rate", "lr"), ("seconds", "s/step"))

    def __init__(self, hide: tuple[str, ...] = ("tokens",)):
        self.hide, self._columns, self._rows = hide, None, 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Print one row, or `100  heldout_loss 1.7321` for a record that has not the columns of the table."""
        values = {name: value for name, value in values.items() if name not in self.hide}
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
    mesh="fsdp2·tp2") stand in every record.
    """

    def __init__(self, path: str | os.PathLike, after: int = 0, **labels: str):
        self.path, self.after, self.labels, self._run = Path(path), after, labels, 0
        self._file: IO[str] | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record and hand it to the system, so that it survives the death of this process."""
        file = self._file = self._file or self._open()
        record = {"step": step, "run": self._run, "time": round(time.time(), 3), **self.labels, **values}
        file.write(json.dumps(record) + "\n")
        file.flush()

    def _open(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            old = read_metrics(self.path)
        except FileNotFoundError:  # and no other error, or the record of a run would be lost to a disk that hiccups
            old = []
        kept = [record for record in old if record["step"] <= self.after]
        # Written beside and renamed: a crash here leaves the old file or the new one.
        beside = self.path.with_name(f".{self.path.name}.new")
        beside.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(beside, self.path)
        self._run = 1 + max((record.get("run", 0) for record in kept), default=-1)
        return self.path.open("a")

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The records of a JSON lines file, in order; a torn last line is left out.

    Raises ValueError naming file and line when a line before the last is no JSON object with a step.
    """
    records, lines = [], Path(path).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["step"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: got {line[:60]!r}, wanted a JSON object with a step") from error
        records.append(record)
    return records


class TensorBoard:
    """Scalars for TensorBoard in `directory`; events after step `after` are purged. Needs the extra `logs`."""

    def __init__(self, directory: str | os.PathLike, after: int = 0):
        self.directory, self.after, self._writer = str(directory), after, None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add each value as a scalar of its name."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError(
                    "TensorBoard: got no package tensorboard, wanted it installed; pip install 'fmegatron[logs]'"
                ) from error
            self._writer = SummaryWriter(self.directory, purge_step=self.after + 1 if self.after else None)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """A run of Weights & Biases; keywords go to `wandb.init` (project, id, resume, ...). Needs the extra `logs`."""

    def __init__(self, **settings):
        self.settings, self._run = settings, None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at `step`."""
        if self._run is None:
            try:
                import wandb
            except ImportError as error:
                raise ValueError(
                    "WeightsAndBiases: got no package wandb, wanted it installed; pip install 'fmegatron[logs]'"
                ) from error
            self._run = wandb.init(**self.settings)
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


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


def _number(name: str, value: float) -> str:
    if value != value or name.endswith(("loss", "seconds")):
        return f"{value:.4f}"
    if name.endswith("tokens_per_second") or (value == int(value) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _width(name: str) -> int:
    return max(len(dict(Table.SHORT).get(name, name)), 8) + 2
