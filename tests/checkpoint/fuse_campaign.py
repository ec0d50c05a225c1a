"""The process behind a FUSE mount dies: `python -m tests.checkpoint.fuse_campaign DIRECTORY TRIALS SEED`.

Each trial: a save over a checkpoint, through a mount whose process kills itself at a request; then it is mounted
again, what was acknowledged (or the one before) must restore bit for bit, the next save must work, and nothing may be
left over. Prints one JSON object per trial.
"""

import json
import os
import random
import shutil
import sys

import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.files.stores import open_store
from tests.checkpoint.fake_world import assert_same_bits, small_sizes
from tests.checkpoint.forked_ranks import apart
from tests.checkpoint.fuse import Mounted

STATES = {v: {"w": torch.arange(64 * 96).float().view(64, 96) + v, "n": torch.tensor(v)} for v in (1, 2, 3)}


def saved(at, version):
    """Whether it was acknowledged; in a process that ends, as a job that has lost its disk does."""

    def work():
        try:
            checkpoint.save(at, STATES[version])
        except (OSError, RuntimeError):
            return False
        return True

    return apart(work)


def version_of(at):
    """Which of the states is there, bit for bit."""

    def work():
        got = checkpoint.restore(at)
        assert_same_bits(got, STATES[int(got["n"])])
        return int(got["n"])

    return apart(work)


def trial(mounted, at, dies_at):
    assert saved(at, 1)
    mounted.restart(dies_at)
    acknowledged = saved(at, 2)
    died = mounted.process.poll() is not None
    mounted.restart()
    found = version_of(at)
    assert found == 2 or not acknowledged, "acknowledged, and gone"
    assert saved(at, 3) and version_of(at) == 3
    left, names = apart(lambda: [[one.kind for one in open_store(at).leftovers()], open_store(at).inside()])
    assert not left and len(names) == 2, names
    return {"died": died, "acknowledged": acknowledged, "version": found}


def main(directory, trials, seed):
    torch.set_num_threads(1)
    rng = random.Random(seed)
    with small_sizes(chunk=4096, band=1024), Mounted(f"{directory}/backing", f"{directory}/mount") as mounted:
        at = f"{mounted.at}/step"
        mounted.restart()
        assert saved(at, 1)
        before = mounted.requests()
        assert saved(at, 2)
        most = mounted.requests() - before
        for number in range(trials):
            dies_at = rng.randrange(most // 2, most) if number % 2 else rng.randrange(1, most)
            try:
                seen = trial(mounted, at, dies_at)
            except Exception as error:
                seen = {"failed": f"{type(error).__name__}: {error}", "files": sorted(os.listdir(mounted.backing))}
            mounted.restart()
            print(json.dumps({"trial": number, "of": most, "dies_at": dies_at, **seen}), flush=True)
            shutil.rmtree(f"{mounted.backing}/step")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
