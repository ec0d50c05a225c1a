"""Updates, optimizers and reports of strangers: averages, norms, factors, codebooks, buffers, confusion matrices."""

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, pmax, psum, reduce_scatter
from tests.step.strangers.setting import metric


def square_loss(ax, b):
    return lambda p: (b["x"] @ p["t"] - b["y"]).square().sum() / (len(b["x"]) * ax["dp"].size)


def raw(ax, s, b, names="t"):
    """Gradients that are not summed."""
    one = dict(zip(names.split(), (s[n].detach().requires_grad_() for n in names.split()), strict=True))
    grads = torch.autograd.grad(square_loss(ax, b)({**s, **one}), tuple(one.values()))
    return dict(zip(one, grads, strict=True))


def ema(ax, s, b, bug):
    g = raw(ax, s, b)["t"]
    t = s["t"] - 0.1 * psum(g, ax["dp"])
    source = s["t"] - 0.1 * g if bug == "of its own step" else t
    return {**s, "t": t, "u": 0.9 * s["u"] + 0.1 * source}, {}


def momentum(ax, s, b, bug):
    g = raw(ax, s, b)["t"]
    m = 0.9 * s["u"] + g
    if bug == "sums the momentum too":
        m = psum(m, ax["dp"])
    elif not bug:
        m = 0.9 * s["u"] + psum(g, ax["dp"])
    t = s["t"] - 0.1 * (psum(m, ax["dp"]) if bug == "own momentum" else m)
    return {**s, "t": t, "u": m}, {}


def decay(ax, s, b, bug):
    g = raw(ax, s, b)["t"]
    if bug == "decay before the sum":
        return {**s, "t": s["t"] - psum(0.1 * g + 0.01 * s["t"], ax["dp"])}, {}
    return {**s, "t": s["t"] - 0.1 * psum(g, ax["dp"]) - 0.01 * s["t"]}, {}


def lars(ax, s, b, bug):
    """The trust ratio of a matrix of which each rank has columns."""
    w, g = s["up"], s["gate"]

    def norm(z):
        return z.norm() if bug == "own norms" else psum(z.square().sum(), ax["tp"]).sqrt()

    if bug == "sum of norms":

        def norm(z):
            return psum(z.norm(), ax["tp"])

    return {**s, "up": w - 0.1 * norm(w) / (norm(g) + 1e-8) * g}, {}


def factored(ax, s, b, bug):
    """Adafactor of columns on ranks: rows are averaged over all columns."""
    g2 = s["gate"].square() + 1e-30
    rows = g2.mean(1) if bug == "own rows" else psum(g2.sum(1), ax["tp"]) / (g2.shape[1] * ax["tp"].size)
    if bug == "summed means":
        rows = psum(g2.mean(1), ax["tp"])
    columns = g2.mean(0)
    update = s["gate"] / (rows / rows.mean())[:, None].sqrt() / columns[None].sqrt()
    return {**s, "up": s["up"] - 0.1 * update}, {"rows": rows.sum()}


def clipped(ax, s, b, bug):
    tp = ax["tp"]
    total = s["up"].square().sum() + s["down"].square().sum()
    if bug == "counts what all have":
        norm = psum(total + s["t"].square().sum(), tp).sqrt()
    elif bug == "own norm":
        norm = (total + s["t"].square().sum()).sqrt()
    elif bug == "summed norms":
        norm = psum(total.sqrt(), tp) + s["t"].norm()
    else:
        norm = (psum(total, tp) + s["t"].square().sum()).sqrt()
    scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
    return {**s, **{n: s[n] * scale for n in ("up", "down", "t")}}, {"norm": norm}


def sam(ax, s, b, bug):
    g = raw(ax, s, b)["t"]
    g = g if bug == "climbs its own slope" else psum(g, ax["dp"])
    there = {**s, "t": s["t"] + 0.05 * g / g.norm()}
    return {**s, "t": s["t"] - 0.1 * psum(raw(ax, there, b)["t"], ax["dp"])}, {}


def centralized(ax, s, b, bug):
    g = s["down"]
    mean = g.mean(0) if bug == "mean of own rows" else psum(g.sum(0), ax["tp"]) / (len(g) * ax["tp"].size)
    return {**s, "down": g - mean}, {}


