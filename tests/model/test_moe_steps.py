"""Decoders with experts on simulated ranks equal one rank: losses, metrics, parameters after two steps, fp64, 1e-10."""

import dataclasses
import functools

import pytest
import torch

from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Mesh
from fmegatron.testing import assert_parity
from tests.pairs import few
from tests.step.proven import proven_and_equal

DATA = ("dp", "fsdp", "ep")
ZERO3 = DataParallel(DATA, *[("dp", "fsdp", "ep")] * 3)
HSDP = DataParallel(DATA, *[("fsdp",)] * 3)
V3 = nn.Router(8, 3, "sigmoid", normalised=True, scale=2.5, groups=4, top_groups=2, group_best=2)


def decoder(sequence_parallel=False, **of_moe):
    """Two blocks, the second with experts."""
    moe = model.MoE(**{"router": nn.Router(8, 2, normalised=True), "ffn_dim": 12, "balance": 0.01, **of_moe})
    sizes = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_seq": 8}
    return model.llama(
        48, **sizes, mlp=moe, precision=Precision.fp64(), sequence_parallel=sequence_parallel, vocab_multiple=8
    )


SHARED = {
    "router": V3,
    "shared": model.MLP(20),
    "choice_bias": True,
    "bias_rate": 0.01,
    "z_loss": 1e-3,
    "sequence_balance": 0.1,
}
CASES = {
    "ep2": (Mesh(ep=2), HSDP, decoder()),
    "ep4, ZeRO-3": (Mesh(ep=4), ZERO3, decoder(**SHARED)),
    "fsdp2 ep2": (Mesh(fsdp=2, ep=2), HSDP, decoder(**SHARED)),
    "dp2 ep2, ZeRO-3": (Mesh(dp=2, ep=2), ZERO3, decoder()),
    "experts over fsdp": (Mesh(dp=2, fsdp=2), ZERO3, decoder(ep=("fsdp",))),
    "ep2 tp2": (Mesh(ep=2, tp=2), HSDP, decoder(**SHARED)),
    "ep2 tp2, sequence parallel": (Mesh(ep=2, tp=2), HSDP, decoder(True, **SHARED)),
    "folded over ep and tp": (Mesh(dp=2, ep=2, tp=2), HSDP, decoder(True, ep=("ep", "tp"), **SHARED)),
    "folded over tp, in chunks": (Mesh(fsdp=2, tp=2), HSDP, decoder(True, ep=("tp",), chunks=2)),
    "in chunks": (Mesh(ep=2), ZERO3, decoder(chunks=2)),
    "capacity": (Mesh(dp=2, ep=2), HSDP, decoder(capacity=1.0)),
    "ep2 cp2": (Mesh(ep=2, cp=2), HSDP, decoder(**SHARED)),
    "experts over cp": (Mesh(fsdp=2, cp=2), ZERO3, decoder(ep=("cp",))),
    "folded over cp and tp": (Mesh(cp=2, tp=2), HSDP, decoder(True, ep=("cp", "tp"), **SHARED)),
}


def train_step(mesh, strategy, of, save=None, microbatches=1, optimizer=None):
    axes, layouts = Axes(mesh, data=strategy.tokens), model.layouts(of, mesh, strategy=strategy)
    loss = functools.partial(model.loss, decoder=of, axes=axes, save=save)
    how = {
        "strategy": strategy,
        "microbatches": microbatches,
        "post_update": functools.partial(model.post_update, decoder=of),
    }
    return step.build_train_step(lambda p, b: loss(p, b), optimizer or optim.adamw(1e-2), layouts, axes, **how)


def given(mesh, strategy, of, microbatches=1):
    """(specs of the state, layouts of the batch)."""
    specs = step.state_specs(model.specs(of, mesh, strategy=strategy), optim.adamw(1e-2), strategy)
    rows = strategy.batch_layout((8, 8), torch.int64, mesh, microbatches)
    return specs, {"tokens": rows, "labels": rows}


def values(specs):
    g = torch.Generator().manual_seed(0)
    state = tree.init(specs, 0, 0)
    batch = {name: torch.randint(0, 48, (8, 8), generator=g) for name in ("tokens", "labels")}
    return state, batch


BOTH = [(name, save) for name in CASES for save in (None, "inputs")]


@pytest.mark.parametrize(("name", "save"), few(1, BOTH, [f"{name}-{save}" for name, save in BOTH]))
def test_equal_to_one_rank_and_proven(name, save):
    mesh, strategy, of = CASES[name]
    specs, rows = given(mesh, strategy, of)
    one = Mesh(**dict.fromkeys(mesh.names, 1))
    state, batch = values(given(one, strategy, of)[0])
    make = functools.partial(train_step, strategy=strategy, of=of, save=save)
    found = proven_and_equal(make, mesh, state, batch, layouts=(tree.layouts(specs), rows), steps=2, floor=1e-12)
    assert found.sharded.metrics["imbalance"] > 1


