"""Two jobs that save into one folder, nothing patched: `python -m tests.checkpoint.two_jobs_campaign DIRECTORY SECONDS
SEED KEEP MACHINES BACKGROUND`; KEEP is what each Manager keeps, 0 for all; with MACHINES 2 the second job cannot see
whether processes of the others live, nor they its own (that alone is pretence); with BACKGROUND 1 a process of its own
writes the saves of the second job.

Both save steps of their own choice, often the same ones and at the same time; every save that is acknowledged is noted
with what it held. Meanwhile one process restores the newest step over and over, one runs `gc`, and the savers are
stopped and go on at random. At the end every acknowledged step that is listed must restore bit for bit as one that was
acknowledged, and with KEEP 0 all of them must be listed. Prints one JSON object.
"""

import json
import os
import random
import signal
import sys
import time
import warnings

import torch

from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint.tools.gc import collect
from fmegatron.files import owners
from fmegatron.layout import Layout, Mesh

LEAVES = 12
LAYOUTS = {f"w{i}": Layout((160, 128), torch.float32, Mesh()) for i in range(LEAVES)}  # a file of 80 KiB each


def state(value):
    return {name: torch.full((160, 128), value + 1000.0 * i) for i, name in enumerate(LAYOUTS)}


AT_LEAST = 5  # saves of each job, and restores: a busy machine does less in the same time


def saver(directory, job, until, seed, keep, machines, background):
    """Save until the time is over and some are saved; the acknowledged saves as [step, value], and how many were
    refused, and why."""
    rng, begun, done, refused = random.Random(seed * 7919 + job), {}, [], [""]
    if job and machines > 1:
        owners._where = lambda: "elsewhere"
    with Manager(directory, keep=keep or None) as manager:

        def look():
            for report in manager.poll():
                value = begun.pop(report.step)
                if report.durable:
                    done.append([report.step, value])
                else:
                    refused.append(report.error)

        number = 0
        while time.time() < until or len(done) < AT_LEAST:
            number += 1
            step = (manager.latest() or 0) + rng.choice((0, 1, 1, 2))
            value = float(2 * number + job)
            if step in begun:
                look()
                continue
            begun[step] = value
            try:
                report = manager.save(
                    step, state(value), LAYOUTS, metadata={"value": value}, wait=not (job and background)
                )
            except (ValueError, RuntimeError) as error:  # the other job was faster, or is in the way: nothing was said
                del begun[step]
                refused.append(str(error))
                continue
            if report.error:
                del begun[step]
                refused.append(report.error)
            time.sleep(rng.random() * 0.02)
            look()
    look()
    return {"saved": done, "refused": len(refused) - 1, "last_refusal": refused[-1][-300:]}


def reader(directory, until):
    """Restore until the time is over and some are restored; what went wrong."""
    wrong, count = [], 0
    while time.time() < until or (count < AT_LEAST and not wrong):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                step, got, metadata = Manager(directory).restore_latest(LAYOUTS)
                count += 1
            except CheckpointError as error:
                if "holds no complete checkpoint" not in str(error) or count:
                    wrong.append(str(error)[:300])
                continue
        wanted = state(metadata["value"])
        if not all(torch.equal(got[name], wanted[name]) for name in LAYOUTS):
            wrong.append(f"step {step} is a mixture of two saves")
        # A step that was deleted between the look and the lease is left out in words; damage is not.
        wrong += [str(w.message)[:300] for w in caught if "does not exist" not in str(w.message)]
    return {"wrong": wrong, "restored": count}


def collector(directory, until):
    """Collect garbage until the time is over: nothing is too young for it."""
    removed = []
    while time.time() < until:
        try:
            removed += [a.path for a in collect(directory, age=0.0).actions if a.kind == "remove"]
        except ValueError:  # there is no directory yet, or nothing in it
            pass
        time.sleep(0.02)
    return removed


def stops(pids, until, seed):
    """Stop the savers in turn for a while, wherever they are."""
    rng = random.Random(seed)
    while time.time() < until:
        time.sleep(rng.random() * 0.2)
        pid = rng.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.random() ** 2 * 0.3)
        os.kill(pid, signal.SIGCONT)


def fork(work, *args):
    """Run `work(*args)` in a fork; returns its number, and a function that waits for its result."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(out)
            data = json.dumps(work(*args)).encode()
            with os.fdopen(into, "wb") as f:
                f.write(data)
            code = 0
        finally:
            os._exit(code)
    os.close(into)

    def result():
        with os.fdopen(out, "rb") as f:
            data = f.read()
        assert os.waitpid(pid, 0)[1] == 0 and data, f"{work.__name__} died"
        return json.loads(data)

    return pid, result


def main(directory, seconds, seed, keep, machines, background):
    torch.set_num_threads(1)
    until = time.time() + seconds
    jobs = [fork(saver, directory, job, until, seed, keep, machines, background) for job in (0, 1)]
    others = [fork(work, directory, until) for work in (reader, collector)]
    stops([pid for pid, _ in jobs], until, seed)
    done, (looked, collected) = [job() for _, job in jobs], [other() for _, other in others]
    saved = {}
    for step, value in (pair for job in done for pair in job["saved"]):
        saved.setdefault(step, set()).add(value)
    manager, broken = Manager(directory), []
    listed = manager.steps()
    for step in listed:
        try:
            got, metadata = manager.restore(step, LAYOUTS)
        except CheckpointError as error:
            broken.append(f"step {step}: {error}"[:300])
            continue
        wanted = state(metadata["value"])
        same = all(torch.equal(got[name], wanted[name]) for name in LAYOUTS)
        if not same or (step in saved and metadata["value"] not in saved[step]):
            broken.append(f"step {step}: holds {metadata['value']}, saved were {sorted(saved.get(step, []))}")
    lost = sorted(set(saved).difference(listed)) if not keep else []
    if saved and max(saved) not in listed:
        lost.append(max(saved))
    count = sum(len(job["saved"]) for job in done)
    twice = sum(len(values) > 1 for values in saved.values())
    found = {
        "acknowledged": count,
        "by job": [len(job["saved"]) for job in done],
        "twice": twice,
        "refused": [job["refused"] for job in done],
        "refusals": [job["last_refusal"] for job in done],
        "broken": broken,
        "lost": lost,
        "reader": looked,
        "collected": len(collected),
    }
    found["left"] = [name for name in sorted(os.listdir(directory)) if name.startswith(".")]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:]))
