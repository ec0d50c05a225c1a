"""Losses as people write them, over one small model: what is right must have no finding, whatever the strategy."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes, all_gather, axis_index, enter, psum
from fmegatron.layout import DataParallel, Mesh

B, S, V, D, C = 24, 4, 11, 6, 3
F64 = torch.float64
SHAPES = {
    "table": (V, D), "up": (D, 2 * D), "down": (2 * D, D), "head": (D, V), "aux": (D, C), "gain": (D,), "heat": (1,),
    "vars": (3,),
}  # fmt: skip


class Given(NamedTuple):
    """w: whole weights; p: this rank's shards; h: [B, S, D]; logits: [B, S, V]; b: this rank's rows of a microbatch."""

    w: dict[str, Tensor]
    p: dict[str, Tensor]
    h: Tensor
    logits: Tensor
    b: dict[str, Tensor]
    axes: Axes

    @property
    def nll(self) -> Tensor:
        return F.cross_entropy(self.logits.flatten(0, 1), self.b["labels"].flatten(), reduction="none").view(-1, S)

    def lm(self) -> step.Part:
        return step.mean((self.nll * self.b["mask"]).sum(), self.b["mask"].sum())


# ---- functions of the parameters alone -------------------------------------------------------------------------------
def l2(of):
    return {"lm": of.lm(), "l2": 0.01 * step.mean(of.w["up"].square().sum(), 1)}


def l2_of_all(of):
    return {"lm": of.lm(), "l2": 0.003 * step.mean(sum(w.square().sum() for w in of.w.values()), 1)}


def l2_with_a_number(of):
    every = step.mean(of.nll.sum(), of.nll.numel())
    return {"lm": every, "l2": 0.01 * step.mean(of.w["up"].square().sum(), 1)}


def l2_beside_rows_as_count(of):
    """0.01 |w|^2 for each row: a number that is not 1."""
    rows = len(of.nll)
    return {"lm": step.mean(of.nll.sum(), rows), "l2": step.mean(0.01 * rows * of.w["up"].square().sum(), rows)}


def l1_and_group_lasso(of):
    return {
        "lm": of.lm(),
        "l1": 1e-3 * step.mean(of.w["aux"].abs().sum(), 1),
        "groups": 1e-2 * step.mean(of.w["up"].norm(dim=0).sum(), 1),
    }


def orthogonality(of):
    gram = of.w["up"] @ of.w["up"].T
    return {"lm": of.lm(), "ortho": 0.02 * step.mean((gram - torch.eye(D, dtype=F64)).square().sum(), 1)}


def spectral(of):
    u = torch.ones(D, dtype=F64) / D**0.5
    for _ in range(2):
        v = F.normalize(of.w["up"].T.detach() @ u, dim=0)
        u = F.normalize(of.w["up"].detach() @ v, dim=0)
    return {"lm": of.lm(), "sigma": 0.1 * step.mean(u @ of.w["up"] @ v, 1)}


def l2_of_shards(of):
    """What each rank has, counted as the share that it is."""
    shards = 1
    for axis in of.axes.data:
        if axis in tree.layout_of(of.p["up"]).sharded:
            shards *= of.axes[axis].size
    return {"lm": of.lm(), "l2": 0.01 * step.mean(of.p["up"].square().sum(), 1 / shards)}


def l2_as_weight(of):
    """A schedule times a penalty."""
    heat = torch.tensor(0.25, dtype=F64)
    return {"lm": of.lm(), "l2": heat * (0.1 * step.mean(of.w["down"].square().sum(), 1))}


def entropy_of_a_mixture(of):
    """Weights of a mixture that are learned, and kept wide."""
    mix = of.w["vars"].softmax(0)
    nll = mix[0] * of.nll + mix[1] * of.logits.square().mean(-1) + mix[2] * of.h.square().mean(-1)
    entropy = -(mix * mix.log()).sum()
    return {"mixed": step.mean(nll.sum(), nll.numel()), "entropy": -0.1 * step.mean(entropy, 1)}


def learned_variances(of):
    """Kendall's weights: exp(-s) loss + s; s once for each loss."""
    s = of.w["vars"]
    terms = torch.stack((of.nll.sum(), of.logits.square().mean(-1).sum(), of.h.square().sum(-1).sum()))
    return {"tasks": step.mean(((-s).exp() * terms).sum(), of.nll.numel()), "scales": step.mean(s.sum(), 1)}


def learned_variances_per_token(of):
    s = of.w["vars"]
    token = torch.stack((of.nll, of.logits.square().mean(-1), of.h.square().sum(-1)), -1)
    return step.mean(((-s).exp() * token + s).sum(), of.nll.numel())


