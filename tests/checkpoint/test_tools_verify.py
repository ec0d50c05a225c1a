"""`verify` names every damage: each kind, each file, every byte, padding and digests included."""

import io
import json
import math
import os
import random
import shutil

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.tools import verify
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import save_all, small_sizes
from tests.checkpoint.tokens import files_of

MESH = Mesh(fsdp=2)


def call(*argv):
    """(exit status, output, error output) of a command."""
    out, err = io.StringIO(), io.StringIO()
    status = main([str(a) for a in argv], out, err)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with all that there is: padded chunks, pieces, packed leaves, an empty leaf."""
    layouts = {
        "padded": Layout((35, 16), torch.float32, MESH, ("fsdp",)),
        "flat": Layout((7, 33), torch.bfloat16, MESH, flat=("fsdp",)),
        "deep": {"whole": Layout((64, 16), torch.int32, MESH, (None, "fsdp"))},
        "scale": Layout((), torch.float64, MESH),
        "none": Layout((0, 3), torch.float32, MESH),
    }
    state = {
        "padded": torch.randn(35, 16),
        "flat": torch.randn(7, 33).bfloat16(),
        "deep": {"whole": torch.arange(1024, dtype=torch.int32).view(64, 16)},
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
    }
    with small_sizes():
        assert save_all(tmp_path / "step_00000003", state, layouts, step=3, metadata={"note": "x"}) == [None] * 2
        yield files_of(tmp_path / "step_00000003")


def files(root):
    """Relative paths of all files."""
    return sorted(os.path.relpath(os.path.join(d, f), root) for d, _, names in os.walk(root) for f in names)


def found(root):
    """{(kind, file)} of the damages."""
    return {(damage.kind, damage.file) for damage in verify(root).damages}


def chunk_of(root, name):
    return next(f for f in files(root) if f.startswith(name) and os.path.basename(f).startswith("c"))


def test_a_good_one(saved):
    report = verify(saved.parent)
    assert report.damages == () and report.step == 3 and report.leaves == 5
    assert report.files == len(files(saved))
    status, out, err = call("verify", saved.parent)
    assert (status, err) == (0, "") and "good" in out
    status, out, _ = call("verify", saved.parent, "--json", "--jobs", 1)
    assert status == 0 and json.loads(out)["checkpoints"][0]["damages"] == []


@pytest.mark.medium
def test_200_flips_of_any_bit_of_any_file(saved, tmp_path):
    """Each flip is found, in the file where it is, at the byte where it is."""
    generator, names = random.Random(0), files(saved)
    # Every file at least once, then bytes at random; the padding of "padded" and all of digests.bin are among them.
    wanted = names + [generator.choice(names) for _ in range(200 - len(names))]
    assert len(wanted) == 200 and {"digests.bin", "COMPLETE", "manifest.json"} <= set(wanted)
    for name in wanted:
        at = saved / name
        before = at.read_bytes()
        where, bit = generator.randrange(len(before)), 1 << generator.randrange(8)
        at.write_bytes(before[:where] + bytes([before[where] ^ bit]) + before[where + 1 :])
        damages = verify(saved.parent).damages
        assert damages, (name, where, bit)
        if name in ("COMPLETE", "manifest.json"):
            assert {d.kind for d in damages} <= {"metadata", "bytes"}
        else:
            assert {d.file for d in damages} == {name}, (name, where, damages)
            assert any(d.start <= where < d.stop for d in damages), (name, where, damages)
        at.write_bytes(before)
    assert verify(saved.parent).damages == ()


def test_blanks_behind_the_pointer(saved):
    """Which no reader minds."""
    at = saved.parent / "COMPLETE"
    at.write_bytes(at.read_bytes() + b" " * 8)
    assert found(saved.parent) == {("bytes", "../COMPLETE")} and found(saved) == set()


def test_padding_is_read(saved):
    """The last chunk of `padded` ends in zeros that no restore looks at."""
    array = open_source(saved).manifest.arrays["arrays/padded"]
    rows = array.grid[0]
    assert rows * array.chunk[0] > 35
    file = array.file_of((rows - 1, 0))
    name, end = array.file_name(file), array.index_span(file)[0]
    at = saved / name
    data = bytearray(at.read_bytes())
    data[end - 1] ^= 1
    at.write_bytes(data)
    damage = verify(saved.parent).damages
    assert [(d.kind, d.file, d.leaf) for d in damage] == [("bytes", name, "padded")]
    assert damage[0].stop == end
    layouts = checkpoint.layouts(saved.parent)
    checkpoint.restore(saved.parent, {"padded": layouts["padded"]}, rank=1, strict="subset")


def test_every_kind_at_once(saved):
    """All damages are listed, not only the first, each with its leaf."""
    gone, short, swapped = (chunk_of(saved, f"arrays/{x}") for x in ("deep/whole", "padded", "padded"))
    os.remove(saved / gone)
    with open(saved / short, "r+b") as f:
        f.truncate(5)
    piece = chunk_of(saved, "pieces/flat")
    os.rename(saved / piece, saved / "elsewhere")
    os.symlink(saved / "elsewhere", saved / piece)
    (saved / "arrays/deep/zarr.json").write_text("{}")
    (saved / "stray").mkdir()
    (saved / "stray/file").write_text("?")
    os.mkfifo(saved / "arrays/pipe")
    damages = {(d.kind, d.file): d for d in verify(saved.parent).damages}
    assert set(damages) == {
        ("missing", gone),
        ("size", swapped),
        ("kind", piece),
        ("size", "arrays/deep/zarr.json"),
        ("extra", "elsewhere"),
        ("extra", "stray"),
        ("extra", "stray/file"),
        ("extra", "arrays/pipe"),
    }
    leaves = {key: d.leaf for key, d in damages.items()}
    assert leaves["missing", gone] == "deep/whole" and leaves["size", short] == "padded"
    assert leaves["kind", piece] == "flat"
    status, out, _ = call("verify", saved.parent)
    assert status == 1 and all(d.file in out for d in damages.values())


def test_swapped_chunks_and_zeroed_pages(saved):
    first, second = [f for f in files(saved) if f.startswith("arrays/deep/whole/c.")][:2]
    os.rename(saved / first, saved / "x")
    os.rename(saved / second, saved / first)
    os.rename(saved / "x", saved / second)
    assert found(saved.parent) == {("bytes", first), ("bytes", second)}
    (saved / first).write_bytes(bytes(os.path.getsize(saved / first)))
    damages = [d for d in verify(saved.parent).damages if d.file == first]
    size, array = os.path.getsize(saved / first), open_source(saved.parent).manifest.arrays["arrays/deep/whole"]
    end = size - 16 * math.prod(array.shard) if array.shard else size
    assert [(d.start, d.stop) for d in damages] == [(0, end), (end, size)][: 1 + (end < size)]  # neighbours are joined


def test_digests_cut_short(saved):
    """The digests that are left still serve; the files of the others are still looked at."""
    size = os.path.getsize(saved / "digests.bin")
    with open(saved / "digests.bin", "r+b") as f:
        f.truncate(size - 8)
    last = max(verify(saved.parent).damages, key=lambda d: d.stop)
    assert (last.kind, last.file, last.stop) == ("bytes", "digests.bin", size)
    assert ("size", "digests.bin") in found(saved.parent)
    chunk = chunk_of(saved, "arrays/padded")
    os.remove(saved / chunk)
    assert ("missing", chunk) in found(saved.parent)


def test_no_marker_and_a_broken_manifest(saved):
    text = (saved / "manifest.json").read_bytes()
    (saved / "manifest.json").write_bytes(text[:-10])
    assert found(saved.parent) == {("metadata", "manifest.json")}
    os.remove(saved / "COMPLETE")
    assert found(saved.parent) == {("metadata", "COMPLETE")}
    assert call("verify", saved.parent)[0] == 1


def test_a_whole_directory(saved, tmp_path):
    """Every step is verified; the status tells of any; saves in progress are left alone."""
    shutil.copytree(saved, tmp_path / "step_00000004")
    (tmp_path / ".step_00000005.tmp-abcdef").mkdir()
    status, out, _ = call("verify", tmp_path, "--json")
    assert status == 0 and [c["good"] for c in json.loads(out)["checkpoints"]] == [True, True]
    chunk = chunk_of(saved, "arrays/padded")
    os.remove(saved / chunk)
    status, out, _ = call("verify", tmp_path)
    assert status == 1 and f"{chunk}: is missing" in out
