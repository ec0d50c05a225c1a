"""Tables of torch.distributed.pipelining: its `pipeline_order`, rows of texts such as "0F1", or its CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from fmegatron.step.pipeline.table import Action, Table, checked

__all__ = ["read_torch"]

_KINDS = MappingProxyType(
    {"F": "F", "I": "B", "W": "W", "B": "BW"}
)  # torch's I is the gradient of the input, its B both
_ONE = re.compile(r"(\d+)(F|I|W|B)(\d+)")
_PAIR = re.compile(r"\((\d+F\d+);(\d+[BI]\d+)\)OVERLAP_F_B")
_WEIGHTS = re.compile(r"(\d+)(UNSHARD|REDUCE_GRAD)")
_LEFT_OUT = re.compile(r"\d+RESHARD|\d+(SEND|RECV)_[FB]\d+")


def read_torch(given: str | Mapping[int, Sequence] | Sequence[Sequence], name: str = "torch") -> Table:
    """A table from one of torch.distributed.pipelining, of computation alone or with communication.

    The rank of a stage is that of its row, the number of microbatches the highest there is. UNSHARD becomes G,
    REDUCE_GRAD R; RESHARD, SEND and RECV are left out, for they follow from the rows.

    Args:
        given: the text of a CSV (a line a rank), a schedule's `pipeline_order` (rank to its actions), or rows of texts.
            Empty cells and None are idle time.
        name: of the table.

    Raises ValueError for a cell that cannot be read, and for a table that is wrong (`checked`).
    """
    if isinstance(given, str):
        given = [row for row in csv.reader(given.splitlines()) if row]
    if isinstance(given, Mapping):
        if sorted(given) != list(range(len(given))):
            raise ValueError(f"{name}: got ranks {sorted(given)}, wanted 0 to {len(given) - 1}, each once")
        given = [given[rank] for rank in range(len(given))]
    read = [_row(cells, f"{name}: rank {rank}") for rank, cells in enumerate(given)]
    rows, pairs = tuple(row for row, _ in read), tuple(pairs for _, pairs in read)
    place = _place(rows, name)
    count = max(action.microbatch for row in rows for action in row) + 1
    return checked(Table(rows, place, count, name, pairs if any(pairs) else ()))


def _row(cells: Sequence, where: str) -> tuple[tuple[Action, ...], tuple[int, ...]]:
    """The actions of a rank, and the positions of pairs."""
    row, pairs = list[Action](), list[int]()
    for column, cell in enumerate(cells):
        text = "" if cell is None else str(cell).strip()
        if pair := _PAIR.fullmatch(text):
            pairs.append(len(row))
            row += [_action(pair[1]), _action(pair[2])]
        elif _ONE.fullmatch(text):
            row.append(_action(text))
        elif weights := _WEIGHTS.fullmatch(text):
            row.append(Action("G" if weights[2] == "UNSHARD" else "R", int(weights[1]), 0))
        elif text and not _LEFT_OUT.fullmatch(text):
            raise ValueError(
                f"{where}, cell {column}: got {text!r}, wanted a stage, F, I, W or B, and a microbatch, such as 2F0"
            )
    return tuple(_numbered(row, at) for at in range(len(row))), tuple(pairs)


def _action(text: str) -> Action:
    stage, kind, microbatch = re.split("([A-Z])", text)
    return Action(_KINDS[kind], int(stage), int(microbatch))


def _numbered(row: list[Action], at: int) -> Action:
    """G and R have no microbatch in torch's tables: here that of the next use, or of the last gradient."""
    action = row[at]
    if action.kind not in "GR":
        return action
    others = row[at + 1 :] if action.kind == "G" else row[:at][::-1]
    near = (a.microbatch for a in others if a.stage == action.stage and a.kind not in "GR")
    return replace(action, microbatch=next(near, 0))


def _place(rows: tuple[tuple[Action, ...], ...], name: str) -> tuple[int, ...]:
    """The rank of each stage, by the first row that has it; `checked` refuses a stage in two rows."""
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            ranks.setdefault(action.stage, rank)
    if sorted(ranks) != list(range(len(ranks))) or not ranks:
        raise ValueError(f"{name}: got stages {sorted(ranks)}, wanted 0 to {max(ranks, default=0)}, each once")
    return tuple(ranks[stage] for stage in range(len(ranks)))
