"""The commit protocol against kills, power cuts, sleeping savers and a second job, counted:

    python -m tests.checkpoint.commit_campaign KIND [--cases N] [--seed S] [--on DISK] [--mutant NAME] [--at FOLDER]

KIND: kills     SIGKILL before a change (of any thread, half a write done) of a workload; N kills, all changes in turn
      cuts      power cuts behind a change of a workload; N states that differ
      aimed     power cuts while another process comes behind a save that died in front of its last fsync; N states
      sleepers  a saver sleeps before a change, is taken for dead, others clean up, save or delete, it wakes up; N
      jobs      two jobs save one name, one process reads it, all are killed; N acknowledgements
DISK: posix; copies (a file is renamed by removal, a copy in two halves and removal, a directory is not); bare (that,
and no fsync of directories, no links). --mutant breaks one line of the protocol: the campaign must see it, and then
ends.

What was acknowledged (or the save behind it) restores bit for bit, so does all that is listed; behind kills and
sleepers the next save leaves nothing else. Prints one JSON object; ends with 1 where anything failed.
"""

import argparse
import collections
import contextlib
import functools
import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from unittest import mock

if __name__ == "__main__":  # before what takes seconds to import, as it begins anew
    from tests.checkpoint import changes

    changes.preload()

import torch

from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.commit import Store, parse_pointer
from fmegatron.checkpoint.files.folder import FolderStore
from fmegatron.checkpoint.tools.gc import collect
from tests.checkpoint import changes, power_cut
from tests.checkpoint.commit_jobs import jobs
from tests.checkpoint.commit_work import (
    FAILED,
    FILE_SYSTEMS,
    FINAL,
    NEWEST,
    allowed,
    armed,
    behind,
    beside,
    forked,
    fresh,
    full,
    going_back,
    in_line,
    judge,
    judge_one,
    manager,
    rows_of,
    saved_at,
    together,
)
from tests.checkpoint.fake_world import small_sizes
from tests.checkpoint.forked_ranks import collect as results_of
from tests.checkpoint.forked_ranks import launch

# ---- campaigns: each yields (case, what is wrong)


def of_ranks(at, size, victim, number, action, worse):
    """`in_line` on ranks of which one dies (all, by its hand); rows of one of those who were told the most."""

    def rank_main(world, calls):
        rows = []
        changes.arm(at, number if world.rank == victim else 0, action, worse)
        try:
            in_line(at, lambda *row: rows.append(row), world)
        except RuntimeError:  # another rank is gone
            pass
        return rows

    got = results_of(*launch(size, rank_main))
    rows = max(([] if one is None else one.get("result") or [["died", one]] for one in got), key=len)
    return rows, None in got


def kills(folder, cases, rng, worse):
    start = f"{folder}/start"
    fresh(start)
    todo, done = {behind: []}, 0  # workload -> numbers of changes that are left to try

    def attempt(at, work, number):
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree(start, at, symlinks=True)
        if work == "ranks":
            victim, all_of_them = rng.choice([(0, False), (1, False), (0, True)])
            action = changes.KILL_GROUP if all_of_them else changes.KILL
            return in_line, *of_ranks(at, 2, victim, number, action, worse)
        return work, *forked(armed(work, number, changes.KILL, worse), at)

    def one(at, work):
        if not todo.get(work):
            most = OF_A_WRITER if work is behind else attempt(at, work, 0)[1][-1][1]
            todo[work] = rng.sample(range(1, most + 1), most)
        number = todo[work].pop()
        of, rows, killed = attempt(at, work, number)
        wanted, died = allowed(of, rows, all_told=work != "ranks"), [row for row in rows if row[0] == "died"]
        if work is behind:
            killed = killed or bool(died)  # its writer was
        if work == "ranks":
            wanted[1] = [2]
        case = {"work": getattr(work, "__name__", work), "change": number, "killed": killed, "cases": int(killed)}
        return case, [] if killed else died, (at, wanted, worse, True, True)

    works = itertools.cycle([*[in_line, going_back, in_line, "ranks"] * 4, behind])
    while done < cases:
        some = [one(f"{folder}/at-{i}", next(works)) for i in range(min(TOGETHER, cases - done))]
        for (case, died, _), found in zip(some, together(judge, [args for *_, args in some]), strict=True):
            yield case, died + found
            done += case["cases"]