def signs(ax, s, b, bug):
    g = raw(ax, s, b)["t"]
    g = psum(g.sign(), ax["dp"]) if bug == "of each rank" else psum(g, ax["dp"]).sign()
    return {**s, "t": s["t"] - 0.01 * g}, {}


def zero(ax, s, b, bug):
    """Gradients are scattered, each rank updates its rows, parameters are gathered."""
    dp = ax["dp"]
    c = s["flat"]
    whole = all_gather(c, dp, 0).detach().requires_grad_()
    (g,) = torch.autograd.grad((b["x"] @ whole[:6]).square().sum(), whole)
    g = psum(g, dp) if bug == "summed, then scattered" else g
    own = reduce_scatter(g, dp, 0)
    own = g.view(dp.size, -1).sum(0) if bug == "not scattered" else own
    return {**s, "flat": c - 0.1 * own}, {}


def newton_schulz(ax, s, b, bug):
    w = s["up"] if bug == "of the shard" else all_gather(s["up"], ax["tp"], 1)
    x = w / w.norm()
    for _ in range(2):
        gram = x @ x.T
        x = 1.5 * x - 0.5 * gram @ x
    return s, {"m": (psum(x.square().sum(), ax["tp"]) if bug else x.square().sum())}


def gram_by_parts(ax, s, b, bug):
    """The same, its products summed over the ranks."""
    add = (lambda z: z) if bug == "own products" else (lambda z: psum(z, ax["tp"]))
    x = s["up"] / psum(s["up"].square().sum(), ax["tp"]).sqrt()
    for _ in range(2):
        x = 1.5 * x - 0.5 * add(x @ x.T) @ x
    return {**s, "up": s["up"] - 0.1 * x}, {}


def accumulated(ax, s, b, bug):
    total = torch.zeros_like(s["t"])
    for i in range(2):
        part = {n: b[n].chunk(2)[i] for n in ("x", "y")}
        g = raw(ax, s, {**b, **part})["t"]
        total = psum(total + g, ax["dp"]) if bug == "the sum so far, each time" else total + g
    return {**s, "t": s["t"] - 0.1 * (total if bug else psum(total, ax["dp"]))}, {}


def lookahead(ax, s, b, bug):
    fast = s["t"]
    for _ in range(2):
        g = raw(ax, {**s, "t": fast}, b)["t"]
        fast = fast - 0.1 * (g if bug == "own fast weights" else psum(g, ax["dp"]))
    slow = s["u"] + 0.5 * (fast - s["u"])
    if bug:
        slow = psum(slow, ax["dp"]) / ax["dp"].size
    return {**s, "t": slow, "u": slow}, {}


def kfac(ax, s, b, bug):
    a = b["x"].T @ b["x"]
    a = a / len(b["x"]) if bug == "own factor" else psum(a, ax["dp"]) / (len(b["x"]) * ax["dp"].size)
    g = psum(raw(ax, s, b)["t"], ax["dp"])
    step = torch.linalg.solve(a + torch.eye(6, dtype=a.dtype), g)
    return {**s, "t": s["t"] - (psum(step, ax["dp"]) / ax["dp"].size if bug else step)}, {}


def skips(ax, s, b, bug):
    g = raw(ax, s, b)["t"]
    bad = (~g.isfinite()).any() if bug == "own flag" else None
    g = psum(g, ax["dp"])
    bad = (~g.isfinite()).any() if bad is None else bad
    new = torch.where(bad, s["t"], s["t"] - 0.1 * g)
    return {**s, "t": new}, {"bad": pmax(bad.double(), ax["dp"]) if bug else bad.double()}


def outliers(ax, s, b, bug):
    """A step is left out where a row's loss is too large."""
    worst = (b["x"] @ s["t"] - b["y"]).square().sum(-1).amax()
    worst = (
        worst if bug == "own worst" else psum(worst, ax["dp"]) if bug == "sum of the worst" else pmax(worst, ax["dp"])
    )
    keep = (worst < 40).double()
    return {**s, "t": s["t"] - 0.1 * keep * psum(raw(ax, s, b)["t"], ax["dp"])}, {"worst": worst}


