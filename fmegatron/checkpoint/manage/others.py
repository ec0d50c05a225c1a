"""The content of a directory without a complete step: perhaps the run that was meant to be resumed."""

from __future__ import annotations

import re

from fmegatron.checkpoint.files.foreign import recognized
from fmegatron.checkpoint.files.leases import STEP
from fmegatron.checkpoint.manage.steps import Steps

_LIKE_STEPS = re.compile(r"(?i)(global_?)?(step|iter|checkpoint|ckpt|epoch)[-_=]?\d+")  # as others name theirs, too
_MOST, _SHOWN = 100, 4  # names that are looked into; that are shown


def others(steps: Steps) -> str | None:
    """What a directory without a complete step holds that looks like checkpoints, as the text of a warning; None for
    nothing: it is empty, or has logs, settings, notes of ours and what killed saves left. Raises OSError.
    """
    found, names = [], steps.store.children()
    if not any(map(STEP.fullmatch, names)):  # else it would be called a directory of checkpoints
        if hint := recognized(steps.store.files(""), run=True):
            found.append(hint)
    found += [f"{steps.place(step).text} without COMPLETE" for step in reversed(steps.incomplete())]
    found += [text for step in reversed(steps.misnamed()) if (text := steps.misnaming(step)) is not None]
    for name in reversed(names[-_MOST:]):
        if STEP.fullmatch(name) and name == steps.name(int(name[5:])):
            continue
        if hint := recognized(steps.store.child(name).files(""), run=True):
            found.append(f"{name}: {hint}")
        elif _LIKE_STEPS.fullmatch(name):
            found.append(f"{name}, which is no name of ours (step_00000100)")
    if not found:
        return None
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"{steps.store.text}: holds no complete step, so a run that begins here begins anew; but there is: "
        f"{'; '.join(found[:_SHOWN])}{more}"
    )


def newer_temporary(steps: Steps, newest: int | None) -> str | None:
    """That a run of before has kept a newer step apart, in `temporary`, as the text of a warning. Raises OSError."""
    apart = Steps(steps.store.child("temporary"))
    if not (found := apart.complete(above=-1 if newest is None else newest)):
        return None
    return (
        f"{apart.store.text}: got step {found[-1]}, a temporary one of an older release, wanted none newer than "
        f"step {newest}, from which a run goes on; move {apart.name(found[-1])} to {steps.store.text}, or remove it"
    )
