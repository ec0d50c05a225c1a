"""Losses of weights split by tp, and of sequences split by cp."""

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, axis_index, enter, pmax, ppermute, psum, reduce_scatter, shard
from fmegatron.step import mean
from tests.step.guests.frame import BY_TP, SEQUENCE, SPLIT, loss

RIGHT = {"right": True, "meshes": SPLIT, "rules": BY_TP}
WRONG = {"right": False, "meshes": SPLIT, "rules": BY_TP}


def squared(y, b):
    return mean((y - b["y"]).square().sum(), y.shape[0])


@loss(**RIGHT)
def columns_then_rows(w, b, axes):
    tp = axes["tp"]
    return squared(psum((enter(b["x"] * w["g"], tp) @ w["a"] + w["f"]).relu() @ w["b"], tp), b)


@loss(**RIGHT)
def norm_over_split_columns(w, b, axes):
    tp = axes["tp"]
    h = enter(b["x"] * w["g"], tp) @ w["a"]
    ms = enter(psum(h.square().sum(-1, keepdim=True), tp), tp) / (h.shape[-1] * tp.size)
    return squared(psum((h * (ms + 1e-3).rsqrt() * w["f"]) @ w["b"], tp), b)


@loss(**RIGHT)
def softmax_over_split_columns(w, b, axes):
    tp = axes["tp"]
    h = enter(b["x"] * w["g"], tp) @ w["a"]
    p = (h - pmax(h.amax(-1, keepdim=True), tp)).exp()
    p = p / enter(psum(p.sum(-1, keepdim=True), tp), tp)
    return squared(psum(p @ w["b"], tp), b)


@loss(**RIGHT)
def vocabulary_split(w, b, axes):
    tp = axes["tp"]
    z = enter(b["x"] * w["g"], tp) @ w["e"].T
    top = pmax(z.amax(-1), tp)
    lse = psum((z - top[:, None]).exp().sum(-1), tp).log() + top
    at = b["t"][:, 0] - axis_index(tp, like=z) * z.shape[1]
    inside = (at >= 0) & (at < z.shape[1])
    hit = psum(z.gather(1, at.clamp(0, z.shape[1] - 1)[:, None])[:, 0] * inside, tp)
    return mean((lse - hit).sum(), lse.shape[0])


@loss(**RIGHT)
def gathered_columns(w, b, axes):
    tp = axes["tp"]
    h = all_gather(enter(b["x"] * w["g"], tp) @ w["a"], tp, 1)
    mine = h.softmax(-1).unflatten(1, (tp.size, -1)).index_select(1, axis_index(tp, like=h).view(1))[:, 0]
    return squared(psum(mine @ w["b"], tp), b)


@loss(**WRONG)
def gathered_columns_sharded_again(w, b, axes):
    tp = axes["tp"]
    h = all_gather(enter(b["x"] * w["g"], tp) @ w["a"], tp, 1)
    return squared(psum(shard(h.softmax(-1), tp, 1) @ w["b"], tp), b)


@loss(**RIGHT)
def scattered_rows(w, b, axes):
    tp = axes["tp"]
    x = shard(b["x"] * w["g"], tp, 0)
    y = reduce_scatter((all_gather(x, tp, 0) @ w["a"]).tanh() @ w["b"], tp, 0)
    return mean(psum((y - shard(b["y"], tp, 0)).square().sum(), tp), b["x"].shape[0])


@loss(**RIGHT)
def embedding_split(w, b, axes):
    tp = axes["tp"]
    at = b["t"] - axis_index(tp, like=b["t"]) * w["e"].shape[0]
    inside = (at >= 0) & (at < w["e"].shape[0])
    x = psum(w["e"][at.clamp(0, w["e"].shape[0] - 1)] * inside[..., None], tp)
    return mean((((x * w["g"]).sum(-1) - 1).square() * b["m"]).sum(), b["m"].sum())


@loss(**RIGHT)
def penalty_of_split_weights(w, b, axes):
    tp = axes["tp"]
    y = psum((enter(b["x"], tp) @ w["a"]).relu() @ w["b"], tp)
    return {"fit": squared(y, b), "decay": 0.1 * mean(psum(w["a"].square().sum(), tp), 1)}


@loss(**WRONG)
def bias_before_the_sum(w, b, axes):
    tp = axes["tp"]
    return squared(psum((enter(b["x"], tp) @ w["a"]).relu() @ w["b"] + w["g"], tp), b)


