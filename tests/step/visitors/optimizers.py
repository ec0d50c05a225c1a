"""Updates of visitors: optimizers written by hand on split arrays, compression, local steps, averages, bookkeeping."""

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, axis_index, pmax, psum, reduce_scatter, shard
from tests.step.visitors.setting import grads, table

CASES, case = table()
X = {"x": "4@dp 6", "y": "4@dp 6"}
MLP = {"up": "6 5@tp", "down": "5@tp 6"}


def taken(ax, s, b, names="up down"):
    """(loss, gradients) of a small network; only the sum over dp is open."""

    def loss(p):
        return (psum(F.silu(b["x"] @ p["up"]) @ p["down"], ax["tp"]) - b["y"]).square().sum()

    return grads(loss, s, names)


def plain(ax, s, b):
    return grads(lambda p: (torch.tanh(b["x"] @ p["w"]) - b["y"]).square().sum(), s, "w")


@case({**MLP, "m": "6 5@tp", "v": "6 5@tp"}, X, "second of own", "first of own", "summed later")
def adam(ax, s, b, bug):
    total, g = taken(ax, s, b)
    own, g = g["up"], {n: psum(x, ax["dp"]) for n, x in g.items()}
    m = 0.9 * s["m"] + 0.1 * (own if bug == "first of own" else g["up"])
    v = 0.9 * s["v"].square() + 0.1 * (own if bug in ("second of own", "summed later") else g["up"]).square()
    v = psum(v, ax["dp"]) if bug == "summed later" else v
    new = s["up"] - 0.1 * m / (v.sqrt() + 1e-3)
    return {"up": new, "down": s["down"] - 0.1 * g["down"], "m": m, "v": v.sqrt()}, {"loss": psum(total, ax["dp"])}


@case(MLP, X, "own norm of weights", "own norm of update", "norms over dp")
def trust_ratio(ax, s, b, bug):
    total, g = taken(ax, s, b)
    over = ax["dp" if bug == "norms over dp" else "tp"]
    new = {}
    for n, x in g.items():
        u = psum(x, ax["dp"])
        w2, u2 = s[n].square().sum(), u.square().sum()
        w2 = w2 if bug == "own norm of weights" else psum(w2, over)
        u2 = u2 if bug == "own norm of update" else psum(u2, over)
        new[n] = s[n] - 0.1 * (w2 / u2).sqrt() * u
    return new, {"loss": psum(total, ax["dp"])}


@case({"w": "6 5@tp", "stat": "6 6"}, {"x": "4@dp 6", "y": "4@dp 5@tp"}, "own statistics", "of unsummed gradients")
def preconditioned_left(ax, s, b, bug):
    total, g = grads(lambda p: (torch.tanh(b["x"] @ p["w"]) - b["y"]).square().sum(), s, "w")
    own, g = g["w"], psum(g["w"], ax["dp"])
    part = own @ own.mT if bug == "of unsummed gradients" else g @ g.mT
    stat = s["stat"] + (part if bug == "own statistics" else psum(part, ax["tp"]))
    root = stat
    for _ in range(3):
        root = (root @ root.mT) / (root.square().sum().sqrt() + 1)
    return {"w": s["w"] - 0.1 * root @ g, "stat": stat}, {"loss": psum(total, ax["dp", "tp"])}


@case({"w": "6 5@tp", "row": "6", "col": "5@tp"}, {"x": "4@dp 6", "y": "4@dp 5@tp"}, "own rows", "rows not divided",
      "columns over tp")  # fmt: skip
def factored_moments(ax, s, b, bug):
    total, g = grads(lambda p: (torch.tanh(b["x"] @ p["w"]) - b["y"]).square().sum(), s, "w")
    tp, g = ax["tp"], psum(g["w"], ax["dp"])
    row = g.square().mean(1)
    row = row if bug == "own rows" else psum(row, tp) / (1 if bug == "rows not divided" else tp.size)
    col = g.square().mean(0)
    col = psum(col, tp) if bug == "columns over tp" else col
    row, col = 0.9 * s["row"].square() + row, 0.9 * s["col"].square() + col
    update = g / (row[:, None] * col[None, :] / row.mean()).sqrt()
    return {"w": s["w"] - 0.1 * update, "row": row.sqrt(), "col": col.sqrt()}, {"loss": psum(total, ax["dp", "tp"])}


