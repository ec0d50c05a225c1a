"""Strictness: leaves that only the target or only the checkpoint has are reported, or refused.

unexpected: asked for, but not stored.  missing: stored, but not asked for.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree

from fmegatron.tree import structure


@dataclass(frozen=True)
class Strictness:
    """What is done about unexpected and about missing leaves: "raise", "log", "return" or "ignore"."""

    unexpected: str
    missing: str

    @property
    def returns(self) -> bool:
        """Whether restore returns (state, missing, unexpected)."""
        return "return" in (self.unexpected, self.missing)


MODES = types.MappingProxyType(
    {
        "error": Strictness("raise", "raise"),
        "subset": Strictness("raise", "ignore"),
        "raise_all": Strictness("raise", "raise"),
        "raise_unexpected": Strictness("raise", "ignore"),
        # Assumed, not compared: an unexpected leaf is found when it is read, and is then an error as well.
        "assume_ok_unexpected": Strictness("raise", "ignore"),
        "log_all": Strictness("log", "log"),
        "log_unexpected": Strictness("log", "ignore"),
        "return_all": Strictness("return", "return"),
        "return_unexpected": Strictness("return", "ignore"),
        "ignore_all": Strictness("ignore", "ignore"),
    }
)


def strictness(name: str) -> Strictness:
    """The strictness of this name. Raises ValueError for an unknown one."""
    if not isinstance(name, str) or name not in MODES:
        near = structure.did_you_mean(name, list(MODES)) if isinstance(name, str) else ""
        raise ValueError(f"strict: got {name!r}, wanted one of {', '.join(map(repr, MODES))}{near}")
    return MODES[name]


@dataclass(frozen=True)
class Difference:
    """Paths of leaves that are stored but not asked for, and asked for but not stored."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def complaints(difference: Difference, mode: Strictness) -> list[str]:
    """One line for each leaf, or kind of leaf, that this mode refuses."""
    found = []
    if mode.unexpected == "raise":
        found += [
            f"{path}: not in the checkpoint{near(path, difference)}; rename it, map it by a rule, or leave it out of"
            " the target and make it anew"
            for path in difference.unexpected
        ]
    if mode.missing == "raise" and difference.missing:
        found.append(
            f"stored but not asked for: {listed(difference.missing, 5)}; name them in the target, drop them by a rule,"
            " or pass strict='subset'"
        )
    return found


def near(path: str, difference: Difference) -> str:
    """' (did you mean ...?)' with stored leaves that are not asked for."""
    return structure.did_you_mean(path, list(difference.missing))


def warn(difference: Difference, mode: Strictness, where: str, from_initial: bool, stacklevel: int = 2) -> None:
    """One RuntimeWarning for each kind of leaf that this mode logs, with every path."""
    if mode.unexpected == "log" and difference.unexpected:
        what = "taken from `initial`" if from_initial else "left out"
        lines = "".join(f"\n  {path}{near(path, difference)}" for path in difference.unexpected)
        text = f"{where}: {len(difference.unexpected)} leaves are not in the checkpoint and were {what}:{lines}"
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
    if mode.missing == "log" and difference.missing:
        lines = "".join(f"\n  {path}" for path in difference.missing)
        text = f"{where}: {len(difference.missing)} stored leaves were not asked for and not read:{lines}"
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)


def warn_unread(unread: Sequence[str], where: str, stacklevel: int = 2) -> None:
    """One RuntimeWarning that names what is stored beside arrays and is no plain value."""
    if unread:
        text = (
            f"{where}: {len(unread)} stored objects are no plain values, and were not read: {listed(unread, 10)};"
            " `python -m fmegatron.interop dcp-to-fmegatron SRC DST` makes leaves of the tensors inside of objects"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)


def listed(paths: Sequence[str], most: int) -> str:
    """The first paths, and how many more there are."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(path if len(path) <= 100 else f"{path[:80]}...{path[-17:]}" for path in paths[:most]) + more


# ---- a tree without some of its leaves


class _Absent:
    """Stands for a leaf that is left out, until the tree is built."""


def can_be_left_out(spec: optree.PyTreeSpec) -> list[bool]:
    """For each leaf of a tree whether it is an item of a dict, so that there can be a tree without it."""
    return [bool(len(path)) and isinstance(path[-1], optree.MappingEntry) for path in spec.accessors()]


def unflatten_some(spec: optree.PyTreeSpec, leaves: Sequence[Any], left_out: Sequence[int]) -> Any:
    """The tree of this spec without the leaves of these numbers, which are items of dicts; dicts may become empty."""
    if not left_out:
        return structure.unflatten(spec, leaves)
    gone = set(left_out)
    return _without(structure.unflatten(spec, [_Absent() if i in gone else x for i, x in enumerate(leaves)]))


def _without(node: Any) -> Any:
    if isinstance(node, dict):
        kept = copy.copy(node)
        for key, value in node.items():
            if isinstance(value, _Absent):
                del kept[key]
            else:
                kept[key] = _without(value)
        return kept
    below = optree.tree_leaves(node, is_leaf=lambda x: isinstance(x, dict))
    if len(below) == 1 and below[0] is node:
        return node
    return optree.tree_map(_without, node, is_leaf=lambda x: isinstance(x, dict))
