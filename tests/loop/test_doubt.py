"""Verdicts that come later than a save: what was saved since is not resumed, and is set aside."""

import errno
import os
import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from fmegatron import optim, step, tree
from fmegatron.collectives import Axes, connect
from fmegatron.data import source
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Faults, Log, Options, Run, Save
from fmegatron.loop.losses import BadLossError, LossSpike
from fmegatron.loop.options import Local
from fmegatron.loop.rerun import RerunError
from fmegatron.step.replicas import ReplicasDifferError

SPECS = {"w": tree.ArraySpec(Layout((4,), torch.float64, Mesh()), 1.0)}
ROWS = torch.ones(4, dtype=torch.float64)


def run_of(folder, bad=(), then="raise", every=2, keep=None, **save):
    """A run that saves every 2 updates and looks at its losses every 10; losses of updates in `bad` are spikes."""
    count = [0]

    def update(state, batch):
        position = int(batch[0])
        count[0] += 1
        spikes = position + 1 in bad and (then != "rerun" or count[0] < 11)
        return {"w": state["w"] + 1 + 100 * spikes}, {"loss": torch.tensor(50.0 if spikes else 1.0)}

    spike = LossSpike(3.0, warmup=1, then=then)
    options = Options(log=Log(every=10), save=Save(every=every, keep=keep, **save), faults=Faults(spike=spike))
    return Run(folder, update, SPECS, options=options)


@source
def positions(position):
    return ROWS * position


def test_a_spike_that_was_seen_behind_saves(tmp_path):
    """Saved after updates 2, 4, 6, 8; at the log point behind 10 the loss of update 6 is found to be a spike."""
    with pytest.raises(BadLossError, match="step 6"):
        list(run_of(tmp_path, bad=[6])(positions, steps=20))
    assert run_of(tmp_path).manager.steps() == [2, 4, 6, 8]
    for _ in range(2):  # the first of them ends before it has saved
        again = run_of(tmp_path)
        with pytest.warns(
            RuntimeWarning, match=r"goes on from step 4, as updates from 6 on are in doubt: step 6: loss"
        ):
            assert next(again(positions, steps=20)).step == 5
        assert again.start == 4
    again = run_of(tmp_path)
    with (
        pytest.warns(RuntimeWarning, match="goes on from step 4"),
        pytest.warns(RuntimeWarning, match="steps 6, 8 were set aside"),
    ):
        list(again(positions, steps=12))
    assert again.manager.steps() == [2, 4, 6, 8, 10, 12] and float(again.state["w"][0]) == 13
    newest = run_of(tmp_path)
    list(newest(positions, steps=13))
    assert newest.start == 12 and not (tmp_path / "doubt.json").exists()


def test_without_a_checkpoint_of_before_it_is_refused(tmp_path):
    """Rather than to begin anew in silence, or to go on from what is in doubt; by hand both can be had."""
    with pytest.raises(BadLossError, match="step 6"):
        list(run_of(tmp_path, bad=[6], keep=1)(positions, steps=20))
    with pytest.raises(
        RuntimeError, match=r"all checkpoints are of updates in doubt, from update 6 on.*remove .*doubt"
    ):
        next(run_of(tmp_path, keep=1)(positions, steps=20))
    (tmp_path / "doubt.json").unlink()
    again = run_of(tmp_path)
    next(again(positions, steps=20))
    assert again.start == 8


def test_a_verdict_about_nothing_that_is_saved(tmp_path):
    """It changes nothing, and is over with the next save."""
    with pytest.raises(BadLossError, match="step 6"):
        list(run_of(tmp_path, bad=[6], every=100)(positions, steps=20))
    again = run_of(tmp_path, every=7)
    list(again(positions, steps=14))
    third = run_of(tmp_path)
    list(third(positions, steps=15))
    assert again.start == 0 and third.start == 14


def test_a_rerun_and_a_roll_back_that_is_interrupted(tmp_path):
    with pytest.raises(RerunError, match="transient"):
        list(run_of(tmp_path / "a", bad=[6], then="rerun")(positions, steps=20))
    again = run_of(tmp_path / "a")
    with pytest.warns(RuntimeWarning, match="goes on from step 4"):
        next(again(positions, steps=20))
    back = run_of(tmp_path / "b", bad=[6], then="roll back")
    with pytest.warns(RuntimeWarning, match="rolled back to step 4"):
        for info in back(positions, steps=20):
            if back.start == 4 and info.step == 5:
                break  # before it saves
    again = run_of(tmp_path / "b")
    with pytest.warns(RuntimeWarning, match="goes on from step 4"):
        next(again(positions, steps=20))
    assert again.start == 4