@loss(**WRONG)
def no_enter(w, b, axes):
    return squared(psum((b["x"] * w["g"]) @ w["a"] @ w["b"], axes["tp"]), b)


@loss(**WRONG)
def no_sum(w, b, axes):
    return squared(enter(b["x"], axes["tp"]) @ w["a"] @ w["b"], b)


@loss(**WRONG)
def activation_of_terms(w, b, axes):
    tp = axes["tp"]
    return squared(psum(((enter(b["x"], tp) @ w["a"]) @ w["b"]).relu(), tp), b)


@loss(**WRONG)
def softmax_of_own_columns(w, b, axes):
    tp = axes["tp"]
    return squared(psum((enter(b["x"] * w["g"], tp) @ w["a"]).softmax(-1) @ w["b"], tp), b)


@loss(**WRONG)
def rms_of_own_columns(w, b, axes):
    tp = axes["tp"]
    h = F.rms_norm(enter(b["x"] * w["g"], tp) @ w["a"], (w["a"].shape[1],))
    return squared(psum((h * w["f"]) @ w["b"], tp), b)


@loss(**WRONG)
def mean_square_not_entered(w, b, axes):
    tp = axes["tp"]
    h = enter(b["x"] * w["g"], tp) @ w["a"]
    ms = psum(h.square().sum(-1, keepdim=True), tp) / (h.shape[-1] * tp.size)
    return squared(psum((h * (ms + 1e-3).rsqrt()) @ w["b"], tp), b)


@loss(**WRONG)
def sum_entered_twice(w, b, axes):
    tp = axes["tp"]
    y = psum(enter(b["x"] * w["g"], tp) @ w["a"] @ w["b"], tp)
    return squared(enter(y, tp), b)


@loss(**WRONG)
def gathered_and_used_alike(w, b, axes):
    tp = axes["tp"]
    h = all_gather(enter(b["x"] * w["g"], tp) @ w["a"], tp, 1)
    return mean(h.logsumexp(-1).sum(), h.shape[0])


@loss(**WRONG)
def vocabulary_lse_of_own(w, b, axes):
    tp = axes["tp"]
    z = enter(b["x"] * w["g"], tp) @ w["e"].T
    return mean((psum(z.logsumexp(-1), tp) - b["y"][:, 0]).square().sum(), z.shape[0])


@loss(**WRONG)
def vocabulary_without_offset(w, b, axes):
    tp = axes["tp"]
    at = b["t"] % w["e"].shape[0]
    x = psum(w["e"][at], tp) / tp.size
    return mean((((x * w["g"]).sum(-1) - 1).square() * b["m"]).sum(), b["m"].sum())


@loss(**WRONG)
def split_penalty_of_own(w, b, axes):
    tp = axes["tp"]
    y = psum((enter(b["x"], tp) @ w["a"]).relu() @ w["b"], tp)
    return {"fit": squared(y, b), "decay": 0.1 * mean(w["a"].square().sum(), 1)}


# ---- sequences -------------------------------------------------------------------------------------------------------
def tokens(w, b):
    return b["s"] @ w["a"]


@loss(True, SEQUENCE)
def causal_by_gather(w, b, axes):
    cp = axes["cp"]
    at = axis_index(cp, like=b["s"]) * b["s"].shape[1] + torch.arange(b["s"].shape[1])
    k = all_gather(tokens(w, b), cp, 1)
    seen = at[:, None] >= torch.arange(k.shape[1])
    s = (tokens(w, b) @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1)
    y = s @ all_gather(b["s"], cp, 1) * w["g"]
    return mean((y.sum(-1).square() * b["m"]).sum(), b["m"].sum())


@loss(True, SEQUENCE)
def attention_of_torch(w, b, axes):
    cp = axes["cp"]
    at = axis_index(cp, like=b["s"]) * b["s"].shape[1] + torch.arange(b["s"].shape[1])
    kv = all_gather(torch.cat([tokens(w, b), b["s"] * w["g"]], -1), cp, 1)
    o = F.scaled_dot_product_attention(
        tokens(w, b)[:, None], kv[:, None, :, :10], kv[:, None, :, 10:], at[:, None] >= torch.arange(kv.shape[1])
    )
    return mean((o[:, 0].sum(-1).square() * b["m"]).sum(), b["m"].sum())


