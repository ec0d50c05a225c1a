"""Checkpoints that were written before format version 3 are read as they were: version1.zip holds some."""

import json

import pytest

from fmegatron import checkpoint
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.tools.verification import verify
from tests.checkpoint.fake_world import assert_same_bits, cut_tree
from tests.checkpoint.version1 import MESHES, layouts_on, state, unpacked


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return unpacked(tmp_path_factory.mktemp("version1"))


def test_what_is_there(old):
    """Of each kind of storage that version 1 had."""
    assert set(old) == {*MESHES, "tiny"}
    for at in old.values():
        manifest = json.loads((at / "manifest.json").read_text())
        assert manifest["version"] == json.loads((at / "COMPLETE").read_text())["version"] == 1
        assert checkpoint.describe(at).version == 1
    leaves = json.loads((old["tiny"] / "manifest.json").read_text())["leaves"]
    homes = {
        name: {p["array"].split("/")[0] for p in leaf.get("pieces", [{"array": "arrays/"}])}
        for name, leaf in leaves.items()
    }
    assert homes["flat"] == {"pieces"} and homes["step"] == {"packed"} and homes["w"] == homes["fp8"] == {"arrays"}
    assert homes["empty"] == set()
    for name in MESHES:
        assert json.loads((old[name] / "arrays/fp8/zarr.json").read_text())["data_type"] == "float8_e4m3fn"
        assert (old[name] / "packed/0/c.0").exists()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [*MESHES, "tiny"])
@pytest.mark.parametrize("verified", [True, False])
def test_restores_on_every_mesh(old, name, mesh, verified):
    layouts = layouts_on(MESHES[mesh])
    for rank, wanted in enumerate(cut_tree(state(), layouts)):
        assert_same_bits(checkpoint.restore(old[name], layouts, rank=rank, verify=verified), wanted, name)
    assert checkpoint.metadata(old[name]) == {"v": 1}


def test_is_verified(old, tmp_path):
    for at in old.values():
        assert verify(at).damages == ()


def test_in_an_object_store(old):
    """A directory of version 1 that was copied there."""
    store = open_store("memory://run/a", {})
    for file in old["four"].rglob("*"):
        if file.is_file():
            store.values.write(str(file.relative_to(old["four"])), [file.read_bytes()])
    assert_same_bits(checkpoint.restore(store, layouts_on(MESHES["one"])), state())


def test_damage_is_found(old, tmp_path):
    """Also in a zarr.json that says what version 3 would."""
    at = unpacked(tmp_path)["four"]
    text = (at / "arrays/fp8/zarr.json").read_text()
    (at / "arrays/fp8/zarr.json").write_text(
        text.replace("float8_e4m3fn", "uint8").replace("{}", '{"dtype":"float8_e4m3fn"}')
    )
    with pytest.raises(checkpoint.CheckpointError, match="fp8: .*does not describe the array"):
        checkpoint.restore(at, layouts_on(MESHES["one"]))
    (at / "arrays/fp8/zarr.json").write_text(text)
    for version in (0, 2, 5, "3", None, True):
        marker = json.loads((at / "COMPLETE").read_text()) | {"version": version}
        (at / "COMPLETE").write_text(json.dumps(marker))
        with pytest.raises(checkpoint.CheckpointError, match="wanted 'fmegatron.checkpoint' version 4, 3 or 1"):
            checkpoint.restore(at, layouts_on(MESHES["one"]))
