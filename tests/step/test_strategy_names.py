"""Data axes of any name: the decoder trains on `data` and `shard` as on dp and fsdp, bit for bit."""

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import build_train_step, check, state_specs
from fmegatron.testing import Ranks, simulate
from tests.step import tiny

CONFIG = tiny.config_with(layers=1)


def trained(mesh, strategy):
    """(metrics, global state, findings of the check) of one step."""
    axes = Axes(mesh, data=strategy.axes)
    specs = model.specs(CONFIG, mesh, strategy=strategy)
    layouts, states = tree.layouts(specs), state_specs(specs, tiny.OPTIMIZER, strategy)

    def loss_fn(params, batch):
        return model.loss(params, batch, CONFIG, axes)

    step = build_train_step(loss_fn, tiny.OPTIMIZER, layouts, axes, strategy=strategy)
    batch = tiny.decoder_batch(CONFIG, rows=8)
    rows = tree.map(lambda x: strategy.batch_layout(tuple(x.shape), x.dtype, mesh), batch)
    state = Ranks(tree.init(states, key=0, rank=rank) for rank in range(mesh.size))
    ins = (tree.layouts(states), rows)
    sim = simulate(step, mesh, state, batch, layouts=ins, out_layouts=(ins[0], None))
    return sim.metrics, sim.globals()[0], check(step, *ins)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["replicated", "zero1", "zero3", "hsdp"])
def test_other_names_are_other_names_only(name):
    make = getattr(DataParallel, name)
    of, other = (("fsdp", "dp"), ("shard", "data")) if name == "hsdp" else (("dp", "fsdp"), ("data", "shard"))
    metrics, state, _ = trained(Mesh(dp=2, fsdp=2), make(*of))
    got, found, report = trained(Mesh(data=2, shard=2), make(*other))
    assert got == metrics and report.ok, str(report)
    for path, a, b in zip(tree.paths(found), tree.leaves(found), tree.leaves(state), strict=True):
        assert torch.equal(a, b), path


def test_layouts_are_the_same_with_other_names():
    """Rules name fsdp; of a strategy's axes the last one stands for it."""
    for name in ("zero1", "zero3"):
        make = getattr(DataParallel, name)
        wanted = model.layouts(CONFIG, Mesh(dp=2, fsdp=2), strategy=make())
        got = model.layouts(CONFIG, Mesh(data=2, shard=2), strategy=make("data", "shard"))
        names = {"dp": "data", "fsdp": "shard"}
        for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(wanted), strict=True):
            assert a.spec == tuple(e and tuple(names[n] for n in e) for e in b.spec), path
