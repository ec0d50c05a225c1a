"""Models of visitors: diffusion, flows, experts, states of space, graphs, attention over ranks, physics."""

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, all_to_all, axis_index, enter, ppermute, psum, reduce_scatter, shard
from tests.step.visitors.setting import grads, sgd, table

CASES, case = table()
MLP = {"inp": "6 6", "up": "6 5@tp", "down": "5@tp 6", "bias": "6"}
X = {"x": "4@dp 6", "y": "4@dp 6"}


def mlp(ax, p, h, bug=""):
    h = h if bug == "no enter" else enter(h, ax["tp"])
    out = F.silu(h @ p["up"]) @ p["down"]
    return out if bug == "no sum" else psum(out, ax["tp"])


@case({**MLP, "time": "6 6"}, {**X, "eps": "4@dp 6", "t": "4@dp"}, "no enter", "no sum", "bias before the sum")
def denoiser(ax, s, b, bug):
    angle = b["t"][:, None] * torch.arange(3, device=b["t"].device)
    emb = torch.cat([angle.sin(), angle.cos()], -1)
    keep = torch.sigmoid(b["t"])[:, None]
    noisy = keep.sqrt() * b["x"] + (1 - keep).sqrt() * b["eps"]

    def loss(p):
        h = torch.tanh(noisy @ p["inp"]) * (1 + emb @ p["time"])
        if bug == "bias before the sum":
            out = psum(F.silu(enter(h, ax["tp"]) @ p["up"]) @ p["down"] + p["bias"], ax["tp"])
        else:
            out = mlp(ax, p, h, bug) + p["bias"]
        return (out - b["eps"]).square().sum()

    return sgd(ax, s, "inp up down bias time", loss)


@case(MLP, {**X, "m": "mask 4@dp"}, "own count", "count over tp", "divided twice")
def flow_matching(ax, s, b, bug):
    n = b["m"].sum()
    n = n if bug == "own count" else psum(n, ax["tp"] if bug == "count over tp" else ax["dp"])
    mid = (b["x"] + b["y"]) / 2

    def loss(p):
        error = (mlp(ax, p, mid @ p["inp"]) + p["bias"] - (b["y"] - b["x"])).square().mean(-1)
        return (error * b["m"]).sum() / (n + 1) / (ax["dp"].size if bug == "divided twice" else 1)

    return sgd(ax, s, "inp up down bias", loss)


@case({"a": "6 3", "up": "3 4@tp", "base": "6 4@tp", "down": "4@tp 6"}, X, "no enter behind a", "no enter before a")
def adapters(ax, s, b, bug):
    def loss(p):
        x = torch.tanh(b["x"])
        low = x @ p["a"]
        low = low if bug == "no enter behind a" else enter(low, ax["tp"])
        h = x @ p["base"] + low @ p["up"]
        return (psum(h @ p["down"], ax["tp"]) - b["y"]).square().sum()

    names = "a up"
    if bug == "no enter before a":  # entered where only one path needs it: counts the other twice
        return sgd(ax, s, names, lambda p: loss({**p, "a": enter(p["a"], ax["tp"])}))
    return sgd(ax, s, names, loss)


@case({"route": "6 4", "w": "2@tp 6 6"}, X, "no sum", "no enter of weights", "first experts")
def mixture_dense(ax, s, b, bug):
    n = s["w"].shape[0]

    def loss(p):
        gates = torch.softmax(torch.tanh(b["x"] @ p["route"]), -1)
        if bug == "first experts":
            mine = gates[:, :n]
        else:
            gates = gates if bug == "no enter of weights" else enter(gates, ax["tp"])
            mine = gates.index_select(1, axis_index(ax["tp"]) * n + torch.arange(n, device=gates.device))
        out = torch.einsum("bd,edf,be->bf", b["x"], p["w"], mine)
        return ((out if bug == "no sum" else psum(out, ax["tp"])) - b["y"]).square().sum()

    return sgd(ax, s, "route w", loss)


