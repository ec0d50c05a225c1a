"""The model on real gloo ranks: equal to the simulated ranks, and one text from every rank under tensor parallelism."""

import dataclasses
import functools

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init
from fmegatron.step import jit, value_and_grad
from fmegatron.testing import simulate, split
from fmegatron.testing.compare_ranks import relative_error
from tests.model.test_reference import leaves_that_differ, make_batch
from tests.model.test_sharded import CONFIG, batch_layouts, make_step, raw_layouts
from tests.pairs import few, mixed


def whole_params(config):
    return leaves_that_differ(init(config, Mesh(), key=3))


def gradients_on_rank(rank, mesh, config):
    with connect(mesh) as world:
        layouts, axes = model.layouts(config, mesh), Axes(mesh, world)
        params = split(whole_params(config), layouts)[rank]
        batch = make_batch(config, batch_size=4)
        batch = split(batch, batch_layouts(batch, mesh))[rank]
        f = value_and_grad(lambda params, batch: model.loss(params, batch, config, axes))
        (loss, metrics), grads = f(params, batch)
        return grads, loss, metrics


CASES = mixed([Mesh(tp=2), Mesh(fsdp=2, tp=2), Mesh(dp=2, fsdp=2)], [False, True])


@pytest.mark.medium
@pytest.mark.parametrize(("mesh", "sequence_parallel"), few(2, CASES, map(str, CASES)))
def test_equal_to_simulated_ranks(ranks, mesh, sequence_parallel):
    config = dataclasses.replace(CONFIG, sequence_parallel=sequence_parallel, z_loss=1e-2)
    real = ranks.run(gradients_on_rank, mesh, config, ranks=mesh.size)
    batch = make_batch(config, batch_size=4)
    sim = simulate(
        make_step(config)(mesh), mesh, whole_params(config), batch,
        layouts=(model.layouts(config, mesh), batch_layouts(batch, mesh)), out_layouts=raw_layouts(config, mesh),
    )  # fmt: skip
    for got, wanted in zip(real, sim.outputs, strict=True):
        for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(wanted), strict=True):
            assert relative_error(a, b) <= 1e-12, path


def text_on_rank(rank, mesh, config, temperature, compiled):
    with connect(mesh) as world:
        layouts = model.layouts(config, mesh)
        params = split(whole_params(config), layouts)[rank]
        prompt = make_batch(config, batch_size=2)["tokens"][:, :4]
        options = {"compile": functools.partial(jit, world=world, backend="aot_eager", check=False)} if compiled else {}
        writer = model.inference(params, config, Axes(mesh, world), **options)
        texts = model.generate(writer, prompt, 7, key=11, temperature=temperature, top_p=0.95)
        scores = model.score(writer, prompt[:, :2], prompt[:, 2:])
        return texts, torch.stack([one.log_likelihoods for one in scores])


TEXTS = [(mesh, False, t) for mesh in (Mesh(tp=2), Mesh(fsdp=2), Mesh(fsdp=2, tp=2)) for t in (0.0, 1.2)]
TEXTS.append((Mesh(tp=2), True, 1.2))


@pytest.mark.parametrize(("mesh", "compiled", "temperature"), few(2, TEXTS, map(str, TEXTS)))
def test_every_rank_of_every_mesh_writes_the_same_text(ranks, mesh, compiled, temperature):
    config = dataclasses.replace(CONFIG, sequence_parallel=True)  # ignored while sampling
    wanted = text_on_rank(0, Mesh(), config, temperature, False)
    for got in ranks.run(text_on_rank, mesh, config, temperature, compiled, ranks=mesh.size):
        assert torch.equal(got[0], wanted[0])
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-12, atol=1e-12)
