"""What a trace has read besides its arguments: functions, numbers and other plain values of the user's code.

A graph is what the code was when it was traced. A cell that defines a helper, a number or a function again changes the
code and not the graph, so what was read is compared in every call, and a difference traces again.

A call compares identities, as nearly all are the same object; what is another one is looked at (`read_values`), and is
the one to be compared from then on where it is equal. What a trace itself changes is no read that could be compared:
what was set first in a trace (a table that is made when it is needed) is compared with what the trace left; what a
second trace has changed again, and a list to which a trace appends and from which it reads, is named once and left.
"""

from __future__ import annotations

import operator
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from fmegatron.collectives import known_ranks
from fmegatron.step.lines import warn_users
from fmegatron.step.read_tokens import PACKAGES, is_users
from fmegatron.step.read_values import Known, Read, Walk

__all__ = ["Seen", "Watched", "Watching"]

_HELD = operator.attrgetter("cell_contents")
_CODE = operator.attrgetter("__code__")
_DEFAULTS = operator.attrgetter("__defaults__")
_BETWEEN = object()
_SURE = (types.FunctionType, types.BuiltinFunctionType, type, str, type(None))


class Seen:
    """The codes that run while something is traced: on the stack at each op that is recorded (`step.tracing` walks it
    for the line anyway). A profiler would see those without an op too and doubles the time of a trace; these are found
    by who reads them. codes: of the user's, by id, with their globals; those of cached traces inside are theirs, too.
    """

    def __init__(self, top: types.CodeType, before: Walk):
        self.codes: dict[int, tuple[types.CodeType, dict]] = {}
        self.before: Walk | None = before
        self.drawn = _generators()
        self._known: dict[int, types.CodeType] = {}
        self._top = top  # who traces, which no trace inside passes; what is above is no part of what is traced

    def look(self, frame: types.FrameType | None) -> None:
        """Note the functions on the stack from this frame on."""
        known, top = self._known, self._top
        while frame is not None and frame.f_code is not top:
            code = frame.f_code
            if id(code) not in known:
                known[id(code)] = code
                if is_users(code):
                    self.codes[id(code)] = code, frame.f_globals
            frame = frame.f_back


class Watching:
    """What the traces of one function have read, of all its signatures.

    seen = watching.begin()
    traced = trace(fn, args, reads=seen)
    watched = watching.end(seen)  # what is compared in calls
    """

    def __init__(self, fn: Callable, name: str):
        self.fn, self.name = fn, name
        self.own: set[str] = set()  # keys of what no call compares
        self._codes: dict[int, tuple[types.CodeType, dict]] = {}  # that no walk reaches by itself
        self._known: Known = {}
        self._grown: set[str] = set()  # dicts to which traces add entries
        self._moved: set[str] = set()  # what one trace has changed
        self._told: set[str] = set()

    def walk(self) -> Walk:
        """What is read now."""
        return Walk(self.fn, self._codes, self._known, self.own, self._grown)

    def begin(self) -> Seen:
        """Who notes what is entered by the trace that whoever calls this begins."""
        return Seen(sys._getframe(1).f_code, self.walk())

    def end(self, seen: Seen, tell: bool = True) -> Watched:
        """What the trace has read. tell: warn, once of each, of what is not compared."""
        self._codes.update(seen.codes)
        before, seen.before = seen.before, None  # the graph keeps who has seen it made
        assert before is not None, "a trace ends once"
        after = self._without_own(before, self.walk())
        for number, (code, _) in seen.codes.items():
            if number in after.reached and not code.co_filename.startswith(PACKAGES):
                del self._codes[number]  # when it is redefined, it is the new one that is reached
        if tell:
            moved = [name for name, old, new in zip(_NAMES, seen.drawn, _generators(), strict=True) if old != new]
            states = before.generators
            moved += [name for key, (name, state) in after.generators.items() if states.get(key, ("", b""))[1] != state]
            self._tell(after, {*moved, *after.drawn})
        watched = Watched(self, after, seen.codes)
        watched.noted_around()
        return watched

    def _without_own(self, before: Walk, after: Walk) -> Walk:
        """What is read behind a trace, without what the trace itself changes."""
        known = len(self.own) + len(self._grown)
        for key, read in after.reads.items():
            old, of = before.reads.get(key), key.removesuffix("[...]")
            if old is not None and old.token != read.token:
                if _has_more(old.token, read.token, ("dict",)):
                    self._grown.add(of)
                elif key in self._moved or _has_more(old.token, read.token, ("list", "deque", "set")):
                    self.own.add(of)
                self._moved.add(key)
        return after if len(self.own) + len(self._grown) == known else self.walk()

    def _tell(self, after: Walk, drawn: set[str]) -> None:
        """Warn of what is read and not compared, and of what is drawn or measured once: when the function is traced."""
        lines = [name for key, name in after.unwatched.items() if key not in self._told]
        self._told.update(after.unwatched)
        if lines:
            warn_users(
                f"{self.name}: reads {', '.join(sorted(set(lines)))}: more than can be compared in every call, so "
                "changes of it are not seen; make it an argument, or a tuple"
            )
        if new := sorted(drawn - self._told):
            self._told.update(new)
            warn_users(
                f"{self.name}: reads {', '.join(new)} when it is traced: what it gives is a constant of the graph, "
                "the same in every call; draw by a key (fmegatron.nn.uniform), or pass the number as a 0-d tensor"
            )


