"""Schedules of pipelines: functions of ranks and microbatches that give a table.

Written p for ranks, m for microbatches, v for stages of a rank; F, B, W for the times of a stage's forward, gradient of
its input, and gradients of its weights.
"""

from __future__ import annotations

from fmegatron.step.pipeline.table import Action, Table

__all__ = ["gpipe", "loop", "one_f_one_b", "vee"]


def loop(p: int, v: int = 1) -> tuple[int, ...]:
    """The rank of each of p * v stages that go around: stage s is on rank s % p."""
    return tuple(s % p for s in range(p * v))


def vee(p: int) -> tuple[int, ...]:
    """The rank of each of 2 * p stages in a V: forth and back, so that rank 0 holds the first and the last."""
    return (*range(p), *reversed(range(p)))


def gpipe(p: int, m: int) -> Table:
    """All forwards, then all backwards: idle (p-1)(F+B+W), m microbatches live. Huang et al., arXiv 1811.06965."""
    _count(p, m)
    rows = tuple(
        (*(Action("F", rank, i) for i in range(m)), *(Action("BW", rank, i) for i in range(m))) for rank in range(p)
    )
    return Table(rows, loop(p), m, f"GPipe p={p} m={m}")


def one_f_one_b(p: int, m: int) -> Table:
    """A backward as soon as there is one: idle (p-1)(F+B+W) as GPipe, but min(p - rank, m) microbatches live.

    Narayanan et al., arXiv 2006.09503.
    """
    _count(p, m)
    rows = []
    for rank in range(p):
        warm = min(m, p - rank)
        row = [Action("F", rank, i) for i in range(warm)]
        for i in range(m):
            row.append(Action("BW", rank, i))
            row += [Action("F", rank, warm + i)] if warm + i < m else []
        rows.append(tuple(row))
    return Table(tuple(rows), loop(p), m, f"1F1B p={p} m={m}")


def _count(p: int, m: int) -> None:
    if p < 1 or m < 1:
        raise ValueError(f"schedule: got {p} ranks and {m} microbatches, wanted one or more of each")
