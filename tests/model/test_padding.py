"""Padding takes part in nothing: text beside any amount of it, with any ids in it, is as the text alone."""

import functools
import warnings

import numpy as np
import pytest
import torch

from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.data import Batches, Blend, EvaluationBatches, SourceBatches, pack
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.statistics import padding_of
from fmegatron.optim.guard import Spike
from fmegatron.testing import simulate
from tests.fresh_state import fresh_state

B, TEXT, V, F64 = 4, 6, 20, torch.float64
ROUTER = nn.Router(4, 2, normalised=True)
GROUPS = nn.Router(4, 1, "sigmoid", groups=2, top_groups=1, group_best=1)
LOSSES = {"sequence_balance": 0.3, "balance": 0.2, "z_loss": 0.1}
BIAS = {"choice_bias": True, "bias_rate": 0.5}
EXPERTS = {
    "dropless": model.MoE(ROUTER, 6, **LOSSES),
    "groups, a bias, shared": model.MoE(GROUPS, 6, model.MLP(6), **BIAS, **LOSSES),
    "in chunks": model.MoE(ROUTER, 6, chunks=2, **LOSSES),
    "capacity": model.MoE(ROUTER, 6, capacity=1.0, **BIAS, **LOSSES),
    "room for the text and no more": model.MoE(ROUTER, 6, rows=B * TEXT * 2, **LOSSES),
}


def decoder(moe, mtp=False):
    norm, attention = model.RMSNorm(), model.Attention(2, 2, 4)
    block = (model.Part("attention", attention, norm), model.Part("mlp", moe, norm))
    how = {"vocab_multiple": 4, "precision": Precision.fp64(), "mtp": model.MTP(block) if mtp else None}
    return model.Decoder(V, 8, (block,), 32, norm, **how)


def padded(length, stated, filler):
    """The same text in rows of this length."""
    g, more = torch.Generator().manual_seed(0), length - TEXT
    real = (torch.arange(length) < TEXT).expand(B, -1)
    batch = {name: torch.randint(0, V, (B, TEXT), generator=g) for name in ("tokens", "labels")}
    behind = torch.randint(0, V, (B, more), generator=torch.Generator().manual_seed(filler))
    batch = {name: torch.cat([x, behind], 1) for name, x in batch.items()}
    return batch | ({"padding": ~real} if stated == "padding" else {"documents": torch.where(real, 0, -1)})


def stepped(of, batch, mesh=Mesh(), n=1):  # noqa: B008  a frozen value
    """(metrics, parameters) after a step of SGD and the rule behind it."""
    how, sgd = DataParallel(("dp", "fsdp", "ep"), *[("fsdp",)] * 3), optim.sgd(1.0)
    axes, specs = Axes(mesh, data=mesh.axes(how.tokens)), model.specs(of, mesh, strategy=how)
    loss_fn = functools.partial(model.loss, decoder=of, axes=axes)
    after = functools.partial(model.post_update, decoder=of)
    more = {"strategy": how, "clip_norm": None, "microbatches": n, "twice": n > 1, "post_update": after}
    train = step.build_train_step(loss_fn, sgd, tree.layouts(specs), axes, **more)
    rows = {k: how.batch_layout(tuple(x.shape), x.dtype, mesh, n) for k, x in batch.items()}
    layouts = (tree.layouts(step.state_specs(specs, sgd, how)), rows)
    params, g = init(of, Mesh(), 0), torch.Generator().manual_seed(1)
    params = tree.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=g, dtype=F64), params)
    state, metrics = simulate(train, mesh, fresh_state(params, sgd), batch, layouts=layouts).globals()
    return metrics, tree.leaves(state.params)


def equal(one, other, n=1):
    """Of two steps, the first in n microbatches, of whose loads "imbalance" is a mean."""
    (metrics, params), (wanted, like) = one, other
    assert metrics.keys() == wanted.keys()
    for name in metrics if n == 1 else metrics.keys() - {"imbalance"}:
        torch.testing.assert_close(metrics[name], wanted[name], rtol=1e-10, atol=1e-12, msg=name)
    assert all(torch.allclose(x, y, rtol=1e-10, atol=1e-12) for x, y in zip(params, like, strict=True))


