"""tensorstore and the zarr package open the arrays without us: which leaves are arrays, and which of them who opens.

FORMAT.md and README promise exactly what these tests hold.
"""

import json
import pathlib

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr

from fmegatron import checkpoint
from fmegatron.checkpoint.files import format
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import save_all
from tests.checkpoint.test_reshard import any_bits

ROOT = pathlib.Path(__file__).parents[2]
MESH = Mesh(fsdp=2, tp=2)
SPECS = {
    "even": ((256, 512), ("fsdp", "tp")),
    "uneven": ((1001, 131), ("fsdp", "tp")),
    "fused": ((64, 1536), (None, Split("tp", (1024, 256, 256)))),
    "stacked": ((3, 128, 256), (None, "fsdp", "tp")),
    "zeros": ((300, 300), ()),
}
# Types of torch that zarr3 has a name for, and that the zarr package does not open all the same.
NOT_ZARR_PYTHON = {torch.bfloat16} | {
    getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
}


def tensorstore_opens(path, name):
    kvstore = {"driver": "file", "path": str(path / name) + "/"}
    return ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()


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
        assert got.shape == tuple(x.shape) and got.dtype.name == str(dtype).removeprefix("torch.")
        wanted = x.reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(as_bytes(got.read().result()), wanted)
        if dtype not in NOT_ZARR_PYTHON:
            array = group[f"params/{name}"]
            assert array.shape == tuple(x.shape) and np.array_equal(as_bytes(array[...]), wanted)


def test_which_types_who_opens(tmp_path):
    """Every type that zarr3 has a name for, next to a float32 array that opens by its name in each case."""
    dtypes = {name: getattr(torch, name) for name in sorted(format._ZARR_TYPES)}
    for name, dtype in dtypes.items():
        layouts = {"w": Layout((256, 256, 1), dtype, Mesh()), "f": Layout((128, 128), torch.float32, Mesh())}
        state = {"w": any_bits((256, 256, 1), dtype), "f": torch.ones(128, 128)}
        checkpoint.save(tmp_path / name, state, layouts)
        wanted = state["w"].reshape(-1).view(torch.uint8).numpy()
        got = tensorstore_opens(tmp_path / name / "arrays", "w")
        assert got.dtype.name == name and np.array_equal(as_bytes(got.read().result()), wanted), name
        group = zarr.open_group(tmp_path / name / "arrays", mode="r")
        assert group["f"][3, 4] == 1.0
        if dtype in NOT_ZARR_PYTHON:
            with pytest.raises(ValueError, match="No Zarr data type found"):
                group["w"]
            with pytest.raises(ValueError, match="No Zarr data type found"):
                list(group.array_keys())
        else:
            assert np.array_equal(as_bytes(group["w"][...]), wanted), name
            assert sorted(group.array_keys()) == ["f", "w"]


def test_which_leaves_are_arrays(tmp_path):
    """64 KiB is the border; shards that end inside a row, or at odd places, make no array; neither does nothing."""
    mesh, f32 = Mesh(dp=4), torch.float32
    layouts = {
        "border": Layout((128, 128), f32, mesh, ("dp",)),
        "small": Layout((16383,), f32, mesh, ("dp",)),
        "scalar": Layout((), f32, mesh),
        "empty": Layout((0, 4096), f32, mesh),
        "whole rows": Layout((256, 256), f32, mesh, flat=("dp",)),
        "inside a row": Layout((257, 1009), f32, mesh, flat=("dp",)),
        "odd cuts": Layout((4 * 65537, 3), f32, mesh, (Split("dp", (3, 4 * 65537 - 3)),)),
    }
    state = {name: any_bits(layout.shape, f32) for name, layout in layouts.items()}
    assert save_all(tmp_path / "a", state, layouts) == [None] * 4
    leaves = json.loads((tmp_path / "a/manifest.json").read_text())["leaves"]
    arrays = {name: leaf["array"] for name, leaf in leaves.items() if "array" in leaf}
    assert set(arrays) == {"border", "whole rows"}
    group = zarr.open_group(tmp_path / "a/arrays", mode="r")
    assert {f"arrays/{name}" for name in group.array_keys()} == set(arrays.values())
    for name, directory in arrays.items():
        wanted = state[name].reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(as_bytes(tensorstore_opens(tmp_path / "a", directory).read().result()), wanted)
    for name, leaf in leaves.items():
        homes = {piece["array"].split("/")[0] for piece in leaf.get("pieces", ())}
        assert name in arrays or homes == {"small": {"packed"}, "scalar": {"packed"}, "empty": set()}.get(
            name, {"pieces"}
        )
    assert list((tmp_path / "a/arrays").glob("small*")) == []


def test_the_documents_say_so():
    """What is tested above, and nothing more, is promised."""
    text = " ".join((ROOT / "fmegatron/checkpoint/FORMAT.md").read_text().split())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert format.SMALL_BYTES == 64 << 10 and "leaves of less than 64 KiB" in text
    assert "**Not every leaf is an array there.**" in text and "no array of bfloat16 or of a float8 type" in text
    assert "Any zarr3 reader opens" not in text and "The arrays are plain zarr3;" not in readme
    assert "Leaves of 64 KiB and more are plain zarr3 arrays" in readme and "zarr-python all but bf16 and fp8" in readme


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
