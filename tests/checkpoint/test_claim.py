"""One run in one folder: a second claim is refused and told who holds it; dead and silent holders are taken over."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from fmegatron import checkpoint
from fmegatron.checkpoint.files import claims, leases
from fmegatron.checkpoint.files.claims import ClaimedError
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.files import owners
from tests.checkpoint.fake_world import run
from tests.house import ROOT


class Claimers:
    """The other processes (claimers.py)."""

    def __init__(self, popen, *before):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [*before, sys.executable, "-m", "tests.checkpoint.claimers"]
        pipe = subprocess.PIPE
        self.process = popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT)
        self.pids = []

    def start(self, directory, count=1):
        """[(pid, what it said)] of processes that claim the directory at once."""
        self.process.stdin.write(json.dumps([str(directory), count]) + "\n")
        self.process.stdin.flush()
        said = [self.heard() for _ in range(count)]
        self.pids += [pid for pid, _ in said]
        return said

    def heard(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else (None, "")

    def close(self):
        for pid in self.pids:  # children of ours that are not waited for: the numbers are theirs
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def claimers(python):
    others = Claimers(python.popen)
    yield others
    others.close()


@pytest.fixture
def holder(tmp_path, claimers):
    """The number of another process that holds the folder."""
    ((pid, said),) = claimers.start(tmp_path)
    assert said == "mine"
    yield pid
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def quick(monkeypatch):
    """Claims are renewed, and others looked at, more often than for people."""
    monkeypatch.setattr(claims, "BEAT_S", 0.1)
    monkeypatch.setattr(claims, "_LOOK_S", 0.05)


def foreign(directory, what="run", beat=0):
    """The note of a process of another node."""
    value = {"time": 0.0, "host": "n7", "owner": "elsewhere-41-9", "beat": beat, "held": True}
    (directory / f".{what}.claim-0123456789ab").write_text(json.dumps(value))


def test_a_second_run_is_refused_and_told_by_whom(tmp_path, claimers, holder):
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ClaimedError, match=rf"got a run there by process {holder} on .*; wait until it ends"):
        with checkpoint.claim(tmp_path):
            raise AssertionError("two have it")
    assert sorted(os.listdir(tmp_path)) == before
    with checkpoint.claim(tmp_path, "evaluation"), checkpoint.claim(tmp_path / "other"):
        pass
    os.kill(holder, signal.SIGUSR1)
    assert claimers.heard() == [holder, "released"]
    with checkpoint.claim(tmp_path) as mine:
        assert not mine.lost
        mine.check()
        with pytest.raises(ClaimedError, match=r"\(this process\)"):
            with checkpoint.claim(tmp_path):
                pass
    assert os.listdir(tmp_path) == ["other"]


def test_it_ends_with_its_block(tmp_path):
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            with checkpoint.claim(tmp_path / "a/b"):
                assert len(os.listdir(tmp_path / "a/b")) == 1
                raise error
        assert os.listdir(tmp_path / "a/b") == []


def test_a_killed_holder_is_taken_over_at_once(tmp_path, holder):
    os.kill(holder, signal.SIGKILL)  # and not waited for: a dead process whose parent does not look is dead, too
    until = time.monotonic() + 600
    while owners.fate(json.loads(next(tmp_path.iterdir()).read_text())["owner"]) != "gone":
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(holder, 0)  # its number is still taken
    with checkpoint.claim(tmp_path):
        assert len(os.listdir(tmp_path)) == 1


def test_a_stopped_holder_of_this_machine_keeps_it(tmp_path, holder):
    """However long: its process is there."""
    os.kill(holder, signal.SIGSTOP)
    (note,) = tmp_path.iterdir()
    os.utime(note, (0, 0))
    with pytest.raises(ClaimedError, match=f"process {holder}"):
        with checkpoint.claim(tmp_path):
            pass


def test_a_number_that_was_given_to_another_process_is_not_the_holder(tmp_path):
    where, pid, start_ = owners.owner().split("-")
    for whose, state in ((f"{where}-{pid}-{start_}", "lives"), (f"{where}-{pid}-{int(start_) - 1}", "gone")):
        assert owners.fate(whose) == state
        (tmp_path / ".run.claim-0123456789ab").write_text(json.dumps({"time": 0.0, "owner": whose, "held": True}))
        if state == "gone":
            with checkpoint.claim(tmp_path):
                pass
        else:
            with pytest.raises(ClaimedError):
                with checkpoint.claim(tmp_path):
                    pass


@pytest.mark.parametrize("count", [2, 4, 4, 8])
def test_of_several_that_come_at_once_one_gets_it(tmp_path, claimers, count):
    said = claimers.start(tmp_path, count)
    winners = [pid for pid, text in said if text == "mine"]
    assert len(winners) == 1 and sum("got a run there by process" in text for _, text in said) == count - 1
    os.kill(winners[0], signal.SIGUSR1)
    assert claimers.heard() == [winners[0], "released"] and os.listdir(tmp_path) == []


def test_threads_that_come_at_once(tmp_path, quick):
    """Many tries, each with another order of events: never two at a time, and never none."""
    inside, most, taken, lock = [0], [0], [0], threading.Lock()

    def work(number):
        for _ in range(15):
            try:
                with checkpoint.claim(tmp_path):
                    with lock:
                        inside[0] += 1
                        most[0], taken[0] = max(most[0], inside[0]), taken[0] + 1
                    time.sleep(0.002)
                    with lock:
                        inside[0] -= 1
            except ClaimedError:
                time.sleep(0.001 * number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and taken[0] >= 15 and os.listdir(tmp_path) == []


# ---- another machine


@pytest.mark.parametrize("clock", [-1e6, 1e6])
def test_a_living_holder_of_another_machine(tmp_path, quick, monkeypatch, clock):
    """It is seen to renew its note, whatever the clocks say; then the answer is no."""
    done = threading.Event()

    def other():
        beat = 0
        while not done.wait(0.05):
            foreign(tmp_path, beat=(beat := beat + 1))

    foreign(tmp_path)
    real = time.time
    monkeypatch.setattr(claims.time, "time", lambda: real() + clock)
    thread = threading.Thread(target=other)
    thread.start()
    try:
        with pytest.warns(RuntimeWarning, match="looking for 60 s whether the run of process 41 on n7"):
            with pytest.raises(ClaimedError, match="process 41 on n7"):
                with checkpoint.claim(tmp_path, stale_s=60.0):
                    pass
    finally:
        done.set()
        thread.join()


def test_a_silent_holder_of_another_machine_is_taken_over(tmp_path, quick):
    foreign(tmp_path)
    os.utime(tmp_path / ".run.claim-0123456789ab", (2e9, 2e9))  # in the future
    with pytest.warns(RuntimeWarning) as caught:
        with checkpoint.claim(tmp_path, stale_s=0.6) as mine:
            assert not mine.lost and len(os.listdir(tmp_path)) == 1
    assert [("looking" in str(w.message), "took over" in str(w.message)) for w in caught] == [
        (True, False),
        (False, True),
    ]


def test_a_holder_that_was_taken_for_dead_learns_it(tmp_path, quick):
    """It was stopped for long, say, and goes on: it must not think that it still has the folder, nor take it back."""
    with checkpoint.claim(tmp_path) as mine:
        (note,) = tmp_path.iterdir()
        note.unlink()  # as the one that takes over does
        until = time.monotonic() + 600
        while not mine.lost:
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(ClaimedError, match="got another run there, which took over"):
            mine.check()
        assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.long
def test_another_container_on_this_machine(tmp_path, holder, monkeypatch):
    """A process namespace of its own cannot see our processes: it takes time instead of looking for a number."""
    (note,) = tmp_path.iterdir()
    if (
        shutil.which("unshare")
        and subprocess.run(["unshare", "-Urp", "--fork", "true"], capture_output=True).returncode == 0
    ):
        other = Claimers(subprocess.Popen, "unshare", "-Urp", "--fork", "--mount-proc")
        try:
            ((_, said),) = other.start(tmp_path)
        finally:
            other.pids.clear()  # numbers of another namespace; they end with its first process
            other.close()
    else:  # this machine makes none for us: ours is another one
        monkeypatch.setattr(owners, "_where", lambda: "elsewhere")
        with pytest.warns(RuntimeWarning, match="looking for"), pytest.raises(ClaimedError) as error:
            with checkpoint.claim(tmp_path):
                pass
        said = str(error.value)
    assert re.search(rf"got a run there by process {holder} on", said)  # it renews its note
    assert list(tmp_path.iterdir()) == [note]


# ---- the place


def test_an_object_store():
    store = open_store("memory://runs/a", {})
    with checkpoint.claim(store):
        with pytest.raises(ClaimedError, match="memory://runs/a: got a run there by process"):
            with checkpoint.claim(store):
                pass
    with checkpoint.claim(store):
        pass
    assert store.notes().names() == []


def test_a_full_disk_renews_too(tmp_path, quick, monkeypatch):
    with checkpoint.claim(tmp_path) as mine:
        notes, (note,) = Notes(tmp_path), os.listdir(tmp_path)

        def full(self, name, data, durable=False):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Notes, "write", full)
        first, until = notes.stamp(note), time.monotonic() + 600
        while notes.stamp(note) == first:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert not mine.lost


def test_where_nothing_can_be_written(tmp_path, monkeypatch):
    def read_only(self, name, data, durable=False):
        raise OSError(30, "Read-only file system", name)

    monkeypatch.setattr(Notes, "write", read_only)
    with pytest.raises(RuntimeError, match="claiming .* for a run failed: OSError: .*Read-only file system"):
        with checkpoint.claim(tmp_path):
            pass


def test_all_ranks_are_told(tmp_path, holder):
    def main(world):
        with checkpoint.claim(tmp_path, world=world):
            raise AssertionError("two have it")

    got = run(2, main)
    assert isinstance(got[0], ClaimedError) and type(got[1]) is RuntimeError
    assert all(f"process {holder}" in str(error) for error in got)


def test_rank_0_does_not_keep_it_when_another_rank_fails(tmp_path):
    def main(world):
        with checkpoint.claim(tmp_path if world.rank == 0 else "", world=world):
            raise AssertionError("rank 1 asked for nothing that makes sense")

    got = run(2, main)
    assert isinstance(got[0], RuntimeError) and isinstance(got[1], ValueError) and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "options, words",
    [
        ({"what": "a/b"}, "what='a/b', wanted a short word"),
        ({"what": None}, "what=None, wanted a short word"),
        ({"what": b"run"}, "what=b'run', wanted a short word"),
        ({"stale_s": 5.0}, "stale_s=5.0, wanted 30 seconds or more"),
        ({"stale_s": "x"}, "stale_s='x', wanted 30 seconds or more"),
        ({"stale_s": None}, "stale_s=None, wanted 30 seconds or more"),
        ({"stale_s": float("nan")}, "stale_s=nan, wanted 30 seconds or more"),
    ],
)
def test_bad_arguments(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        with checkpoint.claim(tmp_path, **options):
            pass


def test_a_forked_child_leaves_the_claim_alone(tmp_path):
    """A data worker that ends, however it ends, does not take its parent's claim with it."""
    with checkpoint.claim(tmp_path) as mine:
        pid = os.fork()
        if pid == 0:
            mine._lease.release()
            mine._lease.drop()
            os._exit(0)
        os.waitpid(pid, 0)
        (note,) = tmp_path.iterdir()
        assert json.loads(note.read_text())["held"] is True


def test_one_that_is_dropped_says_so(tmp_path):
    lease = leases.Lease(Notes(tmp_path), ".a.saving-0123456789ab")
    assert leases.alive(Notes(tmp_path), ".a.saving-0123456789ab", leases.Watch()).sure
    del lease
    assert leases.alive(Notes(tmp_path), ".a.saving-0123456789ab", leases.Watch()) is None
    with mock.patch.object(leases, "BEAT_S", 0.01):
        lease = leases.Lease(Notes(tmp_path), ".b.saving-0123456789ab")
        lease.release()
        lease.release()
        time.sleep(0.05)
    assert os.listdir(tmp_path) == [".a.saving-0123456789ab"]
