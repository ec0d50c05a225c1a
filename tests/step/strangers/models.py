"""Models of strangers: modules, einsums, Megatron-like layers, parts of a sequence on each rank."""

import math

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, axis_index, enter, pmax, ppermute, psum, reduce_scatter, shard
from fmegatron.collectives.ops import declare
from tests.step.strangers.setting import metric, trained


class ColumnLinear:
    def __init__(self, w, axis, entered=True):
        self.w, self.axis, self.entered = w, axis, entered

    def __call__(self, x):
        return (enter(x, self.axis) if self.entered else x) @ self.w


class RowLinear:
    def __init__(self, w, axis, summed=1):
        self.w, self.axis, self.summed = w, axis, summed

    def __call__(self, x):
        y = x @ self.w
        for _ in range(self.summed):
            y = psum(y, self.axis)
        return y


def hf_mlp(ax, p, b, bug):
    hidden = b["tok"] * p["gain"]
    gate, up = (ColumnLinear(p[n], ax["tp"], bug != f"no enter of {n}") for n in ("gate", "up"))
    down = RowLinear(p["down"], ax["tp"], {"not reduced": 0, "reduced twice": 2}.get(bug, 1))
    return (hidden + down(F.silu(gate(hidden)) * up(hidden))).square().sum()


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def llama_attention(ax, p, b, bug):
    tp = ax["dp" if bug == "reduced over dp" else "tp"]
    x = b["tok"] * p["gain"]
    h = x if bug == "no enter" else enter(x, ax["tp"])
    bsz, n, _ = h.shape
    q, k, v = ((h @ p[w]).view(bsz, n, -1, 2).transpose(1, 2) for w in "qkv")
    at = torch.arange(n, dtype=h.dtype)[:, None]
    cos, sin = at.cos(), at.sin()
    q, k = (z * cos + rotate_half(z) * sin for z in (q, k))
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(2)
    scores = scores + torch.full((n, n), float("-inf"), dtype=h.dtype).triu(1)
    out = torch.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).reshape(bsz, n, -1) @ p["o"]
    out = out if bug == "not reduced" else psum(out, tp)
    return (x + out).square().sum()


def nanogpt_block(ax, p, b, bug):
    x = b["tok"]
    h = F.layer_norm(x, (6,), p["gain"], p["bias"], 1e-5)
    y = F.gelu(enter(h, ax["tp"]) @ p["up"] + p["wide"]) @ p["down"]
    if bug == "residual before the sum":
        return psum(y + x, ax["tp"]).square().sum()
    if bug == "bias before the sum":
        return psum(y + p["bias"], ax["tp"]).square().sum()
    return (psum(y, ax["tp"]) + p["bias"] + x).square().sum()


def lucidrains_attention(ax, p, b, bug):
    x = b["tok"] * p["gain"]
    q, k, v = (torch.einsum("b n d, d e -> b n e", enter(x, ax["tp"]), p[w]) for w in "qkv")
    if bug == "l2norm of all heads":
        q = F.normalize(q, dim=-1)
    q, k, v = (z.unflatten(-1, (-1, 2)).permute(0, 2, 1, 3) for z in (q, k, v))
    if not bug:
        q = F.normalize(q, dim=-1)
    sim = torch.einsum("b h i d, b h j d -> b h i j", q, k)
    if bug == "softmax over heads":
        attn = sim.softmax(1)
    else:
        attn = (sim - sim.amax(-1, keepdim=True).detach()).softmax(dim=-1)
    out = torch.einsum("b h i j, b h j d -> b h i d", attn, v).permute(0, 2, 1, 3).flatten(2)
    return psum(torch.einsum("b n e, e d -> b n d", out, p["o"]), ax["tp"]).pow(2).sum()


def talking_heads(ax, p, b, bug):
    """Heads that are mixed before the softmax: all of them are gathered."""
    x = enter(b["tok"] * p["gain"], ax["tp"])
    q, k, v = ((x @ p[w]).unflatten(-1, (-1, 2)).transpose(1, 2) for w in "qkv")
    sim = q @ k.transpose(-1, -2)
    whole = sim if bug == "own heads only" else all_gather(sim, ax["tp"], 1)
    mean = whole.mean(1, keepdim=True)
    return psum(((sim + mean).softmax(-1) @ v).transpose(1, 2).flatten(2) @ p["o"], ax["tp"]).square().sum()