def towards_the_start(of):
    """L2-SP: near to fixed values, equal on all ranks."""
    start = torch.linspace(-1, 1, D * 2 * D, dtype=F64).view(D, 2 * D)
    return {"lm": of.lm(), "near": 0.1 * step.mean((of.w["up"] - start).square().mean(), 1)}


def tied_pull(of):
    return {"lm": of.lm(), "tie": 0.1 * step.mean((of.w["table"] - of.w["head"].T).square().sum(), 1)}


def hinge_on_a_norm(of):
    return {"lm": of.lm(), "norm": step.mean((of.w["up"].norm() - 0.5).clamp(min=0), 1)}


def penalty_within_the_total(of):
    """Per row: the penalty added to each row's loss."""
    row = of.nll.mean(1) + 0.01 * of.w["up"].square().sum()
    return step.mean(row.sum(), len(row))


def penalty_times_count(of):
    count = of.b["mask"].sum()
    return step.mean((of.nll * of.b["mask"]).sum() + 0.01 * count * of.w["up"].square().sum(), count)


def penalty_by_where(of):
    row = of.nll + 0.01 * of.w["gain"].square().sum()
    return step.mean(torch.where(of.b["mask"] > 0.5, row, 0.0).sum(), (of.b["mask"] > 0.5).sum())


def penalty_expanded_and_masked(of):
    each = (0.01 * of.w["gain"].square().sum()).expand(of.nll.shape)
    count = (of.b["mask"] > 0.5).sum()
    kept = torch.where(of.b["mask"] > 0.5, each, torch.zeros_like(each))
    return {"lm": of.lm(), "gain": step.mean(kept.sum(), count)}


def penalty_expanded_and_clamped(of):
    each = (of.w["gain"].square().sum() - 1).expand(len(of.nll)).clamp(min=0.1)
    return {"lm": of.lm(), "gain": 0.1 * step.mean(each.sum(), len(of.nll))}


def penalty_expanded_by_count(of):
    each = of.w["gain"].square().sum().expand(len(of.nll))
    return {"lm": of.lm(), "gain": 0.1 * step.mean(each.sum(), torch.ones(len(of.nll)).sum())}


def penalty_repeated(of):
    each = of.w["gain"].square().sum() * torch.ones(len(of.nll), dtype=F64)
    return {"lm": of.lm(), "gain": 0.1 * step.mean(each.minimum(torch.tensor(2.0, dtype=F64)).sum(), len(of.nll))}


# ---- tokens ----------------------------------------------------------------------------------------------------------
def plain(of):
    return of.lm()


def label_smoothing(of):
    logp = of.logits.log_softmax(-1)
    target = torch.full_like(logp, 0.1 / V).scatter(-1, of.b["labels"][..., None], 0.9 + 0.1 / V)
    return step.mean((-(target * logp).sum(-1) * of.b["mask"]).sum(), of.b["mask"].sum())


def focal(of):
    p = (-of.nll).exp()
    return step.mean(((1 - p) ** 2 * of.nll * of.b["mask"]).sum(), of.b["mask"].sum())


def z_loss(of):
    lse = of.logits.logsumexp(-1)
    return {"lm": of.lm(), "z": 1e-2 * step.mean((lse.square() * of.b["mask"]).sum(), of.b["mask"].sum())}


def z_loss_per_row(of):
    return {"lm": of.lm(), "z": 1e-2 * step.mean(of.logits.logsumexp(-1).square().mean(1).sum(), len(of.nll))}


def nan_to_num_and_masks(of):
    x = torch.where(of.b["mask"] > 0.5, of.nll, torch.nan)
    return step.mean(x.nan_to_num(0.0).sum(), x.isfinite().sum())