def buffers(ax, s, b, bug):
    mean = b["x"].mean(0) if bug == "of own rows" else psum(b["x"].sum(0), ax["dp"]) / (len(b["x"]) * ax["dp"].size)
    if bug == "sum of means":
        mean = psum(b["x"].mean(0), ax["dp"])
    return {**s, "bias": 0.9 * s["bias"] + 0.1 * mean}, {}


def kmeans(ax, s, b, bug):
    near = F.one_hot(torch.cdist(b["x"], s["book"]).argmin(1), 4).double()
    total, count = near.T @ b["x"], near.sum(0)
    if bug == "mean of means":
        new = psum(total / count.clamp(min=1)[:, None], ax["dp"]) / ax["dp"].size
    elif bug == "own counts":
        new = psum(total, ax["dp"]) / count.clamp(min=1)[:, None]
    else:
        new = psum(total, ax["dp"]) / psum(count, ax["dp"]).clamp(min=1)[:, None]
    return {**s, "book": new}, {}


def codebook(ax, s, b, bug):
    """VQ-VAE with averages; codes that are not used stay."""
    d = b["x"].square().sum(1, keepdim=True) - 2 * b["x"] @ s["book"].T + s["book"].square().sum(1)
    hot = torch.zeros_like(d).scatter_(1, d.argmin(1, keepdim=True), 1.0)
    count, total = (psum(hot.sum(0), ax["dp"]), hot.T @ b["x"])
    total = total if bug == "own sums" else psum(total, ax["dp"])
    new = torch.where((count > 0)[:, None], 0.9 * s["book"] + 0.1 * total / count.clamp(min=1)[:, None], s["book"])
    return {**s, "book": new}, {"used": (count > 0).sum()}


def power_sgd(ax, s, b, bug):
    g, dp = raw(ax, s, b)["t"], ax["dp"]
    p = g @ s["a"] if bug == "own factor" else psum(g @ s["a"], dp)
    p = torch.linalg.qr(p).Q
    q = g.T @ p if bug == "last not summed" else psum(g.T @ p, dp)
    return {**s, "t": s["t"] - 0.1 * p @ q.T, "a": q}, {}


def averaged(ax, s, b, bug):
    """DDP: means of own rows, averaged."""
    one = s["t"].detach().requires_grad_()
    (g,) = torch.autograd.grad((b["x"] @ one - b["y"]).square().mean(), one)
    g = psum(g, ax["dp"])
    return {**s, "t": s["t"] - 0.1 * (g if bug == "not averaged" else g / ax["dp"].size)}, {}


def accuracy(ax, s, b, bug):
    hit = ((b["x"] @ s["t"]).argmax(-1) == b["ids"]).double()
    return hit.mean() if bug == "own" else psum(hit.sum(), ax["dp"]) / (len(hit) * ax["dp"].size)


def perplexity(ax, s, b, bug):
    nll = F.cross_entropy(b["x"] @ s["t"], b["ids"], reduction="none") * b["mask"][:, 0]
    total, count, dp = nll.sum(), b["mask"][:, 0].sum(), ax["dp"]
    if bug == "of parts":
        return psum((total / count).exp(), dp) / dp.size
    if bug == "one sum":
        return (psum(total, dp) / count).exp()
    return (psum(total, dp) / psum(count, dp)).exp()


def ranking(ax, s, b, bug):
    score, label = b["x"] @ s["gain"], b["mask"][:, 0]
    if bug != "own pairs":
        score, label = all_gather(score, ax["dp"], 0), all_gather(label, ax["dp"], 0)
    better = torch.sigmoid(score[:, None] - score[None]) * label[:, None] * (1 - label[None])
    pairs = label.sum() * (1 - label).sum()
    auc = better.sum() / pairs.clamp(min=1)
    return psum(auc, ax["dp"]) / ax["dp"].size if bug else auc


def confusion(ax, s, b, bug):
    said = (b["x"] @ s["t"]).argmax(-1)
    m = torch.zeros(36, dtype=torch.float64).scatter_add(
        0, b["ids"] * 6 + said, torch.ones(len(said), dtype=torch.float64)
    )
    m = m if bug else psum(m, ax["dp"])
    f1 = 2 * m.view(6, 6).diagonal() / (m.view(6, 6).sum(0) + m.view(6, 6).sum(1)).clamp(min=1)
    return psum(f1.mean(), ax["dp"]) / ax["dp"].size if bug == "of parts" else f1.mean()