def dense_experts(ax, p, b, bug):
    x = b["x"]
    own = shard((x @ p["route"]).softmax(-1), ax["tp"], 1)
    if bug == "normalized over own":
        own = own / own.sum(-1, keepdim=True)
    h = torch.einsum("nd,edf->enf", enter(x, ax["tp"]), p["ein"]).relu()
    y = torch.einsum("enf,efd,ne->nd", h, p["eout"], own)
    y = y if bug == "not reduced" else psum(y, ax["tp"])
    return y.square().sum()


def vocab_parallel_loss(ax, p, b, bug):
    tp = ax["tp"]
    x = torch.tanh(b["x"] @ p["t"])
    z = enter(x, tp) @ p["head"] if bug != "no enter" else x @ p["head"]
    top = z.detach().amax(-1, keepdim=True)
    z = z - (top if bug == "own largest" else pmax(top, tp))
    total = z.exp().sum(-1)
    total = total if bug == "own denominator" else psum(total, tp)
    own = b["ids"] - axis_index(tp, like=b["ids"]) * z.shape[-1]
    inside = (own >= 0) & (own < z.shape[-1])
    picked = z.gather(1, own.clamp(0, z.shape[-1] - 1)[:, None])[:, 0] * inside
    picked = declare(picked, tp, forward="partial")
    picked = picked if bug == "own label" else psum(picked, tp)
    return (total.log() - picked).sum()


def vocab_parallel_embedding(ax, p, b, bug):
    tp = ax["tp"]
    own = b["words"] - axis_index(tp, like=b["words"]) * p["vocab"].shape[0]
    inside = (own >= 0) & (own < p["vocab"].shape[0])
    rows = declare(
        F.embedding(own.clamp(0, len(p["vocab"]) - 1), p["vocab"]) * inside[..., None], tp, forward="partial"
    )
    h = rows if bug == "not reduced" else psum(rows, tp)
    return (h.tanh() if bug != "norm of the parts" else rows.norm(dim=-1)).square().sum()


def context_attention(ax, p, b, bug):
    x = b["seq"] @ p["t"]
    k = x if bug == "own keys" else all_gather(x, ax["tp"], 1)
    att = (x @ k.mT / 6**0.5).softmax(-1) @ k
    total = att.square().sum()
    return psum(total, ax["dp"] if bug == "not summed over tp" else ax["dp", "tp"])


def context_pool(ax, p, b, bug):
    x = torch.tanh(b["seq"] * p["gain"])
    if bug == "mean of means, summed":
        pooled = psum(x.mean(1), ax["tp"])
    elif bug == "own mean":
        pooled = x.mean(1)
    elif bug == "largest of the sum":
        pooled = psum(x.amax(1), ax["tp"])
    else:
        pooled = psum(x.sum(1), ax["tp"]) / (x.shape[1] * ax["tp"].size)
    return psum(pooled.square().sum(), ax["dp"])


def token_shift(ax, p, b, bug):
    x = b["seq"] * p["gain"]
    before = ppermute(x[:, -1:], ax["tp"], 1)
    first = (axis_index(ax["tp"], like=x) == 0).to(x.dtype)
    before = before * (1 - first)
    if bug == "zeros at each part":
        before = torch.zeros_like(before)
    shifted = torch.cat([before, x[:, :-1]], 1)
    return psum((x * shifted).sum(), (ax["dp", "tp"]))


def causal_conv(ax, p, b, bug):
    x = b["seq"].transpose(1, 2)
    halo = torch.zeros_like(x[..., -2:]) if bug == "no halo" else ppermute(x[..., -2:], ax["tp"], 1)
    y = F.conv1d(torch.cat([halo, x], -1), p["t"][:, None, :3], groups=6)
    return psum(y.square().sum(), ax["dp", "tp"])


def running_total(ax, p, b, bug):
    own = (b["seq"] * p["gain"]).cumsum(1)
    if bug != "starts anew":
        ends = all_gather(own[:, -1:], ax["tp"], 1)
        before = torch.arange(ax["tp"].size) < axis_index(ax["tp"], like=own)
        own = own + (ends * before[None, :, None].to(own.dtype)).sum(1, keepdim=True)
    return psum(own.square().sum(), ax["dp", "tp"])