@loss(True, SEQUENCE)
def convolution_with_halo(w, b, axes):
    cp = axes["cp"]
    h = tokens(w, b)
    before = ppermute(h[:, -2:], cp, 1) * (axis_index(cp, like=h) > 0)
    y = F.conv1d(torch.cat([before, h], 1).mT, w["b"][:, :3, None].mT.reshape(1, 10, 3), None)
    return mean((y[:, 0] * b["m"]).square().sum(), b["m"].sum())


@loss(True, SEQUENCE[:1])
def pooled_over_the_sequence(w, b, axes):
    cp = axes["cp"]
    n = psum(b["m"].sum(1), cp)
    h = enter(psum((tokens(w, b).tanh() * b["m"][..., None]).sum(1), cp), cp) / n[:, None]
    e = ((h @ w["b"] - 3 * w["g"]) ** 2).sum(-1)
    return mean(e.sum(), e.shape[0])


@loss(True, SEQUENCE)
def pooled_over_rows_alone(w, b, axes):
    cp = axes["cp"]
    h = psum(tokens(w, b).tanh().sum(1), cp) @ w["b"].detach()
    return mean((h - 0.5).square().sum(), h.shape[0], over=("dp", "fsdp"))


@loss(True, SEQUENCE)
def scan_with_gathered_carry(w, b, axes):
    cp = axes["cp"]
    h = tokens(w, b).cumsum(1)
    ends = all_gather(h[:, -1:], cp, 1)
    earlier = (torch.arange(cp.size) < axis_index(cp, like=h)).to(h.dtype)
    y = (h + torch.einsum("bnd,n->bd", ends, earlier)[:, None]) @ w["b"]
    return mean((y.sum(-1).square() * b["m"]).sum(), b["m"].sum())


@loss(False, SEQUENCE)
def attention_of_own(w, b, axes):
    q = tokens(w, b)[:, None]
    o = F.scaled_dot_product_attention(q, q, b["s"][:, None] * w["g"], is_causal=True)
    return mean((o[:, 0].sum(-1).square() * b["m"]).sum(), b["m"].sum())


@loss(False, SEQUENCE)
def positions_of_own(w, b, axes):
    cp = axes["cp"]
    k = all_gather(tokens(w, b), cp, 1)
    seen = torch.arange(b["s"].shape[1])[:, None] >= torch.arange(k.shape[1])
    y = (tokens(w, b) @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ all_gather(b["s"], cp, 1) * w["g"]
    return mean((y.sum(-1).square() * b["m"]).sum(), b["m"].sum())


@loss(False, SEQUENCE)
def convolution_without_halo(w, b, axes):
    y = F.conv1d(F.pad(tokens(w, b).mT, (2, 0)), w["b"][:, :3, None].mT.reshape(1, 10, 3))
    return mean((y[:, 0] * b["m"]).square().sum(), b["m"].sum())


@loss(False, SEQUENCE)
def pooled_over_own(w, b, axes):
    h = tokens(w, b).tanh().mean(1) @ w["b"]
    return mean((h - 3 * w["g"]).square().sum(), h.shape[0])


@loss(False, SEQUENCE)
def pooled_without_enter(w, b, axes):
    h = psum(tokens(w, b).tanh().sum(1), axes["cp"]) @ w["b"]
    return mean((h - 3 * w["g"]).square().sum(), h.shape[0])


@loss(False, SEQUENCE)
def shifted_within_own(w, b, axes):
    h = tokens(w, b)
    y = ((h - h.roll(1, 1)) @ w["b"]).sum(-1)
    return mean((y.square() * b["m"]).sum(), b["m"].sum())


@loss(False, SEQUENCE)
def scan_of_own(w, b, axes):
    y = tokens(w, b).cumsum(1) @ w["b"]
    return mean((y.sum(-1).square() * b["m"]).sum(), b["m"].sum())


@loss(False, SEQUENCE)
def last_token_of_own(w, b, axes):
    y = tokens(w, b)[:, -1] @ w["b"]
    return mean((y - 3 * w["g"]).square().sum(), y.shape[0])


@loss(False, SEQUENCE)
def row_means_then_mean(w, b, axes):
    e = (tokens(w, b).tanh() @ w["b"]).square().sum(-1)
    return mean(((e * b["m"]).sum(1) / b["m"].sum(1).clamp(min=1)).sum(), e.shape[0])
