"""The replica directory of a node: its shards, which of them are complete, and which may be deleted.

step_00000100.rank_00003.SAVE       the shard of rank 3 in a save of step 100 (16 hex digits, the same on all ranks): a
                                    checkpoint (see files/commit.py)
.abandoned                          training went on from an older step than the newest here: a save may go back once
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from fmegatron.checkpoint.files.folder import FolderStore
from fmegatron.checkpoint.files.format import CheckpointError
from fmegatron.checkpoint.files.leases import Watch, alive, saving_note, step_name
from fmegatron.checkpoint.files.saved import SavedAgain
from fmegatron.checkpoint.files.trees import make_directories
from fmegatron.checkpoint.local.shard import Key, Shard, open_shard, parse_name, shard_name
from fmegatron.checkpoint.manage.retention import Keep, Saved, to_delete
from fmegatron.files import disk

_ABANDONED = ".abandoned"
_SAVING = re.compile(re.escape(saving_note("?", "?")).replace(r"\?", ".+"))


@dataclass(frozen=True)
class Shelf:
    """One directory, shared by the ranks of a node or not. It need not exist before `prepare`."""

    path: str

    @property
    def store(self) -> FolderStore:
        """The directory as a place of checkpoints."""
        return FolderStore(self.path)

    def keys(self) -> dict[Key, FolderStore]:
        """(step, save, rank) -> place of all shards here, by name, damaged ones too, but for what is being written or
        deleted. Raises OSError if the directory cannot be seen."""
        places = {key: self.store.child(name) for name in self.store.children() if (key := parse_name(name))}
        return {key: place for key, place in places.items() if _is_shard(place)}

    def newest(self) -> int:
        """The newest step here by name, -1 when there is none."""
        return max((step for step, _, _ in self.keys()), default=-1)

    def scan(self, run: str) -> tuple[dict[Key, Shard], list[str], bool]:
        """The shards whose manifests are intact and match their names; and what is wrong with the others.

        The last value: whether the directory itself cannot be looked at, so that it is not known what is in it.
        """
        found, notes, times = {}, [], {}
        try:
            keys = self.keys()
        except OSError as error:
            return {}, [f"{self.path}: cannot be read ({error.strerror})"], True
        for key, place in keys.items():
            try:
                if disk.is_link(place.path):
                    raise CheckpointError(f"{place.path}: cannot be read: it is a link, wanted a directory")
                shard = open_shard(place)
                if shard.about["run"] != run:
                    raise CheckpointError(
                        f"{place.path}: belongs to the run {shard.about['run']!r:.60}, not to {run!r}"
                    )
                step, _, rank = shard.key
                if (step, rank) != (key[0], key[2]):
                    raise CheckpointError(f"{place.path}: holds another shard: {step_name(step)}.rank_{rank:05d}")
                at = place.saved_at() or 0.0
                if at >= times.get(shard.key, 0.0):  # a set that was stored again, as copies of it were damaged
                    found[shard.key], times[shard.key] = shard, at
            except OSError as error:
                notes.append(f"{place.path}: cannot be read ({error.strerror or error})")
            except (CheckpointError, SavedAgain) as error:
                notes.append(str(error))
        return found, notes, False

    def prepare(self, step: int) -> None:
        """Make the directory ready for a save: remove what dead saves have left.

        Raises ValueError if it holds newer steps, or if another save into it is under way.
        """
        make_directories(self.path)
        notes = self.store.notes()
        savers = [note for note in notes.names() if _SAVING.fullmatch(note)]
        for note in savers:
            # Of this node: one that is not seen to live is of an earlier boot or container of the run.
            if (holder := alive(notes, note, Watch())) is not None and holder.sure:
                raise ValueError(
                    f"{os.path.join(self.path, note)}: got a save while another one is under way ({holder}), wanted one"
                    " at a time; wait for its result(), and give every run its own name"
                )
        for note in savers:
            notes.remove(note)
        for last in (*[False] * 8, True):
            try:
                self.store.clean(".*", (), Watch())
                break
            except FileNotFoundError:  # another rank of the node is removing the same
                if last:
                    raise
        notes.clean()
        newest = self.newest()
        if newest > step and notes.read(_ABANDONED) is None:
            raise ValueError(
                f"{self.path}: got step {step} to save, wanted {newest} or more, as step {newest} is here already;"
                " to go on from an older step, restore it by restore_latest, or remove the directory"
            )

    def place(self, step: int, rank: int, save_id: int) -> FolderStore:
        """Where the shard of a rank is."""
        return self.store.child(shard_name(step, rank, save_id))

    def retain(self, step: int, save_id: int, keep: int) -> None:
        """After a save on which all ranks agreed: keep it and the newest `keep - 1` older steps; warns if it cannot."""
        keys = self.keys()
        dropped = to_delete([Saved(s) for s in {step, *(s for s, _, _ in keys if s < step)}], Keep(last=keep))
        for (s, one, _), place in keys.items():
            if s > step or s in dropped or (s == step and one != save_id):
                _try(place.path, lambda place=place: remove(place))
        _try(self.path, lambda: self.store.notes().remove(_ABANDONED))

    def restored(self, step: int) -> list[str]:
        """Note that training goes on from `step`: what is newer here may be superseded. Returns what went wrong."""
        try:
            if self.newest() > step:
                self.store.notes().write(_ABANDONED, b"")
        except OSError as error:
            return [f"{self.path}: the next save may be refused as too old ({error.strerror})"]
        return []


def _is_shard(place: FolderStore) -> bool:
    """Whether a place is no mere beginning, or end, of a save. What cannot be looked at is listed."""
    try:
        return place.is_complete() or not place.is_begun() or not place.inside()
    except OSError:
        return True


def remove(place: FolderStore) -> None:
    """Take a shard away in one step, then delete it. Raises OSError, but not for one that is gone."""
    try:
        if disk.is_link(place.path) or disk.is_directory(place.path):
            place.withdraw().delete()
        else:
            os.remove(place.path)
    except FileNotFoundError:
        pass  # another rank of the node was here


def _try(path: str, work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        warnings.warn(f"{path}: could not be removed ({error.strerror})", RuntimeWarning, stacklevel=4)
