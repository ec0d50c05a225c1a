"""Stacked leaves taken apart: what treats each layer by itself has the same values of one layer each."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fmegatron import step
from fmegatron.step.pipeline.by_layers import layers_apart
from tests.step.pipeline.test_odd_losses import assert_same, random, trunk

W, X = random(3, 4, 2), random(4, 2)


def numbers(*shape):
    return torch.arange(24.0, dtype=torch.float64)[: torch.Size(shape).numel()].view(shape) + 1


def used(layers):
    return sum((n + 1) * torch.tanh(w).sum() for n, w in enumerate(layers))


APART = {
    "unbind": lambda w, x: used(w.unbind()),
    "each by its number": lambda w, x: used(w[n] for n in (0, 1, -1)),
    "twice": lambda w, x: used(w.unbind()) * used(w.unbind()),
    "a cast, a number, a whole tensor beside": lambda w, x: used(
        (2 * w.float() + x - numbers(3, 4, 2)).double().unbind()
    ),
    "a penalty": lambda w, x: used(w.unbind()) + w.square().sum() + w.square().mean() + w.abs().mean((0, 2)).amax(),
    "sums of a kept dim": lambda w, x: (used(w.unbind()) + w.sum(0, keepdim=True) + w.sum((0, 1), keepdim=True)).sum(),
    "norms of layers": lambda w, x: used((w / w.square().sum((1, -1), keepdim=True).sqrt()).unbind()),
    "scales": lambda w, x: used((w / w.abs().amax((1, 2)).view(-1, 1, 1)).unbind()),
    "views": lambda w, x: used(w.mT.reshape(3, 8).unsqueeze(-1).expand(3, 8, 2).permute(0, 2, 1).unbind()),
    "a choice": lambda w, x: used(torch.where(w > 0, w, x).unbind()),
    "of what is broadcast": lambda w, x: used((w * numbers(3, 4, 1) * x[None]).unbind()),
    "stacked and apart": lambda w, x: used(torch.stack([v.sum() for v in w.unbind()]).square().unbind()),
}
WHOLE = {
    "a norm": lambda w, x: used(w.unbind()) + w.norm(),
    "sorted layers": lambda w, x: used(w.sort(0)[0].unbind()),
    "neighbours": lambda w, x: used((w - w.roll(1, 0)).unbind()),
    "one layer alone": lambda w, x: w[1].sum(),
    "layers of another dim": lambda w, x: used(w.unbind(1)) + used(w.unbind()),
    "the largest": lambda w, x: used(w.unbind()) + w.amax((0, 1)).sum(),
    "as trailing dims": lambda w, x: (
        used(w.unbind()) + (w[:, 0, 0] * numbers(3, 3)).sum() + w[:, 0, 0].expand(3, 3).sum()
    ),
}


def apart(of):
    """(paths of the inputs, what their graph gives, what the function does)."""

    def value_and_gradient(w, x):
        w = w.detach().requires_grad_()
        value = of(w, x)
        return [value.detach(), torch.autograd.grad(value, w)[0]]

    module = make_fx(value_and_gradient, tracing_mode="fake")(W, X)
    inputs, outs = layers_apart(module.graph, ["0/w", "1/x"], ["value", "grads/w"], "grads/")
    module.graph.lint()
    module.recompile()
    given = {f"layer {i} of 0/w": layer for i, layer in enumerate(W)} | {"0/w": W, "1/x": X}
    places = module.graph.find_nodes(op="placeholder")
    results = module(*(given[inputs[n]] for n in places))
    found = dict(zip(dict.fromkeys(outs.values()), results, strict=True))
    values = {path: found[n] for path, n in outs.items()}
    layers = [values.get(f"layer {i} of grads/w") for i in range(3)]
    got = [values["value"], values["grads/w"] if layers[0] is None else torch.stack(layers)]
    return {path for path in inputs.values() if "0/w" in path}, got, value_and_gradient(W, X)


@pytest.mark.parametrize("name", APART)
def test_layers_that_are_treated_each_by_itself(name):
    paths, got, wanted = apart(APART[name])
    assert paths == {f"layer {i} of 0/w" for i in range(3)}
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", WHOLE)
def test_what_reads_several_layers_together_has_the_leaf(name):
    paths, got, wanted = apart(WHOLE[name])
    assert paths == {"0/w"}
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def odd(params, batch):
    """Layers by number, a normalized table that all stages read, parts and metrics of layers of several stages."""
    table = torch.nn.functional.layer_norm(params["table"], (4,), params["scale"])
    even = torch.arange(4) % 2 == 0
    table = torch.where(even, table, 0) + table.masked_fill(even[:, None], 0)
    x = table[batch["i"]] - batch["x"]
    for n in range(4):
        x = step.stage(x, n)
        x = x + torch.tanh(x @ params["w"][n]) - table[n]
    penalty = params["w"].square().sum() + params["table"].square().sum()
    lm = (x @ table.T).square().sum()
    rows = float(len(x))
    parts = {"lm": lm, "penalty": 0.1 * penalty, "both": lm + penalty}
    largest = torch.stack([w.detach().abs().sum() for w in params["w"].unbind()]).max()
    return {name: step.mean(total, rows) for name, total in parts.items()}, {"largest": largest}


@pytest.mark.slow
def test_by_stages():
    i = torch.tensor([0, 3, 1, 1, 2, 0])
    batch = {"x": random(6, 4), "y": random(6, 4), "i": i}
    assert_same(odd, {"w": random(4, 4, 4), "table": random(4, 4), "scale": random(4)}, batch)


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, False])
def test_a_penalty_of_a_stack_in_the_scalar(split):
    def loss_fn(params, batch):
        x = trunk(batch["x"], params["w"])
        lm = x.square().sum() + 0.1 * params["w"].square().sum() * batch["x"].sum()
        return step.mean(lm, float(x.numel())), {"w": step.mean(params["w"].detach().abs().mean(), 1.0)}

    assert_same(loss_fn, {"w": random(4, 4, 4)}, {"x": random(6, 4)}, split)
