"""Saves in the background through a Manager: reports, retention after durability, failures, ends that do not hang."""

import os
import signal
import sys
import time
import warnings

import pytest
import torch

from fmegatron.checkpoint import AsyncSaver, Manager
from fmegatron.checkpoint.background import flights
from fmegatron.checkpoint.manage import manager as manager_module
from fmegatron.checkpoint.manage.tracker import read_latest
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run
from tests.house import ROOT

ONE = {"w": Layout((64, 1024), torch.float32, Mesh(fsdp=1), ("fsdp",)), "step": Layout((), torch.int64, Mesh(fsdp=1))}
TWO = {"w": Layout((64, 1024), torch.float32, Mesh(fsdp=2), ("fsdp",)), "step": Layout((), torch.int64, Mesh(fsdp=2))}
BYTES = 64 * 1024 * 4 + 8


def state(step):
    return {"w": torch.full((64, 1024), float(step)), "step": torch.tensor(step)}


@pytest.fixture(scope="module")
def saver():
    with AsyncSaver(arena_bytes=8 << 20, in_flight=3, time_limit_s=60) as saver:
        yield saver


def wait_for(manager, count=1):
    """Poll as a training loop does until `count` saves have ended."""
    reports, end = [], time.monotonic() + 600
    while len(reports) < count:
        assert time.monotonic() < end
        reports += manager.poll()
        time.sleep(0.005)
    return reports


def stop(saver):
    saver.reserve(ONE)
    os.kill(saver.writer_pid, signal.SIGSTOP)


def go(saver):
    os.kill(saver.writer_pid, signal.SIGCONT)


def test_a_save_in_the_background(saver, tmp_path):
    """What is on disk is the state at the call; tracker and retention follow durability, not the call."""
    manager = Manager(tmp_path, keep=1, saver=saver)
    first = manager.save(1, state(1), ONE)
    assert manager.poll() == (first,) and manager.poll() == ()
    stop(saver)
    x = state(2)
    begun = manager.save(2, x, ONE, metadata={"a": 1}, metrics={"loss": 2.0}, wait=False)
    x["w"].fill_(99.0)
    assert not begun.durable and begun.error is None and begun.bytes == BYTES and begun.stall_seconds > 0
    assert manager.poll() == () and manager.steps() == [1] and read_latest(tmp_path).step == 1
    assert manager.last.step == 1
    go(saver)
    (report,) = wait_for(manager)
    assert (report.what, report.step, report.bytes, report.durable, report.error) == ("save", 2, BYTES, True, None)
    assert report.seconds > report.stall_seconds > 0 and "save_gb_per_s" in report.record() and manager.last is report
    assert manager.steps() == [2] and read_latest(tmp_path).step == 2
    step, got, metadata = manager.restore_latest(ONE)
    assert (step, metadata) == (2, {"a": 1, "metrics": {"loss": 2.0}})
    assert_same_bits(got, state(2))
    manager.close()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000002"] and not saver._flights.closed


def test_reports_of_a_program_that_never_polls_are_bounded(tmp_path):
    manager = Manager(tmp_path, keep=1)
    for step in range(103):
        manager.save(step, {}, {})
    assert [report.step for report in manager.poll()] == list(range(3, 103))
    manager.close()


def test_nothing_is_said_while_nothing_is_pending(tmp_path):
    """`poll` in every step of a run costs no collective then; no process is started for saves that wait."""

    class Silent:
        rank, size = 0, 2

        def __getattr__(self, name):
            raise AssertionError(name)

    manager = Manager(tmp_path)
    manager._background.world = Silent()
    assert manager.poll() == () and manager._background._saver is None


@pytest.mark.long
def test_several_in_flight(saver, tmp_path):
    """What is being saved is not cleaned away by the save that comes after it, and nothing of it is deleted."""
    manager = Manager(tmp_path, keep=2, saver=saver)
    stop(saver)
    manager.save(1, state(1), ONE, wait=False)
    manager.save(2, state(2), ONE, wait=False)
    assert any(name.startswith(".COMPLETE-") for name in os.listdir(tmp_path / "step_00000001"))
    manager.save(3, state(3), ONE)  # does not wait for the others
    assert manager.steps() == [3] and [report.step for report in manager.poll()] == [3]
    go(saver)
    assert [report.step for report in wait_for(manager, 2)] == [1, 2]
    assert manager.steps() == [2, 3]
    assert manager.restore_latest(ONE)[0] == 3
    manager.save(4, state(4), ONE, wait=False)
    manager.close()
    assert manager.steps() == [3, 4]


