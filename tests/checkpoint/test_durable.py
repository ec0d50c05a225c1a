"""What a power cut leaves behind: the order in which a save reaches the disk."""

import os

import torch

from fmegatron import checkpoint
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import small_sizes


def test_the_disk_has_everything_before_the_marker_and_the_name_last(tmp_path, monkeypatch):
    """Content, then the marker, then the name."""
    events, fsync = [], os.fsync

    def seen_fsync(fd):
        events.append(os.fstat(fd).st_ino)  # the name changes when the directory is published, the inode does not
        fsync(fd)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    layouts = {"w": Layout((8, 16), torch.float32, Mesh()), "step": Layout((), torch.int64, Mesh())}
    with small_sizes():
        checkpoint.save(tmp_path / "a", {"w": torch.ones(8, 16), "step": torch.tensor(3)}, layouts)
    found = {str(p.relative_to(tmp_path)): p.stat().st_ino for p in (tmp_path / "a").rglob("*")}
    marker = events.index(found.pop("a/COMPLETE"))
    assert {*found.values(), (tmp_path / "a").stat().st_ino} <= set(events[:marker])
    assert events[marker + 1 :] == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]
