"""Stacks: equal layouts whose paths differ in one number (layers/0/w, layers/1/w, ...) share one array.

A model that keeps its layers apart would have a file of each rank for each of them. Where ranks are very many, paths
that differ in one word (adam/m/w, adam/v/w) count, too: there each rank writes a little of every leaf.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from fmegatron.checkpoint.files.format import array_name

LEAST_STACK = 4  # leaves whose paths differ in a number; fewer stay at their own paths
_NUMBER = re.compile(r"(?<![^/.])(?:0|[1-9][0-9]{0,8})(?![^/.])")  # a part of a path, or of a name with dots
_WORD = re.compile(r"[^/]+")


class Entry(NamedTuple):
    """A leaf that has an array.

    kind: leaves of the same may be stacked; None: this one is not.  words: also with one that differs in a word.
    """

    path: str
    kind: Hashable | None
    words: bool = False


def stacked(leaves: Sequence[Entry]) -> dict[int, tuple[str, int, int]]:
    """(name of the array, which of its leaves, how many) by the number of the leaf, of those that are stacked.

    Of several numbers that one counts which most leaves have in common: layers/0/experts/7/w is one of the experts.
    """
    counts = Counter(p.kind for p in leaves)  # of one that is there once no path need be looked at
    several = [(i, p) for i, p in enumerate(leaves) if p.kind is not None and counts[p.kind] > 1]
    chosen = _alike(several, _NUMBER, int, LEAST_STACK)
    inside = {i for members in chosen.values() for _, i in members}
    rest = [(i, p) for i, p in several if p.words and i not in inside]
    return _named(leaves, chosen | _alike(rest, _WORD, str, 2))


def _alike(leaves: list[tuple[int, Entry]], part: re.Pattern, value: Callable[[str], Any], least: int) -> dict:
    """(what the part is, number of the leaf) of each leaf, in order, by what their paths and kinds have in common."""
    sizes: dict[Hashable, int] = {}  # by pattern and kind
    keys: dict[int, list[tuple[Hashable, Any]]] = {}  # of each leaf, beside the part of its path
    for i, p in leaves:
        keys[i] = [((p.path[: m.start()], p.path[m.end() :], p.kind), value(m[0])) for m in part.finditer(p.path)]
        for key, _ in keys[i]:
            sizes[key] = sizes.get(key, 0) + 1
    groups: dict[Hashable, list[tuple[Any, int]]] = {}
    for i, several in keys.items():
        if several:
            key, number = max(several, key=lambda one: sizes[one[0]])
            groups.setdefault(key, []).append((number, i))
    return {key: sorted(members) for key, members in groups.items() if len(members) >= least}


def _named(leaves: Sequence[Entry], chosen: dict) -> dict[int, tuple[str, int, int]]:
    """With a name for each stack: its pattern, or that and a number where another array is in, above or below it."""
    if not chosen:
        return {}
    inside = {i for members in chosen.values() for _, i in members}
    taken = {array_name(p.path) for i, p in enumerate(leaves) if i not in inside}
    above = {folder for name in taken for folder in _folders(name)}
    found = {}
    for (before, after, _), members in chosen.items():
        number, name = 0, array_name(f"{before}*{after}")
        while name in taken or name in above or not taken.isdisjoint(_folders(name)):
            number += 1
            name = array_name(f"{before}*.{number}{after}")
        taken.add(name)
        above.update(_folders(name))
        for k, (_, i) in enumerate(members):
            found[i] = name, k, len(members)
    return found


def _folders(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]
