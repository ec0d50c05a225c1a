"""Weights arrive whole in the loss of `step.build`: what is no stack by gathers of the step, a stack as a value."""

import pytest
import torch

from fmegatron import nn, optim, step, testing, tree
from fmegatron.collectives import Precision
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step.layer import unstack
from fmegatron.step.opaque import inline_layers
from tests.pairs import each_value
from tests.step.own_towers import WHOLE, described, start
from tests.step.proven import proven_and_equal


@pytest.mark.medium
@pytest.mark.parametrize(("mesh", "way"), each_value([Mesh(fsdp=2), Mesh(dp=2, fsdp=2)], WHOLE))
def test_on_a_mesh(mesh, way):
    how = {"way": way, "strategy": "hsdp", "dim": 16, "width": 32}
    state, batch = start(**how)
    made = described(mesh, **how)
    proven_and_equal(lambda m: described(m, **how), mesh, state, batch, layouts=(made.state, made.batch), steps=2)
    assert made.evaluate is not None and step.check(made.evaluate, made.state, made.batch).ok


def small(mesh, precision=None, loss=None, **how):
    """A table, two stacks of other depths and a head that tp splits, as nested dicts."""
    shapes = {"table": (8, 16), "deep": {"w": (3, 16, 16), "b": (3, 16)}, "flat": {"w": (2, 16, 16)}, "head": (16, 4)}
    rules = [("head", (None, "tp"))]
    strategy = DataParallel.zero3()
    specs = tree.specs(shapes, mesh, rules, tree.Normal(0.3), torch.float64, strategy=strategy, stacked="deep|flat")

    def loss_fn(w, batch):
        x = w["table"][batch["ids"]]
        for of_layer in w["deep"]:
            x = x + torch.tanh(x @ of_layer["w"] + of_layer["b"])
        x = w["flat"].run(lambda x, w, scale: x + scale * (x @ w["w"]), x, torch.full((), 0.5, dtype=x.dtype))
        return step.mean((x @ w["head"]).square().sum(), x.numel())

    return step.build(loss or loss_fn, optim.adamw(1e-2), specs, {"ids": (16,)}, precision=precision, **how)


IDS = {"ids": torch.arange(16) % 8}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2), Mesh(dp=2, fsdp=2)], ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_stacks_in_a_tree(mesh, microbatches):
    made = small(mesh, microbatches=microbatches)
    whole = tree.init(small(Mesh()).state, key=0, rank=0)
    proven_and_equal(
        lambda m: small(m, microbatches=microbatches), mesh, whole, IDS, layouts=(made.state, made.batch), steps=2
    )


@pytest.mark.medium
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gathered_once(microbatches):
    """reshard_after_forward=False keeps what was gathered: fewer gathers, the same numbers."""
    mesh, gathers = Mesh(fsdp=2), {}
    how = {"microbatches": microbatches}
    whole = tree.init(small(Mesh()).state, key=0, rank=0)
    for keep in (True, False):
        made = small(mesh, reshard_after_forward=keep, **how)
        found = testing.assert_parity(
            lambda m, keep=keep: small(m, reshard_after_forward=keep, **how), mesh, whole, IDS,
            layouts=(made.state, made.batch), steps=2,
        )  # fmt: skip
        assert step.check(*made).ok
        graph = inline_layers(found.sharded.traced.graph_module.graph)
        gathers[keep] = sum(n.meta.get("symbolic", str(n.target)).count("all_gather") for n in graph.nodes)
    assert gathers[False] < gathers[True], gathers
    with pytest.raises(ValueError, match="reshard_after_forward: got False with shards=True.*gather_tree"):
        small(mesh, shards=True, reshard_after_forward=False)


@pytest.mark.parametrize("index", [0, -1, "w", slice(1)])
def test_an_index_of_a_stack(index):
    """It has no whole arrays to cut: the error names the user's line, and the two ways."""

    def loss_fn(w, batch):
        return step.mean(w["deep"][index]["w"].sum(), 1)

    with pytest.raises(ValueError, match=r"test_whole.py:\d+: got \[.*\] of a stack of 3 layers.*for w in stack.*run"):
        step.check(*small(Mesh(fsdp=2), None, loss_fn))


@pytest.mark.parametrize("ask", [lambda w: w["deep"].unbind(), lambda w: w["deep"].items()])
def test_a_stack_is_no_array_and_no_dict(ask):
    def loss_fn(w, batch):
        return step.mean(ask(w)[0].sum(), 1)

    with pytest.raises(AttributeError, match=r"test_whole.py:\d+: got \.(unbind|items) of a stack of 3 .*for w in"):
        step.check(*small(Mesh(fsdp=2), None, loss_fn))


def test_the_layers_of_a_stack_by_their_function():
    """`unstack` of a stack, and of a tree in which one stands, is what the stack gives in turn."""

    def loss_fn(w, batch):
        of = lambda layers: [tree.map(lambda x: (tuple(x.shape), x.dtype), layer) for layer in layers]  # noqa: E731
        own, nested = unstack(w["deep"]), [layer["it"] for layer in unstack({"it": w["deep"]})]
        assert of(own) == of(nested) == of(w["deep"]) and len(own) == 3
        return step.mean(torch.stack([x["w"].sum() * y["b"].sum() for x, y in zip(own, nested, strict=True)]).sum(), 1)

    assert step.check(*small(Mesh(fsdp=2), None, loss_fn)).ok


def test_what_arrives():
    seen = {}

    def loss_fn(w, batch):
        if not seen:  # what is unproven is traced again, on one rank
            seen.update(w, layers=[tree.map(lambda x: (tuple(x.shape), x.dtype), of_layer) for of_layer in w["deep"]])
        return step.mean(torch.stack([x["w"].sum() for x in w["deep"]]).sum().double(), 8)

    made = small(Mesh(fsdp=2, tp=2), Precision.bf16(), loss_fn)
    step.check(*made)
    assert tuple(seen["table"].shape) == (8, 16) and seen["table"].dtype == torch.bfloat16
    assert tuple(seen["head"].shape) == (16, 2)
    assert (len(seen["deep"]), len(seen["flat"])) == (3, 2)
    assert seen["layers"] == [{"b": ((16,), torch.float64), "w": ((16, 16), torch.bfloat16)}] * 3
    assert "Stack(" in repr(seen["deep"])


@pytest.mark.medium
def test_a_loss_that_gathers_itself_is_refused_unless_it_says_so():
    def loss_fn(w, batch):
        x = nn.gather_tree({"table": w["table"]})["table"][batch["ids"]]
        return step.mean(x.sum(), x.numel())

    with pytest.raises(ValueError, match="layout is not known"):
        step.check(*small(Mesh(fsdp=2), loss=loss_fn))
    assert step.check(*small(Mesh(fsdp=2), loss=loss_fn, shards=True)) is not None
