"""What campaigns of the commit protocol (commit_campaign.py) do, each in a fork, and how they judge what is there."""

import functools
import json
import os
import shutil
import sys
import time
import traceback
import warnings

from fmegatron import checkpoint
from fmegatron.checkpoint.files.commit import parse_pointer, root_of
from fmegatron.checkpoint.files.folder import Folder, FolderStore
from fmegatron.checkpoint.tools.gc import collect
from tests.checkpoint import changes
from tests.checkpoint.crash_campaign import layouts_on, state
from tests.checkpoint.fake_world import assert_same_bits, cut_tree
from tests.writers import Fork, started_by

FILE_SYSTEMS = {
    "posix": changes.POSIX,
    "copies": changes.COPIES,
    "bare": changes.COPIES | changes.NO_DIRECTORY_SYNC | changes.NO_LINKS,
}
KEEP = 2
FINAL = 9  # step and version of the save behind it all
FAILED = ("mixed", "lost", "back", "broken", "left", "died")


# ---- processes


def forked(work, *args):
    """(rows that `work(*args, send)` sent before it ended, whether it was killed): in a fork, which may use threads."""
    out, into = os.pipe()
    if not (pid := os.fork()):
        code = 1
        try:
            os.close(out)
            work(*args, lambda *row: os.write(into, (json.dumps(row) + "\n").encode()))
            code = 0
        except BaseException:
            os.write(into, (json.dumps(["died", traceback.format_exc()[-900:]]) + "\n").encode())
        finally:
            os._exit(code)
    os.close(into)
    return rows_of(out), os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def together(work, many):
    """The rows of `work(*args, send)` for each of many arguments, all in one fork, and with few switches of threads:
    what a process does for the first time, and waits, are most of what a case takes."""

    def each(send):
        sys.setswitchinterval(1e-4)
        Folder.readers = 1
        for args in many:
            rows = []
            try:
                work(*args, lambda *row, rows=rows: rows.append(row))
            except Exception:
                rows.append(["died", traceback.format_exc()[-900:]])
            send(rows)

    got, _ = forked(each)
    return [*(rows for (rows,) in got), *[[["died", "its judge"]]] * (len(many) - len(got))]


def rows_of(pipe):
    """What came through a pipe, whose writer may have been killed in the middle of a line."""
    with os.fdopen(pipe, "rb") as file:
        return [json.loads(line) for line in file.read().split(b"\n") if line.endswith(b"]")]


# ---- workloads: each has a complete step before, and says what may be the newest one behind each acknowledgement


def manager(at, **options):
    return checkpoint.Manager(f"{at}/run", keep=KEEP, show_progress=False, **options)


@functools.cache
def cut(version, ranks):
    """The states of the ranks, once for all forks."""
    return cut_tree(state(version), layouts_on(ranks)), layouts_on(ranks)


def full(version, ranks=1, rank=0):
    """(state of a rank, layouts, metadata) of a version."""
    local, layouts = cut(version, ranks)
    return local[rank], layouts, {"version": version}


def beside(at, version):
    """Save a checkpoint that no Manager has."""
    got, layouts, metadata = full(version)
    checkpoint.save(f"{at}/last", got, layouts, metadata=metadata)


def before(at, send):
    with manager(at) as m:
        for version in (1, 2):
            m.save(version, *full(version))
    beside(at, 2)


def in_line(at, send, world=None):
    """The newest step again, a new step (retention deletes the oldest), that again; a checkpoint beside them."""
    ranks, rank = (1, 0) if world is None else (world.size, world.rank)
    with manager(at, world=world) as m:
        for step, version in ((2, 3), (3, 4), (3, 5)):
            m.save(step, *full(version, ranks, rank))
            send("saved", changes.count())
    if world is None:
        beside(at, 6)
        send("beside", changes.count())


def going_back(at, send):
    """Back to the first step: the second is set aside, saved, and a third."""
    with manager(at) as m:
        m.rewind(1)
        for step, version in ((2, 3), (3, 4)):
            m.save(step, *full(version))
            send("saved", changes.count())


def behind(at, send):
    """Saves in the background, by a process of their own."""
    with started_by(Fork), manager(at, on_failure="raise") as m:
        for step, version in ((2, 3), (3, 4)):
            m.save(step, *full(version), wait=False)
            while not (reports := m.poll()):
                time.sleep(0.001)
            assert all(report.durable for report in reports), reports
            send("saved", changes.count())


NEWEST = {  # (step, version) that may be the newest behind so many acknowledgements
    in_line: [{(2, 2), (2, 3)}, {(2, 3), (3, 4)}, {(3, 4), (3, 5)}, {(3, 5)}],
    going_back: [{(2, 2), (1, 1), (2, 3)}, {(2, 3), (3, 4)}, {(3, 4)}],
    behind: [{(2, 2), (2, 3)}, {(2, 3), (3, 4)}, {(3, 4)}],
}


