"""Inside of a step nothing needs layouts or axes: they are those of the arrays."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import by_hand
from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes, psum, reshard
from fmegatron.layout import DataParallel, Layout, Mesh
from tests.pairs import few
from tests.step.proven import proven_and_equal

F64 = torch.float64


def own_step(mesh, optimizer, strategy):
    """(step, specs of its state): a tower by hand."""
    axes = Axes(mesh)
    ranks = axes[axes.data]
    specs = tree.specs({"a": (8, 12), "b": (12, 4)}, mesh, init=tree.Normal(0.3), dtype=F64, strategy=strategy)

    def loss_fn(params, batch):
        w = nn.gather_tree(params)
        return (torch.tanh(batch["x"] @ w["a"]) @ w["b"]).square().mean() / ranks.size

    def train_step(state, batch):
        (loss, _), grads = step.value_and_grad(loss_fn)(state.params, batch)
        grads = step.reduce_gradients(grads)
        norm = optim.global_norm(grads)
        grads = optim.clip(grads, norm, 0.05)
        params, opt = optimizer.update(grads, state.opt, state.params)
        return step.State(state.step + 1, params, opt), {"loss": psum(loss, ranks), "grad_norm": norm}

    return train_step, step.state_specs(specs, optimizer)


def decoder_step(mesh, optimizer, strategy, microbatches, **changes):
    """(step, specs of its state): the standard step of `model.loss`, told of the specs alone."""
    sizes = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 24, "max_seq": 8}
    of = model.llama(32, **sizes, **changes, param_dtype=F64, compute_dtype=F64)
    specs = model.specs(of, mesh, strategy=strategy)

    def loss_fn(params, batch):
        return model.loss(params, batch, of, save="mincut")

    return step.build_train_step(loss_fn, optimizer, specs, microbatches=microbatches), step.state_specs(
        specs, optimizer
    )


def assert_proven(describe, mesh, batch, rows):
    made = describe(mesh)
    one = Mesh(**dict.fromkeys(mesh.names, 1))
    state = tree.init(describe(one).state, 0, 0)
    layouts = tree.layouts(made.state), rows
    proven_and_equal(describe, mesh, state, batch, layouts=layouts, out_layouts=(layouts[0], None), steps=3)


MESHES = [
    (Mesh(dp=2), "replicated"), (Mesh(dp=2, fsdp=2), "hsdp"), (Mesh(fsdp=4), "zero3"), (Mesh(dp=2, fsdp=2), "zero3")
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "name"), MESHES, ids=str)
def test_a_step_by_hand(mesh, name):
    strategy, optimizer = DataParallel.named(name), optim.adamw(1e-2)
    rows = {"x": strategy.batch_layout((8, 8), F64, mesh)}
    draw = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(8, 8, dtype=F64, generator=draw)}

    def describe(mesh):
        made, specs = own_step(mesh, optimizer, strategy)
        return step.Description(made, specs, {"x": strategy.batch_layout((8, 8), F64, mesh)})

    assert_proven(describe, mesh, batch, rows)


def further_sharded(mesh, optimizer, strategy):
    """(step, specs of its state): the same where the optimizer's state is sharded beyond the parameters."""
    axes = Axes(mesh)
    ranks = axes[axes.data]
    specs = tree.specs({"a": (8, 12), "b": (12, 4)}, mesh, init=tree.Normal(0.3), dtype=F64, strategy=strategy)
    at_rest = tree.layouts(specs)
    at_update = tree.map(strategy.optim_layout, at_rest)

    def moved(params, src, dst):
        return tree.map(lambda x, a, b: reshard(x, a, b, axes), params, src, dst)

    def loss_fn(params, batch):
        w = nn.gather_tree(params)
        return (torch.tanh(batch["x"] @ w["a"]) @ w["b"]).square().mean() / ranks.size

    def train_step(state, batch):
        (loss, _), grads = step.value_and_grad(loss_fn)(state.params, batch)
        grads = step.reduce_gradients(grads, to=at_update)
        norm = optim.global_norm(grads)
        grads = optim.clip(grads, norm, 0.05)
        params, opt = optimizer.update(grads, state.opt, moved(state.params, at_rest, at_update))
        new = step.State(state.step + 1, moved(params, at_update, at_rest), opt)
        return new, {"loss": psum(loss, ranks), "grad_norm": norm}

    return train_step, step.state_specs(specs, optimizer)


