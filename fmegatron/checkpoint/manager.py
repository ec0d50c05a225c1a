"""Manager: a directory of steps: the newest complete one, retention, and the way back past damaged ones."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron.checkpoint import commit
from fmegatron.checkpoint.format import CheckpointError
from fmegatron.checkpoint.manifest import read_manifest
from fmegatron.checkpoint.ranks import Alone, Ranks, together
from fmegatron.checkpoint.read import rank_of, read_state
from fmegatron.checkpoint.saving import save
from fmegatron.checkpoint.storage import locate

_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,})\.(tmp|old|gone)-[0-9a-f]+")


@dataclass(frozen=True)
class Manager:
    """The checkpoints of a run: `directory`/step_00000100 and so on.

    keep: how many of the newest complete steps to keep after a save; None keeps all. The state is the directory itself,
    so any number of Managers may look at it; one run saves into it.
    """

    directory: str | os.PathLike
    keep: int | None = None

    def __post_init__(self):
        if self.keep is not None and (not isinstance(self.keep, int) or self.keep < 1):
            raise ValueError(f"Manager: got keep={self.keep!r}, wanted a number of at least 1, or None to keep all")

    def path(self, step: int) -> str:
        """The directory of a step."""
        return os.path.join(os.path.realpath(os.fspath(self.directory)), f"step_{step:08d}")

    def save(
        self,
        step: int,
        state: Any,
        layouts: Any,
        world: Ranks | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> str:
        """`checkpoint.save` under the step's name, then retention; returns the path. Errors are those of `save`.

        Leftovers of killed saves, of any step, are removed first.
        """
        if not isinstance(step, int) or step < 0:
            raise ValueError(
                f"Manager.save: got step {step!r}, wanted a whole number of 0 or more, e.g. int(state.step)"
            )
        lead = world is None or world.rank == 0
        if lead:
            self._clean()
        save(self.path(step), state, layouts, world, metadata, step=step)
        if lead and self.keep is not None:
            steps = self.steps()
            for old in steps[: -self.keep]:
                if old != step:
                    self._delete(self.path(old))
        return self.path(step)

    def steps(self) -> list[int]:
        """All complete steps (saved to their end; what is in them is verified when it is read), in rising order."""
        directory = os.path.realpath(os.fspath(self.directory))
        names = os.listdir(directory) if os.path.isdir(directory) else []
        found = {m[1] for name in names if (m := re.fullmatch(r"\.?(step_\d{8,})(\.old-[0-9a-f]+)?", name))}
        complete = (name for name in found if commit.is_complete(commit.resolve(os.path.join(directory, name))))
        return sorted(int(name.removeprefix("step_")) for name in complete)

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def restore_latest(
        self,
        target_layouts: Any,
        *,
        world: Ranks | None = None,
        rank: int | None = None,
        strict: str = "error",
        cast: bool = False,
        device: str | torch.device | None = None,
    ) -> tuple[int, Any, dict[str, Any]]:
        """(step, state, metadata) of the newest step that is whole on all ranks; the arguments are those of `restore`.

        A step that is damaged is skipped with a warning that says what is wrong. Raises CheckpointError when no step is
        good, ValueError when the target does not fit a good one.
        """
        ranks, rank, skipped = world or Alone(), rank_of(target_layouts, world, rank), []
        steps = ranks.broadcast_text(",".join(map(str, reversed(self.steps()))))  # all ranks go by what rank 0 sees
        for step in map(int, filter(None, steps.split(","))):
            path, unfit, damaged, result = self.path(step), None, None, None
            try:
                metadata = read_manifest(locate(path)).metadata
                result = step, read_state(path, target_layouts, rank, strict, cast, device), metadata
            except CheckpointError as error:
                damaged = error
            except Exception as error:
                unfit = error
            together(ranks, f"restoring the checkpoint {path}", lambda error=unfit: _raise(error))
            try:
                together(ranks, f"restoring the checkpoint {path}", lambda error=damaged: _raise(error))
                return result
            except (CheckpointError, RuntimeError) as error:
                skipped.append(f"step {step}: {error}")
                warnings.warn(f"skipped the checkpoint of {skipped[-1]}", RuntimeWarning, stacklevel=2)
        if not skipped:
            raise CheckpointError(
                f"{os.fspath(self.directory)}: holds no complete checkpoint (step_00000000 and so on);"
                " check the directory, or start a new run"
            )
        raise CheckpointError(f"{os.fspath(self.directory)}: no good checkpoint:\n  " + "\n  ".join(skipped))

    def _clean(self) -> None:
        """Remove what killed saves and deletions left; finish a re-save that was killed between its two renames."""
        directory = os.path.realpath(os.fspath(self.directory))
        for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
            if not (m := _HIDDEN.fullmatch(name)):
                continue
            path = os.path.join(directory, m[1])
            if m[2] != "gone" and (found := commit.resolve(path)) != path:
                os.rename(found, path)
            commit.remove(os.path.join(directory, name))

    def _delete(self, path: str) -> None:
        gone = commit.renamed_away(path)
        commit.sync_directory(os.path.dirname(path))
        commit.remove(gone)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