WHERE = {  # how padding is stated, mesh, microbatches, whether tokens further ahead are predicted
    "dropless": ("padding", Mesh(), 1, False),
    "groups, a bias, shared": ("documents", Mesh(ep=2), 2, False),
    "in chunks": ("documents", Mesh(), 1, True),
    "capacity": ("padding", Mesh(ep=2), 1, False),
    "room for the text and no more": ("padding", Mesh(), 2, False),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", EXPERTS)
def test_as_the_text_alone(name):
    """Losses, counts, loads and the bias that they move, gradients; nothing overflows."""
    stated, mesh, n, mtp = WHERE[name]
    of = decoder(EXPERTS[name], mtp)
    equal(stepped(of, padded(2 * TEXT, stated, 1), mesh, n), stepped(of, padded(TEXT, stated, 0)), n)


@pytest.mark.medium
def test_what_was_wrong_before_is_seen_by_this():
    """Unstated padding does change all of it."""
    of = decoder(EXPERTS["groups, a bias, shared"])
    alone, other = (stepped(of, {k: x for k, x in padded(n, "padding", 1).items() if k != "padding"}) for n in (6, 12))
    with pytest.raises(AssertionError):
        equal(other, alone)


def test_rows_that_are_added_are_padding():
    """By sources of short items, evaluations whose windows fill no batch, plans of documents, and blends of these."""
    ids = np.arange(1, 60) % V
    items = [ids[: 3 + i % 5] for i in range(12)]
    short = SourceBatches(items, 4, 8, 0)
    assert torch.equal(padding_of(short.at(0)), short.at(0)["tokens"] == 0)
    last = EvaluationBatches(ids, 4, 8, documents=19).at(1)
    assert torch.equal(padding_of(last).all(1), torch.tensor([False, False, False, True]))
    packed = Batches(ids, 4, 8, seed=0, packing=pack(np.array([0, 7, 10, 21, 22, 40]), 8))
    batch = packed.at(0)
    assert torch.equal(padding_of(batch), batch["documents"] < 0) and padding_of(batch).any()
    both = Blend([(1, packed), (1, short)]).at(1)
    assert not (padding_of(both) & both["mask"]).any() and padding_of(both).any()
    for given in (short.at(0), last, batch, both):
        parts, _ = model.loss(init(OF, Mesh(), 0), given, OF, Axes(Mesh()))
        found = step.means(parts, Axes(Mesh()))
        assert found["router_z/count"] == (~padding_of(given)).sum() and found["lm/count"] == given["mask"].sum()


OF = decoder(model.MoE(ROUTER, 6, z_loss=0.1))


def test_padding_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"batch\['padding'\]: got torch.int64, wanted bool, True where"):
        model.loss(init(OF, Mesh(), 0), padded(8, "padding", 0) | {"padding": torch.zeros(B, 8).long()}, OF)


# ---- what a refused update moves -------------------------------------------------------------------------------------
GUARDS = {
    "a spike": lambda: optim.skip_nonfinite(optim.adamw(1e-3), spike=Spike(2.0, warmup=1)),
    "a spike, of an average": lambda: optim.skip_nonfinite(
        optim.averaged(optim.adamw(1e-3), 0.9), spike=Spike(2.0, warmup=1)
    ),
    "a spike, inside of another guard": lambda: optim.skip_nonfinite(
        optim.skip_nonfinite(optim.adamw(1e-3), spike=Spike(2.0, warmup=1))
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_refused_update_moves_no_bias(name):
    of, optimizer = decoder(model.MoE(ROUTER, 6, **BIAS)), GUARDS[name]()
    specs = model.specs(of, Mesh())

    def loss_fn(params, batch):
        parts, metrics = model.loss(params, {k: x for k, x in batch.items() if k != "times"}, of)
        return {"lm": step.mean(parts["lm"].total * batch["times"].mean(), parts["lm"].count)}, metrics

    train = step.build_train_step(
        loss_fn, optimizer, tree.layouts(specs), post_update=functools.partial(model.post_update, decoder=of)
    )
    state, moved = tree.init(step.state_specs(specs, optimizer), 0, 0), []
    for times in (1.0, 1.0, 1e4, 1.0):
        before = tree.leaves(state.params)
        given = padded(TEXT, "padding", 0) | {"times": torch.full((B,), times, dtype=F64)}
        state, _ = train(state, given)
        pairs = zip(tree.paths(state.params), before, tree.leaves(state.params), strict=True)
        moved.append({path for path, x, y in pairs if not torch.equal(x, y)})
    assert not moved[2] and all("blocks/mlp/choice_bias" in some and len(some) > 1 for some in moved[:2] + moved[3:])


# ---- shares of the step before ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_balance_by_the_loads_of_the_step_before():
    """Shares are those of the text of all microbatches and ranks, equal ones at first; steps go by them."""
    of, batch = decoder(model.MoE(ROUTER, 6, balance=0.3, balance_of="step before")), padded(2 * TEXT, "padding", 0)
    metrics, params = stepped(of, batch, Mesh(ep=2), 2)
    shares = dict(zip(tree.paths(init(of, Mesh(), 0)), params, strict=True))["blocks/mlp/shares"][0]
    of_batch, alone = decoder(model.MoE(ROUTER, 6, balance=0.3, **BIAS)), padded(TEXT, "padding", 0)
    start, g = init(of, Mesh(), 0), torch.Generator().manual_seed(1)
    start = tree.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=g, dtype=F64), start)
    mlp = {k: x for k, x in start["blocks"]["mlp"].items() if k != "shares"}
    plain = {**start, "blocks": {**start["blocks"], "mlp": {**mlp, "choice_bias": torch.zeros(1, 4, dtype=F64)}}}
    load = model.loss(plain, alone, of_batch)[1]["load"]["blocks"]["mlp"][0]
    torch.testing.assert_close(shares, load.double() / load.sum())
    assert metrics["balance/count"] == B * TEXT and (init(of, Mesh(), 0)["blocks"]["mlp"]["shares"] == 1 / 4).all()
    with pytest.raises(ValueError, match="MoE.balance_of: got 'microbatch', wanted 'batch' or 'step before'"):
        model.MoE(ROUTER, 6, balance_of="microbatch")


