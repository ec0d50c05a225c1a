"""Saves one set of shards: exchange within cliques by portions, write, agree, commit; all or nothing."""

from __future__ import annotations

import collections
import secrets
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from fmegatron.checkpoint.background.staging import Portion, groups, portions, require_as_staged, stage
from fmegatron.checkpoint.calls.ranks import Ranks, together
from fmegatron.checkpoint.files.folder import Folder, FolderStore
from fmegatron.checkpoint.files.format import Manifest
from fmegatron.checkpoint.local.shard import Content, content_id, digest_rows, with_ids
from fmegatron.checkpoint.local.shelf import Shelf, remove
from fmegatron.checkpoint.writing.part import Part, complete, merge, plan_digest
from fmegatron.checkpoint.writing.plan import LeafPlan
from fmegatron.checkpoint.writing.unchanged import signs
from fmegatron.checkpoint.writing.write import write_part


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
        self._guard, self._most, self._waiting = guard, most_bytes or 0, 0
        self._pool = None if most_bytes is None else ThreadPoolExecutor(1, "local-replicas")
        self._queue: collections.deque[tuple[Future, int]] = collections.deque()

    def write(self, draft: _Draft, portion: Portion, data: torch.Tensor) -> None:
        """Write a portion, whose memory may be used for other things when this returns."""
        if self._pool is None:
            self._guard.do(draft.write, portion, data)
            return
        while self._queue and self._waiting + data.nbytes > self._most:
            self._next()
        self._waiting += data.nbytes
        self._queue.append((self._pool.submit(self._guard.do, draft.write, portion, data.clone()), data.nbytes))

    def do(self, work: Callable[..., None], *args: Any) -> None:
        """`work(*args)`, after all that was given before."""
        if self._pool is None:
            self._guard.do(work, *args)
        else:
            self._queue.append((self._pool.submit(self._guard.do, work, *args), 0))

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


class _Volatile(Folder):
    """Files that need not survive the system: nothing waits for the disk."""

    def write(self, name: str, blocks: Iterable[Any], durable: bool = True) -> None:
        super().write(name, blocks, durable=False)

    def sync(self) -> None:
        pass


@dataclass
class _Draft:
    """One shard while it is written. marker: when all but the marker is written."""

    place: FolderStore
    storage: Folder
    plans: tuple[LeafPlan, ...]
    part: Part = field(init=False)
    marker: bytes = b""

    def __post_init__(self):
        self.part = Part(0, plan_digest(self.plans))

    def write(self, portion: Portion, data: torch.Tensor) -> None:
        """Write a portion of the elements. Raises OSError."""
        for plans, tensors, chunks, _ in groups(portion, self.plans, 0, data, 0):
            self.part.add(write_part(self.storage, plans, tensors, 0, chunks))

    def merge(self, content: Content, rank: int) -> tuple[Manifest, np.ndarray]:
        """The manifest of what was written, and its digests."""
        return merge(self.plans, [self.part], content.step, content.about(rank), content.finite)

    def complete(self, manifest: Manifest, digests: np.ndarray) -> None:
        """Write the manifest; all is durable then. Raises OSError."""
        self.marker = complete(self.storage, manifest, digests)


class How(NamedTuple):
    """How a set is saved.

    portion_bytes: exchanged and written at a time.  durable: whether files are synced to the disk.  most_bytes: that
    may wait for a thread that writes; None: written at once.  keep: newest steps that stay when the set counts.
    warning: of rank 0, then; "" for none.
    """

    portion_bytes: int
    durable: bool
    most_bytes: int | None
    keep: int
    warning: str


