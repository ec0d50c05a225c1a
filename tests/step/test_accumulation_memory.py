"""Gradients of microbatches do not pile up in a compiled step: one sum and one new gradient, however many they are."""

import pytest
import torch

from fmegatron import tree
from fmegatron.step import accumulate, jit
from fmegatron.testing.measure import peak_bytes
from tests.step import tiny

N, WIDTH = 3, 256


def loss(params, batch):
    y = torch.tanh(batch["x"] @ params["a"]) @ params["b"]
    return y.square().mean(), {"tokens": batch["mask"].sum()}


def step(params, batch):
    (_, metrics), grads = accumulate(loss, N)(params, batch)
    return tree.map(lambda p, g: p - 0.1 * g, params, grads), metrics


@pytest.mark.slow
@pytest.mark.long
def test_two_gradients_are_alive():
    """Inductor would make one kernel of all the sums, behind the last microbatch."""
    params = {name: torch.randn(WIDTH, WIDTH) for name in "ab"}
    batch = {"x": torch.randn(N, WIDTH), "mask": torch.ones(N, dtype=torch.int64)}
    wanted, _ = step(params, batch)
    run = jit(step, donate=0, patches=tiny.SCALAR)
    got, metrics = run(tree.map(torch.clone, params), batch)
    for name in "ab":
        torch.testing.assert_close(got[name], wanted[name])
    assert metrics["tokens"].item() == N
    gradients = sum(p.nbytes for p in params.values())
    assert gradients < peak_bytes(lambda: run(got, batch)) < 2.1 * gradients
