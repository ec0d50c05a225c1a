"""Fetches every rank what it wants of one set: from its own disk, else from the next holder with an intact copy.

Who wants what of which shard is known by arithmetic (pieces.py), so only numbers of shards are agreed on, and bytes
travel. A copy that fails is struck from the list of all ranks, which therefore ends.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fmegatron.checkpoint.calls.ranks import Ranks
from fmegatron.checkpoint.files.format import CheckpointError, digest
from fmegatron.checkpoint.files.saved import SavedAgain
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.local.pieces import Piece, Pieces, into_portion, part_of, put
from fmegatron.checkpoint.local.shard import Shard
from fmegatron.checkpoint.reading.fetch import Fetch
from fmegatron.checkpoint.reading.rounds import in_rounds

_MOST_TEXTS = 8  # failing ranks that are quoted, of maybe thousands


@dataclass(frozen=True)
class Wanted:
    """What this rank wants, and has: its targets, the shards of the set on this node by rank, bytes sent at a time."""

    targets: Sequence[Target]
    mine: Mapping[int, Shard]
    portion_bytes: int


def fetch_all(wanted: Wanted, pieces: Pieces, good: list[list[int]], what: str, world: Ranks, notes: list[str]) -> bool:
    """Fill the targets of all ranks; False on all of them where a shard has no good copy left.

    Args:
        wanted: by this rank.
        pieces: which of them are in which shard.
        good: per shard the ranks that hold it, in the order in which they are tried; those that fail are taken out.
        what: for messages.
        world: all ranks.
        notes: what was skipped is added.
    """
    missing = set(pieces.of(world.rank) or ())
    while True:
        holders = {shard: world.rank if world.rank in good[shard] else good[shard][0] for shard in sorted(missing)}
        told: list[str] = []
        missing = _one_turn(wanted, pieces, holders, world, told)
        counts, talks = world.gather_rows(torch.tensor([len(missing), int(bool(told))])).T.tolist()
        if any(talks):
            notes += [f"{what}: {text}" for text in tell_all(world, talks, "; ".join(dict.fromkeys(told)))]
        if not any(counts):
            return True
        failed = _table([(shard, holders[shard]) for shard in missing], world)
        for shard, holder in {(shard, holder) for _, shard, holder in failed}:
            good[shard].remove(holder)
        if not all(good[shard] for _, shard, _ in failed):
            return False


def few(ranks: Sequence[int]) -> str:
    """The first ranks of a list, for messages."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def tell_all(world: Ranks, talks: Sequence[int], text: str) -> list[str]:
    """The texts of the first few ranks that have something to report (`talks`: not 0), on all ranks."""
    speakers = [rank for rank, flag in enumerate(talks) if flag]
    texts = [f"rank {rank}: {world.broadcast_text(text, rank)}" for rank in speakers[:_MOST_TEXTS]]
    return texts + ([f"and {len(speakers) - _MOST_TEXTS} more ranks"] if len(speakers) > _MOST_TEXTS else [])


def _table(rows: Sequence[tuple[int, int]], world: Ranks) -> list[tuple[int, int, int]]:
    """(rank, *row) of the rows of all ranks, sorted."""
    counts = world.gather_rows(torch.tensor([len(rows)])).reshape(-1).tolist()
    if not (most := max(counts)):
        return []
    mine = torch.zeros((most, 2), dtype=torch.int64)
    if rows:
        mine[: len(rows)] = torch.tensor(rows)
    found = world.gather_rows(mine.reshape(-1)).view(world.size, most, 2).tolist()
    return sorted((rank, a, b) for rank, n in enumerate(counts) for a, b in found[rank][:n])


@dataclass
class _Transfer:
    """What one rank gets of one shard. The rest of it is left out once `alive` is false."""

    shard: int
    peer: int
    portions: list[list[Piece]]
    alive: bool = True

    def part(self, n: int) -> torch.Tensor | None:
        """Memory of portion n; None where it does not come."""
        if not self.alive or n >= len(self.portions):
            return None
        return self._buffer[: sum(piece.nbytes for piece in self.portions[n])]

    @functools.cached_property
    def _buffer(self) -> torch.Tensor:
        return torch.empty(max(sum(x.nbytes for x in some) for some in self.portions), dtype=torch.uint8)


