"""New communicators in the same processes: whatever the ranks were in when they were woken, all come to the meeting."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings

import pytest

from fmegatron.collectives.process_group import last_references
from tests.house import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_woken_at_any_time_all_meet_again(python, seed):
    """A send of gloo's event loop that failed woke nobody: of 60 meetings some had a rank that never came."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in "01":
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "tests.collectives.renewing", "60", str(seed)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**os.environ, **where, "PYTHONPATH": str(ROOT)}
        processes.append(python.popen(command, cwd=ROOT, env=environment, **streams))
    texts = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    for out, _ in texts:
        longest = json.loads(out.splitlines()[-1])
        assert longest["wake"] < 5 and longest["renew"] < 15, longest


def test_a_thread_of_a_group_that_does_not_end_is_left_behind():
    """The last reference goes in a thread of its own, so that whoever leaves is not held back; and it says so."""

    class Group:
        def __init__(self, ends):
            self.ends = ends

        def __del__(self):
            self.ends.wait(20)

    ends, began = threading.Event(), time.monotonic()
    group = Group(ends)
    with pytest.warns(RuntimeWarning, match="left behind"), last_references([group], 0.2):
        del group
    assert time.monotonic() - began < 5
    ends.set()
    group = Group(ends)
    with warnings.catch_warnings(), last_references([group], 5.0):
        warnings.simplefilter("error")
        del group
