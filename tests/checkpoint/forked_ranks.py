"""Real ranks that start in milliseconds and can be killed: forks of one warm process, joined by socket pairs.

The process that forks must have one thread and must not have used tensorstore: threads do not survive a fork.
"""

import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback

import torch


class SocketWorld:
    """What `checkpoint` needs of a World, over one socket for each pair of ranks. A peer that is gone is an error."""

    device = torch.device("cpu")

    def __init__(self, rank, size, peers):
        self.rank, self.size, self._peers = rank, size, peers  # rank -> file object of a socket

    def _all(self, value, what):
        """The JSON values of all ranks."""
        line = (json.dumps(value) + "\n").encode()
        try:
            for peer in self._peers.values():
                peer.write(line)
                peer.flush()
        except OSError:
            pass  # read below what those who live have to say
        values = {self.rank: value}
        for r, peer in self._peers.items():
            try:
                got = peer.readline()
            except OSError:
                got = b""
            if not got:
                raise RuntimeError(f"{what} failed: rank {r} is gone")
            values[r] = json.loads(got)
        return [values[r] for r in range(self.size)]

    def agree(self, error, what):
        errors = self._all(error, what)
        first = next((r for r, e in enumerate(errors) if e is not None), None)
        if first is not None:
            raise RuntimeError(f"{what} failed on rank {first} of {self.size}: {errors[first]}")

    def broadcast_text(self, text, source=0):
        return self._all(text, "broadcast_text")[source]

    def minimum(self, row):
        return self.gather_rows(row).amin(0)

    def gather_rows(self, row):
        return torch.tensor(self._all(row.tolist(), "gather_rows"))

    def exchange(self, sends, receives):
        mail = self._all([(to, x.reshape(-1).view(torch.uint8).tolist()) for to, x in sends], "exchange")
        inbox = {peer: iter([data for to, data in mail[peer] if to == self.rank]) for peer in {p for p, _ in receives}}
        for peer, x in receives:
            x.view(-1).view(torch.uint8).copy_(torch.tensor(next(inbox[peer]), dtype=torch.uint8))


class Calls:
    """Counts what a process does to the file system and kills it (or its group) before the n-th call.

    Python's own calls are seen by an audit hook, fsync by a wrapper; what C++ threads write is hit by kills in time.
    """

    def __init__(self):
        self.done, self.kill_at, self.group, self.watch, self._watching = 0, None, False, None, set()
        fsync, os.fsync = os.fsync, lambda fd: (self.count(), fsync(fd))[1]
        sys.addaudithook(lambda event, args: self.count() if event in self.SEEN else None)

    SEEN = frozenset(
        "open os.rename os.remove os.mkdir os.rmdir os.listdir os.scandir shutil.rmtree ctypes.dlsym os.link".split()
    )

    def count(self):
        """One call. `watch()` is called before each, and what it does is not counted."""
        if (thread := threading.get_ident()) in self._watching:
            return
        self.done += 1
        if self.watch is not None:
            self._watching.add(thread)
            self.watch()
            self._watching.discard(thread)
        if self.done == self.kill_at:
            (os.killpg if self.group else os.kill)(0 if self.group else os.getpid(), signal.SIGKILL)


def launch(size, function):
    """Start `function(world, calls) -> JSON value` on ranks; returns (pids, result pipes). All in one process group."""
    links = {pair: socket.socketpair() for pair in itertools.combinations(range(size), 2)}
    pids, pipes = [], []
    for rank in range(size):
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setpgid(0, pids[0] if pids else 0)
                peers = {}
                for (a, b), (at_a, at_b) in links.items():
                    mine = at_a if a == rank else at_b if b == rank else None
                    if mine is not None:
                        peers[b if a == rank else a] = mine.makefile("rwb")
                    at_a.close()
                    at_b.close()
                for pipe in (out, *pipes):
                    os.close(pipe)
                try:
                    value = {"result": function(SocketWorld(rank, size, peers), Calls())}
                except BaseException as error:
                    value = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
                os.write(into, json.dumps(value).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(into)
        os.setpgid(pid, pids[0] if pids else 0)
        pids.append(pid)
        pipes.append(out)
    for ends in links.values():
        for end in ends:
            end.close()
    return pids, pipes


def collect(pids, pipes, seconds=600):
    """What each rank returned: {"result"}, {"error"}, or None of one that was killed. Kills ranks that hang."""
    results, deadline = [], time.monotonic() + seconds
    for pid, pipe in zip(pids, pipes, strict=True):
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise RuntimeError(f"a rank hangs ({pids.index(pid)} of {len(pids)})")
            time.sleep(0.0005)
        data = b""
        while more := os.read(pipe, 1 << 16):
            data += more
        os.close(pipe)
        results.append(json.loads(data) if data and os.WIFEXITED(found[1]) else None)
    return results


def apart(work):
    """The result (JSON) of `work()` in a fork: a process that has used tensorstore has no forks that use it."""
    (got,) = run(1, lambda world, calls: work())
    return got


def run(size, function, seconds=600):
    """The results of `function(world, calls)` on ranks that nobody kills."""
    results = collect(*launch(size, function), seconds)
    for got in results:
        if got is None or "error" in got:
            raise RuntimeError(f"a rank died: {got and got['trace']}")
    return [got["result"] for got in results]
