"""Losses of strangers: contrast, preference and policy gradients, distillation, adversaries, rankings, statistics."""

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, axis_index, enter, pmax, psum
from tests.step.strangers.setting import metric, trained


def rows_of(ax, b):
    return len(b["x"]) * ax["dp"].size


def features(p, x):
    return F.normalize(torch.tanh(x @ p["t"]), dim=-1)


def labels_here(ax, x):
    return axis_index(ax["dp"], like=x).long() * len(x) + torch.arange(len(x))


def info_nce(ax, p, b, bug):
    z1, z2 = features(p, b["x"]), features(p, b["y"])
    if bug == "own negatives":
        return F.cross_entropy(z1 @ z2.T / 0.1, torch.arange(len(z1)), reduction="sum")
    others = all_gather(z2, ax["dp"], 0)
    sims = z1 @ others.T / 0.1
    nll = sims.logsumexp(-1) - (z1 * z2).sum(-1) / 0.1
    return nll.mean() if bug == "mean of own rows" else nll.sum() / rows_of(ax, b)


def clip(ax, p, b, bug):
    image, text = features(p, b["x"]), F.normalize(b["y"] @ p["u"], dim=-1)
    scale = p["one"].exp()
    if bug == "own pairs":
        logits = scale * image @ text.T
        at = torch.arange(len(logits))
        return F.cross_entropy(logits, at, reduction="sum") + F.cross_entropy(logits.T, at, reduction="sum")
    all_image, all_text = all_gather(image, ax["dp"], 0), all_gather(text, ax["dp"], 0)
    own = scale * (image * text).sum(-1)
    i2t = (scale * image @ all_text.T).logsumexp(1) - own
    t2i = (scale * text @ all_image.T).logsumexp(1) - own
    return (i2t + t2i).sum() / (2 * rows_of(ax, b))


def sup_con(ax, p, b, bug):
    z = features(p, b["x"])
    every, ids = (
        (z, b["ids"]) if bug == "own anchors" else (all_gather(z, ax["dp"], 0), all_gather(b["ids"], ax["dp"], 0))
    )
    if bug == "own classes, all features":
        every, ids = all_gather(z, ax["dp"], 0), b["ids"].repeat(ax["dp"].size)
    positive = (b["ids"][:, None] == ids[None]).double()
    logp = (z @ every.T / 0.2).log_softmax(-1)
    return -((positive * logp).sum(1) / positive.sum(1)).sum()


def vicreg(ax, p, b, bug):
    z, n, dp = b["x"] @ p["t"], rows_of(ax, b), ax["dp"]
    add = (
        (lambda x: x * dp.size)
        if bug == "own rows"
        else (lambda x: psum(x, dp))
        if bug == "no enter"
        else (lambda x: enter(psum(x, dp), dp))
    )
    mean = add(z.sum(0)) / n
    cov = add((z - mean).T @ (z - mean)) / (n - 1)
    std = torch.relu(1 - (cov.diagonal() + 1e-4).sqrt()).mean()
    off = (cov.square().sum() - cov.diagonal().square().sum()) / 6
    return (std + off) / dp.size + (z - b["y"]).square().sum() / n


def barlow(ax, p, b, bug):
    a, c, dp = torch.tanh(b["x"] @ p["t"]), torch.tanh(b["y"] @ p["t"]), ax["dp"]
    cross = a.T @ c
    if bug == "squared parts":
        return psum((cross - torch.eye(6, dtype=cross.dtype)).square().sum().detach(), dp)
    cross = psum(cross, dp) / rows_of(ax, b)
    return (cross - torch.eye(6, dtype=cross.dtype)).square().sum()


def sinkhorn(ax, s, b, bug):
    dp = ax["dp"]
    q = (F.normalize(b["x"], dim=-1) @ s["book"].T).exp()
    for _ in range(3):
        columns = q.sum(0) if bug == "own columns" else psum(q.sum(0), dp)
        q = q / columns
        q = q / q.sum(1, keepdim=True)
    return psum((q * q.log()).sum(), dp)