def _one_turn(wanted: Wanted, pieces: Pieces, holders: Mapping[int, int], world: Ranks, told: list[str]) -> set[int]:
    """Read, send and receive; which of the shards of `holders` (shard -> who is asked) this rank did not get.

    A sender verifies what it reads; it sends beside each portion whether that was good, and a digest of the portion,
    which the receiver compares.
    """
    rank, mine = world.rank, pieces.of(world.rank) or {}
    table = _table([(shard, holder) for shard, holder in holders.items() if holder != rank], world)
    ends = collections.Counter(end for to, _, holder in table for end in (("to", to), ("from", holder)))
    most = max(1, wanted.portion_bytes // max(ends.values(), default=1))  # so much of each at a time
    failed = {s for s, holder in holders.items() if holder == rank and not _own(wanted, mine[s], s, most, told)}
    outgoing = [_Transfer(s, to, pieces.portions(to, s, most)) for to, s, holder in table if holder == rank]
    incoming = [_Transfer(s, holder, pieces.portions(rank, s, most)) for to, s, holder in table if to == rank]
    for n in range(max((len(one.portions) for one in (*outgoing, *incoming)), default=0)):
        sends, receives, came = [], [], []
        for one in outgoing:
            if (part := one.part(n)) is not None:
                one.alive = read(wanted.mine[one.shard], one.shard, into_portion(one.portions[n], part), told)
                sends += [(one.peer, torch.tensor([one.alive, digest(part.numpy()) >> 1])), (one.peer, part)]
        for one in incoming:
            if (part := one.part(n)) is not None:
                came.append((one, torch.zeros(2, dtype=torch.int64), part))
                receives += [(one.peer, x) for x in came[-1][1:]]
        world.exchange(sends, receives)
        for one, head, part in came:
            one.alive = bool(head[0])
            if one.alive and digest(part.numpy()) >> 1 != int(head[1]):
                told.append(f"a portion of the shard of rank {one.shard} was altered on its way from rank {one.peer}")
                failed.add(one.shard)  # the rest of it comes all the same
            elif not one.alive:
                failed.add(one.shard)
            elif one.shard not in failed:
                for piece, memory in into_portion(one.portions[n], part):
                    put(memory, part_of(wanted.targets[piece.want], piece.box))
    return failed


def _own(wanted: Wanted, pieces: Sequence[Piece], shard: int, most: int, told: list[str]) -> bool:
    """Read what is on this node; what is in another order there than it is wanted, in portions."""
    items = [(piece, part_of(wanted.targets[piece.want], piece.box)) for piece in pieces]
    if not read(wanted.mine[shard], shard, [(piece, view) for piece, view in items if piece.direct(view)], told):
        return False
    others = [block for piece, view in items if not piece.direct(view) for block in piece.cut(most)]
    return all(
        read(wanted.mine[shard], shard, [(x, part_of(wanted.targets[x.want], x.box)) for x in some], told)
        for some in in_rounds(others, most)
    )


def read(shard: Shard, rank: int, items: Sequence[tuple[Piece, torch.Tensor]], told: list[str]) -> bool:
    """Read pieces of the shard of a rank into views, verified; False, with a note, if that cannot be."""
    try:
        found: dict[str, list[Target]] = {}
        late = []
        for piece, view in items:
            leaf, layout = shard.save.manifest.leaves.get(piece.path), piece.layout
            if leaf is None or (leaf.shape, leaf.torch_dtype) != (layout.local_shape(rank), layout.dtype):
                raise CheckpointError(f"{shard.text}: {piece.path}: is not that of rank {rank} under {layout}")
            target, memory = piece.target(rank, view)
            found.setdefault(piece.path, []).append(target)
            if memory is not view:
                late.append((memory, view))
        with Fetch(shard.save, True) as fetch:
            for path, targets in found.items():
                fetch.add(shard.save.manifest.leaves[path], targets)
        for memory, view in late:
            put(memory, view)
        return True
    except (CheckpointError, SavedAgain) as error:
        told.append(str(error))
    except OSError as error:
        told.append(f"{shard.text}: {error}")
    return False
