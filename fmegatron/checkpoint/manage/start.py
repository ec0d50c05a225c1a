"""The first load of a run: its own newest step, and before there is one, any other checkpoint."""

from __future__ import annotations

from typing import Any

from fmegatron import tree
from fmegatron.checkpoint.dicts.values import own_metadata
from fmegatron.checkpoint.manage.manager import Manager
from fmegatron.checkpoint.reading.read import restore_save
from fmegatron.checkpoint.reading.snapshot import Saved


def start(
    manager: Manager, source: Saved, target: tree.Tree = None, *, rank: int | None = None, **options: Any
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
    state, found = restore_save(source, target, world=manager.world, rank=rank, stacklevel=3, **options)
    return 0, state, own_metadata(found.metadata)
