"""Donated parameters that a gather brings are gathered in place, and nothing else is."""

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import Axes, all_gather, connect, shard
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import initial_state, jit
from tests.step import strategies

MESH = Mesh(dp=2)
STRATEGY = DataParallel.zero1("dp")


def zero1(rank, backend):
    """(gathers in place, all-gathers that are left, whether memory stayed, whether donation changed any bit)."""
    config = strategies.make_config(torch.float32)
    with connect(MESH) as world:
        update = strategies.make_step(config, MESH, STRATEGY, together=0)
        specs = model.specs(config, MESH, strategy=STRATEGY)
        batch = {key: x.chunk(2)[rank] for key, x in strategies.batch_at(config, 0).items()}
        results = []
        for donate in (0, None):
            state = initial_state(specs, strategies.OPTIMIZER, 0, rank, STRATEGY)
            where = [x.data_ptr() for x in tree.leaves(state.params)]
            step = jit(update, donate=donate, world=world, backend=backend)
            for _ in range(3):
                state, metrics = step(state, batch)
            results.append([*tree.leaves(state), metrics["loss"]])
            if donate == 0:
                stayed = where == [x.data_ptr() for x in tree.leaves(state.params)]
                ops = [getattr(n.target, "_opname", "") for n in step.graph("donate").nodes]
                counts = ops.count("gather_into"), ops.count("all_gather_into_tensor")
        return *counts, stayed, all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_zero1(ranks, backend):
    leaves = len(tree.leaves(model.layouts(strategies.make_config(), MESH)))
    for in_place, left, stayed, same in ranks.run(zero1, backend, ranks=2, timeout_s=240):
        assert (in_place, left) == (leaves, 0) and stayed and same


def other_uses(rank):
    """What is gathered on another dim, read again or changed after it stays a gather and a copy: (graph, values)."""
    with connect(MESH) as world:
        dp = Axes(MESH)["dp"]

        def step(state):
            mine = tree.map(lambda x: shard(x, dp, 0) * 2, state)
            whole = {name: all_gather(x, dp, 0) for name, x in mine.items() if name != "columns"}
            columns = all_gather(shard(state["columns"], dp, 1) * 2, dp, 1)
            return {**whole, "columns": columns, "changed": whole["changed"] + 1}, whole["read"].sum()

        names = ("plain", "read", "changed", "columns")
        state = {name: torch.arange(16.0).reshape(4, 4) + i for i, name in enumerate(names)}
        run = jit(step, donate=0, world=world, backend="aot_eager", check=False)
        old = tree.map(torch.clone, state)
        new, total = run(state)
        ops = [getattr(n.target, "_opname", "") for n in run.graph("donate").nodes]
        wanted = {name: x * 2 + (name == "changed") for name, x in old.items()}
        right = all(torch.equal(new[name], wanted[name]) and new[name] is state[name] for name in names)
        return ops.count("gather_into"), ops.count("copy_"), right and total == wanted["read"].sum()


def test_only_what_is_gathered_for_the_leaf_alone(ranks):
    assert ranks.run(other_uses, ranks=2) == [(1, 3, True)] * 2
