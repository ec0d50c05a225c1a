"""Every part of the loss, under every mask, in every mixer: the same gradient for any microbatches and on any mesh.

Each cell of the product is one of two. Invariant: loss, means and gradients are those of the definition, on one rank
with the whole batch at once. Coupled (docs/losses.md has the table): they are those of one rank with as many
microbatches, and with another number of them another thing.
"""

import functools
import itertools

import pytest
import torch

from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes, Precision, all_gather, enter, psum
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.mla import MLA
from fmegatron.model.mtp import ahead
from fmegatron.model.rope import Rope
from fmegatron.testing import simulate
from fmegatron.testing.compare_ranks import relative_error
from tests import pairs
from tests.definition import loss_of, mean_of
from tests.fresh_state import fresh_state

B, S, V, D, F64 = 12, 6, 22, 12, torch.float64
NORM, ROUTER = model.RMSNorm(), nn.Router(6, 2, normalised=True)
DATA = DataParallel(("dp", "fsdp", "ep"), *[("fsdp",)] * 3)
MESHES = {
    "one": Mesh(), "6 ep, tp": Mesh(ep=3, tp=2), "3 cp": Mesh(cp=3), "6 fsdp, tp": Mesh(fsdp=3, tp=2),
    "3 ep": Mesh(ep=3), "2 dp": Mesh(dp=2), "6 dp, cp": Mesh(dp=2, cp=3),
}  # fmt: skip


# ---- masks: batches of the same entries, so that one traced step serves all ------------------------------------------
def weights(batch, g):
    """From 0 to 1.5; in rows 2 and 3 all 0: of 6 microbatches the second has nothing."""
    some = (torch.arange(B) < 2) | (torch.arange(B) > 3)
    return batch | {"mask": 1.5 * torch.rand(B, S, generator=g, dtype=F64) * some[:, None]}


def small(batch, g):
    """All of them together less than 1."""
    return batch | {"mask": 0.01 * torch.rand(B, S, generator=g, dtype=F64)}


def uneven(batch, g):
    """0 and 1, of which few are in the first rows."""
    return batch | {"mask": (torch.rand(B, S, generator=g) < torch.arange(1, B + 1)[:, None] / B).to(F64)}


def ignored(batch, g):
    """Labels below 0, by which nothing is learned, beside a mask that says otherwise."""
    labels = torch.where(torch.rand(B, S, generator=g) < 0.3, -100, batch["labels"])
    labels[5], labels[6, 2:] = -1, -7
    return batch | {"labels": labels}


def padded(batch, g):
    """Text of 0 to S tokens, and padding behind it, whose ids, labels and weights are as any others."""
    length = torch.tensor([6, 1, 3, 2, 6, 4, 0, 5, 1, 6, 2, 3])[:, None]
    return batch | {"padding": torch.arange(S) >= length, "mask": torch.rand(B, S, generator=g, dtype=F64)}


def packed(batch, g):
    """Two documents in a row, and padding behind them."""
    del g
    at = torch.arange(S).expand(B, S)
    begin, end = (torch.tensor(n).repeat(4)[:, None] for n in ([2, 4, 1], [6, 5, 3]))
    documents = torch.where(at >= end, -1, (at >= begin).long())
    return batch | {"documents": documents, "positions": torch.where(at >= begin, at - begin, at)}


def weights_padded(batch, g):
    """Both."""
    return weights(padded(batch, g), g)


def ignored_uneven_packed(batch, g):
    """All three."""
    return ignored(uneven(packed(batch, g), g), g)


EACH, TOGETHER = (weights, small, uneven, ignored, padded, packed), (weights_padded, ignored_uneven_packed, small)


def batch_of(mask, of: model.Decoder) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(11)
    batch = {name: torch.randint(0, V, (B, S), generator=g) for name in ("tokens", "labels")}
    batch |= {"mask": torch.ones(B, S, dtype=F64), "padding": torch.zeros(B, S, dtype=torch.bool)}
    batch |= {"documents": torch.zeros(B, S, dtype=torch.int64), "positions": torch.arange(S).repeat(B, 1)}
    batch = mask(batch, g)
    return batch if of.mtp is None else dict(ahead(batch, of.mtp.depths))