def ppo(ax, p, b, bug):
    dp, r = ax["dp"], b["rew"]
    n = rows_of(ax, b)
    mean = r.mean() if bug == "own mean" else psum(r.sum(), dp) / n
    var = (
        (r - mean).square().mean() if bug in ("own mean", "own deviation") else psum((r - mean).square().sum(), dp) / n
    )
    adv = (r - mean) / (var.sqrt() + 1e-8)
    logp = (b["x"] @ p["t"]).log_softmax(-1).gather(1, b["ids"][:, None])[:, 0]
    ratio = (logp - logp.detach() + 0.1 * b["rew"]).exp()
    surrogate = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    return -surrogate.mean() if bug == "mean of own rows" else -surrogate.sum() / n


def grpo(ax, p, b, bug):
    """Groups of two answers, both on one rank."""
    r = b["rew"].view(-1, 2)
    adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()
    logp = (b["x"] @ p["t"]).log_softmax(-1).gather(1, b["ids"][:, None])[:, 0]
    kl = (logp.detach() - logp).exp() - (logp.detach() - logp) - 1
    return ((-logp * adv).sum() + 0.1 * kl.sum()) / (
        len(adv) if bug == "by own rows, then the penalty" else rows_of(ax, b)
    ) + (p["t"].square().sum() if bug == "by own rows, then the penalty" else 0)


def dpo(ax, p, b, bug):
    chosen = (b["x"] * p["gain"]).sum(-1)
    rejected = (b["y"] * p["gain"]).sum(-1)
    margin = -F.logsigmoid(0.1 * (chosen - rejected))
    penalty = 0.01 * p["gain"].square().sum()
    if bug == "penalty of each rank":
        return margin.sum() + penalty
    return margin.sum() + penalty / ax["dp"].size


def distill(ax, p, b, bug):
    t = 2.0
    student, teacher = b["x"] @ p["t"] / t, (b["x"] @ p["u"] / t).detach()
    kl = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    if bug == "batchmean of own rows":
        return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    return t**2 * kl.sum() / rows_of(ax, b)


def reported_distill(ax, s, b, bug):
    kl = F.kl_div((b["x"] @ s["t"]).log_softmax(-1), (b["x"] @ s["u"]).softmax(-1), reduction="batchmean")
    total = psum(kl, ax["dp"])
    return total if bug == "not divided" else total / ax["dp"].size


def hinge_gan(ax, p, b, bug):
    fake = torch.tanh(b["y"] @ p["t"].detach())

    def score(x):
        return torch.tanh(x @ p["u"]) @ p["gain"]

    real = b["x"].detach().requires_grad_()
    out = score(real)
    (slope,) = torch.autograd.grad(out.sum(), real, create_graph=True)
    r1 = slope.square().sum(1)
    r1 = r1.mean() if bug == "penalty of own mean" else r1.sum() / rows_of(ax, b)
    return (F.relu(1 - out).sum() + F.relu(1 + score(fake)).sum()) / rows_of(ax, b) + 5 * r1


def wasserstein(ax, s, b, bug):
    real, fake = (b[n] @ s["gain"] for n in ("x", "y"))
    if bug == "sorted parts":
        return psum((real.sort().values - fake.sort().values).abs().sum(), ax["dp"]) / rows_of(ax, b)
    real, fake = (all_gather(z, ax["dp"], 0) for z in (real, fake))
    return (real.sort().values - fake.sort().values).abs().mean()


def mmd(ax, p, b, bug):
    dp, x, y = ax["dp"], b["x"] * p["gain"], b["y"]

    def kernel(a, c):
        return (-(a[:, None] - c[None]).square().sum(-1)).exp().sum()

    if bug == "own pairs":
        return kernel(x, x) - 2 * kernel(x, y)
    return kernel(x, all_gather(x, dp, 0)) - 2 * kernel(x, all_gather(y, dp, 0))


