"""A dense checkpoint restored as a mixture of experts computes what the dense model did, on another mesh too."""

import pytest
import torch

from fmegatron import checkpoint, interop, model, nn, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from tests.definition import loss_of

SIZES = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 24, "max_seq": 8}
EXPERTS = 4


def specs_of(of, mesh):
    return step.state_specs(model.specs(of, mesh), optim.adamw(1e-3))


def states(mesh):
    """(dense model, mixture, specs of the state of each)."""
    dense = model.llama(32, **SIZES)
    sparse = model.llama(32, **SIZES, mlp=model.MoE(nn.Router(EXPERTS, 2, normalised=True), 24))
    return dense, sparse, *(specs_of(of, mesh) for of in (dense, sparse))


def test_it_computes_what_the_dense_model_did(tmp_path):
    dense, sparse, specs, wanted = states(Mesh())
    state = tree.map(lambda x: x + 1 if x.is_floating_point() else x, tree.init(specs, 0, 0))
    state = state._replace(params=tree.init(specs, 0, 0).params)
    checkpoint.save(tmp_path / "dense", state, tree.layouts(specs))
    initial = tree.init(wanted, 1, 0)
    rules = interop.upcycle(EXPERTS)
    found = checkpoint.restore(tmp_path / "dense", tree.layouts(wanted), rules=rules, initial=initial)
    g = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(0, 32, (2, 8), generator=g) for name in ("tokens", "labels")}
    losses = [loss_of(model.loss(s.params, batch, of, Axes(Mesh()))[0]) for s, of in ((state, dense), (found, sparse))]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.params["blocks"]["mlp"]["router"], initial.params["blocks"]["mlp"]["router"])
    moments = {path: x for path, x in zip(tree.paths(found.opt), tree.leaves(found.opt), strict=True) if "/up" in path}
    assert moments and all((x == 1).all() for x in moments.values())


def test_each_rank_of_experts_reads_its_own(tmp_path):
    _, sparse, specs, whole = states(Mesh())
    checkpoint.save(tmp_path / "dense", tree.init(specs, 0, 0), tree.layouts(specs))
    wanted = specs_of(sparse, Mesh(ep=2))
    rules, at = interop.upcycle(EXPERTS), tree.layouts(wanted)
    everything = checkpoint.restore(
        tmp_path / "dense", tree.layouts(whole), rules=rules, initial=tree.init(whole, 1, 0)
    )
    for rank in range(2):
        initial = tree.init(wanted, 1, rank)
        found = checkpoint.restore(tmp_path / "dense", at, rules=rules, initial=initial, rank=rank)
        half = everything.params["blocks"]["mlp"]["up"].chunk(2, 1)[rank]
        assert torch.equal(found.params["blocks"]["mlp"]["up"], half)


def test_at_least_one_expert():
    with pytest.raises(ValueError, match="upcycle: got 0 experts"):
        interop.upcycle(0)
