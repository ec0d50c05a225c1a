"""The writer process: writes what its trainer has staged, at low priority, and reports the result.

Started by process.py as a fresh Python: it imports nothing of the user's, joins no process group, needs no accelerator,
and leaves Ctrl-C and SIGTERM to its trainer. It ends when its trainer ends, however that happens.

    write   id, portion, at, last, capacity (+ job at the first portion)   -> portion ..., at last written | failed
    commit  id       (rank 0, when all ranks have written)                 -> committed | failed
    cancel  id                                                             -> cancelled
    quit
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.checkpoint.background.arena import SAVE, TICKS, WRITTEN, map_board, map_memory
from fmegatron.checkpoint.background.staging import groups, portions
from fmegatron.checkpoint.background.wire import Channel, plans_from_json
from fmegatron.checkpoint.files.stores import store_from_json
from fmegatron.checkpoint.writing.part import Part, complete, merge, plan_digest
from fmegatron.checkpoint.writing.write import write_part

_BEAT_S = 0.5
_COMMIT_GRACE_S = 10.0  # a commit that has begun when the trainer dies may end; it is right either way
_IOPRIO_SET = MappingProxyType({"x86_64": 251, "aarch64": 30})
_IOPRIO_IDLE = 3 << 13


class _Save:
    """One save of this rank. `dead`: cancelled or failed, so nothing of it is written any more."""

    def __init__(self, job: dict[str, Any], plans):
        self.rank, self.size, self.limit = job["rank"], job["size"], job["limit"]
        self.step, self.metadata, self.alone = job["step"], job["metadata"], job["alone"]
        self.finite = job["finite"]
        self.store = store_from_json(job["store"])
        self.storage = self.store.draft(job["root"])
        self.plans = plans
        self.part = Part(self.rank, plan_digest(plans))
        self.portions = portions(plans, self.rank, self.limit)
        self.dead = False


class Writer:
    """The state of the process: saves by number, one thread that writes and one that commits, both in order."""

    def __init__(self, channel: Channel, fd: int):
        self.channel, self.fd, self.memory, self.board = channel, fd, None, map_board(fd)
        self.saves: dict[int, _Save] = {}
        self.cancelled: set[int] = set()
        self.active: int | None = None
        self.lock = threading.Lock()
        self.writes, self.commits = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.committing = None

    def run(self) -> None:
        """Handle messages until the quit message or the end of the trainer."""
        self.report(did="ready")
        while True:
            for message in self.channel.receive(None):
                match message["do"]:
                    case "write":
                        self.writes.submit(self.guarded, self.write, message)
                    case "commit":
                        self.committing = self.commits.submit(self.guarded, self.commit, message)
                    case "cancel":
                        self.cancel(message["id"])
                    case "quit":
                        self.writes.shutdown(wait=True, cancel_futures=True)
                        self.commits.shutdown(wait=True)
                        return
            if self.channel.closed:
                self.leave()

    def leave(self) -> None:
        """The trainer is gone."""
        if self.committing is not None:
            with contextlib.suppress(Exception):
                self.committing.result(_COMMIT_GRACE_S)
        os._exit(1)

    def report(self, **message: Any) -> None:
        """Report to the trainer; if it is gone, `run` sees it."""
        with self.lock, contextlib.suppress(OSError):
            self.channel.send(message)

    def tick(self) -> None:
        """Show progress."""
        self.board[TICKS] += 1

    def guarded(self, work, message: dict[str, Any]) -> None:
        """Run a piece of work; its error is the trainer's to hear."""
        number = message["id"]
        try:
            work(number, message)
        except BaseException as error:
            if number in self.saves:
                self.saves[number].dead = True
            self.report(id=number, did="failed", error=f"{type(error).__name__}: {error}")
        self.tick()

    def write(self, number: int, message: dict[str, Any]) -> None:
        """Write one portion."""
        with self.lock:
            if number in self.cancelled:
                return
            self.active = number
        try:
            if self.memory is None or self.memory.numel() != message["capacity"]:
                self.memory = None
                self.memory = map_memory(self.fd, message["capacity"], warm=False)
            if number not in self.saves:
                self.saves[number] = _Save(*self.read_job(message["job"]))
                self.board[SAVE], self.board[WRITTEN] = number, 0
                self.tick()
            save = self.saves[number]
            if not save.dead:
                self.write_portion(number, save, message)
        finally:
            with self.lock:
                self.active = None
                stopped = number in self.cancelled
            if stopped:
                self.commits.submit(self.forget, number)

    def read_job(self, job: list[list[int]]) -> tuple[dict[str, Any], Any]:
        """The description of a save, staged beside its data: (what, plan)."""
        memory = self.memory
        assert memory is not None, "`write` has mapped it"
        what, plans = (memory[start : start + size].numpy().tobytes() for start, size in job)
        return json.loads(what), plans_from_json(plans)

    def write_portion(self, number: int, save: _Save, message: dict[str, Any]) -> None:
        """Write the groups of a portion; sign of progress after each."""
        assert self.memory is not None, "`write` has mapped it"
        portion = save.portions[message["portion"]]
        for plans, tensors, chunks, nbytes in groups(portion, save.plans, save.rank, self.memory, message["at"]):
            if number in self.cancelled:
                return
            save.part.add(write_part(save.storage, plans, tensors, save.rank, chunks))
            self.board[WRITTEN] += nbytes
            self.tick()
        if not message["last"]:
            self.report(id=number, did="portion", at=message["at"])
            return
        if save.rank:
            save.part.store(save.storage)
        self.report(id=number, did="written", at=message["at"])
        if save.alone:
            self.committing = self.commits.submit(self.guarded, self.commit, message)
        elif save.rank:
            del self.saves[number]

    def commit(self, number: int, message: dict[str, Any]) -> None:
        """Rank 0: make one checkpoint of what all ranks have written."""
        if number in self.cancelled:
            return
        save = self.saves.pop(number)
        others = (Part.load(save.storage, rank) for rank in range(1, save.size))
        parts = itertools.chain([save.part], others)
        manifest, digests = merge(save.plans, parts, save.step, save.metadata, save.finite)
        self.tick()
        marker = complete(save.storage, manifest, digests)
        self.tick()
        save.store.publish(save.storage, marker)
        self.report(id=number, did="committed")

    def cancel(self, number: int) -> None:
        """Write no more of it; answer when that is so."""
        with self.lock:
            self.cancelled.add(number)
            active = self.active == number
        if not active:
            self.commits.submit(self.forget, number)  # not while it is being committed

    def forget(self, number: int) -> None:
        """Drop what is known of a cancelled save, and report it."""
        self.saves.pop(number, None)
        self.report(id=number, did="cancelled")

    def watch(self, trainer: int | None, parent: int) -> None:
        """End with the trainer even if a child of its holds the socket open."""
        if trainer is not None:
            end = select.poll()
            end.register(trainer, select.POLLIN)
            end.poll()
        while trainer is None and os.getppid() == parent:
            time.sleep(_BEAT_S)
        self.leave()


def main(nice: int, socket_fd: int, arena_fd: int, trainer: int | None = None) -> None:
    """Entry of the process: how nice to be, the inherited socket and arena, and a descriptor of the trainer (pidfd)."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _be_nice(nice)
    torch.set_num_threads(1)
    writer = Writer(Channel(socket.socket(fileno=socket_fd)), arena_fd)
    threading.Thread(target=writer.watch, args=(trainer, os.getppid()), daemon=True).start()
    writer.run()
    sys.stderr.flush()
    os._exit(0)


def _be_nice(nice: int) -> None:
    """Yield the processor and the disk to the trainer, where the system lets us."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(nice)
    # The writer has a session of its own, and Linux shares the cores among sessions before it looks at processes: the
    # session must be nice, too (2.4 times the step time without this, on 2 cores).
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as f:
        f.write(str(nice))
    if (number := _IOPRIO_SET.get(platform.machine())) and sys.platform == "linux" and nice > 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)
