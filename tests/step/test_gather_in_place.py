"""Donated parameters that a gather brings are gathered in place, and nothing else is."""

import functools

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import Axes, all_gather, connect, psum, shard
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import build_train_step, jit, state_specs
from fmegatron.testing import split
from fmegatron.testing.compare_ranks import relative_error
from tests.step import strategies, tiny

MESH = Mesh(dp=2)
SLOW = pytest.mark.slow
STRATEGY = DataParallel.zero1("dp")


def gathered_in_place(step) -> int:
    """How many leaves."""
    op = torch.ops.fmegatron_step.gather_into.default
    return sum(len(n.args[0]) for n in step.graph("donate").find_nodes(op="call_function", target=op))


def of_the_decoder():
    """(train step, specs of the parameters)."""
    config = strategies.make_config()
    return strategies.make_step(config, MESH, STRATEGY, bucket_bytes=0), model.specs(config, MESH, strategy=STRATEGY)


def of_three_leaves():
    """The same of some of its parameters with a loss that costs Inductor little to compile."""
    specs = {str(i): spec for i, spec in enumerate(tree.leaves(of_the_decoder()[1])[:3])}
    axes = Axes(MESH)

    def loss_fn(params, batch):
        squares = sum((x.reshape(1, -1) @ x.reshape(-1, 1)).sum() for x in tree.leaves(params))
        loss = (batch["tokens"].double() * torch.exp(squares / 100)).sum()  # its gradient needs the squares
        return loss, {"loss": psum(loss.detach(), axes["dp"])}

    options = {"strategy": STRATEGY, "bucket_bytes": 0}
    return build_train_step(loss_fn, strategies.OPTIMIZER, tree.layouts(specs), axes, **options), specs


def zero1(rank, make, backend, reference):
    """(leaves, gathers in place, all-gathers that are left, whether memory stayed, whether all is equal to an undonated
    step of the backend `reference`, to the bit if it is the same backend)."""
    update, specs = make()
    with connect(MESH) as world:
        whole = strategies.batch_at(strategies.make_config(), 0)
        batch = split(whole, {key: STRATEGY.batch_layout(x.shape, x.dtype, MESH) for key, x in whole.items()})[rank]
        results = []
        for donate in (0, None):
            state = tree.init(state_specs(specs, strategies.OPTIMIZER, STRATEGY), 0, rank)
            where = [x.data_ptr() for x in tree.leaves(state.params)]
            how = backend if donate == 0 else reference
            step = jit(update, donate=donate, world=world, backend=how, patches=tiny.SCALAR)
            for _ in range(3):
                state, metrics = step(state, batch)
            results.append([*tree.leaves(state), metrics["loss"]])
            if donate == 0:
                stayed = where == [x.data_ptr() for x in tree.leaves(state.params)]
                counts = gathered_in_place(step), str(step.graph("donate")).count("all_gather_into_tensor.default")
        same = torch.equal if backend == reference else lambda a, b: relative_error(a, b) <= 1e-10
        return len(where), *counts, stayed, all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "backend", "reference"),
    [
        (of_the_decoder, "eager", "eager"),
        (of_three_leaves, "inductor", "eager"),
        pytest.param(of_the_decoder, "inductor", "eager", marks=SLOW),
        pytest.param(of_the_decoder, "inductor", "inductor", marks=SLOW),
    ],
)
def test_zero1(ranks, make, backend, reference):
    for leaves, in_place, left, stayed, same in ranks.run(zero1, make, backend, reference, ranks=2):
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


def donated_and_not(world, step, state, backend):
    """(gathers in place, whether three calls give what an undonated and uncompiled step gives, to the bit)."""
    results = []
    for donate, how in ((0, backend), (None, "eager")):
        run = jit(step, donate=donate, world=world, backend=how, check=False, patches=tiny.SCALAR)
        new = tree.map(torch.clone, state)
        for _ in range(3):
            new = run(new)
        results.append(tree.leaves(new))
        if donate == 0:
            count = gathered_in_place(run)
    return count, all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Of few bits, so that all sums and products are exact and in every order the same.
STATE = {"a": torch.arange(16.0).reshape(4, 4) / 8 - 1, "b": torch.arange(16.0).reshape(4, 4) / 4 - 2}


def one_by_one(rank, mesh, backend):
    """The same for each step."""
    with connect(mesh) as world:
        dp = Axes(mesh)["dp"]
        return {
            name: donated_and_not(world, functools.partial(step, dp=dp), STATE, backend)
            for name, (step, _) in STEPS.items()
        }


def all_in_one(rank, mesh, backend):
    """The same for one step that is all of them: compiled twice instead of twice for each."""
    with connect(mesh) as world:
        dp = Axes(mesh)["dp"]

        def steps(states):
            return {name: step(states[name], dp) for name, (step, _) in STEPS.items()}

        return donated_and_not(world, steps, dict.fromkeys(STEPS, STATE), backend)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("mesh", "backend"),
    [
        (Mesh(dp=2), "eager"),
        pytest.param(Mesh(dp=2, x=2), "eager", marks=SLOW),
        pytest.param(Mesh(x=2, dp=2), "aot_eager", marks=SLOW),
        pytest.param(Mesh(dp=2), "inductor", marks=SLOW),
    ],
    ids=str,
)
def test_the_old_value_is_read_before(ranks, mesh, backend):
    for found in ranks.run(one_by_one, mesh, backend, ranks=mesh.size):
        assert {name: same for name, (_, same) in found.items()} == dict.fromkeys(STEPS, True)
        assert {name: count for name, (count, _) in found.items()} == {name: n for name, (_, n) in STEPS.items()}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mesh", "backend"), [(Mesh(dp=2), "aot_eager"), (Mesh(dp=2), "inductor")], ids=str)
def test_the_old_value_is_read_before_in_one_graph(ranks, mesh, backend):
    for found in ranks.run(all_in_one, mesh, backend, ranks=mesh.size):
        assert found == (sum(count for _, count in STEPS.values()), True)