OF_A_WRITER = 400  # changes of a process that writes two saves, and of its trainer
MOST_OF_A_RUN = 400  # states that are judged of one run of a workload
TOGETHER = 10  # cases that one process judges


def judged(runs, folder, cases):
    """(what a state is of, what is wrong with it), of so many that differ; `runs` yields those of a run."""
    seen, at = set(), f"{folder}/cut"

    def look(number, state, wanted, send):
        changes.arm("")
        power_cut.put_down(state, at)
        judge(at, wanted, changes.POSIX, number % 4 == 0, False, send)

    for states in runs:
        new = []
        for case, state, wanted in states:
            if (key := (power_cut.key_of(state), json.dumps(wanted))) not in seen and len(seen) < cases:
                seen.add(key)
                new.append((case, (len(seen), state, wanted)))
        found = together(look, [args for _, args in new])
        yield from zip((case for case, _ in new), found, strict=True)
        if len(seen) == cases:
            return


def states_of(disk, record, hows, rng, most, wanted, until=None):
    """At most so many of (change, how, state, what may be there) behind each change of a record; `wanted(n)`: by what
    was acknowledged before the change of number n. until: a directory; most are of before its next fsync."""
    made = list(changes.recorded(record))
    end = next((i for i, (_, op, path, *_) in enumerate(made) if (op, path) == ("fsync", until)), len(made))
    every = list(itertools.product(range(end if rng.random() < 0.8 else len(made)), hows))
    taken = collections.defaultdict(list)
    for i, how in rng.sample(every, min(most, len(every))):
        taken[i].append(how)
    for i, (_, *change) in enumerate(made):
        disk.change(*change)
        following = made[i + 1][0] if i + 1 < len(made) else 1 << 60
        for how in taken[i]:
            yield change[:3], how, disk.after_a_cut(rng, how), wanted(following)


def cuts(folder, cases, rng, worse):
    at, record, hows = f"{folder}/at", f"{folder}/record", (*power_cut.HOW, "lagging", *["subset"] * 4)

    def run(work):
        fresh(at)
        disk = power_cut.Disk(at)
        rows, _ = forked(armed(work, 0, changes.NOTHING, worse, record), at)
        for change, how, state, wanted in states_of(
            disk, record, hows, rng, MOST_OF_A_RUN, lambda n: allowed(work, rows, n)
        ):
            yield {"work": work.__name__, "behind": change, "how": how}, state, wanted

    return judged(map(run, itertools.cycle((in_line, going_back))), folder, cases)


def again(at, send):
    """Another process saves the newest step again."""
    with manager(at) as m:
        send("coming", 0, [step := m.latest(), 7])
        m.save(step, *full(7))
        send("saved", changes.count(), [step, 7])
    beside(at, 7)
    send("beside", changes.count(), 7)


def onwards(at, send):
    """Another process saves the next step."""
    send("coming", 0, [8, 7])
    with manager(at) as m:
        m.save(8, *full(7))
        send("saved", changes.count(), [8, 7])
    beside(at, 7)
    send("beside", changes.count(), 7)


def tidied(at, send):
    """Another process collects garbage."""
    for folder in (f"{at}/run", at):
        collect(folder, age=0.0)


