"""Nothing damaged is ever restored in silence; a save that dies leaves the old checkpoint, and nothing half-made."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files import format
from fmegatron.checkpoint.files.folder import FolderStore
from fmegatron.checkpoint.writing import saving
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.faulty import FaultyStorage, full_after
from tests.checkpoint.tokens import files_of, reseal

MESH = Mesh(fsdp=2, tp=2)
FLAT_0 = "pieces/flat/0"


def layouts_on(mesh=MESH):
    """On one rank nothing is flat, so that local tensors are the global arrays."""
    f32 = torch.float32
    return {
        "w": Layout((8, 16), f32, mesh, ("fsdp", Split("tp", parts=2))),
        "b": Layout((12,), f32, mesh, ("tp",)),
        "flat": Layout((5, 7), f32, mesh, flat=("fsdp", "tp") if mesh.size > 1 else ()),
        "norm": Layout((16,), f32, mesh),
        "step": Layout((), torch.int64, mesh),
    }


def state(seed=0):
    torch.manual_seed(seed)
    return tree.map(lambda x: torch.randint(1, 1000, x.shape).to(x.dtype), layouts_on())


def read_all(path):
    """The global arrays, read by one rank."""
    return checkpoint.restore(path, layouts_on(Mesh(fsdp=1, tp=1)))


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


@pytest.fixture
def saved(tmp_path):
    assert save_all(tmp_path / "a", state(), layouts_on(), metadata={"loss": 1.5}) == [None] * 4
    return files_of(tmp_path / "a")


def data_files(path):
    """Files whose bytes are the state's, and the digests'."""
    names = (os.path.join(d, f) for d, _, files in os.walk(path) for f in files)
    return sorted(n for n in names if os.path.basename(n) not in ("zarr.json", "COMPLETE", "manifest.json"))


def change(path, at, new):
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)


def test_the_undamaged_one_is_whole(saved):
    assert_same_bits(read_all(saved.parent), state())
    assert checkpoint.metadata(saved.parent) == {"loss": 1.5}


@pytest.mark.long
@pytest.mark.parametrize(
    "file, leaf",
    [("arrays/w/c.0.0", "w"), ("arrays/w/c.1.3", "w"), ("arrays/b/c.1", "b"), ("arrays/norm/c.0", "norm"),
     ("pieces/flat/1/c.0", "flat"),
     ("packed/0/c.0", "step")],
)  # fmt: skip
@pytest.mark.parametrize("damage", ["flip", "zeros", "short", "empty", "long", "missing", "link", "directory", "pipe"])
def test_damaged_chunks_are_named(saved, file, leaf, damage):
    at = saved / file
    good = at.read_bytes()
    if damage == "flip":
        change(at, 0, bytes([good[0] ^ 1]))
    elif damage == "zeros":
        at.write_bytes(bytes(len(good)))
    elif damage in ("short", "empty", "long"):
        at.write_bytes({"short": good[:-1], "empty": b"", "long": good + b"\0"}[damage])
    else:
        at.unlink()
        if damage == "link":  # even to the right bytes: nothing outside the directory is read
            (saved.parent / "elsewhere").write_bytes(good)
            at.symlink_to(saved.parent / "elsewhere")
        elif damage == "directory":
            at.mkdir()
        elif damage == "pipe":
            os.mkfifo(at)
    with pytest.raises(CheckpointError, match=f"{leaf}: its chunk file {at} .*; restore another step"):
        read_all(saved.parent)


def test_exchanged_chunks(saved):
    a, b = saved / "arrays/w/c.0.0", saved / "arrays/w/c.0.1"
    bytes_a = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(bytes_a)
    with pytest.raises(CheckpointError, match="w: .*damaged"):
        read_all(saved.parent)


def test_a_linked_directory(saved):
    shutil.move(saved / "arrays/w", saved.parent / "w")
    (saved / "arrays/w").symlink_to(saved.parent / "w")
    with pytest.raises(CheckpointError, match="w: .*outside"):
        read_all(saved.parent)


@pytest.mark.medium
def test_random_flips(saved):
    """200 single bits, anywhere: in chunks, digests, manifest, marker. (Nobody reads the padding of packed leaves.)"""
    rng, detected = random.Random(0), 0
    files = data_files(saved) + [str(saved / "COMPLETE"), str(saved / "manifest.json")] * 3
    for _ in range(200):
        name = rng.choice(files)
        with open(name, "rb") as f:
            good = f.read()
        at, bit = rng.randrange(len(good)), 1 << rng.randrange(8)
        with open(name, "r+b") as f:
            f.seek(at)
            f.write(bytes([good[at] ^ bit]))
        try:
            assert_same_bits(read_all(saved.parent), state())
            assert "packed" in name and at >= 8
        except CheckpointError:
            detected += 1
        with open(name, "wb") as f:
            f.write(good)
    assert detected > 180
    assert_same_bits(read_all(saved.parent), state())


@pytest.mark.parametrize("name", ["COMPLETE", "manifest.json", "digests.bin"])
def test_missing_metadata(saved, name):
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        read_all(saved.parent)


def resign(path, **changes):
    """Edit the manifest and its digest: what an attacker would do, or another version of this code."""
    value = json.loads((path / "manifest.json").read_text())
    for key, edit in changes.items():
        value[key] = edit(value[key])
    reseal(path, json.dumps(value).encode())


def edited(name, **changes):
    return lambda table: {**table, name: {**table[name], **changes}}


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"leaves": lambda t: []},
        {"leaves": lambda t: {**t, "w": None}},
        {"leaves": edited("w", shape=[8, "16"])},
        {"leaves": edited("w", shape=[8, 1 << 80])},
        {"leaves": edited("w", dtype="float33")},
        {"leaves": edited("w", dtype="os.system")},
        {"leaves": edited("w", dtype="float64")},
        {"leaves": edited("w", array="arrays/b")},
        {"leaves": edited("w", array="nowhere")},
        {"leaves": edited("flat", pieces=[])},
        {"leaves": edited("step", pieces=[{"array": "packed/0", "offset": 1 << 40, "boxes": [[[], [], 0, []]]}])},
        {"leaves": edited("step", pieces=[{"array": "arrays/w", "offset": 0, "boxes": [[[], [], 0, []]]}])},
        {"leaves": edited("flat", pieces=[{"array": FLAT_0, "offset": 0, "boxes": [[[0, 0], [5, 7], 0, [7, 1]]]}])},
        {"leaves": edited("flat", pieces=[{"array": FLAT_0, "offset": -8, "boxes": [[[0, 0], [5, 7], 0, [0, 0]]]}])},
        {"arrays": edited("arrays/w", chunk=[0, 4])},
        {"arrays": edited("arrays/w", band=[4, 1])},
        {"arrays": edited("arrays/w", chunk=[1 << 40, 4], band=[1, 4])},
        {"arrays": edited("arrays/w", first_digest=10**9)},
        {"arrays": lambda t: {**t, "../w": t["arrays/w"]}},
        {"arrays": lambda t: {**t, "/etc/passwd": t["arrays/w"]}},
        {"digest_count": lambda n: -1},
        {"meshes": lambda t: 3},
        {"step": lambda s: "x"},
        {"metadata": lambda s: []},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_nothing_in_the_manifest_is_trusted(saved, changes):
    resign(saved, **changes)
    with pytest.raises(CheckpointError):
        read_all(saved.parent)


def test_stored_layouts_are_checked(saved):
    resign(saved, leaves=edited("w", layout={"mesh": 7, "spec": [], "flat": []}))
    with pytest.raises(CheckpointError, match="w: its stored layout"):
        checkpoint.layouts(saved.parent)


def test_other_formats_and_versions(saved):
    (saved / "COMPLETE").write_text(json.dumps({"format": "fmegatron.checkpoint", "version": 99}))
    with pytest.raises(CheckpointError, match="version 99"):
        read_all(saved.parent)


def test_json_bombs(saved):
    for text in ("[" * 100_000, '{"a":1,"a":2}', "{}", "nonsense", ""):
        (saved / "COMPLETE").write_text(text)
        with pytest.raises(CheckpointError):
            read_all(saved.parent)


# ---- a save that fails


def no_space(monkeypatch, rank):
    """The disk is full when this rank starts its second write."""
    real = saving.write_part

    def write_part(storage, plans, tensors, r, **seen):
        return real(FaultyStorage(storage, full_after(1)) if r == rank else storage, plans, tensors, r, **seen)

    monkeypatch.setattr(saving, "write_part", write_part)


@pytest.mark.parametrize("existing", [True, False])
def test_full_disk_on_one_rank(tmp_path, monkeypatch, existing):
    if existing:
        assert save_all(tmp_path / "a", state(0), layouts_on()) == [None] * 4
    assert save_all(tmp_path / "b", state(0), layouts_on()) == [None] * 4
    before = sorted(os.listdir(tmp_path))
    with monkeypatch.context() as patch:
        no_space(patch, rank=2)
        got = save_all(tmp_path / "a", state(1), layouts_on())
    assert all(isinstance(e, RuntimeError) for e in got)
    assert len({str(e) for e in got}) == 1 and "No space left on device" in str(got[0]) and "on rank " in str(got[0])
    assert sorted(os.listdir(tmp_path)) == before
    assert_same_bits(read_all(tmp_path / "b"), state(0))
    if existing:
        assert_same_bits(read_all(tmp_path / "a"), state(0))
    assert save_all(tmp_path / "a", state(1), layouts_on()) == [None] * 4
    assert_same_bits(read_all(tmp_path / "a"), state(1))


def test_a_file_system_that_refuses(tmp_path):
    """A real error of the system's own: a directory stands where a file must be."""
    layouts = {"w": Layout((4, 4), torch.float32, Mesh())}

    def in_the_way(store):
        folder = begin(store)
        (Path(folder.root) / "arrays/w/c.0.0/x").mkdir(parents=True)
        return folder

    begin = FolderStore.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderStore, "begin", in_the_way)
        with pytest.raises(RuntimeError, match="OSError: w: a chunk could not be written"):
            checkpoint.save(tmp_path / "a", {"w": torch.ones(4, 4)}, layouts)
    assert os.listdir(tmp_path) == []


