"""A checkpoint knows whether its step was finite: kept, preferred and shown by it; old checkpoints did not say."""

import io
import json
import os
import warnings
from functools import partial

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError, Keep, Manager
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.files import manifest as manifests
from fmegatron.checkpoint.tools.gc import collect
from fmegatron.checkpoint.tools.ls import listing
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run
from tests.checkpoint.test_manager import ONE, TWO, spoil, state
from tests.checkpoint.tokens import files_of, plain


def filled(directory, said, **options):
    """Steps 1, 2... which said `said` of themselves."""
    with Manager(directory, **options) as manager:
        for step, finite in enumerate(said, 1):
            manager.save(step, state(step), ONE, finite=finite)
    return manager


@pytest.fixture(scope="module")
def saver():
    with checkpoint.AsyncSaver() as saver:
        yield saver


@pytest.mark.medium
@pytest.mark.parametrize("finite", [True, False, None])
def test_what_a_save_says_is_stored(tmp_path, saver, finite):
    with Manager(tmp_path, saver=saver) as manager:
        manager.save(1, state(1), ONE, finite=finite)
        manager.save(2, state(2), ONE, finite=finite, wait=False)
    assert [checkpoint.describe(manager.path(step)).finite for step in (1, 2)] == [finite] * 2
    checkpoint.save(tmp_path / "a", state(1), ONE, finite=finite)
    assert json.loads((files_of(tmp_path / "a") / "manifest.json").read_text())["finite"] is finite
    checkpoint.save_async(tmp_path / "b", state(1), ONE, finite=finite, saver=saver).result()
    assert checkpoint.describe(tmp_path / "b").finite is finite


@pytest.mark.parametrize("said, stored", [((True, False), False), ((None, True), None), ((True, True), True)])
def test_one_rank_speaks_for_all(tmp_path, said, stored):
    parts = cut_tree(state(1), TWO)
    run(2, lambda world: Manager(tmp_path, world=world).save(1, parts[world.rank], TWO, finite=said[world.rank]))
    assert checkpoint.describe(Manager(tmp_path).path(1)).finite is stored


@pytest.mark.parametrize("finite", [1, "yes", torch.tensor(True), 0.0])
def test_anything_else_is_refused(tmp_path, finite):
    with pytest.raises(ValueError, match="finite: got .* wanted True, False or None"):
        Manager(tmp_path).save(1, state(1), ONE, finite=finite)
    assert os.listdir(tmp_path) == []


# ---- kept


@pytest.mark.long
@pytest.mark.parametrize("keep", [1, 2, Keep(last=1), Keep(every=1000), Keep(best=("loss", "min", 1))])
def test_the_newest_good_one_is_never_deleted(tmp_path, keep):
    """The issue's case: one NaN, and `keep=2` deletes the last good checkpoint two saves later."""
    manager = filled(tmp_path, [True, True, False, False, False, False], keep=keep)
    assert 2 in manager.steps() and 1 not in manager.steps() and manager.steps()[-1] == 6
    with pytest.warns(RuntimeWarning) as caught:
        step, got, _ = Manager(tmp_path).restore_latest(ONE)
    assert step == 2 and "skipped the checkpoint of step 6: loss or gradient norm of its" in str(caught[0].message)
    assert_same_bits(got, state(2))
    with Manager(tmp_path, keep=1) as manager:
        manager.save(7, state(7), ONE, finite=True)
    assert manager.steps() == [7]


@pytest.mark.long
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("before", [True, None])
def test_a_bad_one_does_not_replace_a_good_one(tmp_path, saver, before, wait):
    """Saved again under its own number, which may be the only good one: refused, and nothing is changed."""
    with Manager(tmp_path, keep=1, saver=saver) as manager:
        manager.save(1, state(1), ONE, finite=True)
        manager.save(2, state(2), ONE, finite=before, wait=wait)  # may be pending when it is saved again
        with pytest.raises(ValueError, match=r"step_00000002: got .* finite=False, .*Manager.delete\(2\) first"):
            manager.save(2, state(3), ONE, finite=False, wait=wait)
        assert manager.steps() == [2] and manager.finite(2) is before
        assert_same_bits(manager.restore_latest(ONE)[1], state(2))
        manager.save(3, state(3), ONE, finite=False, wait=wait)  # the run goes on
        manager.save(3, state(4), ONE, finite=False, wait=wait)  # a bad one is replaced by whatever comes
        manager.save(3, state(5), ONE, finite=True, wait=wait)
        manager.delete(2) if 2 in manager.steps() else None
    with Manager(tmp_path) as manager:
        assert manager.steps() == [3]
        manager.delete(3)
        manager.save(3, state(6), ONE, finite=False)
        manager.save(4, state(4), ONE)
        with pytest.raises(ValueError, match=r"Manager.delete\(4\) first"):
            manager.save(4, state(5), ONE, finite=False)


