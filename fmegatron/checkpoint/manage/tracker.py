"""The file `latest` of a directory of steps, for people, scripts and other tools.

    {"format": "fmegatron.latest", "step": 1200, "path": "step_00001200", "saved_at": 1767225600.0}

It is written after the checkpoint is durable, in one step. It is a hint: what there is to restore is what is in the
directory, so a tracker that is missing, old or damaged loses nothing, and a Manager never reads it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.keyvalue import KeyNotes
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.stores import open_store

LATEST, FORMAT = "latest", "fmegatron.latest"


@dataclass(frozen=True)
class Latest:
    """Content of the tracker. path: relative to its directory; saved_at: seconds since 1970."""

    step: int
    path: str
    saved_at: float


def write_latest(notes: Notes | KeyNotes, latest: Latest) -> None:
    """Write the tracker, durably and in one step. Raises OSError."""
    notes.write(LATEST, json.dumps({"format": FORMAT, **asdict(latest)}).encode() + b"\n", durable=True)


def read_latest(directory: str | os.PathLike | Store | Notes | KeyNotes) -> Latest | None:
    """The content of a directory's tracker; None if there is none, or none that makes sense. Raises OSError."""
    notes = directory if isinstance(directory, Notes | KeyNotes) else open_store(directory).notes()
    try:
        value = json.loads(notes.read(LATEST, most=4096) or b"null")
        latest = Latest(**{name: value[name] for name in ("step", "path", "saved_at")})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    kinds = (int, str, (int, float))
    fields = (latest.step, latest.path, latest.saved_at)
    good = value.get("format") == FORMAT and all(isinstance(x, k) for x, k in zip(fields, kinds, strict=True))
    return latest if good and not isinstance(latest.step, bool) and latest.step >= 0 else None
