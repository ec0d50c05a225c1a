"""The zarr.json of arrays: nothing of ours depends on them, but a reader that goes by them must not be led astray."""

import json

import pytest

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files import format
from fmegatron.checkpoint.files.manifest import read_manifest
from fmegatron.checkpoint.files.stores import locate
from fmegatron.layout import Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, save_all, small_sizes
from tests.checkpoint.test_faults import MESH, layouts_on, read_all, state
from tests.checkpoint.tokens import files_of


@pytest.fixture
def saved(tmp_path):
    with small_sizes():
        assert save_all(tmp_path / "a", state(), layouts_on()) == [None] * 4
        yield files_of(tmp_path / "a")


@pytest.mark.long
@pytest.mark.parametrize("array, leaf", [("arrays/w", "w"), ("pieces/flat/2", "flat"), ("packed/0", "step")])
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("float32", "uint32").replace("uint8", "int8"),
        lambda text: text.replace('"shape":[', '"shape":[1'),
        lambda text: text[:-1],
        lambda text: text.replace('"separator":"."', '"separator":"/"'),
        lambda text: "",
        lambda text: None,
    ],
    ids=["dtype", "shape", "cut", "separator", "empty", "missing"],
)
def test_damaged_descriptions_are_named(saved, array, leaf, damage):
    """Others read the arrays by zarr.json, so that it is checked although nothing of ours depends on it."""
    path = saved / array / "zarr.json"
    text = damage(path.read_text())
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"^{leaf}: \S*{array}/zarr.json"):
        read_all(saved.parent)
    path.write_text(json.dumps(format.zarr_metadata(read_manifest(locate(saved.parent)).arrays[array]), indent=1))
    assert_same_bits(read_all(saved.parent), state())  # written in another way, it says the same


@pytest.mark.parametrize("mesh", [Mesh(fsdp=1, tp=1), Mesh(fsdp=2, tp=1), Mesh(fsdp=1, tp=2), MESH], ids=str)
def test_unverified_reads_give_the_same(saved, mesh):
    """They go straight to where they stay if that is one run of memory, and through a buffer otherwise."""
    layouts = layouts_on(mesh)
    for rank, wanted in enumerate(cut_tree(state(), layouts)):
        assert_same_bits(checkpoint.restore(saved.parent, layouts, rank=rank, verify=False), wanted)