# what the tokens of a batch do -> (router, shape of the tokens)
EDGES = {
    "one expert gets all, others no row": (nn.Router(8, 1, "sigmoid"), (8, 8)),
    "each token goes to all": (nn.Router(8, 8, normalised=True), (8, 8)),
    "one token on a rank": (nn.Router(8, 2, normalised=True), (4, 1)),
    "one document over all ranks": (nn.Router(8, 2, normalised=True), (4, 8)),
}
EDGE_MESHES = {"one token on a rank": Mesh(dp=2, ep=2), "one document over all ranks": Mesh(cp=2, ep=2)}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", few(1, [(name,) for name in EDGES], list(EDGES)))
def test_edges(name):
    """The bias sends all tokens to expert 3 where one is to get all."""
    (router, shape), mesh = EDGES[name], EDGE_MESHES.get(name, Mesh(ep=2, tp=2))
    of, one = decoder(router=router, choice_bias=True), Mesh(**dict.fromkeys(mesh.names, 1))
    g = torch.Generator().manual_seed(1)
    batch = {k: torch.randint(0, 48, shape, generator=g) for k in ("tokens", "labels")}
    if "document" in name:
        batch |= {"documents": torch.full(shape, 7), "positions": torch.arange(8).expand(shape).contiguous()}
    state = values(given(one, HSDP, of)[0])[0]
    if router.top_k == 1:
        state.params["blocks"]["mlp"]["choice_bias"][:, 3] = 100.0
    rows = {k: HSDP.batch_layout(tuple(x.shape), x.dtype, mesh) for k, x in batch.items()}
    make = functools.partial(train_step, strategy=HSDP, of=of)
    layouts = tree.layouts(given(mesh, HSDP, of)[0])
    found = assert_parity(make, mesh, state, batch, layouts=(layouts, rows), steps=2, floor=1e-12)
    imbalance = found.sharded.metrics["imbalance"]
    assert {1: imbalance == 8, 8: imbalance == 1}.get(router.top_k, imbalance > 1)


def test_experts_over_tp_want_sequence_parallelism():
    mesh = Mesh(tp=2)
    with pytest.raises(ValueError, match="MoE.ep: got .* set Decoder.sequence_parallel=True"):
        train = train_step(mesh, HSDP, decoder(ep=("tp",)))
        step.check(train, *given(mesh, HSDP, decoder(ep=("tp",))))


@pytest.mark.medium
@pytest.mark.parametrize("microbatches", [1, 2])
def test_biases_move_by_the_loads_of_the_full_batch(microbatches):
    of, one = decoder(**SHARED), Mesh(ep=1)
    state, batch = values(given(one, HSDP, of)[0])
    new, metrics = train_step(one, HSDP, of, microbatches=microbatches)(state, batch)
    assert "load" not in metrics and metrics["imbalance"] > 1
    axes = Axes(one, data=DATA)
    load = model.loss(state.params, batch, of, axes)[1]["load"]["blocks"]["mlp"]
    assert load.shape == (2, 8) and (load.sum(1) == batch["tokens"].numel() * V3.top_k).all()
    moved = new.params["blocks"]["mlp"]["choice_bias"] - state.params["blocks"]["mlp"]["choice_bias"]
    assert torch.equal(moved, 0.01 * (load.double().mean(1, keepdim=True) - load).sign())


def test_a_step_that_is_not_finite_moves_no_bias():
    of, one, guarded = decoder(**SHARED), Mesh(ep=1), optim.skip_nonfinite(optim.adamw(1e-2))
    state, batch = values(step.state_specs(model.specs(of, one, strategy=HSDP), guarded, HSDP))
    for scale, moves in ((1.0, True), (torch.nan, False)):
        state.params["final_norm"].mul_(scale)
        new, metrics = train_step(one, HSDP, of, optimizer=guarded)(state, batch)
        assert metrics["loss"].isfinite() == moves == new.params["blocks"]["mlp"]["choice_bias"].any()


def test_rates_that_cannot_be_meant():
    with pytest.raises(ValueError, match="MoE.bias_rate: got 0.1 with choice_bias=False"):
        decoder(bias_rate=0.1)
    of = decoder(**SHARED)
    with pytest.raises(ValueError, match="post_update: got metrics without 'load'"):
        model.post_update({}, {"loss": 1.0}, of)
    other = dataclasses.replace(of.blocks[1][1].mixer, bias_rate=0.5)
    second = (of.blocks[1][0], dataclasses.replace(of.blocks[1][1], mixer=other))
    with pytest.raises(ValueError, match="MoE.bias_rate: got .* in the blocks of one stack"):
        model.post_update({}, {}, dataclasses.replace(of, blocks=(of.blocks[0], second)))