def aimed(folder, cases, rng, worse):
    at, one, two = f"{folder}/at", f"{folder}/one", f"{folder}/two"

    def run(works):
        work, act = works
        fresh(at)
        disk = power_cut.Disk(at)
        last = len(NEWEST[work]) - 1 + (work is in_line)
        rows, killed = forked(armed(work, rng.randint(1, last), changes.KILL_BEHIND_PUBLISH, worse, one), at)
        assert killed, rows
        for _, *change in changes.recorded(one):
            disk.change(*change)
        published = os.path.dirname(change[1])
        more, _ = forked(armed(act, 0, changes.NOTHING, worse, two), at)
        newest, versions, least = allowed(work, rows)
        newest, versions = [*newest, *(row[2] for row in more if row[0] == "coming")], [*versions, 7]

        def wanted(n):
            done = {row[0]: row[2] for row in more if row[1] < n and row[0] != "coming"}
            return [[done["saved"]] if "saved" in done else newest, [7] if "beside" in done else versions, least]

        for change, how, state, could in states_of(
            disk, two, power_cut.HOW, rng, MOST_OF_A_RUN // 16, wanted, published
        ):
            yield {"work": work.__name__, "act": act.__name__, "behind": change, "how": how}, state, could

    every = itertools.product((in_line, in_line, going_back), (again, onwards, tidied))
    return judged(map(run, itertools.cycle(every)), folder, cases)


def sleepers(folder, cases, rng, worse):
    todo = {}

    def one(runs, number):
        there, act, at = rng.random() < 0.7, ("nothing", "save", "delete", "gc")[number % 4], f"{runs}/a"
        shutil.rmtree(runs, ignore_errors=True)
        os.mkdir(runs)
        if there:
            forked(saved_at, at, 1)
        if not todo.get(there):
            shutil.copytree(runs, f"{folder}/tried")
            ((_, _, most),), _ = forked(saver, f"{folder}/tried/a", 0, worse)
            shutil.rmtree(f"{folder}/tried")
            todo[there] = rng.sample(range(1, most + 1), most)
        before_ = todo[there].pop()
        rows, slept = sleeping(at, before_, worse, functools.partial(forked, of_others, at, act, worse))
        told = any(row[0] == "saved" for row in rows)
        could = {"nothing": [2] if told else [1] if there else [None], "save": [2, 5] if told else [5]}
        could |= {"gc": could["nothing"], "delete": [2, None] if told or not there else [None]}
        case = {"there": there, "act": act, "before": before_, "slept": slept, "told": told}
        return case, [row for row in rows if row[0] in FAILED], (at, could[act], worse)

    for number in range(0, cases, TOGETHER):
        some = [one(f"{folder}/runs-{i}", number + i) for i in range(min(TOGETHER, cases - number))]
        for (case, failed, _), found in zip(some, together(judge_one, [args for *_, args in some]), strict=True):
            yield case, failed + found


def saver(at, number, worse, send):
    """A save that stops before a change."""
    changes.arm(os.path.dirname(at), number, changes.STOP, worse)
    saved_at(at, 2, send)


def of_others(at, act, worse, send):
    """Who takes the saver for dead: cleans up, and saves, deletes or collects garbage."""
    changes.arm(os.path.dirname(at), worse=worse)
    place = FolderStore(at)
    with mock.patch("fmegatron.files.owners.fate", lambda whose: "gone"):
        place.sweep(leases.Watch())
        place.above().clean("a", (), leases.Watch())
        if act == "gc":
            collect(os.path.dirname(at), age=0.0)
    if act == "save":
        saved_at(at, 5, send)
    elif act == "delete" and os.path.isdir(at):
        place.withdraw().delete()


def sleeping(at, number, worse, meanwhile):
    """(rows of a save that is stopped before a change while `meanwhile()` goes on, and of that; whether it was)."""
    out, into = os.pipe()
    if not (pid := os.fork()):
        try:
            saver(at, number, worse, lambda *row: os.write(into, (json.dumps(row) + "\n").encode()))
        finally:
            os._exit(0)
    os.close(into)
    slept, more = os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]), []
    if slept:
        more = [("other " + row[0] if row[0] == "saved" else row[0], *row[1:]) for row in meanwhile()[0]]
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, 0)
    return [*rows_of(out), *more], slept


