"""Routers against loops over tokens; losses against their formulas; noise bit for bit the same on every mesh."""

import math

import pytest
import torch

from fmegatron import nn
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.nn import Router
from fmegatron.nn.routing import (
    balanced_bias,
    expert_load,
    expert_probs,
    jittered,
    noisy,
    router_entropy,
    router_z_loss,
    sequence_balance_loss,
)
from fmegatron.testing import simulate

B, S, E = 4, 6, 16
ROUTERS = {
    "softmax": Router(E, 3),
    "Mixtral": Router(E, 2, normalised=True),
    "DeepSeek V2": Router(E, 4, scale=16.0, groups=4, top_groups=2),
    "DeepSeek V3": Router(E, 4, "sigmoid", normalised=True, scale=2.5, groups=4, top_groups=2, group_best=2),
    "all": Router(E, E, "sigmoid"),
    "one": Router(E, 1, groups=16, top_groups=3),
}


def logits(seed=0):
    return torch.randn(B, S, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_loop(router, row, bias):
    """(experts, gates) of one token, in plain Python."""
    scores = row.softmax(0) if router.scores == "softmax" else row.sigmoid()
    choice, of_group = scores + bias, E // router.groups
    groups = [list(range(g * of_group, (g + 1) * of_group)) for g in range(router.groups)]
    worth = [sum(sorted((choice[e].item() for e in group), reverse=True)[: router.group_best]) for group in groups]
    best = sorted(range(router.groups), key=lambda g: -worth[g])[: router.top_groups]
    allowed = [e for g in best for e in groups[g]]
    chosen = sorted(allowed, key=lambda e: -choice[e].item())[: router.top_k]
    gates = torch.stack([scores[e] for e in chosen])
    return chosen, (gates / gates.sum() if router.normalised else gates) * router.scale


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("biased", [False, True])
def test_against_a_loop(name, biased):
    router, x = ROUTERS[name], logits()
    bias = torch.randn(E, generator=torch.Generator().manual_seed(1), dtype=torch.float64) if biased else torch.zeros(E)
    routing = router(x, bias if biased else None)
    for b in range(B):
        for s in range(S):
            experts, gates = by_loop(router, x[b, s], bias)
            assert routing.experts[b, s].tolist() == experts
            torch.testing.assert_close(routing.gates[b, s], gates)
    torch.testing.assert_close(routing.probs.sum(-1), torch.ones(B, S, dtype=torch.float64))


def test_normalised_softmax_is_the_softmax_of_the_chosen():
    """Mixtral, gpt-oss."""
    routing = ROUTERS["Mixtral"](logits())
    torch.testing.assert_close(routing.gates, logits().topk(2, -1).values.softmax(-1))


def test_the_bias_has_no_gradient_and_bf16_is_widened():
    x, bias = logits().bfloat16().requires_grad_(), torch.zeros(E, requires_grad=True)
    routing = ROUTERS["DeepSeek V3"](x, bias)
    assert routing.gates.dtype == torch.float32
    dx, dbias = torch.autograd.grad(routing.gates.square().sum(), (x, bias), allow_unused=True)
    assert dx.abs().sum() > 0 and dbias is None


def test_losses():
    router, x = ROUTERS["DeepSeek V3"], logits()
    routing, none = router(x), Axes(Mesh())[()]
    load = expert_load(routing.experts, E)
    assert load.tolist() == [int((routing.experts == e).sum()) for e in range(E)]
    share, mean = load / load.sum(), routing.probs.mean((0, 1))
    torch.testing.assert_close(expert_probs(routing.probs), B * S * mean)
    each = [balance_of(routing.probs[b], routing.experts[b]) for b in range(B)]
    torch.testing.assert_close(sequence_balance_loss(routing.probs, routing.experts, none), S * sum(each[1:], each[0]))
    torch.testing.assert_close(balance_of(routing.probs, routing.experts), E * (share * mean).sum())
    torch.testing.assert_close(router_z_loss(x), x.logsumexp(-1).square().sum())
    even = torch.full((B, S, E), 1 / E, dtype=torch.float64)
    assert router_entropy(even).item() == pytest.approx(B * S * math.log(E))
    assert router_entropy(torch.eye(E)) == 0  # 0 ln 0


def balance_of(probs, experts):
    """Switch's: E sum of shares of the load times mean probabilities."""
    load = expert_load(experts, E)
    return E * (load / load.sum() * probs.reshape(-1, E).mean(0)).sum()


def test_padding_counts_nowhere():
    """What is not real gives what the real tokens alone give."""
    routing, none = ROUTERS["DeepSeek V3"](logits()), Axes(Mesh())[()]
    real = torch.zeros(B, S, dtype=torch.bool)
    real[:, : S // 2] = True
    part = routing._replace(probs=routing.probs[:, : S // 2], experts=routing.experts[:, : S // 2])
    of_real = routing.without(~real).experts
    for f, given, of_part in (
        (expert_probs, (routing.probs,), (part.probs,)),
        (router_entropy, (routing.probs,), (part.probs,)),
        (router_z_loss, (logits(),), (logits()[:, : S // 2],)),
        (sequence_balance_loss, (routing.probs, of_real, none), (part.probs, part.experts, none)),
    ):
        torch.testing.assert_close(f(*given, real), f(*of_part))
    assert torch.equal(expert_load(of_real, E), expert_load(part.experts, E))


def test_the_bias_balances():
    """Experts that everybody prefers lose that by the bias alone."""
    router, bias, x = Router(E, 2, "sigmoid"), torch.zeros(E), logits().float() / 4 + torch.linspace(0, 2, E)
    before = expert_load(router(x, bias).experts, E)
    for _ in range(300):
        bias = balanced_bias(bias, expert_load(router(x, bias).experts, E), 0.005)
    after = expert_load(router(x, bias).experts, E)
    assert before.max() > 4 * before.float().mean() and after.max() <= 2 * after.float().mean()
    assert torch.equal(balanced_bias(bias, torch.ones(E), 0.1), bias)


MESHES = [Mesh(dp=2), Mesh(ep=4), Mesh(dp=2, cp=2), Mesh(ep=2, tp=2)]


@pytest.mark.medium
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_noise_is_the_same_on_every_mesh(mesh):
    """Jitter, noise, dropout: choices and gates, bit for bit, also where the sequence is split."""

    def make_step(mesh):
        at = Layout((B, S, E), torch.float64, mesh, (("dp", "ep"), ("cp", "tp")))

        def step(x, samples):
            given = {"count": samples, "layout": at}
            x = jittered(x, 0.1, key=1, **given)
            x = noisy(x, 0.5, key=2, **given)
            x = nn.dropout(x, 0.2, key=3, **given)
            routing = Router(E, 3)(x)
            return routing.gates, routing.experts

        return step

    found = []
    for m in (mesh, Mesh()):
        x = Layout((B, S, E), torch.float64, m, (("dp", "ep"), ("cp", "tp")))
        samples = Layout((B,), torch.int64, m, (("dp", "ep"),))
        given = (logits(), 7 * torch.arange(B) + 3)
        chosen = x.replace(shape=(B, S, 3))
        sim = simulate(make_step(m), m, *given, layouts=(x, samples), out_layouts=(chosen, chosen))
        found.append(sim.globals())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][1], Router(E, 3)(logits()).experts)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"scores": "relu"}, "Router.scores: got 'relu'"),
        ({"top_k": 0}, "Router.top_k: got 0 of 16"),
        ({"top_k": 17}, "Router.top_k: got 17 of 16"),
        ({"groups": 3}, "Router.groups: got 3"),
        ({"groups": 8, "top_groups": 1, "top_k": 3}, "Router.top_groups: got 1 of 8 groups with 2"),
        ({"groups": 8, "top_groups": 2, "group_best": 3}, "Router.group_best: got 3"),
    ],
)
def test_bad_sizes(wrong, says):
    with pytest.raises(ValueError, match=says):
        Router(**{"experts": E, "top_k": 2, **wrong})
