"""Before an older step goes, the new one is looked at: all its files, and a sample of what is in them."""

import os
import warnings

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.files.folder import Folder
from fmegatron.checkpoint.files.saved import save_at
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage.steps import Steps
from fmegatron.checkpoint.reading import sample
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import save_all, small_sizes
from tests.checkpoint.tokens import files_of


def state(fill=1.0):
    return {"w": torch.full((512, 640), fill), "v": torch.full((9,), fill), "n": torch.tensor(fill), "e": torch.ones(0)}


def flip(path, at=3):
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("url", [False, True])
def test_what_is_whole_passes(tmp_path, url):
    at = f"file://{tmp_path}/run" if url else tmp_path / "run"
    with checkpoint.Manager(at, keep=checkpoint.Keep(last=1)) as manager:
        for step in (1, 2, 3):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                manager.save(step, state(step))
        assert manager.steps() == [3]


def test_no_older_step_goes_for_one_that_the_disk_has_not(tmp_path, monkeypatch):
    """The bytes are altered behind the save, as by a disk that acknowledges what it loses."""
    real = Folder.sync

    def sync(self):
        real(self)
        if "step_00000002" in self.root:
            flip(f"{self.root}/arrays/w/c.0.0")

    with checkpoint.Manager(tmp_path, keep=checkpoint.Keep(last=1)) as manager:
        manager.save(1, state())
        monkeypatch.setattr(Folder, "sync", sync)
        with pytest.warns(
            RuntimeWarning, match=r"old checkpoints could not be deleted: w: its chunk file .* is damaged"
        ):
            manager.save(2, state(2.0))
        assert manager.steps() == [1, 2]
        with pytest.warns(RuntimeWarning):
            assert manager.restore_latest()[0] == 1


def test_it_is_read_past_the_cache(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "step", state())
    dropped, real = [], os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: dropped.append(a[1:]) or real(*a))
    sample.read_back(save_at(open_store(tmp_path / "step")))
    assert dropped and set(dropped) == {(0, 0, os.POSIX_FADV_DONTNEED)}


@pytest.mark.parametrize("bands", [1, 7, 10_000])
def test_of_any_size_and_layout(tmp_path, bands):
    mesh = Mesh(dp=2, tp=2)
    layouts = {
        "w": Layout((24, 20), torch.float32, mesh, (Split("dp"), Split("tp"))),
        "p": Layout((7, 11), torch.bfloat16, mesh, flat=("dp",)),
        "n": Layout((), torch.int64, mesh),
    }
    full = {"w": torch.randn(24, 20), "p": torch.randn(7, 11).bfloat16(), "n": torch.tensor(5)}
    with small_sizes():
        save_all(tmp_path / "step", full, layouts)
        saved = save_at(open_store(tmp_path / "step"))
        sample.read_back(saved, bands)
        if bands == 10_000:  # all of them: then every byte is looked at
            for array in saved.manifest.arrays.values():
                file = next(f for f in (files_of(tmp_path / "step") / array.name).iterdir() if f.name.startswith("c"))
                flip(file, file.stat().st_size - 1)
                with pytest.raises(checkpoint.CheckpointError, match="is damaged"):
                    sample.read_back(saved, bands)
                flip(file, file.stat().st_size - 1)


def test_steps_differ_in_what_is_drawn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(sample, "_read", lambda save, array, numbers, owners: drawn.append((array.name, numbers)))
    for i in range(2):
        checkpoint.save(tmp_path / str(i), {"w": torch.full((4096, 4096), float(i))})
        sample.read_back(save_at(open_store(tmp_path / str(i))))
    (_, first), (_, second) = drawn
    assert len(first) == len(second) == sample.SAMPLE_BANDS and first != second


def test_a_step_without_elements(tmp_path):
    checkpoint.save(tmp_path / "step_00000001", {"e": torch.ones(0)})
    Steps(tmp_path).check(1)


@pytest.mark.parametrize(
    "gone", ["arrays/zarr.json", "arrays/w/zarr.json", "digests.bin", "arrays/w/c.0.0", "arrays/v/zarr.json"]
)
def test_every_file_is_looked_for(tmp_path, gone):
    """What a cleaner took from a saver that it held for dead: metadata of zarr as well, which no restore reads."""
    checkpoint.save(tmp_path / "step_00000001", state(), step=1)
    file = files_of(tmp_path / "step_00000001") / gone
    file.unlink()
    with pytest.raises(checkpoint.CheckpointError, match="was written and has vanished"):
        Steps(tmp_path).check(1)


def test_no_older_step_goes_for_one_whose_arrays_are_misdescribed(tmp_path, monkeypatch):
    """A restore refuses it, so the one before is what there is."""
    real = Folder.sync

    def sync(self):
        real(self)
        if "step_00000002" in self.root:
            flip(f"{self.root}/arrays/w/zarr.json")

    with checkpoint.Manager(tmp_path, keep=checkpoint.Keep(last=1)) as manager:
        manager.save(1, state())
        monkeypatch.setattr(Folder, "sync", sync)
        with pytest.warns(RuntimeWarning, match=r"old checkpoints could not be deleted: w: .*zarr\.json"):
            manager.save(2, state(2.0))
        assert manager.steps() == [1, 2]
