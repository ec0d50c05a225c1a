"""A verdict that comes later than a save reaches back: what was saved since the first update in doubt is not resumed.

Losses are seen at log points, replicas are compared now and then, a rerun takes minutes; checkpoints that were saved
meanwhile may have what the verdict is about. It is written into `doubt.json` of the run before anything ends or goes
back. A start that finds it goes on from the newest good checkpoint of before, or is refused where there is none; its
first save sets aside what is in doubt, and removes the file.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from fmegatron.files import disk, whole
from fmegatron.loop.onlookers import Onlooker
from fmegatron.loop.rerun import good_step

NAME = "doubt.json"


def note(run: Any, first: int, why: str) -> None:
    """What updates from `first` on have made is in doubt, those of the file included. All ranks call it."""
    if run.world.rank == 0:
        found = _read(run)
        first = first if found is None else min(first, found[0])
        text = json.dumps({"first": first, "why": why[:2000]}) + "\n"
        Onlooker(f"the verdict in {run.folder / NAME}")(whole.write_whole, run.folder / NAME, text.encode())


def before(run: Any) -> tuple[bool, int | None]:
    """(whether there is a verdict, the step to go on from where the newest one is in doubt, else None). All ranks call.

    Local replicas, which may be newer, are removed then. RuntimeError on all ranks where that fails, where no good
    checkpoint is left, and where the file cannot be read.
    """
    text = ""
    if run.world.rank == 0:
        try:
            found = _read(run)
            text = "" if found is None else json.dumps(found)
        except ValueError as error:
            text = json.dumps(str(error))
        except OSError as error:
            fix = "wanted a file that can be read; remove it to go on from the newest checkpoint"
            text = json.dumps(f"{run.folder / NAME}: got {error}, {fix}")
    if not (text := run.world.broadcast_text(text)):
        return False, None
    found = json.loads(text)
    if isinstance(found, str):
        raise RuntimeError(found)
    first, why = found
    if (run.manager.latest() or 0) < first and not _has_replicas(run, first):
        return True, None
    good = good_step(run, first)
    if not good and first > 1:
        raise RuntimeError(
            f"{run.folder}: all checkpoints are of updates in doubt, from update {first} on: {why}; wanted one of "
            f"before; begin another run, or, to go on from the newest all the same, remove {run.folder / NAME}"
        )
    if run.local is not None:
        run.local.clear()
    if run.world.rank == 0:
        text = f"{run.folder}: goes on from step {good}, as updates from {first} on are in doubt: {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return True, good


def over(run: Any) -> None:
    """The first save of a start that found a verdict: what was in doubt is set aside."""
    if run.world.rank == 0:
        Onlooker(f"the verdict in {run.folder / NAME}")((run.folder / NAME).unlink, missing_ok=True)


def _has_replicas(run: Any, first: int) -> bool:
    """Whether any node has local replicas of a step in doubt."""
    if run.local is None:
        return False
    steps = run.world.on_all(run.local.steps, f"looking for local replicas in {run.local.shelf.path}")
    return run.world.ask(max(steps, default=0) >= first)()[0]


def _read(run: Any) -> tuple[int, str] | None:
    """(first update in doubt, why); ValueError for a file that is none."""
    path = run.folder / NAME
    try:
        found = json.loads(disk.text_of(path))
        return int(found["first"]), str(found["why"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path}: got {error}, wanted the first update in doubt; remove it to go on from the newest checkpoint"
        ) from error
