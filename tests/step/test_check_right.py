"""What is right has no finding: reshards of any pair of layouts with their gradients, ZeRO-1 on flat shards."""

import pytest
import torch
from hypothesis import given, settings

from fmegatron import optim, tree
from fmegatron.collectives import Axes, enter, psum, reshard
from fmegatron.collectives.reshard_plan import reshard_moves
from fmegatron.layout import Layout, Mesh
from fmegatron.optim import contrib
from fmegatron.step import State, check, trace, value_and_grad
from fmegatron.step.checker.entrypoints import check_traced
from fmegatron.step.reduce import raw_gradient_layout
from fmegatron.tree import arithmetic
from tests.collectives.test_reshard import make_step, pairs
from tests.pairs import each_value, few
from tests.step.graph_mutants import problem


def empty(layout):
    return torch.empty(layout.local_shape(0), dtype=layout.dtype, device="meta")


def no_finding_in_a_reshard(pair):
    source, target = pair
    cotangent = target.replace(unreduced=tuple(a for a in source.sharded if a not in target.sharded))
    traced = trace(make_step(source, target, Axes(source.mesh)), (empty(source), empty(cotangent)))
    report = check_traced(traced, source.mesh, [source, cotangent], [target, source.replace(unreduced=())])
    assert report.ok, f"{source} -> {target} by {reshard_moves(source, target)}\n{report}"


@pytest.mark.medium
@settings(max_examples=25, deadline=None)
@given(pairs())
def test_reshard(pair):
    no_finding_in_a_reshard(pair)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(pairs())
def test_reshard_of_many(pair):
    no_finding_in_a_reshard(pair)


def zero1(mesh, optimizer, clip, bug=None):
    """Parameters replicated over dp, optimizer state and update on flat shards of them: (step, state, batch)."""
    axes, tp = Axes(mesh), Axes(mesh)["tp"]
    f32 = torch.float32
    whole = {
        "w1": Layout((16, 32), f32, mesh, (None, "tp")),
        "w2": Layout((32, 16), f32, mesh, ("tp",)),
        "norm": Layout((16,), f32, mesh),
    }
    own = {name: layout.replace(flat=("dp",)) for name, layout in whole.items()}

    def loss_fn(p, batch):
        u = enter(batch["x"] * p["norm"], tp)
        loss = (psum(torch.tanh(u @ p["w1"]) @ p["w2"], tp) - batch["x"]).square().sum() / 256
        return loss, {"loss": psum(loss.detach(), axes["dp"])}

    def step(state, batch):
        (_, metrics), grads = value_and_grad(loss_fn)(state.params, batch)
        raw = {name: raw_gradient_layout(layout, () if bug == "raw" else ("dp",)) for name, layout in whole.items()}
        grads = {name: reshard(g, raw[name], own[name], axes) for name, g in grads.items()}
        # Without layouts global_norm refuses; by hand it is each rank's own.
        norm = arithmetic.squared_norm(tree.leaves(grads)).sqrt() if bug == "norm" else optim.global_norm(grads)
        grads = optim.clip(grads, norm, 1.0) if clip else grads
        mine = {name: reshard(p, whole[name], own[name], axes) for name, p in state.params.items()}
        new, opt = optimizer.update(grads, state.opt, mine)
        new = {name: reshard(p, own[name], whole[name], axes) for name, p in new.items()}
        return State(state.step + 1, new, opt), {**metrics, "grad_norm": norm}

    shards = {name: tree.ArraySpec(layout, 0) for name, layout in own.items()}
    state = State(Layout((), torch.int64, mesh), whole, tree.layouts(optimizer.init(shards)))
    return step, state, {"x": Layout((16, 16), f32, mesh, ("dp",))}


OPTIMIZERS = {"adamw": optim.adamw(1e-3), "sgd": optim.sgd(1e-2), "momentum": optim.sgd(1e-2, momentum=0.9)}


MESHES = [Mesh(dp=2, tp=2), Mesh(dp=4, tp=1), Mesh(dp=1, tp=2), Mesh(dp=2, tp=4)]


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "name", "clip"), each_value(MESHES, OPTIMIZERS, [True, False]))
def test_zero1(mesh, name, clip):
    report = check(*zero1(mesh, OPTIMIZERS[name], clip))
    assert report.ok, str(report)


@pytest.mark.parametrize("bug", ["raw", "norm"])
def test_wrong_zero1(bug):
    assert check(*zero1(Mesh(dp=2, tp=2), OPTIMIZERS["sgd"], True, bug)).findings


COMMUNICATE = ["adafactor", "muon", "skip_nonfinite"]


@pytest.mark.medium
@pytest.mark.parametrize("name", few(1, [(name,) for name in COMMUNICATE], COMMUNICATE))
def test_optimizers_that_communicate(name):
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    if name == "skip_nonfinite":
        optimizer = optim.skip_nonfinite(optim.adamw(1e-3))
    else:
        optimizer = {"adafactor": contrib.adafactor, "muon": optim.muon}[name](1e-3)
    report = check(*problem(mesh, optimizer))
    assert report.ok, str(report)
