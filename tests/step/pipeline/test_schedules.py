"""Schedules of pipelines on the clock: what is idle and live by the papers' formulas; mutants; greedy tables."""

import dataclasses
import functools
import graphlib
import itertools
import random

import pytest

from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.clock import Costs, clock
from fmegatron.step.pipeline.greedy import greedy
from fmegatron.step.pipeline.table import Action, Table, problems
from tests.pairs import few

UNEQUAL = Costs(F=1.0, B=1.25, W=0.75)
GRID = list(itertools.product(range(1, 9), range(1, 17)))
# (ranks, microbatches) of the default tests: fewer, as many and more microbatches than ranks, and far more
SOME = [(1, 2), (2, 1), (3, 3), (3, 7)]


def at_each(*more):
    """Some of the grid by default, the others slow."""
    cases = [case for case in GRID if case in SOME] + [case for case in GRID if case not in SOME]
    return [pytest.param(*case, *x, marks=[] if case in SOME else pytest.mark.slow) for case in cases for x in more]


@pytest.mark.parametrize("p, m", at_each(()))
def test_idle_and_live_of_the_papers(p, m):
    """Exact where the papers have an equation: idle of the rank with the most, and what each rank holds."""
    f, b, w = UNEQUAL.F, UNEQUAL.B, UNEQUAL.W
    gpipe, one = clock(schedules.gpipe(p, m), UNEQUAL), clock(schedules.one_f_one_b(p, m), UNEQUAL)
    for found in (gpipe, one):
        assert max(found.idle) == pytest.approx((p - 1) * (f + b + w))
    assert gpipe.peaks == (m,) * p and one.peaks == tuple(min(p - rank, m) for rank in range(p))
    pairs = clock(schedules.one_f_one_b(p, m, pairs=True), UNEQUAL)
    assert max(pairs.idle) <= (p - 1) * (f + b + w) * (1 + 1e-9)
    assert pairs.peaks == tuple(min(2 * (p - rank), m) for rank in range(p))
    h1 = clock(schedules.zb_h1(p, m))
    assert max(h1.idle) == (p - 1) * 2 - (min(p, m) - 1) and h1.peaks == (min(p, m),) * p
    v = clock(schedules.zb_v(p, m))
    assert max(v.peaks) <= min(2 * p, 2 * m)
    if m >= p:
        assert max(h1.idle) == p - 1 and max(v.idle) == p - 1
    if m >= 2 * p:
        dual = schedules.dualpipe_v(p, m)
        assert max(clock(dual).idle) == 2 * (p - 1) and max(clock(dual).peaks) == 2 * p + 1
        assert max(clock(dataclasses.replace(dual, pairs=())).idle) == p - 1
    else:
        with pytest.raises(ValueError, match=f"dualpipe_v: got p={p}, m={m}, wanted {2 * p} microbatches or more"):
            schedules.dualpipe_v(p, m)


@pytest.mark.parametrize("p, m, v", at_each((1,), (2,), (3,), (4,)))
def test_interleaved(p, m, v):
    """A rank's F + B + W is v times a stage's, so that idle over v is one of a stage."""
    if m % p:
        with pytest.raises(ValueError, match=f"interleaved: got p={p}, m={m}, v={v}, wanted m that p divides"):
            schedules.interleaved(p, m, v)
        return
    found = clock(schedules.interleaved(p, m, v), UNEQUAL)
    assert max(found.idle) == pytest.approx((p - 1) * (UNEQUAL.F + UNEQUAL.B + UNEQUAL.W))
    assert found.peaks[0] == min(m * v, (v + 1) * p - 1)
    if v == 1:
        assert max(found.peaks) <= max(1, 2 * p - 1)


@pytest.mark.parametrize("make", [schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1, schedules.zb_v])
@pytest.mark.parametrize("p, m", [(0, 4), (4, 0)])
def test_none_of_nothing(make, p, m):
    with pytest.raises(ValueError, match=rf"{make.__name__}: got p={p} ranks and m={m} microbatches, wanted 1 or more"):
        make(p, m)
    with pytest.raises(ValueError, match="interleaved: got p=2, m=4, v=0, wanted m that p divides"):
        schedules.interleaved(2, 4, 0)


def test_zero_bubble_is_shorter_than_1f1b():
    """Costs of layers whose backward takes twice the forward, of which attention's part is in B alone."""
    for costs in (Costs(), UNEQUAL, Costs(F=1.0, B=1.4, W=0.7), Costs(F=1.0, B=1.2, W=0.8, BW=1.95, send=0.05)):
        zero, one = (clock(make(4, 8), costs).duration for make in (schedules.zb_h1, schedules.one_f_one_b))
        assert zero / one <= 0.93


