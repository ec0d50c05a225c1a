"""The average of the parameters: its formula, its beginning, and the parameters to evaluate with, on any mesh."""

import pytest
import torch

from fmegatron import optim, step, tree
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.optim.average import average_of
from fmegatron.testing import assert_parity
from tests.optim.table import assert_same, grads_of, make_params, make_specs, run

F64 = [torch.float64] * 4


def test_formula():
    plain, opt = optim.adamw(1e-2), optim.averaged(optim.adamw(1e-2), 0.8)
    params = make_params(F64)
    average, state, state_of_plain, own = params, opt.init(params), plain.init(params), params
    for i in range(3):
        params, state = opt.update(grads_of(params, i), state, params)
        own, state_of_plain = plain.update(grads_of(own, i), state_of_plain, own)
        average = tree.map(lambda a, p: 0.8 * a + (1 - 0.8) * p, average, own)
    assert_same(params, own)
    assert_same(average_of(state), average)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_begins_as_the_parameters(dtype):
    specs = make_specs([dtype] * 4)
    state = tree.init(step.state_specs(specs, optim.averaged(optim.adamw(1e-3), 0.9)), key=3, rank=0)
    assert_same(tree.map(lambda a: a.to(dtype), average_of(state.opt)), state.params)
    assert {a.dtype for a in tree.leaves(average_of(state.opt))} == {torch.float32}


def test_frozen_parameters_have_none_and_wrappers_are_looked_through():
    rules = [("embed", optim.Group(frozen=True))]
    opt = optim.skip_nonfinite(optim.averaged(optim.grouped(1e-2, rules, adam=optim.scale_by_adam()), 0.5))
    params = make_params(F64)
    new, opt_state = run(opt, params, opt.init(params), range(2))
    assert not any("embed" in path for path in tree.paths(average_of(opt_state)))
    state = step.State(torch.tensor(2), new, opt_state)
    found = step.averaged_params(state)
    assert torch.equal(found["embed"]["table"], params["embed"]["table"])
    assert not torch.equal(found["scale"], new["scale"])


@pytest.mark.parametrize("strategy", [DataParallel.zero1(), DataParallel.zero3(), DataParallel.hsdp("fsdp", "dp")])
def test_to_evaluate_with_on_a_mesh(strategy):
    """Sharded as the optimizer sees the parameters; whole where these are."""
    opt, mesh = optim.averaged(optim.adamw(1e-2), 0.7), Mesh(dp=2, fsdp=2)

    def specs_on(mesh):
        layout = Layout((8, 6), torch.float64, mesh)
        return {"w": tree.ArraySpec(strategy.params_layout(layout), tree.Normal(1.0))}

    one = {name: spec for name, spec in specs_on(Mesh()).items()}
    state = tree.init(step.state_specs(one, opt, strategy), key=0, rank=0)
    params, opt_state = opt.update(tree.map(torch.ones_like, state.params), state.opt, state.params)
    layouts = tree.layouts(step.state_specs(specs_on(mesh), opt, strategy))
    state = step.State(state.step, params, opt_state)
    assert_parity(lambda mesh: step.averaged_params, mesh, state, layouts=(layouts,), out_layouts=layouts.params)


def test_errors():
    with pytest.raises(ValueError, match="averaged: decay: got 1.0, wanted 0 <= decay < 1"):
        optim.averaged(optim.adamw(1e-3), 1.0)
    with pytest.raises(ValueError, match=r"average_of: got .* without an average, wanted .*optim.averaged\(optimizer"):
        average_of(optim.adamw(1e-3).init({"w": torch.ones(2)}))
