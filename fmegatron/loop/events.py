"""Events of a run in `events.jsonl`: when it began, went on, saved, was stopped, ended or failed; never rewritten."""

import json
import os
import socket
import time
from pathlib import Path
from typing import TextIO

import torch


class Events:
    """A file that each process of a run appends to, where `metrics.jsonl` forgets what a resume repeats.

    Each line is `{"time": seconds since 1970, "event": name, "step": updates, ...}`. A context manager: its end writes
    "ended", or "failed" with the error. After a "started" without an end the process was killed, or it still runs.
    active: where false nothing is written.
    """

    def __init__(self, path: str | os.PathLike, active: bool = True):
        self.path, self.active, self.step = Path(path), active, 0
        self._file: TextIO | None = None

    def __call__(self, event: str, step: int, **values: object) -> None:
        """Append one event; values: JSON values."""
        self.step = step
        if not self.active:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a")
            if _torn(self.path):
                self._file.write("\n")
        line = {"time": round(time.time(), 3), "event": event, "step": step, **values}
        self._file.write(json.dumps(line, default=str) + "\n")
        self._file.flush()

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
        if self._file is not None:
            self._file.close()
            self._file = None


def _torn(path: Path) -> bool:
    """Whether the last line of a file has no end, as a crash leaves it."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        return file.read(1) not in (b"", b"\n")


def read_events(path: str | os.PathLike) -> list[dict]:
    """The events of a file in order, without lines that a crash has torn; [] where there is none."""
    try:
        text = Path(path).read_text(errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.split("\n"):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            found.append(event)
    return found