class Saving:
    """One rank's part in saving a set, and its handle: `exchange`, then `poll` or `result`, by all ranks together.

    Args:
        shelf: the directory of this node.
        content: what is saved, the same on all ranks.
        group: the ranks that keep each other's shards, this one among them; of none, nothing is stored.
        world: all ranks.
        how: it is saved.
    """

    def __init__(self, shelf: Shelf, content: Content, group: Sequence[int], world: Ranks, how: How):
        self._shelf, self._content, self._group, self._world, self._how = shelf, content, group, world, how
        self._guard, self._drafts, self._number = _Guard(), {}, 0
        self._disk = _Disk(self._guard, how.most_bytes)
        self._what = f"saving local replicas of step {content.step}"
        self._sealed, self._over, self._error = False, not group, None

    def exchange(self, tensors: Sequence[torch.Tensor]) -> None:
        """Bring this rank's shard to its group and theirs here, into shards that are no checkpoints yet.

        The tensors may change when this returns. Extra host memory: a portion for each of the group, and what waits
        for the disk. Raises RuntimeError on all ranks when anything fails on one; then nothing is left behind.
        """
        if not self._over:
            self._attempt(self._exchange, tensors)

    def poll(self) -> bool:
        """False while a rank still writes; True once the set counts. Costs one small gather, and a few more when the
        elements are written and when all is. Raises as `result`."""
        if not self._over:
            if not bool(self._world.gather_rows(torch.tensor([int(self._disk.idle())])).all()):
                return False
            if not self._sealed:
                self._attempt(self._seal)
                return False
        self.result()
        return True

    def result(self) -> None:
        """Wait until the set counts on all ranks, then delete older steps.

        Raises RuntimeError, on all ranks, with the first failing rank's message; then nothing is left of the set.
        """
        if self._error is not None:
            raise self._error
        if not self._over:
            if not self._sealed:
                self._attempt(self._seal)
            self._attempt(self._commit)
            self._over = True
            self._shelf.retain(self._content.step, self._number, self._how.keep)
            if self._world.rank == 0 and self._how.warning:
                warnings.warn(self._how.warning, RuntimeWarning, stacklevel=3)

    def abandon(self) -> None:
        """Give up a save that does not count yet; needs no other rank, and nothing is left of it here."""
        if not self._over:
            self._over, self._error = True, RuntimeError(f"{self._shelf.path}: the save was abandoned")
            self._discard()

    def _attempt(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            self._over, self._error = True, error
            self._discard()
            raise

    def _exchange(self, tensors: Sequence[torch.Tensor]) -> None:
        world, rank, group, guard, content = self._world, self._world.rank, self._group, self._guard, self._content
        plans = {member: content.plan(member) for member in group}
        cut = {member: portions(plans[member], 0, self._how.portion_bytes) for member in group}
        number = secrets.randbits(63)
        rows = world.gather_rows(torch.tensor([len(cut[rank]), digest_rows(content.rows), number])).tolist()
        self._number = rows[0][2]  # that of rank 0
        if len({one for _, one, _ in rows}) > 1:
            raise ValueError("layouts: got different ones on the ranks, wanted the same tree; give it to save on all")
        peers = [member for member in group if member != rank]
        buffers, before = dict[int, torch.Tensor](), signs(tensors)

        def begin():
            for member in group:
                buffers[member] = torch.empty(max(p.nbytes for p in cut[member]), dtype=torch.uint8)
                self._drafts[member] = self._begin(member, plans[member])

        together(world, self._what, begin)
        # As many rounds on all ranks as the longest shard needs; those that have nothing left to send stay silent.
        for n in range(max(count for count, _, _ in rows)):
            parts = {m: buffers[m][: cut[m][n].nbytes if n < len(cut[m]) else 0] for m in group}
            if n < len(cut[rank]):
                guard.do(stage, cut[rank][n], plans[rank], tensors, buffers[rank], 0)
                guard.do(require_as_staged, before, cut[rank][: n + 1], plans[rank], tensors, buffers[rank], 0)
            world.exchange([(m, parts[rank]) for m in peers], [(m, parts[m]) for m in peers])
            for member in group:
                if n < len(cut[member]):
                    guard.do(self._disk.write, self._drafts[member], cut[member][n], parts[member])
        together(world, self._what, guard.check)

    def _begin(self, member: int, plans: tuple[LeafPlan, ...]) -> _Draft:
        place = self._shelf.place(self._content.step, member, self._number)
        storage = place.begin()
        return _Draft(place, storage if self._how.durable else _Volatile(storage.root, lease=storage.lease), plans)

    def _seal(self) -> None:
        """Wait for the elements, then write the manifests, which name the set."""
        world = self._world

        def merged() -> tuple[dict[int, tuple[Manifest, np.ndarray]], dict[int, int]]:
            self._disk.drain()
            self._guard.check()
            found = {member: draft.merge(self._content, member) for member, draft in self._drafts.items()}
            return found, {member: content_id(manifest) for member, (manifest, _) in found.items()}

        manifests, ids = together(world, self._what, merged)
        own = torch.from_numpy(np.array([ids[world.rank]], "<u8").view(np.int64))
        known = world.gather_rows(own).numpy().reshape(-1).view("<u8").tolist()

        def verify() -> None:
            for member, (manifest, digests) in manifests.items():
                if ids[member] != known[member]:
                    text = f"its shard was altered on its way to rank {world.rank}; save again, and look at the network"
                    raise RuntimeError(f"rank {member}: {text}")
                self._disk.do(self._drafts[member].complete, with_ids(manifest, known), digests)

        together(world, self._what, verify)
        self._sealed = True

    def _commit(self) -> None:
        """Wait for the disk, then give the shards their names; the set counts when this returns, on all ranks."""
        made: list[FolderStore] = []

        def publish():
            self._disk.drain()
            self._guard.check()
            for draft in self._drafts.values():
                made.append(draft.place)
                draft.place.publish(draft.storage, draft.marker)

        self._guard.do(publish)
        self._discard()  # before all agree: ranks of a node share the directory, and the next save wants it free
        # If a peer dies now, this raises, and it is not known here whether others have heard that all is well and have
        # deleted older steps. Then the new shards must stay: only a failure that all know of removes them.
        failed = self._world.gather_rows(torch.tensor([int(self._guard.error is not None)]))
        if bool(failed.any()):
            for place in made:
                remove(place)
            together(self._world, self._what, self._guard.check)

    def _discard(self) -> None:
        """Leave nothing hidden behind."""
        self._disk.close()
        while self._drafts:
            draft = self._drafts.popitem()[1]
            draft.place.end(draft.storage)
