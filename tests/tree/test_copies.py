"""Whose numbers a leaf begins with: names that no container changes, copies that equal originals, given values."""

import dataclasses

import pytest
import torch

from fmegatron import tree
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.testing import join

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def specs(mesh=Mesh(), dtype=BF16):  # noqa: B008  a frozen value
    def layout(shape, *spec, flat=()):
        known = [s for s in spec if s is None or (s.axes if isinstance(s, Split) else s) in mesh.names]
        return Layout(shape, dtype, mesh, tuple(known), flat=tuple(a for a in flat if a in mesh))

    return {
        "embed": {"table": tree.ArraySpec(layout((6, 8), "tp"), tree.Normal(0.3))},
        "blocks": [tree.ArraySpec(layout((4, 8), None), tree.Uniform(-1, 1)) for _ in range(2)],
        "third": tree.ArraySpec(layout((8,), None), 1 / 3),
    }


def same(a, b):
    assert tree.paths(a) == tree.paths(b)
    for path, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), path


def test_a_named_tree_is_the_same_wherever_it_stands():
    alone = tree.init(specs(), 3, 0)
    same(tree.init(tree.named(specs()), 3, 0), alone)
    named = tree.named(specs())
    same(tree.init({"a": {"params": named}, "z": (named["blocks"],)}, 3, 0)["a"]["params"], alone)
    same(tree.init({"z": (named["blocks"],)}, 3, 0)["z"][0], alone["blocks"])
    assert not torch.equal(tree.init({"params": specs()}, 3, 0)["params"]["embed"]["table"], alone["embed"]["table"])
    assert tree.named(tree.named(specs())) == tree.named({"x": named})["x"]  # a name that is there stays


def test_models_in_one_tree_that_are_not_named_differ():
    towers = tree.init({"text": specs(), "image": specs()}, 3, 0)
    assert not torch.equal(towers["text"]["embed"]["table"], towers["image"]["embed"]["table"])


@pytest.mark.parametrize("dtype", [BF16, F16, F32, torch.float64], ids=str)
@pytest.mark.parametrize("kept", [None, F32, F16, torch.float64], ids=str)
def test_copies_begin_as_their_originals(dtype, kept):
    named = tree.named(specs(dtype=dtype))
    state = tree.init({"params": named, "average": tree.copies(named, kept)}, 5, 0)
    same(state["params"], tree.init(specs(dtype=dtype), 5, 0))
    same(state["average"], tree.copies(state["params"], kept))
    again = tree.init({"p": named, "of": tree.copies(tree.copies(named, F16), F32)}, 5, 0)
    same(again["of"], tree.copies(tree.copies(again["p"], F16), F32))  # rounded as often as the copies were


def test_copies_of_tensors_have_their_own_memory_and_no_history():
    x = torch.ones(3, requires_grad=True)
    copy = tree.copies({"x": x * 2})["x"]
    assert not copy.requires_grad and copy.grad_fn is None
    y = {"x": torch.ones(3)}
    tree.copies(y)["x"].add_(1)
    assert y["x"].sum() == 3
    assert tree.copies({"x": Layout((2,), BF16, Mesh())}, F32)["x"].dtype == F32


def test_a_copy_may_lie_otherwise():
    """As a master copy under ZeRO-1 does: each rank draws its own part."""
    mesh = Mesh(dp=2, tp=2)
    named = tree.named(specs(mesh))
    split = tree.map(lambda s: s.replace(flat=("dp",)) if s.shape == (6, 8) else s, tree.copies(named, F32))
    state = {"params": named, "master": split}
    ranks = [tree.init(state, 7, rank) for rank in range(mesh.size)]
    assert ranks[0]["master"]["embed"]["table"].numel() == 12
    whole = join(ranks, tree.layouts(state))
    same(whole["master"], tree.copies(tree.init(specs(), 7, 0), F32))


