"""Steps with optimizers, clips, averages and accumulations of their own."""

import torch

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import psum
from tests.step.guests.frame import REPLICAS, SHARDS, whole

SGD, ADAM = optim.sgd(0.1), optim.adamw(1e-2)


def moved(f, state, *trees):
    """The parameters, each as f says, known to lie as they did."""
    return tree.map(lambda p, *o: tree.place(f(p, *o), tree.layout_of(p)), state.params, *trees)


def next_of(state, params, loss, **more):
    return step.State(state.step + 1, params, state.opt), {"loss": loss, **more}


@whole(True)
def adam_clipped(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    g = step.reduce_gradients(g)
    n = optim.global_norm(g)
    p, o = opt.update(optim.clip(g, n, 0.5), state.opt, state.params)
    return step.State(state.step + 1, p, o), {"loss": loss, "norm": n}


@whole(True, optimizer=SGD)
def own_descent(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    return next_of(state, moved(lambda p, d: p - 0.1 * d, state, step.reduce_gradients(g)), loss)


@whole(True, optimizer=SGD)
def own_sign_descent(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    g = step.reduce_gradients(g)
    return next_of(state, moved(lambda p, d: p * 0.99 - 0.01 * torch.tanh(50 * d), state, g), loss)


@whole(True, optimizer=SGD)
def sharpness_aware(state, b, axes, grad, opt):
    _, g = grad(state.params, b)
    g = step.reduce_gradients(g)
    n = optim.global_norm(g)
    up = moved(lambda p, d: p + 0.05 * d / (n + 1e-9), state, g)
    (loss, _), g = grad(up, b)
    p, o = opt.update(step.reduce_gradients(g), state.opt, state.params)
    return step.State(state.step + 1, p, o), {"loss": loss}


@whole(True, optimizer=SGD)
def extragradient(state, b, axes, grad, opt):
    _, g = grad(state.params, b)
    half = moved(lambda p, d: p - 0.1 * d, state, step.reduce_gradients(g))
    (loss, _), g = grad(half, b)
    return next_of(state, moved(lambda p, d: p - 0.1 * d, state, step.reduce_gradients(g)), loss)


@whole(True)
def two_updates(state, b, axes, grad, opt):
    loss, params, o = None, state.params, state.opt
    for _ in range(2):
        (loss, _), g = grad(params, b)
        params, o = opt.update(step.reduce_gradients(g), o, params)
    return step.State(state.step + 2, params, o), {"loss": loss}


@whole(True, optimizer=SGD)
def sum_of_norms_shown(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    g = step.reduce_gradients(g)
    p, o = opt.update(g, state.opt, state.params)
    norms = {k: optim.global_norm({k: x}) for k, x in g.items()}
    return step.State(state.step + 1, p, o), {"loss": loss, **norms}


@whole(False, REPLICAS, SGD)
def not_reduced(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    return next_of(state, moved(lambda p, d: p - 0.1 * d, state, g), loss)


@whole(False, REPLICAS, SGD)
def sign_before_the_sum(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    g = {k: torch.tanh(50 * x) for k, x in g.items()}
    g = {k: psum(x, axes["dp"]) for k, x in g.items()}
    return next_of(state, moved(lambda p, d: p - 0.1 * d, state, g), loss)


@whole(False, REPLICAS, SGD)
def clipped_before_the_sum(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    n = sum(x.square().sum() for x in g.values()).sqrt()
    g = {k: psum(x * (0.1 / n).clamp(max=1), axes["dp"]) for k, x in g.items()}
    return next_of(state, moved(lambda p, d: p - 0.1 * d, state, g), loss)


@whole(False, optimizer=SGD)
def averaged_after_the_sum(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    g = step.reduce_gradients(g)
    n = axes[axes.data].size
    return next_of(state, moved(lambda p, d: p - 0.1 * d / n, state, g), loss)


@whole(False, optimizer=SGD)
def summed_twice(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    g = {k: psum(x, axes[axes.data]) for k, x in step.reduce_gradients(g).items()}
    return next_of(state, moved(lambda p, d: p - 0.1 * d, state, g), loss)


@whole(False, SHARDS, SGD)
def norm_of_shards(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    g = step.reduce_gradients(g)
    n = sum(x.square().sum() for x in g.values()).sqrt()
    return next_of(state, moved(lambda p, d: p - 0.1 * d / n, state, g), loss)


@whole(False, SHARDS, SGD)
def trust_ratio_of_shards(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    g = step.reduce_gradients(g)
    return next_of(state, moved(lambda p, d: p - 0.01 * p.norm() * d / d.norm(), state, g), loss)


@whole(False, REPLICAS, SGD)
def perturbed_by_own(state, b, axes, grad, opt):
    _, g = grad(state.params, b)
    up = moved(lambda p, d: p + 0.05 * d, state, g)
    (loss, _), g = grad(up, b)
    p, o = opt.update(step.reduce_gradients(g), state.opt, state.params)
    return step.State(state.step + 1, p, o), {"loss": loss}


@whole(False, optimizer=SGD)
def loss_shown_of_own(state, b, axes, grad, opt):
    (_, _), g = grad(state.params, b)
    p, o = opt.update(step.reduce_gradients(g), state.opt, state.params)
    return step.State(state.step + 1, p, o), {"loss": (b["x"] @ nn.gather_tree(p)["a"]).square().mean()}


@whole(False, optimizer=SGD)
def pulled_by_own_batch(state, b, axes, grad, opt):
    (loss, _), g = grad(state.params, b)
    g = step.reduce_gradients(g)
    rate = 0.1 / (1 + b["r"].mean())
    return next_of(state, moved(lambda p, d: p - rate * d, state, g), loss)


@whole(False, optimizer=SGD)
def two_halves_averaged(state, b, axes, grad, opt):
    halves = [{k: x.chunk(2)[i] for k, x in b.items()} for i in (0, 1)]
    (l0, _), g0 = grad(state.params, halves[0])
    (l1, _), g1 = grad(state.params, halves[1])
    g0, g1 = step.reduce_gradients(g0), step.reduce_gradients(g1)
    g = {k: (g0[k] + g1[k]) / 2 for k in g0}
    return next_of(state, moved(lambda p, d: p - 0.1 * d, state, g), (l0 + l1) / 2)
