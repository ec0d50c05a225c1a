"""Padded parameters without a gradient: right steps are proven and equal to one rank, wrong ones are still found.

A gradient of zeros is one number everywhere: it fits a shard with padding, a shard without, and no shard.
"""

import pytest
import torch

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Mesh
from fmegatron.testing import assert_parity
from tests.pairs import each_value, few, mixed

SHAPES = {"a": (6, 7), "b": (7,), "z": (6, 7), "odd": (13,), "one": (1,), "cube": (2, 3, 5), "never": (11, 3)}
NAMES = ("zero3", "zero1", "hybrid", "zero2", "hsdp")
USES = {
    "nothing": lambda p: torch.zeros((), dtype=torch.float64),
    "times 0": lambda p: 0 * p["z"].sum() + (p["cube"] * 0).sum() + (p["odd"] * torch.zeros_like(p["odd"])).sum(),
    "rows of it": lambda p: p["z"][2:5].square().sum() + p["odd"][:3].sum() + p["cube"][1].sum(),
    "detached": lambda p: (p["z"].detach() * p["odd"].sum()).sum(),
    "minus itself": lambda p: (p["z"] - p["z"]).sum() + p["odd"].sum(),
    "clamped": lambda p: p["z"].clamp(1e8, 1e9).sum() + torch.where(p["odd"] > 1e9, p["odd"], 0).sum(),
    "twice": lambda p: (p["z"] @ p["a"].mT).square().sum() + p["z"][torch.tensor([0, 0, 3])].sum(),
    "side by side": lambda p: torch.cat([p["z"], p["a"]])[5:7].square().sum() + torch.stack([p["z"], p["a"]])[1].sum(),
}
OPTIMIZERS = {
    "adamw": optim.adamw(1e-2, weight_decay=0.1),
    "sgd": optim.sgd(1e-2, momentum=0.9),
    "lion": optim.lion(1e-3, weight_decay=0.1),
    "average": optim.averaged(optim.adamw(1e-2), 0.8),
    "frozen": optim.grouped(1e-2, [("a|never", optim.Group(frozen=True))], adam=optim.scale_by_adam()),
    "guarded": optim.skip_nonfinite(optim.adamw(1e-2)),
}


def specs_on(mesh, name):
    return tree.specs(SHAPES, mesh, init=tree.Normal(1.0), dtype=torch.float64, strategy=DataParallel.named(name))


def loss_by(use):
    def loss(params, batch):
        p = nn.gather_tree(params)
        y = torch.tanh(batch["x"] @ p["a"] + p["b"]).square().sum(1)
        return step.mean((y * (1 + USES[use](p))).sum(), y.numel())

    return loss


def made(mesh, name, use="nothing", optimizer="adamw", microbatches=1, clip_norm=1.0):
    """(step, specs of its state, layouts of its batch)."""
    specs, by = specs_on(mesh, name), OPTIMIZERS[optimizer]
    train_step = step.build_train_step(loss_by(use), by, specs, microbatches=microbatches, clip_norm=clip_norm)
    batch = {"x": DataParallel.named(name).batch_layout((48, 6), torch.float64, mesh, microbatches)}
    return train_step, step.state_specs(specs, by), batch


MESHES = (Mesh(dp=2, fsdp=2), Mesh(fsdp=4), Mesh(fsdp=3), Mesh(dp=2, fsdp=3), Mesh(fsdp=2), Mesh(fsdp=6))
CASES = mixed(NAMES, MESHES, list(USES), list(OPTIMIZERS), (1, 2, 4), (None, 0.1))[:240]


@pytest.mark.long
@pytest.mark.parametrize("name, mesh, use, optimizer, microbatches, clip_norm", few(3, CASES, map(str, CASES)))
def test_right(name, mesh, use, optimizer, microbatches, clip_norm):
    options = (name, use, optimizer, microbatches, clip_norm)
    train_step, state, batch = made(mesh, *options)
    report = step.check(train_step, state, batch)
    assert report.ok, str(report)
    x = torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = tree.init(made(Mesh(), *options)[1], key=0, rank=0)
    assert_parity(lambda m: made(m, *options)[0], mesh, whole, {"x": x}, layouts=(state, batch), steps=2)


