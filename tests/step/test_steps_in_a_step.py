"""Several updates in one step: what one returns is known to lie as its state did, so the next can be called with it."""

import pytest
import torch

from fmegatron import nn, optim, step, tree
from fmegatron.layout import DataParallel, Mesh
from fmegatron.testing import assert_parity
from tests.pairs import each_value

OPTIMIZERS = {
    "adamw": optim.adamw(1e-2, weight_decay=0.1),
    "average": optim.averaged(optim.adamw(1e-2), 0.8),
    "frozen": optim.grouped(1e-2, [("b", optim.Group(frozen=True))], adam=optim.scale_by_adam()),
}
MESHES = (Mesh(fsdp=2), Mesh(dp=2, fsdp=2), Mesh(fsdp=3))


def loss(params, batch):
    p = nn.gather_tree(params)  # by the layouts that they know
    y = torch.tanh(batch["x"] @ p["w"] + p["b"])
    return step.mean(y.square().sum(), y.numel())


def made(mesh, name, optimizer, microbatches=1):
    """(update, specs of its state, layouts of its batch)."""
    specs = tree.specs({"w": (6, 7), "b": (7,)}, mesh, init=tree.Normal(1.0), dtype=torch.float64,
                       strategy=DataParallel.named(name))  # fmt: skip
    rows = {"x": ((24, 6), torch.float64)}
    return step.build(loss, OPTIMIZERS[optimizer], specs, rows, microbatches=microbatches, shards=True)


def in_one(update, times):
    def updates(state, batch):
        metrics = {}
        for i in range(times):
            state, metrics[f"update {i}"] = update(state, batch)
        return state, metrics

    return updates


@pytest.mark.medium
@pytest.mark.parametrize(
    "name, mesh, optimizer", each_value(("zero3", "zero1", "hybrid", "zero2", "hsdp"), MESHES, OPTIMIZERS)
)
def test_two_updates_in_one_step(name, mesh, optimizer):
    update, state, batch = made(mesh, name, optimizer)
    report = step.check(in_one(update, 2), state, batch)
    assert report.ok, str(report)
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = tree.init(made(Mesh(), name, optimizer).state, key=0, rank=0)
    assert_parity(
        lambda m: in_one(made(m, name, optimizer).function, 2), mesh, whole, {"x": x}, layouts=(state, batch), steps=2
    )


def test_two_in_one_are_two_in_two():
    update, state, _ = made(Mesh(), "zero3", "adamw", microbatches=2)
    x = {"x": torch.randn(24, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
    one = step.jit(in_one(update, 2), donate=0, backend="eager")(tree.init(state, 0, 0), x)[0]
    single = step.jit(update, donate=0, backend="eager")
    two = single(single(tree.init(state, 0, 0), x)[0], x)[0]
    assert all(map(torch.equal, tree.leaves(one), tree.leaves(two))) and one.step == 2


@pytest.mark.medium
def test_something_wrong_in_between_is_found():
    """What the first returned is known by a statement, which does not make a replaced value right."""
    update, state, batch = made(Mesh(dp=2, fsdp=2), "hsdp", "adamw")

    def spoiled(state, batch):
        state, _ = update(state, batch)
        own = batch["x"].sum()  # of the rows of a rank
        params = tree.place(tree.map(lambda x: x + own, state.params), tree.layouts(state.params))
        return update(state._replace(params=params), batch)

    assert step.check(spoiled, state, batch).findings


@pytest.mark.medium
def test_a_jit_in_a_jit():
    update, state, batch = made(Mesh(), "zero3", "adamw")
    x = {"x": torch.ones(24, 6, dtype=torch.float64)}
    inner = step.jit(update, backend="eager")
    given = tree.init(state, 0, 0)
    got, _ = step.jit(in_one(inner, 2), backend="eager")(given, x)
    assert tree.layouts(got).params == tree.layouts(state).params
    plain, _ = step.jit(in_one(update, 2), backend="eager")(given, x)
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(plain)))
