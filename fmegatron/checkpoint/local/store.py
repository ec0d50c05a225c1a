"""Save one set of shards: exchange within cliques portion by portion, write, agree; all or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fmegatron.checkpoint.local import blob
from fmegatron.checkpoint.local.flat import Flat
from fmegatron.checkpoint.local.shelf import Shelf
from fmegatron.checkpoint.ranks import Ranks, together


class _Guard:
    """Work that may fail while the other ranks wait for this one in the next exchange: the first error is kept."""

    def __init__(self):
        self.error: BaseException | None = None

    def do(self, work: Callable[..., Any], *args: Any) -> Any:
        """`work(*args)`, unless something failed before."""
        if self.error is None:
            try:
                return work(*args)
            except BaseException as error:  # an interrupt, too, must not leave the others waiting
                self.error = error

    def check(self) -> None:
        """Raise what was kept."""
        if self.error is not None:
            raise self.error


def store(
    shelf: Shelf,
    step: int,
    tensors: Sequence[torch.Tensor],
    text: bytes,
    group: Sequence[int],
    world: Ranks,
    portion_bytes: int,
    durable: bool,
) -> int:
    """Store this rank's shard on the shelves of its whole group, and theirs on this one; returns the id of the set.

    text: the JSON of this rank's shard.  group: this rank and those that it exchanges with. Extra host memory: one
    portion for each of the group. Raises RuntimeError on all ranks when anything fails on one; then nothing is left of
    the set, and what was there before is untouched.
    """
    rank, what, guard, flat = world.rank, f"saving local replicas of step {step}", _Guard(), Flat(tensors)
    sizes = world.gather_rows(torch.tensor([flat.nbytes, len(text)])).tolist()
    peers = [member for member in group if member != rank]
    writers: dict[int, blob.Writer] = {}
    buffers: dict[int, torch.Tensor] = {}
    finished: list[str] = []

    def begin():
        for member in group:
            buffers[member] = torch.empty(min(portion_bytes, sizes[member][0]), dtype=torch.uint8)
            writers[member] = blob.Writer(shelf.hidden(rank, step, member), durable)

    try:
        together(world, what, begin)
        # As many rounds on all ranks as the longest shard needs; those who have nothing left to tell stay silent.
        for start in range(0, max(payload for payload, _ in sizes), portion_bytes):
            parts = {m: buffers[m][: max(0, min(portion_bytes, sizes[m][0] - start))] for m in group}
            guard.do(flat.read, start, parts[rank])
            world.exchange([(m, parts[rank]) for m in peers], [(m, parts[m]) for m in peers])
            for member in group:
                guard.do(writers[member].add, parts[member])
        buffers.clear()
        together(world, what, guard.check)  # first, so that all hear of the cause, not of what follows from it
        tables, texts, ids = _exchange_tails(world, peers, sizes, writers[rank].digests, text)

        def finish():
            for member in group:
                same = writers[member].digests == tables[member].tolist()
                if not same or blob.shard_id(tables[member], texts[member]) != int(ids[member]):
                    raise RuntimeError(f"the shard of rank {member} was altered on its way to rank {rank}")
                writers[member].finish(blob.tail_bytes(sizes[member][0], tables[member], ids, texts[member]))
            for member in group:
                final = shelf.final(step, member, blob.set_id(ids))
                if not os.path.lexists(final):  # a name that was there holds, or should hold, the same bytes
                    finished.append(final)
                os.replace(writers[member].path, final)
            if durable:
                shelf.sync()

        try:
            together(world, what, finish)
        except BaseException:
            for path in finished:
                if os.path.lexists(path):
                    os.remove(path)
            raise
    finally:
        for writer in writers.values():
            writer.discard()
    return blob.set_id(ids)


def _exchange_tails(
    world: Ranks, peers: list[int], sizes: list[list[int]], digests: list[int], text: bytes
) -> tuple[dict[int, np.ndarray], dict[int, bytes], np.ndarray]:
    """(digest tables and JSON of the group by rank; ids of all shards of the world, uint64 [world])."""
    own = np.array(digests, "<u8")
    tables = {m: torch.empty(blob.band_count(sizes[m][0]), dtype=torch.int64) for m in peers}
    texts = {m: torch.empty(sizes[m][1], dtype=torch.uint8) for m in peers}
    mine = torch.from_numpy(own.view(np.int64)), torch.frombuffer(bytearray(text), dtype=torch.uint8)
    world.exchange([(m, x) for m in peers for x in mine], [(m, x[m]) for m in peers for x in (tables, texts)])
    own_id = np.array([blob.shard_id(own, text)], "<u8").view(np.int64)
    ids = world.gather_rows(torch.from_numpy(own_id)).numpy().reshape(-1).view("<u8")
    as_u8 = {m: table.numpy().view("<u8") for m, table in tables.items()}
    return {**as_u8, world.rank: own}, {m: x.numpy().tobytes() for m, x in texts.items()} | {world.rank: text}, ids
