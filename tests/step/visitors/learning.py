"""Losses of visitors: contrast, distillation, preference, rewards, games, retrieval, survival, statistics over rows."""

import torch
import torch.nn.functional as F

from fmegatron import step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, psum, shard
from tests.step.visitors.setting import grads, sgd, table

CASES, case = table()
X = {"x": "4@dp 6", "y": "4@dp 6"}
W = {"w": "6 6"}


@case({**W, "teacher": "6 6"}, X, "teacher of unsummed", "no sum")
def predicted_latents(ax, s, b, bug):
    def loss(p):
        aim = torch.tanh(b["y"] @ s["teacher"])
        return F.smooth_l1_loss(torch.tanh(b["x"] @ p["w"]), aim, reduction="sum")

    total, g = grads(loss, s, "w")
    mine = s["w"] - 0.1 * g["w"]
    new = mine if bug == "no sum" else s["w"] - 0.1 * psum(g["w"], ax["dp"])
    teacher = 0.99 * s["teacher"] + 0.01 * (mine if bug == "teacher of unsummed" else new)
    return {"w": new, "teacher": teacher}, {"loss": psum(total, ax["dp"])}


@case(W, X, "own mean", "own variance", "sums over tp", "statistics without gradient's sum")
def variance_kept(ax, s, b, bug):
    dp = ax["tp" if bug == "sums over tp" else "dp"]
    entered = (lambda v: v) if bug == "statistics without gradient's sum" else (lambda v: enter(v, ax["dp"]))

    def loss(p):
        z = b["x"] @ p["w"]
        n = z.shape[0] * ax["dp"].size
        mean = z.mean(0) if bug == "own mean" else psum(z.sum(0), dp) / n
        c = z - entered(mean)
        var = c.square().mean(0) if bug == "own variance" else psum(c.square().sum(0), dp) / n
        return (torch.relu(1 - var.sqrt())).sum() / ax["dp"].size + 0.1 * c.abs().sum() / n

    def right(p):
        z = b["x"] @ p["w"]
        n = z.shape[0] * ax["dp"].size
        mean = psum(z.sum(0), ax["dp"]) / n
        c = z - enter(mean, ax["dp"])
        var = psum(c.square().sum(0), ax["dp"]) / n
        return enter(torch.relu(1 - var.sqrt()).sum() / ax["dp"].size, ax["dp"]) + 0.1 * c.abs().sum() / n

    return sgd(ax, s, "w", loss if bug else right)


@case(W, X, "own correlation", "own scale", "no enter")
def redundancy(ax, s, b, bug):
    dp = ax["dp"]

    def loss(p):
        z, y = b["x"] @ p["w"], b["y"] @ p["w"]
        z, y = (
            v / (enter(psum(v.square().sum(0), dp), dp).sqrt() if bug != "own scale" else v.norm(dim=0)) for v in (z, y)
        )
        c = z.mT @ y
        c = c if bug == "own correlation" else psum(c, dp)
        whole = (c - torch.eye(6, dtype=c.dtype, device=c.device)).square().sum() / dp.size
        return whole if bug == "no enter" else enter(whole, dp)

    return sgd(ax, s, "w", loss)


@case({**W, "key": "6 6", "queue": "4*dp 6"}, X, "own keys stored", "keys of unsummed", "negatives own")
def queue_of_keys(ax, s, b, bug):
    dp = ax["dp"]
    k = F.normalize(b["y"] @ s["key"], dim=-1)

    def loss(p):
        q = F.normalize(b["x"] @ p["w"], dim=-1)
        others = shard(s["queue"], dp, 0) if bug == "negatives own" else s["queue"]
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ others.mT], -1) / 0.2
        return F.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.long), reduction="sum")

    total, g = grads(loss, s, "w")
    new = s["w"] - 0.1 * psum(g["w"], dp)
    key = 0.9 * s["key"] + 0.1 * (s["w"] - 0.1 * g["w"] if bug == "keys of unsummed" else new)
    queue = k.repeat(dp.size, 1) if bug == "own keys stored" else all_gather(k, dp, 0)
    return {"w": new, "key": key, "queue": queue}, {"loss": psum(total, dp)}


@case(W, X, "labels of rank 0", "own negatives")
def both_towers(ax, s, b, bug):
    dp = ax["dp"]

    def loss(p):
        q, d = (F.normalize(b[n] @ p["w"], dim=-1) for n in "xy")
        if bug == "own negatives":
            return F.cross_entropy(q @ d.mT / 0.3, torch.arange(q.shape[0], device=q.device), reduction="sum")
        every = all_gather(d, dp, 0)
        at = torch.arange(q.shape[0], device=q.device)
        at = at if bug == "labels of rank 0" else at + axis_index(dp, like=q) * q.shape[0]
        return F.cross_entropy(q @ every.mT / 0.3, at, reduction="sum")

    return sgd(ax, s, "w", loss)