FURTHER = [(Mesh(dp=2), "zero1"), (Mesh(dp=2), "zero2"), (Mesh(dp=2, fsdp=2), "hybrid"), (Mesh(dp=4), "zero2")]
OPTIMIZERS = {"adamw": lambda: optim.adamw(1e-2), "muon": lambda: optim.muon(1e-2), "sgd": lambda: optim.sgd(1e-2)}


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "strategy", "name"), few(6, [(*at, name) for at in FURTHER for name in OPTIMIZERS]))
def test_a_step_by_hand_under_zero1_and_zero2(mesh, strategy, name):
    """Where the parameters lie at rest the update is refused, which names the strategies and the way; brought to where
    the state lies it is proven, and equal to one rank. An optimizer without a state works on what it is given."""
    strategy, optimizer = DataParallel.named(strategy), OPTIMIZERS[name]()
    rows = {"x": strategy.batch_layout((8, 8), F64, mesh)}
    plain, specs = own_step(mesh, optimizer, strategy)
    if name == "sgd":
        assert step.check(plain, specs, rows).ok
    else:
        words = r"optimizer: a: got a parameter in the layout .* and a state, .*/a, in .*zero1, zero2, hybrid.*reshard"
        with pytest.raises(ValueError, match=words):
            step.check(plain, specs, rows)
    draw = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(8, 8, dtype=F64, generator=draw)}

    def describe(mesh):
        made, specs = further_sharded(mesh, optimizer, strategy)
        return step.Description(made, specs, {"x": strategy.batch_layout((8, 8), F64, mesh)})

    assert_proven(describe, mesh, batch, rows)


def test_gradients_that_lie_otherwise_than_the_parameters():
    mesh, optimizer = Mesh(dp=2), optim.adamw(1e-2)
    params = {"w": Layout((4, 2), F64, mesh)}
    grads = {"w": Layout((4, 2), F64, mesh, ("dp",))}
    state = optimizer.init(tree.map(tree.ArraySpec, grads))
    with pytest.raises(
        ValueError, match="optimizer: w: got a parameter in the layout .* and a gradient in .*wanted one layout"
    ):
        step.check(lambda p, s, g: optimizer.update(g, s, p), params, tree.layouts(state), grads)


