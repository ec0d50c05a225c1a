"""Fetches every rank its shard of one set: from its own disk, else from the next holder with an intact copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fmegatron.checkpoint.calls.ranks import Ranks
from fmegatron.checkpoint.files.format import CheckpointError
from fmegatron.checkpoint.local import blob
from fmegatron.checkpoint.local.blob import Reader, Shard
from fmegatron.checkpoint.local.flat import Flat

_MOST_TEXTS = 8  # failing ranks that are quoted, of maybe thousands


def fetch_set(
    flat: Flat,
    mine: dict[int, Shard],
    holders: Sequence[Sequence[int]],
    key: tuple[int, int],
    tail_bytes: int,
    payloads: Sequence[int],
    world: Ranks,
    portion_bytes: int,
    notes: list[str],
) -> tuple[Shard | None, list[list[int]]]:
    """Fill `flat` with this rank's shard; (its tail, per shard the holders that did not fail), or (None, ...) on all.

    mine: the shards of this set on this node, by rank.  holders: per shard the ranks that have it, in the order in
    which they are tried.  key: (step, set).  tail_bytes: most bytes of a tail.  payloads: bytes of each rank's shard.
    In turn n, the n-th holder of every shard that is still missing sends it: a list that ends, however bad the copies.
    """
    got: Shard | None = None
    good, missing = [list(h) for h in holders], set(range(world.size))
    for turn in range(max(map(len, holders))):
        pairs = {rank: holders[rank][turn] for rank in sorted(missing)}
        told: list[str] = []
        found = _one_turn(flat, mine, pairs, key, tail_bytes, payloads, world, portion_bytes, told)
        got = found or got
        row = torch.tensor([world.rank in missing and found is None, bool(told)])
        failed, talks = world.gather_rows(row.long()).T.tolist()
        if any(talks):
            notes += [f"local replicas of step {key[0]}: {text}" for text in tell_all(world, talks, "; ".join(told))]
        missing = {rank for rank, bad in enumerate(failed) if bad}
        for rank in missing:
            good[rank].remove(pairs[rank])
        if not missing:
            return got, good
        if lost := [rank for rank in sorted(missing) if turn + 1 >= len(holders[rank])]:
            notes.append(
                f"skipped the local replicas of step {key[0]}: no good copy of the shards of ranks {few(lost)}"
            )
            break
    return None, good


def few(ranks: Sequence[int]) -> str:
    """The first ranks of a list in words."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def tell_all(world: Ranks, talks: Sequence[int], text: str) -> list[str]:
    """The texts of the first few ranks that have something to say (`talks`: not 0), on all ranks."""
    speakers = [rank for rank, flag in enumerate(talks) if flag]
    texts = [f"rank {rank}: {world.broadcast_text(text, rank)}" for rank in speakers[:_MOST_TEXTS]]
    return texts + ([f"and {len(speakers) - _MOST_TEXTS} more ranks"] if len(speakers) > _MOST_TEXTS else [])


def _one_turn(flat, mine, pairs, key, tail_bytes, payloads, world, portion_bytes, told) -> Shard | None:
    """Move the shards of `pairs` (shard -> holder); this rank's shard, if it is among them and came whole.

    Both sides verify: a sender that finds damage says so in the flag beside each portion, and both stop.
    """
    rank = world.rank
    source = pairs.get(rank)
    outgoing = {to: mine[to] for to, holder in pairs.items() if holder == rank and to != rank}
    incoming = source is not None and source != rank
    readers: dict[int, Reader] = {}
    got = _from_disk(flat, mine[rank], portion_bytes, told) if source == rank else None
    try:
        tails = {to: _padded(shard.tail, tail_bytes) for to, shard in outgoing.items()}
        tail = torch.empty(tail_bytes if incoming else 0, dtype=torch.uint8)
        world.exchange(list(tails.items()), [(source, tail)] if incoming else [])
        if incoming:
            got = _checked(tail.numpy().tobytes(), (*key, rank), flat.nbytes, source, told)
        alive = {to: True for to in outgoing}
        for to, shard in outgoing.items():
            try:
                readers[to] = Reader(shard)
            except OSError as error:
                told.append(f"{shard.path}: {error}")
        longest = max((payloads[to] for to, holder in pairs.items() if holder != to), default=0)
        buffers = {to: torch.empty(min(portion_bytes, payloads[to]), dtype=torch.uint8) for to in outgoing}
        buffer = torch.empty(min(portion_bytes, flat.nbytes) if incoming else 0, dtype=torch.uint8)
        for start in range(0, longest, portion_bytes):
            sends, receives, flag = [], [], torch.zeros(1, dtype=torch.uint8)
            for to in [to for to, living in alive.items() if living]:
                part = buffers[to][: max(0, min(portion_bytes, payloads[to] - start))]
                alive[to] = _read(readers.get(to), outgoing[to], start, part, told)
                sends += [(to, torch.tensor([alive[to]], dtype=torch.uint8)), (to, part)]
            part = buffer[: max(0, min(portion_bytes, flat.nbytes - start))]
            if incoming:
                receives = [(source, flag), (source, part)]
            world.exchange(sends, receives)
            if incoming:
                incoming = bool(flag)
                got = _filled(flat, got, start, part, source, told) if incoming else None
        return got
    finally:
        for reader in readers.values():
            reader.close()


def _padded(tail: bytes, size: int) -> torch.Tensor:
    """uint8 [size]. Tails of one set differ a little in length: zeros in front make them equal."""
    return torch.frombuffer(bytearray(size - len(tail)) + tail, dtype=torch.uint8)


def _from_disk(flat: Flat, shard: Shard, portion_bytes: int, told: list[str]) -> Shard | None:
    """Fill `flat` from the own disk; None, with a note, if the file is damaged."""
    part = torch.empty(min(portion_bytes, flat.nbytes), dtype=torch.uint8)
    try:
        reader = Reader(shard)
        try:
            for start in range(0, flat.nbytes, portion_bytes):
                data = part[: min(portion_bytes, flat.nbytes - start)]
                reader.read(start, data)
                flat.fill(start, data)
        finally:
            reader.close()
    except (OSError, CheckpointError) as error:
        told.append(_reason(shard, error))
        return None
    return shard


def _read(reader: Reader | None, shard: Shard, start: int, out: torch.Tensor, told: list[str]) -> bool:
    if reader is None:
        return False
    try:
        reader.read(start, out)
    except (OSError, CheckpointError) as error:
        told.append(_reason(shard, error))
        return False
    return True


def _reason(shard: Shard, error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{shard.path}: {error}"


def _checked(tail: bytes, key: tuple[int, int, int], payload: int, source: int, told: list[str]) -> Shard | None:
    """The tail that a holder sent, if it is that of the wanted shard."""
    try:
        start = blob.tail_start(tail)
        shard = blob.parse_tail(tail[start:], f"the shard that rank {source} sent")
        if shard.key != key or shard.payload_bytes != payload:
            raise CheckpointError(f"rank {source} sent another shard than that of rank {key[2]} of step {key[0]}")
    except CheckpointError as error:
        told.append(str(error))
        return None
    return shard


def _filled(
    flat: Flat, shard: Shard | None, start: int, data: torch.Tensor, source: int, told: list[str]
) -> Shard | None:
    """The shard if these bytes are right, too, and were put in place."""
    if shard is None:
        return None
    try:
        blob.check_portion(shard, start, data)
    except CheckpointError as error:
        told.append(f"{error} (from rank {source})")
        return None
    flat.fill(start, data)
    return shard
