"""Two jobs that save one name, and a process that reads it (commit_campaign.py); none is to be lost, mixed or back."""

import itertools
import json
import os
import shutil
import signal
import time

import torch

from fmegatron import checkpoint, tree
from tests.checkpoint import changes
from tests.checkpoint.commit_work import FAILED, forked, leftovers, rows_of
from tests.checkpoint.crash_campaign import layouts_on
from tests.checkpoint.fake_world import assert_same_bits


def jobs(folder, cases, rng, worse):
    """Each acknowledgement is a case; those of a round are judged together."""
    at, done = f"{folder}/runs/a", 0
    for number in itertools.count():
        if done >= cases:
            return
        shutil.rmtree(f"{folder}/runs", ignore_errors=True)
        os.mkdir(f"{folder}/runs")
        files = [f"{folder}/{name}" for name in ("one", "two", "reads")]
        works = [(job_saves, 2 * number), (job_saves, 2 * number + 1), (job_reads, 0)]
        pids = [started(work, at, of, file, worse) for (work, of), file in zip(works, files, strict=True)]
        time.sleep(rng.uniform(1.0, 8.0))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        one, two, reads = map(rows_in, files)
        saved = [row for row in (*one, *two) if row[0] == "saved"]
        wrong = [row for row in (*one, *two, *reads) if row[0] in FAILED]
        found, _ = forked(judge_jobs, at, saved, reads, worse)
        done += len(saved)
        refused = [row for row in (*one, *two) if row[0] == "refused"]
        busy = sum(row[0] == "busy" for row in reads)
        case = {"cases": len(saved), "reads": len(reads) - busy, "busy": busy, "refused": len(refused)}
        yield case | {"last": refused[-1:]}, wrong + found


def started(work, *args):
    if not (pid := os.fork()):
        try:
            work(*args)
        finally:
            os._exit(0)
    return pid


def rows_in(path):
    with open(path, "rb") as file:
        return rows_of(os.dup(file.fileno()))


def into(path):
    """A function that adds a row to a file."""
    file = open(path, "wb", 0)  # noqa: SIM115
    return lambda *row: file.write((json.dumps(row) + "\n").encode())


def of_job(value):
    """A state of which each leaf tells its save."""
    return tree.map(lambda layout: torch.full(layout.shape, value).to(layout.dtype), layouts_on(1))


def job_saves(at, job, path, worse):
    """Save and save: ["saved", value, when it began, when it was told]."""
    send = into(path)
    changes.arm(os.path.dirname(at), worse=worse)
    for value in itertools.count(job % 2, 2):
        began = time.monotonic()
        try:
            checkpoint.save(at, of_job(value), layouts_on(1))
            send("saved", value, began, time.monotonic())
        except (OSError, RuntimeError, ValueError) as error:
            send("refused", f"{error}"[-300:])
        except BaseException as error:
            send("died", f"{type(error).__name__}: {error}"[-300:])


def value_at(at):
    """The save that a checkpoint is, which must be that one whole."""
    got = checkpoint.restore(at, layouts_on(1))
    assert_same_bits(got, of_job(int(got["step"])))
    return int(got["step"])


def job_reads(at, job, path, worse):
    """Restore and restore: ["read", value, when it began]; as soon as there is one there always is."""
    send, seen = into(path), False
    while True:
        began = time.monotonic()
        try:
            send("read", value_at(at), began)
            seen = True
        except AssertionError as error:
            send("mixed", f"{error}"[:300])
        except Exception as error:
            if "was saved again, or deleted, while it was read" in str(error):
                send("busy")
            elif seen:
                send("broken", f"{type(error).__name__}: {error}"[:300])


def judge_jobs(at, saved, reads, worse, send):
    """What is there, and what was read, is no save behind whose end another began that was acknowledged by then."""
    changes.arm(os.path.dirname(at), worse=worse)
    ends = {value: end for _, value, _, end in saved}

    def look(what, value, when):
        behind_it = [v for _, v, began, end in saved if began > ends.get(value, when) and end < when]
        if behind_it:
            send("back", what, value, behind_it[:3])

    for _, value, began in (row for row in reads if row[0] == "read"):
        look("read", value, began)
    try:
        look("found", value_at(at), time.monotonic())
    except AssertionError as error:
        send("mixed", f"{error}"[:300])
    except Exception as error:
        if saved:
            send("lost", f"{type(error).__name__}: {error}"[:300], os.listdir(at))
    checkpoint.save(at, of_job(-1), layouts_on(1))
    if value_at(at) != -1:
        send("lost", "the save behind it")
    for left in leftovers(os.path.dirname(at), worse):
        send("left", *left)
