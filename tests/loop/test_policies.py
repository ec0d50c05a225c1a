"""What a Run does about bad numbers, failed saves, signals and reasons to end: alone, in one process."""

import errno
import json
import math
import os
import signal
import warnings

import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.data import source
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Faults, Log, Options, Restart, Run, Save, Until
from fmegatron.loop.losses import LossSpike
from fmegatron.loop.options import Local, Memory
from fmegatron.loop.rerun import RerunError
from fmegatron.loop.signals import catch

SPECS = {"w": tree.ArraySpec(Layout((4,), torch.float64, Mesh()), 1.0)}


def toward(state, batch):
    """w moves half of its way to the batch."""
    return {"w": (state["w"] + batch) / 2}, {"loss": ((state["w"] - batch) ** 2).sum() + 1}


@source
def batch_at(position):
    return torch.full((4,), 1 + 0.01 * position, dtype=torch.float64)


def straight(positions):
    state = tree.init(SPECS, 0, 0)
    for position in positions:
        state, _ = toward(state, batch_at.at(position))
    return state["w"]


def records(path, name="loss"):
    return [r["step"] for r in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()) if name in r]


@pytest.mark.long
@pytest.mark.parametrize("log_every", [1, 7])
def test_roll_back_leaves_the_bad_data_out(tmp_path, log_every):
    """As if the data of update 12 had never been there; and so for a run that is resumed behind it."""

    @source
    def poisoned(position):
        return batch_at.at(position) * (math.nan if position == 11 else 1.0)

    run = Run(
        tmp_path,
        toward,
        SPECS,
        options=Options(log=Log(every=log_every), save=Save(every=5), faults=Faults(nonfinite="roll back")),
    )
    with pytest.warns(
        RuntimeWarning, match=r"(?s)loss is nan.*rolled back to step 10 .*positions 10 to 1[13] are left"
    ):
        seen = [info.step for info in run(poisoned, steps=17)]
    left = 2 if log_every == 1 else 4  # up to the log point
    positions = [p for p in range(17 + left) if not 10 <= p < 10 + left]
    assert seen[-1] == 17 and torch.equal(run.state["w"], straight(positions))
    assert checkpoint.metadata(run.manager.path(17))["skip"] == [[10, 10 + left]]
    assert records(tmp_path)[-1] == 17 and len(set(records(tmp_path))) == len(records(tmp_path))
    again = Run(tmp_path, toward, SPECS, options=Options(log=Log(every=log_every), save=Save(every=5)))
    for _ in again(poisoned, steps=19):
        pass
    assert torch.equal(again.state["w"], straight([*positions, 17 + left, 18 + left]))


def test_roll_back_of_a_spike_without_a_checkpoint_begins_anew(tmp_path):
    @source
    def strange(position):
        return batch_at.at(position) + (9 if position == 8 else 0)

    run = Run(
        tmp_path,
        toward,
        SPECS,
        options=Options(log=Log(every=1), save=Save(every=50), faults=Faults(spike=LossSpike(3.0, warmup=4))),
    )
    with pytest.warns(RuntimeWarning, match=r"(?s)step 9: loss is .*rolled back to step 0 "):
        for _ in run(strange, steps=12):
            pass
    assert torch.equal(run.state["w"], straight([p for p in range(13) if p != 8]))


def test_roll_back_does_not_go_on_for_ever(tmp_path):
    def update(state, batch):
        return toward(state, batch * (math.nan if batch[0] > 1.045 else 1.0))

    run = Run(
        tmp_path,
        update,
        SPECS,
        options=Options(log=Log(every=1), save=Save(every=2), faults=Faults(nonfinite="roll back")),
    )
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="loss is nan") as raised:
        warnings.simplefilter("ignore")
        for _ in run(batch_at, steps=50):
            pass
    assert "10 roll backs of this process are behind it" in raised.value.__notes__[0]


@pytest.mark.long
@pytest.mark.parametrize("once, verdict", [(True, "transient"), (False, "deterministic")])
def test_rerun_tells_accident_from_program(tmp_path, once, verdict):
    due = [True]

    def update(state, batch):
        state, metrics = toward(state, batch)
        if float(batch[0]) == 1.08 and due[0]:
            due[0] = not once
            state["w"][2] = math.nan
        return state, metrics

    run = Run(
        tmp_path, update, SPECS, options=Options(log=Log(every=1), save=Save(every=3), faults=Faults(nonfinite="rerun"))
    )
    with pytest.raises(RerunError, match=f"rerun of updates 7 to 10: {verdict}: ") as raised:
        for _ in run(batch_at, steps=20):
            pass
    assert raised.value.exit_status == {"transient": 76, "deterministic": 78}[verdict]


def test_a_save_that_failed(tmp_path, monkeypatch):
    save, left = checkpoint.Manager.save, [2]

    def full(self, step, *args, **settings):
        if step in (4, 6) and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(self, step, *args, **settings)

    monkeypatch.setattr(checkpoint.Manager, "save", full)
    run = Run(tmp_path, toward, SPECS, options=Options(save=Save(every=2, on_failure="warn")))
    with pytest.warns(RuntimeWarning, match="step [46]: the save failed: .*No space left.*training goes on") as warned:
        for _ in run(batch_at, steps=9):
            pass
    assert len(warned) == 2 and run.manager.steps() == [8, 9]
    left[0] = 1
    with pytest.raises(OSError, match="No space"):
        for _ in Run(tmp_path / "b", toward, SPECS, options=Options(save=Save(every=2)))(batch_at, steps=9):
            pass


