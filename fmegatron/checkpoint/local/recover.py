"""Recovery from replicas: the newest complete step over all nodes, transfers between ranks, and the global checkpoint.

Every decision follows from integer tables that all ranks have gathered, so it is the same on all ranks. A (step,
source) is tried once at most: the loops below go over lists that only get shorter.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import torch

from fmegatron import tree
from fmegatron.checkpoint.calls.arguments import are_saved, flat_layouts
from fmegatron.checkpoint.calls.ranks import Ranks, together
from fmegatron.checkpoint.files.format import CheckpointError, digest
from fmegatron.checkpoint.files.manifest import to_json_text
from fmegatron.checkpoint.local.fetch import fetch_set, few
from fmegatron.checkpoint.local.shard import Key, Shard, layout_rows, shard_plan
from fmegatron.checkpoint.local.shelf import Shelf
from fmegatron.checkpoint.manage.manager import Manager
from fmegatron.checkpoint.reading.read import rank_of
from fmegatron.checkpoint.writing.plan import LeafPlan
from fmegatron.layout import Layout
from fmegatron.tree import ArraySpec, labels, structure


@dataclass(frozen=True)
class Found:
    """What was restored. holders: per shard the ranks whose copies are not known to be bad; None: not a local step."""

    step: int
    state: Any
    metadata: dict[str, Any]
    holders: list[list[int]] | None


@dataclass
class _Set:
    """One set of one step, as all ranks see it. holders: per shard the ranks that have it, own first."""

    step: int
    id: int
    holders: list[list[int]]
    fits: bool = True


@dataclass(frozen=True)
class _Seen:
    """The global checkpoints, as rank 0 sees them. error: why it cannot."""

    steps: list[int] = field(default_factory=list)
    not_finite: list[int] = field(default_factory=list)
    error: str | None = None


def recover(
    shelf: Shelf,
    run: str,
    layouts: Any,
    world: Ranks,
    fallback: Manager | Callable[..., tuple[int, Any, dict[str, Any]]] | None,
    device: str | torch.device | None,
    portion_bytes: int,
    notes: list[str],
) -> Found:
    """`LocalReplicas.restore_latest`.

    Args:
        shelf: the directory of this node.
        run: shards of other runs do not count.
        layouts: as they were saved.
        world: all ranks.
        fallback: the global checkpoints, or a function that is called at last.
        device: where the tensors go; None: that of the world.
        portion_bytes: sent at a time.
        notes: what was skipped is added, also when this raises.
    """
    what = "restoring local replicas"

    def prepare():
        paths, leaves, spec = flat_layouts(layouts)
        rank_of(layouts, world, None)
        for path, layout in zip(paths, leaves, strict=True):
            if layout.unreduced:
                raise ValueError(
                    f"{path}: got a layout of a pending sum over {layout.unreduced}, wanted one of a value; ask for a"
                    " layout without unreduced"
                )
        held = are_saved(layouts)
        return list(compress(paths, held)), list(compress(leaves, held)), spec

    paths, leaves, spec = together(world, what, prepare)
    shards, bad, unseen = together(world, what, lambda: shelf.scan(run))
    notes += bad
    sets = _gather(shards, paths, leaves, world)
    tensors: list[torch.Tensor] = []
    seen = _seen(fallback, world) if isinstance(fallback, Manager) else _Seen()
    for step, kind, one in _candidates(sets, seen, notes):
        if kind == "global":
            tensors.clear()
            assert isinstance(fallback, Manager), "nothing else has global steps"
            if got := _restore_global(fallback, step, layouts, device, notes):
                return Found(step, *got, None)
            continue
        assert one is not None, "a local candidate is a set"

        def allocate():
            if not tensors:  # once; another try fills the same memory
                tensors.extend(torch.empty(x.local_shape(world.rank), dtype=x.dtype) for x in leaves)

        together(world, what, allocate)
        mine = {rank: shard for (s, i, rank), shard in shards.items() if (s, i) == (step, one.id)}
        plans = _Plans(paths, leaves)
        if holders := fetch_set(tensors, plans, mine, one.holders, step, world, portion_bytes, notes):
            metadata = json.loads(world.broadcast_text(_metadata(mine), one.holders[0][0]))
            together(world, what, lambda: _move(tensors, leaves, device or world.device))
            if isinstance(fallback, Manager):
                try:
                    fallback.rewind(step)  # newer global ones, if there are any, were skipped
                except RuntimeError as error:
                    notes.append(f"the next save into {fallback.directory} may be refused as too old: {error}")
            found = iter(tensors)
            placed = [tree.init(x, 0, world.rank, device or world.device) if isinstance(x, ArraySpec) and not x.saved
                      else next(found) for x in structure.leaves(layouts)]  # fmt: skip
            placed = [labels.labelled(x, of) for x, of in zip(placed, flat_layouts(layouts)[1], strict=True)]
            return Found(step, structure.unflatten(spec, placed), metadata, holders)
    tensors.clear()
    if fallback is not None and not isinstance(fallback, Manager):
        step, state, meta = fallback(layouts)
        return Found(step, state, meta, None)
    more = "no global checkpoint either" if fallback is not None else "pass fallback=Manager(...)"
    told = "".join(f"\n  {note}" for note in notes[:20])
    text = f"no step of which every rank's shard is whole; {more}{told}"
    if not world.minimum(torch.tensor([int(not unseen and seen.error is None)])):
        hidden = "There may be one in what cannot be looked at; mend that, do not start anew"
        raise RuntimeError(f"{shelf.path}: {text}\n  {hidden}")
    raise CheckpointError(f"{shelf.path}: {text}")


class _Plans:
    """The plan of the shard of every rank, made when it is asked for: few of maybe thousands are."""

    def __init__(self, paths: list[str], leaves: list[Layout]):
        self._made = functools.cache(lambda rank: shard_plan(paths, leaves, rank))

    def __getitem__(self, rank: int, /) -> tuple[LeafPlan, ...]:
        return self._made(rank)


def _metadata(mine: dict[int, Shard]) -> str:
    """The user's metadata as JSON; the same in all shards of a set."""
    return next((to_json_text(shard.metadata) for shard in mine.values()), "{}")


