"""A checkpoint that is saved again while it is read: what is returned is one save's, on all ranks, and never damage."""

import io
import itertools
import threading
import time

import pytest
import safetensors.torch
import torch

from fmegatron import checkpoint, interop
from fmegatron.checkpoint import CheckpointError, LocalReplicas, Manager
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.files import saved as one_save
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.reading import agreed, fetch
from fmegatron.checkpoint.tools import verify
from fmegatron.checkpoint.tools.ls import listing
from fmegatron.checkpoint.tools.show import show
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.interop import export_safetensors
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, small_sizes
from tests.checkpoint.tokens import plain

MESH = Mesh(fsdp=2)
STEP = "step_00000007"


def layouts_on(mesh):
    return {
        "w": Layout((8, 16), torch.float32, mesh, ("fsdp",)),
        "v": Layout((8, 16), torch.float32, mesh),
        "n": Layout((), torch.int64, mesh),
    }


ONE = layouts_on(Mesh(fsdp=1))


def state(seed):
    return {"w": torch.full((8, 16), float(seed)), "v": torch.full((8, 16), -float(seed)), "n": torch.tensor(seed)}


def save(place, seed):
    checkpoint.save(place, state(seed), ONE, metadata={"seed": seed}, step=7)


def seed_of(got, metadata=None):
    """The one save that a tree (and metadata) is of."""
    seed = int(got["n"])
    assert_same_bits(got, state(seed), "a mix of two saves")
    assert metadata is None or metadata["seed"] == seed, (metadata, seed)
    return seed


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


@pytest.fixture(params=["directory", "memory"])
def place(request, tmp_path):
    """Where save 1 is, in each of the ways in which save 2 takes its place."""
    at = open_store("memory://run", {}) if request.param == "memory" else open_store(tmp_path / "run")
    save(at.child(STEP), 1)
    return at.child(STEP)


def when(monkeypatch, moment, work, times=1):
    """Do `work()` the first times that elements are about to be read ("before"), or have been ("after")."""
    name, left = {"before": "__enter__", "after": "__exit__"}[moment], itertools.count()
    real = getattr(fetch.Fetch, name)

    def hooked(self, *args):
        if moment == "before" and next(left) < times:
            work()
        result = real(self, *args)
        if moment == "after" and next(left) < times:
            work()
        return result

    monkeypatch.setattr(fetch.Fetch, name, hooked)
    return left


# ---- one process


@pytest.mark.long
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_state_and_metadata_are_of_one_save(place, monkeypatch, moment, verify):
    """Between marker and elements, or between elements and metadata: each reader returns one save, old or new."""
    manager, saves = Manager(place.above()), itertools.count(2)
    for read in (
        lambda: manager.restore(7, ONE, verify=verify),
        lambda: manager.restore_latest(ONE, verify=verify)[1:],
        lambda: LocalReplicas("/dev/shm/none", "r", copies=1).restore_latest(ONE, fallback=manager)[1:],
        lambda: (checkpoint.restore(place, ONE, verify=verify), None),
    ):
        with monkeypatch.context() as patch:
            when(patch, moment, lambda: save(place, next(saves)))
            seed_of(*read())


@pytest.mark.parametrize("verify", [True, False])
def test_a_state_dict_is_of_one_save(place, monkeypatch, verify):
    into = {**state(0), "epoch": 0}
    for seed in (1, 2):
        interop.save_state_dict(place, {**state(seed), "epoch": seed})
    when(monkeypatch, "before", lambda: interop.save_state_dict(place, {**state(3), "epoch": 3}))
    interop.load_state_dict(place, into, verify=verify)
    assert seed_of({k: into[k] for k in ONE}) == into["epoch"] == 3