def gathered_scan(ax, p, b, bug):
    x = b["seq"] * p["gain"]
    whole = x if bug == "own part" else all_gather(x, ax["tp"], 1)
    total = whole.cumsum(1).square().sum()
    return psum(total, ax["dp", "tp"] if bug else ax["dp"])


def rms_of_shards(ax, p, b, bug):
    h = enter(b["tok"] * p["gain"], ax["tp"]) @ p["up"]
    if bug == "own channels":
        ms = h.square().mean(-1, keepdim=True)
    else:
        ms = psum(h.square().sum(-1, keepdim=True), ax["tp"])
        ms = (ms if bug == "no enter" else enter(ms, ax["tp"])) / (h.shape[-1] * ax["tp"].size)
    y = h * torch.rsqrt(ms + 1e-6) * p["wide"]
    return psum(y @ p["down"], ax["tp"]).square().sum()


def synced_batch_norm(ax, p, b, bug):
    x, dp = b["x"] @ p["t"], ax["dp"]
    n = len(x) * dp.size

    def both(z):
        return psum(z, dp) if bug == "no enter" else z * dp.size if bug == "own rows" else enter(psum(z, dp), dp)

    mean = both(x.sum(0)) / n
    var = both((x - mean).square().sum(0)) / n
    return (((x - mean) / (var + 1e-5).sqrt()) * p["gain"]).pow(3).sum()


