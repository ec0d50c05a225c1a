"""tensorstore and the zarr package open the arrays without us: which leaves are arrays, and which of them who opens.

FORMAT.md and docs/checkpoints.md promise exactly what these tests hold.
"""

import json
import pathlib
import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from zarr.core.dtype import data_type_registry
from zarr.dtype import UInt16

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.files import format
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.writing import plan
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.tree.structure import map_with_path
from tests.checkpoint import states
from tests.checkpoint.fake_world import save_all
from tests.checkpoint.test_reshard import any_bits
from tests.checkpoint.tokens import files_of

ROOT = pathlib.Path(__file__).parents[2]
MESH = Mesh(fsdp=2, tp=2)
SPECS = {
    "even": ((256, 512), ("fsdp", "tp")),
    "uneven": ((1001, 131), ("fsdp", "tp")),
    "fused": ((64, 1536), (None, Split("tp", (1024, 256, 256)))),
    "stacked": ((3, 128, 256), (None, "fsdp", "tp")),
    "zeros": ((300, 300), ()),
}
FLOAT8 = [getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")]
DTYPES = [getattr(torch, name) for name in sorted(format._ZARR_TYPES)] + FLOAT8


@dataclass(frozen=True, kw_only=True)
class BFloat16(UInt16):
    """bfloat16 as its bits: what FORMAT.md gives to readers with the zarr package."""

    _zarr_v3_name = "bfloat16"


@pytest.fixture
def with_bfloat16():
    data_type_registry.register("bfloat16", BFloat16)
    yield
    data_type_registry.unregister("bfloat16")


def tensorstore_opens(path, name):
    kvstore = {"driver": "file", "path": str(path / name) + "/"}
    return ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()


def stored_as(dtype):
    """The name of a dtype in zarr.json."""
    return "uint8" if dtype in FLOAT8 else str(dtype).removeprefix("torch.")


def as_bytes(x):
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int16, torch.float8_e5m2]
)
def test_arrays_open_in_global_shape(tmp_path, dtype):
    layouts = {"params": {k: Layout(shape, dtype, MESH, spec) for k, (shape, spec) in SPECS.items()}}
    state = {"params": {k: any_bits(shape, dtype) for k, (shape, _) in SPECS.items()}}
    state["params"]["zeros"].zero_()
    assert save_all(tmp_path / "a", state, layouts) == [None] * 4
    group = zarr.open_group(tmp_path / "a" / "arrays", mode="r")
    for name, x in state["params"].items():
        got = tensorstore_opens(tmp_path / "a/arrays/params", name)
        assert got.shape == tuple(x.shape) and got.dtype.name == stored_as(dtype)
        wanted = x.reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(as_bytes(got.read().result()), wanted)
        if dtype is not torch.bfloat16:
            array = group[f"params/{name}"]
            assert array.shape == tuple(x.shape) and np.array_equal(as_bytes(array[...]), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_which_types_who_opens(tmp_path, dtype):
    """Every type that a state is likely to have, next to a float32 array that opens by its name in each case."""
    layouts = {"w": Layout((256, 256, 1), dtype, Mesh()), "f": Layout((128, 128), torch.float32, Mesh())}
    state = {"w": any_bits((256, 256, 1), dtype), "f": torch.ones(128, 128)}
    checkpoint.save(tmp_path / "a", state, layouts)
    wanted = state["w"].reshape(-1).view(torch.uint8).numpy()
    got = tensorstore_opens(tmp_path / "a/arrays", "w")
    assert got.dtype.name == stored_as(dtype) and np.array_equal(as_bytes(got.read().result()), wanted)
    group = zarr.open_group(tmp_path / "a/arrays", mode="r")
    assert group["f"][3, 4] == 1.0
    if dtype is torch.bfloat16:
        with pytest.raises(ValueError, match="No Zarr data type found"):
            group["w"]
    else:
        assert np.array_equal(as_bytes(group["w"][...]), wanted)
        assert sorted(group.array_keys()) == ["f", "w"]
        name = str(dtype).removeprefix("torch.")
        assert dict(group["w"].attrs) == ({"dtype": name} if dtype in FLOAT8 else {})
        if dtype in FLOAT8:  # a reader with ml_dtypes has the numbers
            numbers = group["w"][...].view(getattr(ml_dtypes, name))
            assert np.array_equal(as_bytes(numbers), wanted)


# ---- whole states, without a line of ours

WHOLE = {
    "dense": states.dense,
    "experts": states.experts,
    "every type": lambda mesh: {
        **{f"{i}": Layout((48, 24), dtype, mesh, ("fsdp", "tp")) for i, dtype in enumerate(DTYPES)},
        **{f"0d/{i}": Layout((), dtype, mesh) for i, dtype in enumerate(DTYPES)},
        **{f"1d/{i}": Layout((11,), dtype, mesh, ("fsdp",)) for i, dtype in enumerate(DTYPES)},
    },
    "shapes": lambda mesh: {
        "layers": [Layout((3, 160, 96), torch.float32, mesh, ("pp", "fsdp", "tp")) for _ in range(2)],
        "odd key %/é.": {"..": Layout((1001, 131), torch.bfloat16, mesh, ("fsdp", "tp"))},
        "rows": Layout((64, 257, 5), torch.float16, mesh, flat=("dp",)),
        "empty": Layout((0, 7), torch.float32, mesh, ("fsdp",)),
        "big": Layout((1500, 4096), torch.float32, mesh, (("pp", "dp", "fsdp"), "tp")),
    },
}
ON = {
    "one": Mesh(pp=1, dp=1, fsdp=1, tp=1),
    "even": Mesh(pp=1, dp=1, fsdp=2, tp=2),
    "uneven": Mesh(pp=2, dp=1, fsdp=3, tp=1),
    "replicas": Mesh(pp=1, dp=3, fsdp=1, tp=2),
}


def saved_whole(folder, kind, mesh):
    """(what is in the arrays, by leaf; the leaves that no grid can hold) of a state saved on a mesh."""
    layouts = WHOLE[kind](ON[mesh])
    state = map_with_path(lambda path, x: any_bits(x.shape, x.dtype, len(path)), layouts)
    assert save_all(folder, state, layouts) == [None] * ON[mesh].size
    plans = plan.plan(tree.paths(layouts), tree.leaves(layouts))
    left = {p.path for p in plans if p.home != "grid"}
    return dict(zip(tree.paths(layouts), tree.leaves(state), strict=True)), left


@pytest.mark.long
@pytest.mark.parametrize("mesh", ON)
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_states_with_tensorstore_alone(tmp_path, kind, mesh):
    """All of a state from zarr.json files: no manifest is read. Flat ranges that end inside rows are left out."""
    (state, left), layouts = saved_whole(tmp_path / "a", kind, mesh), WHOLE[kind](ON[mesh])
    found = {
        re.sub("/zarr.json$", "", str(at.relative_to(tmp_path / "a/arrays"))): at
        for at in (tmp_path / "a/arrays").rglob("zarr.json")
    }
    found = {name: at for name, at in found.items() if json.loads(at.read_text())["node_type"] == "array"}
    assert set(found) == {format.array_name(path).removeprefix("arrays/") for path in state if path not in left}
    assert all(dict(zip(tree.paths(layouts), tree.leaves(layouts), strict=True))[path].flat for path in left)
    assert not left or mesh in ("uneven", "replicas")
    for path, x in state.items():
        if path not in left:
            got = tensorstore_opens(tmp_path / "a", format.array_name(path))
            assert got.shape == tuple(x.shape) and got.dtype.name == stored_as(x.dtype)
            assert np.array_equal(as_bytes(got.read().result()), x.reshape(-1).view(torch.uint8).numpy()), path


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["one", "uneven"])
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_states_with_zarr_python(tmp_path, with_bfloat16, kind, mesh):
    """The same, walked as a group."""
    state, left = saved_whole(tmp_path / "a", kind, mesh)
    group, names = zarr.open_group(tmp_path / "a/arrays", mode="r"), set()

    def walk(group, above):
        names.update(above + name for name in group.array_keys())
        for name in group.group_keys():
            walk(group[name], f"{above}{name}/")

    walk(group, "")
    assert names == {format.array_name(path).removeprefix("arrays/") for path in state if path not in left}
    for path, x in state.items():
        if path not in left:
            array = group[format.array_name(path).removeprefix("arrays/")]
            assert array.shape == tuple(x.shape)
            assert np.array_equal(as_bytes(array[...]), x.reshape(-1).view(torch.uint8).numpy()), path


