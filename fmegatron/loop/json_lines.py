"""Files of JSON lines that a run appends to, and one reading of them: a line that a crash has torn costs that line."""

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fmegatron.files import disk

_LONGEST = 1 << 24  # characters of a line


class Lines:
    """Lines behind those of a file. One of which only a part was written (a full disk) is ended before the next, and
    costs no other."""

    def __init__(self, path: str | os.PathLike):
        self.path, self._file, self._torn = Path(path), -1, False

    def append(self, line: str) -> None:
        """Append a line and hand it to the system, so that it survives the death of this process. Raises OSError."""
        if self._file < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
            self._torn = _is_torn(self.path)
        data = memoryview(f"{line}\n".encode(errors="replace"))
        if self._torn:
            os.write(self._file, b"\n")
            self._torn = False
        while data:
            written = os.write(self._file, data)
            data = data[written:]
            self._torn = bool(data)

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_lines(
    path: str | os.PathLike, read: Callable[[Any], dict[str, Any]]
) -> tuple[list[tuple[str, dict[str, Any]]], list[int]]:
    """((line, its record) of those that can be read, in order; numbers from 1 of the lines that cannot).

    read: makes a record of a JSON value; what it raises (ValueError, KeyError, TypeError, AttributeError,
    OverflowError) means that the line is none; so is one of more than 16 MiB, of which no more is held. Empty lines are
    left out. Raises OSError; for what is no regular file, too (a device may have no end).
    """
    found, bad = [], []
    with os.fdopen(disk.look(lambda: disk.open_regular(path)), "r", encoding="utf-8", errors="replace") as file:
        for number in itertools.count(1):
            line = file.readline(_LONGEST)
            if len(line) == _LONGEST:
                bad.append(number)
                while len(line) == _LONGEST:
                    line = file.readline(_LONGEST)
                continue
            if not line:
                return found, bad
            if not (line := line.removesuffix("\n")).strip():
                continue
            try:
                found.append((line, read(json.loads(line))))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                bad.append(number)
    raise AssertionError("read_lines: a file ends")


def metrics_record(value: Any) -> dict[str, Any]:
    """A record of `metrics.jsonl`: numbers by name, with a step; those that JSON has not come from their texts."""
    if not is_number(value["step"]) or not math.isfinite(value["step"]):
        raise TypeError
    return value | {name: float(text) for name, text in value.pop("nonfinite", {}).items()}


def metrics_line(record: Mapping[str, Any]) -> str:
    """One record as JSON, which has no numbers that are not finite."""
    values = {name: value if isinstance(value, str | int) else float(value) for name, value in record.items()}
    odd = {name: str(value) for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    if odd:
        values |= {**dict.fromkeys(odd), "nonfinite": odd}
    return json.dumps(values, allow_nan=False)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_torn(path: Path) -> bool:
    """Whether the last line of a file has no end, as a crash leaves it."""
    if not disk.is_file(str(path)):  # a device or pipe has no lines to be torn
        return False
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        return file.read(1) not in (b"", b"\n")