def test_what_the_next_save_does_not_have_is_not_left_half_loaded(place, monkeypatch):
    """Filled from a save that was replaced by one without that leaf: an error, where strictness would let it pass."""
    interop.save_state_dict(place, state(1))
    into, rest = state(0), {k: x for k, x in state(2).items() if k != "v"}
    when(monkeypatch, "after", lambda: interop.save_state_dict(place, rest))
    real, seen = agreed.compared, []

    def disagree(*args):  # as when another rank has read the other save
        found, same = real(*args)
        seen.append(found)
        return found, [False, True] if len(seen) == 1 else same

    monkeypatch.setattr(agreed, "compared", disagree)
    with pytest.raises(RuntimeError, match="was saved again, without v, which has been filled"):
        interop.load_state_dict(place, into, strict="ignore_all")


@pytest.mark.long
def test_one_that_is_saved_again_and_again_is_an_error_that_says_so(place, monkeypatch):
    """Bounded; not damage, so that nobody goes back to an older step without a word."""
    saves = itertools.count(2)
    tries = when(monkeypatch, "before", lambda: save(place, next(saves)), times=10**9)
    with pytest.raises(RuntimeError, match="was saved again, or deleted, while it was read"):
        checkpoint.restore(place, ONE)
    assert next(tries) == one_save._TRIES
    manager = Manager(place.above())
    with pytest.raises(RuntimeError, match="was saved again"):
        manager.restore_latest(ONE)


def test_a_save_that_is_held_open_is_read_to_its_end(place, monkeypatch):
    """Another takes its place and its files are not removed yet: without a digest, too, only its own are read."""
    with monkeypatch.context() as patch:
        patch.setattr(type(place), "delete", lambda *_: None)
        when(patch, "before", lambda: save(place, 2))
        assert seed_of(checkpoint.restore(place, ONE, verify=False)) == 1
    assert seed_of(checkpoint.restore(place, ONE)) == 2


def test_a_deleted_one_is_missing_and_not_replaced(place, monkeypatch):
    when(monkeypatch, "before", lambda: place.withdraw().delete())
    with pytest.raises(CheckpointError, match="got no COMPLETE file"):
        checkpoint.restore(place, ONE)


def test_damage_is_still_damage(place, monkeypatch):
    """Of the save that is there."""
    real = fetch.ChunkFile.band

    def damaged(self, reader, number, offset, into, leaf=None):
        raise self.error("is damaged", leaf)

    monkeypatch.setattr(fetch.ChunkFile, "band", damaged)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.restore(place, ONE)
    monkeypatch.setattr(fetch.ChunkFile, "band", real)
    place.locate().remove("COMPLETE")
    with pytest.raises(CheckpointError, match="got no COMPLETE file"):
        checkpoint.restore(place, ONE)


def test_files_that_are_copied_over_are_noticed_without_digests(tmp_path, monkeypatch):
    """As rsync does, file by file in the same directory; the marker tells, at last."""
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 2)
    plain(tmp_path / "a"), plain(tmp_path / "b")

    def copy_over():
        for file in sorted(p for p in (tmp_path / "b").rglob("*") if p.is_file()):
            (tmp_path / "a" / file.relative_to(tmp_path / "b")).write_bytes(file.read_bytes())

    when(monkeypatch, "before", copy_over)
    assert seed_of(checkpoint.restore(tmp_path / "a", ONE, verify=False)) == 2


# ---- a snapshot


def test_a_snapshot_is_asked_again_and_again(place, monkeypatch):
    """All of one save, though the next has been published meanwhile; when its files are gone, that is no damage."""
    with checkpoint.open_snapshot(place) as saved:
        with monkeypatch.context() as patch:
            patch.setattr(type(place), "delete", lambda *_: None)
            save(place, 2)
        assert checkpoint.metadata(saved) == checkpoint.describe(saved).metadata == {"seed": 1}
        assert checkpoint.layouts(saved) == ONE and checkpoint.explain(saved, ONE)
        assert seed_of(checkpoint.restore(saved, ONE), checkpoint.metadata(saved)) == 1
        into = state(0)
        interop.load_state_dict(saved, into)
        assert seed_of(into) == 1 and show(open_source(saved), stats=True).metadata == {"seed": 1}
        assert checkpoint.metadata(place) == {"seed": 2}
        save(place, 3)  # which removes what the saves before have left
        save(place, 4)
        with pytest.raises(RuntimeError, match="was saved again") as caught:
            checkpoint.restore(saved, ONE)
        assert not isinstance(caught.value, CheckpointError) and checkpoint.metadata(saved) == {"seed": 1}