@case({"w": "6 5@tp"}, {"x": "4@dp 6", "y": "4@dp 5@tp"}, "own columns", "first columns", "of unsummed")
def orthogonalized(ax, s, b, bug):
    total, g = grads(lambda p: (torch.tanh(b["x"] @ p["w"]) - b["y"]).square().sum(), s, "w")
    tp, g = ax["tp"], g["w"] if bug == "of unsummed" else psum(g["w"], ax["dp"])
    u = g if bug == "own columns" else all_gather(g, tp, 1)
    u = u / u.norm()
    for _ in range(3):
        u = 1.5 * u - 0.5 * u @ u.mT @ u
    u = psum(u, ax["dp"]) if bug == "of unsummed" else u
    if bug == "first columns":
        u = u[:, : g.shape[1]]
    elif bug != "own columns":
        u = shard(u, tp, 1)
    return {"w": s["w"] - 0.1 * u}, {"loss": psum(total, ax["dp", "tp"])}


@case({"w": "6 6", "m": "6 6"}, X, "sign before the sum", "majority of signs")
def by_sign(ax, s, b, bug):
    total, g = plain(ax, s, b)
    dp, own = ax["dp"], g["w"]
    g = psum(own.sign() if bug == "majority of signs" else own, dp)
    u = (0.9 * s["m"] + 0.1 * (own if bug == "sign before the sum" else g)).sign()
    u = psum(u, dp) if bug == "sign before the sum" else u
    return {"w": s["w"] - 0.01 * u, "m": 0.99 * s["m"] + 0.01 * g}, {"loss": psum(total, dp)}


@case({"w": "6*dp 6", "v": "6@dp 6"}, {"x": "4@dp 6*dp", "y": "4@dp 6"}, "cut, not scattered", "summed and scattered",
      "not gathered", "moments of the first part")  # fmt: skip
def optimizer_split(ax, s, b, bug):
    total, g = plain(ax, s, b)
    dp, g = ax["dp"], g["w"]
    if bug == "cut, not scattered":
        mine = shard(g, dp, 0)
    else:
        mine = reduce_scatter(psum(g, dp) if bug == "summed and scattered" else g, dp, 0)
    v = 0.9 * s["v"].square() + 0.1 * mine.square()
    part = s["w"][: mine.shape[0]] if bug == "moments of the first part" else shard(s["w"], dp, 0)
    part = part - 0.1 * mine / (v.sqrt() + 1e-2)
    w = part.repeat(dp.size, 1) if bug == "not gathered" else all_gather(part, dp, 0)
    return {"w": w, "v": v.sqrt()}, {"loss": psum(total, dp)}


@case({"w": "6@fsdp 6", "n": "6"}, {"x": "4@fsdp 6*fsdp", "y": "4@fsdp 6"}, "summed on top", "norm not summed",
      "n not summed", axes="fsdp cp")  # fmt: skip
def parameters_split(ax, s, b, bug):
    over = ax["fsdp"]

    def loss(p):
        return (torch.tanh(b["x"] @ all_gather(p["w"], over, 0)) * p["n"] - b["y"]).square().sum()

    total, g = grads(loss, s, "w n")
    w = psum(g["w"], over) if bug == "summed on top" else g["w"]
    n = g["n"] if bug == "n not summed" else psum(g["n"], over)
    square = w.square().sum()
    norm = (square if bug == "norm not summed" else psum(square, over)) + n.square().sum()
    scale = torch.clamp(1 / norm.sqrt(), max=1.0)
    return {"w": s["w"] - scale * w, "n": s["n"] - scale * n}, {"loss": psum(total, over), "norm": norm.sqrt()}


