"""The lineage of a run: the step it resumed from, and the newer steps that were set aside.

A directory of steps holds one line: each save is newer than those before. A run that goes on from an older step leaves
the newer ones behind; its first save sets them aside (files/commit.py), so that no later run resumes them.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.manage.steps import Steps

_READERS_S = 60.0  # to wait for those who read a step that is set aside


def newest_good(steps: Steps) -> int | None:
    """The newest step that a run can go on from, as far as manifests show. Raises OSError if one cannot be read."""
    return next((step for step in reversed(steps.complete()) if steps.facts(step).good), None)


@dataclass(frozen=True)
class _Back:
    """The run goes on from step `to`; `left` is what was newer. sure: it reported that; else it may only have read.

    unseen: why the newer steps could not be listed.
    """

    to: int
    left: frozenset[int]
    sure: bool
    unseen: OSError | None = None


class Line:
    """What one Manager knows of the line that it saves (on rank 0, which decides)."""

    def __init__(self, steps: Steps):
        self._steps, self._back, self._saved = steps, None, False

    def went_back(self, to: int, pending: Collection[int], sure: bool) -> None:
        """Training goes on from this step. pending: those that are being saved.

        Where newer steps cannot be looked at, a later save that finds some is refused; a restore is not.
        """
        left, unseen = {step for step in pending if step > to}, None
        try:
            left.update(self._steps.complete(to), self._steps.incomplete(to))
        except OSError as error:
            unseen = error
        self._back = _Back(to, frozenset(left), sure, unseen)

    def begin(self, step: int, finite: bool) -> str | None:
        """A save of this step begins: what it leaves behind is set aside. Returns a warning if that was something.

        finite: False when a rank has reported that it is not. Raises ValueError for a step that is not the newest,
        and for one that is not finite in the place of one that is good; OSError. Then nothing was changed.
        """
        try:
            left = self._left_behind(step)
        except OSError as error:
            if (unseen := self._unseen(step, error)) is None:
                raise
            raise unseen from error
        of = self._steps
        wrong = None
        if (held := of.other(step)) is not None and (
            at := self._set_aside([step])
        ):  # a copy under a wrong name: it stays
            wrong = f"{of.place(step).text}: held step {held}, and not {step}, so it was set aside: {at[0]}"
        if not finite and step not in left and of.place(step).is_complete() and of.facts(step).good:
            raise ValueError(
                f"{of.place(step).text}: got a save with finite=False, wanted none in the place of the good one there;"
                f" nothing was saved. Go on from the good one (restore_latest), or call Manager.delete({step}) first"
            )
        aside = self._set_aside(left)
        self._back, self._saved = None, True
        if not aside:
            return wrong
        steps = ", ".join(map(str, left))
        text = f"training went on from an older step, so steps {steps} were set aside: {', '.join(aside)}"
        return f"{of.store.text}: {text}" + (f"; {wrong}" if wrong else "")

    def _set_aside(self, steps: Collection[int]) -> list[str]:
        """Where their files are; of those that another process has deleted since we looked there is nothing."""
        found = []
        for step in steps:
            with suppress(FileNotFoundError):
                found.append(self._steps.set_aside(step, _READERS_S))
        return found

    def _unseen(self, step: int, error: OSError) -> OSError | None:
        """The error of a look at a step that may be newer, with what can be done about it; None for any other place."""
        at = str(error.filename)
        names = [m for m in map(leases.STEP.fullmatch, at.split("/")) if m]
        if not names:
            return None
        text = f"what {names[-1][0]} holds cannot be seen, so step {step} is not saved; mend that, or give it up"
        return OSError(error.errno, f"{error.strerror}; {text}: Manager.delete({int(names[-1][1])})", at)

    def _left_behind(self, step: int) -> list[int]:
        """Rising."""
        newer, back, aside = self._steps.complete(step), self._back, []
        # A restore by number may only have looked at an old step, unless the run has just begun, or goes back now.
        if back is not None and (back.sure or not self._saved or newer or step in back.left):
            there = {*self._steps.complete(back.to), *self._steps.incomplete(back.to)}
            aside = sorted(there & back.left)
        if newer := [s for s in newer if s not in aside]:
            names = ", ".join(str(s) for s in newer[:-6:-1]) + ("..." if len(newer) > 5 else "")
            after = "" if back is None else f", saved after step {back.to} was restored: does another run save here?"
            if back is not None and back.unseen is not None:
                after = f"; when step {back.to} was restored they could not be seen: {back.unseen}"
            raise ValueError(
                f"{self._steps.store.text}: got step {step} to save, wanted one above the newest: it holds newer ones"
                f" ({names}{after}); to go on from an older step, restore it with this Manager, or call its"
                " rewind(STEP): then newer ones are set aside. Or save into another directory"
            )
        return aside
