"""Proof 4, measured: the most memory that one rank's step takes above its state is what the formulas say.

The lowered and donated step of rank 0 runs on process groups that move nothing (torch's "fake" backend): every buffer
has its size on that mesh, whatever the values are. Few tokens and wide layers, so that weights and gradients are the
memory; what activations take is bounded by ACTIVATIONS.
"""

import contextlib
import math

import pytest
import torch

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.step import Overlap, build_train_step, jit, state_specs
from fmegatron.step.costs import state_bytes
from fmegatron.step.layer import CompiledLayer, compiled_layer
from fmegatron.testing.measure import peak_bytes
from tests.pairs import few
from tests.step import tiny
from tests.step.gathered import gathered_bytes
from tests.step.strategies import STRATEGIES

MESHES = [Mesh(fsdp=4), Mesh(dp=2, fsdp=2), Mesh(dp=2, fsdp=2, tp=2)]
LAYERS, TOKENS = 4, 4
CONFIG = model.llama(vocab_size=64, dim=256, layers=LAYERS, heads=4, kv_heads=4, ffn_dim=384, max_seq=TOKENS)
OPTIMIZER = optim.sgd(1e-3)
TOGETHER = 1 << 16  # bytes: the blocks' leaves are buckets of their own, as those of large models are
ACTIVATIONS = 4 * TOKENS * CONFIG.dim * (LAYERS + 6)  # fp32: the layers' inputs, and 6 values per channel of a layer


def in_blocks(path):
    return path.startswith("blocks/")


def of_params(layouts, keep=lambda path: True):
    """(bytes of the leaves on rank 0, those of the largest one)."""
    sizes = [4 * math.prod(x.local_shape(0)) for path, x in zip(tree.paths(layouts), tree.leaves(layouts), strict=True)
             if keep(path)]  # fmt: skip
    return sum(sizes), max(sizes)


def formula(strategy, mesh, microbatches):
    """Bytes above the state. g: gradients as parameters lie; A: as they are accumulated.

    A (with microbatches) and the largest of
    g(1 - 1/L) + 2 layers   sharded parameters, the last layer's backward: weights and gradients, or a buffer, whole
    g + largest leaf        the gradients of layers are stacked leaf by leaf
    """
    specs = model.specs(CONFIG, mesh, strategy=strategy)
    layouts = tree.layouts(specs)
    g, leaf = of_params(layouts)
    waiting = state_bytes(specs, OPTIMIZER).grads if microbatches > 1 else 0
    if mesh.extent(tuple(a for a in strategy.params if a in mesh)) == 1:
        return waiting + g + leaf
    blocks, _ = of_params(layouts, in_blocks)
    return waiting + max(g - blocks // LAYERS + 2 * layer_bytes(mesh), g + leaf)


def limit(strategy, mesh, microbatches):
    """The formula, the bound of the activations, and copies of the leaves that share a buffer on the wire."""
    layouts = tree.leaves(model.layouts(CONFIG, mesh, strategy=strategy))
    shared = sum(size for size in (4 * math.prod(x.local_shape(0)) for x in layouts) if size <= TOGETHER)
    return formula(strategy, mesh, microbatches) + ACTIVATIONS + shared


def layer_bytes(mesh):
    """Bytes of one layer that is whole over the data axes."""
    whole = model.layouts(CONFIG, mesh, strategy=STRATEGIES["replicated"])
    return of_params(whole, in_blocks)[0] // LAYERS


@pytest.fixture
def run_on():
    """Function -> (step that has run once, its state, a batch): of rank 0 of a mesh."""

    def make(strategy, mesh, microbatches=1, backend="eager", overlap=False):
        world = worlds.enter_context(tiny.fake_ranks(mesh))
        specs, axes = model.specs(CONFIG, mesh, strategy=strategy), Axes(mesh)
        layouts = tree.layouts(specs)

        def loss(params, batch):
            return model.loss(params, batch, CONFIG, axes, "inputs")

        options = {"strategy": strategy, "microbatches": microbatches, "bucket_bytes": TOGETHER}
        step = build_train_step(loss, OPTIMIZER, layouts, axes, **options)
        run = jit(step, donate=0, world=world, backend=backend, overlap=overlap, check=False)
        tokens = torch.zeros(microbatches, TOKENS, dtype=torch.int64)
        batch = {"tokens": tokens, "labels": tokens}
        state, _ = run(tree.init(state_specs(specs, OPTIMIZER, strategy), 0, 0), batch)
        return run, state, batch

    with contextlib.ExitStack() as worlds:
        yield make


def peak(run, state, batch):
    return peak_bytes(lambda: run(state, batch))


@pytest.mark.medium
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("mesh", [MESHES[1], *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES[::2])], ids=str)
@pytest.mark.parametrize("name", few(1, [(name,) for name in STRATEGIES], STRATEGIES))
def test_peak(name, mesh, microbatches, run_on):
    setting = STRATEGIES[name], mesh, microbatches
    assert 0.98 * formula(*setting) <= peak(*run_on(*setting)) <= limit(*setting)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicated", "zero1", "zero3"])
def test_peak_when_compiled(name, run_on):
    """Inductor orders and fuses, and needs no more than one leaf of a layer, whole, while it is laid out."""
    setting = STRATEGIES[name], MESHES[1], 1
    whole = model.layouts(CONFIG, MESHES[1], strategy=STRATEGIES["replicated"])
    leaf = of_params(whole, in_blocks)[1] // LAYERS
    assert 0.9 * formula(*setting) <= peak(*run_on(*setting, backend="inductor")) <= limit(*setting) + leaf


@pytest.mark.medium
@pytest.mark.parametrize(
    "overlap", [False, True, Overlap(peak=None)], ids=["in order", "by default", "without a limit"]
)
def test_weights_of_two_layers_at_most(overlap, run_on):
    """ZeRO-3: beside the shards two layers are whole at a time; that the next one is on its way costs no third."""
    mesh = MESHES[0]
    run, state, batch = run_on(STRATEGIES["zero3"], mesh, overlap=overlap)
    assert 0 < gathered_bytes(run.graph("overlap")) <= 2 * layer_bytes(mesh)
    # Without a limit weights come early, gradients wait a layer longer.
    late = 0 if isinstance(overlap, bool) else 2 * layer_bytes(mesh)
    assert peak(run, state, batch) <= limit(STRATEGIES["zero3"], mesh, 1) + late


@pytest.mark.slow
@pytest.mark.long
def test_a_layer_that_stays_gathered_is_seen(run_on, monkeypatch):
    """What the formulas would not notice, they would not prove."""

    kept, run = [], CompiledLayer.__call__

    def keeps_one(layer, x, shards, *rest):
        if kept:
            return run(layer, x, shards, *rest)
        kept.append(layer.prepare(shards))
        return run(compiled_layer(save="inputs")(layer.fn), x, kept[0], *rest)

    monkeypatch.setattr(CompiledLayer, "__call__", keeps_one)
    strategy, mesh = STRATEGIES["zero3"], MESHES[0]
    assert peak(*run_on(strategy, mesh)) > limit(strategy, mesh, 1) + 0.5 * layer_bytes(mesh)


@pytest.mark.slow
def test_a_gradient_that_stays_whole_is_seen(run_on):
    """ZeRO-1, which accumulates whole gradients, in the place of ZeRO-2."""
    assert peak(*run_on(STRATEGIES["zero1"], MESHES[1], 2)) > 1.4 * limit(STRATEGIES["zero2"], MESHES[1], 2)