def r_squared(ax, s, b, bug):
    dp, y = ax["dp"], b["rew"]
    mean = y.mean() if bug == "own mean" else psum(y.sum(), dp) / (len(y) * dp.size)
    left = psum((y - b["x"] @ s["gain"]).square().sum(), dp)
    spread = psum((y - mean).square().sum(), dp)
    if bug == "by the summed variance":
        spread = psum(y.var(correction=0) * len(y), dp)
    return 1 - left / spread


def histogram(ax, s, b, bug):
    counts = torch.histc(b["x"] @ s["gain"], 8, -2, 2)
    counts = counts if bug else psum(counts, ax["dp"])
    share = counts / counts.sum()
    entropy = -(share * (share + 1e-9).log()).sum()
    return psum(entropy, ax["dp"]) / ax["dp"].size if bug else entropy


def quantile(ax, s, b, bug):
    r = b["rew"] if bug else all_gather(b["rew"], ax["dp"], 0)
    q = torch.quantile(r, 0.5)
    return psum(q, ax["dp"]) / ax["dp"].size if bug else q


def noise_scale(ax, s, b, bug):
    g, dp = raw(ax, s, b)["t"] * ax["dp"].size, ax["dp"]
    small = psum(g.square().sum(), dp) / dp.size
    whole = psum(g, dp) / dp.size
    large = (g if bug == "own" else whole).square().sum()
    return psum(large / small, dp) / dp.size if bug == "own" else large + 0 * small


def queue(ax, s, b, bug):
    """MoCo: keys of all ranks replace the oldest."""
    keys = F.normalize(b["x"] @ s["t"], dim=-1)[:1]
    new = keys.repeat(ax["dp"].size, 1) if bug == "own keys" else all_gather(keys, ax["dp"], 0)
    return {
        **s,
        "book": torch.cat([s["book"], new])[-4:] if bug else torch.cat([s["book"][:0], s["book"] + new.sum(0)]),
    }, {}


def whitened(ax, s, b, bug):
    dp, n = ax["dp"], len(b["x"]) * ax["dp"].size
    x = b["x"] - psum(b["x"].sum(0), dp) / n
    cov = x.T @ x / len(x) if bug == "own covariance" else psum(x.T @ x, dp) / n
    root = torch.linalg.cholesky(cov + 0.1 * torch.eye(6, dtype=x.dtype))
    return psum(torch.linalg.solve_triangular(root, x.T, upper=False).pow(4).sum(), dp)


CASES = {
    "ema": (ema, ("of its own step",)),
    "momentum": (momentum, ("sums the momentum too", "own momentum")),
    "decay": (decay, ("decay before the sum",)),
    "lars": (lars, ("own norms", "sum of norms")),
    "factored": (factored, ("own rows", "summed means")),
    "clipped": (clipped, ("counts what all have", "own norm", "summed norms")),
    "sam": (sam, ("climbs its own slope",)),
    "centralized": (centralized, ("mean of own rows",)),
    "signs": (signs, ("of each rank",)),
    "zero": (zero, ("summed, then scattered", "not scattered")),
    "newton-schulz": (newton_schulz, ("of the shard",)),
    "gram by parts": (gram_by_parts, ("own products",)),
    "accumulated": (accumulated, ("the sum so far, each time",)),
    "lookahead": (lookahead, ("own fast weights",)),
    "kfac": (kfac, ("own factor",)),
    "skips": (skips, ()),
    "outliers": (outliers, ("own worst", "sum of the worst")),
    "buffers": (buffers, ("of own rows", "sum of means")),
    "k-means": (kmeans, ("mean of means", "own counts")),
    "codebook": (codebook, ("own sums",)),
    "power sgd": (power_sgd, ("own factor", "last not summed")),
    "averaged": (averaged, ("not averaged",)),
    "accuracy": (metric(accuracy), ("own",)),
    "perplexity": (metric(perplexity), ("of parts", "one sum")),
    "ranking": (metric(ranking), ("own pairs",)),
    "confusion": (metric(confusion), ("of parts",)),
    "r squared": (metric(r_squared), ("own mean", "by the summed variance")),
    "histogram": (metric(histogram), ("of parts",)),
    "quantile": (metric(quantile), ("of parts",)),
    "whitened": (metric(whitened), ("own covariance",)),
}  # fmt: skip
