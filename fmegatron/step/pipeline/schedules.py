"""Schedules of pipelines: functions of ranks and microbatches that give a table.

Written p for ranks, m for microbatches, v for stages of a rank; F, B, W for the times of a stage's forward, gradient of
its input, and gradients of its weights. What is idle and live holds for equal costs of all stages.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from fmegatron.step.pipeline.clock import Costs, clock
from fmegatron.step.pipeline.greedy import greedy, shortest
from fmegatron.step.pipeline.table import Action, Table

__all__ = ["best", "dualpipe_v", "gpipe", "interleaved", "loop", "one_f_one_b", "vee", "zb_h1", "zb_v"]


def loop(p: int, v: int = 1) -> tuple[int, ...]:
    """The rank of each of p * v stages that go around: stage s is on rank s % p."""
    return tuple(s % p for s in range(p * v))


def vee(p: int) -> tuple[int, ...]:
    """The rank of each of 2 * p stages in a V: forth and back, so that rank 0 holds the first and the last."""
    return (*range(p), *reversed(range(p)))


def gpipe(p: int, m: int) -> Table:
    """All forwards, then all backwards: idle (p-1)(F+B+W), m microbatches live. Huang et al., arXiv 1811.06965.

    Raises ValueError for p or m below 1.
    """
    _least("gpipe", p, m)
    rows = (
        (*(Action("F", rank, i) for i in range(m)), *(Action("BW", rank, i) for i in range(m))) for rank in range(p)
    )
    return _table("GPipe", rows, loop(p), p, m)


def one_f_one_b(p: int, m: int, pairs: bool = False) -> Table:
    """A backward as soon as there is one: idle (p-1)(F+B+W) as GPipe, but min(p - rank, m) microbatches live.

    pairs: in the steady state each forward runs with a backward as one, so that what one communicates is hidden behind
        the other. A rank is twice as far ahead then, as a pair waits for what both need: idle as before where a pair
        takes as long as its two, and min(2(p - rank), m) live.

    Narayanan et al., arXiv 2006.09503. Raises ValueError for p or m below 1.
    """
    _least("one_f_one_b", p, m)
    if not pairs:
        rows = _in_turn(p, m, lambda rank, i: [Action("BW", rank, i)])
        return _table("1F1B", rows, loop(p), p, m)
    rows, together = [], []
    for rank in range(p):
        ahead = min(m, 2 * (p - rank) - 1)
        row, at = [Action("F", rank, i) for i in range(ahead)], []
        for i in range(m):
            if ahead + i < m:
                at.append(len(row))
                row.append(Action("F", rank, ahead + i))
            row.append(Action("BW", rank, i))
        rows.append(tuple(row))
        together.append(tuple(at))
    return Table(tuple(rows), loop(p), m, f"1F1B of pairs p={p} m={m}", tuple(together))


def _in_turn(p: int, m: int, backward: Callable[[int, int], list[Action]]) -> list[list[Action]]:
    """Rows of p - rank forwards ahead, then the backward of a microbatch and the next forward, in turn."""
    rows = []
    for rank in range(p):
        ahead = min(m, p - rank)
        row = [Action("F", rank, i) for i in range(ahead)]
        for i in range(m):
            row += backward(rank, i)
            row += [Action("F", rank, ahead + i)] if ahead + i < m else []
        rows.append(row)
    return rows


def interleaved(p: int, m: int, v: int) -> Table:
    """1F1B with v stages a rank, which go around in groups of p microbatches: idle (p-1)(F+B+W)/v, F+B+W of a rank.

    Narayanan et al., arXiv 2104.04473, section 2.2. Raises ValueError unless p divides m.
    """
    _least("interleaved", p, m)
    if v < 1 or m % p:
        raise ValueError(
            f"interleaved: got p={p}, m={m}, v={v}, wanted m that p divides (such as {-(-m // p) * p}) and v of 1 "
            "or more"
        )

    def order(rank: int, back: bool) -> list[Action]:
        """The forwards or backwards of a rank: p microbatches by the first of its stages, by the next, and so on."""
        stages = range(rank, p * v, p)
        return [
            Action("BW" if back else "F", stage, group + i)
            for group in range(0, m, p)
            for stage in (reversed(stages) if back else stages)
            for i in range(p)
        ]

    rows = []
    for rank in range(p):
        forwards, backwards = order(rank, False), order(rank, True)
        ahead = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
        steady = [action for both in zip(forwards[ahead:], backwards, strict=False) for action in both]
        rows.append(forwards[:ahead] + steady + backwards[m * v - ahead :])
    return _table(f"interleaved v={v}", rows, loop(p, v), p, m)


def zb_h1(p: int, m: int) -> Table:
    """Weight gradients fill idle time, at the memory of 1F1B: idle (p-1)(F+B-W) for m >= p, min(p, m) live.

    Each rank runs its W as many microbatches behind their B as its number. For m < p there are fewer W to fill with:
    idle (p-1)(F+B) - (m-1)W. Qi et al., arXiv 2401.10241, section 3. Raises ValueError for p or m below 1.
    """
    _least("zb_h1", p, m)

    def backward(rank: int, i: int) -> list[Action]:
        return [Action("B", rank, i), *([Action("W", rank, i - rank)] if i >= rank else [])]

    rows = _in_turn(p, m, backward)
    for rank, row in enumerate(rows):
        row += [Action("W", rank, i) for i in range(max(0, m - rank), m)]
    return _table("ZB-H1", rows, loop(p), p, m)


def zb_v(p: int, m: int) -> Table:
    """Two stages a rank in a V, at the memory of 1F1B (2p stages live): idle at most p-1 times a stage's F, for m >= p.

    At F = B = W nothing is idle but the start and the end. Qi et al., arXiv 2401.10241, section 6; for m < 2p-1, where
    the order of the paper may leave more idle, the shorter of it and one by `greedy`.

    Raises ValueError for p or m below 1.
    """
    _least("zb_v", p, m)
    table = _table("ZB-V", (_only(m, _zb_v_row(p, max(m, 2 * p - 1), rank)) for rank in range(p)), vee(p), p, m)
    if m >= 2 * p - 1:
        return table
    return shortest([table, greedy(vee(p), m, memory=2 * p, name=table.name)], Costs()).table


def _zb_v_row(p: int, m: int, rank: int) -> Iterator[Action]:
    """Of a rank, for m of 2p-1 or more. f, b, w: of the first of its stages, F, B, W: of the second."""
    counts = Counter()
    ahead = 2 * p - rank - 1  # forwards of the first stage before its first backward
    both = m - ahead
    yield from _written(
        f"{'f' * (2 * (p - rank) - 1)} {'Ff' * rank} {'FBW' * (p - rank)} {'fbwFBW' * both} "
        f"{'bwFBW' * (m - p - both)} {'bB' * rank} {'bw' * (p - rank)} {'W' * rank}{'w' * rank}",
        rank,
        2 * p - 1 - rank,
        counts,
    )


def _written(text: str, first: int, second: int, counts: Counter[str]) -> Iterator[Action]:
    """Actions by letters, small of one stage and capital of another; each counts its microbatches."""
    for letter in text.replace(" ", ""):
        yield Action(letter.upper(), second if letter.isupper() else first, counts[letter])
        counts[letter] += 1


def _only(m: int, row: Iterable[Action]) -> Iterator[Action]:
    """A row without microbatches from m on: what is left needs nothing of them."""
    return (action for action in row if action.microbatch < m)


def dualpipe_v(p: int, m: int) -> Table:
    """Two stages a rank in a V; forwards and backwards of different microbatches in pairs that run as one: 2p+1 live.

    A pair hides the exchanges of one microbatch behind the products of the other. At F = B = W idle is 2(p-1) times a
    stage's F; (p-1) where both of a pair run one after the other. DeepSeek-AI, github.com/deepseek-ai/DualPipe.

    Raises ValueError for m < 2p.
    """
    _least("dualpipe_v", p, m)
    if m < 2 * p:
        raise ValueError(f"dualpipe_v: got p={p}, m={m}, wanted {2 * p} microbatches or more, two for each rank")
    rows, pairs = zip(*(_dualpipe_v_row(p, m, rank) for rank in range(p)), strict=True)
    return Table(rows, vee(p), m, f"DualPipeV p={p} m={m}", pairs)


def _dualpipe_v_row(p: int, m: int, rank: int) -> tuple[tuple[Action, ...], tuple[int, ...]]:
    """The row and the pairs of a rank, in the eight parts of the paper's order."""
    stages, row, pairs = (rank, 2 * p - 1 - rank), [], []
    counts, waiting = Counter[tuple[str, int]](), deque[tuple[int, int]]()

    def add(kind: str, chunk: int) -> None:
        at = kind[0], chunk
        row.append(Action(kind, stages[chunk], counts[at]))
        if kind == "B":
            waiting.append((stages[chunk], counts[at]))
        counts[at] += 1

    def pair(chunk: int) -> None:
        """A forward of a chunk and a backward of the other."""
        pairs.append(len(row))
        add("F", chunk)
        add("BW", 1 - chunk)

    def weights() -> None:
        if waiting:
            row.append(Action("W", *waiting.popleft()))

    for _ in range(2 * (p - rank - 1)):
        add("F", 0)
    for _ in range(rank + 1):
        add("F", 0)
        add("F", 1)
    for _ in range(p - rank - 1):
        add("B", 1)
        weights()
        add("F", 1)
    for i in range(m - 2 * p + rank + 1):
        if i == 0 and rank == p - 1:  # nothing runs beside the first of the last rank: its output is waited for
            add("F", 0)
            add("BW", 1)
        else:
            pair(0)
        pair(1)
    for _ in range(p - rank - 1):
        add("BW", 1)
        pair(1)
    # From the middle of the last backwards on, weight gradients are put off
    for i in range(2 * (rank + 1)):
        add("B" if i > 2 * ((rank + 1) // 2) - rank % 2 else "BW", 1 - i % 2)
    for _ in range(p - rank - 1):
        weights()
        add("B", 0)
    while waiting:
        weights()
    return tuple(row), tuple(pairs)


def best(
    place: Sequence[int],
    m: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
    name: str = "best",
) -> Table:
    """The shortest table for given costs in a given memory, of `greedy` and of the schedules with these stages.

    Arguments and errors are those of `greedy`.
    """
    p, costs = max(place) + 1, costs or Costs()
    known = []
    if tuple(place) == loop(p):
        known += [gpipe(p, m), one_f_one_b(p, m), zb_h1(p, m)]
    elif tuple(place) == loop(p, len(place) // p) and m % p == 0:
        known.append(interleaved(p, m, len(place) // p))
    if tuple(place) == vee(p):
        known.append(zb_v(p, m))
    limits = memory if isinstance(memory, Sequence) else [math.inf if memory is None else memory] * p
    made = greedy(place, m, costs, memory, name=name)
    fitting = [t for t in known if all(x <= y for x, y in zip(clock(t, costs).peaks, limits, strict=True))]
    return replace(shortest([made, *fitting], costs).table, name=name)


def _table(name: str, rows: Iterable[Iterable[Action]], place: tuple[int, ...], p: int, m: int) -> Table:
    return Table(tuple(map(tuple, rows)), place, m, f"{name} p={p} m={m}")


def _least(name: str, p: int, m: int) -> None:
    if p < 1 or m < 1:
        raise ValueError(f"{name}: got p={p} ranks and m={m} microbatches, wanted 1 or more of each")
