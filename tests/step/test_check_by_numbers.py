"""What rules prove is run on random numbers, too: Python makes plain numbers of those of ranks and of parts' sizes."""

import pytest
import torch

from fmegatron import step
from fmegatron.collectives import Axes, all_gather, psum
from fmegatron.layout import Layout, Mesh

MESH = Mesh(dp=2)
dp = Axes(MESH)["dp"]
WEIGHTS, ROWS = Layout((4, 3), torch.float32, MESH), Layout((8, 4), torch.float32, MESH, ("dp",))
# How an update is made of the gradient over all rows, the weights and a rank's rows.
WRONG = {
    "float times ranks": lambda g, w, x: g * (0.9 * dp.size),
    "ranks times tensor": lambda g, w, x: g * dp.size,
    "a target by ranks": lambda g, w, x: g + (0.1 * dp.size - 0.1),
    "a rate by a part": lambda g, w, x: g * (1.2 / x.shape[0]),
    "moves little": lambda g, w, x: (lambda h: 1e-3 * h / h.norm())(g - 0.5 * g.mean() * dp.size) + g,
    "a power": lambda g, w, x: g * 0.9**dp.size,
}
RIGHT = {
    "plain": lambda g, w, x: g,
    "a rate by all rows": lambda g, w, x: g * (1.2 / ROWS.shape[0]),
    "a rate by gathered rows": lambda g, w, x: g * (1.2 / all_gather(x, dp, 0).shape[0]),
    "one over ranks of a sum of ones": lambda g, w, x: g * psum(torch.ones((), device=g.device), dp) / dp.size,
    "clipped": lambda g, w, x: g * (0.5 / (g.norm() + 1e-6)).clamp(max=1),
    "rounded": lambda g, w, x: torch.round(g * 4) / 4,
    "a sign": lambda g, w, x: torch.sign(g),
}


def described(update):
    def train_step(w, x):
        gradient = psum(torch.func.grad(lambda w, x: (x @ w).square().sum() / 8)(w, x), dp)
        return w - 0.1 * update(gradient, w, x)

    return step.Description(train_step, WEIGHTS, ROWS)


@pytest.mark.parametrize("name", WRONG)
def test_what_differs_is_not_proven(name):
    report = step.check(described(WRONG[name]))
    assert not report.ok, report
    assert {at.at.partition(":")[0] for at in (*report.findings, *report.unproven)} == {"test_check_by_numbers.py"}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_proven(name):
    report = step.check(described(RIGHT[name]))
    assert report.ok, report