@case({"route": "6 4", "w": "2@tp 6 6"}, X, "no enter")
def mixture_by_shard(ax, s, b, bug):
    def loss(p):
        x = torch.tanh(b["x"] @ p["route"] @ p["route"].mT)
        mine = shard(torch.softmax(x @ p["route"], -1), ax["tp"], 1)
        h = torch.einsum("bd,edf->bef", x if bug else enter(x, ax["tp"]), p["w"])
        return (psum(torch.einsum("bef,be->bf", h, mine), ax["tp"]) - b["y"]).square().sum()

    return sgd(ax, s, "route w", loss)


@case({"w": "2@dp 6 6"}, {"slots": "6@dp 6 6"}, "not brought home", "summed again", "twice there")
def experts_exchanged(ax, s, b, bug):
    # [own rows, slots of all experts, dim]: slots of each expert travel to its rank
    n = s["w"].shape[0] * ax["dp"].size
    x = (
        b["slots"]
        .unsqueeze(1)
        .expand(-1, n, -1, -1)
        .mul(torch.arange(1, n + 1, device=b["slots"].device).view(-1, 1, 1))
    )

    def loss(p):
        there = all_to_all(x, ax["dp"], 1, 0)
        out = torch.tanh(torch.einsum("resd,edf->resf", there, p["w"]))
        if bug == "not brought home":
            return (out.sum(1) ** 2).sum()
        if bug == "twice there":
            return (all_to_all(out, ax["dp"], 0, 2).sum(1) ** 2).sum()
        return (all_to_all(out, ax["dp"], 0, 1).sum(1) ** 2).sum()

    return sgd(ax, s, "w", loss, also="" if bug == "summed again" else "w")


@case({"decay": "5@tp", "inp": "6 5@tp", "out": "5@tp 6", "pre": "6 6"}, {"seq": "2@dp 5 6"}, "no enter", "no sum")
def state_space(ax, s, b, bug):
    def loss(p):
        u = b["seq"] @ p["pre"]
        u = (u if bug == "no enter" else enter(u, ax["tp"])) @ p["inp"]
        keep, h, ys = torch.sigmoid(p["decay"]), torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = keep * h + (1 - keep) * u[:, t]
            ys.append(h)
        y = torch.stack(ys, 1) @ p["out"]
        return ((y if bug == "no sum" else psum(y, ax["tp"])) - b["seq"]).square().sum()

    return sgd(ax, s, "decay inp out pre", loss)


@case({"decay": "6"}, {"seq": "2@fsdp 4@cp 6"}, "no carry", "no sum over cp", axes="fsdp cp")
def states_over_ranks(ax, s, b, bug):
    cp = ax["cp"]

    def loss(p):
        keep = torch.sigmoid(p["decay"])
        x, h, hs, n = b["seq"], 0.0, [], b["seq"].shape[1]
        for t in range(x.shape[1]):
            h = keep * h + x[:, t]
            hs.append(h)
        y = torch.stack(hs, 1)
        if bug != "no carry":
            ends, carry = all_gather(y[:, -1:], cp, 1), torch.zeros_like(y[:, 0])
            at = axis_index(cp, like=y)
            for r in range(cp.size - 1):
                carry = torch.where(at > r, carry * keep**n + ends[:, r], carry)
            powers = keep ** torch.arange(1, n + 1, device=y.device).unsqueeze(-1)
            y = y + carry.unsqueeze(1) * powers
        return y.square().sum()

    total, g = grads(loss, s, "decay")
    over = ax["fsdp"] if bug == "no sum over cp" else ax["fsdp", "cp"]
    return {"decay": s["decay"] - 0.01 * psum(g["decay"], over)}, {"loss": psum(total, ax["fsdp", "cp"])}


@case({"w": "6 6"}, {"x": "4@dp 6", "adj": "4@dp 4*dp"}, "own nodes only", "first nodes")
def graph_rows(ax, s, b, bug):
    def loss(p):
        h = torch.tanh(b["x"] @ p["w"])
        if bug == "own nodes only":
            return (b["adj"][:, : h.shape[0]] @ h - b["x"]).square().sum()
        if bug == "first nodes":
            return (b["adj"] @ h.repeat(ax["dp"].size, 1) - b["x"]).square().sum()
        return (b["adj"] @ all_gather(h, ax["dp"], 0) - b["x"]).square().sum()

    return sgd(ax, s, "w", loss)