@case({**MLP, "bias": "6"}, X, "bias counted twice", "own norm", "norm before the sum", "maximum for the sum")
def clipped_by_norm(ax, s, b, bug):
    def loss(p):
        return (psum(F.silu(b["x"] @ p["up"]) @ p["down"], ax["tp"]) + p["bias"] - b["y"]).square().sum()

    total, own = grads(loss, s, "up down bias")
    dp, tp = ax["dp"], ax["tp"]
    g = {n: psum(x, dp) for n, x in own.items()}
    of = own if bug == "norm before the sum" else g
    split, whole = (of["up"].square().sum() + of["down"].square().sum()), of["bias"].square().sum()
    if bug == "bias counted twice":
        norm = psum(split + whole, tp)
    elif bug == "maximum for the sum":
        norm = pmax(split, tp) + whole
    else:
        norm = (split if bug == "own norm" else psum(split, tp)) + whole
    if bug == "norm before the sum":
        norm = psum(norm, dp)
    return {n: s[n] - x / (1 + norm.sqrt()) for n, x in g.items()}, {"loss": psum(total, dp), "norm": norm}


@case({"w": "6 6", "q": "6 2"}, X, "first factor own", "second factor own", "both factors' product own")
def low_rank_gradients(ax, s, b, bug):
    total, g = plain(ax, s, b)
    dp, g = ax["dp"], g["w"]
    left = g @ s["q"]
    left = left if bug.startswith(("first", "both")) else psum(left, dp)
    left = left / left.norm(dim=0)
    right = g.mT @ left
    right = right if bug.startswith("second") else psum(right, dp)
    return {"w": s["w"] - 0.1 * left @ right.mT, "q": right}, {"loss": psum(total, dp)}


@case({"w": "6 6"}, X, "largest of own", "own scale", "rounded before")
def largest_only(ax, s, b, bug):
    total, own = plain(ax, s, b)
    dp, own = ax["dp"], own["w"]
    g = psum(own, dp)
    of = own if bug == "largest of own" else g
    bar = of.abs().flatten().topk(8).values[-1]
    kept = torch.where(of.abs() >= bar, of, 0.0)
    if bug == "largest of own":
        kept = psum(kept, dp)
    if bug == "rounded before":
        kept = psum((own * 16).round(), dp) / 16
    scale = (own if bug == "own scale" else g).abs().amax()
    return {"w": s["w"] - 0.1 * kept / (scale + 1)}, {"loss": psum(total, dp)}


@case({"w": "6 6"}, X, "not divided", "not averaged", "two local steps", "over tp")
def averaged_after_a_step(ax, s, b, bug):
    total, g = plain(ax, s, b)
    dp = ax["dp"]
    w = s["w"] - 0.01 * dp.size * g["w"]
    if bug == "two local steps":
        w = w - 0.01 * dp.size * plain(ax, {"w": w}, b)[1]["w"]
    if bug == "not averaged":
        return {"w": w}, {"loss": psum(total, dp)}
    if bug == "over tp":
        return {"w": psum(w, ax["tp"]) / ax["tp"].size}, {"loss": psum(total, dp)}
    return {"w": psum(w, dp) / (1 if bug == "not divided" else dp.size)}, {"loss": psum(total, dp)}


@case({"w": "6 6", "scale": ""}, X, "own finiteness", "own largest", "sum of largest")
def scaled_loss(ax, s, b, bug):
    total, g = plain(ax, s, b)
    own, dp = g["w"] * s["scale"], ax["dp"]
    whole = psum(own, dp)
    if bug == "sum of largest":
        largest = psum(own.abs().amax(), dp)
    else:
        largest = (own if bug else whole).abs().amax()
    good = torch.isfinite(own if bug == "own finiteness" else whole).all()
    w = torch.where(good, s["w"] - 0.1 * whole, s["w"])
    return {"w": w, "scale": torch.where(good, s["scale"] / largest, s["scale"] / 2)}, {"loss": psum(total, dp)}


