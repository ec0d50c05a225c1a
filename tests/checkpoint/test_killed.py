"""A save that is killed at any moment: what was complete stays, and what it left is removed when its owner is dead."""

import os
import shutil

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files import commit
from fmegatron.checkpoint.files.folder import Folder
from fmegatron.checkpoint.files.leases import Lease
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.files import whole
from fmegatron.layout import Mesh
from tests.checkpoint.fake_world import assert_same_bits, save_all, small_sizes
from tests.checkpoint.faulty import Killed, die_at, lives
from tests.checkpoint.test_faults import layouts_on, read_all, state


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


@pytest.fixture
def saved(tmp_path):
    assert save_all(tmp_path / "a", state(), layouts_on()) == [None] * 4
    return tmp_path / "a"


@pytest.fixture
def die():
    with lives() as end:
        yield end


PLACES = (
    *((Folder, "write"), (whole, "sync_directory"), (commit, "remove"), (commit, "_exchange")),
    *((commit.os, "rename"), (commit.os, "mkdir"), (Notes, "write"), (Notes, "remove")),
)


@pytest.mark.long
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
@pytest.mark.parametrize("existing", [True, False], ids=["again", "first"])
def test_killed_at_every_moment(tmp_path, monkeypatch, die, existing, exchange):
    """Old or new, bit for bit, at every moment; and the next save works and leaves nothing behind."""
    one = layouts_on(Mesh(fsdp=1, tp=1))
    checkpoint.save(tmp_path / "old", state(0), one)
    monkeypatch.setattr(Folder, "writers", 1)  # the same moments in every save
    if not exchange:
        monkeypatch.setattr(commit, "_exchange", lambda a, b: False)
    seen = set()
    for moment in range(1, 200):
        at = tmp_path / f"{moment}" / "a"
        if existing:
            shutil.copytree(tmp_path / "old", at)
        with monkeypatch.context() as patch:
            done = die_at(patch, moment, PLACES)
            try:
                checkpoint.save(at, state(1), one)
            except Killed:
                pass
        die()
        if existing:
            got = read_all(at)
            version = int(torch.equal(got["w"], state(1)["w"]))
            assert_same_bits(got, state(version), moment)
            seen.add(version)
        elif done[0] >= moment:
            try:
                assert_same_bits(read_all(at), state(1))
                seen.add(1)
            except CheckpointError as error:
                assert "COMPLETE" in str(error)
                seen.add(0)
        checkpoint.save(at, state(2), one)
        assert_same_bits(read_all(at), state(2))
        assert os.listdir(at.parent) == ["a"]
        if done[0] < moment:
            break
    assert seen == {0, 1} and moment > 20


def test_leftovers_of_killed_saves_are_removed(tmp_path, saved, die):
    def leave(token):
        for name in (f".a.tmp-{token}", f".a.old-{token}"):
            (saved.parent / name / "w").mkdir(parents=True)
            (saved.parent / name / "w" / "c.0.0").write_text("half")
        return Lease(Notes(saved.parent), f".a.saving-{token}")

    dead = leave("0123456789ab")
    die()
    alive = leave("aaaaaaaaaaaa")
    (saved.parent / ".b.tmp-0123456789ab").mkdir()  # another checkpoint's: not ours to remove
    assert save_all(saved, state(1), layouts_on()) == [None] * 4
    names = [".a.old-aaaaaaaaaaaa", ".a.saving-aaaaaaaaaaaa", ".a.tmp-aaaaaaaaaaaa", ".b.tmp-0123456789ab", "a"]
    assert sorted(os.listdir(saved.parent)) == names
    die()
    assert save_all(saved, state(1), layouts_on()) == [None] * 4
    assert sorted(os.listdir(saved.parent)) == [".b.tmp-0123456789ab", "a"]
    del dead, alive
