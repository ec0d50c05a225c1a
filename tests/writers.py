"""Writer processes of asynchronous saves without the seconds that an interpreter takes to import torch: forks.

A fork has what a writer is given: its command, environment, descriptors and session. Tests of the start itself want the
interpreter (`fresh_writers` of conftest.py).
"""

import contextlib
import os
import subprocess
import sys
import time
import traceback

from fmegatron.checkpoint.background import process
from tests.fresh import become

__all__ = ["Fork", "started_by"]


@contextlib.contextmanager
def started_by(start):
    """Within, writers are started by `start`, which takes what subprocess.Popen takes."""
    before, process.start_process = process.start_process, start
    try:
        yield
    finally:
        process.start_process = before


class Fork:
    """A program as a fork of this process: as much of subprocess.Popen as a writer needs.

    Not in a process that has used tensorstore or several threads of torch: the fork would wait for threads that it
    does not have.
    """

    def __init__(self, command, *, pass_fds, env, start_new_session, stdin, stdout, stderr):
        assert stdin == stdout == subprocess.DEVNULL and command[0] == sys.executable
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            try:
                null, targets = os.open(os.devnull, os.O_RDWR), (0, 1, 2, *pass_fds)
                files = (null, os.dup(null), os.dup(stderr.fileno()), *pass_fds)
                for file in {int(name) for name in os.listdir("/proc/self/fd")} - {*files, 0, 1, 2}:
                    with contextlib.suppress(OSError):  # that of the listing
                        os.close(file)
                become(command[1:], env, os.getcwd(), start_new_session, targets, *files)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)

    def poll(self):
        """The exit status, None while it runs."""
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout):
        """The exit status, after the end."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.001)
        return self.returncode

    def kill(self):
        """SIGKILL, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, 9)
