"""Events of a run in `events.jsonl`: when it began, went on, saved, was stopped, ended or failed; never rewritten."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

from fmegatron.loop.json_lines import Lines, read_lines
from fmegatron.loop.onlookers import Onlooker


class Events:
    """A file that each process of a run appends to, where `metrics.jsonl` forgets what a resume repeats.

    Each line is `{"time": seconds since 1970, "event": name, "step": updates, ...}`. A context manager: its end writes
    "ended", or "failed" with the error. After a "started" without an end the process was killed, or it still runs.
    active: where false nothing is written.
    """

    def __init__(self, path: str | os.PathLike, active: bool = True):
        self.path, self.active, self.step = Path(path), active, 0
        self._lines, self._onlooker = Lines(path), Onlooker(f"events in {path}")

    def __call__(self, event: str, step: int, **values: object) -> None:
        """Append one event; values: JSON values."""
        self.step = step
        if not self.active:
            return
        line = {"time": round(time.time(), 3), "event": event, "step": step, **values}
        self._onlooker(lambda: self._lines.append(json.dumps(line, default=str)))

    def started(self, step: int, **values: object) -> None:
        """The process is about to make its first update, or the first after a resume."""
        place = {"host": socket.gethostname(), "pid": os.getpid(), "torch": torch.__version__}
        self("resumed" if step else "started", step, **place, **values)

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None or issubclass(kind, GeneratorExit):
            self("ended" if kind is None else "left", self.step)
        else:
            self("failed", self.step, error=f"{kind.__name__}: {error}"[:2000])
        self._onlooker(self._lines.close)
        self._onlooker.summary()


def read_events(path: str | os.PathLike) -> list[dict]:
    """The events of a file in order, without lines that a crash has torn; [] where there is none."""
    try:
        return [event for _, event in read_lines(path, _event)[0]]
    except FileNotFoundError:
        return []


def _event(value: Any) -> dict[str, Any]:
    if not isinstance(value["event"], str):
        raise TypeError
    return value
