"""Restore of the newest step that is intact on all ranks; damaged steps are reported and skipped.

Rank 0 chooses which step is tried, so that ranks whose view of the directory is late do the same as the others; during
the attempt rank 0 holds a lease on it, so that no process deletes it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron.checkpoint.calls.arguments import flat_layouts
from fmegatron.checkpoint.calls.ranks import Ranks, together
from fmegatron.checkpoint.dicts.values import own_metadata
from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.format import CheckpointError
from fmegatron.checkpoint.files.saved import SavedAgain
from fmegatron.checkpoint.manage.others import others
from fmegatron.checkpoint.manage.progress import progress, read_from_now
from fmegatron.checkpoint.manage.report import state_bytes
from fmegatron.checkpoint.manage.steps import Steps
from fmegatron.checkpoint.reading.descriptions import describe
from fmegatron.checkpoint.reading.read import Asked, rank_of, restore_save
from fmegatron.checkpoint.reading.target import Wanted, target_of

_LOOKS = 3  # how often the directory is listed again because steps were deleted before they could be read
_GOOD, _FAILED, _DAMAGED, _UNFIT = range(4)  # the result of an attempt on one rank; the gravest decides


@dataclass(frozen=True)
class Found:
    """A step that was restored: this rank's state, the user's metadata, and the bytes of the state of all ranks."""

    step: int
    state: Any
    metadata: dict[str, Any]
    nbytes: int


@dataclass(frozen=True)
class Search:
    """What to restore, and from where: the steps of a directory. options: those of `restore`.

    prefer_finite: steps whose loss or gradient norm was not finite come last.
    """

    steps: Steps
    target: Any
    world: Ranks
    rank: int | None
    options: dict[str, Any]
    progress: bool | None = None
    prefer_finite: bool = True

    def newest(self) -> Found:
        """The newest good step. Raises CheckpointError when there is none, ValueError when a good one does not fit."""
        where, skipped, untried, warned = self.steps.store.text, [], self._untried(), False
        while True:
            with ExitStack() as held:
                choice = self._agreed(lambda: next(untried, None), held)
                if choice is None:
                    break
                step, doubt = choice
                if doubt is not None:
                    self._warn(doubt)
                    warned = True
                    continue
                found, problem = self._attempt(step)
                if found is not None:
                    return found
            skipped.append(f"step {step}: {problem}")
            self._warn(f"skipped the checkpoint of {skipped[-1]}")
        if not skipped:
            if (found := self._others()) and not warned:  # who takes the error for "nothing there" reads this
                self._warn(found)
            raise CheckpointError(
                f"{where}: holds no complete checkpoint (step_00000000 and so on);"
                f" check the directory, or start a new run{f'. {found}' if found else ''}"
            )
        raise CheckpointError(f"{where}: no good checkpoint:\n  " + "\n  ".join(skipped))

    def one(self, step: int) -> Found:
        """This step. Errors are those of `restore`."""
        of = self.steps

        def choose():
            if of.place(step).is_complete() and (held := of.other(step)) is not None:
                raise CheckpointError(
                    f"{of.place(step).text}: got a checkpoint of step {held}, wanted one of step {step};"
                    f" {of.mend(step, held)}, or restore it by its path (`checkpoint.restore`)"
                )
            return step, None

        with ExitStack() as held:
            self._agreed(choose, held)
            found, problem = self._attempt(step)
        if found is None:
            assert problem is not None, "what was not found has a reason"
            raise problem
        return found

    def _untried(self) -> Iterator[tuple[int, str | None]]:
        """(step, None) to try, newest first, or why it is not tried yet; ends."""
        of, tried, later = self.steps, set[int](), list[int]()
        for step in of.misnamed():
            tried.add(step)
            if (wrong := of.misnaming(step)) is not None:
                yield step, f"skipped {wrong}"
        for _ in range(_LOOKS):
            fresh = {step for step in of.complete() if step not in tried}
            broken = {step for step in of.incomplete() if step not in tried}
            for step in sorted(fresh | broken, reverse=True):
                tried.add(step)
                if step not in fresh:
                    why = "has no COMPLETE: it is damaged, or a copy that is not finished"
                    yield step, f"skipped the checkpoint of step {step}: {of.place(step).text} {why}"
                elif self.prefer_finite and of.facts(step).finite is False:
                    later.append(step)
                    why = "loss or gradient norm of its step was not finite; prefer_finite=False restores it"
                    yield step, f"skipped the checkpoint of step {step}: {why}"
                else:
                    yield step, None
            # Steps that were deleted before we held them: then there are newer ones by now.
            if all(of.place(step).is_complete() for step in fresh):
                break
        for step in later:
            why = "nothing better is left; loss or gradient norm of its step was not finite"
            yield step, f"trying the checkpoint of step {step} after all: {why}"
            yield step, None

    def _others(self) -> str:
        """What the directory holds instead of complete steps, as rank 0 sees it, on all ranks; "" for nothing."""
        ranks, what = self.world, f"looking for checkpoints in {self.steps.store.text}"
        text = together(ranks, what, lambda: others(self.steps) if ranks.rank == 0 else None)
        return ranks.broadcast_text(text or "")

    def _agreed(
        self, choose: Callable[[], tuple[int, str | None] | None], held: ExitStack
    ) -> tuple[int, str | None] | None:
        """What rank 0 chooses, on all ranks; rank 0 holds a lease on it until `held` is left."""
        ranks = self.world

        def work():
            self._rank()
            if ranks.rank == 0 and (choice := choose()) is not None:
                held.enter_context(leases.reading(self.steps.notes, self.steps.name(choice[0])))
                return choice

        choice = together(ranks, f"looking for checkpoints in {self.steps.store.text}", work)
        choice = json.loads(ranks.broadcast_text(json.dumps(choice)))
        return None if choice is None else tuple(choice)

    def _warn(self, text: str) -> None:
        """Rank 0 warns; where warnings are errors, that ends all ranks."""

        def work():
            if self.world.rank == 0:
                warnings.warn(text, RuntimeWarning, stacklevel=7)  # at who called the Manager

        together(self.world, f"restoring from {self.steps.store.text}", work)

    def _wanted(self) -> Wanted | None:
        return target_of(self.target, self.options.get("into"), self.world, self.rank)

    def _rank(self) -> int:
        """The rank whose tensors are asked for. Raises ValueError for a wrong request."""
        return rank_of(self.target, self.world, self.rank) if self._wanted() is None else 0

    def _bytes(self, place: Store) -> int:
        """Bytes of the tensors of this rank."""
        wanted = self._wanted()
        if wanted is None:
            return local_bytes(self.target, self._rank())
        if wanted.like is not None:
            return local_bytes(wanted.layouts, 0)
        try:
            return describe(place).total_bytes
        except (CheckpointError, OSError, SavedAgain):
            return 0  # the restore reports it

    def _attempt(self, step: int) -> tuple[Found | None, CheckpointError | None]:
        """The step, or, on all ranks, what is damaged. Any other error of any rank is raised on all of them."""
        ranks, place, kind, error, found = self.world, self.steps.place(step), _GOOD, None, None
        size = self._bytes(place)
        bar = self.progress if ranks.rank == 0 else False
        try:
            with progress(f"restoring step {step}", size, read_from_now(), bar):
                asked, others = Asked.split(self.options)
                found = restore_save(place, self.target, asked, world=self.world, rank=self.rank, **others)
                found.warn(stacklevel=6)
        except BaseException as e:  # a rank that is interrupted must report it to the others, too
            damaged, unfit = isinstance(e, CheckpointError), isinstance(e, ValueError) or not isinstance(e, Exception)
            kind, error = _DAMAGED if damaged else _UNFIT if unfit else _FAILED, e
        # The first rank of each kind of error, size for none.
        firsts = ranks.minimum(torch.tensor([ranks.rank if kind == k else ranks.size for k in range(_UNFIT + 1)]))
        gravest = max(k for k in range(_UNFIT + 1) if firsts[k] < ranks.size)
        if gravest == _GOOD:
            assert found is not None, "no rank has an error"
            nbytes = size if self._wanted() is not None else state_bytes(self.target)
            return Found(step, found.state, own_metadata(found.source.metadata), nbytes), None
        first = int(firsts[gravest])  # speaks for all; what was raised on a rank itself stays
        message = ranks.broadcast_text(f"{error}", first)
        if gravest == _DAMAGED:
            return None, CheckpointError(message)
        if error is not None and kind == gravest:
            raise error
        raise RuntimeError(f"restoring the checkpoint {place.text} failed on rank {first}: {message}") from error


def local_bytes(target_layouts: Any, rank: int) -> int:
    """Bytes of the tensors of one rank."""
    return sum(layout.local_nbytes(rank) for layout in flat_layouts(target_layouts)[1])
