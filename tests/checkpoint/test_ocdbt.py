"""Checkpoints whose arrays lie in an OCDBT database: the same promises, fewer files, readable by plain tensorstore."""

import json
import os

import numpy as np
import pytest
import tensorstore as ts
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError, open_store
from fmegatron.checkpoint.files import ocdbt
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.test_faults import layouts_on, state

ONE = layouts_on(Mesh(fsdp=1, tp=1))


@pytest.fixture
def saved(tmp_path):
    with small_sizes():
        assert save_all(open_store(tmp_path / "a", ocdbt=True), state(), layouts_on()) == [None] * 4
        yield tmp_path / "a"


def files(path):
    return sorted(os.path.join(folder, f) for folder, _, names in os.walk(path) for f in names)


def test_saved_and_resharded(saved):
    assert_same_bits(checkpoint.restore(saved, ONE), state())
    two = layouts_on(Mesh(fsdp=1, tp=2))
    got, wanted = run(2, lambda world: checkpoint.restore(saved, two, world=world)), cut_tree(state(), two)
    for rank in range(2):
        assert_same_bits(got[rank], wanted[rank])


def test_each_kind_takes_the_place_of_the_other(tmp_path):
    with small_sizes():
        for seed, ocdbt in enumerate([True, False, True, True]):
            checkpoint.save(open_store(tmp_path / "a", ocdbt=ocdbt), state(seed), ONE)
            assert_same_bits(checkpoint.restore(tmp_path / "a", ONE), state(seed))
            assert (tmp_path / "a" / "manifest.ocdbt").exists() == ocdbt and os.listdir(tmp_path) == ["a"]


def test_plain_tensorstore_opens_the_arrays(tmp_path):
    mesh = Mesh(fsdp=2, tp=2)
    layouts = {
        "p": {"w": Layout((1024, 512), torch.bfloat16, mesh, ("fsdp", "tp"))},
        "n": Layout((), torch.int64, mesh),
    }
    whole = {"p": {"w": torch.randn(1024, 512).bfloat16()}, "n": torch.tensor(7)}
    assert save_all(open_store(tmp_path / "a", ocdbt=True), whole, layouts) == [None] * 4
    kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/a/"}
    got = ts.open({"driver": "zarr3", "kvstore": kvstore, "path": "arrays/p/w/"}, read=True).result()
    assert got.dtype.name == "bfloat16" and got.shape == (1024, 512)
    wanted = whole["p"]["w"].view(torch.int16).numpy()
    assert np.array_equal(np.asarray(got.read().result()).view(np.int16), wanted)
    assert json.loads(ts.KvStore.open(kvstore).result()["arrays/p/zarr.json"])["node_type"] == "group"


def test_far_fewer_files(tmp_path):
    layouts = {str(i): Layout((128, 256), torch.float32, Mesh()) for i in range(300)}
    whole = {name: torch.full((128, 256), float(name)) for name in layouts}
    checkpoint.save(tmp_path / "plain", whole, layouts)
    checkpoint.save(open_store(tmp_path / "database", ocdbt=True), whole, layouts)
    assert len(files(tmp_path / "plain")) > 600 and len(files(tmp_path / "database")) <= 12
    assert_same_bits(checkpoint.restore(tmp_path / "database", layouts), whole)
    sizes = [sum(map(os.path.getsize, files(tmp_path / name))) for name in ("plain", "database")]
    assert sizes[1] < 1.01 * sizes[0]


def test_big_values_are_written_in_batches(tmp_path):
    """More than one batch; held memory is bounded, and the last one is written, too."""
    layouts = {"w": Layout((36, 1024, 1024), torch.float32, Mesh())}
    whole = {"w": torch.arange(36 << 20, dtype=torch.float32).view(36, 1024, 1024)}
    checkpoint.save(open_store(tmp_path / "a", ocdbt=True), whole, layouts)
    assert torch.equal(checkpoint.restore(tmp_path / "a", layouts)["w"], whole["w"])


@pytest.mark.parametrize("damage", ["flip", "shorten", "zero", "empty", "remove"])
def test_damage_is_found(saved, damage):
    """In every file, at many places: an error that names a leaf or a file, or bits that are right."""
    leaves, errors = set(), 0
    for path in files(saved):
        with open(path, "rb") as f:
            data = f.read()
        places = range(0, len(data), max(1, len(data) // 9)) if damage in ("flip", "zero") else [len(data) // 2]
        for at in places:
            bad = bytearray(data)
            if damage == "flip":
                bad[at] ^= 1 << at % 8
            elif damage == "zero":
                bad[at : at + 64] = bytes(len(bad[at : at + 64]))
            elif damage == "shorten":
                del bad[at:]
            os.remove(path)
            if damage != "remove":
                with open(path, "wb") as f:
                    f.write(b"" if damage == "empty" else bad)
            try:
                assert_same_bits(checkpoint.restore(saved, ONE), state(), (path, at))
            except CheckpointError as error:
                errors += 1
                leaves.add(str(error).split(":")[0])
            with open(path, "wb") as f:
                f.write(data)
    assert errors >= 4 and leaves & set(ONE), (errors, leaves)


def test_a_version_1_reader_refuses(saved):
    """The marker says that the chunks are no plain files."""
    marker = json.loads((saved / "COMPLETE").read_text())
    assert (marker["version"], marker["store"]) == (2, "ocdbt")
    for changes in ({"version": 1}, {"store": "other"}, {"version": 3}):
        (saved / "COMPLETE").write_text(json.dumps({**marker, **changes}))
        with pytest.raises(CheckpointError, match="got format"):
            checkpoint.restore(saved, ONE)


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    with small_sizes():
        store = open_store(tmp_path / "a", ocdbt=True)
        checkpoint.save(store, state(0), ONE)
        before = files(tmp_path)

        def full(future):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(ocdbt, "done", full)
            with pytest.raises(RuntimeError, match="No space left"):
                checkpoint.save(store, state(1), ONE)
        assert files(tmp_path) == before
        assert_same_bits(checkpoint.restore(tmp_path / "a", ONE), state(0))