@case(
    {"w": "6 6"}, {"x": "4@dp 6", "src": "int4 5@dp", "dst": "int8 5@dp"}, "own part of own sums", "sums not scattered"
)
def graph_edges(ax, s, b, bug):
    def loss(p):
        h = torch.tanh(b["x"] @ p["w"])
        whole = all_gather(h, ax["dp"], 0)
        message = whole[b["src"]]
        nodes = torch.zeros(h.shape[0] * ax["dp"].size, 6, dtype=h.dtype, device=h.device).index_add(
            0, b["dst"], message
        )
        if bug == "own part of own sums":
            mine = shard(nodes, ax["dp"], 0)
        elif bug == "sums not scattered":
            mine = nodes.chunk(ax["dp"].size)[0]
        else:
            mine = reduce_scatter(nodes, ax["dp"], 0)
        return (mine + b["x"]).square().sum()

    return sgd(ax, s, "w", loss)


@case({"wq": "6 4@tp", "wk": "6 4@tp", "wv": "6 4@tp", "o": "4@tp 6", "n": "6"}, {"seq": "2@dp 5 6"},
      "no enter", "no sum", "enter of x too")  # fmt: skip
def attention(ax, s, b, bug):
    def loss(p):
        x = F.rms_norm(b["seq"], (6,), p["n"])
        h = x if bug == "no enter" else enter(x, ax["tp"])
        q, k, v = (h @ p[n] for n in ("wq", "wk", "wv"))
        q, k, v = (z.unflatten(-1, (-1, 2)).transpose(1, 2) for z in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["o"]
        out = out if bug == "no sum" else psum(out, ax["tp"])
        return ((enter(x, ax["tp"]) if bug == "enter of x too" else x) + out).square().sum()

    return sgd(ax, s, "wq wk wv o n", loss)


@case({"qkv": "6 12", "o": "4 6"}, {"seq": "2@fsdp 3@cp 6"}, "not back", "not over cp",
      axes="fsdp cp")  # fmt: skip
def ulysses(ax, s, b, bug):
    cp = ax["cp"]

    def loss(p):
        h = (b["seq"] @ p["qkv"]).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)  # 3, rows, heads, seq, dim
        h = all_to_all(h, cp, 2, 3)
        q, k, v = h.unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        if bug != "not back":
            out = all_to_all(out, cp, 2, 1)
        if bug == "not back":
            return out.square().sum() + p["o"].sum()
        return (out.transpose(1, 2).flatten(2) @ p["o"]).square().sum()

    over = ax["fsdp"] if bug == "not over cp" else ax["fsdp", "cp"]
    total, g = grads(loss, s, "qkv o")
    return {n: s[n] - 0.1 * psum(x, over) for n, x in g.items()}, {"loss": psum(total, ax["fsdp", "cp"])}


@case({"q": "6 6", "k": "6 6"}, {"seq": "2@fsdp 3@cp 6"}, "one turn less", "not normalized again", axes="fsdp cp")
def ring(ax, s, b, bug):
    cp = ax["cp"]

    def loss(p):
        q, k, v = b["seq"] @ p["q"], b["seq"] @ p["k"], b["seq"]
        top, total = 0.0, 0.0
        for i in range(max(1, cp.size - (bug == "one turn less"))):
            weight = torch.exp(q @ k.mT / 4)
            top, total = top + weight @ v, total + weight.sum(-1, keepdim=True)
            if bug == "not normalized again":
                top, total = top / total, torch.ones_like(total)
            if i + 1 < cp.size:
                k, v = ppermute(k, cp, 1), ppermute(v, cp, 1)
        return (top / total).square().sum()

    total, g = grads(loss, s, "q k")
    return {n: s[n] - psum(x, ax["fsdp", "cp"]) for n, x in g.items()}, {"loss": psum(total, ax["fsdp", "cp"])}