def test_local_replicas_of_updates_in_doubt(tmp_path, monkeypatch):
    local = {"local": Local(str(tmp_path / "local"), every=1, copies=1, durable=False)}
    with pytest.raises(BadLossError, match="step 6"):
        list(run_of(tmp_path / "run", bad=[6], **local)(positions, steps=20))

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patch:  # else a later start would go on from them
        patch.setattr(os, "rmdir", refused)
        with pytest.raises(RuntimeError, match="removing the local replicas .*failed: PermissionError: .*denied"):
            next(run_of(tmp_path / "run", **local)(positions, steps=20))
    again = run_of(tmp_path / "run", **local)
    with pytest.warns(RuntimeWarning, match="goes on from step 4"):
        next(again(positions, steps=20))
    assert again.start == 4


def with_a_disk_that_fails(rank, path, failing, broken):
    """One start behind a verdict, where looking for what there is fails on rank `failing` alone."""
    mesh = Mesh(dp=2)
    world, layout = connect(mesh), Layout((4,), torch.float64, mesh)
    save = Save(every=2, keep=None, local=Local(str(path / f"local{rank}"), every=1, copies=1, durable=False))
    run = Run(
        path / "run",
        lambda state, batch: ({"w": state["w"] + 1}, {"loss": torch.tensor(1.0)}),
        {"w": tree.ArraySpec(layout, 1.0)},
        world=world,
        options=Options(save=save),
    )

    def fails(self):
        raise OSError(errno.EIO, "Input/output error")

    looked_at = type(run.local if broken == "replicas" else run.manager)
    with mock.patch.object(looked_at, "steps", fails) if rank == failing else nullcontext():
        try:
            next(run(positions, steps=4))
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize(("failing", "broken"), [(1, "replicas"), (0, "checkpoints")])
def test_a_rank_that_cannot_look_leaves_no_other_waiting(tmp_path, ranks, failing, broken):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "doubt.json").write_text('{"first": 2, "why": "a test"}')
    for text in ranks.run(with_a_disk_that_fails, tmp_path, failing, broken, ranks=2):
        assert re.search(f"looking for .*failed on rank {failing} of 2: OSError: .*Input/output", text)


@pytest.mark.parametrize("text", ['{"first"', '{"first": Infinity, "why": ""}', "[" * 100_000])
def test_a_verdict_that_cannot_be_read(tmp_path, text):
    list(run_of(tmp_path)(positions, steps=2))
    (tmp_path / "doubt.json").write_text(text)
    with pytest.raises(RuntimeError, match="doubt.json: got .*, wanted the first update in doubt; remove it"):
        next(run_of(tmp_path)(positions, steps=4))


def with_a_damaged_replica(rank, path, damaged, every):
    """One start: saves every `every` updates, compares replicas every 5; a bit of rank 1 flips in update `damaged`."""
    mesh, opt = Mesh(dp=2), optim.sgd(0.1)
    world, specs = connect(mesh), tree.specs({"w": (8, 4)}, mesh, init=tree.Normal(0.3))
    loss = lambda p, b: ((b["x"] @ p["w"]).square().sum() / 16, {})  # noqa: E731
    train = step.build_train_step(loss, opt, tree.layouts(specs), Axes(mesh))
    jitted, calls = step.jit(train, donate=0, world=world, backend="eager"), []

    def update(state, batch):
        state, metrics = jitted(state, batch)
        calls.append(1)
        if rank == 1 and len(calls) == damaged:
            state.params["w"].view(torch.int32)[0, 0] ^= 1 << 20
        return state, metrics

    options = Options(save=Save(every=every, keep=None), faults=Faults(hash_every=5, patience="off"))
    run = Run(path, update, step.state_specs(specs, opt), world=world, options=options)
    start, error = None, None
    try:
        for info in run(source(lambda i: {"x": torch.ones(8, 8)}), 8):
            start = info.step - 1 if start is None else start
    except ReplicasDifferError as raised:
        error = raised.step
    return start, error, run.manager.steps()


@pytest.mark.medium
def test_replicas_that_differ_are_not_saved(tmp_path, ranks):
    """A save compares first, so that no checkpoint has the damage: the next start goes on from the one before."""
    first = ranks.run(with_a_damaged_replica, tmp_path, 3, 2, ranks=2)
    assert first == [(0, 4, [2])] * 2
    assert ranks.run(with_a_damaged_replica, tmp_path, 0, 2, ranks=2) == [(2, None, [2, 4, 6, 8])] * 2
