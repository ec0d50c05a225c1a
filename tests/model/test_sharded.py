"""The model on simulated ranks equals one rank: loss, metrics and each gradient, fp64, 1e-10; collectives counted."""

import collections
import dataclasses

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import Axes
from fmegatron.collectives.kinds import collective_of
from fmegatron.layout import DataParallel, Mesh, Rules
from fmegatron.model.array_specs import init
from fmegatron.model.array_specs import rules as rules_of_model
from fmegatron.step import trace, value_and_grad
from fmegatron.step.opaque import inline_layers
from fmegatron.step.reduce import raw_gradient_layout
from fmegatron.testing import assert_parity, split
from tests.model.test_reference import leaves_that_differ, make_batch, tiny
from tests.pairs import few, mixed


def small(**changes):
    """A Llama that divides over 4 ranks of tp, with other arguments."""
    return tiny(**{"heads": 8, "kv_heads": 4, "dim": 64, "ffn_dim": 48, "vocab_size": 90} | changes)


CONFIG = small()
MESHES = [Mesh(), Mesh(dp=2), Mesh(fsdp=2), Mesh(tp=2), Mesh(fsdp=2, tp=2), Mesh(dp=2, fsdp=2, tp=2), Mesh(tp=4)]
VARIANTS = {
    "plain": {},
    "tied, z-loss": {"tied": True, "z_loss": 1e-2},
    "sequence parallel": {"sequence_parallel": True},
    "sequence parallel, tied": {"sequence_parallel": True, "tied": True},
}
CASES = mixed(VARIANTS, MESHES)


def batch_layouts(batch, mesh):
    return {name: DataParallel().batch_layout(tuple(x.shape), x.dtype, mesh) for name, x in batch.items()}


def make_step(config, save=None, rules=None):
    def of_mesh(mesh):
        axes = Axes(mesh)
        f = value_and_grad(lambda params, batch: model.loss(params, batch, config, axes, save), axes=axes)

        def step(params, batch):
            (loss, metrics), grads = f(params, batch)
            return grads, loss, metrics

        return step

    return of_mesh


def raw_layouts(config, mesh, rules=None):
    """Layouts of what the step returns: gradients before the train step sums them over replicas, loss, metrics."""
    raw = tree.map(lambda layout: raw_gradient_layout(layout, Axes(mesh).data), model.layouts(config, mesh, rules))
    return raw, None, None


def check(config, mesh, mask=False, save=None, rules=None):
    params = leaves_that_differ(init(config, Mesh(), key=3))
    batch = make_batch(config, batch_size=4, mask=mask)
    return assert_parity(
        make_step(config, save, rules), mesh, params, batch,
        layouts=(model.layouts(config, mesh, rules), batch_layouts(batch, mesh)),
        out_layouts=raw_layouts(config, mesh, rules),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), few(2, CASES, [f"{name}-{mesh}" for name, mesh in CASES]))
def test_loss_and_each_gradient(name, mesh):
    check(dataclasses.replace(CONFIG, **VARIANTS[name]), mesh)


MASKED = [Mesh(dp=2, fsdp=2, tp=2), Mesh(tp=4)]


@pytest.mark.medium
@pytest.mark.parametrize("mesh", few(1, [(mesh,) for mesh in MASKED], map(str, MASKED)))
def test_with_a_mask(mesh):
    """The number of tokens that count differs between data ranks: the divisor must be the global one."""
    check(dataclasses.replace(CONFIG, z_loss=1e-2), mesh, mask=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "sequence_parallel"), few(1, [("mincut", False), ("inputs", True), ("mincut", True), ("inputs", False)])
)
def test_with_compiled_layers(save, sequence_parallel):
    config = dataclasses.replace(CONFIG, sequence_parallel=sequence_parallel)
    check(config, Mesh(fsdp=2, tp=2), save=save)


@pytest.mark.medium
def test_with_other_rules():
    """Norms sharded too, weights over dp and fsdp jointly: the model follows its layouts, not a fixed scheme."""
    rules = [
        (r".*norm", (None, "fsdp")),
        (r"blocks/mlp/w_down", (None, ("tp", "dp"), "fsdp")),
        *rules_of_model(CONFIG).table,
    ]
    rules.insert(0, (r"final_norm", ("fsdp",)))
    rules.insert(0, (r"head/w", (("dp", "fsdp"), "tp")))
    check(CONFIG, Mesh(dp=2, fsdp=2, tp=2), rules=Rules(rules))


def collectives(config, mesh, save=None, inline=True):
    """How often each collective appears, as "op axes" -> number."""
    params = split(init(config, Mesh(), 0), model.layouts(config, mesh))[0]
    batch = make_batch(config, batch_size=4)
    local = split(batch, batch_layouts(batch, mesh))[0]
    graph = trace(make_step(config, save)(mesh), (params, local)).graph_module.graph
    nodes = (inline_layers(graph) if inline else graph).nodes
    found = [(one, n) for n in nodes if (one := collective_of(n.target)) and one.sent]
    return collections.Counter(f"{one.name} {'+'.join(n.args[1])}" for one, n in found)


@pytest.mark.medium
@pytest.mark.parametrize("layers", few(1, [(1,), (2,), (3,)]))
def test_number_of_collectives(layers):
    """What the layouts imply, and not one more: counted in the traced graph."""
    config = small(layers=layers)
    assert collectives(config, Mesh(dp=2)) == {"psum dp": 2}  # counts, totals; gradients are summed by the train step
    ends = 1 if config.tied else 2  # a tied table is gathered once; embedding and head each when they are used
    assert collectives(config, Mesh(fsdp=2)) == {
        "all_gather fsdp": layers + ends, "reduce_scatter fsdp": layers + ends, "psum fsdp": 2,
    }  # fmt: skip
    remat = collectives(config, Mesh(fsdp=2), "inputs", inline=False)
    assert remat["all_gather fsdp"] == 2 * layers + ends and remat["reduce_scatter fsdp"] == layers + ends
    # forward: lookup, two per layer, softmax sum; backward: two per layer, head
    assert collectives(config, Mesh(tp=2)) == {"psum tp": 2 * layers + 2 + 2 * layers + 1, "pmax tp": 1}
    sp = collectives(dataclasses.replace(config, sequence_parallel=True), Mesh(tp=2))
    assert sp["all_gather tp"] == sp["reduce_scatter tp"] == 2 * (2 * layers + 1)
    assert sp["psum tp"] == 1 + 2 * layers + 1  # softmax sum; gradients of the norm weights


def test_sequence_that_does_not_divide():
    config = dataclasses.replace(CONFIG, sequence_parallel=True)
    mesh = Mesh(tp=2)
    params = split(init(config, Mesh(), 0), model.layouts(config, mesh))[0]
    with pytest.raises(ValueError, match="got sequences of 11, wanted a multiple of tp=2"):
        tokens = torch.zeros(2, 11, dtype=torch.int64)
        model.logits(params, tokens, config, Axes(mesh))


@pytest.mark.parametrize("mesh", [*MESHES[1:], Mesh(fsdp=4, tp=2)], ids=str)
def test_initial_values_do_not_depend_on_the_mesh(mesh):
    whole = init(CONFIG, Mesh(), key=7)
    shards = split(whole, model.layouts(CONFIG, mesh))
    for rank in range(mesh.size):
        mine = init(CONFIG, mesh, key=7, rank=rank)
        for path, got, wanted in zip(tree.paths(mine), tree.leaves(mine), tree.leaves(shards[rank]), strict=True):
            assert torch.equal(got, wanted), f"{path} on rank {rank}"