def allowed(work, rows, at=None, all_told=True):
    """What may be restored ([newest steps, versions of the checkpoint beside], how many steps must) behind
    acknowledgements, of those that came before the change of a number. all_told: else there may have been more."""
    done = [row[0] for row in rows if row[0] in ("saved", "beside") and (at is None or row[1] < at)]
    last = [6] if "beside" in done else [2, 6]
    newest = NEWEST[work][done.count("saved") :]
    least = 1 if work is going_back and "saved" not in done else KEEP
    return [sorted(newest[0] if all_told else set().union(*newest)), last, least]


def armed(work, number, action, worse, record=None):
    """A work that is hit at a change."""

    def run(at, send):
        changes.arm(at, number, action, worse, record)
        work(at, send)

    return run


def fresh(at):
    """A folder with what was there before a workload."""
    shutil.rmtree(at, ignore_errors=True)
    os.mkdir(at)
    forked(before, at)


def saved_at(at, version, send):
    """Save a version at a path; what refuses is sent, and is not wrong unless it says nothing of the reason."""
    got, layouts, metadata = full(version)
    try:
        checkpoint.save(at, got, layouts, metadata=metadata)
        send("saved", version, changes.count())
    except (OSError, RuntimeError, ValueError) as error:
        known = ("took this save for dead", "No such file", "vanished")
        send("refused" if any(word in str(error) for word in known) else "died", f"{error}"[:300])


# ---- judges


def version_at(path):
    """The version of a checkpoint, which must be that bit for bit."""
    layouts = layouts_on(1)
    got, version = checkpoint.restore(path, layouts), checkpoint.metadata(path)["version"]
    assert_same_bits(got, full(version)[0])
    return version


def judge(at, wanted, worse, goes_on, clean, send):
    """Send what is wrong: of what is listed, of the newest step, of the one beside; with `goes_on` of the next saves,
    with `clean` of what they leave."""
    changes.arm(at, worse=worse)
    (newest, last, least), good = wanted, []
    m = manager(at)
    for step in m.steps():
        try:
            got, metadata = m.restore(step, layouts_on(1))
            assert_same_bits(got, full(metadata["version"])[0])
            good.append(step)
        except AssertionError as error:
            send("mixed", step, str(error)[:200])
        except Exception as error:
            send("broken", step, f"{type(error).__name__}: {error}"[:300])
    if len(good) < least:
        send("lost", "all steps but", good, least)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            step, _, metadata = m.restore_latest(layouts_on(1))
            if [step, metadata["version"]] not in [list(one) for one in newest]:
                send("lost", [step, metadata["version"]], newest)
        except Exception as error:
            send("lost", newest, f"{type(error).__name__}: {error}"[:300])
        try:
            if (version := version_at(f"{at}/last")) not in last:
                send("lost", "beside", version, last)
        except Exception as error:
            send("lost", "beside", f"{type(error).__name__}: {error}"[:300])
        if goes_on:
            with m:
                m.save(FINAL, *full(FINAL))
            beside(at, FINAL)
            if m.restore_latest(layouts_on(1))[2]["version"] != FINAL or version_at(f"{at}/last") != FINAL:
                send("lost", "the save behind it")
    if clean:
        for folder in (f"{at}/run", at):
            collect(folder, age=0.0)
        for left in leftovers(at, worse):
            send("left", *left)


def leftovers(at, worse):
    """What is there besides checkpoints, what was set aside, and a draft that is the checkpoint: its saver was killed
    in the last move, or before it; where a rename is a copy, and half a note, which is watched for 300 s."""
    for folder in filter(os.path.isdir, (at, f"{at}/run")):
        for name in os.listdir(folder):
            place = FolderStore(f"{folder}/{name}")
            if name.startswith("."):
                if not (worse & changes.COPIES and is_torn(place.path)):
                    yield folder, name
            elif os.path.isdir(place.path) and name != "run":
                names = place.inside()
                root = (place.pointer() or {}).get("root")
                if f".COMPLETE-{root}" in names and root_of(parse_pointer(place.content("COMPLETE"))) is None:
                    continue
                asides = {n for n in names if n.startswith("ASIDE-")}
                if set(names) - {"COMPLETE", root, *asides, *(n.removeprefix("ASIDE-") for n in asides)}:
                    yield name, *names


def is_torn(note):
    try:
        with open(note, "rb") as file:
            json.loads(file.read())
    except ValueError:
        return True
    except OSError:
        return False
    return False


def judge_one(at, could, worse, send):
    """Of one checkpoint: what it is, and what is left when it was saved again, and deleted."""
    changes.arm(os.path.dirname(at), worse=worse)
    place = FolderStore(at)
    try:
        if (found := version_at(at) if place.is_complete() else None) not in could:
            send("lost", found, could)
    except AssertionError as error:
        send("mixed", f"{error}"[:300])
    except Exception as error:
        send("broken", f"{type(error).__name__}: {error}"[:300])
    saved_at(at, 3, lambda *row: None)
    if not place.is_complete() or version_at(at) != 3:
        send("lost", "the save behind it")
    for left in leftovers(os.path.dirname(at), worse):
        send("left", *left)
    place.withdraw().delete()
    if os.path.lexists(at):
        send("left", *os.listdir(at))