def test_whole_states_from_an_object_store():
    """The same arrays lie below the token of the save."""
    layouts = WHOLE["every type"](ON["one"])
    state = map_with_path(lambda path, x: any_bits(x.shape, x.dtype, len(path)), layouts)
    store = open_store("memory://run/a", {})
    checkpoint.save(store, state, layouts)
    storage = store.locate()
    for path, x in zip(tree.paths(layouts), tree.leaves(state), strict=True):
        values = storage.values.below(f"{format.array_name(path)}/")
        got = ts.open({"driver": "zarr3", "kvstore": values.spec}, context=values.context, read=True).result()
        assert np.array_equal(as_bytes(got.read().result()), x.reshape(-1).view(torch.uint8).numpy()), path


def test_which_leaves_are_arrays(tmp_path, monkeypatch):
    """All but shards that end inside a row, or at odd places; and small ones if there are too many of them."""
    mesh, f32 = Mesh(dp=4), torch.float32
    layouts = {
        "border": Layout((128, 128), f32, mesh, ("dp",)),
        "small": Layout((16383,), f32, mesh, ("dp",)),
        "scalar": Layout((), f32, mesh),
        "empty": Layout((0, 4096), f32, mesh),
        "whole rows": Layout((256, 256), f32, mesh, flat=("dp",)),
        "inside a row": Layout((257, 1009), f32, mesh, flat=("dp",)),
        "small inside a row": Layout((5, 7), f32, mesh, flat=("dp",)),
        "odd cuts": Layout((4 * 65537, 3), f32, mesh, (Split("dp", (3, 4 * 65537 - 3)),)),
    }
    state = {name: any_bits(layout.shape, f32) for name, layout in layouts.items()}
    small, odd = {"small", "scalar"}, {"inside a row", "small inside a row", "odd cuts"}
    for most, packed in ((3, set()), (2, small)):
        monkeypatch.setattr(plan, "MOST_SMALL", most)
        at = tmp_path / f"{most}"
        assert save_all(at, state, layouts) == [None] * 4
        leaves = json.loads((files_of(at) / "manifest.json").read_text())["leaves"]
        arrays = {name: leaf["array"] for name, leaf in leaves.items() if "array" in leaf}
        assert set(arrays) == set(layouts) - odd - packed
        group = zarr.open_group(at / "arrays", mode="r")
        assert {f"arrays/{name}" for name in group.array_keys()} == set(arrays.values())
        for name, leaf in leaves.items():
            homes = {piece["array"].split("/")[0] for piece in leaf.get("pieces", ())}
            assert name in arrays or homes == {"packed" if "small" in name or name == "scalar" else "pieces"}