@pytest.mark.long
def test_the_same_step_again(saver, tmp_path):
    """One after the other: the later state is there in the end, whoever was asked to wait."""
    manager = Manager(tmp_path, saver=saver)
    for version, wait in ((1, False), (2, True), (3, False), (4, False)):
        manager.save(7, state(version), ONE, wait=wait)
    manager.close()
    assert_same_bits(manager.restore_latest(ONE)[1], state(4))
    assert [report.step for report in manager.poll()] == [7] * 4 and manager.poll() == ()


@pytest.mark.long
def test_a_writer_that_is_killed(saver, tmp_path):
    """A warning at the next step, a report with the error; training goes on, and the next save works."""
    manager = Manager(tmp_path, keep=1, saver=saver)
    manager.save(1, state(1), ONE)
    manager.poll()
    stop(saver)
    manager.save(2, state(2), ONE, wait=False)
    os.kill(saver.writer_pid, signal.SIGKILL)
    with pytest.warns(
        RuntimeWarning, match="the save of step 2 failed; training goes on.*writer process.*killed"
    ) as seen:
        (report,) = wait_for(manager)
    assert report.step == 2 and not report.durable and "writer process" in report.error
    assert os.path.basename(seen[0].filename) == os.path.basename(__file__)
    assert manager.steps() == [1] == [manager.last.step] and read_latest(tmp_path).step == 1
    manager.save(3, state(3), ONE, wait=False)
    manager.close()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000003"]


@pytest.mark.long
def test_failures_can_be_raised(saver, tmp_path):
    manager = Manager(tmp_path, saver=saver, on_failure="raise")
    stop(saver)
    manager.save(1, state(1), ONE, wait=False)
    os.kill(saver.writer_pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="step_00000001.*writer process"):
        wait_for(manager)
    assert [report.step for report in manager.poll()] == [1]  # once, and the report is not lost
    manager.save(2, state(2), ONE, wait=False)
    assert wait_for(manager)[0].durable
    with pytest.raises(ValueError, match="on_failure='ignore'"):
        Manager(tmp_path, on_failure="ignore")


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_a_save_that_cannot_begin(saver, tmp_path, policy):
    """A wrong request is always an error; a disk that refuses is what the policy says."""
    manager = Manager(tmp_path / "a", saver=saver, on_failure=policy)
    with pytest.raises(ValueError, match="w: got"):
        manager.save(1, {**state(1), "w": torch.zeros(3)}, ONE, wait=False)
    (tmp_path / "a").write_text("a file, where a directory must be")
    if policy == "raise":
        with pytest.raises(RuntimeError, match="step_00000001"):
            manager.save(1, state(1), ONE, wait=False)
    else:
        with pytest.warns(RuntimeWarning, match="the save of step 1 failed; training goes on"):
            assert "step_00000001" in manager.save(1, state(1), ONE, wait=False).error
    (tmp_path / "a").unlink()
    manager.save(2, state(2), ONE, wait=False)
    assert wait_for(manager)[0].durable


def test_an_error_in_the_block_finishes_what_needs_no_other_rank(saver, tmp_path):
    with pytest.raises(ZeroDivisionError):
        with Manager(tmp_path, saver=saver) as manager:
            manager.save(1, state(1), ONE, wait=False)
            raise ZeroDivisionError
    assert manager.steps() == [1]


