"""Python programs as processes of their own, forked from one that has imported torch: `subprocess` without the seconds.

What a program sees is what `python script.py`, `python -m module` and `python -c code` give it: `__main__`, arguments,
search path, environment, streams, session, exit handlers. What it does not see is the start of the interpreter: modules
are imported already, -W and -X and the variables that Python or OpenMP read at their start have no effect. Ranks that a
torchrun starts are forks, too.
"""

import fcntl
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from fmegatron.testing import forkserver
from fmegatron.testing.forkserver import Forkserver
from tests.house import ROOT

__all__ = ["Process", "Python", "Twin"]

_HIGH = 200  # descriptors that move out of the way of those whose numbers a child wants


class Python:
    """Starts programs: `popen` and `run` take what subprocess.Popen and subprocess.run take (see Process)."""

    def __init__(self, server: Forkserver):
        self._server = server

    def popen(self, command, **settings) -> "Process":
        """Start [sys.executable, script or -c or -m, ...]."""
        return Process(self._server, command, **settings)

    def run(self, command, timeout=None, **settings) -> subprocess.CompletedProcess:
        """Start it, wait for its end, and give its status and what it said."""
        process = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def two_ranks(self, module: str, *arguments) -> list[tuple[str, str]]:
        """`python -m module arguments` on two ranks that meet by torchrun's variables; what each wrote, when both have
        ended well: (stdout, stderr)."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [sys.executable, "-m", module, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = []
        for rank in "01":
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
            where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
            processes.append(self.popen(command, cwd=ROOT, env={**os.environ, **where}, **pipes))
        texts = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], texts
        return texts


class Twin(Forkserver):
    """A server that is a fork of this process, which has one thread, and not an interpreter that imports all anew.

    The constructor returns in both processes; in the one that serves `serve` is to be called.
    """

    def __init__(self):
        ours, theirs = socket.socketpair()
        self._lock, self.forks = threading.Lock(), True
        self.serves = os.fork() == 0
        self._socket, other = (theirs, ours) if self.serves else (ours, theirs)
        other.close()
        if not self.serves:
            threads = forkserver.answer(self._socket)
            assert threads == 1, f"{threads} threads cannot fork safely"

    def serve(self):
        """Serve until the owner is gone. Returns in a child when its work is done, too."""
        forkserver.serve(self._socket.detach(), ())


class Process:
    """As much of subprocess.Popen as the tests use."""

    def __init__(
        self, server, command, stdin=None, stdout=None, stderr=None, text=False, env=None, cwd=None,
        start_new_session=False, pass_fds=(),
    ):  # fmt: skip
        executable, *arguments = map(os.fspath, command)
        assert executable == sys.executable, f"a fork runs {sys.executable} and not {executable}"
        self.args, self.returncode, mode = command, None, "" if text else "b"
        theirs, self.stdin, self.stdout, self.stderr = [], None, None, None
        for number, stream in enumerate((stdin, stdout, stderr)):
            ours = None
            if stream == subprocess.PIPE:
                ends = os.pipe()
                ours = os.fdopen(ends[1], f"w{mode}") if number == 0 else os.fdopen(ends[0], f"r{mode}")
                theirs.append(ends[number != 0])
            elif stream is None or stream == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_RDWR) if stream else os.dup(number))
            else:
                theirs.append(os.dup(stream if isinstance(stream, int) else stream.fileno()))
            setattr(self, ("stdin", "stdout", "stderr")[number], ours)
        settings = (arguments, dict(os.environ if env is None else env), os.fspath(cwd or os.getcwd()))
        targets = (0, 1, 2, *pass_fds)
        try:
            files = (*theirs, *pass_fds)
            self._fork = server.start(__name__, "become", (*settings, start_new_session, targets), files)
        finally:
            for file in theirs:
                os.close(file)
        self.pid = self._fork.pid

    def poll(self):
        """The exit status, None while it runs."""
        self.returncode = self._fork.poll()
        return self.returncode

    def wait(self, timeout=None):
        """The exit status, after the end."""
        self.returncode = self._fork.wait(timeout)
        return self.returncode

    def send_signal(self, number):
        """Send a signal, unless it has ended."""
        self._fork.send_signal(number)

    def kill(self):
        """SIGKILL."""
        self._fork.kill()

    def communicate(self, input=None, timeout=None):
        """Write `input`, read both streams to their ends, wait; (stdout, stderr)."""
        end, read = None if timeout is None else time.monotonic() + timeout, {}
        if self.stdin is not None and not self.stdin.closed:
            if input:
                self.stdin.write(input)
            self.stdin.close()
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None and not stream.closed]
        readers = [threading.Thread(target=lambda s=s: read.update({s: s.read()}), daemon=True) for s in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        for stream in streams:
            stream.close()
        return read.get(self.stdout), read.get(self.stderr)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def become(arguments, environment, cwd, session, targets, *files):
    """In the fork: be the program. Returns when its last line has run; the interpreter then ends as always."""
    if session:
        os.setsid()
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max((_HIGH, *targets)) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, target in zip(moved, targets, strict=True):
        os.dup2(file, target)
        os.close(file)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if environment.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    kind, *rest = arguments
    if kind == "-u":
        sys.stdout.reconfigure(write_through=True)
        arguments = rest
        kind, *rest = arguments
    if (kind, *rest[:1]) == ("-m", "torch.distributed.run"):
        if (server := Twin()).serves:
            return server.serve()
        subprocess_handler.Popen = lambda args, **settings: Process(server, args, **settings)
    first = "" if kind == "-c" else cwd if kind == "-m" else os.path.dirname(os.path.abspath(kind))
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv, code = ["-c", *rest[1:]], compile(rest[0], "<string>", "exec")
    else:
        sys.argv, main.__file__ = arguments, kind
        with open(kind, "rb") as file:
            code = compile(file.read(), kind, "exec")
    exec(code, main.__dict__)
