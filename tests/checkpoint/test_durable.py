"""What a power cut leaves behind: the order in which a save reaches the disk."""

import os

import torch

from fmegatron import checkpoint
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import small_sizes
from tests.checkpoint.tokens import files_of

LAYOUTS = {"w": Layout((8, 16), torch.float32, Mesh()), "step": Layout((), torch.int64, Mesh())}


def save(path):
    with small_sizes():
        checkpoint.save(path, {"w": torch.ones(8, 16), "step": torch.tensor(3)}, LAYOUTS)


def test_the_disk_has_everything_before_the_marker_and_the_name_last(tmp_path, monkeypatch):
    """Content, the marker, names down to the token, then the pointer's name; and no file of the save before goes until
    that is durable."""
    events = []
    real = {(os, "fsync"): os.fsync, (os, "rename"): os.rename, (os, "remove"): os.remove}

    def seen(of, name, what):
        def call(*args, **kwargs):
            if event := what(*args):
                events.append(event)
            return real[of, name](*args, **kwargs)

        monkeypatch.setattr(of, name, call)

    seen(os, "fsync", lambda fd: os.fstat(fd).st_ino)  # a draft has another name when it is the pointer
    seen(os, "rename", lambda _, to: "rename" if to == str(tmp_path / "a/COMPLETE") else None)
    seen(os, "remove", lambda at: "remove" if at.endswith(".0") else None)
    for again in (False, True):
        del events[:]
        save(tmp_path / "a")
        at = files_of(tmp_path / "a")
        found = {str(p.relative_to(at)): p.stat().st_ino for p in at.rglob("*")}
        marker = events.index(found.pop("COMPLETE"))
        assert len(found) > 10 and {*found.values(), at.stat().st_ino} <= set(events[:marker])
        token, name, above, pointer = (p.stat().st_ino for p in (at, at.parent, tmp_path, tmp_path / "a/COMPLETE"))
        last = [token, pointer, name, *([] if again else [above]), "rename", name]
        assert events[marker + 1 :][: len(last)] == last
        assert ("remove" in events[marker + 1 + len(last) :]) == again and "remove" not in events[: marker + len(last)]