@case({"protos": "5 6", "w": "6 6"}, X, "own columns")
def balanced_clusters(ax, s, b, bug):
    dp = ax["dp"]
    with torch.no_grad():
        q = torch.exp(b["y"] @ s["protos"].mT)
        q = q / psum(q.sum(), dp)
        for _ in range(3):
            column = q.sum(0, keepdim=True)
            q = q / (column if bug == "own columns" else psum(column, dp)) / 5
            q = q / q.sum(1, keepdim=True)

    def loss(p):
        return -(q * F.log_softmax(b["x"] @ p["w"] @ p["protos"].mT, -1)).sum()

    return sgd(ax, s, "protos w", loss)


@case({"w": "6 5"}, {**X, "act": "int5 4@dp", "adv": "4@dp"}, "own mean", "own deviation", "ratio's mean own")
def clipped_policy(ax, s, b, bug):
    dp = ax["dp"]
    n = b["adv"].shape[0] * dp.size
    mean = b["adv"].mean() if bug == "own mean" else psum(b["adv"].sum(), dp) / n
    c = b["adv"] - mean
    spread = c.square().mean() if bug == "own deviation" else psum(c.square().sum(), dp) / n
    adv = c / (spread.sqrt() + 1e-4)

    def loss(p):
        logp = F.log_softmax(b["x"] @ p["w"], -1).gather(-1, b["act"].unsqueeze(-1)).squeeze(-1)
        ratio = (logp - F.log_softmax(b["y"] @ s["w"], -1)[:, 0].detach()).exp()
        if bug == "ratio's mean own":
            ratio = ratio / ratio.mean()
        return -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).sum() / n

    return sgd(ax, s, "w", loss)


@case({"w": "6 5", "ref": "6 5"}, {"h": "3@dp 4 6", "tok": "int5 3@dp 4", "r": "3@dp 4", "m": "mask 3@dp 4"},
      "own tokens", "tokens over tp", "kl not summed")  # fmt: skip
def grouped_advantages(ax, s, b, bug):
    """Groups of four answers to a prompt stand in one row, so that a rank has them whole."""
    dp = ax["dp"]
    adv = (b["r"] - b["r"].mean(1, keepdim=True)) / (b["r"].std(1, keepdim=True) + 1e-4)
    n = b["m"].sum() if bug == "own tokens" else psum(b["m"].sum(), ax["tp"] if bug == "tokens over tp" else dp)

    def logp(w):
        return F.log_softmax(b["h"] @ w, -1).gather(-1, b["tok"][..., None])[..., 0]

    def loss(p):
        new, ref = logp(p["w"]), logp(s["ref"])
        kl = (ref - new).exp() - (ref - new) - 1
        return ((0.1 * kl - (new - new.detach()).exp() * adv) * b["m"]).sum() / (n + 1)

    state, metrics = sgd(ax, s, "w", loss)
    kl = (logp(s["ref"]) - logp(s["w"])).square().sum()
    return state, {**metrics, "kl": kl if bug == "kl not summed" else psum(kl, dp)}


@case({"w": "6 4@tp", "ref": "6 4@tp"}, {"good": "3@dp 6", "bad": "3@dp 6", "a": "int4 3@dp"}, "own normalizer",
      "target not summed", "own maximum alone")  # fmt: skip
def preferences(ax, s, b, bug):
    tp = ax["tp"]

    def logp(w, x):
        logits = x @ w
        top = logits.detach().amax(-1, keepdim=True)
        top = top if bug == "own maximum alone" else pmax(top, tp)
        z = (logits - top).exp().sum(-1)
        z = z if bug == "own normalizer" else psum(z, tp)
        first = logits.sum(-1) if bug == "target not summed" else psum(logits.sum(-1), tp)
        return first - z.log() - top[:, 0]

    def loss(p):
        margin = [logp(p["w"], b[n]) - logp(s["ref"], b[n]) for n in ("good", "bad")]
        return -F.logsigmoid(margin[0] - margin[1]).sum()

    return sgd(ax, s, "w", loss)


@case({"v": "6"}, {"seq": "3@dp 5 6", "r": "3@dp 5"}, "own error", "values of own mean")
def generalized_advantages(ax, s, b, bug):
    value = b["seq"] @ s["v"]
    delta, back, out = b["r"] + 0.9 * F.pad(value[:, 1:], (0, 1)) - value, 0.0, []
    for t in reversed(range(5)):
        back = delta[:, t] + 0.8 * back
        out.insert(0, back)
    aim = torch.stack(out, 1) + value
    if bug == "values of own mean":
        aim = aim - aim.mean()
    state, metrics = sgd(ax, s, "v", lambda p: (b["seq"] @ p["v"] - aim).square().sum())
    explained = (aim - value).square().sum()
    return state, {**metrics, "error": explained if bug == "own error" else psum(explained, ax["dp"])}


