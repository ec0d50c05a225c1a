"""A pipeline's table run: what one rank of it holds between its actions, and the program of a rank over real ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fmegatron.collectives import World, waiting
from fmegatron.step.pipeline.cut import Parts
from fmegatron.step.pipeline.table import Action, Message, Table, programs

__all__ = ["Doing", "Held", "on_paper", "over_ranks"]


class Held:
    """The values of one rank of a pipeline: tensors, or whatever else `run` takes and gives.

    faces: of parts that run as one ([(kind of a part, names)] of what they take, the same of what they give).
    run: (parts, values) -> what they give; parts: one or, of a pair, those that run as one, each (kind, stage). given:
    (path of an input, microbatch) -> its value. add: hears (path of a gradient, its term, microbatch). plus: (a sum or
    None, a value) -> the sum with it. sides: {(name, microbatch): what M reads}. gathered: {stage: what its last G
    gave}, while it is read. reduced: {stage: the sums that its next R reads}.
    """

    def __init__(
        self, table: Table, parts: Parts, rank: int, faces: Callable, run: Callable, given: Callable, add: Callable,
        plus: Callable,
    ):  # fmt: skip
        self.table, self.parts, self.rank, self.faces, self.run = table, parts, rank, faces, run
        self.given, self.add = given, add
        self.plus, self.gathered, self.reduced = plus, dict[int, dict[str, Any]](), dict[int, dict[str, Any]]()
        self._done_with = table.ends_of_gathers(rank)
        self._gathers = iter([kind for kinds in table.parts(rank) for kind in kinds if kind[0] == "G"])
        self.values: dict[tuple[str, int], Any] = {}
        self.sides: dict[tuple[str, int], Any] = {}
        self._leaving: dict[tuple[str, int, int], Any] = {}  # the message may stand behind the other action of a pair
        self._dead: list[tuple[str, int]] = []
        self._last = [self._lives(stage) for stage in range(parts.stages)]

    def _lives(self, stage: int) -> dict[str, list[str]]:
        """{kind: names of values of a stage that nothing of it reads behind an action of this kind}."""
        last, own = {}, [pair[1] for pair in (self._before(stage), self._behind(stage)) if pair]
        for kind in "FBW":
            part = self.parts.of[kind, stage]
            for name in (*part.takes, *(part.gives if kind != "W" else ()), *own):
                last[name] = kind
            own = [] if kind != "F" else [pair[1] for pair in (self._behind(stage),) if pair]
        return {kind: [name for name, at in last.items() if at == kind] for kind in "FBW"}

    def _before(self, stage: int) -> tuple[str, str] | None:
        return self.parts.forward[stage - 1] if stage else None

    def _behind(self, stage: int) -> tuple[str, str] | None:
        return self.parts.backward[stage + 1] if stage + 1 < self.parts.stages else None

    def do(self, *unit: Action) -> None:
        """Run what runs as one, an action or a pair, whose inputs are there."""
        self._let_go()
        steps = [(k, a) for a in unit for k in ((next(self._gathers),) if a.kind == "G" else a.kind)]
        for together in [steps] if len(unit) > 1 else [[step] for step in steps]:
            at = {kind: action for kind, action in together}  # a pair has one action of each kind
            joined = tuple((kind, action.stage) for kind, action in together if self.parts.of[kind, action.stage].gives)
            takes, gives = self.faces(joined)
            values = [value for kind, names in takes for value in self._values(kind, names, at[kind])]
            found = iter(self.run(joined, values) if joined else ())
            made = {kind: {name: next(found) for name in names} for kind, names in gives}
            for kind, action in together:
                self._took(kind, action, made.get(kind, {}))
        for action in unit:
            if action in self._done_with:
                del self.gathered[action.stage]

    def _took(self, kind: str, action: Action, found: dict[str, Any]) -> None:
        """Keep what a part gave."""
        stage, i = action.stage, action.microbatch
        if kind[0] == "G":
            self.gathered[stage] = found
            return
        if kind == "R":
            self.reduced.pop(stage, None)
        sums = self.parts.of["R", stage].takes if kind == "W" and ("R", stage) in self.parts.of else ()
        for name, value in found.items():
            if name in sums:
                of = self.reduced.setdefault(stage, {})
                of[name] = self.plus(of.get(name), value)
            elif kind in "WR":
                self.add(name, value, i)
            else:
                self.values[name, i] = value
        if kind == "F":
            self.sides |= {(name, i): self.values[name, i] for name in self.parts.sides[stage]}
        pair, reader = self._pair(kind, stage), stage + (1 if kind == "F" else -1)
        if pair is not None and self.table.place[reader] == self.rank:
            self.values[pair[1], i] = self.values[pair[0], i]
        elif pair is not None:
            self._leaving[kind, stage, i] = self.values[pair[0], i]
        self._dead += [(name, i) for name in self._last[stage].get(kind, ())]

    def _pair(self, kind: str, stage: int) -> tuple[str, str] | None:
        """(the name here, the name where it is read) of what an action gives to another stage."""
        return {"F": self.parts.forward, "B": self.parts.backward}[kind][stage] if kind in "FB" else None

    def sent(self, message: Message) -> Any:
        """What a message of this rank carries, once."""
        return self._leaving.pop((message.kind, message.stage, message.microbatch))

    def receive(self, message: Message, value: Any) -> None:
        """Take what a message to this rank carries."""
        pair = self._pair(message.kind, message.stage)
        assert pair is not None, "a message has a value"
        self.values[pair[1], message.microbatch] = value

    def end(self) -> None:
        """Behind the last action: everything has been read."""
        self._let_go()
        assert not self.values, f"rank {self.rank} of pp: nobody has read {', '.join(map(str, self.values))}"

    def _values(self, kind: str, names: Sequence[str], action: Action) -> list:
        """What an action takes: of a gather, of sums (which are no values of one microbatch), of this microbatch, or
        given."""
        stage, i, values, given = action.stage, action.microbatch, self.values, self.given
        known = self.gathered.get(stage, {})
        if kind == "R" and stage in self.reduced:
            known = self.reduced[stage] | known
        return [
            known[name] if name in known else values[name, i] if (name, i) in values else given(name, i)
            for name in names
        ]

    def _let_go(self) -> None:
        """Forget what was read for the last time: behind the messages that carry it."""
        for key in self._dead:
            self.values.pop(key, None)
        self._dead.clear()


def over_ranks(held: Held, world: World, like: Callable[[Message], torch.Tensor]) -> None:
    """Run the program of this rank: its actions, and between them what it sends and receives, in the table's order.

    like: a message -> a tensor of the shape, dtype and device of what it carries. Sends are not waited for before the
    end; a receive is posted where it stands in the program, and waited for where its value is read.

    Raises RuntimeError, naming action, message and ranks, where a peer is lost, or nothing comes within the time limit
    of the process group (`connect(timeout_s=)`).
    """
    axis: tuple[str, ...] = ("pp",)
    group, peers = world.group(axis), _peers(world)
    sends: list[tuple[Any, Message, torch.Tensor]] = []
    coming: dict[tuple[str, int, int], tuple[Any, Message, torch.Tensor]] = {}
    numbers: dict[tuple[int, int], int] = {}
    for item in programs(held.table)[held.rank]:
        if not isinstance(item, Message):
            for key in awaited(item):
                if key in coming:
                    work, message, value = coming.pop(key)
                    waiting.at_work(Doing(held.rank, peers, item, message), work.wait)
                    held.receive(message, value)
            waiting.at_work(Doing(held.rank, peers, item), held.do, *item)
            continue
        pair = item.source, item.target
        tag = numbers[pair] = numbers.get(pair, -1) + 1
        doing = Doing(held.rank, peers, (), item)
        if item.source == held.rank:
            value = held.sent(item).contiguous()
            sends = [(work, message, x) for work, message, x in sends if not work.is_completed()]
            work = waiting.at_work(doing, dist.isend, value, peers[item.target], group, tag)
            sends.append((work, item, value))
        else:
            value = torch.empty_like(like(item), memory_format=torch.contiguous_format)
            work = waiting.at_work(doing, dist.irecv, value, peers[item.source], group, tag)
            coming[item.kind, item.reader, item.microbatch] = work, item, value
    for work, message, _ in sends:
        waiting.at_work(Doing(held.rank, peers, (), message), work.wait)
    held.end()


class Doing(NamedTuple):
    """What a rank of pp is at: an action or a pair, or the message that it waits for before it; (): behind the last.

    peers: of each rank of pp the number of its process.
    """

    rank: int
    peers: Sequence[int]
    unit: tuple[Action, ...]
    message: Message | None = None

    def __str__(self) -> str:
        action, message = " " * bool(self.unit) + " with ".join(map(str, self.unit)), self.message
        here = f"pipeline: rank {self.peers[self.rank]} ({self.rank} of pp)"
        if message is None:
            return f"{here} runs{action}"
        other, way = (message.target, "be taken by") if message.source == self.rank else (message.source, "come from")
        what = f"{message.kind}{message.stage}.{message.microbatch}"
        before = f" before{action}" if action else ""
        return f"{here} waits{before} for what {what} made to {way} rank {self.peers[other]} ({other} of pp)"


def on_paper(
    held: Held, like: Callable[[Message], torch.Tensor], before: Callable[[str, list[torch.Tensor]], None]
) -> list[torch.Tensor]:
    """The program of a rank without the others: what it receives is what `like` gives, and nothing is sent.

    before: hears of each action (or pair) its kind, and what is alive outside of `held`: what has come and is not read,
    and what was sent last. Returns what is so behind the last.
    """
    sent, coming = list[torch.Tensor](), dict[tuple[str, int, int], tuple[Message, torch.Tensor]]()
    for item in programs(held.table)[held.rank]:
        if not isinstance(item, Message):
            beside = [*sent, *(x for _, x in coming.values())]
            for key in awaited(item):
                if key in coming:
                    held.receive(*coming.pop(key))
            before(" with ".join(action.kind for action in item), beside)
            held.do(*item)
        elif item.source == held.rank:
            sent = [held.sent(item)]
        else:
            coming[item.kind, item.reader, item.microbatch] = item, like(item)
    held.end()
    return sent


def awaited(unit: tuple[Action, ...]) -> list[tuple[str, int, int]]:
    """(kind, stage, microbatch) of what an action or a pair reads that may come from another rank."""
    return [(kind, action.stage, action.microbatch) for action in unit for kind in action.kind if kind in "FB"]


def _peers(world: World) -> Sequence[int]:
    """The ranks along pp that have this rank's other coordinates."""
    mesh = world.mesh
    return [mesh.moved(world.rank, ("pp",), i) for i in range(mesh["pp"])]
