"""Ranks that do not run the same step hear of it at once, in words, on two real ranks."""

import time

import pytest
import torch

from fmegatron import optim, step, tree
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.testing.ranks import RankError

FEW_S = 15.0  # of a loaded machine; without the comparison ranks wait for 300 s


def train_on(rank, how):
    """Four updates of a data-parallel step; `how` is what rank 1 does otherwise. -> sum of the weights."""
    mesh, opt = Mesh(dp=2), optim.sgd(0.1)
    world, axes, other = connect(mesh), Axes(mesh), rank == 1
    specs = tree.specs({"w": (8, 4)}, mesh, init=tree.Normal(0.3))
    factor = 2.0 if how == "constant" and other else 1.0
    made = torch.tanh if how == "function" and other else torch.sin

    def loss(params, batch):
        y = made(batch["x"] @ params["w"]).square() * factor
        if how == "tensor":
            y = y * torch.tensor([1.0, 2.0, 3.0, 4.0 + rank])
        value = y.sum() / 8
        return value, {"loss": psum(value.detach(), axes["dp"])}

    train, states = step.build_train_step(loss, opt, tree.layouts(specs), axes), step.state_specs(specs, opt)
    jitted = step.jit(train, donate=0, world=world, backend="eager")
    state = tree.init(states, key=rank if how == "state" else 0, rank=rank)
    for i in range(4):
        late = other and i == 2 or how.startswith("all")
        rows = 3 if how == "rows" and other or how == "rows later" and late or how == "all rows" and i == 2 else 4
        x = torch.ones(rows, 8, dtype=torch.float64 if how == "dtype later" and late else torch.float32)
        batch = {"x": x, "more": x} if how == "key later" and late or how == "key" and other else {"x": x}
        rows = Layout((2 * rows, 8), x.dtype, mesh, ("dp",))
        state, _ = jitted(state, {name: tree.place(x, rows, rank) for name, x in batch.items()})
    return float(state.params["w"].double().sum())


@pytest.mark.parametrize(
    "how, words",
    [
        ("constant", r"failed on rank 1.*\* ?|mul.*2\.0.*test_agreement\.py:\d+.*rank 0 has"),
        ("function", r"failed on rank 1.*tanh.*test_agreement\.py:\d+"),
        ("tensor", r"failed on rank 1.*the constant \[1\.0, 2\.0, 3\.0, 5\.0\] at test_agreement\.py:\d+"),
        ("rows", r"failed on rank 1.*'1/x'.*\[3, 8\].*\[4, 8\]"),
        ("key", r"failed on rank 1.*'1/more'"),
        ("state", r"params/w: got other bits of the same elements.*ranks 0 and 1.*same key"),
        ("rows later", r"rank 1: got arguments here.*'1/x' is float32\[3, 8\].*was float32\[4, 8\]"),
        ("dtype later", r"rank 1: got arguments here.*'1/x' is float64"),
        ("key later", r"rank 1: got arguments here.*'1/more' is new"),
    ],
)
def test_what_differs_is_named(ranks, how, words):
    ranks.run(warm, ranks=2)
    began = time.monotonic()
    with pytest.raises(RankError, match=f"(?s){words}"):
        ranks.run(train_on, how, ranks=2)
    assert time.monotonic() - began < FEW_S


def evaluate(rank, how):
    """One call that donates nothing, of a batch that all ranks of tp hold; `how` is what rank 1 does otherwise."""
    mesh = Mesh(tp=2)
    world, axes, other = connect(mesh), Axes(mesh), rank == 1
    evaluation = step.jit(lambda b: psum(b["x"].sum(), axes["tp"]) / 2, world=world, backend="eager", check=False)
    x = torch.full((4, 2), 2.0 if how == "rows" and other else 1.0)
    torch.set_float32_matmul_precision("high" if how == "settings" and other else "highest")
    try:
        return float(evaluation(tree.place({"x": x}, Layout((4, 2), x.dtype, mesh), rank)))
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "how, words",
    [
        ("rows", r"x: got other bits of the same elements.*ranks 0 and 1.*<lambda>.*the same rows"),
        ("settings", r"failed on rank 1.*fp32 precision of .*matmul.*which rank 0 has.*the same settings"),
    ],
)
def test_an_evaluation_that_differs_is_named(ranks, how, words):
    assert ranks.run(evaluate, "nothing", ranks=2) == [8.0, 8.0]
    with pytest.raises(RankError, match=f"(?s){words}"):
        ranks.run(evaluate, how, ranks=2)


def warm(rank):
    return rank


@pytest.mark.long
@pytest.mark.parametrize("how", ["nothing", "all rows"])
def test_ranks_that_agree_go_on(ranks, how):
    """Also where all of them change the batch in the same call, and back."""
    first, second = ranks.run(train_on, how, ranks=2)
    assert first == second


def alone(rank):
    """What does not communicate may differ by rank; so may sizes of which the layouts say so."""
    mesh = Mesh(dp=2)
    world, axes = connect(mesh), Axes(mesh)
    local = step.jit(lambda x: x * (rank + 1.0), world=world, backend="eager", check=False)
    uneven = Layout((5, 2), torch.float64, mesh, ("dp",))
    whole = step.jit(lambda x: psum(x.view(-1).sum(), axes["dp"]), world=world, backend="eager", check=False)
    x = torch.ones(uneven.local_shape(rank), dtype=torch.float64)
    return float(local(torch.ones(3 + rank)).sum()), [float(whole(tree.place(x, uneven, rank))) for _ in range(3)]


def test_what_may_differ(ranks):
    assert ranks.run(alone, ranks=2) == [(3.0, [10.0] * 3), (8.0, [10.0] * 3)]
