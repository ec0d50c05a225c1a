"""Recovery from replicas: the newest complete step over all nodes, transfers between ranks, and the global checkpoint.

Every decision follows from integer tables that all ranks have gathered, so it is the same on all ranks. The loops below
go over lists that only get shorter: a copy that has failed is not tried again.
"""

from __future__ import annotations

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
from fmegatron.checkpoint.files.format import CheckpointError, Leaf
from fmegatron.checkpoint.local.fetch import Wanted, fetch_all, few
from fmegatron.checkpoint.local.pieces import Pieces
from fmegatron.checkpoint.local.shard import Key, Shard, described, digest_rows, layout_rows
from fmegatron.checkpoint.local.shelf import Shelf
from fmegatron.checkpoint.manage.manager import Manager
from fmegatron.checkpoint.reading.read import Started, destinations, finish_reading, rank_of
from fmegatron.checkpoint.reading.request import Leaves, match
from fmegatron.checkpoint.reading.strict import strictness


@dataclass(frozen=True)
class Found:
    """What was restored.

    holders: per rank those that hold its shard, as far as is known; none, if the step was saved under other layouts;
    None: not a local step.
    """

    step: int
    state: Any
    metadata: dict[str, Any]
    holders: list[list[int]] | None


@dataclass
class _Set:
    """One set of one step, as all ranks see it. holders: per shard the ranks that have it, that of its number first."""

    step: int
    id: int
    holders: list[list[int]]

    @property
    def gone(self) -> str:
        """Which shards are nowhere, in words; "" for none."""
        ranks = [rank for rank, holders in enumerate(self.holders) if not holders]
        return f"no node holds the shards of ranks {few(ranks)}" if ranks else ""


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
        layouts: of the leaves that were saved.
        world: all ranks.
        fallback: the global checkpoints, or a function that is called at last.
        device: where the tensors go; None: that of the world.
        portion_bytes: sent at a time.
        notes: what was skipped is added, also when this raises.
    """
    what = "restoring local replicas"

    def prepare():
        paths, leaves, _ = flat_layouts(layouts)
        rank_of(layouts, world, None)
        for path, layout in zip(paths, leaves, strict=True):
            if layout.unreduced:
                raise ValueError(
                    f"{path}: got a layout of a pending sum over {layout.unreduced}, wanted one of a value; ask for a"
                    " layout without unreduced"
                )
        held = are_saved(layouts)
        return layout_rows(list(compress(paths, held)), list(compress(leaves, held)))

    asked = together(world, what, prepare)
    shards, bad, unseen = together(world, what, lambda: shelf.scan(run))
    notes += bad
    sets = _gather(shards, digest_rows(asked), world)
    seen = _seen(fallback, world) if isinstance(fallback, Manager) else _Seen()
    for step, one in _candidates(sets, seen, notes):
        if one is None:
            assert isinstance(fallback, Manager), "nothing else has global steps"
            if got := _restore_global(fallback, step, layouts, device, notes):
                return Found(step, *got, None)
            continue
        mine = {rank: shard for (s, i, rank), shard in shards.items() if (s, i) == (step, one.id)}
        if found := _restore_set(one, mine, layouts, asked, world, device, portion_bytes, notes):
            if isinstance(fallback, Manager):
                try:
                    fallback.rewind(step)  # newer global ones, if there are any, were skipped
                except RuntimeError as error:
                    notes.append(f"the next save into {fallback.directory} may be refused as too old: {error}")
            others = [x for x in sets if x.step == step and x is not one and x.gone]
            notes += [f"skipped a set of the local replicas of step {step}: {x.gone}" for x in others]
            return found
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


def _restore_set(
    one: _Set,
    mine: dict[int, Shard],
    layouts: Any,
    asked: dict[str, Any],
    world: Ranks,
    device: str | torch.device | None,
    portion_bytes: int,
    notes: list[str],
) -> Found | None:
    """What a set holds under these layouts; None on all ranks, with a note, where it has other leaves, or not all.

    asked: `layout_rows` of the layouts.
    """
    what, mode = f"the local replicas of step {one.step}", strictness("error")
    first = next(rank for rank, ranks in enumerate(one.holders) if ranks)
    teller = one.holders[first][0]
    text = world.broadcast_text(mine[first].description() if world.rank == teller else "", teller)
    try:
        saved, rows, metadata = described(text, len(one.holders))
        leaves = {path: Leaf.of(path, x.shape, x.dtype) for path, x in saved.items()}
        request = match(Leaves(what, leaves), layouts, mode)
    except (CheckpointError, ValueError) as error:  # the same on all ranks
        notes.append(f"skipped {error}")
        return None

    def begin() -> tuple[Started, Wanted]:
        tensors, wants = destinations(request, world.rank)
        for i, spec in request.anew.items():
            tensors[i] = tree.init(spec, 0, world.rank)
        return Started(what, mode, request, tensors, []), Wanted([x.target for x in wants], mine, portion_bytes)

    begun, good = None, [list(ranks) for ranks in one.holders]
    while True:
        pieces = Pieces(request, saved, good)
        if not world.minimum(torch.tensor([int(pieces.of(world.rank) is not None)])):
            lost = [rank for rank, ranks in enumerate(one.holders) if ranks and not good[rank]]
            text = f"no good copy of the shards of ranks {few(lost)}" if lost else one.gone
            notes.append(f"skipped {what}: {text}")
            return None
        begun = begun or together(world, f"restoring {what}", begin)
        if fetch_all(begun[1], pieces, good, what, world, notes):
            break
    state = together(world, f"restoring {what}", lambda: finish_reading(begun[0], world, device))
    return Found(one.step, state, metadata, good if rows == asked else [[] for _ in range(world.size)])


def _gather(shards: dict[Key, Shard], asked: int, world: Ranks) -> list[_Set]:
    """All sets that any rank holds something of. asked: digest of the layouts."""
    heads = world.gather_rows(torch.tensor([len(shards), asked])).tolist()
    if len({target for _, target in heads}) > 1:
        raise ValueError(
            "restore_latest: got different layouts on the ranks, wanted the same; give the same tree on all ranks"
        )
    most = max(count for count, _ in heads)
    if most == 0:
        return []
    table = np.zeros((most, 4), np.int64)
    for i, ((step, one, rank), shard) in enumerate(shards.items()):
        table[i] = step, np.uint64(one).view(np.int64), rank, shard.about["world"]
    tables = world.gather_rows(torch.from_numpy(table.reshape(-1))).view(world.size, most, 4).tolist()
    sets: dict[tuple[int, int], _Set] = {}
    for holder, ((count, _), entries) in enumerate(zip(heads, tables, strict=True)):
        for step, one, rank, size in entries[:count]:
            known = sets.setdefault((step, one), _Set(step, one % (1 << 64), [[] for _ in range(size)]))
            known.holders[rank].append(holder)
    for known in sets.values():
        for rank, holders in enumerate(known.holders):
            holders.sort(key=lambda holder, rank=rank: (holder - rank) % world.size)
    return list(sets.values())


def _candidates(sets: list[_Set], seen: _Seen, notes: list[str]) -> list[tuple[int, _Set | None]]:
    """(step, set) to try, None for a global checkpoint, in this order: newest first, local before global, of one step
    the set with the most copies.

    Global steps whose loss or gradient norm was not finite come last. (Local replicas are not made of such.)
    """
    found = [((True, one.step, 1, sum(map(len, one.holders)), one.id), one) for one in sets]
    if seen.error is not None:
        notes.append(f"the global checkpoints cannot be looked at, and may be newer: {seen.error}")
    found += [((step not in seen.not_finite, step, 0, 0, 0), None) for step in seen.steps]
    if seen.not_finite:
        text = ", ".join(map(str, seen.not_finite))
        notes.append(f"global checkpoints whose loss or gradient norm was not finite are tried last: steps {text}")
    return [(key[1], one) for key, one in sorted(found, key=lambda item: item[0], reverse=True)]


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