def test_the_documents_say_so():
    """What is tested above, and nothing more, is promised."""
    text = " ".join((ROOT / "fmegatron/checkpoint/FORMAT.md").read_text().split())
    manual = " ".join((ROOT / "docs/checkpoints.md").read_text().split())
    assert format.SMALL_BYTES == 64 << 10 and format.MOST_SMALL == 256
    assert "leaves of less than 64 KiB when there are more than 256 of them" in text
    assert "Every leaf is a zarr3 array" in manual and "zarr-python" in manual
    assert '_zarr_v3_name = "bfloat16"' in text and 'data_type_registry.register("bfloat16", BFloat16)' in text


def test_the_tree_can_be_listed(tmp_path):
    layouts = {
        "a": {"b": {"w": Layout((256, 128), torch.float32, Mesh())}},
        "c": Layout((256, 128), torch.float32, Mesh()),
    }
    state = {"a": {"b": {"w": torch.ones(256, 128)}}, "c": torch.ones(256, 128)}
    checkpoint.save(tmp_path / "a", state, layouts)
    group = zarr.open_group(tmp_path / "a" / "arrays", mode="r")
    assert sorted(group.group_keys()) == ["a"] and sorted(group.array_keys()) == ["c"]
    assert sorted(group["a/b"].array_keys()) == ["w"]
