"""Choosing a token: each op against transformers' processor of logits, draws against probabilities."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fmegatron.model.choose import (
    Choice,
    choose,
    draw,
    min_p,
    repetition_penalty,
    seen_in,
    top_k,
    top_p,
)


def logits(rows=7, vocab=40, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


IDS = torch.randint(0, 40, (7, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: top_k(x, 1), TopKLogitsWarper(1)),
        (lambda x: top_k(x, 7), TopKLogitsWarper(7)),
        (lambda x: top_k(x, 999), TopKLogitsWarper(999)),
        (lambda x: top_p(x, 0.1), TopPLogitsWarper(0.1)),
        (lambda x: top_p(x, 0.9), TopPLogitsWarper(0.9)),
        (lambda x: min_p(x, 0.05), MinPLogitsWarper(0.05)),
        (lambda x: min_p(x, 1.0), MinPLogitsWarper(1.0)),
        (lambda x: x / 0.7, TemperatureLogitsWarper(0.7)),
        (
            lambda x: repetition_penalty(x, seen_in(list(IDS), 40, x.device), 1.3),
            RepetitionPenaltyLogitsProcessor(1.3),
        ),
        (
            lambda x: repetition_penalty(x, seen_in(list(IDS), 40, x.device), 0.8),
            RepetitionPenaltyLogitsProcessor(0.8),
        ),
    ],
)
def test_equal_to_transformers(ours, theirs):
    for seed in range(5):
        x = logits(seed=seed)
        torch.testing.assert_close(ours(x.clone()), theirs(IDS, x.clone()), rtol=1e-14, atol=0)


def test_all_in_the_order_of_transformers():
    how = Choice(temperature=0.7, top_k=12, top_p=0.9, min_p=0.05, repetition_penalty=1.4)
    steps = [
        RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.7), TopKLogitsWarper(12),
        TopPLogitsWarper(0.9), MinPLogitsWarper(0.05),
    ]  # fmt: skip
    for seed in range(5):
        wanted = logits(seed=seed)
        seen = seen_in(list(IDS), 40, wanted.device)
        for one in steps:
            wanted = one(IDS, wanted)
        for u in (0.0, 0.2, 0.5, 0.9, 1 - 2.0**-53):
            u = torch.full((7,), u, dtype=torch.float64)
            assert torch.equal(choose(logits(seed=seed), u, how, seen), draw(wanted, u))


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.75, 1.0])
def test_top_p_draws_the_shortest_set_with_enough_mass(p):
    x = logits(1, 20)
    probs, order = x[0].softmax(-1).sort(descending=True)
    size = int((probs.cumsum(0) < p - 1e-12).sum()) + 1 if p < 1 else 20
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    drawn = choose(x.expand(4000, 20), u, Choice(top_p=p))
    frequency = torch.bincount(drawn, minlength=20) / 4000
    wanted = torch.zeros(20, dtype=torch.float64)
    wanted[order[:size]] = probs[:size] / probs[:size].sum()
    torch.testing.assert_close(frequency.double(), wanted, rtol=0, atol=1 / 2000)  # an even grid of u: no luck involved


def test_the_ends_of_uniform_and_equal_logits_are_safe():
    x = torch.tensor([[0.0, 1.0, -torch.inf]])
    last, first = torch.tensor([1 - 2.0**-53], dtype=torch.float64), torch.tensor([0.0])
    assert int(choose(x, torch.tensor([0.99999]), Choice(temperature=0.01))) == 1
    assert int(choose(x, last, Choice())) == 1 and int(choose(x, first, Choice())) == 0
    equal = torch.zeros(1, 5)
    assert int(choose(equal, first, Choice(top_p=0.2))) == 0 and int(choose(equal, last, Choice(top_k=2))) == 4
    assert int(choose(equal, None, Choice(temperature=0))) == 0


@pytest.mark.parametrize(
    "wrong", [{"min_p": 1.1}, {"top_k": True}, {"repetition_penalty": 0}, {"temperature": float("nan")}]
)
def test_what_cannot_be_meant(wrong):
    with pytest.raises(ValueError, match=f"Choice.{next(iter(wrong))}: got"):
        Choice(**wrong)