DECODERS = [
    (Mesh(dp=2), "zero1", 1, {}), (Mesh(dp=2), "zero2", 2, {"tied": True}), (Mesh(dp=2, fsdp=2), "hybrid", 2, {}),
    (Mesh(dp=4), "zero3", 1, {"tied": True}), (Mesh(fsdp=2, tp=2), "zero3", 1, {"tied": True}),
    (Mesh(cp=2), "replicated", 1, {}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mesh", "name", "microbatches", "changes"), few(2, DECODERS))
def test_the_standard_step_of_a_decoder(mesh, name, microbatches, changes):
    strategy, optimizer = DataParallel.named(name), optim.adamw(1e-2)

    def rows_on(mesh):
        rows = strategy.batch_layout((8, 8), torch.int64, mesh, microbatches)
        return {"tokens": rows, "labels": rows}

    def describe(mesh):
        made, specs = decoder_step(mesh, optimizer, strategy, microbatches, **changes)
        return step.Description(made, specs, rows_on(mesh), microbatches)

    draw = torch.Generator().manual_seed(2)
    batch = {name: torch.randint(0, 32, (8, 8), generator=draw) for name in ("tokens", "labels")}
    assert_proven(describe, mesh, batch, rows_on(mesh))


def test_by_hand_names_no_layouts():
    text = Path(by_hand.__file__).read_text()
    assert "layouts=" not in text and "layouts)" not in text.replace("tree.layouts(specs))", "")


def test_a_reduction_that_is_forgotten_is_no_norm():
    """The norm of gradients whose sums are pending was a norm of this rank alone, in silence."""
    mesh = Mesh(dp=2)
    layout = Layout((4, 2), F64, mesh)

    def wrong(params, batch):
        _, grads = step.value_and_grad(lambda p, b: (b @ p["w"]).square().sum())(params, batch)
        return {"norm": optim.global_norm(grads)}

    with pytest.raises(ValueError, match="global_norm: w: got .* still pending over dp"):
        step.check(wrong, {"w": layout}, Layout((8, 4), F64, mesh, ("dp",)))


def test_what_was_computed_is_another_array():
    mesh = Mesh(fsdp=2)
    params = {"w": Layout((4, 2), F64, mesh, ("fsdp",))}

    def sliced(params):
        return nn.gather_tree({"w": params["w"] * 2})["w"].sum()

    with pytest.raises(ValueError, match="w: got a tensor whose layout is not known.*tree.place"):
        step.check(sliced, params)

    def changed(params):
        _, grads = step.value_and_grad(lambda p: nn.gather_tree(p)["w"].square().sum() / 2)(params)
        return step.reduce_gradients(tree.map(lambda g: g * 2, grads))

    with pytest.raises(ValueError, match="w: got a tensor whose layout is not known"):
        step.check(changed, params)


def test_gradients_know_their_layouts_and_a_function_may_return_them():
    mesh = Mesh(dp=2, fsdp=2)
    params = {"w": Layout((4, 2), F64, mesh, ("fsdp",)), "v": Layout((4, 2), F64, mesh)}
    rows = Layout((8, 4), F64, mesh, (("dp", "fsdp"),))
    seen = {}

    def gradients(params, batch):
        def loss(p, b):
            return (b @ (nn.gather_tree(p)["w"] + p["v"])).square().sum()

        _, grads = step.value_and_grad(loss)(params, batch)
        seen.update(tree.map(tree.layout_of, grads))
        return grads

    assert step.check(lambda p, b: {"of": gradients(p, b)}, params, rows).ok  # raw ones
    assert seen == {"w": params["w"].replace(unreduced="dp"), "v": params["v"].replace(unreduced=("dp", "fsdp"))}

    def reduced(params, batch):
        grads = step.reduce_gradients(gradients(params, batch))
        seen.update(tree.map(tree.layout_of, grads))
        return {"of": grads}

    assert step.check(reduced, params, rows).ok and seen == params
    same = functools.partial(step.value_and_grad, lambda p, b: (b @ p["v"]).square().sum())
    both = Layout((8, 4), F64, mesh)  # the same batch on all ranks: what autograd leaves is no pending sum
    assert step.check(lambda p, b: {"of": same()(p, b)[1]}, {"v": params["v"]}, both).ok


def test_specs_in_the_place_of_layouts():
    mesh, optimizer = Mesh(dp=2), optim.sgd(0.1)
    specs = tree.specs({"w": (4,)}, mesh, strategy=DataParallel.zero1())

    def loss_fn(params, batch):
        return (batch @ params["w"]).sum() / 2, {}

    made = step.build_train_step(loss_fn, optimizer, specs)
    told = step.build_train_step(loss_fn, optimizer, tree.layouts(specs), Axes(mesh), strategy=DataParallel.zero1())
    given = step.state_specs(specs, optimizer), Layout((8, 4), torch.float32, mesh, ("dp",))
    for one in (made, told):
        assert step.check(one, *given).ok
    wrong = {"w": replace(specs["w"], strategy=None), "v": (4,)}
    with pytest.raises(ValueError, match="layouts: v/0: got .*, wanted a Layout or an ArraySpec"):
        step.build_train_step(loss_fn, optimizer, wrong)
