"""`export`: other programs read what was saved, bit for bit; shards, names, casts; nothing is left of a failure."""

import io
import json
import os
import re

import pytest
import torch
from safetensors import safe_open

from fmegatron import checkpoint, interop, tree
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.interop import export_safetensors
from fmegatron.interop.safetensors_files import DTYPES as OF_FILES
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import save_all, small_sizes
from tests.checkpoint.test_reshard import DTYPES, any_bits, layouts_on, state_for

LACKING = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex128)  # in safetensors


def call(*argv):
    out, err = io.StringIO(), io.StringIO()
    status = main([str(a) for a in argv], out, err)
    return status, out.getvalue(), err.getvalue()


def bits(x):
    return x.reshape(-1).view(torch.uint8)


@pytest.fixture
def saved(tmp_path):
    """(path, state by path): every kind of leaf, from eight ranks."""
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    state = state_for(layouts_on(mesh))
    with small_sizes():
        assert save_all(tmp_path / "a", state, layouts_on(mesh), step=5, metadata={"note": "x"}) == [None] * 8
        yield tmp_path / "a", dict(zip(tree.paths(state), tree.leaves(state), strict=True))


def every_dtype(tmp_path, without=()):
    state = {str(d).removeprefix("torch."): any_bits((9, 4), d) for d in DTYPES if d not in without}
    state |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(1.5)}
    layouts = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, Mesh()), state)
    checkpoint.save(tmp_path / "d", state, layouts)
    return open_source(tmp_path / "d"), state


@pytest.mark.medium
def test_safetensors_in_shards(saved, tmp_path):
    """As Hugging Face lays them out: shards and an index; read back by the safetensors package."""
    path, state = saved
    export_safetensors(open_source(path), tmp_path / "out", shard=4000, most=100)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(state)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in state.values())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*shards, "model.safetensors.index.json"])
    seen = set()
    for shard in shards:
        with safe_open(tmp_path / "out" / shard, "pt") as f:
            assert json.loads(f.metadata()["fmegatron.metadata"]) == {"note": "x"}
            assert f.metadata()["fmegatron.step"] == "5" and f.metadata()["format"] == "pt"
            for name in f.keys():  # noqa: SIM118  it is no dict
                x = f.get_tensor(name)
                assert x.dtype == state[name].dtype and x.shape == state[name].shape
                assert torch.equal(bits(x), bits(state[name])) and index["weight_map"][name] == shard
                seen.add(name)
    assert seen == set(state)


def test_safetensors_dtypes(tmp_path):
    """Each reads as it was in the safetensors package, and in our reader."""
    source, state = every_dtype(tmp_path, LACKING)
    (tmp_path / "folder").mkdir()
    export_safetensors(source, tmp_path / "folder/model.safetensors")
    found = checkpoint.restore(interop.source(tmp_path / "folder"))
    assert {x.dtype for x in found.values()} == set(OF_FILES.values())
    for name, x in state.items():
        assert found[name].dtype == x.dtype and torch.equal(bits(found[name]), bits(x)), name
    with safe_open(tmp_path / "folder/model.safetensors", "pt") as f:
        for name, x in state.items():
            assert f.get_tensor(name).dtype == x.dtype and torch.equal(bits(f.get_tensor(name)), bits(x)), name


def test_rename_cast_and_pattern(saved, tmp_path):
    path, state = saved
    argv = ["export", path, tmp_path / "x.safetensors", "^(blocks|step)", "--cast", "f32"]
    argv += ["--rename", r"^blocks/(\w+)=layers.\1.weight", "--rename", "wqkv=qkv"]
    assert call(*argv)[0] == 0
    with safe_open(tmp_path / "x.safetensors", "pt") as f:
        names = {"layers.norm.weight", "layers.qkv.weight", "layers.w_gate_up.weight", "layers.wo.weight", "step"}
        assert set(f.keys()) == names
        assert f.get_tensor("step").dtype == torch.int64
        x, want = f.get_tensor("layers.qkv.weight"), state["blocks/wqkv"].float()
        assert x.dtype == torch.float32 and torch.equal(x.nan_to_num(0), want.nan_to_num(0))


