"""Asynchronous save: the call copies this rank's shards into shared memory, and a writer process writes them.

    stage (the call blocks)  ->  writer process: chunks, digests, part  ->  ranks agree in `poll`  ->  rank 0's writer
    commits  ->  ranks learn of it in `poll`

What is on disk in the end is the state at the call. The commit is that of `save`: all or nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import torch

from fmegatron import tree
from fmegatron.checkpoint.background.arena import Arena
from fmegatron.checkpoint.background.flights import LOOK_S, START_S, Flights
from fmegatron.checkpoint.background.handle import Handle
from fmegatron.checkpoint.background.staging import Portion, begin_staging, portions, require_as_staged
from fmegatron.checkpoint.background.wire import plans_to_json
from fmegatron.checkpoint.calls.arguments import are_saved, check_words, flat_layouts, ranks_of
from fmegatron.checkpoint.calls.ranks import Ranks, close_on_exit, together
from fmegatron.checkpoint.dicts.described import described
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.writing.plan import LeafPlan, plan
from fmegatron.checkpoint.writing.saving import agreed, check_layouts, check_names
from fmegatron.checkpoint.writing.unchanged import signs
from fmegatron.collectives import interrupt
from fmegatron.layout import Layout
from fmegatron.tree import structure


def save_async(
    path: str | os.PathLike | Store,
    state: structure.Tree,
    layouts: structure.Tree = None,
    world: Ranks | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    finite: bool | None = None,
    saver: AsyncSaver | None = None,
) -> Handle:
    """Begin a save and return when the state may change again; `handle.result()` means that it is durable.

    The arguments are those of `save`. saver: an AsyncSaver, which keeps its memory and its process from save to save;
    None makes one for this save, which is closed when the save has ended. All ranks call `handle.poll()` once a step:
    that is what drives a save of several ranks to its end. Leaving Python without `result()` abandons the save.

    What another thread writes before this returns is an error, of `poll` and `result`, that names the leaf, as far as
    torch counts it, or a sample of the memory shows it (64 bytes of every 64 KiB of larger leaves, before and behind):
    a kernel that is under way all the time does. A few elements that are written through numpy or `.data` do not (to
    look at all memory again would take as long as to copy it; `save` does look).

    Raises ValueError and RuntimeError on all ranks as `save` does for a request that is wrong (then nothing is begun);
    what fails later is raised by `poll` and `result`.
    """
    check_saver(saver)
    if saver is not None:
        return saver.save(path, state, layouts, world, metadata, step=step, finite=finite)
    saver = AsyncSaver()
    try:
        handle = saver.save(path, state, layouts, world, metadata, step=step, finite=finite)
    except BaseException:
        saver.close(wait=False)
        raise
    handle.owns_saver = True
    return handle


def check_saver(saver: Any) -> None:
    """Raise ValueError for what is neither None nor an AsyncSaver."""
    if saver is not None and not isinstance(saver, AsyncSaver):
        raise ValueError(f"saver: got {saver!r:.60} ({type(saver).__name__}), wanted an AsyncSaver or None")


@dataclass
class _Known:
    """The plan of the tree that was saved last; a run saves one tree again and again."""

    leaves: list[Layout]
    saved: list[bool]
    spec: Any
    plans: tuple[LeafPlan, ...]
    data: bytes
    portions: dict[int | None, list[Portion]] = field(default_factory=dict)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def tensors(self, state: Any, rank: int) -> list[torch.Tensor] | None:
        """The leaves of a state that surely fits; None: `tree.check` has to look, which takes longer."""
        if not self.shapes:
            self.shapes = [layout.local_shape(rank) for layout in self.leaves]
        _, tensors, spec = structure.flatten(state)
        fits = spec == self.spec and all(
            isinstance(x, torch.Tensor) and x.shape == shape and x.dtype is layout.dtype
            for x, shape, layout in zip(tensors, self.shapes, self.leaves, strict=True)
        )
        return tensors if fits else None

    def cut(self, rank: int, limit: int | None) -> list[Portion]:
        if limit not in self.portions:
            self.portions[limit] = portions(self.plans, rank, limit)
        return self.portions[limit]


class AsyncSaver:
    """What asynchronous saves need and keep: shared memory to stage into, and a writer process, one of each per rank.

        with AsyncSaver(arena_bytes=8 << 30) as saver:
            for step in ...:
                saver.poll()                       # all ranks, once a step
                if step % 100 == 0:
                    save_async(path, state, layouts, world, step=step, saver=saver)

    arena_bytes: most memory of this rank for staged states; None: room for one save, the largest so far. A save that
    finds no room waits until earlier ones are written; one that is larger than the arena is staged in portions, and the
    call returns when the last is staged. Only a single chunk that is larger than the arena may exceed it.
    in_flight: most saves that are begun and not ended; one more waits for the oldest.
    time_limit_s: a writer that makes no progress for so long counts as stuck, is killed, and its saves have failed.
    nice: of the writer process.
    pin: whether the arena is page-locked as soon as a state is on a device of CUDA; None: yes.

    The process starts now, and again at the next save if it has died. It is a fresh Python that imports nothing of the
    user's program, takes no accelerator, and ends with the trainer. Not thread-safe: one thread calls.
    """

    def __init__(
        self,
        arena_bytes: int | None = None,
        in_flight: int = 2,
        time_limit_s: float = 600.0,
        nice: int = 15,
        pin: bool | None = None,
    ):
        for name, value, kind in (
            ("arena_bytes", 1 if arena_bytes is None else arena_bytes, int),
            ("in_flight", in_flight, int),
            ("time_limit_s", time_limit_s, int | float),
        ):
            if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
                number = "a whole number" if kind is int else "seconds"
                raise ValueError(f"AsyncSaver: got {name}={value!r:.60}, wanted {number}, more than 0")
        if isinstance(nice, bool) or not isinstance(nice, int):
            raise ValueError(f"AsyncSaver: got nice={nice!r:.60}, wanted a whole number, e.g. 15")
        if pin and not torch.cuda.is_available():
            raise ValueError(f"AsyncSaver: got pin={pin!r:.60}, wanted it on a machine with CUDA only; leave it out")
        self.arena_bytes, self.in_flight, self.time_limit_s, self.nice = arena_bytes, in_flight, time_limit_s, nice
        self._pins = pin is not False
        self._flights = Flights(Arena(arena_bytes), time_limit_s, nice)
        self._numbers = 0
        self._known: _Known | None = None
        self._flights.start()

    # ---- saving
    def save(
        self,
        path: str | os.PathLike | Store,
        state: structure.Tree,
        layouts: structure.Tree = None,
        world: Ranks | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        step: int | None = None,
        finite: bool | None = None,
        begun: Callable[[Handle], None] | None = None,
    ) -> Handle:
        """`save_async` with this saver. begun: called with the handle as soon as the save is pending on all ranks.

        Ctrl-C on one rank before that is an error on all, and nothing is begun. After it the save is pending, and the
        others hear at the next poll that it has failed.
        """
        flights, handle, began = self._flights, None, time.perf_counter()
        try:
            with interrupt.held_interrupt() as pressed:
                handle, known, tensors, what = self._begin(path, state, layouts, world, metadata, step, finite, pressed)
                handle.began = began
                if begun is not None:
                    begun(handle)
            self._stage(handle, known, tensors, what)
        except Exception as error:  # this rank's alone: all ranks hear of it at the next poll
            if handle is None:
                raise
            flights.give_up(handle, f"{type(error).__name__}: {error}")
        except BaseException as error:
            if handle is not None:
                flights.give_up(handle, f"{type(error).__name__} while it was staged")
            raise
        handle.staged_s = time.perf_counter() - began
        return handle

    def _begin(
        self, path, state, layouts, given: Any, metadata: Any, step: Any, finite: Any, pressed: list[BaseException]
    ) -> tuple[Handle, _Known, list[torch.Tensor], dict[str, Any]]:
        """A pending save, on all ranks; or an error on all of them, and nothing is pending."""
        world = ranks_of(given)
        flights, lead, draft, handle = self._flights, world.rank == 0, None, None
        if flights.closed:
            raise ValueError("AsyncSaver.save: got a saver that is closed, wanted an open one; make another")
        store = together(world, f"saving the checkpoint {getattr(path, 'text', path)}", lambda: open_store(path))
        if flights.pending and world is not flights.world and (world.size, flights.world.size) != (1, 1):
            raise ValueError(
                "AsyncSaver.save: got another world while saves are pending, wanted the same one;"
                " give each world its saver"
            )
        if store.text.startswith("memory://"):
            raise ValueError(
                f"{store.text}: got a store in the memory of this process, wanted one that another process can write;"
                " use save"
            )
        flights.world = world

        def has_room():
            return len(flights.pending) < self.in_flight and all(h.text != store.text for h in flights.pending)

        def prepare():
            nonlocal draft, state, layouts, metadata
            state, layouts, metadata = described(state, layouts, given, metadata)
            known = self._plan(layouts, world)
            check_names(store, known.plans, world.size)
            tensors = known.tensors(state, world.rank)
            if tensors is None:
                tree.check(state, layouts, world.rank, "the state", "the layouts")
                tensors = tree.leaves(state)
            check_words(metadata, step, finite)
            what = {"store": store.to_json(), "step": step, "rank": world.rank, "size": world.size}
            what["metadata"] = (metadata or {}) if lead else {}
            if lead:
                draft = store.begin()
            if pressed:
                raise pressed[0]
            return known, list(compress(tensors, known.saved)), what

        self._numbers += 1
        try:
            handle = Handle(flights, self._numbers, store, world, step)
            flights.wait(has_room, handle.what, "it was not begun")
            known, tensors, what = together(world, handle.what, prepare)
            said = agreed(finite, world)
            handle.draft, handle.root = draft, world.broadcast_text(draft.root if draft else "")
            flights.pending.append(handle)
            return handle, known, tensors, {**what, "root": handle.root, "finite": said}
        finally:
            if draft and handle not in flights.pending:
                store.end(draft)

    def reserve(self, layouts: structure.Tree, world: Ranks | None = None) -> None:
        """Make the plan, take the memory for a state of these layouts, and wait until the writer is ready.

        Call it before training; otherwise the first save does it (but for the waiting). Raises ValueError, OSError.
        """
        world = ranks_of(world)
        known = self._plan(layouts, world)
        self._flights.arena.reserve(known.cut(world.rank, None)[0].nbytes + _tail_bytes(known.data))
        end = time.monotonic() + START_S
        while not self._flights.start().ready and time.monotonic() < end:
            self._flights.listen(LOOK_S)

    def poll(self) -> None:
        """`Handle.poll` of all pending saves: all ranks, once a step. Raises RuntimeError, once for a failed save."""
        self._flights.poll()

    @property
    def pending(self) -> tuple[Handle, ...]:
        """The saves that are not known to have ended, oldest first."""
        return tuple(self._flights.pending)

    @property
    def writer_pid(self) -> int | None:
        """The process id of the writer, None when there is none."""
        return self._flights.process.pid if self._flights.process else None

    @property
    def memory_bytes(self) -> int:
        """Shared memory that the arena has taken."""
        return self._flights.arena.capacity

    def close(self, wait: bool = True, timeout_s: float | None = None) -> None:
        """End the writer process and give the memory back; all ranks call it.

        wait: first finish the pending saves (at most `timeout_s` each), else abandon them: that needs no other rank, so
        what others write late may stay behind, hidden, until the next save. Raises what `result` raises, when all is
        closed; also for saves that failed and were never polled.
        """
        self._flights.close(wait, timeout_s)

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind, *_) -> None:
        """Finish the pending saves. After an error, only those that need no other rank; after Ctrl-C none."""
        close_on_exit(kind, self.close, self._flights.world)

    # ---- inside
    def _plan(self, layouts: Any, world: Ranks) -> _Known:
        paths, leaves, spec = flat_layouts(layouts)
        known, saved = self._known, are_saved(layouts)
        if (
            known is None
            or (spec, saved) != (known.spec, known.saved)
            or not all(a is b or a == b for a, b in zip(leaves, known.leaves, strict=True))
        ):
            check_layouts(paths, leaves, world.size)
            plans = plan(list(compress(paths, saved)), list(compress(leaves, saved)))
            self._known = known = _Known(leaves, saved, spec, plans, plans_to_json(plans))
        return known

    def _stage(self, handle: Handle, known: _Known, tensors: list[torch.Tensor], what: dict[str, Any]) -> None:
        rank, limit, arena = handle.world.rank, None, self._flights.arena
        if self.arena_bytes is not None:
            tail = _tail_bytes(known.data)
            if known.cut(rank, None)[0].nbytes + tail > self.arena_bytes:
                limit = max(1, self.arena_bytes // 2 - tail)  # two portions: one is written while one is staged
        if self._pins and (device := next((x.device for x in tensors if x.is_cuda), None)) is not None:
            arena.pin(device)
        cut, before = known.cut(rank, limit), signs(tensors)
        handle.bytes = sum(slot.nbytes for portion in cut for slot in portion.slots)
        description = json.dumps({**what, "limit": limit, "alone": handle.world.size == 1}).encode()
        for i, portion in enumerate(cut):
            tail = (description, known.data) if i == 0 else ()
            at = self._flights.room(handle, portion.nbytes + sum(map(len, tail)))
            if at is None:  # the writer died: the next poll reports it
                return
            assert arena.memory is not None, "there is room in it"
            landing = begin_staging(portion, known.plans, tensors, arena.memory, at)
            require_as_staged(before, cut[: i + 1], known.plans, tensors, arena.memory, at, landing)
            job, memory, end = [], arena.memory.numpy(), at + portion.nbytes
            for data in tail:
                memory[end : end + len(data)] = np.frombuffer(data, np.uint8)
                job.append((end, len(data)))
                end += len(data)
            self._flights.send(handle, landing, portion=i, at=at, last=i == len(cut) - 1, job=job)


def _tail_bytes(plan_data: bytes) -> int:
    """Room beside the first portion for the plan and the rest of the job."""
    return len(plan_data) + (64 << 10)
