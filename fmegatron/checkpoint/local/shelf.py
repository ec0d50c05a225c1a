"""The replica directory of a node: its entries, which sets are complete, and which may be deleted.

step_00000100.rank_00003.SET   the shard of rank 3 in the set of step 100 with this id (16 hex digits)
.2-step_...                    being written by rank 2; a leftover if nobody saves
.abandoned                     training went on from an older step than the newest here: a save may go back once
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass

from fmegatron.checkpoint.files.commit import make_directories, sync_directory
from fmegatron.checkpoint.files.format import CheckpointError
from fmegatron.checkpoint.files.look import is_there, names_in
from fmegatron.checkpoint.local.blob import Shard, in_use, read_shard

_NAME = re.compile(r"step_(\d{8,18})\.rank_(\d{5,9})\.([0-9a-f]{16})")
_HIDDEN = re.compile(r"\.\d+-step_\d+\.rank_\d+")
_ABANDONED = ".abandoned"


def shard_name(step: int, rank: int, set_id: int) -> str:
    """The file name of a shard.

    >>> shard_name(100, 3, 0xABC), parse_name("step_00000100.rank_00003.0000000000000abc")
    ('step_00000100.rank_00003.0000000000000abc', (100, 2748, 3))
    """
    return f"step_{step:08d}.rank_{rank:05d}.{set_id:016x}"


def parse_name(name: str) -> tuple[int, int, int] | None:
    """(step, set, rank) of a file name, None for a name that `shard_name` does not make."""
    m = _NAME.fullmatch(name)
    key = (int(m[1]), int(m[3], 16), int(m[2])) if m else None
    return key if key and shard_name(key[0], key[2], key[1]) == name else None


@dataclass(frozen=True)
class Shelf:
    """One directory, shared by the ranks of a node or not. It need not exist before `prepare`."""

    path: str

    def keys(self) -> dict[tuple[int, int, int], str]:
        """(step, set, rank) -> path of all shards here, by name. Raises OSError if the directory cannot be seen."""
        return {key: os.path.join(self.path, name) for name in names_in(self.path) if (key := parse_name(name))}

    def newest(self) -> int:
        """The newest step here by name, -1 when there is none."""
        return max((step for step, _, _ in self.keys()), default=-1)

    def scan(self, run: str) -> tuple[dict[tuple[int, int, int], Shard], list[str], bool]:
        """The shards whose tails are whole and that are what their names say; and what is wrong with the others.

        The last value: whether the directory itself cannot be looked at, so that nobody knows what is in it.
        """
        found, notes = {}, []
        try:
            keys = self.keys()
        except OSError as error:
            return {}, [f"{self.path}: cannot be read ({error.strerror})"], True
        for key, path in keys.items():
            try:
                shard = read_shard(path)
                if shard.header["run"] != run:
                    raise CheckpointError(f"{path}: belongs to the run {shard.header['run']!r:.60}, not to {run!r}")
                if shard.key != key:
                    raise CheckpointError(f"{path}: holds another shard: {shard_name(*_named(shard.key))}")
                found[key] = shard
            except CheckpointError as error:
                notes.append(str(error))
        return found, notes, False

    def prepare(self, step: int) -> None:
        """Make the directory ready for a save: remove leftovers of dead ones.

        Raises ValueError if it holds newer steps, or if another save into it is under way.
        """
        make_directories(self.path)
        newest = self.newest()
        if newest > step and not is_there(os.path.join(self.path, _ABANDONED)):
            raise ValueError(
                f"{self.path}: got step {step} to save, but step {newest} is here already; steps only go up. To go on"
                " from an older step, restore it by restore_latest, or remove the directory"
            )
        for name in names_in(self.path):
            if _HIDDEN.fullmatch(name):
                if in_use(path := os.path.join(self.path, name)):
                    raise ValueError(
                        f"{path}: is being written by another save; wait for its result() before the next one, and give"
                        " every run its own name"
                    )
                _remove(path)

    def hidden(self, writer: int, step: int, rank: int) -> str:
        """The path under which rank `writer` writes the shard of `rank`."""
        return os.path.join(self.path, f".{writer}-step_{step:08d}.rank_{rank:05d}")

    def final(self, step: int, rank: int, set_id: int) -> str:
        """The path of a finished shard."""
        return os.path.join(self.path, shard_name(step, rank, set_id))

    def sync(self) -> None:
        """Make the names durable."""
        sync_directory(self.path)

    def retain(self, step: int, set_id: int, keep: int) -> None:
        """After a save on which all ranks agreed: keep it and the newest `keep - 1` older steps; warns if it cannot."""
        keys = self.keys()
        older = sorted({s for s, _, _ in keys if s < step}, reverse=True)[: keep - 1]
        for (s, one, _), path in keys.items():
            if s not in older and (s, one) != (step, set_id):
                _remove(path)
        _remove(os.path.join(self.path, _ABANDONED))

    def restored(self, step: int) -> list[str]:
        """Note that training goes on from `step`: what is newer here may be superseded. Returns what went wrong."""
        try:
            if self.newest() > step:
                with open(os.path.join(self.path, _ABANDONED), "wb"):
                    pass
        except OSError as error:
            return [f"{self.path}: the next save may be refused as too old ({error.strerror})"]
        return []


def _named(key: tuple[int, int, int]) -> tuple[int, int, int]:
    step, set_id, rank = key
    return step, rank, set_id


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except FileNotFoundError:
        pass  # another rank of the node was here
    except OSError as error:
        warnings.warn(f"{path}: could not be removed ({error.strerror})", RuntimeWarning, stacklevel=3)
