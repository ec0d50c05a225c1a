"""gc: removes what killed saves have left in a directory of checkpoints, and old steps if asked."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from fmegatron.checkpoint.files import commit
from fmegatron.checkpoint.files.storage import Store
from fmegatron.checkpoint.manage.retention import Keep, Saved, to_delete
from fmegatron.checkpoint.manage.steps import Steps
from fmegatron.checkpoint.tools.listing import Listing, listing

LIVE_SECONDS = 3600.0  # a save that is under way writes something at least so often


@dataclass(frozen=True)
class Action:
    """One thing to do or done. kind: "remove", "finish" (a re-save that was killed between two renames) or "keep"."""

    kind: str
    path: str
    why: str
    nbytes: int


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
    dry_run: bool = False,
    now: float | None = None,
) -> Collected:
    """Remove hidden directories in which nothing has changed for `age` seconds, and old complete steps if asked.

    keep_last: how many of the newest complete steps stay (at least 1); None keeps all. Checkpoints that are not
    complete and have no hidden name are left to a person. The newest complete checkpoint is never removed.
    now: seconds since 1970.  Raises ValueError for a directory without checkpoints.
    """
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"got --keep-last {keep_last}, wanted at least 1: the newest complete checkpoint always stays")
    if not age >= 0:
        raise ValueError(f"got an age of {age} seconds, wanted 0 or more")
    found = listing(directory)
    if not found.is_directory:
        raise ValueError(f"{directory}: got a checkpoint, wanted the directory that holds checkpoints")
    actions = _leftovers(found, age, time.time() if now is None else now)
    if not dry_run:
        for action in actions:
            _do(action)
    if keep_last is not None:
        actions += _old_steps(directory, found, Keep(last=keep_last), dry_run)
    return Collected(found.directory, dry_run, tuple(actions))


def _old_steps(directory: str | os.PathLike | Store, found: Listing, keep: Keep, dry_run: bool) -> list[Action]:
    """Remove the complete steps of a Manager that no rule keeps, but for those that are pinned or being read."""
    steps, actions = Steps(directory), []
    sizes = {c.name: (c.path, c.nbytes) for c in found.checkpoints}
    held = steps.protected()
    for step in to_delete([Saved(s) for s in steps.complete()], keep):
        path, nbytes = sizes.get(steps.name(step), (steps.place(step).text, 0))
        remove = None
        if step not in held and not dry_run and (remove := steps.withdraw(step)) is not None:
            remove(threading.Event())
        if step in held or (not dry_run and remove is None):
            actions.append(Action("keep", path, "pinned, or somebody reads it now", nbytes))
        else:
            actions.append(Action("remove", path, f"step {step} is not among the newest {keep.last}", nbytes))
    return actions


def _leftovers(found: Listing, age: float, now: float) -> list[Action]:
    actions = []
    for left in found.leftovers:
        quiet = now - left.changed
        if left.holds:
            why = f"the only one of {left.of}: a re-save was killed between two renames"
            actions.append(Action("finish" if quiet >= age else "keep", left.path, why, left.nbytes))
        elif quiet < age:
            why = f"changed {max(quiet, 0):.0f} s ago, so a save may be using it (--age)"
            actions.append(Action("keep", left.path, why, left.nbytes))
        else:
            actions.append(Action("remove", left.path, f"{left.what}; unchanged for {quiet:.0f} s", left.nbytes))
    # First of all what is the only one of its name gets it back; then nothing that is removed can be needed.
    return sorted(actions, key=lambda a: a.kind != "finish")


def _do(action: Action) -> None:
    """Remove a hidden directory, or give it back its name."""
    if action.kind == "finish":
        path = finished_name(action.path)
        if (held := commit.resolve(path)) != path:
            os.rename(held, path)
            commit.sync_directory(os.path.dirname(path))
    elif action.kind == "remove":
        commit.remove(action.path)
    if action.kind == "remove" and os.path.lexists(action.path):
        raise OSError(0, f"{action.path} could not be removed")


def finished_name(hidden: str) -> str:
    """The name that a hidden directory stands for: `.NAME.old-TOKEN` -> `NAME`."""
    parent, name = os.path.split(hidden)
    return os.path.join(parent, name[1:].rsplit(".", 1)[0])
