"""A pool of rank processes, started once, that runs functions on real gloo groups.

Importing torch costs seconds, so the processes are forks of one that has imported it; joining a fresh process group in
a running process costs little, so every call gets a process group of its own, of the size that it asks for: calls
cannot disturb each other, and one pool of 4 serves tests of 1, 2 and 4 ranks.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fmegatron.testing.forkserver import Forkserver

__all__ = ["RankError", "RankPool"]


class RankError(RuntimeError):
    """A function raised on a rank of a pool; the message holds that rank's traceback. `rank`: which one."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


class RankPool:
    """`size` processes that run module-level functions as ranks of a gloo process group.

        with RankPool(4) as pool:
            losses = pool.run(train_a_little, config, ranks=2)      # [on rank 0, on rank 1]

    `run` calls `function(rank, *args)` on each of the first `ranks` processes, inside a default process group of that
    size, so `fmegatron.collectives.connect(mesh)` works in it. Functions are found by module and file, arguments and
    results are pickled. The processes start at the first call. A rank that raises gives `RankError`; one that does not
    answer in time gives `TimeoutError`; in both cases the pool can be used again. server: what starts the processes,
    so that they have what it has imported; by default one that has imported torch and ends with the pool.
    """

    def __init__(self, size: int, timeout_s: float = 60.0, server: Forkserver | None = None):
        if size < 1:
            raise ValueError(f"RankPool: got {size} ranks, wanted at least 1")
        self.size, self.timeout_s, self._server, self._given = size, timeout_s, server, server is not None
        self._workers: list[_Worker | None] = [None] * size
        self._store: dist.TCPStore | None = None
        self._calls = 0

    def start(self) -> None:
        """Start the processes that are not running; `run` does it when needed."""
        self._started()

    def _started(self) -> tuple[list[_Worker], int]:
        """All processes, running, and the port of their store."""
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if self._server is None:
            self._server = Forkserver(__name__)
        running = []
        for i, worker in enumerate(self._workers):
            if worker is None or worker.process.poll() is not None:
                worker = self._workers[i] = _Worker(self._server)
            running.append(worker)
        return running, self._store.port

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """`[function(0, *args), function(1, *args), ...]`, each computed by its own process; `ranks` defaults to all.

        Raises RankError with the traceback of the rank that raised first, TimeoutError that names the silent ranks.
        """
        ranks = self.size if ranks is None else ranks
        if not 1 <= ranks <= self.size:
            raise ValueError(f"RankPool.run: got ranks={ranks}, wanted 1 to {self.size}; start a larger RankPool")
        workers, port = self._started()
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._calls += 1
        where = (function.__module__, sys.modules[function.__module__].__file__, function.__qualname__)
        for rank, worker in enumerate(workers[:ranks]):
            group = (rank, ranks, port, f"call{self._calls}", timeout_s)
            request = (list(sys.path), where, group, pickle.dumps(args))
            worker.pipe.send_bytes(pickle.dumps(request))
        return self._collect(workers[:ranks], time.monotonic() + timeout_s, where[2])

    def _collect(self, workers: list[_Worker], deadline: float, name: str) -> list[Any]:
        ranks, waiting = len(workers), {worker.pipe: rank for rank, worker in enumerate(workers)}
        results: list[Any] = [None] * ranks
        failures: list[tuple[float, int]] = []
        try:
            while waiting:
                ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for pipe in [pipe for pipe in waiting if pipe in ready]:
                    rank = waiting.pop(pipe)
                    try:
                        failed_at, results[rank] = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        failed_at, results[rank] = 0.0, f"its process ended with exit code {self._stop_worker(rank)}"
                    if failed_at is not None:
                        failures.append((failed_at, rank))
                        deadline = min(deadline, time.monotonic() + 5.0)  # the others wait for a rank that has left
        finally:
            for rank in waiting.values():  # what they would answer later belongs to no call
                self._stop_worker(rank)
        if failures:
            rank = min(failures)[1]  # later ones mostly report that a connection was closed
            raise RankError(f"{name}: failed on rank {rank} of {ranks}:\n{results[rank]}", rank)
        if waiting:
            silent = ", ".join(str(rank) for rank in sorted(waiting.values()))
            raise TimeoutError(f"{name}: no answer from rank {silent} of {ranks} in time; those processes were ended")
        return results

    def _stop_worker(self, i: int) -> int:
        worker, self._workers[i] = self._workers[i], None
        assert worker is not None, "who stops a worker has one"
        worker.process.kill()
        worker.pipe.close()
        return worker.process.wait()

    def close(self) -> None:
        """End the processes."""
        for i, worker in enumerate(self._workers):
            if worker is not None:
                self._stop_worker(i)
        if self._server is not None and not self._given:
            self._server.close()
            self._server = None
        self._store = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class _Worker:
    def __init__(self, server):
        # Not multiprocessing.Process: its spawn imports the caller's main script again, guarded or not.
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self.process = server.start(__name__, "_serve", files=[theirs.fileno()])


def _serve(descriptor):
    """Main loop of a rank: receive a call, answer, again; until the caller closes the pipe."""
    pipe = multiprocessing.connection.Connection(descriptor)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    stores = {}  # port -> client; opened once, as every dozenth connection to a store took 5 s
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send_bytes(_answer(request, stores))


def _answer(request, stores):
    """Pickled (None, result), or (time of failure, traceback)."""
    path, where, (rank, ranks, port, prefix, timeout_s), args = pickle.loads(request)
    sys.path[:] = path  # before the arguments are unpickled: their classes may live on it
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        if port not in stores:
            stores[port] = dist.TCPStore("127.0.0.1", port, is_master=False)
        store = dist.PrefixStore(prefix, stores[port])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        dist.all_reduce(torch.zeros(1))  # all are connected: a rank that leaves early is noticed, not waited for
        return pickle.dumps((None, _find(*where)(rank, *pickle.loads(args))))
    except BaseException:
        return pickle.dumps((time.monotonic(), traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _find(module: str, file: str, qualname: str) -> Callable[..., Any]:
    if module == "__main__":  # under its own name a script would run as a script, and start a pool in every rank
        module = "__rank_main__"
    found: Any = sys.modules.get(module)
    if found is None or getattr(found, "__file__", None) != file:
        try:
            found = importlib.import_module(module)
        except ImportError:
            found = None
        if getattr(found, "__file__", None) != file:
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None and spec.loader is not None, f"{file} is a file of Python"
            found = sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found