def test_two_names_with_other_values_are_refused():
    named = tree.named(specs())
    wider = tree.copies(named) | {"embed": {"table": tree.copies(named)["embed"]["table"].replace(tree.Normal(0.6))}}
    with pytest.raises(ValueError, match=r"ema/embed/table: got shape \(6, 8\) and Normal\(std=0.6\) under the name"):
        tree.init({"params": named, "ema": wider}, 0, 0)
    longer = dataclasses.replace(named["blocks"][0], layout=Layout((5, 8), BF16, Mesh()))
    with pytest.raises(ValueError, match="wanted shape .* as 'a/blocks/0' has"):
        tree.init({"a": named, "b": longer}, 0, 0)


def test_what_becomes_another_array_loses_its_name():
    """As the parts of an optimizer's state do that are made from the spec of a parameter."""
    w = tree.named(specs())["blocks"][0]
    for other in (w.replace(0.0), w.replace(shape=(3, 8)), w.replace(1.0, shape=(8,), spec=())):
        assert other.drawn_as is None and not other.is_copy
        tree.init({"w": w, "other": other}, 0, 0)
    for still in (w.replace(dtype=F32), w.replace(tree.Normal(2.0)), w.replace(flat=())):
        assert still.drawn_as == "blocks/0"


def test_copies_of_what_was_not_named_are_refused():
    raw = specs()
    for state in ({"params": raw, "ema": tree.copies(raw)}, {"ema": tree.copies(raw), "deep": {"er": raw}}):
        with pytest.raises(
            ValueError, match=r"ema/blocks/0: got a copy of 'blocks/0', which is not in this tree, wanted .*; name"
        ):
            tree.init(state, 0, 0)
    same(tree.init({"ema": tree.copies(raw)}, 0, 0)["ema"], tree.init(raw, 0, 0))  # copies alone: nothing disagrees
    same(tree.init(raw | {"ema": tree.copies(raw)}, 0, 0)["ema"], tree.init(raw, 0, 0))  # named by the same path


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2)], ids=str)
def test_given_values_are_taken_and_copied(mesh):
    named = tree.named(specs(mesh))
    master = tree.map(lambda s: s.replace(flat=("dp",)) if "dp" in mesh and s.shape else s, tree.copies(named, F32))
    state = {"step": tree.ArraySpec(Layout((), torch.int64, mesh)), "params": named, "master": master}
    for rank in range(mesh.size):
        weights = tree.map(lambda x: x + 1, tree.init(specs(mesh), 1, rank))
        made = tree.init(state, 0, rank, given=weights)
        same(made["params"], weights)
        assert made["step"] == 0
        tree.check(made, tree.layouts(state), rank)
        joined = tree.init(state, 0, rank, given={"blocks": weights["blocks"]})  # some are known, the others drawn
        same(joined["params"]["blocks"], weights["blocks"])
        same(joined["params"]["embed"], tree.init(specs(mesh), 0, rank)["embed"])
        for name, dtype in (("blocks", F32), ("third", F32)):
            assert {x.dtype for x in tree.leaves(made["master"][name])} == {dtype}
    every = [
        tree.init(state, 0, r, given=tree.map(lambda x: x * 3, tree.init(specs(mesh), 1, r))) for r in range(mesh.size)
    ]
    whole = join(every, tree.layouts(state))
    same(whole["master"], tree.copies(whole["params"], F32))


def test_given_values_that_fit_nowhere_are_refused():
    mesh = Mesh(dp=2)
    state = {"params": tree.named(specs(mesh))}
    weights = tree.init(specs(mesh), 0, 0)
    with pytest.raises(ValueError, match="given: third_: got a tensor that no leaf takes .did you mean third"):
        tree.init(state, 0, 0, given={"third_": weights["third"]})
    with pytest.raises(ValueError, match=r"third: got local shape \(4,\), wanted \(8,\)"):
        tree.init(state, 0, 0, given={"third": weights["third"][:4]})
    with pytest.raises(ValueError, match="third: got dtype f32"):
        tree.init(state, 0, 0, given={"third": weights["third"].float()})
    named = tree.named({"w": tree.ArraySpec(Layout((4, 2), F32, mesh, ("dp",)), 1.0)})
    wider = {"params": named, "copy": tree.map(lambda s: s.replace(spec=()), tree.copies(named))}
    with pytest.raises(ValueError, match="copy/w: got given values in .*, which leave out 4 elements of rank 0"):
        tree.init(wider, 0, 0, given={"w": torch.ones(2, 2)})
