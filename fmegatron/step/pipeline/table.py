"""A table of a pipeline: the actions of each rank in their order. What is wrong with it, and the messages it implies.

A table is proven before a process starts: every forward and backward of each stage and microbatch is there once, on the
rank that holds the stage, and no rank waits for ever. Messages are not in it. They follow from it: a value that crosses
ranks is sent when it is made, in the order of the sender's row, which the receiver reads off the table.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = [
    "Action",
    "Message",
    "Table",
    "checked",
    "forwards",
    "gathering",
    "messages",
    "needs",
    "played",
    "problems",
    "programs",
    "units",
]

# What each kind of action computes of a stage. A kind of several letters computes each of them, in this order.
KINDS = ("F", "B", "W", "BW", "G", "R")
_COMPUTED = "FBW"  # once for each stage and microbatch


@dataclass(frozen=True, order=True)
class Action:
    """What a rank does at one place of its row, for a stage and a microbatch (both counted from 0).

    kind:
        "F"   forward: of the activation that the stage before has sent, or of the batch
        "B"   gradient of the stage's input, from that of its output
        "W"   gradients of the stage's weights, added to those of other microbatches
        "BW"  both at once
        "G"   gathers (and casts) of those of the stage's weights that its actions read which follow in the row up to
              its next G; what it made lives until the last of them. A stage without any G gathers in F, B and W
              themselves
        "R"   reductions of the weight gradients that were summed since the stage's last R; a stage without any R
              reduces in each W
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Message:
    """A value that crosses ranks: of kind "F" the output of a stage, of kind "B" the gradient of its input.

    stage, microbatch: of the action that makes it. source, target: ranks of the pipeline.
    """

    kind: str
    stage: int
    microbatch: int
    source: int
    target: int

    @property
    def reader(self) -> int:
        """The stage that reads it: the next one of an activation, the one before of a gradient."""
        return self.stage + (1 if self.kind == "F" else -1)

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch} from rank {self.source} to rank {self.target}"