def mutants(table: Table, rng: random.Random, count: int):
    """(what, table): an action dropped, doubled, on another rank, two swapped, another stage, microbatch or kind."""
    for _ in range(count):
        rows = [list(row) for row in table.rows]
        rank = rng.randrange(len(rows))
        i, j = rng.randrange(len(rows[rank])), rng.randrange(len(rows[rank]))
        action, what = (
            rows[rank][i],
            rng.choice(("drop", "double", "move", "swap", "swap", "stage", "microbatch", "kind")),
        )
        if what == "drop":
            rows[rank].pop(i)
        elif what == "double":
            rows[rank].insert(j, action)
        elif what == "move" and len(rows) > 1:
            other = rows[(rank + 1) % len(rows)]
            other.insert(rng.randrange(len(other) + 1), rows[rank].pop(i))
        elif what == "swap" and i != j:
            rows[rank][i], rows[rank][j] = rows[rank][j], action
        elif what == "stage":
            rows[rank][i] = dataclasses.replace(action, stage=action.stage + rng.choice((-1, 1)))
        elif what == "microbatch":
            rows[rank][i] = dataclasses.replace(action, microbatch=action.microbatch + rng.choice((-1, 1)))
        elif what == "kind":
            rows[rank][i] = dataclasses.replace(
                action, kind=rng.choice([k for k in ("F", "B", "W", "BW") if k != action.kind])
            )
        else:
            continue
        yield what, dataclasses.replace(table, rows=tuple(map(tuple, rows)))


def right(table: Table) -> bool:
    """Another way to say it: the actions are those there must be, and the graph of what waits has no circle.

    A pair is one node.
    """
    node, made = {}, []
    for rank, row in enumerate(table.rows):
        pairs = table.pairs[rank] if table.pairs else ()
        for i, action in enumerate(row):
            node[rank, i] = (rank, i - 1 if i - 1 in pairs else i)
            made += [(kind, action.stage, action.microbatch, rank) for kind in action.kind]
            other = row[i + 1] if i in pairs and i + 1 < len(row) else None
            if i in pairs and (other is None or {action.kind[0], other.kind[0]} != {"F", "B"}):
                return False
    wanted = [(k, s, i, r) for k in "FBW" for s, r in enumerate(table.place) for i in range(table.microbatches)]
    if sorted(made) != sorted(wanted):
        return False
    where = {
        (kind, a.stage, a.microbatch): node[r, i]
        for r, row in enumerate(table.rows)
        for i, a in enumerate(row)
        for kind in a.kind
    }
    graph: dict[tuple, set] = {n: set() for n in node.values()}
    for (rank, i), n in node.items():
        if i and node[rank, i - 1] != n:
            graph[n].add(node[rank, i - 1])
    for (kind, stage, i), n in where.items():
        before = {"F": [("F", stage - 1, i)], "B": [("F", stage, i), ("B", stage + 1, i)], "W": [("B", stage, i)]}[kind]
        for need in before:
            if need in where and not (where[need] == n and kind == "W"):
                graph[n].add(where[need])  # in one pair: a circle of one
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        return False
    return not any(n in before for n, before in graph.items())


BASES = {
    "1F1B": lambda: schedules.one_f_one_b(4, 8),
    "1F1B of pairs": lambda: schedules.one_f_one_b(3, 6, pairs=True),
    "ZB-H1": lambda: schedules.zb_h1(4, 8),
    "ZB-V": lambda: schedules.zb_v(4, 8),
    "interleaved": lambda: schedules.interleaved(4, 8, 2),
    "GPipe": lambda: schedules.gpipe(3, 4),
    "DualPipeV": lambda: schedules.dualpipe_v(3, 6),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutants_are_refused_unless_they_are_right(base, count):
    table, rng, refused = BASES[base](), random.Random(0), 0
    assert right(table)
    for what, mutant in mutants(table, rng, count):
        found = problems(mutant)
        assert bool(found) != right(mutant), (what, found, mutant)
        refused += bool(found)
    assert refused > count / 2


@functools.cache
def random_costs(seed: int) -> tuple[tuple[int, ...], int, Costs, float]:
    """(place, m, costs, memory) of a random pipeline."""
    rng = random.Random(seed)
    p, v = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3))
    place = schedules.vee(p) if v == 2 and rng.random() < 0.5 else schedules.loop(p, v)

    def each(low: float, high: float) -> float | tuple[float, ...]:
        return rng.uniform(low, high) if rng.random() < 0.5 else tuple(rng.uniform(low, high) for _ in place)

    costs = Costs(
        F=each(0.5, 1.5),
        B=each(0.5, 1.5),
        W=each(0.2, 1.2),
        send=rng.choice((0.0, 0.3)),
        live=each(0.5, 1),
        left=each(0.1, 2),
    )
    least = max(
        sum(max(costs.at("live", s), costs.at("left", s)) for s, r in enumerate(place) if r == q) for q in range(p)
    )
    return place, rng.randrange(1, 7), costs, least * rng.choice((1.0, 1.5, 3.0))