class Watched:
    """What one trace has read, and what it was. codes: that ran in it."""

    def __init__(self, watching: Watching, walk: Walk, codes: dict[int, tuple[types.CodeType, dict]]):
        self._watching, self.codes = watching, codes
        self._keep(walk)

    def noted_around(self) -> None:
        """What is read is read by the trace around, too, where there is one."""
        around = known_ranks.recorded_reads()
        if isinstance(around, Seen):
            around.codes.update(self.codes)

    def _keep(self, walk: Walk) -> None:
        self.reads, self.unwatched = walk.reads, walk.unwatched
        self._sure, self._names = [], []
        for mapping, names in walk.names.values():
            sure = [name for name in names if isinstance(mapping[name], _SURE)]
            rest = [name for name in names if not isinstance(mapping[name], _SURE)]
            self._sure += [(operator.itemgetter(*sure, sure[0]), mapping)] if sure else []
            self._names += [(operator.itemgetter(*rest, rest[0]), mapping)] if rest else []
        self._absent, self._cells, self._functions = walk.absent, walk.cells, walk.functions
        self._with_defaults = [f for f in walk.functions if f.__defaults__]
        self._dicts = [x for x in walk.containers if isinstance(x, dict)]
        self._others = [x for x in walk.containers if not isinstance(x, dict)]
        self._slots, self._arrays = walk.slots, walk.arrays
        self._alike, self._same = self._equal(), self._identical()

    def _equal(self) -> list:
        """What is compared as Python compares: functions, names and codes, which are equal if they are the same."""
        now = []
        for names, mapping in self._sure:
            now += names(mapping)
        now += map(_CODE, self._functions)
        return now

    def _identical(self) -> list:
        """What is compared by identity, as 1, 1.0 and True are equal and give other graphs."""
        now = []
        for names, mapping in self._names:
            now += names(mapping)
        now += map(_HELD, self._cells)
        now += map(_DEFAULTS, self._with_defaults)
        for x in self._others:
            now += x
            now.append(_BETWEEN)
        for x in self._dicts:
            now += x
            now += x.values()
            now.append(_BETWEEN)
        for x, name in self._slots:
            now.append(getattr(x, name))
        return now

    def changed(self) -> str | None:
        """What is no longer as it was, in words; None: nothing. It is meant to be called in every call."""
        try:
            same, now = self._equal() == self._alike, self._identical()
        except (LookupError, ValueError, AttributeError, RuntimeError):  # one of them is gone, or no plain value
            return self._look()
        if not same or len(now) != len(self._same) or not all(map(operator.is_, now, self._same)):
            return self._look()
        for mapping, name in self._absent:
            if name in mapping:
                return f"{name!r} is there, which was not"
        for x, bytes_ in self._arrays:
            if x.tobytes() != bytes_:
                return self._look()
        return None

    def _look(self) -> str | None:
        """The same, slowly; where all is equal, what is there now is compared from now on."""
        walk = self._watching.walk()
        own = self._watching.own
        for key, old in self.reads.items():
            if key.removesuffix("[...]") in own:
                continue
            new = walk.reads.get(key)
            if new is None:
                return f"{old.shown} is gone"
            if new.token != old.token:
                if key.endswith("[...]"):
                    return f"{old.shown} holds other values than before"
                return _difference(old, new)
        self._keep(walk)
        return None


def _difference(old: Read, new: Read) -> str:
    tokens = (old.token, new.token)
    functions = all(isinstance(token, tuple) and token[0] == "function" for token in tokens)
    if functions and old.token[1] == new.token[1]:
        return f"{old.shown} has other defaults"
    if functions:
        return f"{old.shown} has other code"
    if old.words == new.words:
        return f"{old.shown} is {new.words} with other values"
    return f"{old.shown} is {new.words}, was {old.words}"


def _has_more(old: Any, new: Any, kinds: tuple[str, ...]) -> bool:
    """Whether a container of these kinds has what it had, and more. old, new: tokens."""
    if type(old) is not tuple or type(new) is not tuple or old[0] != new[0] or old[0] not in kinds:
        return False
    return len(new[-1]) > len(old[-1]) and all(item in new[-1] for item in old[-1])


_NAMES = ("Python's random", "numpy.random")


def _generators() -> tuple:
    """The states of Python's and numpy's global generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)
