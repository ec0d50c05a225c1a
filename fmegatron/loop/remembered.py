"""The states of a source behind each batch, so that a checkpoint has that of the batch that was used.

Batches are read ahead: when update n is saved, the source has given more than batch n. So its state is taken after each
batch, in the thread that reads, and the one that belongs to the update is saved.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from threading import Lock
from typing import Any

import torch

from fmegatron.collectives import World
from fmegatron.data import Source, contract
from fmegatron.tree import structure

_KEPT = 16  # newest states: more than batches are read ahead


class States:
    """A source with a state, for all attempts of a run in this process; `begin` gives what one of them reads."""

    def __init__(self, source: Source):
        self.source, self.lock, self.newest = source, Lock(), 0
        self.first = _text(source, source.state())

    def begin(self, step: int, saved: Any, rank: int, ranks: int, rows: contract.Ranges | None) -> Remembered:
        """The source as it goes on behind `step` updates.

        saved: what `Remembered.of_all` gave for the checkpoint; None: a new run, which begins where the source was when
        it was given. rank, of `ranks`. rows: of this rank, None where they are not known before. ValueError where no
        saved state is one of these rows.
        """
        if saved is None and step:
            raise ValueError(
                f"Run: got a checkpoint of step {step} without a source's state and {type(self.source).__name__}, "
                "which has one, wanted the source that the run began with; give that one, or begin another run"
            )
        found = None if saved is None else _own(saved, rank, ranks, rows)
        text, position = (self.first, 0) if found is None else (json.dumps(found["state"]), found["next"])
        with self.lock:  # what an attempt before is still reading ends first
            self.newest += 1
            self.source.restore(json.loads(text))
            return Remembered(self, self.newest, position, text)


class Remembered(Source):
    """A source whose positions are read in order, one after the other, and whose states are remembered."""

    def __init__(self, of: States, number: int, position: int, text: str):
        self._of, self._number, self._next, self._begin = of, number, position, (text, position)
        self._seen: OrderedDict[int, tuple[contract.Ranges | None, str, int]] = OrderedDict()
        self._rows: contract.Ranges | None = None

    def at(self, position: int) -> structure.Tree:
        return self._read(position, None)

    def rows(self, position: int, ranges: contract.Ranges) -> structure.Tree | None:
        return self._read(position, ranges)

    def describe(self) -> dict[str, Any] | None:
        return self._of.source.describe()

    def state(self) -> structure.Tree | None:
        return self._of.source.state()

    def _read(self, position: int, ranges: contract.Ranges | None) -> structure.Tree | None:
        source = self._of.source
        with self._of.lock:
            if self._number != self._of.newest:
                raise RuntimeError(f"{type(source).__name__}: a later attempt of the run reads it")
            batch = None
            for number in range(min(self._next, position), position + 1):  # positions that are left out are read, too
                batch = source.at(number) if ranges is None else source.rows(number, ranges)
                if batch is None:
                    return None
            self._next, self._rows = position + 1, ranges
            self._seen[position] = ranges, _text(source, source.state()), position + 1
            while len(self._seen) > _KEPT:
                self._seen.popitem(last=False)
            return batch

    def of_all(self, position: int | None, world: World) -> list[dict[str, Any]]:
        """[{"rows", "state", "next"}] of each rank behind the batch of a position (None: where it began), on all ranks;
        all call it. next: the position behind it.

        rows: the ranges of rows that the rank read; None: all of the batch, so that all ranks are in one state.
        """
        rows, text, behind = (self._rows, *self._begin) if position is None else self._seen[position]
        data = json.dumps({"rows": rows, "state": json.loads(text), "next": behind}).encode()
        size = -int(world.minimum(torch.tensor([-len(data)])))
        row = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = world.gather_rows(row.view(torch.int64)).view(torch.uint8)
        return [json.loads(bytes(x.tolist()).rstrip(b"\0")) for x in found]


def _own(saved: list[dict[str, Any]], rank: int, ranks: int, ranges: contract.Ranges | None) -> dict[str, Any]:
    """What was saved of the rows of this rank. One that was read with other rows goes on elsewhere, so it is none."""
    mine = None if ranges is None else [list(x) for x in ranges]
    if len(saved) == ranks and saved[rank]["rows"] in (None, mine):
        return saved[rank]
    fits = [x for x in saved if x["rows"] in (None, mine)]
    if fits and all(x == fits[0] for x in fits):
        return fits[0]
    rows = "; ".join(dict.fromkeys(str(x["rows"]) for x in saved))
    raise ValueError(
        f"Run: got a checkpoint with the states of a source on {len(saved)} ranks, that read the rows {rows}, wanted "
        f"one for the rows {mine} on {ranks} ranks; go on with the mesh of before, or begin with a source "
        "that reads whole batches (no method rows)"
    )


def _text(source: Source, state: Any) -> str:
    """A state as JSON text. ValueError for what does not come back from JSON as it was."""
    try:
        text = json.dumps(state, allow_nan=False)
        if state is not None and _texts_are_keys(state):
            return text
        why = "it had a state before" if state is None else "keys that are no texts come back as texts"
    except (TypeError, ValueError, RecursionError) as error:
        why = str(error)
    raise ValueError(
        f"{type(source).__name__}.state: got {state!r:.80}, wanted a JSON value ({why}); numbers, texts, lists, and "
        "dicts whose keys are texts"
    )


def _texts_are_keys(x: Any) -> bool:
    if isinstance(x, dict):
        return all(isinstance(key, str) and _texts_are_keys(value) for key, value in x.items())
    return not isinstance(x, list | tuple) or all(map(_texts_are_keys, x))
