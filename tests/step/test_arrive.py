"""Donated parameters that a gather brings are gathered in place, and nothing else is."""

import functools

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import Axes, all_gather, connect, shard
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import jit, state_specs
from tests.step import strategies

MESH = Mesh(dp=2)
STRATEGY = DataParallel.zero1("dp")


def gathered_in_place(step) -> int:
    """How many leaves."""
    op = torch.ops.fmegatron_step.gather_into.default
    return sum(len(n.args[0]) for n in step.graph("donate").find_nodes(op="call_function", target=op))


def zero1(rank, backend):
    """(gathers in place, all-gathers that are left, whether memory stayed, whether donation changed any bit)."""
    config = strategies.make_config(torch.float32)
    with connect(MESH) as world:
        update = strategies.make_step(config, MESH, STRATEGY, together=0)
        specs = model.specs(config, MESH, strategy=STRATEGY)
        batch = {key: x.chunk(2)[rank] for key, x in strategies.batch_at(config, 0).items()}
        results = []
        for donate in (0, None):
            state = tree.init(state_specs(specs, strategies.OPTIMIZER, STRATEGY), 0, rank)
            where = [x.data_ptr() for x in tree.leaves(state.params)]
            step = jit(update, donate=donate, world=world, backend=backend)
            for _ in range(3):
                state, metrics = step(state, batch)
            results.append([*tree.leaves(state), metrics["loss"]])
            if donate == 0:
                stayed = where == [x.data_ptr() for x in tree.leaves(state.params)]
                counts = gathered_in_place(step), str(step.graph("donate")).count("all_gather_into_tensor.default")
        return *counts, stayed, all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_zero1(ranks, backend):
    leaves = len(tree.leaves(model.layouts(strategies.make_config(), MESH)))
    for in_place, left, stayed, same in ranks.run(zero1, backend, ranks=2, timeout_s=240):
        assert (in_place, left) == (leaves, 0) and stayed and same


def doubled(x, dp):
    """[n] -> [n]: this rank's half doubled, then gathered."""
    return all_gather(shard(x, dp, 0) * 2, dp, 0)


def changed_in_place(s, dp):
    y = doubled(s["a"], dp)
    y.add_(1)
    return {"a": s["a"] + 1, "b": y}


def kept_remainder(s, dp):
    """A master copy as a parameter and what it lacks: both new values are made of the old parameter."""
    master = shard(s["a"], dp, 0) * 1.5 + shard(s["b"], dp, 0)
    new = master.round()
    return {"a": all_gather(new, dp, 0), "b": all_gather(master - new, dp, 0) * 1}


# name -> a step over a state {"a", "b"}, and how many of its leaves may be gathered in place
STEPS = {
    "alone": (lambda s, dp: {"a": doubled(s["a"], dp), "b": doubled(s["b"], dp)}, 2),
    "both of both": (lambda s, dp: {"a": doubled(s["a"] + s["b"], dp), "b": doubled(s["a"] - s["b"], dp)}, 2),
    "old value in another leaf": (lambda s, dp: {"a": s["a"] * 0.5 + s["b"], "b": doubled(s["b"], dp)}, 0),
    "part of the old value": (lambda s, dp: {"a": s["a"] + s["b"][:1], "b": doubled(s["b"], dp)}, 0),
    "sum of the old value": (lambda s, dp: {"a": s["a"] + s["b"].sum(), "b": doubled(s["b"], dp)}, 0),
    "product of the old value": (lambda s, dp: {"a": s["a"] + s["b"] @ s["b"], "b": doubled(s["b"], dp)}, 0),
    "exchanged": (lambda s, dp: {"a": doubled(s["b"], dp), "b": doubled(s["a"], dp)}, 2),
    "exchanged parts": (
        lambda s, dp: {"a": all_gather(s["b"][:2], dp, 0), "b": all_gather(s["a"][:2], dp, 0)},
        0,
    ),
    "what is sent is a leaf": (lambda s, dp: {"a": s["a"] + 1, "b": all_gather(s["a"][:2], dp, 0)}, 0),
    "what is sent is the leaf": (lambda s, dp: {"a": all_gather(s["a"][:2], dp, 0), "b": doubled(s["b"], dp)}, 1),
    "changed in place": (changed_in_place, 0),
    "kept remainder": (kept_remainder, 0),
    "another dim": (lambda s, dp: {"a": all_gather(shard(s["a"], dp, 1) * 2, dp, 1), "b": s["b"] + 1}, 0),
    "turned": (lambda s, dp: {"a": doubled(s["a"], dp).t(), "b": s["b"] + 1}, 0),
    "changed after": (lambda s, dp: {"a": doubled(s["a"], dp) + 1, "b": s["b"] + 1}, 0),
    "twice": (lambda s, dp: dict.fromkeys("ab", doubled(s["a"] + s["b"], dp)), 0),
}


def donated_and_not(rank, mesh, backend):
    """For each step: (gathers in place, whether three calls give what an undonated jit gives, to the bit)."""
    found = {}
    with connect(mesh) as world:
        dp = Axes(mesh)["dp"]
        for name, (step, _) in STEPS.items():
            results = []
            for donate in (0, None):
                one = functools.partial(step, dp=dp)
                run = jit(one, donate=donate, world=world, backend=backend, check=False)
                state = {"a": torch.arange(16.0).reshape(4, 4) / 8 - 1, "b": torch.arange(16.0).reshape(4, 4) / 7}
                for _ in range(3):
                    state = run(state)
                results.append(tree.leaves(state))
                if donate == 0:
                    count = gathered_in_place(run)
            same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            found[name] = count, same
    return found


@pytest.mark.parametrize(
    ("mesh", "backend"), [(Mesh(dp=2), "inductor"), (Mesh(dp=2, x=2), "eager"), (Mesh(x=2, dp=2), "aot_eager")], ids=str
)
def test_the_old_value_is_read_before(ranks, mesh, backend):
    for found in ranks.run(donated_and_not, mesh, backend, ranks=mesh.size, timeout_s=300):
        assert {name: same for name, (_, same) in found.items()} == dict.fromkeys(STEPS, True)
        assert {name: count for name, (count, _) in found.items()} == {name: n for name, (_, n) in STEPS.items()}
