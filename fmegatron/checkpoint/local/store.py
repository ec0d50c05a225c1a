"""Saves one set of shards: exchange within cliques by portions, write, agree, rename; all or nothing."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from fmegatron.checkpoint.calls.ranks import Ranks, together
from fmegatron.checkpoint.files.look import is_there
from fmegatron.checkpoint.local import blob
from fmegatron.checkpoint.local.flat import Flat
from fmegatron.checkpoint.local.shelf import Shelf


class _Guard:
    """Work that may fail while the other ranks wait for this one in the next exchange: the first error is kept."""

    def __init__(self):
        self.error: BaseException | None = None

    def do(self, work: Callable[..., Any], *args: Any) -> None:
        """`work(*args)`, unless something failed before."""
        if self.error is None:
            try:
                work(*args)
            except BaseException as error:  # an interrupt, too, must not leave the others waiting
                self.error = error

    def check(self) -> None:
        """Raise what was kept."""
        if self.error is not None:
            raise self.error


class _Disk:
    """Does what is given to it in order: at once, or (with `most_bytes`) in a thread, with at most so much waiting."""

    def __init__(self, guard: _Guard, most_bytes: int | None):
        self._guard, self._most, self._waiting = guard, most_bytes, 0
        self._pool = None if most_bytes is None else ThreadPoolExecutor(1, "local-replicas")
        self._queue: collections.deque[tuple[Future, int]] = collections.deque()

    def write(self, writer: blob.Writer, data: torch.Tensor) -> None:
        """Append a portion, whose memory may be used for other things when this returns."""
        if self._pool is None:
            self._guard.do(writer.write, data)
            return
        while self._queue and self._waiting + data.nbytes > self._most:
            self._next()
        self._waiting += data.nbytes
        self._queue.append((self._pool.submit(self._guard.do, writer.write, data.clone()), data.nbytes))

    def finish(self, writer: blob.Writer, tail: bytes) -> None:
        """Append the tail, down to the disk."""
        if self._pool is None:
            self._guard.do(writer.finish, tail)
        else:
            self._queue.append((self._pool.submit(self._guard.do, writer.finish, tail), 0))

    def idle(self) -> bool:
        """Whether all is done."""
        return all(future.done() for future, _ in self._queue)

    def drain(self) -> None:
        """Wait until all is done."""
        while self._queue:
            self._next()

    def close(self) -> None:
        """Leave out what has not begun, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> None:
        future, size = self._queue.popleft()
        future.result()
        self._waiting -= size


