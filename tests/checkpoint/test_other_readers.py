"""tensorstore and the zarr package open the arrays without us."""

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr

from fmegatron import checkpoint
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import save_all
from tests.checkpoint.test_reshard import any_bits

MESH = Mesh(fsdp=2, tp=2)
SPECS = {
    "even": ((256, 512), ("fsdp", "tp")),
    "uneven": ((1001, 131), ("fsdp", "tp")),
    "fused": ((64, 1536), (None, Split("tp", (1024, 256, 256)))),
    "stacked": ((3, 128, 256), (None, "fsdp", "tp")),
    "zeros": ((300, 300), ()),
}


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
        kvstore = {"driver": "file", "path": str(tmp_path / "a" / "arrays" / "params" / name) + "/"}
        got = ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
        assert got.shape == tuple(x.shape) and got.dtype.name == str(dtype).removeprefix("torch.")
        wanted = x.reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(np.ascontiguousarray(got.read().result()).reshape(-1).view(np.uint8), wanted)
        if dtype not in (torch.bfloat16, torch.float8_e5m2):  # the zarr package has no such types
            array = group[f"params/{name}"]
            assert array.shape == tuple(x.shape)
            assert np.array_equal(np.ascontiguousarray(array[...]).reshape(-1).view(np.uint8), wanted)


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
