"""The first load of a run: its own newest step, and before there is one, any other checkpoint."""

from __future__ import annotations

from typing import Any, Unpack

from fmegatron.checkpoint.dicts.values import own_metadata
from fmegatron.checkpoint.manage.manager import Manager
from fmegatron.checkpoint.reading.read import Asked, RestoreOptions, restore_save
from fmegatron.checkpoint.reading.snapshot import Saved
from fmegatron.tree import structure


def start(
    manager: Manager,
    source: Saved,
    target: structure.Tree = None,
    *,
    rank: int | None = None,
    **options: Unpack[RestoreOptions],
) -> tuple[int, Any, dict[str, Any]]:
    """(step, state, metadata) of a run's newest step, as `Manager.restore_latest`; before its first, from `source`.

        step, state, _ = checkpoint.start(manager, interop.source("llama"), layouts, rules=rules)

    All ranks of the Manager call it. The step is 0 where the state comes from the source.

    Args:
        manager: of the run.
        source: a checkpoint, also of another system (`fmegatron.interop.source`).
        target: as `checkpoint.restore`, for both.
        rank: as there.
        options: those of `checkpoint.restore`, for the source alone (rules, prefix, strict, initial, cast, read); where
            the run's own step is taken, only its device.

    Raises as `Manager.restore_latest` and `checkpoint.restore`.
    """
    if manager.latest() is not None:
        return manager.restore_latest(target, rank=rank, device=options.get("device"))
    asked, others = Asked.split(options)
    found = restore_save(source, target, asked, world=manager.world, rank=rank, **others)
    found.warn(stacklevel=3)
    return 0, found.state, own_metadata(found.source.metadata)
