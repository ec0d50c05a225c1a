"""What dims mean stays known where arrays are placed, computed and returned, and is asked for where it is not known."""

import pytest
import torch

from fmegatron import model, optim, step, tree
from fmegatron.collectives import connect
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.loop.resume import _by_dims_now
from fmegatron.step.signature import signature_of
from fmegatron.tree import labels

F32 = torch.float32
SHAPES = {"blocks": {"ln": (2, 4), "w": (2, 4, 4)}, "table": (5, 3), "v": (7,)}
MATRICES = {"blocks/w", "table"}
MESHES = [(Mesh(), None), (Mesh(fsdp=2), "zero3"), (Mesh(fsdp=3), "zero3"), (Mesh(dp=2), "replicated")]


def specs_on(mesh, strategy=None):
    return tree.specs(SHAPES, mesh, init=1.0, stacked="blocks", strategy=strategy)


def decayed(params):
    """Which leaves that began with ones do not have ones."""
    leaves = zip(tree.paths(params), tree.leaves(params), strict=True)
    return {path for path, x in leaves if x.numel() and float(x.reshape(-1)[0]) != 1}


OPTIMIZERS = {
    "adamw": lambda: optim.adamw(1.0, weight_decay=0.5),
    "lion": lambda: optim.lion(1.0, weight_decay=0.5),
    "grouped": lambda: optim.grouped(1.0, [], weight_decay=0.5, adam=optim.scale_by_adam()),
}


@pytest.mark.parametrize(("mesh", "strategy"), MESHES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_were_computed_decay_as_their_state_knows(name, mesh, strategy):
    opt = OPTIMIZERS[name]()
    state = tree.init(step.state_specs(specs_on(mesh, strategy), opt), key=0, rank=0)
    computed = tree.map(lambda x: x.clamp(-9, 9), state.params)  # was: flat ranges did not decay, stacks of norms did
    after, _ = opt.update(tree.map(torch.zeros_like, computed), state.opt, computed)
    assert decayed(after) == MATRICES
    assert all(tree.layout_of(x) is None for x in [*tree.leaves(computed), *tree.leaves(after)])  # nothing is stated


def test_what_nothing_knows_is_asked_for_on_several_ranks():
    opt = optim.sgd(1.0, weight_decay=0.5)
    state = tree.init(step.state_specs(specs_on(Mesh(fsdp=2), "zero3"), opt), key=0, rank=0)
    computed, zeros = (tree.map(make, state.params) for make in (torch.clone, torch.zeros_like))
    with pytest.raises(ValueError, match=r"optimizer: table: got a parameter whose layout is not known.*fsdp2.*place"):
        opt.update(zeros, state.opt, computed)
    known = tree.place(zeros, state.params)
    assert decayed(opt.update(known, state.opt, computed)[0]) == MATRICES  # gradients know it, too
    for right in (optim.sgd(1.0), optim.sgd(1.0, weight_decay=0.5, decay=["w"])):
        right.update(tree.map(torch.zeros_like, computed), state.opt, computed)
    one = tree.map(torch.clone, tree.init(specs_on(Mesh()), key=0, rank=0))
    state = tree.init(step.state_specs(specs_on(Mesh()), opt), key=0, rank=0)
    assert decayed(opt.update(tree.map(torch.zeros_like, one), state.opt, one)[0]) == {*MATRICES, "blocks/ln"}


def test_placed_by_a_layout_that_does_not_say_it():
    x = tree.init(specs_on(Mesh()), key=0, rank=0)["blocks"]["ln"]
    bare = Layout((2, 4), F32, Mesh())
    assert tree.place({"x": x}, bare)["x"] is x and not labels.is_matrix(x)  # was: forgotten, in the state as well
    assert labels.labelled(x, bare) is x and not labels.is_matrix(x)
    y = tree.place({"y": torch.ones(2, 4)}, bare)["y"]
    assert tree.place({"y": y}, bare.replace(lead=1))["y"] is y and not labels.is_matrix(y)
    with pytest.raises(ValueError, match="known to be"):
        tree.place({"y": y}, bare.replace(lead=2))
    other = labels.labelled(y, bare.replace(lead=2))
    assert other is not y and tree.layout_of(y).lead == 1


def test_of_another_number_of_dims_none_is_known_to_count():
    stack = Layout((3, 4, 6), F32, Mesh(tp=2), (None, None, Split("tp", 2)), lead=1)
    one = stack.replace(shape=(4, 6), spec=(None, Split("tp", 2)))
    assert (one.lead, one.is_matrix, one.beside) == (0, True, (3, 3))  # was: a vector
    assert stack.replace(dtype=torch.bfloat16).lead == 1 and stack.replace(shape=(5, 4, 6)).lead == 1
    assert stack.replace(shape=(3, 2, 4, 6), spec=(), lead=2).lead == 2
    for lead in (-1, 4):
        with pytest.raises(ValueError, match=f"got lead={lead}, wanted how many of its dims"):
            stack.replace(lead=lead)
    assert tree.ArraySpec(Layout((), F32, Mesh()), stacked=True).layout.lead == 0


def test_adapters_are_no_fused_matrices_by_chance():
    of = model.llama(50, 8, 2, 2, 1, 8, 16)
    base = model.specs(of, Mesh())
    wide = base["blocks"]["attention"]["wqkv"].shape[-1]
    specs = model.lora(of, base, match="wqkv", rank=wide, alpha=1.0)
    assert [x.layout.beside for x in tree.leaves(specs)] == [()] * 7
    assert {x.layout.lead for x in tree.leaves(specs)} == {1}


@pytest.mark.parametrize("donate", [0, None], ids=["donated", "new"])
def test_a_step_that_is_called_again_decays_the_same(donate):
    opt = optim.sgd(1.0, weight_decay=0.5)

    def by_layers(state, batch):
        params, of = opt.update(tree.map(torch.zeros_like, state.params), state.opt, state.params)
        params = tree.map(lambda x: torch.stack([y * batch for y in x.unbind(0)]), params)
        return step.State(state.step + 1, params, of), {}

    state = tree.init(step.state_specs(specs_on(Mesh()), opt), key=0, rank=0)
    jitted = step.jit(by_layers, donate=donate, world=connect(Mesh()), backend="eager")
    for _ in range(3):
        state, _ = jitted(state, torch.ones(()))
    assert decayed(state.params) == MATRICES


def test_graphs_are_of_what_is_known_of_dims():
    known, bare = torch.ones(2, 4), torch.ones(2, 4)
    tree.place([known], Layout((2, 4), F32, Mesh(), lead=1))
    assert signature_of([known]) != signature_of([bare])  # was: the first call decided for the others
    assert signature_of([tree.place([bare], Layout((2, 4), F32, Mesh()))[0]]) == signature_of([torch.ones(2, 4)])


def test_a_resume_names_what_letters_decided():
    of = model.llama(50, 64, 2, 4, 2, 96, 16)
    specs = model.specs(of, Mesh())
    assert _by_dims_now(step.state_specs(specs, optim.adamw(1e-3))) == ()
    (apart,) = _by_dims_now(step.state_specs(specs, optim.muon(1e-3)))
    assert "parts=()" in apart and apart.endswith("apart for blocks/attention/wqkv, blocks/mlp/w_gate_up")
    sinks = specs["blocks"]["attention_norm"]
    (other,) = _by_dims_now(step.state_specs({"blocks": {**specs["blocks"], "sinks": sinks}}, optim.adamw(1e-3)))
    assert other.endswith("by names -> by dims, other for blocks/sinks")
