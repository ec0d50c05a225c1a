"""A rate that can be changed: a leaf of the state, one compiled step before and after, in checkpoints, on any mesh."""

import pytest
import torch

from fmegatron import checkpoint, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.optim import contrib
from fmegatron.testing import assert_parity
from tests.optim.table import assert_same, grads_of, make_params, make_specs
from tests.step import tiny

F64 = [torch.float64] * 4


@pytest.mark.parametrize(
    "make",
    [
        optim.adamw,
        optim.sgd,
        optim.lion,
        contrib.adafactor,
        lambda rate: optim.muon(rate, rules=[("embed", optim.Group(lr=0.5)), ("scale", optim.Group(rate=1e-3))]),
        lambda rate: optim.skip_nonfinite(optim.averaged(optim.adamw(rate), 0.9)),
    ],
)
def test_a_set_rate_is_that_rate(make):
    """Bit for bit the update of an optimizer that was made with it."""
    params = make_params([torch.float32] * 4)
    settable, plain = make(optim.settable(3e-3)), make(1e-3)
    state = optim.set_rate(settable.init(params), 1e-3)
    got, new = settable.update(grads_of(params), state, params)
    wanted, _ = plain.update(grads_of(params), plain.init(params), params)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, msg=path)
    assert [x for x in tree.leaves(new) if x.shape == () and x == 1e-3]


def test_a_new_rate_compiles_nothing_and_is_in_the_checkpoint(tmp_path):
    layouts = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, tiny.ONE), tiny.mlp_params())
    optimizer = optim.adamw(optim.settable(1e-2))
    run = step.jit(step.build_train_step(tiny.mlp_loss(), optimizer, layouts, Axes(tiny.ONE)), backend="eager")
    specs = step.state_specs(tree.map(lambda x: tree.ArraySpec(x, tree.Normal(0.3)), layouts), optimizer)
    state = tree.init(specs, key=0, rank=0)
    state, _ = run(state, tiny.mlp_batch())
    kept = optim.set_rate(state, 0.0)
    frozen, _ = run(kept, tiny.mlp_batch())
    assert len(run.cache) == 1 and state.opt["rate"]["settable"] == 1e-2
    assert_same(frozen.params, state.params)
    checkpoint.save(tmp_path / "state", kept, tree.layouts(specs))
    back = checkpoint.restore(tmp_path / "state", tree.layouts(specs))
    assert back.opt["rate"]["settable"] == 0.0
    assert_same(optim.set_rate(back, 1e-2), state)


def test_on_a_mesh():
    mesh = Mesh(fsdp=2, tp=2)
    specs = make_specs(F64, mesh)
    layouts = tree.layouts(specs)
    optimizer = optim.averaged(optim.adamw(optim.settable(1e-2)), 0.9)
    state = optimizer.init(make_params(F64))

    def make(mesh):
        return lambda params, state, grads: optimizer.update(grads, state, params)

    of_state = tree.layouts(optimizer.init(specs))
    ins = (layouts, of_state, layouts)
    params = make_params(F64)
    assert_parity(make, mesh, params, state, grads_of(params), layouts=ins, out_layouts=(layouts, of_state))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), optim.cosine(1e-3, 10), True, "3e-3"])
def test_no_rate(bad):
    with pytest.raises(ValueError, match="settable: got .*, wanted a finite number of 0 or more"):
        optim.settable(bad)


def test_errors():
    state = optim.adamw(1e-3).init({"w": torch.ones(2)})
    with pytest.raises(ValueError, match=r"set_rate: got .* without a rate in it, wanted .*optim.settable"):
        optim.set_rate(state, 1e-3)
    with pytest.raises(ValueError, match="Group: rate: got a settable rate, wanted a number or a schedule"):
        optim.Group(rate=optim.settable(1e-3))


@pytest.mark.parametrize("make", [optim.chain, optim.optimizer])
def test_transforms_have_names(make):
    with pytest.raises(ValueError, match=r"got 2 arguments without a name, wanted each .*adam=optim.scale_by_adam\(\)"):
        make(optim.scale_by_adam(), optim.scale_by_learning_rate(1e-3))
    with pytest.raises(ValueError, match="inner: got an Optimizer.*, wanted a Transform; give scale_by_adam"):
        make(inner=optim.adamw(1e-3))
