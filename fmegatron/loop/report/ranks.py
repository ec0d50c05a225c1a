"""What a report shows of single ranks: how long each works and waits, and where each was when the run hung."""

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from fmegatron.loop.report.figures import number
from fmegatron.loop.report.read import Recorded
from fmegatron.loop.report.tables import table

MOST_RANKS = 64  # in a table; those that hold the others up most
_MOST_SHOWN = 32  # stacks of one run


class RankTimes(NamedTuple):
    """Mean seconds per step of a rank since the run has the ranks that it has."""

    rank: int
    host: str
    work: float
    wait: float
    data: float

    @property
    def own(self) -> float:
        """What the others wait for: work, and waiting for data."""
        return self.work + self.data


def rank_times(run: Recorded) -> list[RankTimes]:
    """Of the newest set of ranks, the slowest first; [] where nothing was recorded. Of many ranks those that some
    record has, each in the mean of the records that have it."""
    if not run.ranks:
        return []
    newest = run.ranks[-1]
    same = [x for x in run.ranks if (x["of"] == newest["of"] if "of" in newest else x["hosts"] == newest["hosts"])]
    hosts: dict[int, str] = {}
    found: dict[int, list[tuple[float, float, float]]] = {}
    for record in same:
        ranks = record.get("ranks", range(len(record["hosts"])))
        hosts.update(zip(ranks, record["hosts"], strict=True))
        for rank, *row in zip(ranks, record["work"], record["wait"], record["data"], strict=True):
            found.setdefault(rank, []).append((row[0], row[1], row[2]))
    means = {rank: [statistics.fmean(column) for column in zip(*of, strict=True)] for rank, of in found.items()}
    rows = [RankTimes(rank, hosts[rank], *means[rank]) for rank in sorted(found)]
    return sorted(rows, key=lambda row: -row.own)


def _usual(run: Recorded, rows: Sequence[RankTimes]) -> float:
    """The median of what ranks let others wait for: of all, where a record states it."""
    stated = run.ranks[-1].get("median")
    return stated["work"] + stated["data"] if stated else statistics.median_low(row.own for row in rows)


def stragglers(runs: Sequence[Recorded]) -> str:
    """A table by rank and host for each run that has more than one rank, and one by host where there are several."""
    out = []
    for run in runs:
        rows = rank_times(run)
        if not rows:
            continue
        usual = _usual(run, rows)
        head = ["rank", "host", "works, s per step", "waits for others", "waits for data", "of the median"]
        cells: list[list[Any]] = [[f"{row.rank}", *row[1:], row.own / usual if usual else None] for row in rows]
        out.append(f"<h3>{escape(run.name)}</h3>{table(head, cells[:MOST_RANKS])}")
        if len(rows) > MOST_RANKS:
            out.append(f"<p>{len(rows) - MOST_RANKS} faster ranks are in ranks.jsonl.</p>")
        hosts = dict.fromkeys(row.host for row in rows)
        if len(hosts) > 1:
            by = [(host, [row.own for row in rows if row.host == host]) for host in hosts]
            lines = [[host, len(own), statistics.fmean(own), max(own)] for host, own in by]
            out.append(table(["host", "ranks", "mean of its ranks, s per step", "slowest"], lines))
    return "\n".join(out) or "<p>Not recorded: one rank, or no two log points.</p>"


def stacks(runs: Sequence[Recorded]) -> str:
    """What each hang's message was, and the stacks of all ranks that could write them."""
    out = []
    for run in runs:
        hangs = [event for event in run.events if event["event"] == "hang"]
        if not hangs and not run.stacks:
            continue
        out.append(f"<h3>{escape(run.name)}</h3>")
        out += [f"<p>step {number(event['step'])}: {escape(str(event.get('text', '')))}</p>" for event in hangs]
        for name, text in list(run.stacks.items())[:_MOST_SHOWN]:
            out.append(f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>")
        if len(run.stacks) > _MOST_SHOWN:
            out.append(f"<p>{len(run.stacks) - _MOST_SHOWN} more are in {escape(run.path)}/stacks.</p>")
    return "\n".join(out) or "<p>None were seen.</p>"