def test_one_rank_speaks_for_all_there_too(tmp_path):
    parts, manager = cut_tree(state(1), TWO), filled(tmp_path, [True])
    mine = partial(Manager, tmp_path)
    got = run(2, lambda world: mine(world=world).save(1, parts[world.rank], TWO, finite=world.rank == 0))
    assert isinstance(got[0], ValueError) and isinstance(got[1], RuntimeError)
    assert all("Manager.delete(1) first" in str(error) for error in got) and manager.finite(1) is True


def test_a_bad_one_in_the_place_of_one_that_was_left_behind(tmp_path):
    """That one is set aside, so nothing is lost."""
    filled(tmp_path, [True, True])
    with Manager(tmp_path) as manager:
        manager.rewind(1)
        with pytest.warns(RuntimeWarning, match="steps 2 were set aside"):
            manager.save(2, state(9), ONE, finite=False)
    assert manager.finite(2) is False


def test_a_damaged_manifest_is_not_good(tmp_path):
    """Retention does not rely on a newest step that cannot be read back."""
    with Manager(tmp_path, keep=1) as manager:
        manager.save(1, state(1), ONE)
        real = manager._steps.check

        def damaged(step):
            (files_of(tmp_path / "step_00000002") / "manifest.json").write_text("{}")
            real(step)

        manager._steps.check = damaged
        with pytest.warns(RuntimeWarning, match="old checkpoints could not be deleted: .*manifest.json"):
            manager.save(2, state(2), ONE)
        assert manager.steps() == [1, 2]


def test_retention_reads_the_new_one_back(tmp_path):
    """Another process has destroyed what was just saved: the older one stays, and the run hears of it."""
    with Manager(tmp_path, keep=1) as manager:
        manager.save(1, state(1), ONE)
        real = manager._when_durable

        def destroyed(step):
            os.remove(tmp_path / "step_00000002/arrays/w/c.0.0")
            real(step)

        manager._when_durable = destroyed
        with pytest.warns(RuntimeWarning, match="old checkpoints could not be deleted: .*was written and has vanished"):
            manager.save(2, state(2), ONE)
        assert manager.steps() == [1, 2]


def test_gc_keeps_the_newest_good_one(tmp_path):
    filled(tmp_path, [True, None, False, False])
    done = collect(tmp_path, keep_last=1)
    assert [(a.kind, a.path[-1]) for a in done.actions] == [("remove", "1"), ("keep", "2"), ("remove", "3")]
    assert "the newest one that is good" in done.actions[1].why and Manager(tmp_path).steps() == [2, 4]


# ---- preferred


def test_any_if_asked_for(tmp_path):
    filled(tmp_path, [True, False])
    assert Manager(tmp_path).restore_latest(ONE, prefer_finite=False)[0] == 2
    assert_same_bits(Manager(tmp_path).restore(2, ONE)[0], state(2))


def test_when_there_is_nothing_better(tmp_path):
    """A damaged good one, then the bad ones, newest first; and each step of it is said."""
    spoil(filled(tmp_path, [True, False, False]), 1)
    with pytest.warns(RuntimeWarning) as caught:
        assert Manager(tmp_path).restore_latest(ONE)[0] == 3
    words = (
        "step 3: loss or gradient norm",
        "step 2: loss or gradient norm",
        "step 1: w: its chunk",
        "step 3 after all",
    )
    assert len(caught) == 4 and all(word in str(w.message) for word, w in zip(words, caught, strict=True))
    spoil(Manager(tmp_path), 2)
    spoil(Manager(tmp_path), 3)
    with (
        warnings.catch_warnings(),
        pytest.raises(CheckpointError, match="(?s)no good checkpoint.*step 1.*step 3.*step 2"),
    ):
        warnings.simplefilter("ignore")
        Manager(tmp_path).restore_latest(ONE)


