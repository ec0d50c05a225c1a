"""Fetches every rank its shard of one set: from its own disk, else from the next holder with an intact copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from fmegatron.checkpoint.background.staging import Portion, portions
from fmegatron.checkpoint.calls.ranks import Ranks
from fmegatron.checkpoint.files.format import CheckpointError, bits, digest
from fmegatron.checkpoint.files.saved import SavedAgain
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.local.shard import Shard
from fmegatron.checkpoint.reading.fetch import Fetch
from fmegatron.checkpoint.writing.plan import LeafPlan
from fmegatron.layout import Box, boxes

_MOST_TEXTS = 8  # failing ranks that are quoted, of maybe thousands


class Plans(Protocol):
    """The plan of the shard of every rank, by rank."""

    def __getitem__(self, rank: int, /) -> Sequence[LeafPlan]: ...


def fetch_set(
    tensors: Sequence[torch.Tensor],
    plans: Plans,
    mine: dict[int, Shard],
    holders: Sequence[Sequence[int]],
    step: int,
    world: Ranks,
    portion_bytes: int,
    notes: list[str],
) -> list[list[int]] | None:
    """Fill this rank's tensors with its shard; per shard the holders that did not fail, or None on all ranks.

    In turn n, the n-th holder of every shard that is still missing sends it: a list that ends, however bad the copies.

    Args:
        tensors: the leaves of this rank's shard, CPU, contiguous.
        plans: by rank, how its shard is cut into portions (`shard_plan`).
        mine: the shards of this set on this node, by rank.
        holders: per shard the ranks that have it, in the order in which they are tried.
        step: for messages.
        world: all ranks.
        portion_bytes: sent at a time.
        notes: what was skipped is added.
    """
    good, missing = [list(h) for h in holders], set(range(world.size))
    for turn in range(max(map(len, holders))):
        pairs = {rank: holders[rank][turn] for rank in sorted(missing)}
        told: list[str] = []
        found = _one_turn(tensors, plans, mine, pairs, world, portion_bytes, told)
        row = torch.tensor([world.rank in missing and not found, bool(told)])
        failed, talks = world.gather_rows(row.long()).T.tolist()
        if any(talks):
            notes += [f"local replicas of step {step}: {text}" for text in tell_all(world, talks, "; ".join(told))]
        missing = {rank for rank, bad in enumerate(failed) if bad}
        for rank in missing:
            good[rank].remove(pairs[rank])
        if not missing:
            return good
        if lost := [rank for rank in sorted(missing) if turn + 1 >= len(holders[rank])]:
            notes.append(f"skipped the local replicas of step {step}: no good copy of the shards of ranks {few(lost)}")
            break
    return None


def few(ranks: Sequence[int]) -> str:
    """The first ranks of a list, for messages."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def tell_all(world: Ranks, talks: Sequence[int], text: str) -> list[str]:
    """The texts of the first few ranks that have something to report (`talks`: not 0), on all ranks."""
    speakers = [rank for rank, flag in enumerate(talks) if flag]
    texts = [f"rank {rank}: {world.broadcast_text(text, rank)}" for rank in speakers[:_MOST_TEXTS]]
    return texts + ([f"and {len(speakers) - _MOST_TEXTS} more ranks"] if len(speakers) > _MOST_TEXTS else [])


def _one_turn(
    tensors: Sequence[torch.Tensor],
    plans: Plans,
    mine: dict[int, Shard],
    pairs: dict[int, int],
    world: Ranks,
    portion_bytes: int,
    told: list[str],
) -> bool:
    """Move the shards of `pairs` (shard -> holder); whether this rank's shard is among them and came in full.

    A sender verifies what it reads; it sends beside each portion whether that was good, and a digest of the portion,
    which the receiver compares.
    """
    rank, source = world.rank, pairs.get(world.rank)
    if source == rank:
        places = [(p, _full(p), x) for p, x in zip(plans[rank], tensors, strict=True)]
        found = _read(mine[rank], places, told)
    else:
        found = source is not None
    cut = {to: portions(plans[to], 0, portion_bytes) for to, holder in pairs.items() if to != holder}
    outgoing = [to for to, holder in pairs.items() if holder == rank and to != rank]
    buffers = {to: torch.empty(max(p.nbytes for p in cut[to]), dtype=torch.uint8) for to in outgoing}
    alive, incoming = set(outgoing), found and source != rank
    buffer = torch.empty(max(p.nbytes for p in cut[rank]) if incoming else 0, dtype=torch.uint8)
    for n in range(max(map(len, cut.values()), default=0)):
        sends, receives = [], []
        for to in [to for to in outgoing if to in alive and n < len(cut[to])]:
            part = buffers[to][: cut[to][n].nbytes]
            if not _read(mine[to], _places(cut[to][n], plans[to], part), told):
                alive.remove(to)
            sends += [(to, torch.tensor([to in alive, digest(part.numpy()) >> 1])), (to, part)]
        head = torch.zeros(2, dtype=torch.int64)
        receiving = incoming and n < len(cut[rank])
        if receiving:
            part = buffer[: cut[rank][n].nbytes]
            assert source is not None, "what comes in has a source"
            receives = [(source, head), (source, part)]
        world.exchange(sends, receives)
        if receiving:
            incoming = found = bool(head[0])
            if found and digest(part.numpy()) >> 1 != int(head[1]):
                told.append(f"a portion of the shard of rank {rank} was altered on its way from rank {source}")
                found = False  # the rest of it comes all the same
            if found:
                for p, box, data in _places(cut[rank][n], plans[rank], part):
                    bits(box.view(tensors[plans[rank].index(p)])).copy_(bits(data))
    return found


Place = tuple[LeafPlan, Box, torch.Tensor]  # a leaf, a box of it, and the memory that holds the box


def _full(p: LeafPlan) -> Box:
    return Box((0,) * len(p.layout.shape), p.layout.shape, 0, boxes.row_major_strides(p.layout.shape))


def _places(portion: Portion, plans: Sequence[LeafPlan], memory: torch.Tensor) -> Iterator[Place]:
    """What is where in the memory of a portion; each box as a view of the local tensor."""
    for slot in portion.slots:
        p = plans[slot.leaf]
        flat = memory[slot.offset : slot.offset + slot.nbytes].view(p.layout.dtype)
        if slot.chunks is None:
            yield p, _full(p), flat.view(p.layout.shape)
            continue
        for (_, box), (_, at) in zip(slot.chunks, slot.staged(), strict=True):
            yield p, box, at.view(flat)


def _read(shard: Shard, places: Sequence[Place] | Iterator[Place], told: list[str]) -> bool:
    """Read boxes of a shard into memory, verified; False, with a note, if that cannot be."""
    try:
        wanted: dict[str, list[Target]] = {}
        for p, box, memory in places:
            if memory.numel():
                wanted.setdefault(p.path, []).append(Target(p.path, box, memory, p.layout.dtype))
        with Fetch(shard.save, True) as fetch:
            for path, targets in wanted.items():
                fetch.add(shard.save.manifest.leaves[path], targets)
        return True
    except (CheckpointError, SavedAgain) as error:
        told.append(str(error))
    except OSError as error:
        told.append(f"{shard.text}: {error}")
    return False
