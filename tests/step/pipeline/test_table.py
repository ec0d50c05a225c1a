"""Tables of pipelines: what is wrong with one, and its messages."""

import dataclasses

import pytest

from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.table import Action, Message, Table, checked, messages, problems, programs


def read(*rows: str) -> tuple[tuple[Action, ...], ...]:
    """Rows of a table as text: "F0.1 BW0.1"."""

    def action(text: str) -> Action:
        kind = text.rstrip("0123456789.")
        stage, microbatch = text.removeprefix(kind).split(".")
        return Action(kind, int(stage), int(microbatch))

    return tuple(tuple(map(action, row.split())) for row in rows)


TWO = schedules.one_f_one_b(2, 2)
ONE = Table(read("F0.0 B0.0 W0.0"), (0,), 1)
VEE = Table(read("F0.0 F3.0 BW3.0 BW0.0", "F1.0 F2.0 BW2.0 BW1.0"), (0, 1, 1, 0), 1)
WRONG = {
    "no rows": (Table((), (), 0), "got 0 ranks, 0 stages and 0 microbatches, wanted one or more of each"),
    "rank": (Table(ONE.rows, (1,), 1), "got stage 0 on rank 1, wanted a rank of 0 to 0; mend `place`"),
    "idle rank": (Table((*ONE.rows, ()), (0,), 1), "got rank 1 without a stage, wanted one or more on every rank"),
    "kind": (Table(read("F0.0 X0.0"), (0,), 1), "rank 0: got X0.0 of kind 'X', wanted one of F, B, W, BW, G, R"),
    "stage": (Table(read("F0.0 BW1.0"), (0,), 1), "rank 0: got BW1.0 of stage 1, wanted 0 to 0; mend the stage"),
    "no action": (Table((("F0.0",),), (0,), 1), "rank 0: got 'F0.0', wanted an Action; write Action('F', 0, 0)"),
    "text": (Table(((Action("F", "0", 0),),), (0,), 1), "rank 0: got F0.0 of stage 0, wanted 0 to 0; mend the stage"),
    "microbatch": (Table(read("F0.1 BW0.0"), (0,), 1), "rank 0: got F0.1 of microbatch 1, wanted 0 to 0"),
    "moved": (dataclasses.replace(VEE, place=(0, 1, 0, 1)), "got F3.0 on rank 0, wanted it with its stage on rank 1"),
    "twice": (Table(read("F0.0 F0.0 BW0.0"), (0,), 1), "got F0.0 2 times, on rank 0 and 0, wanted it once"),
    "W twice": (Table(read("F0.0 BW0.0 W0.0"), (0,), 1), "got W0.0 2 times, on rank 0 and 0, wanted it once"),
    "missing": (Table(read("F0.0 B0.0"), (0,), 1), "got no W0.0, wanted it on rank 0; add it or a BW"),
    "W first": (Table(read("F0.0 W0.0 B0.0"), (0,), 1), "rank 0: got W0.0 before B0.0, which it needs"),
    "B first": (Table(read("B0.0 F0.0 W0.0"), (0,), 1), "rank 0: got B0.0 before F0.0, which it needs"),
    "deadlock": (
        Table(read("F0.0 BW0.0 F0.1 BW0.1", "F1.1 BW1.1 F1.0 BW1.0"), (0, 1), 2),
        "got ranks that wait for each other (rank 0 at BW0.0 for B1.0 of rank 1, rank 1 at F1.1 for F0.1 of rank 0)",
    ),
    "G late": (Table(read("F0.0 G0.0 BW0.0"), (0,), 1), "rank 0: got F0.0 before the first G of its stage"),
    "G twice": (Table(read("G0.0 G0.0 F0.0 BW0.0"), (0,), 1), "rank 0: got G0.0 and G0.0 with no use between"),
    "G unused": (Table(read("G0.0 F0.0 BW0.0 G0.0"), (0,), 1), "rank 0: got G0.0 that nothing uses"),
    "R early": (Table(read("F0.0 B0.0 R0.0 W0.0"), (0,), 1), "rank 0: got R0.0 with no gradient to reduce"),
    "no R": (Table(read("F0.0 F0.1 BW0.0 R0.0 BW0.1"), (0,), 2), "rank 0: got no R behind BW0.1, wanted its gradient"),
    "pairs": (dataclasses.replace(TWO, pairs=((1,),)), "got pairs of 1 ranks, wanted those of 2"),
    "pair at the end": (dataclasses.replace(TWO, pairs=((3,), ())), "rank 0: got a pair at position 3, wanted rising"),
    "pairs meet": (dataclasses.replace(TWO, pairs=((), (0, 1))), "rank 1: got a pair at position 1, wanted rising"),
    "pair of F": (
        dataclasses.replace(TWO, pairs=((0,), ())),
        "rank 0: got F0.0 and F0.1 as a pair, wanted an F and a B",
    ),
    "pair of one": (
        dataclasses.replace(TWO, pairs=((), (0,))),
        "rank 1: got BW1.0 in one pair with F1.0, which it needs",
    ),
    "pairs wait": (dataclasses.replace(TWO, pairs=((1,), (1,))), "got ranks that wait for each other"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(case):
    table, text = WRONG[case]
    found = problems(table)
    assert any(text in line for line in found), found
    assert all(line.count("got ") and ", wanted " in line and "; " in line for line in found)
    with pytest.raises(ValueError, match="^table: |^1F1B p=2 m=2: "):
        checked(table)


@pytest.mark.parametrize(
    "table",
    [
        ONE,
        TWO,
        VEE,
        Table(read("F0.1 F0.0 B0.0 B0.1 W0.1 W0.0"), (0,), 2),
        Table(read("G0.0 F0.0 F0.1 BW0.0 G0.1 BW0.1 R0.1"), (0,), 2),
        Table(read("F0.0 F0.1 BW0.0 R0.0 BW0.1 R0.1"), (0,), 2),
        dataclasses.replace(schedules.one_f_one_b(2, 3), pairs=((), (1, 3))),
    ],
    ids=lambda table: table.name,
)
def test_right_ones(table):
    assert problems(table) == () and checked(table) is table


def test_the_error_names_the_first_five():
    with pytest.raises(ValueError, match=r"^mine: got no F0.0, .*; add it; .* \(and 7 more\)$"):
        checked(Table(((),), (0,), 4, "mine"))


def test_messages_cross_ranks_only():
    """In a V the tip stays on its rank; each message has the stage that makes it and knows the one that reads it."""
    found = messages(VEE)
    assert found == (
        Message("F", 0, 0, 0, 1),
        Message("F", 2, 0, 1, 0),
        Message("B", 3, 0, 0, 1),
        Message("B", 1, 0, 1, 0),
    )
    assert [m.reader for m in found] == [1, 3, 2, 0] and str(found[0]) == "F0.0 from rank 0 to rank 1"
    assert messages(ONE) == ()


def rendezvous(found) -> int:
    """Runs programs where a send waits until its receive is reached; how many events ran before all stopped."""
    at, ran = [0] * len(found), 0
    while True:
        before = ran
        for rank, program in enumerate(found):
            while at[rank] < len(program):
                event = program[at[rank]]
                if isinstance(event, Message):
                    other = event.target if event.source == rank else event.source
                    if found[other][at[other] : at[other] + 1] != (event,):
                        break
                    at[other] += 1
                    ran += 1
                at[rank] += 1
                ran += 1
        if ran == before:
            return ran


SEVERAL = [
    TWO,
    VEE,
    schedules.gpipe(3, 4),
    schedules.one_f_one_b(4, 6),
    schedules.interleaved(2, 4, 3),
    schedules.zb_h1(3, 2),
    schedules.zb_v(3, 4),
    schedules.dualpipe_v(3, 6),
]


@pytest.mark.parametrize("table", SEVERAL, ids=lambda table: table.name)
def test_programs_end_where_sends_wait(table):
    found = programs(table)
    assert rendezvous(found) == sum(map(len, found))
    for rank, program in enumerate(found):
        assert tuple(a for e in program if not isinstance(e, Message) for a in e) == table.rows[rank]
        assert tuple(e for e in program if isinstance(e, Message)) == tuple(
            m for m in messages(table) if rank in (m.source, m.target)
        )
        made = [(a.stage, a.microbatch, kind) for a in table.rows[rank] for kind in a.kind]
        sent = [made.index((m.stage, m.microbatch, m.kind)) for m in messages(table) if m.source == rank]
        assert sent == sorted(sent)