@pytest.mark.long
def test_its_own_saver_is_closed(tmp_path, monkeypatch):
    """A Manager that was given none makes one when it is needed; after Ctrl-C what is pending is given up, at once."""
    with Manager(tmp_path) as manager:
        manager.save(1, state(1), ONE, wait=False)
        pid = manager._background._saver.writer_pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert manager.steps() == [1] and [report.durable for report in manager.poll()] == [True]
    monkeypatch.setattr(flights, "_STOP_S", 0.1)  # for a writer that stands still: it is killed then
    with pytest.raises(KeyboardInterrupt):
        with manager:
            manager.save(2, state(2), ONE, wait=False)
            pid = manager._background._saver.writer_pid
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            raise KeyboardInterrupt
    assert time.monotonic() - began < 300 and manager.steps() == [1]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_program_that_forgets_to_close_ends(tmp_path, python):
    """Even with a writer that stands still; what was pending is given up, with a word about it."""
    code = (
        "import os, signal, sys\n"
        "from fmegatron.checkpoint import Manager\n"
        "from tests.checkpoint.test_manager_async import ONE, state\n"
        "manager = Manager(sys.argv[1])\n"
        "manager.save(1, state(1), ONE)\n"
        "manager.save(2, state(2), ONE, wait=False)\n"
        "os.kill(manager._background._saver.writer_pid, signal.SIGSTOP)\n"
        "print(manager._background._saver.writer_pid)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = python.run(command, timeout=600, env=environment, cwd=ROOT)
    assert done.returncode == 0 and "saves were abandoned" in done.stderr, done.stderr
    end = time.monotonic() + 600
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(int(done.stdout), 0)
            time.sleep(0.1)
    assert Manager(tmp_path).restore_latest(ONE)[0] == 1


@pytest.mark.long
def test_two_ranks(tmp_path, monkeypatch):
    """Both hear of the same saves in the same step, of failures, too; rank 0 alone keeps the directory."""
    parts = {step: cut_tree(state(step), TWO) for step in (1, 2, 3)}
    kept = []
    real = manager_module.Manager._when_durable
    monkeypatch.setattr(
        manager_module.Manager, "_when_durable", lambda self, *args: kept.append(args[0]) or real(self, *args)
    )

    def train(world):
        said = []
        with Manager(tmp_path, keep=1, world=world) as manager:
            manager.save(1, parts[1][world.rank], TWO, wait=False)
            for _ in range(600):
                said.append([(r.step, r.durable, r.error) for r in manager.poll()])
                if said[-1]:
                    break
                time.sleep(0.1)
            writer = manager._background._saver.writer_pid
            if world.rank == 1:
                os.kill(writer, signal.SIGSTOP)  # so that it cannot be through before it is killed
            manager.save(2, parts[2][world.rank], TWO, wait=False)
            if world.rank == 1:
                os.kill(writer, signal.SIGKILL)
            for _ in range(600):
                said.append([(r.step, r.durable, r.error) for r in manager.poll()])
                if said[-1]:
                    break
                time.sleep(0.1)
            manager.save(3, parts[3][world.rank], TWO, wait=False)
        return said + [[(r.step, r.durable, r.error) for r in manager.poll()]]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = run(2, train)
    assert first == second
    ended = [report for reports in first for report in reports]
    assert [(step, durable) for step, durable, _ in ended] == [(1, True), (2, False), (3, True)]
    assert "rank 1" in ended[1][2] and "writer process" in ended[1][2]
    assert sum("the save of step 2 failed" in str(w.message) for w in caught) == 1
    assert kept == [1, 3]
    step, got, _ = Manager(tmp_path).restore_latest(ONE)
    assert step == 3 and sorted(os.listdir(tmp_path)) == ["latest", "step_00000003"]
    assert_same_bits(got, state(3))


def test_a_wrong_request_of_one_rank_is_an_error_on_all(tmp_path):
    """Though failures are only warned about: the ranks must not part ways."""
    parts = cut_tree(state(1), TWO)

    def save(world):
        manager = Manager(tmp_path, world=world)
        try:
            mine = {**parts[world.rank], "w": torch.zeros(3)} if world.rank else parts[world.rank]
            manager.save(1, mine, TWO, wait=False)
        finally:
            manager.close(wait=False)

    got = run(2, save)
    assert type(got[0]) is RuntimeError and type(got[1]) is ValueError and os.listdir(tmp_path) == []