def test_wrong_requests_leave_nothing(saved, tmp_path):
    path, _ = saved
    (tmp_path / "there").write_text("mine")
    for argv, text in (
        ([tmp_path / "there"], "exists already"),
        ([tmp_path / "x", "--rename", "blocks/.*=same"], "the name of blocks/"),
        ([tmp_path / "x", "--rename", "(=x"], "regular expression"),
        ([tmp_path / "x", "--rename", r"x=\1"], "regular expression"),
        ([tmp_path / "x", "--rename", "x"], "REGEX=REPLACEMENT"),
        ([tmp_path / "x", "--cast", "f31"], "dtype name"),
        ([tmp_path / "x", "--cast", "float8_e4m3fnuz"], "wanted a dtype that safetensors has"),
        ([tmp_path / "x", "nothing"], "wanted one that matches a leaf"),
    ):
        status, out, err = call("export", path, *argv)
        assert (status, out) == (2, "") and text in err and len(err.splitlines()) == 1, (argv, err)
    assert sorted(os.listdir(tmp_path)) == ["a", "there"] and (tmp_path / "there").read_text() == "mine"


def test_damage_leaves_nothing(tmp_path):
    source, _ = every_dtype(tmp_path, LACKING)
    at = next((tmp_path / "d").glob("arrays/float32/c.0.0"))
    data = bytearray(at.read_bytes())
    data[-1] ^= 1
    at.write_bytes(data)
    status, _, err = call("export", tmp_path / "d", tmp_path / "x.safetensors")
    assert status == 1 and "damaged" in err and os.listdir(tmp_path) == ["d"]
    assert re.search("restore another step", err) and source.manifest.step is None


def test_bounded_memory(tmp_path, monkeypatch):
    """No more than the bound is read at a time, for a leaf of 30 times the bound."""
    x = torch.randn(3000, 100)
    checkpoint.save(tmp_path / "a", {"x": x}, {"x": Layout((3000, 100), torch.float32, Mesh())})
    source, held = open_source(tmp_path / "a"), []
    fill = type(source).fill

    def counted(source, wanted, verify=True):
        held.append(sum(target.view.nbytes for targets in wanted.values() for target in targets))
        return fill(source, wanted, verify)

    monkeypatch.setattr(type(source), "fill", counted)
    export_safetensors(source, tmp_path / "x.safetensors", most=40_000)
    assert max(held) <= 40_000 and sum(held) == x.nbytes
    with safe_open(tmp_path / "x.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("x"), x)


@pytest.mark.parametrize("name", ["int8", "bool", "complex64", "uint64"])
def test_a_cast_of_floating_leaves_to_something_else_is_refused(tmp_path, name):
    checkpoint.save(tmp_path / "a", {"w": torch.ones(3)}, {"w": Layout((3,), torch.float32, Mesh())})
    status, out, err = call("export", tmp_path / "a", tmp_path / "out/x.safetensors", "--cast", name)
    assert (status, out) == (2, "") and f"cast: got {name}, wanted a floating dtype" in err
    assert os.listdir(tmp_path) == ["a"]


def test_a_cast_that_torch_does_not_have_is_refused(tmp_path):
    checkpoint.save(tmp_path / "a", {"w": torch.ones(3)}, {"w": Layout((3,), torch.float32, Mesh())})
    with pytest.raises(
        ValueError,
        match="w: got cast=float4_e2m1fn_x2, wanted a dtype that torch casts float32 to; choose other leaves",
    ):
        export_safetensors(open_source(tmp_path / "a"), tmp_path / "out/x.safetensors", cast=torch.float4_e2m1fn_x2)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["x.npz", "x.pt"])
def test_the_name_of_another_format_is_refused(tmp_path, name):
    checkpoint.save(tmp_path / "a", {"w": torch.ones(3)}, {"w": Layout((3,), torch.float32, Mesh())})
    status, out, err = call("export", tmp_path / "a", tmp_path / name)
    assert (status, out) == (2, "") and "got another format by its name, wanted a name with .safetensors" in err
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("inside", ["x.safetensors", "arrays/x.safetensors", "new", "link/x.safetensors"])
def test_a_path_inside_a_checkpoint_is_refused(tmp_path, inside):
    """Files there would make the checkpoint look damaged, and go when it is saved again or deleted."""
    layouts = {"w": Layout((3,), torch.float32, Mesh())}
    checkpoint.save(tmp_path / "a", {"w": torch.ones(3)}, layouts)
    os.symlink(tmp_path / "a", tmp_path / "link")
    path = tmp_path / inside if inside.startswith("link") else tmp_path / "a" / inside
    status, out, err = call("export", tmp_path / "a", path)
    assert (status, out) == (2, "") and f"inside the checkpoint {tmp_path}/a" in err
    assert "; choose" in err and "beside it" in err
    with pytest.raises(ValueError, match="inside of the checkpoint"):
        checkpoint.save(path, {"w": torch.zeros(3)}, layouts)
    status, out, err = call("reshard", tmp_path / "a", path, "--mesh", "tp=2")
    assert status == 2 and "inside of the checkpoint" in err
    assert call("verify", tmp_path / "a")[0] == 0 and sorted(os.listdir(tmp_path)) == ["a", "link"]
