"""Pieces above 64 MiB, here above a few hundred bytes: several arrays of a rank, which every reader takes as one."""

import random

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.files.saved import save_at
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.reading.snapshot import on_snapshot
from fmegatron.checkpoint.tools.resharding import plan_of, reshard
from fmegatron.checkpoint.tools.verification import verify
from fmegatron.checkpoint.writing import plan, write
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.tokens import files_of

MESH = Mesh(dp=2, tp=3)
LAYOUTS = {
    "range": Layout((37, 41), torch.float32, MESH, flat=("dp", "tp")),
    "columns": Layout((37, 41), torch.bfloat16, MESH, (None, Split("tp")), flat=("dp",)),
    "parts": Layout((3, 11, 13), torch.float32, MESH, (None, Split("tp", (5, 6))), flat=("dp",)),
    "cube": Layout((7, 5, 11), torch.int64, MESH, flat=("tp", "dp")),
    "scalar": Layout((), torch.int64, MESH),
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(write, "MOST_CHUNK_BYTES", 256)
    monkeypatch.setattr(plan, "_FINEST_BYTES", 1 << 20)  # no grid is coarse enough
    with small_sizes():
        yield


def full(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {k: torch.randint(-100, 100, layout.shape, generator=draw).to(layout.dtype) for k, layout in LAYOUTS.items()}


def sizes(path):
    manifest = save_at(open_store(path)).manifest
    return {a.name: a.shape[0] * a.itemsize for a in manifest.arrays.values() if a.name.startswith("pieces/")}


def assert_restores(path, state):
    assert_same_bits(checkpoint.restore(path), state)
    draw = random.Random(3)
    for mesh in (Mesh(dp=4), Mesh(tp=5)):
        axis = mesh.names[0]
        layouts = {}
        for k, layout in LAYOUTS.items():
            dims = len(layout.shape)
            spec = (*[None] * draw.randrange(max(1, dims)), axis)[:dims]
            layouts[k] = Layout(layout.shape, layout.dtype, mesh, spec)
        wanted = cut_tree(state, layouts)
        for rank in range(mesh.size):
            assert_same_bits(checkpoint.restore(path, layouts, rank=rank), wanted[rank])
    assert not verify(path).damages


def test_saved_and_restored(tmp_path):
    assert save_all(tmp_path / "step", full(), LAYOUTS) == [None] * 6
    found = sizes(tmp_path / "step")
    assert len(found) > 40 and max(found.values()) <= 256
    assert {"pieces/range/0", "pieces/range/0.1", "pieces/parts/0.1"} <= set(found)
    assert_restores(tmp_path / "step", full())


def test_a_damage_is_found_and_named(tmp_path):
    save_all(tmp_path / "step", full(), LAYOUTS)
    file = files_of(tmp_path / "step") / "pieces/range/0.1/c.0"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(checkpoint.CheckpointError, match=r"range: its chunk file .*pieces/range/0\.1/c\.0 is damaged"):
        checkpoint.restore(tmp_path / "step")
    assert [d.leaf for d in verify(tmp_path / "step").damages] == ["range"]


def test_a_padded_leaf(tmp_path):
    layouts = {"w": Layout((37, 41), torch.float32, Mesh(dp=4), flat=("dp",), padded=True)}
    state = {"w": torch.randn(37, 41)}
    local = cut_tree(state, layouts)
    run(4, lambda world: checkpoint.save(tmp_path / "step", local[world.rank], layouts, world))
    assert_same_bits(checkpoint.restore(tmp_path / "step"), state)
    assert sum(sizes(tmp_path / "step").values()) == 37 * 41 * 4


@pytest.mark.medium
def test_the_tool_makes_a_grid_of_them(tmp_path):
    save_all(tmp_path / "step", full(), LAYOUTS)
    on_snapshot(tmp_path / "step", lambda source: reshard(source, tmp_path / "other", plan_of(LAYOUTS)))
    assert not sizes(tmp_path / "other")
    assert_restores(tmp_path / "other", full())
