"""Kills of trainers and writers during save_async: `python -m tests.checkpoint.async_campaign DIRECTORY TRIALS SEED`.

Each trial has one complete step, ranks that save the next one asynchronously, and a SIGKILL of a trainer, of all, or of
a writer at a random time. Then the newest step must restore bit for bit, and the next save must work.
"""

import json
import os
import random
import shutil
import signal
import sys
import time

import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import AsyncSaver, save_async
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree
from tests.checkpoint.forked_ranks import collect, launch, run
from tests.writers import Fork, started_by


def layouts_on(ranks):
    mesh = Mesh(fsdp=ranks)
    return {"w": Layout((2048, 1024), torch.float32, mesh, ("fsdp",)), "n": Layout((), torch.int64, mesh)}


def state(version):
    return {"w": torch.full((2048, 1024), float(version)), "n": torch.tensor(version)}


def path(directory, step):
    return os.path.join(directory, f"step_{step:08d}")


def saving(directory, step, ranks, notes=None):
    """A function of a rank: save asynchronously; leave the writer's number for the one who kills."""
    local = cut_tree(state(step), layouts_on(ranks))

    def rank_main(world, calls):
        try:
            with AsyncSaver() as saver:
                saver.reserve(layouts_on(ranks), world)
                handle = save_async(path(directory, step), local[world.rank], layouts_on(ranks), world, saver=saver)
                if notes:
                    with open(f"{notes}.{world.rank}.new", "w") as f:
                        f.write(str(saver.writer_pid))
                    os.rename(f"{notes}.{world.rank}.new", f"{notes}.{world.rank}")
                while not handle.poll():
                    time.sleep(0.001)
                handle.result()
        except RuntimeError as error:
            return f"{error}"[:300]

    return rank_main


def newest(directory):
    def rank_main(world, calls):
        step, got, _ = checkpoint.Manager(directory).restore_latest(layouts_on(1))
        assert_same_bits(got, state(step))
        return step

    return rank_main


def ended(pid):
    """Whether a process is gone, or dead and not yet waited for by its parent."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def trial(directory, rng):
    ranks, victim = rng.choice((1, 2)), rng.choice(("trainer", "trainers", "writer"))
    notes = os.path.join(os.path.dirname(directory), f"notes{os.path.basename(directory)}")
    run(1, lambda world, calls: checkpoint.save(path(directory, 1), state(1), layouts_on(1)))
    pids, pipes = launch(ranks, saving(directory, 2, ranks, notes))
    deadline = time.monotonic() + 600
    while not all(os.path.exists(f"{notes}.{r}") for r in range(ranks)) and time.monotonic() < deadline:
        time.sleep(0.001)
    writers = []
    for r in range(ranks):
        with open(f"{notes}.{r}") as f:
            writers.append(int(f.read()))
    time.sleep(rng.random() ** 2 * 0.06)
    chosen = rng.randrange(ranks)
    for pid in {"trainer": [pids[chosen]], "trainers": pids, "writer": [writers[chosen]]}[victim]:
        try:
            os.kill(pid, signal.SIGKILL)  # our child, or our child's
        except ProcessLookupError:
            pass
    results = collect(pids, pipes, seconds=600)
    assert all(got is None or "result" in got for got in results), results
    deadline = time.monotonic() + 600
    while not all(map(ended, writers)):
        assert time.monotonic() < deadline, "a writer lives on without its trainer"
        time.sleep(0.002)
    told = any(got is not None and got["result"] is None for got in results)
    (step,) = run(1, newest(directory))
    assert step == 2 or (step == 1 and not told), (step, results)
    run(1, lambda world, calls: checkpoint.Manager(directory).save(3, state(3), layouts_on(1)) and None)
    assert run(1, newest(directory)) == [3]
    assert not [name for name in os.listdir(directory) if name.startswith(".step")], os.listdir(directory)
    return {"victim": victim, "ranks": ranks, "step": step, "told": told}


def main(directory, trials, seed):
    torch.set_num_threads(1)
    rng = random.Random(seed)
    for number in range(trials):
        at = os.path.join(directory, f"{number}")
        try:
            with started_by(Fork):
                seen = trial(at, rng)
        except Exception as error:
            seen = {"failed": f"{type(error).__name__}: {error}", "files": sorted(os.listdir(at))}
        print(json.dumps({"trial": number, **seen}), flush=True)
        shutil.rmtree(at)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