@case({"k": "6 6"}, {"seq": "2@fsdp 3@cp 6"}, "own state", "state's gradient not summed", axes="fsdp cp")
def linear_attention(ax, s, b, bug):
    cp = ax["cp"]

    def loss(p):
        k = F.elu(b["seq"] @ p["k"]) + 1
        state = k.mT @ b["seq"]
        if bug != "own state":
            state = psum(state, cp)
            state = state if bug == "state's gradient not summed" else enter(state, cp)
        return (k @ state).square().sum()

    total, g = grads(loss, s, "k")
    return {"k": s["k"] - 0.01 * psum(g["k"], ax["fsdp", "cp"])}, {"loss": psum(total, ax["fsdp", "cp"])}


@case({"n": "6", "up": "6 5@cp", "down": "5@cp 6"}, {"seq": "4@cp 2@fsdp 6"}, "shard for the sum", "gain not summed",
      axes="fsdp cp")  # fmt: skip
def sequence_parallel(ax, s, b, bug):
    cp = ax["cp"]

    def loss(p):
        x = F.layer_norm(b["seq"], (6,), p["n"])
        h = F.gelu(all_gather(x, cp, 0) @ p["up"]) @ p["down"]
        h = shard(h, cp, 0) if bug == "shard for the sum" else reduce_scatter(h, cp, 0)
        return (h + b["seq"]).square().sum()

    total, g = grads(loss, s, "n up down")
    over = {"n": ax["fsdp"] if bug == "gain not summed" else ax["fsdp", "cp"], "up": ax["fsdp"], "down": ax["fsdp"]}
    return {n: s[n] - 0.1 * psum(x, over[n]) for n, x in g.items()}, {"loss": psum(total, ax["fsdp", "cp"])}


@case({"inp": "2 6", "up": "6 5@tp", "down": "5@tp 1"}, {"x": "4@dp 2"}, "no enter", "no sum")
def physics(ax, s, b, bug):
    def loss(p):
        x = b["x"].detach().requires_grad_()
        u = mlp(ax, p, torch.tanh(x @ p["inp"]), bug)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (du[:, :1] + u * du[:, 1:]).square().sum()

    return sgd(ax, s, "inp up down", loss)


@case({"inp": "4 6", "up": "6 5@tp", "down": "5@tp 1"}, {"x": "4@dp 4"}, "no enter")
def hamiltonian(ax, s, b, bug):
    def loss(p):
        energy = lambda x: mlp(ax, p, torch.tanh(x @ p["inp"]), bug).sum()  # noqa: E731
        dh = torch.func.grad(energy)(b["x"])
        flow = torch.cat([dh[:, 2:], -dh[:, :2]], -1)
        return (flow - b["x"]).square().sum()

    return sgd(ax, s, "inp up down", loss)


@case({"q": "3", "r": "3", "f": "3 3"}, {"obs": "4@dp 5 3"}, "not summed", "mean of means not divided")
def kalman(ax, s, b, bug):
    eye = torch.eye(3, dtype=b["obs"].dtype, device=b["obs"].device)

    def loss(p):
        mean, cov, total = torch.zeros_like(b["obs"][:, 0]), eye, 0.0
        for t in range(5):
            mean, cov = mean @ p["f"].mT, p["f"] @ cov @ p["f"].mT + torch.diag(p["q"].exp())
            spread = cov + torch.diag(p["r"].exp())
            gain = torch.linalg.solve(spread, cov).mT
            error = b["obs"][:, t] - mean
            total = (
                total + (error * torch.linalg.solve(spread, error.mT).mT).sum() + error.shape[0] * torch.logdet(spread)
            )
            mean, cov = mean + error @ gain.mT, (eye - gain) @ cov
        return total

    total, g = grads(loss, s, "q r f")
    dp = ax["dp"]
    over = {n: x if bug == "not summed" else psum(x, dp) for n, x in g.items()}
    total = psum(total / b["obs"].shape[0], dp) / (1 if bug == "mean of means not divided" else dp.size)
    return {n: s[n] - 0.01 * x for n, x in over.items()}, {"loss": total}