@pytest.mark.parametrize("seed", few(5, [(seed,) for seed in range(120)]))
@pytest.mark.parametrize("split", [True, False])
def test_greedy_ends_in_any_memory(seed, split):
    place, m, costs, memory = random_costs(seed)
    table = greedy(place, m, costs, memory, split)
    found = clock(table, costs)  # which is right
    assert max(found.peaks) <= memory + 1e-9
    busy = max(sum(costs.of(a) for a in row) for row in table.rows)
    chain = sum(costs.at("F", s) + costs.at("B", s) for s in range(len(place)))
    assert max(busy, chain) - 1e-9 <= found.duration <= m * len(place) * (max(map(costs.of, table.rows[0])) + 3) * 3


def test_greedy_finds_1f1b_and_better_than_zb_h1():
    one = greedy(schedules.loop(4), 8, memory=[4, 3, 2, 1], split=False)
    assert clock(one).duration == clock(schedules.one_f_one_b(4, 8)).duration
    costs = Costs(F=1.0, B=1.3, W=0.6)
    zero = greedy(schedules.loop(4), 8, costs, memory=4)
    assert clock(zero, costs).duration <= clock(schedules.zb_h1(4, 8), costs).duration
    wide = greedy(schedules.loop(4), 8, costs, memory=7)
    assert clock(wide, costs).duration <= clock(zero, costs).duration


@pytest.mark.parametrize(
    "place, m, memory, other",
    [
        (schedules.loop(4), 5, 3, lambda: greedy(schedules.loop(4), 5, UNEQUAL, 3)),
        (schedules.loop(3), 4, 3, lambda: schedules.zb_h1(3, 4)),
        (schedules.loop(2, 2), 4, 5, lambda: schedules.interleaved(2, 4, 2)),
        pytest.param(schedules.vee(12), 40, 24, lambda: schedules.zb_v(12, 40), marks=pytest.mark.slow),
    ],
)
def test_the_best_is_no_longer_than_any_that_fits(place, m, memory, other):
    found = clock(schedules.best(place, m, UNEQUAL, memory), UNEQUAL)
    assert found.duration <= clock(other(), UNEQUAL).duration and max(found.peaks) <= memory
    assert found.table.name == "best"


def test_greedy_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="greedy: rank 0: got memory 1, wanted 2 or more; it holds a microbatch"):
        greedy(schedules.vee(2), 4, memory=1)
    with pytest.raises(ValueError, match="greedy: got memory of 3 ranks and 4 microbatches, wanted 2, and 1 or more"):
        greedy(schedules.vee(2), 4, memory=[4, 4, 4])
    with pytest.raises(ValueError, match="Costs: F: got 3 numbers, wanted 4, one for each stage"):
        greedy(schedules.vee(2), 4, Costs(F=(1.0, 2.0, 3.0)))
    with pytest.raises(ValueError, match=r"Costs: B: got -1.0, wanted a finite number of 0 or more"):
        Costs(B=(1.0, -1.0))
    with pytest.raises(ValueError, match="table: got no B0.0"):
        clock(Table(((Action("F", 0, 0),),), (0,), 1))


def test_the_clock_counts_messages_and_what_is_left():
    """Two ranks, one microbatch: F F BW BW, with a message between each two."""
    found = clock(schedules.zb_h1(2, 1), Costs(F=1.0, B=2.0, W=3.0, send=0.5, live=5.0, left=2.0))
    assert found.spans == (((0.0, 1.0), (5.0, 7.0), (7.0, 10.0)), ((1.5, 2.5), (2.5, 4.5), (4.5, 7.5)))
    assert found.duration == 10.0 and found.idle == (4.0, 4.0) and found.idle_share == 0.4 and found.peaks == (5.0, 5.0)
    held = clock(schedules.zb_h1(3, 4), Costs(live=3.0, left=1.0))  # rank 2: one F while two microbatches wait for W
    assert held.peaks == (9.0, 7.0, 5.0)