class Saving:
    """One rank's part in saving a set; `exchange`, then `commit`, by all ranks. `set`: the id of the set."""

    def __init__(
        self,
        shelf: Shelf,
        step: int,
        group: Sequence[int],
        world: Ranks,
        portion_bytes: int,
        durable: bool,
        most_bytes: int | None,
    ):
        self.set, self.world, self.step = 0, world, step
        self._shelf, self._group, self._portion, self._durable = shelf, group, portion_bytes, durable
        self._guard, self._writers = _Guard(), {}
        self._disk = _Disk(self._guard, most_bytes)
        self._what = f"saving local replicas of step {step}"

    def exchange(self, tensors: Sequence[torch.Tensor], text: bytes) -> None:
        """Bring this rank's shard (and its JSON) to its whole group and theirs here, under hidden names.

        The tensors may change when this returns. Extra host memory: a portion for each of the group, and what waits
        for the disk. Raises RuntimeError on all ranks when anything fails on one; then nothing is left behind.
        """
        try:
            self._exchange(Flat(tensors), text)
        except BaseException:
            self._discard()
            raise

    def _exchange(self, flat: Flat, text: bytes) -> None:
        world, rank, portion, group, guard = self.world, self.world.rank, self._portion, self._group, self._guard
        sizes = world.gather_rows(torch.tensor([flat.nbytes, len(text)])).tolist()
        peers = [member for member in group if member != rank]
        buffers: dict[int, torch.Tensor] = {}

        def begin():
            for member in group:
                buffers[member] = torch.empty(min(portion, sizes[member][0]), dtype=torch.uint8)
                path = self._shelf.hidden(rank, self.step, member)
                self._writers[member] = blob.Writer(path, self._durable)

        together(world, self._what, begin)
        # As many rounds on all ranks as the longest shard needs; those who have nothing left to tell stay silent.
        for start in range(0, max(payload for payload, _ in sizes), portion):
            parts = {m: buffers[m][: max(0, min(portion, sizes[m][0] - start))] for m in group}
            guard.do(flat.read, start, parts[rank])
            world.exchange([(m, parts[rank]) for m in peers], [(m, parts[m]) for m in peers])
            for member in group:
                guard.do(self._writers[member].digest, parts[member])
                guard.do(self._disk.write, self._writers[member], parts[member])
        buffers.clear()
        together(world, self._what, guard.check)  # first, so that all hear of the cause, not of what follows from it
        tables, texts, ids = _exchange_tails(world, peers, sizes, np.array(self._writers[rank].digests, "<u8"), text)
        self.set = blob.set_id(ids)

        def verify():
            for member in group:
                same = self._writers[member].digests == tables[member].tolist()
                if not same or blob.shard_id(tables[member], texts[member]) != int(ids[member]):
                    raise RuntimeError(f"the shard of rank {member} was altered on its way to rank {rank}")
                tail = blob.tail_bytes(sizes[member][0], tables[member], ids, texts[member])
                self._disk.finish(self._writers[member], tail)

        together(world, self._what, verify)

    def written(self) -> bool:
        """Whether all of this rank's files are written, or have failed."""
        return self._disk.idle()

    def commit(self) -> None:
        """Wait for the disk, then give the files their names; the set counts when this returns, on all ranks.

        Raises RuntimeError on all ranks when anything failed on one; then nothing is left of the set, and what was
        there before is untouched.
        """
        made: list[str] = []

        def rename():
            self._disk.drain()
            self._guard.check()
            for member, writer in self._writers.items():
                final = self._shelf.final(self.step, member, self.set)
                if not is_there(final):  # a name that was there holds, or should hold, the same bytes
                    made.append(final)
                os.replace(writer.path, final)
            if self._durable:
                self._shelf.sync()

        try:
            self._guard.do(rename)
            # If a peer dies now, this raises, and nobody here knows whether others have heard that all is well and
            # have deleted older steps. Then the new files must stay: only a failure that all know of removes them.
            failed = self.world.gather_rows(torch.tensor([int(self._guard.error is not None)]))
            if bool(failed.any()):
                for path in made:
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(path)
                together(self.world, self._what, self._guard.check)
        finally:
            self._discard()

    def _discard(self) -> None:
        """Leave no hidden file behind."""
        self._disk.close()
        for writer in self._writers.values():
            writer.discard()


def _exchange_tails(
    world: Ranks, peers: list[int], sizes: list[list[int]], own: np.ndarray, text: bytes
) -> tuple[dict[int, np.ndarray], dict[int, bytes], np.ndarray]:
    """(digest tables and JSON of the group by rank; ids of all shards of the world, uint64 [world])."""
    tables = {m: torch.empty(blob.band_count(sizes[m][0]), dtype=torch.int64) for m in peers}
    texts = {m: torch.empty(sizes[m][1], dtype=torch.uint8) for m in peers}
    mine = torch.from_numpy(own.view(np.int64)), torch.frombuffer(bytearray(text), dtype=torch.uint8)
    world.exchange([(m, x) for m in peers for x in mine], [(m, x[m]) for m in peers for x in (tables, texts)])
    own_id = np.array([blob.shard_id(own, text)], "<u8").view(np.int64)
    ids = world.gather_rows(torch.from_numpy(own_id)).numpy().reshape(-1).view("<u8")
    as_u8 = {m: table.numpy().view("<u8") for m, table in tables.items()}
    return {**as_u8, world.rank: own}, {m: x.numpy().tobytes() for m, x in texts.items()} | {world.rank: text}, ids
