"""Specs from shapes, and the local parts of global tensors."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron import testing, tree
from fmegatron.layout import DataParallel, Layout, Mesh, Rules, Split
from tests.layout.strategies import layouts as any_layouts

F32 = torch.float32
SHAPES = {"embed": (8, 4), "blocks": {"norm": (2, 4), "wqkv": (2, 4, 12)}, "final": [(4,), ()]}
MESH = Mesh(dp=2, fsdp=2, tp=2)


def test_rules_and_inits_by_path():
    rules = [("embed", (("tp", "fsdp"),)), ("blocks/wqkv", (None, "fsdp", Split("tp", 3)))]
    specs = tree.specs(SHAPES, MESH, rules, init=[("norm|final", 1.0), (".*", tree.Normal(0.5))])
    assert specs == {
        "embed": tree.ArraySpec(Layout((8, 4), F32, MESH, (("tp", "fsdp"),)), tree.Normal(0.5)),
        "blocks": {
            "norm": tree.ArraySpec(Layout((2, 4), F32, MESH), 1.0),
            "wqkv": tree.ArraySpec(Layout((2, 4, 12), F32, MESH, (None, "fsdp", Split("tp", 3))), tree.Normal(0.5)),
        },
        "final": [
            tree.ArraySpec(Layout((4,), F32, MESH), 1.0),
            tree.ArraySpec(Layout((), F32, MESH), 1.0),
        ],
    }


def test_one_text_for_all_meshes():
    """Axes that a mesh lacks split nothing, so an experiment's rules name all that it may run on."""
    rules = [("embed", (("tp", "fsdp"),)), (".*", ())]
    assert tree.specs(SHAPES, Mesh(), rules)["embed"].layout == Layout((8, 4), F32, Mesh())
    assert tree.specs(SHAPES, Mesh(fsdp=2), rules)["embed"].layout == Layout((8, 4), F32, Mesh(fsdp=2), ("fsdp",))


@pytest.mark.parametrize("strategy", ["replicated", "zero1", "zero3", "hsdp"])
def test_a_strategy_shards_what_no_rule_names(strategy):
    how = DataParallel.named(strategy)
    specs = tree.specs(SHAPES, MESH, [("blocks/wqkv", (None, None, "tp"))], strategy=how, stacked="blocks")
    for path, spec in zip(tree.paths(specs), tree.leaves(specs), strict=True):
        assert set(spec.layout.sharded) - {"tp"} <= set(how.params), path
        assert not (path.startswith("blocks") and spec.layout.axes(0)), path
    assert set(specs["embed"].layout.sharded) == set(how.params)


