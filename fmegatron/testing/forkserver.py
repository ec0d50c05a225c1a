"""A fork server: processes that start in milliseconds, forked from one that has imported torch."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

__all__ = ["Fork", "Forkserver", "answer", "serve"]

_ANSWER_S = 300
_NUMBER = 8  # bytes of an integer on the wire


class Fork:
    """A child of a Forkserver. pid: it belongs to no other process before `wait` has returned."""

    def __init__(self, server: Forkserver, pid: int):
        self.pid, self.returncode, self._server, self._end = pid, None, server, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit status, -N if signal N ended it, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, after its end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            end = select.poll()
            end.register(self._end, select.POLLIN)
            if not end.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(f"fork server: process {self.pid}", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._server._reap(self.pid))
            os.close(self._end)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._end, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Forkserver:
    """A process that imports `modules` once and forks children that have them.

        with Forkserver("torch") as server:
            child = server.start("module", "function", arguments, files=[descriptor])
            child.wait()

    A child calls `module.function(*arguments, *descriptors)` and ends as any interpreter does, exit handlers included.
    It has the environment of the server, and the same seeds of torch and numpy as the other children. Where a fork is
    unsafe (no Linux; an import has started threads) a child is an interpreter of its own: the same, in seconds.
    """

    def __init__(self, *modules: str, environment: dict[str, str] | None = None):
        self._modules, self._environment = modules, dict(os.environ if environment is None else environment)
        self._lock, self.forks = threading.Lock(), hasattr(os, "pidfd_open")
        if self.forks:
            self._process, self._socket, threads = self._interpreter()
            if threads > 1:
                self.close()
                self.forks = False

    def start(
        self, module: str, function: str, arguments: Sequence[Any] = (), files: Sequence[int] = ()
    ) -> Fork | subprocess.Popen:
        """Start a child; arguments are pickled, and it gets descriptors of its own of `files`, behind them."""
        call = (module, function, tuple(arguments))
        if self.forks:
            with self._lock:
                return Fork(self, _ask(self._socket, ("fork", call), files))
        process, connection, _ = self._interpreter()
        with connection:
            _ask(connection, ("call", call), files)
        return process

    def _interpreter(self) -> tuple[subprocess.Popen, socket.socket, int]:
        """A process that serves, the connection to it, and the number of its threads when all is imported."""
        ours, theirs = socket.socketpair()
        with theirs:  # this file as a program: it imports nothing but the modules that are asked for
            process = subprocess.Popen(
                [sys.executable, __file__, f"{theirs.fileno()}", json.dumps(sys.path), *self._modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**self._environment, "OPENBLAS_NUM_THREADS": "1"},  # numpy would start threads on import
            )
        ours.settimeout(_ANSWER_S)
        try:
            return process, ours, answer(ours)
        except BaseException:
            ours.close()
            process.kill()
            process.wait()
            raise

    def _reap(self, pid: int) -> int:
        with self._lock:
            return _ask(self._socket, ("reap", pid))

    def close(self) -> None:
        """End the server; its children live on."""
        if self.forks:
            self._socket.close()
            self._process.wait()

    def __enter__(self) -> Forkserver:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _ask(connection: socket.socket, request: tuple, files: Sequence[int] = ()) -> int:
    data = pickle.dumps((*request, len(files)))
    with contextlib.suppress(OSError):  # of a process that is gone: `_answer` reports it
        connection.sendall(len(data).to_bytes(_NUMBER, "little") + data)
        if files:
            socket.send_fds(connection, [b"f"], files)
    return answer(connection)


def answer(connection: socket.socket) -> int:
    """The next number that a server sends: of its threads when it begins, then what each request asks for."""
    data = b""
    try:
        data = _exactly(connection, _NUMBER)
    except TimeoutError:
        raise TimeoutError(f"fork server: the process did not answer within {_ANSWER_S} s") from None
    except OSError:
        pass
    if len(data) < _NUMBER:
        raise RuntimeError("fork server: the process has ended; stderr has the reason")
    return int.from_bytes(data, "little")


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes, fewer at the end of the connection."""
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def serve(descriptor: int, modules: Sequence[str]) -> None:
    """Import `modules`, then start children for whoever has the other end of this socket, until it is closed.

    This process must have one thread. Returns in a child when its work is done, too: then its interpreter ends.
    """
    connection = socket.socket(fileno=descriptor)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # what is imported stays, and a collection in a child does not copy its pages
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for its owner and its children
    _tell(connection, len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 2)
    while len(size := _exactly(connection, _NUMBER)) == _NUMBER:
        what, argument, count = pickle.loads(_exactly(connection, int.from_bytes(size, "little")))
        files = socket.recv_fds(connection, 1, count)[1] if count else []
        if what == "reap":
            _tell(connection, os.waitpid(argument, 0)[1])
        elif what == "fork" and (pid := os.fork()):
            for file in files:
                os.close(file)
            _tell(connection, pid)
        else:
            if what == "call":
                _tell(connection, os.getpid())
            connection.close()
            signal.signal(signal.SIGINT, interrupt)
            module, function, arguments = argument
            getattr(importlib.import_module(module), function)(*arguments, *files)
            return


def _tell(connection: socket.socket, number: int) -> None:
    connection.sendall(number.to_bytes(_NUMBER, "little"))


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])
    serve(int(sys.argv[1]), sys.argv[3:])