def test_an_exception_restarts_in_the_process(tmp_path, capsys):
    """From the newest checkpoint, to the bits of a run without it; and not for ever."""
    run = Run(
        tmp_path,
        toward,
        SPECS,
        options=Options(
            log=Log(every=1), save=Save(every=3), faults=Faults(restart=Restart(2), inject="exception:step=8")
        ),
    )
    for _ in run(batch_at, steps=10):
        pass
    assert torch.equal(run.state["w"], straight(range(10))) and records(tmp_path) == list(range(1, 11))
    assert "restart 1 in the process, after 7 updates" in capsys.readouterr().err

    def update(state, batch):
        if float(batch[0]) == 1.05:
            raise ZeroDivisionError("always")
        return toward(state, batch)

    run = Run(tmp_path / "b", update, SPECS, options=Options(save=Save(every=3), faults=Faults(restart=Restart(2))))
    with pytest.raises(ZeroDivisionError, match="always") as raised:
        for _ in run(batch_at, steps=10):
            pass
    assert "2 did not get beyond update 5" in raised.value.__notes__[0]


def test_set_up_is_not_tried_again(tmp_path):
    run = Run(tmp_path, toward, SPECS, options=Options(faults=Faults(restart=Restart(2), inject="exception:at=setup")))
    with pytest.raises(ValueError, match="injected"):
        list(run(batch_at, steps=3))


def test_local_replicas_are_nearer(tmp_path, capsys):
    """Those of step 4 count by the time those of step 8 begin; these do not when update 9 fails."""
    local = Local(str(tmp_path / "memory"), copies=1, every=4)
    faults = Faults(restart=Restart(), inject="exception:step=9")
    options = Options(log=Log(every=1), save=Save(every=50, local=local), faults=faults)
    run = Run(tmp_path / "a", toward, SPECS, options=options)
    seen = [info.step for info in run(batch_at, steps=10)]
    assert (seen, run.start) == ([*range(1, 9), *range(5, 11)], 4)
    assert torch.equal(run.state["w"], straight(range(10)))
    again = Run(
        tmp_path / "a", toward, SPECS, options=Options(save=Save(every=50, local=local))
    )  # a process that was started again
    assert [info.step for info in again(batch_at, steps=11)] == [11]  # the checkpoint of the end is newer


def test_reasons_to_end(tmp_path, capsys):
    file = tmp_path / "STOP"
    run = Run(tmp_path / "a", toward, SPECS, options=Options(log=Log(every=2), until=Until(file=file)))
    seen = []
    for info in run(batch_at, steps=50):
        seen.append(info.step)
        if info.step == 7:
            file.touch()
    assert seen[-1] == 9 and info.last and info.stopping and run.stopped and run.manager.latest() == 9
    assert f"stopped after step 9, as {file} is there; the same command" in capsys.readouterr().out
    run = Run(
        tmp_path / "b", toward, SPECS, options=Options(log=Log(every=2), until=Until(metric="loss", at_most=1.001))
    )
    assert [info.step for info in run(batch_at, steps=50)][-1] < 20
    run = Run(tmp_path / "c", toward, SPECS, options=Options(until=Until(hours=1e-9)))
    assert [info.step for info in run(batch_at, steps=50)] == [1, 2]
    with pytest.raises(ValueError, match="wanted metric with at_most or at_least"):
        Until(metric="loss")


@pytest.fixture
def _heard():
    """A shell's nohup has processes ignore SIGHUP, and runs respect that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_heard")
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP"])
def test_signals_of_a_batch_system(tmp_path, name):
    run = Run(tmp_path, toward, SPECS)
    seen = []
    for info in run(batch_at, steps=9):
        seen.append(info.step)
        if info.step == 4:
            os.kill(os.getpid(), getattr(signal, name))
    assert run.manager.steps() == ([5, 9] if name == "SIGUSR1" else [5]) and run.stopped == (name == "SIGHUP")
    with pytest.raises(ValueError, match="catch: got 'SIGUSR3': 'save', wanted the name of a signal"):
        with catch({"SIGUSR3": "save"}):
            pass


def test_evaluations_by_name(tmp_path):
    each = {"wiki": lambda state: {"loss": 1.0}, "code": lambda state: {"loss": float(state["w"].sum())}}
    run = Run(tmp_path, toward, SPECS, evaluate=each, options=Options(log=Log(eval_every=2)))
    for _ in run(batch_at, steps=4):
        pass
    assert set(run.metrics) == {"wiki_loss", "code_loss"} and records(tmp_path, "code_loss") == [2, 4]
    with pytest.raises(ValueError, match="evaluate: wiki: got 3, wanted a function"):
        Run(tmp_path, toward, SPECS, evaluate={"wiki": 3})


def test_the_first_step_is_reported(tmp_path, capsys):
    for _ in Run(tmp_path, toward, SPECS, options=Options(memory=Memory(planned_bytes=3 << 30)))(batch_at, steps=2):
        pass
    assert (
        "first step   0." in (out := capsys.readouterr().out) and "(resident, with the compiler), 3 GiB planned" in out
    )