def test_a_snapshot_of_a_managers_step_is_not_deleted(tmp_path):
    manager = Manager(tmp_path, keep=1)
    manager.save(1, state(1), ONE)
    with checkpoint.open_snapshot(manager.path(1)) as saved:
        for step in (2, 3):
            manager.save(step, state(step), ONE)
        assert manager.steps() == [1, 3] and seed_of(checkpoint.restore(saved, ONE)) == 1
    manager.save(4, state(4), ONE)
    assert manager.steps() == [4]


# ---- the tools


@pytest.mark.parametrize("command", ["verify", "show", "diff", "export", "reshard", "ls"])
def test_the_commands_begin_anew(tmp_path, monkeypatch, command):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    save(a, 1)
    save(b, 2)
    argv = {
        "verify": ["verify", a],
        "show": ["show", a, "--stats", "--json"],
        "diff": ["diff", a, b, "--read-all"],
        "export": ["export", a, f"{tmp_path}/out.safetensors"],
        "reshard": ["reshard", a, f"{tmp_path}/out", "--mesh", "fsdp=2"],
        "ls": ["ls", a],
    }[command]
    out, err, done = io.StringIO(), io.StringIO(), []
    real = one_save.read_manifest

    def then_saved_again(storage):
        found = real(storage)
        if not done and storage.text.startswith(f"{a}/"):
            done.append(1)
            save(a, 2)
        return found

    monkeypatch.setattr(one_save, "read_manifest", then_saved_again)
    assert main(argv, out, err) == 0, (out.getvalue(), err.getvalue())
    assert done
    if command == "export":
        got = safetensors.torch.load_file(f"{tmp_path}/out.safetensors")
        assert seed_of({name: got[name] for name in ONE}) == 2
    if command == "reshard":
        assert seed_of(checkpoint.restore(f"{tmp_path}/out", ONE)) == 2


def test_readers_and_a_saver_in_a_loop(tmp_path, monkeypatch):
    """Nothing patched but the time: a thread saves without a pause, others restore, ask and verify."""
    at, over, counts = tmp_path / STEP, threading.Event(), {"read": 0, "busy": 0}
    save(at, 1)

    def saver():
        for seed in itertools.count(2):
            if over.is_set():
                return
            save(at, seed)

    thread = threading.Thread(target=saver)
    thread.start()
    until = time.monotonic() + 1.5
    try:
        manager = Manager(tmp_path)
        while time.monotonic() < until or counts["read"] < 20:
            for read in (
                lambda: seed_of(*manager.restore(7, ONE, verify=False)),
                lambda: seed_of(*manager.restore(7, ONE)),
                lambda: verify(at).damages == () or pytest.fail(str(verify(at))),
                lambda: listing(at).checkpoints[0].problem is None or pytest.fail(str(listing(at))),
            ):
                try:
                    read()
                    counts["read"] += 1
                except RuntimeError as error:
                    assert "was saved again" in str(error), error
                    counts["busy"] += 1
    finally:
        over.set()
        thread.join()
    assert counts["busy"] < counts["read"], counts


def test_an_export_of_one_save(tmp_path, monkeypatch):
    """A function with an open source cannot begin anew: it says so, and leaves nothing."""
    save(tmp_path / "a", 1)
    source = open_source(tmp_path / "a")
    save(tmp_path / "a", 2)
    with pytest.raises(RuntimeError, match="was saved again") as caught:
        export_safetensors(source, tmp_path / "out.safetensors")
    assert not isinstance(caught.value, CheckpointError) and not (tmp_path / "out.safetensors").exists()