# ---- mutants: one line of the protocol that a campaign must miss


def _no_sync_before_deletion(stack):
    real = FolderStore.sweep
    new = lambda self, watch, synced=False, stop=None: real(self, watch, True, stop)  # noqa: E731
    stack.enter_context(mock.patch.object(FolderStore, "sweep", new))


def _no_sync_of_names(stack):
    stack.enter_context(mock.patch.object(FolderStore, "durable", lambda self, below="": None))


def _drafts_do_not_count(stack):
    stack.enter_context(mock.patch.object(Store, "pointer", lambda self: parse_pointer(self.content("COMPLETE"))))


def _a_draft_that_is_gone_was_published(stack):
    real = FolderStore.move

    def move(self, name, to):
        try:
            real(self, name, to)
        except FileNotFoundError:
            if to != "COMPLETE":
                raise

    stack.enter_context(mock.patch.object(FolderStore, "move", move))
    stack.enter_context(mock.patch.object(Store, "_was_taken", lambda self, token: False))


def _an_old_look_at_the_pointer(stack):
    sweep, root, held = Store.sweep, Store._root, threading.local()

    def sweep_(self, watch, synced=False, stop=None):
        held.root = root(self)
        time.sleep(0.001)
        try:
            return sweep(self, watch, synced, stop)
        finally:
            del held.root

    stack.enter_context(mock.patch.object(Store, "sweep", sweep_))
    stack.enter_context(mock.patch.object(Store, "_root", lambda self: getattr(held, "root", None) or root(self)))


MUTANTS = {
    "unsynced deletion": _no_sync_before_deletion,
    "unsynced names": _no_sync_of_names,
    "drafts do not count": _drafts_do_not_count,
    "gone is published": _a_draft_that_is_gone_was_published,
    "old look at the pointer": _an_old_look_at_the_pointer,
}
KINDS = {"kills": kills, "cuts": cuts, "aimed": aimed, "sleepers": sleepers, "jobs": jobs}


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.commit_campaign")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on", choices=FILE_SYSTEMS, default="posix")
    parser.add_argument("--mutant", choices=MUTANTS)
    parser.add_argument("--at", help="a folder of the file system to try (default: one in memory)")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # what is set aside is said
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    count, wrong, kinds, began, ran = 0, [], collections.Counter(), time.monotonic(), sum(os.times()[:4])
    with tempfile.TemporaryDirectory(dir=asked.at or memory) as folder, contextlib.ExitStack() as stack:
        stack.enter_context(small_sizes(chunk=4096, band=1024))
        for version in range(1, FINAL + 1):
            full(version), full(version, 2)
        gc.freeze()  # a collection in a fork would copy all of memory
        if asked.mutant:
            MUTANTS[asked.mutant](stack)
        rng, at = random.Random(asked.seed), os.path.realpath(folder)
        for case, found in KINDS[asked.kind](at, asked.cases, rng, FILE_SYSTEMS[asked.on]):
            count += case.get("cases", 1)
            kinds.update(f"{key}: {value}" for key, value in case.items() if isinstance(value, str | bool | None))
            kinds.update({key: value for key, value in case.items() if key in ("reads", "busy", "refused")})
            if failed := [row for row in found if row[0] in FAILED]:
                wrong.append({**case, "found": failed})
                kinds.update(row[0] for row in failed)
                print(json.dumps(wrong[-1]), file=sys.stderr, flush=True)
                if asked.mutant:
                    break
    print(
        json.dumps(
            {
                **vars(asked),
                "cases": count,
                "failed": len(wrong),
                "of": kinds,
                "seconds": round(time.monotonic() - began),
                "of_processor": round(sum(os.times()[:4]) - ran),
            }
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
