"""Formats of compressed optimizer state, and the ordered table of path patterns that chooses one for each leaf."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fmegatron.optim.contrib.blockwise import Blockwise
from fmegatron.optim.groups import whole_segments
from fmegatron.tree import structure


@dataclass(frozen=True)
class Float32:
    """As it is: 4 bytes per element. For a rule that exempts leaves from the rules after it."""


@dataclass(frozen=True)
class Bfloat16:
    """2 bytes per element, 8 significant bits.

    stochastic: round at random, without bias. To nearest, a moving average whose weight of the new value is below
    1/256 (b2 = 0.999) stands still: each change is less than half a step of bfloat16.
    """

    stochastic: bool = False


@dataclass(frozen=True)
class Remainder:
    """For "master": the 16 bits by which the float32 master differs from its bfloat16 parameter, 2 bytes instead of 4.

    Parameter and remainder are the master, bit for bit (`split_master`). The parameter is the master rounded with ties
    away from zero, where without this format it is rounded with ties to even.
    """


@dataclass(frozen=True)
class NoMaster:
    """For "master": there is none, 0 bytes. The update is added to the bfloat16 parameter and rounded at random, so
    that small updates are not lost but happen now and then (Zamirai et al. 2020, arXiv 2010.06192, section 4)."""


Format = Float32 | Bfloat16 | Blockwise | Remainder | NoMaster
_OF_MASTER = (Remainder, NoMaster)


class FormatTable(NamedTuple):
    """Rules (pattern over full segments of a path, format); the first that matches decides, Float32 without one."""

    rules: tuple[tuple[re.Pattern, Format], ...]

    @staticmethod
    def of(rules: Sequence[tuple[str, Format]]) -> "FormatTable":
        """The table of these rules. ValueError for a pattern that is no regular expression."""
        return FormatTable(tuple((whole_segments(pattern), form) for pattern, form in rules))

    def __call__(self, path: str) -> Format:
        """The format of the leaf at this path of the state."""
        return next((form for pattern, form in self.rules if _is_for(form, path) and pattern.search(path)), Float32())


def require_that_rules_match(rules: Sequence[tuple[str, Format]], paths: list[str]) -> None:
    """ValueError for a rule of a moment that no path of the state has."""
    for pattern, form in rules:
        mine = [path for path in paths if _is_for(form, path)]
        of_master = isinstance(form, _OF_MASTER) or pattern.startswith("master")
        if not of_master and not any(map(whole_segments(pattern).search, mine)):
            near = structure.did_you_mean(
                pattern, [*mine, *sorted({part for path in mine for part in path.split("/")})]
            )
            raise ValueError(
                f"compressed: got the rule {pattern!r}, which matches no path of the state that can be {form}{near},"
                f" wanted a regular expression over full segments of one of: {', '.join(mine[:8])}"
                f"{' …' if mine[8:] else ''}"
            )


def _is_for(form: Format, path: str) -> bool:
    """Whether a leaf at this path can have a format at all: masters have formats of their own."""
    return isinstance(form, Float32) or isinstance(form, _OF_MASTER) == path.startswith("master/")