def _gather(shards: dict[Key, Shard], paths: list[str], leaves: list[Layout], world: Ranks) -> list[_Set]:
    """All sets that any rank holds something of."""
    rows = layout_rows(paths, leaves)
    wanted = digest(to_json_text(rows).encode()) >> 1  # 63 bits: a positive int64
    heads = world.gather_rows(torch.tensor([len(shards), wanted])).tolist()
    if len({target for _, target in heads}) > 1:
        raise ValueError(
            "restore_latest: got different layouts on the ranks, wanted the same; give the same tree on all ranks"
        )
    most = max(count for count, _ in heads)
    if most == 0:
        return []
    table = np.zeros((most, 4), np.int64)
    for i, ((step, one, rank), shard) in enumerate(shards.items()):
        table[i] = step, np.uint64(one).view(np.int64), rank, shard.fits(rows, paths, leaves, world.size)
    tables = world.gather_rows(torch.from_numpy(table.reshape(-1))).view(world.size, most, 4).tolist()
    sets: dict[tuple[int, int], _Set] = {}
    for holder, ((count, _), entries) in enumerate(zip(heads, tables, strict=True)):
        for step, one, rank, fits in entries[:count]:
            known = sets.setdefault((step, one), _Set(step, one % (1 << 64), [[] for _ in range(world.size)]))
            if fits:
                known.holders[rank].append(holder)
            else:
                known.fits = False
    for known in sets.values():
        for rank, holders in enumerate(known.holders):
            holders.sort(key=lambda holder, rank=rank: (holder - rank) % world.size)
    return list(sets.values())


def _candidates(sets: list[_Set], seen: _Seen, notes: list[str]) -> list[tuple[int, str, _Set | None]]:
    """What to try, in this order: newest first, local before global, of one step the set with the most copies.

    Global steps whose loss or gradient norm was not finite come last. (Local replicas are not made of such.)
    """
    found = []
    for one in sets:
        missing = [rank for rank, holders in enumerate(one.holders) if not holders]
        if not one.fits:
            notes.append(
                f"skipped the local replicas of step {one.step}: they have other layouts, or another number of ranks,"
                " than asked for; local replicas do not reshard, the global checkpoint does"
            )
        elif missing:
            notes.append(
                f"skipped the local replicas of step {one.step}: no node holds the shards of ranks {few(missing)}"
            )
        else:
            found.append(((True, one.step, 1, sum(map(len, one.holders)), one.id), one))
    if seen.error is not None:
        notes.append(f"the global checkpoints cannot be looked at, and may be newer: {seen.error}")
    for step in seen.steps:
        found.append(((step not in seen.not_finite, step, 0, 0, 0), None))
    if seen.not_finite:
        text = ", ".join(map(str, seen.not_finite))
        notes.append(f"global checkpoints whose loss or gradient norm was not finite are tried last: steps {text}")
    return [
        (key[1], "local" if one else "global", one)
        for key, one in sorted(found, key=lambda item: item[0], reverse=True)
    ]


def _move(tensors: list[torch.Tensor], layouts: list[Layout], device: str | torch.device) -> None:
    for i, x in enumerate(tensors):  # one by one, so that host memory is given back on the way
        tensors[i] = labels.in_memory(x, layouts[i], device)


def _seen(manager: Manager, world: Ranks) -> _Seen:
    """What rank 0 sees, by which all ranks go."""
    text = ""
    if world.rank == 0:
        try:
            steps = manager.steps()
            text = json.dumps([steps, [step for step in steps if manager.finite(step) is False], None])
        except Exception as error:  # the other ranks wait for a text; local replicas may still do
            text = json.dumps([[], [], f"{error}"])
    return _Seen(*json.loads(world.broadcast_text(text)))


def _restore_global(
    manager: Manager, step: int, layouts: Any, device: Any, notes: list[str]
) -> tuple[Any, dict[str, Any]] | None:
    """(state, metadata); None, with a note, for a damaged checkpoint. Raises on all ranks what is no damage."""
    try:
        return manager.restore(step, layouts, device=device)
    except CheckpointError as error:  # on all ranks, then
        notes.append(f"skipped the global checkpoint of step {step}: {error}")
        return None