@pytest.mark.long
@pytest.mark.parametrize("name, mesh", each_value(NAMES, (*MESHES[:2], Mesh(fsdp=4, tp=2), Mesh(dp=2, fsdp=2, tp=2))))
def test_one_unused_leaf_beside_one(name, mesh):
    """As it was found: two leaves of one shape, on meshes that divide neither dim nor range; and one that tp splits."""
    shapes = {"a": (6, 7), "z": (6, 7), "split": (6, 10)}
    rules = [("split", (None, "tp"))]
    specs = tree.specs(shapes, mesh, rules, dtype=torch.float64, strategy=DataParallel.named(name))

    def loss(params, batch):
        y = batch["x"] @ nn.gather_tree(params)["a"]
        return step.mean(y.square().sum(), y.numel())

    report = step.check(*step.build(loss, OPTIMIZERS["adamw"], specs, {"x": ((16, 6), torch.float64)}, shards=True))
    assert report.ok, str(report)


# ---- wrong ones ------------------------------------------------------------------------------------------------------
def wrong(spoil):
    """zero3 on dp2·fsdp2, with something done to the new state: (report, whether z is padded)."""
    right, state, batch = made(Mesh(dp=2, fsdp=2), "zero3")

    def train_step(before, rows):
        after, metrics = right(before, rows)
        return after._replace(params=spoil(after.params, before.params)), metrics

    return step.check(train_step, state, batch)


SPOILED = {
    "something added": lambda new, old: {**new, "z": new["z"] + 1e-3},
    "ones": lambda new, old: {**new, "z": torch.ones_like(new["z"])},
    "ones of a shape": lambda new, old: {**new, "z": torch.ones(new["z"].shape, dtype=torch.float64)},
    "a step along ones": lambda new, old: {**new, "z": new["z"] - 1e-2 * torch.ones_like(old["z"])},
    "exp of the zeros": lambda new, old: {**new, "z": old["z"] - 1e-3 * (0 * old["z"]).exp()},
}


@pytest.mark.long
@pytest.mark.parametrize("name", SPOILED)
def test_a_number_that_is_not_0_is_found(name):
    with pytest.raises(ValueError, match="the padding of the output 0/params/z is .*, zeros must stay zeros"):
        wrong(SPOILED[name]).require()


def test_zeros_in_the_place_of_a_shard_are_right():
    assert wrong(lambda new, old: {**new, "z": torch.zeros_like(old["z"])}).ok
    assert wrong(lambda new, old: {**new, "z": old["z"] * 0, "odd": new["odd"] + 0 * old["odd"].exp()}).ok


def by_hand(update):
    """A step of one's own over the layouts of zero3 on dp2·fsdp2; update(params, gradients, layouts) -> params."""
    mesh = Mesh(dp=2, fsdp=2)
    layouts = tree.layouts(specs_on(mesh, "zero3"))
    rows = {"x": DataParallel.named("zero3").batch_layout((48, 6), torch.float64, mesh, 1)}
    of_loss = step.value_and_grad(loss_by("nothing"), axes=Axes(mesh))

    def train_step(params, batch):
        (loss, _), grads = of_loss(tree.place(params, layouts), batch)
        return update(params, grads, layouts), {"loss": loss}

    return step.check(train_step, layouts, rows)


def moved_along(params, grads):
    return tree.map(lambda p, g: p - 1e-2 * g, params, grads)


def test_a_step_by_hand():
    report = by_hand(lambda params, grads, layouts: moved_along(params, grads))
    assert report.ok, str(report)


def test_a_gradient_of_ones_is_found():
    def with_ones(params, grads, layouts):
        return moved_along(params, {**grads, "z": torch.ones_like(grads["z"])})

    with pytest.raises(ValueError, match="the padding of the output 0/z is -0.01, zeros must stay zeros"):
        by_hand(with_ones).require()


def test_a_reduction_that_was_forgotten_is_found():
    """dp holds replicas under hsdp: where gradients are not zeros a sum over dp is missing, and nowhere else."""
    mesh = Mesh(dp=2, fsdp=4)
    layouts = tree.layouts(specs_on(mesh, "hsdp"))
    assert layouts["z"].padded
    rows = {"x": DataParallel.named("hsdp").batch_layout((48, 6), torch.float64, mesh, 1)}
    of_loss = step.value_and_grad(loss_by("nothing"), axes=Axes(mesh))

    def checked(*reduced):
        """reduced: of these leaves the gradients are."""

        def train_step(params, batch):
            (loss, _), grads = of_loss(tree.place(params, layouts), batch)
            whole = step.reduce_gradients(grads, layouts)
            return moved_along(params, {k: whole[k] if k in reduced else g for k, g in grads.items()}), {"loss": loss}

        return step.check(train_step, layouts, rows)

    assert checked(*SHAPES).ok
    assert checked("a", "b").ok  # of the others they are zeros
    found = checked("a").findings
    assert len(found) == 1 and found[0].axis == "dp" and "a pending sum and a complete value" in found[0].what
