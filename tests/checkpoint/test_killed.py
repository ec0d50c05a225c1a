"""A save that is killed at any moment: what was complete stays, and what it left is removed when its owner is dead."""

import os
import shutil

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files import trees
from fmegatron.checkpoint.files.folder import Folder, FolderStore
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
    *((Folder, "write"), (whole, "sync_directory"), (trees, "remove"), (os, "rename"), (os, "mkdir")),
    *((FolderStore, "fill"), (FolderStore, "drop"), (Notes, "write"), (Notes, "remove")),
)


@pytest.mark.long
@pytest.mark.parametrize("existing", ["first", "again", "plain"])
def test_killed_at_every_moment(tmp_path, monkeypatch, die, existing):
    """Old or new, bit for bit, at every moment; and the next save works and leaves nothing behind.

    plain: what is there lies in the directory itself, as in version 3.
    """
    one = layouts_on(Mesh(fsdp=1, tp=1))
    checkpoint.save(tmp_path / "old", state(0), one)
    old = tmp_path / "old" if existing == "again" else FolderStore(str(tmp_path / "old")).locate().root
    monkeypatch.setattr(Folder, "writers", 1)  # the same moments in every save
    seen = set()
    for moment in range(1, 200):
        at = tmp_path / f"{moment}" / "a"
        if existing != "first":
            shutil.copytree(old, at, symlinks=True)
        with monkeypatch.context() as patch:
            done = die_at(patch, moment, PLACES)
            try:
                checkpoint.save(at, state(1), one)
            except Killed:
                pass
        die()
        if existing != "first":
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
        token = os.path.basename(FolderStore(str(at)).locate().root)
        assert os.listdir(at.parent) == ["a"] and set(os.listdir(at)) == {"COMPLETE", "arrays", token}
        if done[0] < moment:
            break
    assert seen == {0, 1} and moment > 20


def test_leftovers_of_killed_saves_are_removed(tmp_path, saved, die):
    """Of this version, whose draft has an owner, and of version 3, in hidden directories beside."""

    def leave(token):
        for at in (saved.parent / f".a.tmp-{token}", saved.parent / f".a.old-{token}", saved / token):
            (at / "w").mkdir(parents=True)
            (at / "w" / "c.0.0").write_text("half")
        (saved / f".COMPLETE-{token}").touch()
        return Lease(Notes(saved.parent), f".a.saving-{token}")

    dead = leave("0123456789ab")
    die()
    alive = leave("aaaaaaaaaaaa")
    (saved.parent / ".b.tmp-0123456789ab").mkdir()  # another checkpoint's: not ours to remove
    assert save_all(saved, state(1), layouts_on()) == [None] * 4
    names = [".a.old-aaaaaaaaaaaa", ".a.saving-aaaaaaaaaaaa", ".a.tmp-aaaaaaaaaaaa", ".b.tmp-0123456789ab", "a"]
    assert sorted(os.listdir(saved.parent)) == names
    root = os.path.basename(FolderStore(str(saved)).locate().root)
    names = {".COMPLETE-aaaaaaaaaaaa", "COMPLETE", root, "aaaaaaaaaaaa", "arrays"}
    assert set(os.listdir(saved)) == names
    die()
    assert save_all(saved, state(1), layouts_on()) == [None] * 4
    assert sorted(os.listdir(saved.parent)) == [".b.tmp-0123456789ab", "a"] and len(os.listdir(saved)) == 3
    del dead, alive