def dice(ax, p, b, bug):
    dp, probs = ax["dp"], torch.sigmoid(b["x"] * p["gain"])
    hit, total = (probs * b["mask"]).sum(), probs.sum() + b["mask"].sum()
    if bug != "own ratio":
        hit, total = enter(psum(hit, dp), dp), enter(psum(total, dp), dp)
    if bug == "one reduced":
        total = probs.sum() + b["mask"].sum()
    ratio = 1 - 2 * hit / total
    return ratio if bug == "of every rank" else ratio / dp.size


def hard_triplets(ax, s, b, bug):
    z = F.normalize(b["x"] @ s["t"], dim=-1)
    every = z if bug == "own rows" else all_gather(z, ax["dp"], 0)
    ids = b["ids"] if bug == "own rows" else all_gather(b["ids"], ax["dp"], 0)
    d = torch.cdist(z, every)
    same = b["ids"][:, None] == ids
    loss = F.relu(d.masked_fill(~same, 0).amax(1) - d.masked_fill(same, 9.0).amin(1) + 0.3)
    return psum(loss.sum(), ax["dp"]) / rows_of(ax, b)


def hardest(ax, s, b, bug):
    loss = (b["x"] @ s["t"] - b["y"]).square().mean(-1)
    whole = loss if bug == "of own rows" else all_gather(loss, ax["dp"], 0)
    worst = whole.topk(2).values.mean()
    return psum(worst, ax["dp"]) / ax["dp"].size if bug else worst


def mean_entropy(ax, p, b, bug):
    dp, probs = ax["dp"], (b["x"] @ p["t"]).softmax(-1)
    if bug == "of own mean":
        q = probs.mean(0)
    else:
        q = psum(probs.sum(0), dp) / rows_of(ax, b)
        q = q if bug == "no enter" else enter(q, dp)
    each = -(probs * probs.log()).sum() / rows_of(ax, b)
    return each + (q * q.log()).sum() / dp.size


def switch_balance(ax, p, b, bug):
    dp = ax["dp"]
    probs = (b["x"] @ p["t"]).softmax(-1)
    share = F.one_hot(probs.argmax(-1), 6).double().sum(0)
    if bug == "own shares":
        return 6 * (share / len(probs) * probs.mean(0)).sum()
    share = psum(share, dp) / rows_of(ax, b)
    return 6 * (share * probs.sum(0) / rows_of(ax, b)).sum()


def masked_tokens(ax, p, b, bug):
    dp = ax["dp"]
    loss = ((b["x"] * p["gain"] - b["y"]).square() * b["mask"]).sum()
    count = b["mask"].sum()
    if bug == "own count":
        return loss / count
    if bug == "counts of own, mean":
        return loss / count / dp.size
    return loss / psum(count, dp)


def softmax_weights(ax, p, b, bug):
    dp, r = ax["dp"], b["rew"]
    top = r.amax() if bug == "own largest" else pmax(r.amax(), dp)
    w = (r - top).exp()
    total = w.sum() if bug in ("own total", "own largest") else psum(w.sum(), dp)
    return (w / total * (b["x"] * p["gain"]).square().sum(-1)).sum()


def cox(ax, s, b, bug):
    risk, time = b["x"] @ s["gain"], b["rew"]
    if bug != "own patients":
        risk, time = all_gather(risk, ax["dp"], 0), all_gather(time, ax["dp"], 0)
    risk = risk[time.argsort(descending=True)]
    total = (risk.logcumsumexp(0) - risk).sum()
    return psum(total, ax["dp"]) if bug else total


def coral(ax, s, b, bug):
    dp, n = ax["dp"], rows_of(ax, b)

    def cov(z):
        gram, mean = z.T @ z, z.sum(0)
        if bug == "of own rows":
            return gram / len(z) - torch.outer(mean, mean) / len(z) ** 2
        mean = psum(mean, dp) / n
        return psum(gram, dp) / n - torch.outer(mean, mean)

    gap = (cov(b["x"] @ s["t"]) - cov(b["y"])).square().sum()
    return psum(gap, dp) / dp.size if bug else gap


