"""gc: removes leftovers of killed saves, steps set aside, and old steps on request, from a directory of checkpoints."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from fmegatron.checkpoint.files import leases, siblings, trees
from fmegatron.checkpoint.files.commit import Remnant, Store
from fmegatron.checkpoint.files.keyvalue import KeyNotes
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.siblings import HIDDEN
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage.retention import Keep, Saved, to_delete
from fmegatron.checkpoint.manage.steps import Steps
from fmegatron.checkpoint.tools.ls import NOTE, Leftover, Listing, listing, remnants
from fmegatron.files import whole

_Todo = tuple["Action", Callable[[], None]]  # what is decided, and what does it
LIVE_SECONDS = 3600.0  # a save that is under way writes something at least so often
_LOOK_S = 5.0  # while others are watched


@dataclass(frozen=True)
class Action:
    """One thing to do or done. kind: "remove", "finish" (a re-save that was killed between two renames) or "keep".

    doubt: it is kept only because its owner runs on another machine, and may live.
    """

    kind: str
    path: str
    why: str
    nbytes: int
    doubt: bool = False


@dataclass(frozen=True)
class Collected:
    """What was found; removed: bytes on disk that were given back (or would be, in a dry run)."""

    directory: str
    dry_run: bool
    actions: tuple[Action, ...]

    @property
    def removed(self) -> int:
        """Bytes of what is removed."""
        return sum(a.nbytes for a in self.actions if a.kind == "remove")

    def to_json(self) -> dict[str, Any]:
        """All by names."""
        return asdict(self) | {"removed": self.removed}


def collect(
    directory: str | os.PathLike | Store,
    *,
    keep_last: int | None = None,
    age: float = LIVE_SECONDS,
    watch: float = 0.0,
    dry_run: bool = False,
) -> Collected:
    """Remove what dead saves left, steps set aside at least `age` seconds ago, and old complete steps if asked.

    Saves under way and notes have owners. What belongs to a process that is gone from this machine goes at once.
    Checkpoints that are not complete, and of no save, are left to a person. Never removed: the newest complete
    checkpoint, and the newest good one (its manifest is readable, and its save did not report that its loss was not
    finite).

    Args:
        directory: of checkpoints.
        keep_last: how many of the newest complete steps stay (at least 1); None keeps all.
        age: seconds, by the clock of the file system, for which nothing may have changed in what has no owner (of older
            versions), so that it goes.
        watch: seconds (at least 90; 0: not at all) for which owners on other machines are watched; what is not renewed
            in that time goes.
        dry_run: decide, and remove nothing.

    Raises ValueError for a directory without checkpoints, OSError for what cannot be looked at or removed.
    """
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"got --keep-last {keep_last}, wanted at least 1: the newest complete checkpoint always stays")
    if not age >= 0:
        raise ValueError(f"got an age of {age} seconds, wanted 0 or more")
    if watch and not watch >= 3 * leases.BEAT_S:
        raise ValueError(f"got --watch {watch} seconds, wanted 0, or {3 * leases.BEAT_S:g} or more")
    found = listing(directory)
    if not found.is_directory:
        raise ValueError(f"{directory}: got a checkpoint, wanted the directory that holds checkpoints")
    actions = _Leftovers(age, watch).act(open_store(directory), found, dry_run)
    if keep_last is not None:
        actions += _old_steps(directory, found, Keep(last=keep_last), dry_run)
    return Collected(found.directory, dry_run, tuple(actions))


def _old_steps(directory: str | os.PathLike | Store, found: Listing, keep: Keep, dry_run: bool) -> list[Action]:
    """Remove the complete steps of a Manager that no rule keeps, but for those that are pinned or being read."""
    steps, actions = Steps(directory), []
    sizes = {c.name: (c.path, c.nbytes) for c in found.checkpoints}
    complete = steps.complete()
    old = to_delete([Saved(s) for s in complete], keep)
    good = next((s for s in reversed(complete) if steps.facts(s).good), None) if old else None
    if not dry_run and old:
        steps.make_durable([s for s in complete if s not in old])
    for step in old:
        path, nbytes = sizes.get(steps.name(step), (steps.place(step).text, 0))
        why = "the newest one that is good" if step == good else steps.why_held(step)
        if why is None and not dry_run:
            removal = steps.withdraw(step)
            why = removal if isinstance(removal, str) else removal(threading.Event())
        if why is not None:
            actions.append(Action("keep", path, why, nbytes))
        else:
            actions.append(Action("remove", path, f"step {step} is not among the newest {keep.last}", nbytes))
    return actions


class _Leftovers:
    """What to do with what saves have left, and with the notes of a directory."""

    def __init__(self, age: float, watch: float):
        self._age, self._watch_s, self._watch = age, watch, leases.Watch(most_s=4 * _LOOK_S)

    def act(self, store: Store, found: Listing, dry_run: bool) -> list[Action]:
        """Decide, watch those of other machines if asked, then do it."""
        end = time.monotonic() + self._watch_s + _LOOK_S
        todo = self._decide(found, store)
        while self._watch_s and any(action.doubt for action, _ in todo) and time.monotonic() < end:
            time.sleep(_LOOK_S)
            todo = self._decide(found, store)
        # First of all what is the only one of its name gets it back; then nothing that is removed can be needed.
        todo.sort(key=lambda pair: pair[0].kind != "finish")
        for action, do in todo:
            if action.kind != "keep" and not dry_run:
                do()
        return [action for action, _ in todo]

    def _decide(self, found: Listing, folder: Store) -> list[_Todo]:
        todo, kept, notes, now = [], set(), folder.notes(), _now(folder)
        saves = {remnant.files.text: remnant for _, remnant in remnants(folder)}
        for left in found.leftovers:
            if left.path in saves:
                token, do = saves[left.path].token, partial(_remove, saves[left.path])
            elif m := HIDDEN.fullmatch(left.name):
                token, do = m[3], partial(_remove_hidden, left)
            else:  # of another process, and gone by now
                continue
            action = self._leftover(left, notes, token, now)
            kept |= {leases.saving_note(left.of, token)} if action.kind == "keep" else set()
            todo.append((action, do))
        for note in notes.names():
            if (m := NOTE.fullmatch(note)) and note not in kept:
                todo += [(action, partial(notes.remove, note)) for action in self._note(folder, note, m[2])]
        return todo

    def _leftover(self, left: Leftover, notes: Notes | KeyNotes, token: str, now: float) -> Action:
        def action(kind: str, why: str, doubt: bool = False) -> Action:
            return Action(kind, left.path, why, left.nbytes, doubt)

        note, hidden = leases.saving_note(left.of, token), HIDDEN.fullmatch(left.name) is not None
        quiet = math.inf if left.changed is None else max(now - left.changed, 0.0)
        if left.kind == "aside" and leases.is_pinned(notes, left.of, token):
            return action("keep", f"{left.what}; {left.of} is pinned")
        owned = left.kind in ("tmp", "old") and notes.read(note) is not None
        if owned and (holder := leases.alive(notes, note, self._watch, self._watch_s or None)):
            return action("keep", _alive(holder, "saves there"), not holder.sure)
        # What has a draft has an owner, who has left a note first; it is gone.
        if not owned and (hidden or left.kind == "aside") and quiet < self._age:
            return action("keep", f"changed {quiet:.0f} s ago, so a save may be using it (--age); {left.what}")
        if left.holds:
            return action("finish", f"the only one of {left.of}: a re-save was killed between two renames")
        gone = owned or (left.kind == "tmp" and not hidden)
        why = "the process that wrote it is gone" if gone else f"unchanged for {quiet:.0f} s"
        return action("remove", f"{left.what}; {why}")

    def _note(self, folder: Store, note: str, kind: str | None) -> list[Action]:
        notes, path = folder.notes(), f"{folder.text}/{note}"
        if kind is None:  # a file before it takes its name
            return [Action("remove", path, "a note that was never finished", 0)] if notes.is_left(note) else []
        if (holder := leases.alive(notes, note, self._watch, self._watch_s or None)) is None:
            return [Action("remove", path, "the note of a process that is gone", 0)]
        return [Action("keep", path, _alive(holder, f"is {kind}"), 0, True)] if not holder.sure else []


def _alive(holder: leases.Holder, what: str) -> str:
    may = "" if holder.sure else ", if it lives: --watch 5m looks whether it does"
    return f"{holder} {what}{may}"


def _now(folder: Store) -> float:
    """The time by the clock that gives the files there their times; our own where nothing can be written."""
    try:
        return folder.notes().now()
    except OSError:
        return time.time()


def _remove(remnant: Remnant) -> None:
    remnant.place.remove(remnant)


def _remove_hidden(left: Leftover) -> None:
    """Remove a hidden directory, or give a checkpoint its name back."""
    parent = os.path.dirname(left.path)
    siblings.finish(os.path.join(parent, left.of))
    trees.remove(left.path)
    whole.sync_directory(parent)