def cross_attention(ax, p, b, bug):
    memory = p["book"] if bug == "no enter of the memory" else enter(p["book"], ax["tp"])
    q = enter(b["x"] * p["gain"], ax["tp"]) @ p["q"]
    k, v = memory @ p["k"], memory @ p["v"]
    q, k, v = (z.unflatten(-1, (-1, 2)).transpose(0, 1) for z in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    return psum(out @ p["o"], ax["tp"]).square().sum()


def lora(ax, p, b, bug):
    x = b["x"] * p["gain"]
    low = x @ p["a"]
    low = low if bug == "no enter of the low rank" else enter(low, ax["tp"])
    h = enter(x, ax["tp"]) @ p["up"].detach() + low @ p["up"][:3]
    return psum(torch.relu(h) @ p["down"], ax["tp"]).square().sum()


def parallel_block(ax, p, b, bug):
    """GPT-J: attention and MLP side by side, one sum."""
    x = F.rms_norm(b["tok"], (6,), p["gain"])
    h = enter(x, ax["tp"])
    q, k, v = ((h @ p[w]).unflatten(-1, (-1, 2)).transpose(1, 2) for w in "qkv")
    att = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["o"]
    mlp = F.gelu(h @ p["up"], approximate="tanh") @ p["down"]
    if bug == "one of both reduced":
        y = psum(att, ax["tp"]) + mlp
    elif bug == "product of parts":
        y = psum(att * mlp, ax["tp"])
    else:
        y = psum(att + mlp, ax["tp"])
    return (b["tok"] + y).square().sum()


def sequence_parallel(ax, p, b, bug):
    """Megatron's: norms on parts of the sequence, gathered before, scattered behind."""
    tp, x = ax["tp"], b["seq"]
    h = F.layer_norm(x, (6,)) * (p["gain"] if bug == "gain not entered" else enter(p["gain"], tp))
    h = all_gather(h, tp, 1)
    y = F.relu(h @ p["up"]) @ p["down"]
    y = psum(y, tp) if bug == "summed, not scattered" else reduce_scatter(y, tp, 1)
    out = (x + y) if bug != "summed, not scattered" else (all_gather(x, tp, 1) + y)
    total = out.square().sum()
    return psum(total, tp)


def linear_attention(ax, p, b, bug):
    h = enter(b["tok"] * p["gain"], ax["tp"])
    q, k, v = ((h @ p[w]).unflatten(-1, (-1, 2)) for w in "qkv")
    q, k = F.elu(q) + 1, F.elu(k) + 1
    kv = torch.einsum("bnhd,bnhe->bhde", k, v)
    z = torch.einsum("bnhd,bhd->bnh", q, k.sum(1))
    z = psum(z.sum(-1, keepdim=True), ax["tp"]) if bug == "one normalizer" else z
    if bug == "normalizer of own heads":
        z = z.sum(-1, keepdim=True)
    y = torch.einsum("bnhd,bhde->bnhe", q, kv) / z.unsqueeze(-1)
    return psum(y.flatten(2) @ p["o"], ax["tp"]).square().sum()


def recurrent(ax, p, b, bug):
    """An SSM by a loop over time; channels on ranks."""
    u = enter(b["tok"] * p["gain"], ax["tp"]) @ p["up"]
    decay = torch.sigmoid(p["wide"])
    h, ys = torch.zeros_like(u[:, 0]), []
    for t in range(u.shape[1]):
        h = decay * h + u[:, t]
        ys.append(h @ p["down"] if bug != "mixes channels" else (h - h.mean(-1, keepdim=True)) @ p["down"])
    y = torch.stack(ys, 1)
    y = y if bug == "not reduced" else psum(y, ax["tp"])
    return y.square().sum()


def whole_logits(ax, s, b, bug):
    z = torch.tanh(b["x"] @ s["t"]) @ s["head"]
    z = z if bug == "own classes" else all_gather(z, ax["tp"], 1)
    right = (z.argmax(-1) == b["ids"]).double()
    if bug == "mean of own rows":
        return psum(right.mean() + z.square().mean(), ax["dp"])
    return psum(right.sum() + z.square().sum() / z.shape[-1], ax["dp"]) / (len(right) * ax["dp"].size)


def tied(ax, p, b, bug):
    h = p["emb"][b["words"]].mean(1) * p["gain"]
    z = h @ p["emb"].T
    nll = F.cross_entropy(z, b["words"][:, 0], reduction="mean" if bug == "mean of own rows" else "sum")
    return nll if bug else nll / (len(h) * ax["dp"].size)


CASES = {
    "hf mlp": (trained("gain gate up down", hf_mlp), ("no enter of up", "not reduced", "reduced twice")),
    "llama attention": (trained("gain q k v o", llama_attention), ("no enter", "not reduced", "reduced over dp")),
    "nanogpt block": (
        trained("gain bias up wide down", nanogpt_block), ("residual before the sum", "bias before the sum"),
    ),
    "lucidrains attention": (
        trained("gain q k v o", lucidrains_attention), ("l2norm of all heads", "softmax over heads"),
    ),
    "talking heads": (trained("gain q k v o", talking_heads), ("own heads only",)),
    "dense experts": (trained("route ein eout", dense_experts), ("normalized over own", "not reduced")),
    "vocabulary-parallel loss": (
        trained("t head", vocab_parallel_loss), ("no enter", "own largest", "own denominator", "own label"),
    ),
    "vocabulary-parallel embedding": (trained("vocab", vocab_parallel_embedding), ("not reduced", "norm of the parts")),
    "context attention": (metric(context_attention), ("own keys", "not summed over tp")),
    "context pool": (metric(context_pool), ("mean of means, summed", "own mean", "largest of the sum")),
    "token shift": (metric(token_shift), ("zeros at each part",)),
    "causal convolution": (metric(causal_conv), ("no halo",)),
    "running total": (metric(running_total), ("starts anew",)),
    "gathered scan": (metric(gathered_scan), ("own part",)),
    "rms of shards": (trained("gain up wide down", rms_of_shards), ("own channels", "no enter")),
    "synced batch norm": (trained("t gain", synced_batch_norm), ("own rows", "no enter")),
    "cross attention": (trained("book gain q k v o", cross_attention), ("no enter of the memory",)),
    "lora": (trained("gain a up down", lora), ("no enter of the low rank",)),
    "parallel block": (trained("gain q k v o up down", parallel_block), ("one of both reduced", "product of parts")),
    "sequence parallel": (trained("gain up down", sequence_parallel), ("gain not entered", "summed, not scattered")),
    "linear attention": (trained("gain q k v o", linear_attention), ("normalizer of own heads",)),
    "recurrent": (trained("gain up wide down", recurrent), ("not reduced", "mixes channels")),
    "whole logits": (metric(whole_logits), ("own classes", "mean of own rows")),
    "tied": (trained("emb gain", tied), ("mean of own rows",)),
}  # fmt: skip