def test_what_couples_the_rows_of_a_microbatch_is_said():
    """Room that all its tokens share; nothing else of a decoder, and nothing with one microbatch."""
    full, free = decoder(EXPERTS["room for the text and no more"]), decoder(EXPERTS["capacity"])
    with pytest.warns(RuntimeWarning, match="microbatches=2, and MoE.rows=48, the room .* depends on their number"):
        model.build(full, optim.sgd(1.0), Mesh(), (4, 8), microbatches=2, twice=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.build(full, optim.sgd(1.0), Mesh(), (4, 8))
        model.build(free, optim.sgd(1.0), Mesh(), (4, 8), microbatches=2, twice=True)


@pytest.mark.medium
def test_a_microbatch_of_padding_has_no_imbalance():
    """What packing adds in whole rows: the mean over the other microbatches, and not NaN."""
    of, mesh = model.Decoder(13, 8, ((model.Part("moe", model.MoE(nn.Router(4, 2), 6)),),), 8), Mesh(dp=2)
    batch = {"tokens": torch.arange(24).view(6, 4) % 13, "labels": torch.arange(1, 25).view(6, 4) % 13}
    batch["padding"] = torch.zeros(6, 4, dtype=torch.bool)
    found = []
    for n, rows in ((3, 6), (2, 4)):  # the last microbatch of 3 is padding
        batch["padding"][4:] = True
        given, specs, sgd = {k: x[:rows] for k, x in batch.items()}, model.specs(of, mesh), optim.sgd(0.1)
        train = step.build_train_step(lambda p, b: model.loss(p, b, of), sgd, specs, microbatches=n)
        layouts = {k: DataParallel().batch_layout(tuple(x.shape), x.dtype, mesh, n) for k, x in given.items()}
        state = tree.init(step.state_specs(model.specs(of, Mesh()), sgd), 0, 0)
        both = (tree.layouts(step.state_specs(specs, sgd)), layouts)
        found.append(simulate(train, mesh, state, given, layouts=both).metrics["imbalance"])
    assert found[0] == found[1] >= 1


@pytest.mark.parametrize("name", ["loss_mask", "attention_mask"])
def test_a_mask_under_another_name_is_refused(name):
    of = model.llama(vocab_size=13, dim=8, layers=1, heads=2, kv_heads=1, ffn_dim=8, max_seq=8)
    tokens = torch.arange(8).view(2, 4)
    batch, params = (
        {"tokens": tokens, "labels": tokens, name: torch.ones(2, 4)},
        tree.init(model.specs(of, Mesh()), 0, 0),
    )
    with pytest.raises(
        ValueError, match=rf"batch\['{name}'\]: got an entry for each token .* does not read, .* weighs .* 'mask'"
    ):
        model.loss(params, batch, of)
    model.token_losses(params, batch, of)  # whose mean is the user's
    del batch[name]
    wanted = model.loss(params, batch, of)[0]["lm"]
    given = model.loss(params, {**batch, "rewards": torch.ones(2)}, of)[0]["lm"]  # not for each token
    assert torch.equal(given.total, wanted.total) and given.count == wanted.count
