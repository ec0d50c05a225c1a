"""A campaign of kills, run as a process of its own: `python -m tests.checkpoint.crash_campaign DIRECTORY TRIALS SEED`.

Each trial: a directory of steps with one complete step; ranks save, save again, save with retention, or go back past
another step and save; one rank or all are killed by SIGKILL before their n-th file system call or after a random time;
then the newest complete step must restore bit for bit, the next save must work, and nothing may be left over. Prints
one JSON object per trial.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import types
import warnings

import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.layout import Layout, Mesh
from tests.checkpoint import fake_world
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, small_sizes
from tests.checkpoint.forked_ranks import apart, collect, launch, run

KINDS = ("save", "again", "retention", "rewind")
FEW = 100  # trials below which not every kind is tried on every number of ranks
ABANDONED = 5  # the step that a run leaves behind when it goes back
PHASES = ("before", "chunks", "metadata", "marked", "renaming", "published", "deletion", "done")


def layouts_on(ranks):
    """Leaves of all homes: in chunks, in flat pieces, packed."""
    mesh = Mesh(fsdp=ranks)
    return {
        "w": Layout((128, 96), torch.float32, mesh, ("fsdp",)),
        "same": Layout((64, 64), torch.bfloat16, mesh),
        "flat": Layout((5, 7, 9), torch.float32, mesh, flat=("fsdp",) if ranks > 1 else ()),
        "step": Layout((), torch.int64, mesh),
    }


def state(version):
    generator = torch.Generator().manual_seed(version)
    return tree.map(
        lambda x: torch.randint(1, 1000, x.shape, generator=generator).to(x.dtype).add(version * 1000), layouts_on(1)
    )


def manager(directory, kind, world):
    return checkpoint.Manager(directory, keep=1 if kind == "retention" else None, world=world)


def save(directory, kind, step, version, ranks, kill=None, watch=None):
    """A function of a rank that saves; `kill`: (rank, call, all ranks?) to be killed before that call."""
    local = cut_tree(state(version), layouts_on(ranks))

    def rank_main(world, calls):
        calls.done, calls.watch = 0, watch
        if kill is not None and kill[0] == world.rank:
            calls.kill_at, calls.group = kill[1:]
        try:
            with manager(directory, kind, world) as of, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is set aside is said
                if kind == "rewind":
                    of.rewind(1)
                of.save(step, local[world.rank], layouts_on(ranks), {"version": version})
        except RuntimeError as error:  # another rank is gone
            return f"{error}"[:300]

    return rank_main


def newest(directory):
    """A function of a rank that restores the newest step and compares it with what was saved; returns the version."""

    def rank_main(world, calls):
        step, got, metadata = checkpoint.Manager(directory).restore_latest(layouts_on(1))
        assert_same_bits(got, state(metadata["version"]))
        return {"step": step, "version": metadata["version"]}

    return rank_main


def phase(directory, step):
    """Where version 2 of a step is on its way, by what lies on the disk."""
    place = open_store(os.path.join(directory, f"step_{step:08d}"))
    names, versions = place.inside(), {}
    for name in names:
        with contextlib.suppress(OSError, ValueError), open(os.path.join(place.text, name, "manifest.json")) as f:
            versions[name] = json.load(f)["metadata"]["version"]
    new = [name for name, version in versions.items() if version == 2]
    if (root := (place.pointer() or {}).get("root")) in new:
        drafts = [name for name in names if name.startswith(".COMPLETE-")]
        return "renaming" if drafts else "done" if names == sorted(["COMPLETE", root]) else "published"
    if new:
        marked = os.path.exists(os.path.join(place.text, new[0], "COMPLETE"))
        return "marked" if marked else "metadata"
    drafts = [name.removeprefix(".COMPLETE-") for name in names if name.startswith(".COMPLETE-")]
    chunks = any(n.startswith("c") for t in drafts for _, _, all_ in os.walk(f"{place.text}/{t}") for n in all_)
    return "chunks" if chunks else "deletion" if any(n.startswith(".GONE-") for n in names) else "before"


def here(size, function):
    """The results of `function(world, calls)` on ranks that are threads of one process, which nobody kills."""

    def threads():
        with warnings.catch_warnings():
            results = fake_world.run(size, lambda world: function(world, types.SimpleNamespace()))
        for got in results:
            if isinstance(got, BaseException):
                raise got
        return results

    return apart(threads)


def prepare(directory, kind):
    """Step 1, and what is to be abandoned."""
    here(2, save(directory, "save", 1, 1, 2))
    if kind == "rewind":
        here(2, save(directory, "save", ABANDONED, ABANDONED, 2))


def calibrate(directory, kind, ranks):
    """([{phase: numbers of the calls that a rank makes in it}], seconds) of a save that nobody kills."""
    step = 1 if kind == "again" else 2
    prepare(directory, kind)
    start = time.monotonic()
    run(ranks, save(directory, kind, step, 2, ranks))
    seconds = time.monotonic() - start
    shutil.rmtree(directory)
    prepare(directory, kind)

    def watched(world, calls):
        seen = {}
        save(
            directory,
            kind,
            step,
            2,
            ranks,
            watch=lambda: seen.setdefault(phase(directory, step), []).append(calls.done),
        )(world, calls)
        return seen

    seen = run(ranks, watched)
    shutil.rmtree(directory)
    return seen, seconds


def trial(directory, rng, calibration, wanted, everyone):
    """One kill, if not at a random time, then in the phase `wanted`, of a rank or of `everyone`; what was seen.

    Raises AssertionError when anything was lost.
    """
    options = [
        (key, victim) for key, (calls, _) in calibration.items() for victim in range(key[1]) if wanted in calls[victim]
    ]
    (kind, ranks), victim = rng.choice(options)
    calls, seconds = calibration[kind, ranks]
    kill = None
    if timed := rng.random() < 0.3:
        delay = rng.random() * seconds
    else:
        kill = (victim, rng.choice(calls[victim][wanted]), everyone)
    step = 1 if kind == "again" else 2
    prepare(directory, kind)
    pids, pipes = launch(ranks, save(directory, kind, step, 2, ranks, kill))
    if timed:
        time.sleep(delay)
        for pid in pids if everyone else [pids[victim]]:
            os.kill(pid, signal.SIGKILL)  # not yet waited for: the number cannot be another's
    results = collect(pids, pipes)
    assert all(got is None or "result" in got for got in results), results
    told = any(got is not None and got["result"] is None for got in results)
    where = phase(directory, step)
    (found,) = here(1, newest(directory))
    allowed = [(1, 1), (step, 2)] + [(ABANDONED, ABANDONED)] * (kind == "rewind")
    assert (found["step"], found["version"]) in allowed, found
    assert found["version"] == 2 or not told, f"a rank was told that all is saved: {results}, {found}"
    assert here(ranks, save(directory, kind, 3, 3, ranks)) == [None] * ranks
    (after,) = here(1, newest(directory))
    assert after == {"step": 3, "version": 3}, after
    assert not [name for name in os.listdir(directory) if name.startswith(".")], os.listdir(directory)
    places = [open_store(directory).child(name) for name in open_store(directory).children() if name != "latest"]
    for place in places:  # the checkpoint, what was set aside, and nothing else
        left = place.leftovers()
        assert all(one.kind == "aside" for one in left) and (not left or kind == "rewind"), place.inside()
        assert len(place.inside()) == 2 * (place.is_complete() + len(left)), place.inside()
    abandoned = open_store(directory).child(f"step_{ABANDONED:08d}")
    asides = abandoned.inside("ASIDE-")
    assert len(asides) == (kind == "rewind"), abandoned.inside()
    for name in asides:  # nothing is lost: it can be had back
        os.rename(f"{abandoned.text}/{name}", f"{abandoned.text}/COMPLETE")
        (back,) = here(1, newest(directory))
        assert back == {"step": ABANDONED, "version": ABANDONED}, back
    lost = sum(got is None for got in results)
    return {"kind": kind, "ranks": ranks, "all": everyone, "timed": timed, "where": where, "lost": lost, **found}


def main(directory, trials, seed):
    torch.set_num_threads(1)
    rng = random.Random(seed)
    with small_sizes(chunk=4096, band=1024):
        if trials < FEW:  # every kind once, on other numbers of ranks with another seed
            kinds = [(kind, (1, 2, 4)[(i + seed) % 3]) for i, kind in enumerate(KINDS)]
        else:
            kinds = [(kind, ranks) for kind in KINDS for ranks in (1, 2, 4)]
        calibration = {key: calibrate(os.path.join(directory, "calibrate"), *key) for key in kinds}
        met = {phase for calls, _ in calibration.values() for seen in calls for phase in seen}
        order = [phase for phase in PHASES if phase in met] + ["chunks"] * 2  # written fast, and so are missed
        for number in range(trials):
            at = os.path.join(directory, f"{number}")
            try:
                seen = trial(at, rng, calibration, order[number % len(order)], (number + number // len(order)) % 2 == 0)
            except Exception as error:
                seen = {"failed": f"{type(error).__name__}: {error}", "files": sorted(os.listdir(at))}
            print(json.dumps({"trial": number, **seen}), flush=True)
            shutil.rmtree(at)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
