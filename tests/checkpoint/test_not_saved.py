"""A leaf that checkpoints do not hold is made anew of its spec: by every way to save and to restore."""

import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run


def specs(mesh, saved=False):
    return {
        "w": tree.ArraySpec(Layout((8, 4), torch.float32, mesh, ("fsdp",)), tree.Normal(1.0)),
        "cache": tree.ArraySpec(Layout((6, 4), torch.bfloat16, mesh, (None, "fsdp")), 3.0, saved=saved),
        "seen": tree.ArraySpec(Layout((), torch.int64, mesh), saved=saved),
    }


def plain(specs):
    return tree.map(lambda spec: spec.layout, specs)


WHOLE = {"w": torch.randn(8, 4), "cache": torch.full((6, 4), 7.0).bfloat16(), "seen": torch.tensor(5)}
ANEW = {"w": WHOLE["w"], "cache": torch.full((6, 4), 3.0).bfloat16(), "seen": torch.tensor(0)}
ONE = specs(Mesh(fsdp=1))


@pytest.fixture(params=["save", "async", "before"])
def saved(tmp_path, request):
    """By two ranks; "before": of when it was held, which is then not read."""
    layouts = specs(Mesh(fsdp=2), saved=request.param == "before")
    if request.param == "async":
        checkpoint.save_async(tmp_path / "a", WHOLE, ONE).result()
    else:
        parts = cut_tree(WHOLE, plain(layouts))
        saves = run(2, lambda world: checkpoint.save(tmp_path / "a", parts[world.rank], layouts, world))
        assert saves == [None] * 2
    assert (checkpoint.describe(tmp_path / "a").leaves == 1) == (request.param != "before")
    return tmp_path / "a"


@pytest.mark.parametrize("read", ["own", "once"])
def test_restored(saved, read):
    target = specs(Mesh(fsdp=2))
    got = run(2, lambda world: checkpoint.restore(saved, target, world=world, read=read))
    for one, wanted in zip(got, cut_tree(ANEW, plain(target)), strict=True):
        assert_same_bits(one, wanted)
    assert_same_bits(checkpoint.restore(saved, ONE), ANEW)
    assert tree.layouts(checkpoint.restore(saved, ONE)) == plain(ONE)


def test_local_replicas(tmp_path):
    local = checkpoint.LocalReplicas(tmp_path, "run", copies=1)
    local.save(7, WHOLE, ONE)
    assert_same_bits(local.restore_latest(ONE)[1], ANEW)


def test_a_random_one_is_refused():
    with pytest.raises(ValueError, match="saved=False and Normal.*wanted a number"):
        tree.ArraySpec(ONE["w"].layout, tree.Normal(1.0), saved=False)


def test_a_subtree_of_which_nothing_was_saved_is_made_anew(tmp_path):
    """And still an error where something else is asked for, or something that is stored is not."""
    checkpoint.save(
        tmp_path / "a",
        {"net": WHOLE["w"], "buffers": {"seen": WHOLE["seen"]}},
        {"net": ONE["w"], "buffers": {"seen": ONE["seen"]}},
    )
    assert checkpoint.restore(tmp_path / "a", {"seen": ONE["seen"]}, prefix="buffers")["seen"] == 0
    with pytest.raises(ValueError, match="prefix: got 'buffers', wanted the path of stored leaves"):
        checkpoint.restore(tmp_path / "a", {"seen": ONE["seen"].layout}, prefix="buffers")
    with pytest.raises(ValueError, match="net"):
        checkpoint.restore(tmp_path / "a", {"seen": ONE["seen"]})


def test_what_a_rule_brings_to_it_is_refused(tmp_path):
    """And not left out in silence: a leaf of another name was held, and somebody wants it."""
    checkpoint.save(tmp_path / "a", {"w": WHOLE["w"], "old": WHOLE["cache"]})
    to = checkpoint.rename("old", "cache")
    with pytest.raises(ValueError, match=r"cache: got old by a rule, wanted nothing, .* checkpoint.drop\('cache'\)"):
        checkpoint.restore(tmp_path / "a", ONE, rules=[to])
    assert_same_bits(checkpoint.restore(tmp_path / "a", ONE, rules=[to, checkpoint.drop("cache")]), ANEW)