@case({"w": "6 6"}, X, "own norms", "squares of parts")
def noise_scale(ax, s, b, bug):
    each = torch.func.vmap(torch.func.grad(lambda w, x, y: (torch.tanh(x @ w) - y).square().sum()), (None, 0, 0))
    g = each(s["w"], b["x"], b["y"])
    dp = ax["dp"]
    small = g.sum(0).square().sum() if bug == "squares of parts" else g.square().sum()
    small = small if bug == "own norms" else psum(small, dp)
    mean = psum(g.sum(0), dp)
    return {"w": s["w"] - 0.1 * mean}, {"noise": small / mean.square().sum()}


@case({"w": "6 6"}, X, "last half only", "sum divided", "summed inside and outside", "halves of own")
def accumulated_by_hand(ax, s, b, bug):
    dp, new, total = ax["dp"], 0.0, 0.0
    for x, y in zip(b["x"].chunk(2), b["y"].chunk(2), strict=True):
        t, g = plain(ax, s, {"x": x, "y": y})
        new, total = new + (psum(g["w"], dp) if bug == "summed inside and outside" else g["w"]), total + t
        if bug == "last half only":
            new = g["w"]
    new = new if bug == "halves of own" else psum(new, dp)
    if bug == "sum divided":
        new = new / dp.size
    return {"w": s["w"] - 0.1 * new}, {"loss": psum(total, dp)}


@case({"w": "6 6", "avg": "6 6"}, X, "average of own", "decayed on each", "average over tp")
def averaged_weights(ax, s, b, bug):
    total, g = plain(ax, s, b)
    dp = ax["dp"]
    g = g["w"] + 0.01 * s["w"] * (1 if bug == "decayed on each" else 1 / dp.size)
    new = s["w"] - 0.1 * psum(g, dp)
    of = s["w"] - 0.1 * g if bug == "average of own" else psum(new, ax["tp"]) if bug == "average over tp" else new
    return {"w": new, "avg": 0.9 * s["avg"] + 0.1 * of}, {"loss": psum(total, dp)}


@case({"w": "6 5@tp", "b": "5@tp"}, {"x": "4@dp 6", "y": "4@dp 5@tp"}, "own rows only", "norm over both")
def rows_of_unit_length(ax, s, b, bug):
    """Each row of the weights, which lies on several ranks, is brought to length one."""
    total, g = grads(lambda p: (b["x"] @ p["w"] + p["b"] - b["y"]).square().sum(), s, "w b")
    new = {n: s[n] - 0.1 * psum(x, ax["dp"]) for n, x in g.items()}
    square = new["w"].square().sum(1, keepdim=True)
    square = square if bug == "own rows only" else psum(square, ax["dp", "tp"] if bug else ax["tp"])
    return {**new, "w": new["w"] / square.sqrt()}, {"loss": psum(total, ax["dp", "tp"])}


@case({"load": "4", "bias": "4", "w": "6 4"}, X, "own load", "load over both", "mean of own")
def bias_by_load(ax, s, b, bug):
    picked = (torch.sigmoid(b["x"] @ s["w"]) + s["bias"]).topk(2, -1).indices
    load = F.one_hot(picked, 4).sum((0, 1)).to(s["bias"].dtype)
    whole = load if bug == "own load" else psum(load, ax["dp", "tp"] if bug == "load over both" else ax["dp"])
    mean = load.mean() if bug == "mean of own" else whole.mean()
    return {**s, "load": 0.9 * s["load"] + whole, "bias": s["bias"] + 0.1 * (mean - whole).sign()}, {}


@case({"pos": "3", "w": "6 6"}, X, "each rank's own", "index in the state")
def draws_by_rank(ax, s, b, bug):
    at = axis_index(ax["dp"], like=b["x"]).to(b["x"].dtype)
    total, g = plain(ax, s, b)
    new = s["w"] - 0.1 * psum(g["w"], ax["dp"])
    pos = s["pos"] + 1
    if bug == "index in the state":
        pos = pos + at
    if bug == "each rank's own":
        new = new + 0.01 * b["x"].mean()
    return {"w": new, "pos": pos}, {"loss": psum(total, ax["dp"])}