def test_an_interrupt_on_one_rank_ends_all(tmp_path, monkeypatch):
    def interrupted(root, plans, tensors, rank, **seen):
        if rank == 1:
            raise KeyboardInterrupt
        return real(root, plans, tensors, rank, **seen)

    real = saving.write_part
    monkeypatch.setattr(saving, "write_part", interrupted)
    got = save_all(tmp_path / "a", state(), layouts_on())
    assert isinstance(got[1], KeyboardInterrupt)
    assert all(isinstance(got[r], RuntimeError) and "KeyboardInterrupt" in str(got[r]) for r in (0, 2, 3))
    assert os.listdir(tmp_path) == []


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is no checkpoint, wanted a new one.*choose another"):
        checkpoint.save(tmp_path / "home", {"x": torch.ones(2)}, {"x": Layout((2,), torch.float32, Mesh())})
    assert os.listdir(tmp_path) == ["home"]


def test_ranks_with_different_trees(tmp_path):
    layouts = layouts_on()

    def other(world):
        mine = {k: v for k, v in layouts.items() if world.rank != 3 or k != "b"}
        parts = cut_tree({k: state()[k] for k in mine}, mine)
        return checkpoint.save(tmp_path / "a", parts[world.rank], mine, world)

    got = run(4, other)
    assert all("rank 3: got a tree" in str(e) for e in got)
    assert os.listdir(tmp_path) == []


def test_digests_that_were_changed_together_with_their_chunk(saved):
    """The digests are pinned by the manifest, and it by the marker: no consistent pair of changes passes."""
    chunk, digests = saved / "arrays/b/c.1", saved / "digests.bin"

    def first_band(size):
        return format.digest(np.frombuffer(chunk.read_bytes()[:size], np.uint8)).to_bytes(8, "little")

    size = next(n for n in range(4, 25, 4) if first_band(n) in digests.read_bytes())
    at = digests.read_bytes().index(first_band(size))
    change(chunk, 0, bytes([chunk.read_bytes()[0] ^ 1]))
    change(digests, at, first_band(size))
    with pytest.raises(
        CheckpointError, match=r"b: the digests of arrays/b in .*digests.bin were altered after the save"
    ):
        read_all(saved.parent)


def test_a_changed_marker_is_the_file_that_is_named(saved):
    change(saved / "COMPLETE", (saved / "COMPLETE").read_bytes().index(b"manifest_bytes"), b"M")
    with pytest.raises(CheckpointError, match="COMPLETE: got no manifest_bytes.*restore another step"):
        read_all(saved.parent)
