"""What a power cut leaves behind: the order in which a save reaches the disk."""

import os

import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.files.folder import Folder
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import small_sizes

LAYOUTS = {"w": Layout((8, 16), torch.float32, Mesh()), "step": Layout((), torch.int64, Mesh())}


def save(path):
    with small_sizes():
        checkpoint.save(path, {"w": torch.ones(8, 16), "step": torch.tensor(3)}, LAYOUTS)


def test_the_disk_has_everything_before_the_marker_and_the_name_last(tmp_path, monkeypatch):
    """Content, then the marker, then the name. What tensorstore has written is durable when its future is done."""
    events, fsync, array, stored = [], os.fsync, Folder.array, []

    def seen_fsync(fd):
        events.append(os.fstat(fd).st_ino)  # the name changes when the directory is published, the inode does not
        fsync(fd)

    def seen_array(folder, of):
        stored.append(array(folder, of))
        return stored[-1]

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Folder, "array", seen_array)
    save(tmp_path / "a")
    assert all(each.values.context["file_io_sync"].to_json() is True for each in stored) and len(stored) == 2
    found = {str(p.relative_to(tmp_path)): p.stat().st_ino for p in (tmp_path / "a").rglob("*")}
    marker = events.index(found.pop("a/COMPLETE"))
    written = {
        f"a/{each.array.name}/{f}" for each in stored for f in ("zarr.json", "c.0", "c.0.0", "c.1.0", "c.2.0", "c.3.0")
    }
    left = {number for name, number in found.items() if name not in written}
    assert {*left, (tmp_path / "a").stat().st_ino} <= set(events[:marker])
    assert events[marker + 1 :] == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]