@case({"emb": "4@tp 6"}, {"ids": "int8 4@dp", "lab": "int8 4@dp"}, "no sum of hits", "no enter",
      "sum of exps not summed", "embedding not summed")  # fmt: skip
def tied_vocabulary(ax, s, b, bug):
    tp, n = ax["tp"], s["emb"].shape[0]

    def mine(ids, n):
        at = ids - axis_index(tp) * n
        ok = (at >= 0) & (at < n)
        return torch.where(ok, at, 0), ok

    def loss(p):
        at, ok = mine(b["ids"], n)
        x = p["emb"][at] * ok[:, None]
        x = torch.tanh(x if bug == "embedding not summed" else psum(x, tp))
        logits = (x if bug == "no enter" else enter(x, tp)) @ p["emb"].mT
        total = logits.exp().sum(-1)
        total = total if bug == "sum of exps not summed" else psum(total, tp)
        at, ok = mine(b["lab"], n)
        hit = logits.gather(1, at[:, None])[:, 0] * ok
        return (total.log() - (hit if bug == "no sum of hits" else psum(hit, tp))).sum()

    return sgd(ax, s, "emb", loss)


@case({"heads": "2@tp 6 5", "body": "6 6"}, {"x": "4@dp 6", "lab": "int5 4@dp 4"}, "no sum", "no enter")
def speculative_heads(ax, s, b, bug):
    tp = ax["tp"]

    def loss(p):
        h = torch.tanh(b["x"] @ p["body"])
        logits = torch.einsum("bd,kdv->bkv", h if bug == "no enter" else enter(h, tp), p["heads"])
        labels = shard(b["lab"], tp, 1)
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return nll if bug == "no sum" else psum(nll, tp)

    return sgd(ax, s, "heads body", loss)


@case({"gen": "2 8@tp", "code": "2", "out": "8@tp 6"}, {"x": "4@dp 6"}, "no enter of the code")
def hypernetwork(ax, s, b, bug):
    tp = ax["tp"]

    def loss(p):
        code = torch.tanh(p["code"])
        scale = (code if bug else enter(code, tp)) @ p["gen"]
        h = torch.relu(b["x"] @ p["out"].mT) * scale
        return (psum(h @ p["out"], tp) - b["x"]).square().sum()

    return sgd(ax, s, "gen code out", loss)


@case({"phi": "6 4", "rho": "4 4"}, {"set": "2@fsdp 3@cp 6"}, "own set", "mean of the rank's", axes="fsdp cp")
def deep_sets(ax, s, b, bug):
    cp = ax["cp"]

    def loss(p):
        pooled = torch.tanh(b["set"] @ p["phi"]).sum(1)
        if bug == "mean of the rank's":
            pooled = pooled / b["set"].shape[1]
        return (torch.tanh((pooled if bug == "own set" else psum(pooled, cp)) @ p["rho"])).square().sum()

    total, g = grads(loss, s, "phi rho")
    new = {"phi": psum(g["phi"], ax["fsdp", "cp"]), "rho": psum(g["rho"], ax["fsdp"])}
    return {n: s[n] - 0.1 * new[n] for n in s}, {"loss": psum(total, ax["fsdp"])}


@case({"up": "6 5@cp", "down": "5@cp 6"}, {"seq": "4@cp 2@fsdp 6"}, axes="fsdp cp")
def gathered_beside(ax, s, b, bug):
    """Rows of other ranks stand beside the own ones, and go back from there: nothing mixes them."""
    cp = ax["cp"]

    def loss(p):
        h = F.gelu(all_gather(b["seq"], cp, 1) @ p["up"]) @ p["down"]
        return (reduce_scatter(h, cp, 1) + b["seq"]).square().sum()

    total, g = grads(loss, s, "up down")
    return {n: s[n] - 0.1 * psum(x, ax["fsdp"]) for n, x in g.items()}, {"loss": psum(total, ax["fsdp", "cp"])}