def test_a_table_of_rules_must_cover_its_paths():
    with pytest.raises(ValueError, match="got no rule for the path 'blocks/norm'"):
        tree.specs(SHAPES, MESH, Rules([("embed", ())]))


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"w": (3, -1)}, {}, r"specs: w: got \(3, -1\), wanted a shape"),
        ({"w": 3}, {}, r"specs: w: got 3, wanted a shape, a tuple of whole numbers"),
        ({"w": [3, 4]}, {}, r"specs: w/0: got 3, wanted a shape"),
        ({"w": torch.zeros(3)}, {}, r"specs: w: got a tensor of shape \(3,\), wanted a shape"),
        ({"w": (3, 4)}, {"rules": [("w", ("tp", None, None))]}, r"w: by the rule 'w': .*got 3 spec entries"),
        ({"w": (3, 4)}, {"rules": [("w", ("model",))]}, r"w: by the rule 'w': .*got axis 'model', wanted one of"),
        ({"w": (3, 4)}, {"init": [("v", 1.0)]}, r"got no rule for the path 'w'"),
        ({"w": (3, 4)}, {"init": [("w", "ones")]}, r"specs: w: init: got 'ones', wanted a number, Normal"),
        ({"w": (3, 4)}, {"init": [("w", True)]}, r"specs: w: init: got True, wanted a number"),
        ({"w": (3, 4)}, {"init": None}, r"init: got None, wanted a number, .*; or, of several leaves, rows"),
        ({"w": (3, 4)}, {"init": torch.ones(())}, r"init: got tensor\(1.\), wanted a number"),
        ({"w": (3, 4)}, {"init": [1.0]}, r"specs: init: got 1.0 as a row, wanted \(pattern, initial values\)"),
        ({"w": (3, 4)}, {"init": {"w": 1.0}}, r"specs: init: got 'w' as a row, wanted \(pattern, initial values\)"),
        ({"w": (3, 4)}, {"init": 1.5, "dtype": torch.int64}, r"specs: w: init: got 1.5 for i64\[3, 4\]"),
        ({"w": (3, 4)}, {"init": -1, "dtype": torch.uint8}, r"specs: w: init: got -1 for u8\[3, 4\]"),
        ({"w": (3, 4)}, {"init": 10**400}, r"specs: w: init: got 10+ for f32\[3, 4\]"),
    ],
)
def test_errors(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        tree.specs(shapes, MESH, **options)


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.int64(2), Fraction(2), MESH["dp"], 1 / MESH["dp"] * 4])
def test_numbers_of_any_kind(number):
    """Of numpy and of ranks, too: they are initial values, alone and in rows, and a spec keeps a plain one."""
    for init in (number, [("w", number)]):
        spec = tree.specs({"w": (np.int64(3),)}, Mesh(), init=init)["w"]
        assert type(spec.init.value) in (int, float)
        assert tree.init({"w": spec}, 0, 0)["w"].tolist() == [2.0] * 3
    assert tree.ArraySpec(spec.layout.replace(dtype=torch.float16), float("inf")).init.value == float("inf")


@pytest.mark.parametrize("make", [lambda: tree.Normal(-1), lambda: tree.Normal("a"), lambda: tree.Uniform(1, 0)])
def test_distributions_that_are_none(make):
    with pytest.raises(ValueError, match=r"(Normal: std|Uniform): got .*, wanted .*finite number"):
        make()


@pytest.mark.parametrize("use", [tree.layouts, lambda shapes: tree.init(shapes, 0, 0)])
def test_shapes_in_the_place_of_specs(use):
    with pytest.raises(
        ValueError, match=r"embed/0: got 8, wanted an ArraySpec.*; tree.specs\(shapes, mesh, ...\) makes"
    ):
        use({"embed": SHAPES["embed"]})


@settings(max_examples=100, deadline=None)
@given(any_layouts(), st.integers(0, 2**31))
def test_local_parts_make_up_the_whole(layout, seed):
    layout = layout.replace(unreduced=())
    x = torch.randn(layout.shape, generator=torch.Generator().manual_seed(seed)).to(layout.dtype)
    parts = [tree.local({"x": x}, {"x": layout}, rank) for rank in range(layout.mesh.size)]
    for rank, part in enumerate(parts):
        tree.check(part, {"x": layout}, rank)
    assert torch.equal(testing.join(parts, {"x": layout})["x"], x)


def test_one_layout_for_a_batch_of_like_leaves():
    rows = Layout((4, 2), torch.int64, Mesh(dp=2), ("dp",))
    batch = {"tokens": torch.arange(8).view(4, 2), "labels": torch.ones(4, 2)}
    assert tree.local(batch, rows, 1)["labels"].shape == (2, 2)
    assert tree.local(batch, rows, 1)["tokens"].tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("values", "layouts", "message"),
    [
        ({"x": torch.zeros(3)}, {"x": Layout((4,), F32, MESH)}, r"local: x: got shape \(3,\), wanted \(4,\)"),
        ({"x": 3}, {"x": Layout((4,), F32, MESH)}, r"local: x: got 3 and f32\[4\] on"),
        ({"x": torch.zeros(4)}, {"x": Layout((4,), F32, MESH, unreduced="dp")}, "without pending sums"),
        ({"x": torch.zeros(4)}, {"y": Layout((4,), F32, MESH)}, "tree 2: got another structure than tree 1"),
    ],
)
def test_errors_of_local(values, layouts, message):
    with pytest.raises(ValueError, match=message):
        tree.local(values, layouts, 0)
