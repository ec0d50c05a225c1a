"""The content of a directory without a complete step: perhaps the run that was meant to be resumed."""

from __future__ import annotations

import re

from fmegatron.checkpoint.files.foreign import recognized
from fmegatron.checkpoint.files.leases import STEP
from fmegatron.checkpoint.manage.steps import Steps

_LIKE_STEPS = re.compile(r"(?i)(global_?)?(step|iter|checkpoint|ckpt|epoch)[-_=]?\d+")  # as others name theirs, too
_MOST, _SHOWN = 100, 4  # names that are looked into; that are shown


def others(both: tuple[Steps, Steps]) -> str | None:
    """What a directory without a complete step holds that looks like checkpoints, as the text of a warning; None for
    nothing: it is empty, or has logs, settings, notes of ours and what killed saves left. Raises OSError.

    both: the lasting and the temporary steps.
    """
    lasting, found = both[0], []
    names = lasting.store.children()
    if not any(map(STEP.fullmatch, names)):  # else it would be called a directory of checkpoints
        if hint := recognized(lasting.store.files(""), run=True):
            found.append(hint)
    found += [f"{of.place(step).text} without COMPLETE" for of in both for step in reversed(of.incomplete())]
    found += [text for of in both for step in reversed(of.misnamed()) if (text := of.misnaming(step)) is not None]
    for name in reversed(names[-_MOST:]):
        if STEP.fullmatch(name) and name == lasting.name(int(name[5:])) or lasting.store.child(name) == both[1].store:
            continue
        if hint := recognized(lasting.store.child(name).files(""), run=True):
            found.append(f"{name}: {hint}")
        elif _LIKE_STEPS.fullmatch(name):
            found.append(f"{name}, which is no name of ours (step_00000100)")
    if not found:
        return None
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"{lasting.store.text}: holds no complete step, so a run that begins here begins anew; but there is: "
        f"{'; '.join(found[:_SHOWN])}{more}"
    )
