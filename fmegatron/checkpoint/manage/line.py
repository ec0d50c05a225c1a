"""The lineage of a run: the step it resumed from, and the newer steps that were set aside.

A directory of steps holds one line: each save is newer than those before. A run that goes on from an older step leaves
the newer ones behind; its first save sets them aside (files/commit.py), so that no later run resumes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.manage.steps import Steps

_READERS_S = 60.0  # to wait for those who read a step that is set aside

Choice = tuple[int, bool]  # a step, and whether it is a temporary one


def newest_first(both: tuple[Steps, Steps], above: int = -1) -> list[Choice]:
    """(step, temporary) of all complete steps, newest first; of one that is there twice, the lasting one first.

    above: only steps with a larger number.
    """
    return in_order((step, temporary) for temporary in (False, True) for step in both[temporary].complete(above))


def not_complete(both: tuple[Steps, Steps], above: int = -1) -> list[Choice]:
    """The same of those that are there without a marker (`Steps.incomplete`)."""
    return in_order((step, temporary) for temporary in (False, True) for step in both[temporary].incomplete(above))


def in_order(choices: Iterable[Choice]) -> list[Choice]:
    """Newest first; of a step that is there twice, the lasting one first."""
    return sorted(choices, key=lambda choice: (choice[0], not choice[1]), reverse=True)


def newest_good(both: tuple[Steps, Steps]) -> Choice | None:
    """The newest step that a run can go on from, as far as manifests show. Raises OSError if one cannot be read."""
    return next((choice for choice in newest_first(both) if both[choice[1]].facts(choice[0]).good), None)


@dataclass(frozen=True)
class _Back:
    """The run goes on from step `to`; `left` is what was newer. sure: it reported that; else it may only have read.

    unseen: why the newer steps could not be listed.
    """

    to: int
    left: frozenset[Choice]
    sure: bool
    unseen: OSError | None = None


class Line:
    """What one Manager knows of the line that it saves (on rank 0, which decides)."""

    def __init__(self, both: tuple[Steps, Steps]):
        self._both, self._back, self._saved = both, None, False

    def went_back(self, to: int, pending: Collection[Choice], sure: bool) -> None:
        """Training goes on from this step. pending: saves that are under way.

        Where newer steps cannot be looked at, a later save that finds some is refused; a restore is not.
        """
        left, unseen = {choice for choice in pending if choice[0] > to}, None
        try:
            left.update(newest_first(self._both, to), not_complete(self._both, to))
        except OSError as error:
            unseen = error
        self._back = _Back(to, frozenset(left), sure, unseen)

    def begin(self, step: int, temporary: bool, finite: bool) -> str | None:
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
        of = self._both[temporary]
        if (held := of.other(step)) is not None:  # a copy under a wrong name: what it holds stays
            at = of.set_aside(step, _READERS_S)
            wrong = f"{of.place(step).text}: held step {held}, and not {step}, so it was set aside: {at}"
        else:
            wrong = None
        if not finite and (step, temporary) not in left and of.place(step).is_complete() and of.facts(step).good:
            call = f"delete({step}, temporary=True)" if temporary else f"delete({step})"
            raise ValueError(
                f"{of.place(step).text}: got a save with finite=False, wanted none in the place of the good one there;"
                f" nothing was saved. Go on from the good one (restore_latest), or call Manager.{call} first"
            )
        aside = self._set_aside(left)
        self._back, self._saved = None, True
        if not aside:
            return wrong
        steps = ", ".join(str(old) for old, _ in sorted(left))
        text = f"training went on from an older step, so steps {steps} were set aside: {', '.join(aside)}"
        return f"{of.store.text}: {text}" + (f"; {wrong}" if wrong else "")

    def _unseen(self, step: int, error: OSError) -> OSError | None:
        """The error of a look at a step that may be newer, with what can be done about it; None for any other place."""
        at = str(error.filename)
        names = [m for m in map(leases.STEP.fullmatch, at.split("/")) if m]
        if not names:
            return None
        temporary, name = at.startswith(f"{self._both[1].store.text}/"), names[-1]
        call = f"delete({int(name[1])}{', temporary=True' if temporary else ''})"
        text = f"what {name[0]} holds cannot be seen, so step {step} is not saved; mend that, or give it up: Manager."
        return OSError(error.errno, f"{error.strerror}; {text}{call}", at)

    def _left_behind(self, step: int) -> list[Choice]:
        newer, back, aside = newest_first(self._both, step), self._back, []
        # A restore by number may only have looked at an old step, unless the run has just begun, or goes back now.
        if back is not None and (back.sure or not self._saved or newer or step in {s for s, _ in back.left}):
            there = in_order(newest_first(self._both, back.to) + not_complete(self._both, back.to))
            aside = [choice for choice in there if choice in back.left]
        if newer := [choice for choice in newer if choice not in aside]:
            names = ", ".join(str(s) for s, _ in newer[:5]) + ("..." if len(newer) > 5 else "")
            after = "" if back is None else f", saved after step {back.to} was restored: does another run save here?"
            if back is not None and back.unseen is not None:
                after = f"; when step {back.to} was restored they could not be seen: {back.unseen}"
            raise ValueError(
                f"{self._both[0].store.text}: got step {step} to save, wanted one above the newest: it holds newer ones"
                f" ({names}{after}); to go on from an older step, restore it with this Manager, or call its"
                " rewind(STEP): then newer ones are set aside. Or save into another directory"
            )
        return aside

    def _set_aside(self, choices: Collection[Choice]) -> list[str]:
        """Take these from the list; returns where their files are. Raises ValueError for one that is read, OSError."""
        return [self._both[temporary].set_aside(step, _READERS_S) for step, temporary in sorted(choices)]