# ---- models ----------------------------------------------------------------------------------------------------------
def parts(*mixers):
    return tuple(model.Part(f"{type(m).__name__.lower()}{i}", m, NORM) for i, m in enumerate(mixers))


def decoder(*mixers, **how):
    """One block of these mixers."""
    how = {"max_seq": S, "norm": NORM, "vocab_multiple": 6, "precision": Precision.fp64(), **how}
    return model.Decoder(V, D, (parts(*mixers),), **how)


ATTENTION, MAMBA = model.Attention(6, 2, 2, Rope(2)), model.Mamba(6, 4, 4, groups=2, conv=2, chunk=2)
SPARSE = model.MoE(ROUTER, 4, sequence_balance=0.3, z_loss=0.2, balance=0.2, balance_of="step before")
FULL = model.MoE(ROUTER, 4, model.MLP(6), capacity=1.0, balance=0.3)
BY_BATCH = decoder(FULL)
MODELS = {
    "attention, latent attention, mlp; z, chunks": decoder(
        ATTENTION, MLA(6, 4, 4, 2, 2, Rope(2)), model.MLP(12), z_loss=0.2, loss_chunks=2, tied=True
    ),
    "attention, mamba, experts; balances of sequences and of the step before, z": decoder(ATTENTION, MAMBA, SPARSE),
    "experts with capacity, shared; balance of the batch": BY_BATCH,
    "mlp, mtp of experts; all": decoder(model.MLP(12), mtp=model.MTP(parts(SPARSE), 2, 0.5), z_loss=0.1),
}


def allowed(case):
    """Experts with a capacity need whole sequences; rows of 2 data ranks make no 4 microbatches."""
    capacity = "capacity" in case.get("model", "") and "cp" in case.get("mesh", "")
    return not capacity and not (case.get("mesh", "") in ("2 dp", "6 dp, cp") and case.get("n") == 4)


@functools.cache
def start(name: str):
    """Parameters that differ, none of which is 0."""
    params, g = init(MODELS[name], Mesh(), 0), torch.Generator().manual_seed(7)
    return tree.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=g, dtype=x.dtype), params)


@functools.cache
def wanted(name: str, mask):
    """(loss, means, gradients) by the definition: on one rank, of the whole batch, in plain autograd."""
    of, leaves = MODELS[name], tree.map(lambda x: x.clone().requires_grad_(), start(name))
    found, metrics = model.loss(leaves, batch_of(mask, of), of, Axes(Mesh()))
    loss, shown = loss_of(found), found | {k: x for k, x in metrics.items() if isinstance(x, step.Part)}
    shown.pop("imbalance", None)  # of loads of a microbatch
    grads = torch.autograd.grad(loss, tree.leaves(leaves), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, tree.leaves(leaves), strict=True)]
    return loss.detach(), {k: mean_of(x).detach() for k, x in shown.items()}, grads


def steps(of, loss_fn, params, batches, mesh, n):
    """(metrics, gradients) of a step of SGD with rate 1, for each batch; traced once."""
    axes, specs, sgd = Axes(mesh, data=mesh.axes(DATA.tokens)), model.specs(of, mesh, strategy=DATA), optim.sgd(1.0)
    how = {"strategy": DATA, "microbatches": n, "clip_norm": None, "twice": n > 1 and of is BY_BATCH}
    train = step.build_train_step(functools.partial(loss_fn, axes=axes), sgd, tree.layouts(specs), axes, **how)
    rows = {k: DATA.batch_layout(tuple(x.shape), x.dtype, mesh, n) for k, x in batches[0].items()}
    at, state = (tree.layouts(step.state_specs(specs, sgd, DATA)), rows), fresh_state(params, sgd)
    ran = simulate(train, mesh, state, batches[0], layouts=at)
    for one in (ran, *(ran.again(state, batch) for batch in batches[1:])):
        after, metrics = one.globals()
        yield metrics, [p - new for p, new in zip(tree.leaves(params), tree.leaves(after.params), strict=True)]