@case({"d": "6 5", "e": "5", "g": "6 6"}, X, "critic not summed", "generator not summed", "penalty of the mean")
def critic_with_penalty(ax, s, b, bug):
    dp = ax["dp"]

    def critic(p, x):
        return torch.tanh(x @ p["d"]) @ p["e"]

    fake = torch.tanh(b["y"] @ s["g"])

    def of_critic(p):
        mid = ((b["x"] + fake) / 2).detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(p, mid).sum(), mid, create_graph=True)
        norm = slope.norm(dim=-1)
        norm = norm.mean() if bug == "penalty of the mean" else norm
        return critic(p, fake.detach()).sum() - critic(p, b["x"]).sum() + (norm - 1).square().sum()

    total, g = grads(of_critic, s, "d e")
    new = {n: s[n] - 0.1 * (x if bug == "critic not summed" else psum(x, dp)) for n, x in g.items()}
    _, g = grads(lambda p: -critic({**p, **new}, torch.tanh(b["y"] @ p["g"])).sum(), s, "g")
    new["g"] = s["g"] - 0.1 * (g["g"] if bug == "generator not summed" else psum(g["g"], dp))
    return new, {"loss": psum(total, dp)}


@case({"w": "6", "u": "6 6", "s": "2"}, X, "counted on each rank", "weights not summed")
def tasks_by_uncertainty(ax, s, b, bug):
    dp = ax["dp"]

    def loss(p):
        h = torch.tanh(b["x"] @ p["u"])
        parts = torch.stack([(h @ p["w"] - b["y"][:, 0]).square().sum(), (h - b["y"]).abs().sum()])
        own = p["s"].sum()
        return (parts * (-p["s"]).exp()).sum() + (own if bug == "counted on each rank" else own / dp.size)

    return sgd(ax, s, "w u s", loss, also="s" if bug == "weights not summed" else "")


@case({"w": "6"}, {"x": "4@dp 6", "time": "4@dp", "event": "mask 4@dp"}, "own risk", "over tp")
def survival(ax, s, b, bug):
    dp = ax["dp"]

    def loss(p):
        score = b["x"] @ p["w"]
        if bug == "own risk":
            times, scores = b["time"], score
        else:
            over = ax["tp"] if bug == "over tp" else dp
            times, scores = all_gather(b["time"], over, 0), all_gather(score, over, 0)
        risk = torch.where(times[None, :] >= b["time"][:, None], scores.exp()[None, :], 0.0).sum(1)
        return (b["event"] * (risk.log() - score)).sum()

    return sgd(ax, s, "w", loss)


@case({"book": "5 6", "n": "5", "sums": "5 6"}, X, "own counts", "own sums", "own codes")
def codebook(ax, s, b, bug):
    dp = ax["dp"]
    code = torch.cdist(b["x"], s["book"]).argmin(-1)
    hot = F.one_hot(code, 5).to(b["x"].dtype)
    n, sums = hot.sum(0), hot.mT @ b["x"]
    n = 0.9 * s["n"].abs() + 0.1 * (n if bug == "own counts" else psum(n, dp))
    sums = 0.9 * s["sums"] + 0.1 * (sums if bug == "own sums" else psum(sums, dp))
    used = hot.sum(0)
    used = used if bug == "own codes" else psum(used, dp)
    return {"book": sums / (n.unsqueeze(-1) + 0.1), "n": n, "sums": sums}, {"used": (used > 0).sum()}


@case({"w": "6 5", "t": "6 5", "center": "5"}, X, "own center", "center of a sum", "sharp over rows")
def centered_teacher(ax, s, b, bug):
    dp = ax["dp"]
    z = b["y"] @ s["t"]
    aim = torch.softmax((z - s["center"]) / 0.3, 0 if bug == "sharp over rows" else -1)
    state, metrics = sgd(ax, s, "w", lambda p: -(aim * F.log_softmax(b["x"] @ p["w"], -1)).sum())
    mean = z.mean(0)
    if bug != "own center":
        mean = psum(mean, dp) if bug == "center of a sum" else psum(mean, dp) / dp.size
    return {**state, "center": 0.9 * s["center"] + 0.1 * mean, "t": 0.9 * s["t"] + 0.1 * state["w"]}, metrics


