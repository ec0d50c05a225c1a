"""What a run has left in its folder, read as far as it goes: it may be new, torn, killed or still running."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fmegatron.files import disk
from fmegatron.loop.events import read_events
from fmegatron.loop.json_lines import is_number, metrics_record, read_lines

# Of a record: where it stands, not what was measured.
PLACE = ("step", "run", "time")
_END = ("ended", "left", "failed", "hang")
_MOST_STACKS = 1 << 16  # characters of a rank's, the newest


@dataclass(frozen=True)
class Recorded:
    """A run as read. name: its folder's; records, events: in the order of the files; config: of `config.json`, flat.

    ranks: the records of `ranks.jsonl`, whose lists have an entry for each rank, or for the slowest. stacks: by file,
    what ranks wrote when the run hung. notes: what could not be read, for people.
    """

    name: str
    path: str
    records: tuple[dict[str, Any], ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    ranks: tuple[dict[str, Any], ...] = ()
    stacks: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Of the metrics, in the order in which they first appear."""
        found = {key: None for record in self.records for key, value in record.items() if is_number(value)}
        return [name for name in found if name not in PLACE]

    def series(self, name: str) -> list[list[tuple[float, float]]]:
        """(step, value) of a metric, in pieces: a new one begins where steps go back, as after a resume.

        Values that are not finite are left out.
        """
        pieces: list[list[tuple[float, float]]] = []
        before = math.inf
        for record in self.records:
            if not is_number(record.get(name)):
                continue
            value = record[name]
            if record["step"] <= before:
                pieces.append([])
            before = record["step"]
            if math.isfinite(value):
                pieces[-1].append((record["step"], value))
        return [piece for piece in pieces if piece]

    def last(self, name: str) -> float | None:
        """The newest value of a metric, None without any."""
        return next((record[name] for record in reversed(self.records) if is_number(record.get(name))), None)

    def outcome(self) -> str:
        """How the newest process of the run ended, as far as its events state it."""
        if not self.events:
            return "no events were written"
        newest = self.events[-1]
        if newest["event"] in _END:
            stopped = len(self.events) > 1 and self.events[-2]["event"] == "stopped"
            return "stopped" if stopped and newest["event"] == "ended" else newest["event"]
        return "no end was written: killed, or still running"

    def starts(self) -> int:
        """How many processes have begun or gone on with the run; 0 where no events were written."""
        return sum(event["event"] in ("started", "resumed") for event in self.events)


def read_run(path: str | Path) -> Recorded:
    """A run's folder, or its metrics file. Raises ValueError for a path that is not there."""
    path = Path(path)
    if not disk.is_there(str(path)):
        raise ValueError(f"{path}: got nothing there, wanted the folder of a run (with metrics.jsonl in it)")
    whole = disk.is_directory(str(path))
    folder, file = (path, path / "metrics.jsonl") if whole else (path.parent, path)
    notes: list[str] = []
    records = tuple(_records(file, notes))
    events = tuple(_clean_events(folder / "events.jsonl", notes)) if whole else ()
    config = _config(folder / "config.json", notes) if whole else None
    name = path.resolve().name if whole else path.name
    ranks = tuple(_ranks(folder / "ranks.jsonl", notes)) if whole else ()
    stacks = _stacks(folder / "stacks", notes) if whole else {}
    return Recorded(name or str(path), str(path), records, events, config, tuple(notes), ranks, stacks)


def _records(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        found, bad = read_lines(file, metrics_record)
    except FileNotFoundError:
        notes.append(f"{file.name} is not there: no log point was reached")
        return []
    except OSError as error:
        notes.append(f"{file.name}: cannot be read: {error}"[:200])
        return []
    if bad:
        count = f"{len(bad)} line{'s' * (len(bad) > 1)}"
        notes.append(f"{file.name}: {count} that cannot be read, torn by a crash or of another kind")
    return [record for _, record in found]


def _ranks(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    """A run of one rank has no such file."""
    try:
        found, bad = read_lines(file, _times) if disk.is_there(str(file)) else ([], [])
    except OSError as error:
        notes.append(f"{file.name}: cannot be read: {error}"[:200])
        return []
    if bad:
        notes.append(f"{file.name}: {len(bad)} line{'s' * (len(bad) > 1)} that cannot be read")
    return [record for _, record in found]


def _times(value: Any) -> dict[str, Any]:
    """A record of `ranks.jsonl`."""
    hosts, times = list(map(str, value["hosts"])), [value[name] for name in ("work", "wait", "data")]
    numbers = [all(is_number(x) and math.isfinite(x) for x in row) for row in times]
    if not hosts or not all(numbers) or {len(row) for row in times} != {len(hosts)}:
        raise TypeError
    if "of" not in value:
        return {**value, "hosts": hosts}
    of, ranks, medians = value["of"], value["ranks"], [value["median"][name] for name in ("work", "wait", "data")]
    if not all(type(n) is int for n in (of, *ranks)) or len(ranks) != len(hosts) or not all(map(is_number, medians)):
        raise TypeError
    return {**value, "hosts": hosts}


def _stacks(folder: Path, notes: list[str]) -> dict[str, str]:
    """By file name, in the order of ranks."""
    found = {}
    try:
        names = (
            [name for name in disk.names_in(str(folder)) if name.startswith("rank-")]
            if disk.is_there(str(folder))
            else []
        )
        for name in sorted(names, key=lambda name: (len(name), name)):
            if text := disk.text_of(folder / name)[-_MOST_STACKS:]:
                found[name] = text
    except OSError as error:
        notes.append(f"{folder.name}: cannot be read: {error}"[:200])
    return found


def _clean_events(file: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    if not disk.is_there(str(file)):
        notes.append(f"{file.name} is not there")
        return
    try:
        found = read_events(file)
    except OSError as error:
        notes.append(f"{file.name}: cannot be read: {error}"[:200])
        return
    for event in found:
        if is_number(event.get("time")) and is_number(event.get("step")) and math.isfinite(event["time"]):
            yield event


def _config(file: Path, notes: list[str]) -> Mapping[str, Any] | None:
    try:
        found = json.loads(disk.text_of(file))
        parts = found["config"], found.get("facts", {})
        return {**flat(parts[0]), **flat(parts[1], "facts.")}
    except FileNotFoundError:
        notes.append(f"{file.name} is not there")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        notes.append(f"{file.name}: cannot be read: {error}"[:200])
    return None


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted names.

    >>> flat({"lr": 0.1, "optim": {"beta": 0.9, "names": []}})
    {'lr': 0.1, 'optim.beta': 0.9, 'optim.names': []}
    """
    found = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def differences(runs: list[Recorded]) -> list[tuple[str, list[Any]]]:
    """(name, its value in each run; None where it has none) of what differs between configurations."""
    names = {name: None for run in runs for name in run.config or {}}
    rows = [(name, [(run.config or {}).get(name) for run in runs]) for name in names]
    return [(name, values) for name, values in rows if len({json.dumps(v, sort_keys=True) for v in values}) > 1]