OPTIONS = {"model": tuple(MODELS), "mesh": tuple(MESHES)[:3], "n": (1, 2, 4)}
PAIRS = pairs.array(OPTIONS, lambda case: allowed(case) and (case.get("n") != 4 or case.get("mesh", "one") == "one"))
FULL_PRODUCT = [dict(zip(OPTIONS, case, strict=True)) for case in itertools.product(MODELS, MESHES, (1, 2, 3, 4, 6))]


def possible(case):
    ranks = MESHES[case["mesh"]].extent([name for name in DATA.axes if name in MESHES[case["mesh"]].names])
    return allowed(case) and B % (ranks * case["n"]) == 0


CASES = [*((case, TOGETHER) for case in PAIRS), *((case, EACH) for case in FULL_PRODUCT if possible(case))]
FEW = pairs.few(5, [tuple(case.values()) for case in PAIRS])
DAILY = [case for case, one in zip(PAIRS, FEW, strict=True) if not one.marks]


@pytest.mark.long
@pytest.mark.parametrize(
    "case, masks",
    [
        pytest.param(
            case,
            masks,
            marks=[pytest.mark.slow] * (masks is EACH or case not in DAILY),
            id="-".join(map(str, case.values())),
        )
        for case, masks in CASES
    ],
)
def test_invariant(case, masks):
    """A model under masks, on a mesh, in n microbatches: five of these; every two of them and all are slow."""
    name, of, params = case["model"], MODELS[case["model"]], start(case["model"])
    loss_fn, batches = functools.partial(model.loss, decoder=of), [batch_of(mask, of) for mask in masks]
    found = steps(of, loss_fn, params, batches, MESHES[case["mesh"]], case["n"])
    for mask, (metrics, got) in zip(masks, found, strict=True):
        loss, means, grads = wanted(name, mask)
        errors = {"loss": relative_error(metrics["loss"], loss)}
        errors |= {k: relative_error(metrics[k], x) for k, x in means.items()}
        errors |= dict(zip(tree.paths(params), map(difference, got, grads), strict=True))
        assert max(errors.values()) <= 1e-10, (mask.__name__, errors)


def difference(got, want):
    """The largest, by the largest element of what is wanted."""
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-300))


# ---- coupled ---------------------------------------------------------------------------------------------------------
def softmax_over_rows(nll_BS, axes):
    """Each row against the rows of all ranks."""
    data = axes[axes.data]
    score_B = -nll_BS.mean(1)
    every_N = all_gather(score_B, data, 0)
    return {"rank": step.mean((every_N.logsumexp(0) - score_B).sum(), len(score_B))}


def statistics_over_rows(nll_BS, axes):
    """The variance of the rows of all ranks."""
    data = axes[axes.data]
    n, mean = len(nll_BS) * data.size, enter(psum(nll_BS.mean(1).sum(), data), data)
    return {"spread": step.mean((nll_BS.mean(1) - mean / n).square().sum(), len(nll_BS))}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("coupled", [softmax_over_rows, statistics_over_rows])
def test_coupled(coupled):
    """The same on every mesh at a fixed number of microbatches, and another thing at another."""
    of = decoder(model.MLP(12))
    params = init(of, Mesh(), 0)

    def loss_fn(params, batch, axes):
        nll_BS, _ = model.token_losses(params, batch, of, axes)
        return coupled(nll_BS, axes), {}

    def run(mesh, n):
        return next(steps(of, loss_fn, params, [batch_of(weights, of)], MESHES[mesh], n))[1]

    one, two, sharded = run("one", 1), run("one", 2), run("6 fsdp, tp", 2)
    assert max(map(difference, sharded, two)) <= 1e-10 < 1e-3 < max(map(difference, two, one))