@case({**W, "run": "6"}, X, "own mean", "own square", "own count", "running of own")
def normalized_over_ranks(ax, s, b, bug):
    dp = ax["dp"]

    def both(p):
        h = b["x"] @ p["w"]
        n = torch.tensor(float(h.shape[0]), dtype=h.dtype, device=h.device)
        first, second = h.sum(0), h.square().sum(0)
        first = first if bug == "own mean" else psum(first, dp)
        second = second if bug == "own square" else psum(second, dp)
        n = n if bug == "own count" else psum(n, dp)
        return h, first / n, second / n

    def loss(p):
        h, mean, square = both(p)
        mean, square = enter(mean, dp), enter(square, dp)
        return ((h - mean) / (square - mean.square() + 1e-3).abs().sqrt() - b["y"]).square().sum()

    state, metrics = sgd(ax, s, "w", loss)
    h, mean, _ = both(s)
    return {**state, "run": 0.9 * s["run"] + 0.1 * (h.mean(0) if bug == "running of own" else mean)}, metrics


@case({"w": "6 5"}, {**X, "lab": "int5 4@dp"}, "own bins", "mean of exps", "own maximum", "rates averaged")
def metrics(ax, s, b, bug):
    dp = ax["dp"]
    logits = b["x"] @ s["w"]
    nll = F.cross_entropy(logits, b["lab"], reduction="none")
    bins = F.one_hot(b["lab"], 5).sum(0)
    hit = (logits.argmax(-1) == b["lab"]).double()
    of = (b["lab"] < 3).double()
    count = torch.tensor(nll.shape[0], device=nll.device)
    rate = (hit * of).sum() / (of.sum() + 1)
    return s, {
        "bins": bins if bug == "own bins" else psum(bins, dp),
        "ppl": psum((nll.sum() / nll.shape[0]).exp(), dp) / dp.size if bug == "mean of exps"
        else (psum(nll.sum(), dp) / psum(count, dp)).exp(),
        "top": logits.amax() if bug == "own maximum" else pmax(logits.amax(), dp),
        "rate": psum(rate, dp) / dp.size if bug == "rates averaged"
        else psum((hit * of).sum(), dp) / (psum(of.sum(), dp) + 1),
    }  # fmt: skip


@case({"w": "6 6"}, {"x": "4@dp 6"}, "own median", "own deviation")
def robust_scale(ax, s, b, bug):
    dp = ax["dp"]
    h = b["x"] @ s["w"]
    whole = h if bug == "own median" else all_gather(h, dp, 0)
    median = whole.sort(0).values[whole.shape[0] // 2]
    off = (h - median).abs().sum(0)
    off = off if bug == "own deviation" else psum(off, dp)
    return {"w": s["w"] - 0.01 * off * median}, {"m": median.square().sum()}


@case({"w": "6 5"}, {"x": "4@dp 6", "lab": "int5 4@dp"}, "squares of sums", "not summed")
def fisher(ax, s, b, bug):
    def nll(w, x, y):
        return -F.log_softmax(x @ w, -1).gather(-1, y.unsqueeze(-1)).sum()

    each = torch.func.vmap(torch.func.grad(nll), (None, 0, 0))(s["w"], b["x"], b["lab"])
    square = each.sum(0).square() if bug == "squares of sums" else each.square().sum(0)
    square = square if bug == "not summed" else psum(square, ax["dp"])
    return {"w": s["w"] - 0.1 * psum(each.sum(0), ax["dp"]) / (square + 0.1)}, {"m": square.sum()}


@case({"w": "6 6"}, {"sup": "3@dp 4 6", "ask": "3@dp 4 6"}, "inner of all own tasks", "not summed")
def learned_to_learn(ax, s, b, bug):
    def inner(w, x):
        return (torch.tanh(x @ w) - x).square().mean()

    def outer(w):
        if bug == "inner of all own tasks":
            fast = w - 0.3 * torch.func.grad(inner)(w, b["sup"].flatten(0, 1))
            return inner(fast, b["ask"]) * b["ask"].shape[0]
        return torch.func.vmap(lambda x, y: inner(w - 0.3 * torch.func.grad(inner)(w, x), y))(b["sup"], b["ask"]).sum()

    g, total = torch.func.grad_and_value(outer)(s["w"])
    return {"w": s["w"] - (g if bug == "not summed" else psum(g, ax["dp"]))}, {"loss": psum(total, ax["dp"])}


@case({"w": "6 6"}, {**X, "m": "mask 4@dp 6"}, "count of all ranks", "total of all ranks")
def mean_by_parts(ax, s, b, bug):
    dp = ax["dp"]

    def loss(p):
        error = ((b["x"] @ p["w"] - b["y"]).square() * b["m"]).sum()
        n = b["m"].sum()
        return step.mean(psum(error, dp) if bug.startswith("total") else error,
                         psum(n, dp) if bug.startswith("count") else n)  # fmt: skip

    (total, _), g = step.value_and_grad(loss)({"w": s["w"]})
    new = step.reduce_gradients(g)
    return {"w": s["w"] - 0.1 * new["w"]}, {"loss": total}
