"""The stages of a pipeline, how many blocks each holds: balanced, by hand, or in Megatron's layout strings."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Stages", "balanced", "counted", "read_layout", "read_stages"]

_MOST = 10_000  # letters and stages of a layout: more is a slip in a number


@dataclass(frozen=True)
class Stages:
    """What each stage holds, in the order of the forward. The embedding is on the first, norm and head on the last.

    sizes[stage]: how many blocks; 0 is possible (a stage of the head alone).
    mtp[i]: the stage of the i-th module that predicts further tokens; (): all of them on the last stage.

    Raises ValueError for no stage, a negative size, a stage of `mtp` that is not there or before the last block.
    """

    sizes: tuple[int, ...]
    mtp: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.sizes or min(self.sizes) < 0:
            raise ValueError(f"stages: got sizes {self.sizes}, wanted one or more of 0 or more blocks")
        last = max((stage for stage, size in enumerate(self.sizes) if size), default=0)
        for stage in self.mtp:
            if not last <= stage < len(self.sizes):
                raise ValueError(
                    f"stages: got mtp on stage {stage}, wanted {last} (that of the last block) or behind it"
                )

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return sum(self.sizes)

    @property
    def begins(self) -> tuple[int, ...]:
        """The number of the first block of each stage; of a stage without any, that of the next block."""
        return (0, *itertools.accumulate(self.sizes[:-1]))

    def __str__(self) -> str:
        return ",".join(map(str, self.sizes))


def read_stages(text: str, blocks: int, mtp: int = 0, where: str = "stages") -> Stages:
    """Stages as text: a number of blocks for each, such as "3,4,4,1", or a layout of Megatron (`read_layout`).

    Args:
        text: what was written.
        blocks: how many blocks there are.
        mtp: how many modules predict further tokens.
        where: the name of the option, for errors.

    Raises ValueError, with the place in the text, for what cannot be read; and for another number of blocks.
    """
    if re.search(r"[^\d,\s]", text):
        return read_layout(text, blocks, mtp, where)
    sizes, at = [], 0
    for part in text.split(","):
        if not part.strip():
            raise ValueError(
                f"{where}: got {text!r} with no number at position {at}, wanted one for each stage: 3,4,4,1"
            )
        if not part.strip().isdecimal():
            raise ValueError(
                f"{where}: got {part.strip()!r} at position {at}, wanted one number between commas: 3,4,4,1"
            )
        sizes.append(int(part))
        at += len(part) + 1
    return _counted(Stages(tuple(sizes)), text, blocks, where)


def counted(text: str, where: str = "stages") -> tuple[int, int]:
    """(blocks, modules that predict further tokens) that stages as text have. ValueError for what cannot be read."""
    if re.search(r"[^\d,\s]", text):
        letters = [letter for letter, _ in _letters(text, where)]
        return letters.count("t"), letters.count("m")
    return sum(int(part) for part in text.split(",") if part.strip().isdecimal()), 0


def _counted(stages: Stages, text: str, blocks: int, where: str) -> Stages:
    if stages.blocks != blocks:
        raise ValueError(f"{where}: got {text!r}, which are {stages.blocks} blocks, wanted the model's {blocks}")
    return stages


def read_layout(text: str, blocks: int, mtp: int = 0, where: str = "stages") -> Stages:
    """Stages as Megatron's --pipeline-model-parallel-layout has them: "Et*3|(tt|)*29,m|L".

    E is the embedding, t a block, m a module that predicts further tokens, L the head and its loss; | parts stages, x*3
    and (...)*3 repeat, commas mean nothing. A stage may be empty. Stages are in the order of the forward.

    Raises ValueError, with the place in the text, for what cannot be read, E or L that are not the first and the last,
    and another number of blocks or modules than the model has.
    """
    letters = list(_letters(text, where))
    if len(letters) > _MOST:
        raise ValueError(f"{where}: got {len(letters)} letters and stages, wanted {_MOST} or fewer; see the numbers")
    stage, sizes, found, seen = 0, [0], list[int](), list[str]()
    for letter, at in letters:
        here = f"{letter} at position {at} of {text!r}"
        if letter == "|":
            stage += 1
            sizes.append(0)
            continue
        if "L" in seen:
            raise ValueError(f"{where}: got {here}, wanted nothing behind L; the loss is last")
        if not seen and (letter != "E" or stage):
            raise ValueError(f"{where}: got {here}, wanted E in the first stage before it; the embedding is first")
        if letter == "E" and seen:
            raise ValueError(f"{where}: got {here}, wanted E once; remove it")
        if letter == "t":
            if "m" in seen:
                raise ValueError(f"{where}: got {here}, wanted every t before m; move it")
            sizes[stage] += 1
        if letter == "m":
            found.append(stage)
        seen.append(letter)
    if not seen or seen[-1] != "L" or not sizes:
        raise ValueError(f"{where}: got {text!r} without an L at its end, wanted one; write it in the last stage")
    if letters[-1][0] == "|":
        raise ValueError(
            f"{where}: got | at position {letters[-1][1]} of {text!r}, wanted L in the last stage; remove it"
        )
    if len(found) != mtp:
        raise ValueError(f"{where}: got {text!r}, which has {len(found)} m, wanted the model's {mtp}")
    return _counted(Stages(tuple(sizes), tuple(found)), text, blocks, where)


def _letters(text: str, where: str) -> Iterator[tuple[str, int]]:
    """(letter or |, its position) in order, what is repeated as often as it is."""
    group: list[tuple[str, int]] | None = None  # letters of an open bracket
    at = opened = 0

    def wrong(got: str, wanted: str) -> ValueError:
        return ValueError(f"{where}: got {got} at position {at} of {text!r}, wanted {wanted}")

    while at < len(text):
        letter = text[at]
        found: list[tuple[str, int]] | None = None
        if letter in "EtmL|":
            found = [(letter, at)]
        elif letter == "(":
            if group is not None:
                raise wrong("(", f"the bracket of position {opened} closed before it; brackets are not nested")
            group, opened = [], at
        elif letter == ")":
            if group is None:
                raise wrong(")", "a ( before it")
            found, group = group, None
        elif letter != ",":
            raise wrong(repr(letter), "E, t, m, L, | between stages, a comma, or a number behind x* or (...)*")
        at += 1
        if found is None:
            continue
        count = re.match(r"\*(\d*)", text[at:])
        if count is None and letter == ")":
            raise wrong(repr(text[at]) if at < len(text) else "the end", "* and a number behind a bracket: (tt|)*4")
        times = 1
        if count is not None:
            if not count[1] or not 0 < int(count[1]) <= _MOST:
                raise wrong(repr(count[0]), f"* and a number of 1 to {_MOST}")
            times = int(count[1])
            at += len(count[0])
        if len(found) * times > _MOST:
            raise wrong(f"{len(found) * times} letters", f"{_MOST} or fewer")
        if group is None:
            yield from found * times
        else:
            group += found * times
    if group is not None:
        at = opened
        raise wrong("( that is not closed", ")* and a number behind it")


def balanced(blocks: Sequence[float], place: Sequence[int], first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """How many blocks each stage holds, one or more, so that ranks and stages have about the same to do.

    The most of a stage is the least possible; then, where ranks hold several stages, the most of a rank is made smaller
    as long as moving a block does so. A rank's steps take as long as all of its stages, whatever the order.

    Args:
        blocks: the cost of each block, in any unit.
        place: the rank of each stage.
        first: the cost of the embedding, on the first stage, in the same unit.
        last: of norm, head and loss, on the last stage.

    Raises ValueError where there are more stages than blocks, and for a negative cost.
    """
    stages, ends = len(place), (first, last)
    if len(blocks) < stages or not stages:
        raise ValueError(
            f"stages: got {len(blocks)} blocks and {stages} stages, wanted a block or more for each stage; take fewer "
            "stages, or write sizes such as 1,1,0"
        )
    if min(*blocks, *ends) < 0 or not all(map(math.isfinite, (*blocks, *ends))):
        raise ValueError(
            f"stages: got costs {min(*blocks, *ends)} to {max(*blocks, *ends)}, wanted finite ones of 0 or more"
        )
    upto = (0.0, *itertools.accumulate(blocks))

    def cost(stage: int, begin: int, end: int) -> float:
        return upto[end] - upto[begin] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    def key(sizes: tuple[int, ...]) -> tuple[float, float, float]:
        """What is to be small: the most of a rank, of a stage, and how uneven stages are."""
        ranks, at, each = [0.0] * (max(place) + 1), 0, []
        for stage, size in enumerate(sizes):
            each.append(cost(stage, at, at + size))
            ranks[place[stage]] += each[-1]
            at += size
        return round(max(ranks), 9), round(max(each), 9), round(sum(x * x for x in each), 6)

    best = _least_squares(len(blocks), stages, cost, _least_most(len(blocks), stages, cost))
    while len(set(place)) < stages:
        moved = (
            tuple(size + (stage == to) - (stage == at) for stage, size in enumerate(best))
            for at, to in itertools.permutations(range(stages), 2)
            if best[at] > 1
        )
        better = min(moved, key=key, default=best)
        if key(better) >= key(best):
            break
        best = better
    return best


def _least_most(blocks: int, stages: int, cost) -> float:
    """The least that the dearest of some stages can cost."""
    row = [cost(0, 0, end) if end else math.inf for end in range(blocks + 1)]
    for stage in range(1, stages):
        row = [
            min((max(row[begin], cost(stage, begin, end)) for begin in range(stage, end)), default=math.inf)
            for end in range(blocks + 1)
        ]
    return row[blocks]


def _least_squares(blocks: int, stages: int, cost, most: float) -> tuple[int, ...]:
    """Of the divisions whose stages cost no more than `most`, one with the least sum of squares."""

    def square(stage: int, begin: int, end: int) -> float:
        value = cost(stage, begin, end)
        return value * value if value <= most * (1 + 1e-9) else math.inf

    row: list[tuple[float, tuple[int, ...]]] = [
        (square(0, 0, end) if end else math.inf, (end,)) for end in range(blocks + 1)
    ]
    for stage in range(1, stages):
        row = [
            min(
                (
                    (row[begin][0] + square(stage, begin, end), (*row[begin][1], end - begin))
                    for begin in range(stage, end)
                ),
                default=(math.inf, ()),
            )
            for end in range(blocks + 1)
        ]
    return row[blocks][1]
