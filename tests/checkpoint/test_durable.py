"""What a power cut leaves behind: the order in which a save reaches the disk."""

import os

import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import write
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import small_sizes


def test_the_disk_has_everything_before_the_marker_and_the_name_last(tmp_path, monkeypatch):
    """Chunks are synced by tensorstore, all else by us: content, then the marker, then the name."""
    events, contexts, fsync, context = [], [], os.fsync, write.ts.Context

    def seen_fsync(fd):
        events.append(os.fstat(fd).st_ino)  # the name changes when the directory is published, the inode does not
        fsync(fd)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(write.ts, "Context", lambda spec: contexts.append(spec) or context(spec))
    layouts = {"w": Layout((8, 16), torch.float32, Mesh()), "step": Layout((), torch.int64, Mesh())}
    with small_sizes():
        checkpoint.save(tmp_path / "a", {"w": torch.ones(8, 16), "step": torch.tensor(3)}, layouts)
    assert contexts and all(spec["file_io_sync"] is True for spec in contexts)
    found = {str(p.relative_to(tmp_path)): p.stat().st_ino for p in (tmp_path / "a").rglob("*")}
    chunks = {name for name in found if os.path.basename(name).startswith("c.")}
    marker = events.index(found.pop("a/COMPLETE"))
    early = {inode for name, inode in found.items() if name not in chunks} | {(tmp_path / "a").stat().st_ino}
    assert chunks and early <= set(events[:marker])
    assert events[marker + 1 :] == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]
