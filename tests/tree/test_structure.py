"""Trees: stable paths, maps, checks with errors that name path, got, wanted and fix."""

from typing import NamedTuple

import pytest
import torch

from fmegatron import tree
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.tree import arithmetic, spec
from fmegatron.tree.arithmetic import cast, dot, squared_norm
from fmegatron.tree.structure import flatten, map_with_path, unflatten

F32 = torch.float32
MESH = Mesh(dp=2, tp=2)


class State(NamedTuple):
    step: object
    params: object


def example():
    return State(0, {"blocks": {"wo": 1, "attention": (2, [3])}, "table": 4})


def test_paths_are_names_and_positions():
    wanted = ["step", "params/blocks/attention/0", "params/blocks/attention/1/0", "params/blocks/wo", "params/table"]
    assert tree.paths(example()) == wanted
    assert tree.paths(5) == [""] and tree.paths({}) == [] and tree.paths({3: 1}) == ["3"]
    paths, leaves, spec = flatten(example())
    assert (paths, leaves, unflatten(spec, leaves)) == (wanted, [0, 2, 3, 1, 4], example())
    assert tree.leaves(example()) == leaves


def test_map():
    assert tree.map(lambda a, b: a + b, example(), example()).params["blocks"]["attention"] == (4, [6])
    assert map_with_path(lambda path, a: f"{path}={a}", {"a": [1]}) == {"a": ["a/0=1"]}
    layouts = {"w": Layout((4,), F32, MESH), "v": [Layout((2,), F32, MESH, ("tp",))]}
    assert tree.map(lambda layout: layout.shape, layouts) == {"w": (4,), "v": [(2,)]}
    assert tree.map(lambda a, layout: layout.shape, {"w": 0, "v": [0]}, layouts) == {"w": (4,), "v": [(2,)]}
    with pytest.raises(ValueError, match=r"weight: got nothing, wanted a leaf \(did you mean weigth\?\)"):
        tree.map(lambda a, b: a, {"weight": 1}, {"weigth": 1})
    with pytest.raises(
        ValueError,
        match="tree 2: got another structure than tree 1, wanted the same:\n  w: got a tuple of 1, wanted a list of 1",
    ):
        tree.map(lambda a, b: a, {"w": [1]}, {"w": (1,)})


def specs():
    return {
        "blocks": {
            "wo": tree.ArraySpec(Layout((8, 6), F32, MESH, (None, "tp")), tree.Normal(0.1)),
            "wqkv": tree.ArraySpec(Layout((6, 8), torch.bfloat16, MESH, ("dp", Split("tp", (4, 2, 2)))), 1.0),
        },
        "scale": tree.ArraySpec(Layout((), torch.float64, MESH), 3.5),
    }


def test_check():
    layouts = tree.layouts(specs())
    params = tree.init(specs(), 0, 3)
    tree.check(params, layouts, 3)
    tree.check(params, specs(), 3)
    params["blocks"]["wo"] = torch.zeros(8, 6)
    params["scale"] = torch.zeros(())
    with pytest.raises(ValueError) as error:
        tree.check(params, layouts, 3)
    assert str(error.value).splitlines() == [
        "the tree: got 2 of 3 leaves that disagree with its layouts, wanted none:",
        "  blocks/wo: got local shape (8, 6), wanted (8, 3) on rank 3 of f32[8, 6@tp] on dp2·tp2; this is the global"
        " shape: keep only this rank's part",
        "  scale: got dtype f32, wanted f64 of f64[] on dp2·tp2; cast with x.to(torch.float64) or change the layout",
    ]
    params["blocks"]["wO"] = params["blocks"].pop("wo")
    with pytest.raises(ValueError, match=r"blocks/wo: got nothing, wanted a leaf \(did you mean blocks/wO\?\)"):
        tree.check(params, layouts, 3)
    with pytest.raises(ValueError, match=r"scale: got float, wanted a local torch.Tensor"):
        tree.check({**tree.init(specs(), 0, 0), "scale": 3.5}, layouts, 0)
    with pytest.raises(ValueError, match=r"the tree itself: got a list of 1, wanted a tuple of 1"):
        tree.check([torch.zeros(())], (Layout((), F32, MESH),), 0)


def test_zeros_like_works_on_tensors_and_on_specs():
    zeros = tree.zeros_like(specs(), dtype=F32)
    assert zeros["blocks"]["wqkv"].dtype is F32 and zeros["blocks"]["wqkv"].init == spec.Constant(0.0)
    assert tree.layouts(tree.zeros_like(specs())) == tree.layouts(specs())
    tensors = tree.map(lambda spec: tree.zeros_like(tree.init(spec, 0, 1), dtype=F32), specs())
    tree.check(tensors, zeros, 1)
    assert tree.zeros_like(specs()["scale"].layout, F32) == Layout((), F32, MESH)


def test_arithmetic():
    a = {"x": torch.tensor([1.0, 2.0]), "y": [torch.tensor(3.0, dtype=torch.bfloat16)]}
    assert squared_norm(a) == 14 and squared_norm(a).dtype is F32
    assert dot(a, tree.add(a, a)) == 28 and squared_norm({}) == 0
    assert tree.leaves(tree.subtract(a, a))[0].eq(0).all()
    half = tree.scale(a, 0.5)
    assert half["y"][0].dtype is torch.bfloat16 and half["y"][0] == 1.5
    assert cast(a, torch.float64)["y"][0].dtype is torch.float64
    assert arithmetic.count(a) == 3 and arithmetic.count(specs()) == 97
    assert squared_norm(cast(a, torch.float64)).dtype is torch.float64


def test_dump_is_one_line_a_leaf():
    assert tree.dump(specs()).splitlines() == [
        "blocks/wo: f32[8, 6@tp] on dp2·tp2, local (8, 3), 2 replicas, Normal(std=0.1)",
        "blocks/wqkv: bf16[6@dp, (4+2+2)@tp] on dp2·tp2, local (3, 4), 1 replica, Constant(value=1.0)",
        "scale: f64[] on dp2·tp2, local (), 4 replicas, Constant(value=3.5)",
        "97 elements in 3 leaves, 296 bytes; on rank 0: 128 bytes",
    ]


def test_keys():
    keys = {tree.fold_in(0), tree.fold_in(0, 0), tree.fold_in(0, "0"), tree.fold_in(1, 0), tree.fold_in(0, 0, 0)}
    assert len(keys) == 5 and all(0 <= key < 2**63 for key in keys)
    assert tree.fold_in(0, "params", 3) == 6224702425202063385, "keys must never change: runs would not resume alike"
    assert tree.fold_in(2**64 + 5, 1) == tree.fold_in(5, 1)
    with pytest.raises(ValueError, match="got 1.5 of type float, wanted an int or a str"):
        tree.fold_in(0, 1.5)