def ignore_index(of):
    labels = torch.where(of.b["mask"] > 0.5, of.b["labels"], -100)
    total = F.cross_entropy(of.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return step.mean(total, (labels != -100).sum())


def class_weights(of):
    weight = torch.linspace(0.5, 2, V, dtype=F64)
    each = F.cross_entropy(of.logits.flatten(0, 1), of.b["labels"].flatten(), weight=weight, reduction="none")
    return step.mean(each.sum(), weight[of.b["labels"]].sum())


def weights_of_torch(of):
    weight = torch.linspace(0.5, 2, V, dtype=F64)
    total = F.cross_entropy(of.logits.flatten(0, 1), of.b["labels"].flatten(), weight=weight, reduction="sum")
    return step.mean(total, weight[of.b["labels"]].sum())


def sequence_means(of):
    each = (of.nll * of.b["mask"]).sum(1) / of.b["mask"].sum(1).clamp(min=1e-3)
    return step.mean(each.sum(), len(each))


def sequence_means_of_kept(of):
    kept = of.b["mask"].sum(1) > 1
    each = (of.nll * of.b["mask"]).sum(1) / of.b["mask"].sum(1).clamp(min=1)
    return step.mean(each[:, None].masked_fill(~kept[:, None], 0).sum(), kept.sum())


def local_mean_by_one_weighed(of):
    return {"lm": 0.3 * step.mean(of.nll.mean(), 1), "z": 0.1 * step.mean(of.logits.square().mean(), 1)}


def local_mean_and_penalty(of):
    return step.mean(of.nll.mean() + 0.01 * of.w["up"].square().sum(), 1)


def of_torch_means(of):
    return step.mean(F.cross_entropy(of.logits.flatten(0, 1), of.b["labels"].flatten()), 1)


def clamped(of):
    return step.mean(of.nll.clamp(max=2.5).sum(), of.nll.numel())


def hardest_tokens(of):
    return step.mean(of.nll.topk(2, dim=1).values.sum(), 2 * len(of.nll))


def hardest_token_of_each_row(of):
    return step.mean(of.nll.amax(1).sum(), len(of.nll))


def weights_by_position(of):
    at = torch.linspace(0.1, 1, S, dtype=F64)
    return step.mean((of.nll * at).sum(), at.expand(len(of.nll), S).sum())


def confidence(of):
    probs = of.logits.softmax(-1)
    entropy = -(probs * probs.clamp(min=1e-9).log()).sum(-1)
    return {"lm": of.lm(), "entropy": -0.01 * step.mean((entropy * of.b["mask"]).sum(), of.b["mask"].sum())}


def polynomial(of):
    """PolyLoss."""
    pt = of.logits.softmax(-1).gather(-1, of.b["labels"][..., None])[..., 0]
    return step.mean((of.nll + 1.5 * (1 - pt)).sum(), of.nll.numel())


def binary(of):
    target = F.one_hot(of.b["labels"], V).to(F64)
    total = F.binary_cross_entropy_with_logits(of.logits, target, reduction="sum")
    return step.mean(total, of.logits.numel())


def unlikelihood(of):
    before = torch.zeros(len(of.nll), S, V, dtype=F64)
    seen = F.one_hot(of.b["tokens"], V).to(F64).cumsum(1)
    before = (seen > 0) & (F.one_hot(of.b["labels"], V) == 0) | (before > 0)
    p = of.logits.softmax(-1)
    return {"lm": of.lm(), "un": step.mean(-((1 - p).clamp(min=1e-6).log() * before).sum(), before.sum())}


# ---- other heads and models ------------------------------------------------------------------------------------------
def auxiliary_head(of):
    group = of.b["labels"] % C
    side = F.cross_entropy((of.h @ of.w["aux"]).flatten(0, 1), group.flatten(), reduction="none")
    return {"lm": of.lm(), "aux": 0.3 * step.mean(side.sum(), group.numel())}


def auxiliary_head_of_some(of):
    some = of.b["labels"] < 4
    side = F.cross_entropy((of.h @ of.w["aux"]).transpose(1, 2), of.b["labels"] % C, reduction="none")
    return {"lm": of.lm(), "aux": 0.3 * step.mean((side * some).sum(), some.sum())}


def pooled_head(of):
    pooled = (of.h * of.b["mask"][..., None]).sum(1) / of.b["mask"].sum(1, keepdim=True).clamp(min=1e-3)
    nll = F.cross_entropy(pooled @ of.w["aux"], of.b["labels"][:, 0] % C, reduction="sum")
    return {"lm": of.lm(), "class": step.mean(nll, len(pooled))}


def distilled(of):
    teacher = (of.h.detach() @ of.w["head"].detach().flip(1) / 2).softmax(-1)
    student = (of.logits / 2).log_softmax(-1)
    kl = F.kl_div(student, teacher, reduction="none").sum(-1) * 4
    return {"lm": of.lm(), "kl": 0.5 * step.mean((kl * of.b["mask"]).sum(), of.b["mask"].sum())}


def two_passes(of):
    """R-Drop: two views, which are to agree."""
    other = torch.tanh(of.h * (1 + of.w["gain"])) @ of.w["head"]
    p, q = of.logits.log_softmax(-1), other.log_softmax(-1)
    both = (p.exp() * (p - q)).sum(-1) + (q.exp() * (q - p)).sum(-1)
    return {"lm": of.lm(), "agree": step.mean(both.sum(), both.numel())}


def value_head(of):
    value, target = (of.h @ of.w["gain"]), of.b["mask"].cumsum(1)
    clipped = value + (value.detach() - value).clamp(-0.2, 0.2)
    each = torch.maximum((value - target).square(), (clipped - target).square())
    return {"lm": of.lm(), "value": 0.5 * step.mean(each.sum(), each.numel())}


def huber(of):
    each = F.huber_loss(of.h @ of.w["gain"], of.b["mask"], reduction="none", delta=0.3)
    return {"lm": of.lm(), "huber": step.mean(each.sum(), each.numel())}


def temperature(of):
    logits = of.logits / of.w["heat"].exp()
    nll = F.cross_entropy(logits.flatten(0, 1), of.b["labels"].flatten(), reduction="sum")
    return step.mean(nll, of.b["labels"].numel())


def temperature_with_a_prior(of):
    logits = of.logits * of.w["heat"].exp().clamp(max=100)
    nll = F.cross_entropy(logits.flatten(0, 1), of.b["labels"].flatten(), reduction="sum")
    prior = step.mean((of.w["heat"] - 0.5).square().sum(), 1)
    return {"lm": step.mean(nll, of.b["labels"].numel()), "prior": 0.01 * prior}


def policy(of):
    """PPO's clipped ratio, advantages normalized over a row."""
    gain = (of.b["mask"] - of.b["mask"].mean(1, keepdim=True)) / (of.b["mask"].std(1, keepdim=True) + 1e-6)
    ratio = (-of.nll + of.nll.detach() * 0.9).exp()
    each = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return step.mean(each.sum(), each.numel())


def preferences(of):
    """DPO-like: the first half of a row against the second."""
    margin = of.nll[:, S // 2 :].sum(1) - of.nll[:, : S // 2].sum(1)
    return step.mean(-F.logsigmoid(0.5 * margin).sum(), len(margin))


def contrast_within_rows(of):
    z = F.normalize(of.h, dim=-1)
    sims = torch.einsum("bsd,btd->bst", z, z) / 0.2
    sims = sims.masked_fill(torch.eye(S, dtype=torch.bool), float("-inf"))
    pos = sims.roll(1, -1).diagonal(dim1=1, dim2=2)
    at = torch.arange(S).roll(-1)
    nll = F.cross_entropy(sims.flatten(0, 1), at.repeat(len(z)), reduction="sum")
    return {"lm": of.lm(), "contrast": step.mean(nll + 0 * pos.nan_to_num(neginf=0).sum(), z.shape[0] * S)}


def contrast_over_all_rows(of):
    data = of.axes[of.axes.data]
    q, k = F.normalize(of.h[:, 0], dim=-1), F.normalize(of.h[:, -1], dim=-1)
    sims = q @ all_gather(k, data, 0).T * of.w["heat"].exp()
    own = axis_index(data, like=sims) * len(q) + torch.arange(len(q))
    nll = sims.logsumexp(1) - sims.gather(1, own[:, None])[:, 0]
    return {"lm": of.lm(), "contrast": step.mean(nll.sum(), len(q))}


def contrast_on_every_rank(of):
    """Both sides gathered: the same loss on every rank, counted as one for each."""
    data = of.axes[of.axes.data]
    q, k = (all_gather(F.normalize(of.h[:, at], dim=-1), data, 0) for at in (0, -1))
    sims = q @ k.T / 0.3
    return {"lm": of.lm(), "contrast": step.mean(F.cross_entropy(sims, torch.arange(len(q))), 1)}


def variance_of_the_batch(of):
    """VICReg: the spread of each feature over all rows, by sums that enter again."""
    data = of.axes[of.axes.data]
    z, n = of.h[:, 0], len(of.h) * data.size
    mean = enter(psum(z.sum(0), data), data) / n
    var = enter(psum((z - mean).square().sum(0), data), data) / (n - 1)
    return {"lm": of.lm(), "spread": step.mean((1 - (var + 1e-4).sqrt()).relu().sum(), 1)}


def gradient_penalty(of):
    h = of.h.detach().requires_grad_()
    score = (torch.tanh(h * of.w["gain"]) @ of.w["aux"]).sum()
    (g,) = torch.autograd.grad(score, h, create_graph=True)
    return {"lm": of.lm(), "gp": step.mean((g.norm(dim=-1) - 1).square().sum(), g.shape[0] * S)}


def balance(of):
    probs = of.logits.softmax(-1)
    chosen = F.one_hot(probs.argmax(-1), V).to(F64).sum((0, 1)).detach()
    tokens = of.nll.numel()
    mean = step.mean(F.one_hot(of.b["labels"], V).to(F64).sum((0, 1)), tokens)
    del chosen
    return {"lm": of.lm(), "balance": V * (step.mean(probs.sum((0, 1)), tokens) * mean)}


def with_metrics(of):
    hit = (of.logits.argmax(-1) == of.b["labels"]) & (of.b["mask"] > 0.5)
    norm = torch.stack([w.detach().square().sum() for w in of.w.values()]).sum().sqrt()
    metrics = {
        "accuracy": step.mean(hit.sum().to(F64), (of.b["mask"] > 0.5).sum()),
        "norm": step.mean(norm, 1),
        "heat": step.mean(of.w["heat"].detach().exp().sum(), 1),
        "lse": step.mean(of.logits.logsumexp(-1).mean(), 1),
    }
    return {"lm": of.lm()}, metrics


def detached_normalizer(of):
    scale = of.h.detach().square().mean(-1).sqrt() + 1
    return step.mean((of.nll / scale).sum(), (1 / scale).sum().detach())


def hashed_masks(of):
    keep = (of.b["tokens"] * 7 + of.b["labels"]) % 5 != 0
    return step.mean((of.nll * keep).sum(), keep.sum())


def stacked_parts(of):
    """Several losses in one vector, weighed by a fixed vector."""
    each = torch.stack([of.nll.sum(), of.h.square().sum() / D, of.logits.square().sum() / V])
    return step.mean(each @ torch.tensor([1.0, 0.1, 0.01], dtype=F64), of.nll.numel())


def by_length_buckets(of):
    bucket = of.b["labels"] % C
    sums = torch.zeros(C, dtype=F64).index_add(0, bucket.flatten(), of.nll.flatten())
    return step.mean((sums * torch.tensor([0.5, 1.0, 2.0], dtype=F64)).sum(), of.nll.numel())


PROGRAMS: dict[str, Callable[[Given], Any]] = {
    f.__name__: f for f in list(globals().values())
    if callable(f) and getattr(f, "__code__", None) is not None and f.__code__.co_varnames[:1] == ("of",)
}  # fmt: skip


# ---- a step ----------------------------------------------------------------------------------------------------------
def as_scalar(out: Any, axes: Axes) -> tuple[Tensor, dict]:
    """The same loss as a scalar, this rank's part of a sum; and, summed, as a metric."""
    parts, data, loss = out[0] if isinstance(out, tuple) else out, axes[axes.data], 0
    for part in [parts] if isinstance(parts, step.Part) else parts.values():
        numbers = [w for w in part.weights if not isinstance(w, step.Part)]
        counted = isinstance(part.count, Tensor)
        term = part.total / (psum(part.count, data) if counted else part.count * data.size)
        loss = loss + functools.reduce(operator.mul, numbers, term)
    return loss, {"loss": psum(loss.detach(), data)}


def make(name: str, mesh: Mesh, strategy: str, n: int, programs=PROGRAMS, scalar: bool = False):
    """(train_step, specs of its state, layouts of its batch)."""
    of, how = programs[name], DataParallel.named(strategy)
    specs = tree.specs(SHAPES, mesh, init=tree.Normal(0.5), dtype=F64, strategy=how)
    axes, optimizer = Axes(mesh, data=mesh.axes(how.tokens)), optim.sgd(0.5, momentum=0.9)

    def loss_fn(params, batch):
        w = nn.gather_tree(params)
        h = torch.tanh(w["table"][batch["tokens"]] * (1 + w["gain"]))
        h = h + torch.tanh(h @ w["up"]) @ w["down"]
        out = of(Given(w, params, h, h @ w["head"], batch, axes))
        return as_scalar(out, axes) if scalar else out

    train_step = step.build_train_step(
        loss_fn,
        optimizer,
        specs,
        microbatches=n,
        clip_norm=None,
        twice=n > 1 and name in ("detached_normalizer", "nan_to_num_and_masks"),
    )
    rows = {
        k: how.batch_layout((B, S), dtype, mesh, n)
        for k, dtype in {"tokens": torch.int64, "labels": torch.int64, "mask": F64}.items()
    }

    def shown(state, batch):  # without counts, which of a number are those of all ranks
        state, metrics = train_step(state, batch)
        return state, {key: x for key, x in metrics.items() if not key.endswith("/count")}

    return shown, step.state_specs(specs, optimizer), rows


def batch_of() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    batch = {name: torch.randint(0, V, (B, S), generator=g) for name in ("tokens", "labels")}
    return batch | {"mask": torch.rand(B, S, generator=g, dtype=F64)}
