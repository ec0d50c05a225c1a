"""The trainer's handle of its writer process: start, messages, liveness, end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

from fmegatron.checkpoint.background.wire import Channel

# A fresh interpreter with the trainer's search path; `-c` and not a user's script, so nothing of that is imported.
_BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from fmegatron.checkpoint.background.writer import main
main(*map(int, sys.argv[2:]))"""
_LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NO_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_END_S = 2.0
start_process = subprocess.Popen  # the tests fork


@contextlib.contextmanager
def _this_process() -> Iterator[tuple[int, ...]]:
    """A descriptor by which its holder notices the end of this process; none where the system has no such thing."""
    found = ()
    with contextlib.suppress(OSError, AttributeError):
        found = (os.pidfd_open(os.getpid()),)
    try:
        yield found
    finally:
        for file in found:
            os.close(file)


class WriterProcess:
    """A running writer. It is stopped when this object is no longer used, and when the interpreter exits.

    ready: it has started and waits for work.
    """

    def __init__(self, arena_fd: int, nice: int):
        if not sys.executable:
            raise RuntimeError("save_async: this Python does not know its executable (sys.executable); use save")
        ours, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if k not in _LEFT_OUT and not k.startswith("TORCHELASTIC")}
        env |= dict.fromkeys(_ONE_THREAD, "1") | dict.fromkeys(_NO_DEVICES, "")
        self._errors = tempfile.TemporaryFile()
        with theirs, _this_process() as trainer:
            files = (theirs.fileno(), arena_fd, *trainer)
            arguments = [json.dumps(sys.path), f"{nice}", *map(str, files)]
            # Its own session: Ctrl-C in a terminal and signals to the trainer's process group do not reach it.
            self._process = start_process(
                [sys.executable, "-c", _BOOT, *arguments],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=env,
                start_new_session=True,
            )
        self.channel, self.pid, self.ready = Channel(ours), self._process.pid, False
        self._end = weakref.finalize(self, _end, self._process, self.channel, self._errors, os.getpid())

    def send(self, **message: Any) -> None:
        """Send a message; one to a dead writer is lost; `death` reports it."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def reports(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """What the writer has reported, waiting up to `timeout_s` for the first report."""
        found = [] if self.channel.closed else self.channel.receive(timeout_s)
        self.ready = self.ready or any(report["did"] == "ready" for report in found)
        return [report for report in found if report["did"] != "ready"]

    def death(self) -> str | None:
        """How it died, or None while it lives. All its reports must have been taken."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 1500))
        said = self._errors.read().decode(errors="replace").strip()
        return f"its writer process {self.pid} {how}" + (f": {said}" if said else "")

    def wait_for_death(self) -> None:
        """It has closed its end of the channel, so it is ending; SIGKILL if that takes long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
            return
        self.kill()

    def state(self) -> str:
        """The state of the process as the system reports it, for messages: "stopped", "waiting for the disk"..."""
        words = {"T": "stopped", "t": "traced", "D": "waiting for the disk", "R": "running", "S": "sleeping"}
        try:
            with open(f"/proc/{self.pid}/stat") as f:
                return words.get(f.read().rpartition(")")[2].split()[0], "ending")
        except OSError:
            return "alive"

    def kill(self) -> None:
        """SIGKILL, and wait a little until the system has ended it."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def close(self, timeout_s: float = _END_S) -> None:
        """Ask it to finish its work and end; kill it if it does not in time."""
        self.send(do="quit")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._end()


def _end(process: subprocess.Popen, channel: Channel, errors, owner: int) -> None:
    """In any case no process and no open file is left. The writer ends by itself when the channel closes."""
    if os.getpid() != owner:  # a forked child of the trainer exits; the writer is not its own
        return
    channel.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    errors.close()