@dataclass(frozen=True)
class Table:
    """The actions of every rank of a pipeline, in their order.

    rows[rank]: the actions of a rank. place[stage]: the rank that holds a stage. microbatches: how many there are.
    name: for pictures and errors.
    pairs[rank]: positions i of a row whose actions i and i + 1 run as one (a forward and another microbatch's
        backward): both wait for what either needs, and what they make is there when both are done. (): none.
    """

    rows: tuple[tuple[Action, ...], ...]
    place: tuple[int, ...]
    microbatches: int
    name: str = "table"
    pairs: tuple[tuple[int, ...], ...] = ()

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.place)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, from the first to the last."""
        return tuple(stage for stage, holder in enumerate(self.place) if holder == rank)

    def ends_of_gathers(self, rank: int) -> set[Action]:
        """The actions of a rank behind which nothing reads what the last G of their stage gave."""
        found, last = set[Action](), dict[int, Action | None]()
        for action in self.rows[rank]:
            if action.kind == "G":
                found |= {of for of in (last.get(action.stage),) if of is not None}
                last[action.stage] = None
            elif action.kind != "R" and action.stage in last:
                last[action.stage] = action
        return found | {action for action in last.values() if action is not None}

    def parts(self, rank: int) -> tuple[tuple[str, ...], ...]:
        """Of each action of a row the kinds of the parts that it runs: "F", "B", "W", "R"; of a G one for what reads
        it, up to the next G of its stage: "GF", "GBW"."""
        found, readers = list[tuple[str, ...]](), dict[int, str]()
        for action in reversed(self.rows[rank]):
            if action.kind == "G":
                read = readers.pop(action.stage, "")
                found.append(("G" + "".join(kind for kind in _COMPUTED if kind in read),))
                continue
            if action.kind != "R":
                readers[action.stage] = readers.get(action.stage, "") + action.kind
            found.append(tuple(action.kind))
        return tuple(found[::-1])

    @property
    def moves(self) -> tuple[int, int]:
        """How often a stage's weights are gathered by actions of their own, and their gradients reduced, at most; 0:
        by actions that read weights, or make gradients. What W alone reads is no weight."""
        kinds = [
            (kind, a.stage)
            for rank, row in enumerate(self.rows)
            for a, of in zip(row, self.parts(rank), strict=True)
            for kind in of
        ]
        counts = Counter((kind[0], stage) for kind, stage in kinds if kind != "GW")
        gathers, reductions = (max((n for (of, _), n in counts.items() if of == kind), default=0) for kind in "GR")
        return gathers, reductions


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """What must be done before an action can begin, as actions of kinds F, B and W.

    Not what G and R need, which is a matter of their own row.
    """
    if action.kind == "F":
        return (Action("F", action.stage - 1, action.microbatch),) if action.stage else ()
    if action.kind == "W":
        return (Action("B", action.stage, action.microbatch),)
    if action.kind in ("B", "BW"):
        after = (Action("B", action.stage + 1, action.microbatch),) if action.stage + 1 < stages else ()
        return (Action("F", action.stage, action.microbatch), *after)
    return ()


def units(table: Table, rank: int) -> Iterator[tuple[Action, ...]]:
    """The row of a rank by what runs as one: single actions and pairs."""
    row, pairs = table.rows[rank], table.pairs[rank] if table.pairs else ()
    at = 0
    while at < len(row):
        size = 2 if at in pairs else 1
        yield row[at : at + size]
        at += size


def played(table: Table) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """(rank, what runs as one) in an order in which all can run: round by round, each rank one that has all it needs.

    Ends early when no rank can go on. Meant for tables whose actions are in range.
    """
    rows = [list(units(table, rank)) for rank in range(table.ranks)]
    at, done = [0] * table.ranks, set()
    while True:
        ready = [
            (rank, row[i])
            for rank, (row, i) in enumerate(zip(rows, at, strict=True))
            if i < len(row) and all(need in done for action in row[i] for need in needs(action, table.stages))
        ]
        if not ready:
            return
        for rank, unit in ready:
            yield rank, unit
            at[rank] += 1
            done |= {Action(kind, a.stage, a.microbatch) for a in unit for kind in a.kind}


def messages(table: Table) -> tuple[Message, ...]:
    """All messages of a step, in one order. A table must be right (`checked`).

    Those of one sender are in the order of its row. A rank that sends and receives in this order never deadlocks, even
    where a send waits until it is received (`programs`); the place of a message in it is a number that both ends know.
    """
    return tuple(m for rank, unit in played(table) for action in unit for m in _sent(table, rank, action))


def programs(table: Table) -> tuple[tuple[tuple[Action, ...] | Message, ...], ...]:
    """Of each rank: what it runs as one (`units`), and between these the messages that it sends (source is the rank) or
    receives.

    Each receive stands before the action that reads it, each send behind the action (or pair) that makes it, all in the
    order of `messages`.
    """
    found: tuple[list[tuple[Action, ...] | Message], ...] = tuple([] for _ in table.rows)
    for rank, unit in played(table):
        found[rank].append(unit)
        for message in (m for action in unit for m in _sent(table, rank, action)):
            found[message.source].append(message)
            found[message.target].append(message)
    return tuple(map(tuple, found))


def _sent(table: Table, rank: int, action: Action) -> Iterator[Message]:
    """What an action gives to other ranks."""
    for kind in action.kind:
        reader = action.stage + {"F": 1, "B": -1}.get(kind, table.stages + 1)
        if 0 <= reader < table.stages and table.place[reader] != rank:
            yield Message(kind, action.stage, action.microbatch, rank, table.place[reader])


def forwards(table: Table) -> Table:
    """The forwards of a table alone, in its order: what an evaluation runs."""
    rows = tuple(tuple(action for action in row if action.kind == "F") for row in table.rows)
    return replace(table, rows=rows, pairs=(), name=f"forwards of {table.name}")


def gathering(table: Table, often: str) -> Table:
    """The table with G before actions that read weights of a stage, and R behind those that make their gradients.

    often: "step", once each; "burst", for each run of actions of the stage, so that a rank of several stages has the
    weights of those alone that it is at; "use": the table itself, whose parts gather what they read, and reduce.
    """
    if often == "use":
        return table
    rows, pairs = [], []
    for rank in range(table.ranks):
        row, at = list(units(table, rank)), list[int]()
        before: dict[int, list[Action]] = {}
        behind: dict[int, list[Action]] = {}
        for stage in table.held(rank):
            mine = [i for i, unit in enumerate(row) if any(a.stage == stage for a in unit)]
            cuts = [k for k in range(1, len(mine)) if often == "burst" and mine[k] > mine[k - 1] + 1]
            for begin, end in itertools.pairwise((0, *cuts, len(mine))):
                run = [a for i in mine[begin:end] for a in row[i] if a.stage == stage]
                before.setdefault(mine[begin], []).append(Action("G", stage, run[0].microbatch))
                if of := [a.microbatch for a in run if "W" in a.kind]:
                    behind.setdefault(mine[end - 1], []).append(Action("R", stage, of[-1]))
        found: list[Action] = []
        for i, unit in enumerate(row):
            found += before.get(i, ())
            at += [len(found)] * (len(unit) > 1)
            found += [*unit, *behind.get(i, ())]
        rows.append(tuple(found))
        pairs.append(tuple(at))
    return replace(table, rows=tuple(rows), pairs=tuple(pairs) if table.pairs else ())


def checked(table: Table) -> Table:
    """The table itself. Raises ValueError, naming what is wrong, unless it can run and computes everything once."""
    found = problems(table)
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        text = "; ".join(found[:5]) + more
        raise ValueError(f"{table.name}: {text}")
    return table


def problems(table: Table) -> tuple[str, ...]:
    """What is wrong with a table, () if nothing is: each "got X, wanted Y; FIX".

    Shapes and ranges first; then what is there twice, nowhere or on another rank; then the order: within a row, and
    ranks that would wait for each other.
    """
    for look in (_shape, _complete, _gathers, _order):
        found = tuple(look(table))
        if found:
            return found
    return ()


def _shape(table: Table) -> Iterator[str]:
    """Of numbers out of range."""
    if not table.place or table.microbatches < 1 or not table.rows:
        yield (
            f"got {table.ranks} ranks, {table.stages} stages and {table.microbatches} microbatches, wanted one or more "
            "of each; name them"
        )
        return
    for stage, rank in enumerate(table.place):
        if rank not in range(table.ranks):
            yield f"got stage {stage} on rank {rank}, wanted a rank of 0 to {table.ranks - 1}; mend `place`"
    for rank in range(table.ranks):
        if rank not in table.place:
            yield f"got rank {rank} without a stage, wanted one or more on every rank; mend `place` or take fewer ranks"
    for rank, action in _all(table):
        if not isinstance(action, Action):
            yield f"rank {rank}: got {action!r}, wanted an Action; write Action('F', 0, 0)"
            continue
        if action.kind not in KINDS:
            yield f"rank {rank}: got {action} of kind {action.kind!r}, wanted one of {', '.join(KINDS)}; rename it"
        if action.stage not in range(table.stages):
            yield f"rank {rank}: got {action} of stage {action.stage}, wanted 0 to {table.stages - 1}; mend the stage"
        if action.microbatch not in range(table.microbatches):
            yield (
                f"rank {rank}: got {action} of microbatch {action.microbatch}, wanted 0 to {table.microbatches - 1}; "
                "mend the microbatch"
            )
    if table.pairs and len(table.pairs) != table.ranks:
        yield f"got pairs of {len(table.pairs)} ranks, wanted those of {table.ranks}; give () for a rank without any"
        return
    for rank, positions in enumerate(table.pairs):
        row, last = table.rows[rank], -2
        for at in positions:
            if not (last + 2 <= at < len(row) - 1):
                yield (
                    f"rank {rank}: got a pair at position {at}, wanted rising positions of 0 to {len(row) - 2}, no "
                    "action in two pairs; mend `pairs`"
                )
            elif sorted(a.kind[0] for a in row[at : at + 2]) != ["B", "F"]:
                yield f"rank {rank}: got {row[at]} and {row[at + 1]} as a pair, wanted an F and a B; part them"
            last = at


def _complete(table: Table) -> Iterator[str]:
    """Of what is on a wrong rank, there twice, or missing."""
    where: dict[Action, list[int]] = {}
    for rank, action in _all(table):
        if table.place[action.stage] != rank:
            yield f"got {action} on rank {rank}, wanted it with its stage on rank {table.place[action.stage]}; move it"
        for kind in action.kind:
            if kind in _COMPUTED:
                where.setdefault(Action(kind, action.stage, action.microbatch), []).append(rank)
    for action, ranks in where.items():
        if len(ranks) > 1:
            yield f"got {action} {len(ranks)} times, on {_ranks(ranks)}, wanted it once; remove the others"
    for kind, stage, microbatch in itertools.product(_COMPUTED, range(table.stages), range(table.microbatches)):
        if Action(kind, stage, microbatch) not in where:
            action, rank = Action(kind, stage, microbatch), table.place[stage]
            yield f"got no {action}, wanted it on rank {rank}; add it{_hint(kind)}"


def _hint(kind: str) -> str:
    return "" if kind == "F" else " or a BW" if kind == "W" else " (or a BW, which is B and W)"


def _gathers(table: Table) -> Iterator[str]:
    """Of gathers and reductions that nothing uses, or that come too late."""
    for rank, row in enumerate(table.rows):
        kinds = {(a.kind, a.stage) for a in row}
        last: dict[tuple[str, int], Action] = {}  # the last G of a stage that nothing has used; the last W not reduced
        gathered = set()
        for action in row:
            stage = action.stage
            if action.kind == "G":
                if ("G", stage) in last:
                    yield f"rank {rank}: got {last['G', stage]} and {action} with no use between, wanted one; drop one"
                last["G", stage] = action
                gathered.add(stage)
            elif action.kind == "R":
                if ("W", stage) not in last:
                    yield f"rank {rank}: got {action} with no gradient to reduce, wanted a W before it; move it"
                last.pop(("W", stage), None)
            else:
                if ("G", stage) in kinds and stage not in gathered:
                    yield f"rank {rank}: got {action} before the first G of its stage, wanted it behind; move the G"
                    gathered.add(stage)  # one finding a stage
                last.pop(("G", stage), None)
                if "W" in action.kind and ("R", stage) in kinds:
                    last["W", stage] = action
        for (kind, _), action in last.items():
            if kind == "G":
                yield f"rank {rank}: got {action} that nothing uses, wanted an action of its stage behind it; remove it"
            else:
                yield f"rank {rank}: got no R behind {action}, wanted its gradient reduced; add an R at the end"


def _order(table: Table) -> Iterator[str]:
    """Of actions before what they need."""
    for rank, row in enumerate(table.rows):
        at = {Action(k, a.stage, a.microbatch): i for i, a in enumerate(row) for k in a.kind}
        starts, i = [], 0
        for unit in units(table, rank):
            starts += [i] * len(unit)
            i += len(unit)
        for i, action in enumerate(row):
            for need in needs(action, table.stages):
                if table.place[need.stage] == rank and at[need] >= starts[i] and at[need] != i:
                    how = f"in one pair with {need}" if starts[at[need]] == starts[i] else f"before {need}"
                    yield f"rank {rank}: got {action} {how}, which it needs, wanted it behind; swap them"
    ran = Counter()
    for rank, unit in played(table):
        ran[rank] += len(unit)
    if sum(ran.values()) == sum(map(len, table.rows)):
        return
    done = {Action(k, a.stage, a.microbatch) for r, row in enumerate(table.rows) for a in row[: ran[r]] for k in a.kind}
    waits = []
    for rank, row in enumerate(table.rows):
        unit = next(_from(table, rank, ran[rank]), ())
        missing = [n for action in unit for n in needs(action, table.stages) if n not in done]
        if missing:
            waits.append(f"rank {rank} at {row[ran[rank]]} for {missing[0]} of rank {table.place[missing[0].stage]}")
    yield f"got ranks that wait for each other ({', '.join(waits)}), wanted an order that ends; reorder one of them"


def _from(table: Table, rank: int, begin: int) -> Iterator[tuple[Action, ...]]:
    """The units of a row from a position on."""
    i = 0
    for unit in units(table, rank):
        if i >= begin:
            yield unit
        i += len(unit)


def _all(table: Table) -> Iterator[tuple[int, Action]]:
    return ((rank, action) for rank, row in enumerate(table.rows) for action in row)


def _ranks(ranks: list[int]) -> str:
    return "rank " + " and ".join(map(str, ranks))