def orthogonal(ax, p, b, bug):
    data = torch.tanh(b["x"] @ p["t"]).square().sum()
    gram = (p["u"].T @ p["u"] - torch.eye(6, dtype=data.dtype)).square().sum()
    return data + (0.1 * gram if bug == "once a rank" else 0.1 * gram / ax["dp"].size)


def shard_penalty(ax, p, b, bug):
    data = (b["x"] * p["gain"]).square().sum()
    if bug == "norm of the shard":
        return data + p["flat"].norm()
    whole = psum(p["flat"].square().sum(), ax["dp"])
    whole = whole if bug == "no enter" else enter(whole, ax["dp"])
    return data + whole.sqrt() / ax["dp"].size


def jacobian_penalty(ax, p, b, bug):
    jac = torch.func.vmap(torch.func.jacrev(lambda x: torch.tanh(x @ p["t"])))(b["x"])
    each = jac.square().sum((1, 2))
    return each.mean() if bug == "mean of own rows" else each.sum() / rows_of(ax, b)


def per_example(ax, s, b, bug):
    """DP-SGD: gradients of rows, clipped one by one."""
    slope = torch.func.vmap(torch.func.grad(lambda c, x: torch.tanh(x * c).square().sum()), (None, 0))(
        s["gain"], b["x"]
    )
    clipped = slope / slope.norm(dim=1, keepdim=True).clamp(min=1)
    if bug == "by the norm of all":
        clipped = slope / slope.sum(0).norm().clamp(min=1)
    return psum(clipped.sum(0), ax["dp"]).square().sum()


CASES = {
    "info nce": (trained("t", info_nce), ("own negatives", "mean of own rows")),
    "clip": (trained("t u one", clip), ("own pairs",)),
    "sup con": (trained("t", sup_con), ("own anchors", "own classes, all features")),
    "vicreg": (trained("t", vicreg), ("own rows", "no enter")),
    "barlow": (metric(barlow), ("squared parts",)),
    "sinkhorn": (metric(sinkhorn), ("own columns",)),
    "ppo": (trained("t", ppo), ("own mean", "own deviation", "mean of own rows")),
    "grpo": (trained("t", grpo), ("by own rows, then the penalty",)),
    "dpo": (trained("gain", dpo), ("penalty of each rank",)),
    "distill": (trained("t", distill), ("batchmean of own rows",)),
    "distill, reported": (metric(reported_distill), ("not divided",)),
    "hinge gan": (trained("u gain", hinge_gan), ("penalty of own mean",)),
    "wasserstein": (metric(wasserstein), ("sorted parts",)),
    "mmd": (trained("gain", mmd), ("own pairs",)),
    "dice": (trained("gain", dice), ("own ratio", "one reduced", "of every rank")),
    "hard triplets": (metric(hard_triplets), ("own rows",)),
    "hardest": (metric(hardest), ("of own rows",)),
    "mean entropy": (trained("t", mean_entropy), ("of own mean", "no enter")),
    "switch balance": (trained("t", switch_balance), ("own shares",)),
    "masked tokens": (trained("gain", masked_tokens), ("own count", "counts of own, mean")),
    "softmax weights": (trained("gain", softmax_weights), ("own total", "own largest")),
    "cox": (metric(cox), ("own patients",)),
    "coral": (metric(coral), ("of own rows",)),
    "orthogonal": (trained("t u", orthogonal), ("once a rank",)),
    "shard penalty": (trained("gain flat", shard_penalty), ("norm of the shard", "no enter")),
    "jacobian penalty": (trained("t", jacobian_penalty), ("mean of own rows",)),
    "per example": (metric(per_example), ("by the norm of all",)),
}  # fmt: skip
