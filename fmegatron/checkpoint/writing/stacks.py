"""Stacks: equal layouts whose paths differ in one number (layers/0/w, layers/1/w, ...) share one array.

A model that keeps its layers apart would have a file of each rank for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from fmegatron.checkpoint.files.format import array_name

LEAST_STACK = 4  # leaves; fewer stay at their own paths
_NUMBER = re.compile(r"(?<![^/.])(?:0|[1-9][0-9]{0,8})(?![^/.])")  # a part of a path, or of a name with dots


class Entry(NamedTuple):
    """A leaf that has an array. kind: leaves of the same may be stacked; None: this one is not."""

    path: str
    kind: Hashable | None


def stacked(leaves: Sequence[Entry]) -> dict[int, tuple[str, int, int]]:
    """(name of the array, which of its leaves, how many) by the number of the leaf, of those that are stacked.

    Of several numbers that one counts which most leaves have in common: layers/0/experts/7/w is one of the experts.
    """
    sizes: dict[Hashable, int] = {}  # by pattern and kind
    keys: dict[int, list[tuple[Hashable, int]]] = {}  # of each leaf, beside the number in its path
    for i, p in enumerate(leaves):
        if p.kind is not None and (found := list(_NUMBER.finditer(p.path))):
            keys[i] = [((p.path[: m.start()], p.path[m.end() :], p.kind), int(m[0])) for m in found]
            for key, _ in keys[i]:
                sizes[key] = sizes.get(key, 0) + 1
    groups: dict[Hashable, list[tuple[int, int]]] = {}
    for i, several in keys.items():
        key, number = max(several, key=lambda one: sizes[one[0]])
        groups.setdefault(key, []).append((number, i))
    chosen = {key: sorted(members) for key, members in groups.items() if len(members) >= LEAST_STACK}
    return _named(leaves, chosen)


def _named(leaves: Sequence[Entry], chosen: dict) -> dict[int, tuple[str, int, int]]:
    """With a name for each stack: its pattern, or that and a number where another array is in, above or below it."""
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
