"""Processes that claim a directory when told so, forked from one warm process: `python -m tests.checkpoint.claimers`.

A line of JSON [DIRECTORY, COUNT] on stdin starts so many at once; each prints [pid, "mine" or the refusal] and, if it
has the directory, holds it until SIGUSR1. The process that forks never waits for them: killed ones stay zombies.
"""

import json
import os
import signal
import sys

from fmegatron import checkpoint
from fmegatron.checkpoint.files import claims
from fmegatron.checkpoint.files.claims import ClaimedError


def claimer(directory, gate):
    release = []
    signal.signal(signal.SIGUSR1, lambda *_: release.append(1))
    os.read(gate, 1)  # until all are there
    try:
        with checkpoint.claim(directory):
            say("mine")
            while not release:
                signal.pause()
        say("released")
    except ClaimedError as error:
        say(str(error))


def say(text):
    os.write(1, (json.dumps([os.getpid(), text]) + "\n").encode())


def main():
    claims.BEAT_S = 0.5  # who cannot see the process waits for the next beat
    for line in sys.stdin:
        directory, count = json.loads(line)
        gate, opener = os.pipe()
        for _ in range(count):
            if os.fork() == 0:
                try:
                    os.close(opener)
                    claimer(directory, gate)
                finally:
                    os._exit(0)
        os.close(gate)
        os.close(opener)


if __name__ == "__main__":
    main()
