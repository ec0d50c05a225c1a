"""A peer as a process of its own that answers lines on stdin with lines on stdout, under an interpreter that has it."""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

PEERS = pathlib.Path(__file__).parent
PEER_PYTHON = PEERS.parents[2] / ".venv-peers/bin/python"


class Peer:
    """peers/SCRIPT NAME ARGUMENTS..., by the first of the interpreters under which it says "ready".

    `process` is None where none did. own: try the interpreter of this process before that of `make bench-peers-env`.
    """

    def __init__(self, script: str, name: str, *arguments: object, own: bool = False):
        self.name, self.log, self.process = name, tempfile.TemporaryFile("w+"), None
        interpreters = [sys.executable, str(PEER_PYTHON)] if own else [str(PEER_PYTHON)]
        for python in filter(os.path.exists, interpreters):
            command = [python, str(PEERS / script), name, *map(str, arguments)]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
            )
            if process.stdout.readline() == "ready\n":
                self.process = process
                return
            process.wait()

    def ask(self, line: str) -> float:
        """The number that it answers. Raises RuntimeError with what the peer wrote when it died."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            self.log.seek(0)
            raise RuntimeError(f"the peer {self.name} died: {self.log.read()[-500:]}")
        return float(answer)

    def end(self) -> int:
        """Its exit status, after its stdin has ended."""
        self.process.stdin.close()
        return self.process.wait(60)


def started(script: str, names: tuple[str, ...], *arguments: object, own: tuple[str, ...] = ()) -> list[Peer]:
    """The peers of these names that can be started; the others are named on stderr."""
    peers = [Peer(script, name, *arguments, own=name in own) for name in names]
    if missing := [peer.name for peer in peers if peer.process is None]:
        print(f"left out: {', '.join(sorted(missing))} (make bench-peers-env)", file=sys.stderr)
    return [peer for peer in peers if peer.process is not None]