def test_all_ranks_prefer_alike(tmp_path):
    filled(tmp_path, [True, False])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(2, lambda world: Manager(tmp_path, world=world).restore_latest(TWO)[0])
    assert got == [1, 1]


def test_the_run_that_goes_on_sets_the_bad_ones_aside(tmp_path):
    filled(tmp_path, [True, False, False])
    with Manager(tmp_path, keep=2) as manager:
        with pytest.warns(RuntimeWarning, match="not finite"):
            assert manager.restore_latest(ONE)[0] == 1
        with pytest.warns(RuntimeWarning, match="steps 2, 3 were set aside"):
            manager.save(2, state(9), ONE, finite=True)
        assert manager.steps() == [1, 2] and manager.restore_latest(ONE)[0] == 2


def test_a_step_that_was_saved_again_is_read_again(tmp_path):
    """What a Manager knows of a step is of that save."""
    with Manager(tmp_path, keep=1) as manager, Manager(tmp_path) as other:
        manager.save(1, state(1), ONE, finite=True)
        manager.save(2, state(2), ONE, finite=False)
        assert manager.steps() == [1, 2]
        other.save(2, state(3), ONE, finite=True)
        manager.save(3, state(3), ONE, finite=False)
        assert manager.steps() == [2, 3]


# ---- shown


def tool(*argv):
    out = io.StringIO()
    status = main([str(a) for a in argv], out, io.StringIO())
    return status, out.getvalue()


def test_shown(tmp_path):
    filled(tmp_path, [True, None, False])
    assert [c.finite for c in listing(tmp_path).checkpoints] == [True, None, False]
    status, text = tool("ls", tmp_path)
    assert status == 0 and [line.split("  ")[2].strip() for line in text.splitlines()[2:]] or text
    assert text.count("not finite") == 1 and text.count("complete") == 2
    words = [", finite", "step 2, metadata", "loss or gradient norm NOT FINITE"]
    for step, word in enumerate(words, 1):
        assert word in tool("show", tmp_path / f"step_0000000{step}")[1]
        value = json.loads(tool("show", tmp_path / f"step_0000000{step}", "--json")[1])
        assert value["finite"] is (True, None, False)[step - 1]
    tool("reshard", tmp_path / "step_00000003", tmp_path / "copy", "--mesh", "fsdp=1")
    assert checkpoint.describe(tmp_path / "copy").finite is False


# ---- checkpoints of others


def as_147eaa7(path):
    """Make a checkpoint what commit 147eaa7 would have written: its manifest knew nothing of `finite`."""
    text = (path / "manifest.json").read_text()
    assert text.count(' "finite": ') == 1
    old = "".join(row for row in text.splitlines(keepends=True) if not row.startswith(' "finite": ')).encode()
    (path / "manifest.json").write_bytes(old)
    (path / "COMPLETE").write_bytes(manifests.marker_to_json(old))


def test_old_checkpoints_did_not_say(tmp_path):
    """They restore, count as good, and are kept and listed as ever."""
    filled(tmp_path, [False, False])
    for step in (1, 2):
        as_147eaa7(plain(tmp_path / f"step_0000000{step}"))
    assert checkpoint.describe(tmp_path / "step_00000001").finite is None
    assert Manager(tmp_path).restore_latest(ONE)[0] == 2
    with Manager(tmp_path, keep=1) as manager:
        manager.save(3, state(3), ONE, finite=False)
    assert manager.steps() == [2, 3]
    assert_same_bits(manager.restore(2, ONE)[0], state(2))


@pytest.mark.parametrize("value", ["1", "0", '"true"', "[]", "{}", "0.0"])
def test_another_value_in_a_manifest_is_damage(tmp_path, value):
    checkpoint.save(tmp_path / "a", state(1), ONE)
    plain(tmp_path / "a")
    data = (tmp_path / "a/manifest.json").read_bytes().replace(b' "finite": null', f' "finite": {value}'.encode())
    (tmp_path / "a/manifest.json").write_bytes(data)
    (tmp_path / "a/COMPLETE").write_bytes(manifests.marker_to_json(data))
    with pytest.raises(CheckpointError, match="got finite .*wanted true, false or null"):
        checkpoint.restore(tmp_path / "a", ONE)
