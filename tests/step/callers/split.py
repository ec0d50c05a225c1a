"""Callers that split a model by hand over tp and ep: Megatron's layers, vocabularies, norms, heads, experts."""

import torch
import torch.nn.functional as F

from fmegatron import step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, psum, reduce_scatter, shard
from fmegatron.layout import Layout
from fmegatron.nn import dropout
from tests.step.callers.frame import loss

MESHES = "tp2 dp2·tp2"


def squared(y, b):
    """Of these rows."""
    return step.mean((y - b["y"]).square().sum(), b["y"].shape[0])


@loss(
    MESHES,
    "up fb down gain square",
    "megatron scattered_and_gathered gathered_weights bias_on_one_rank",
    "no_sum no_enter entered_twice bias_on_each summed_twice sum_before_tanh gain_before_sum@dp2·tp2 mean_for_sum",
)
def two_layers(w, b, axes, how):
    tp = axes["tp"]
    x = b["x"] @ w["square"]
    if how == "gathered_weights":  # all of it everywhere, each rank's gradient a half of what it sends
        up, fb, down = (psum(_padded(w[k], tp, d), tp) for k, d in (("up", 1), ("fb", 0), ("down", 0)))
        return squared(torch.tanh(x @ up + fb) @ down * w["gain"], b)
    if how != "no_enter":
        x = enter(x, tp)
    if how == "entered_twice":
        x = enter(x, tp)
    h = x @ w["up"] + w["fb"]
    h = psum(h, tp) if how == "sum_before_tanh" else h
    y = torch.tanh(h) @ w["down"]
    if how == "bias_on_each":
        return squared(psum(y + w["gain"], tp), b)
    if how == "bias_on_one_rank":  # what the others add is zero, and so is their gradient
        first = (axis_index(tp) == 0).to(y.dtype)
        return squared(psum(y + enter(w["gain"], tp) * first, tp), b)
    if how == "gain_before_sum":  # right in its value: the gradient of gain stays a part
        return squared(psum(y * w["gain"], tp), b)
    if how == "scattered_and_gathered":
        y = psum(_padded(reduce_scatter(y, tp, 1), tp, 1), tp)
    elif how != "no_sum":
        y = psum(y, tp)
    if how == "mean_for_sum":
        y = y / tp.size
    if how == "summed_twice":
        y = psum(y, tp)
    return squared(y * w["gain"], b)


def _padded(x, axis, dim):
    """Zeros where the other ranks' parts are: their psum is what an all_gather is, and its gradient is this part's."""
    hot = F.one_hot(axis_index(axis), axis.size).to(x.dtype)
    return torch.stack([x * hot[i] for i in range(axis.size)], dim).flatten(dim, dim + 1) if axis.size > 1 else x


@loss(
    MESHES, "up gain", "padded own_columns entered_halves", "all_gathered gathered_and_halved_twice cut_and_not_summed"
)
def gathered_columns(w, b, axes, how):
    tp = axes["tp"]
    h = torch.tanh(b["x"] @ w["up"])
    if how == "own_columns":  # [N, F_tp], of which each rank makes its part of the loss
        e = (h * enter(w["gain"], tp).sum() - 0.3).square().sum()
        return step.mean(psum(e, tp), b["x"].shape[0])
    if how == "cut_and_not_summed":
        e = (h * enter(w["gain"], tp).sum() - 0.3).square().sum()
        return step.mean(e, b["x"].shape[0])
    if how == "entered_halves":  # gathered, used in one way, and each rank a share of it
        y = all_gather(h, tp, 1)
        e = (y * enter(w["gain"], tp).sum() - 0.3).square().sum()
        return step.mean(psum(e / tp.size, tp), b["x"].shape[0])
    y = psum(_padded(h, tp, 1), tp) if how == "padded" else all_gather(h, tp, 1)
    e = (y * w["gain"].sum() - 0.3).square().sum()
    return step.mean(e / tp.size if how == "gathered_and_halved_twice" else e, b["x"].shape[0])


@loss(
    MESHES,
    "emb gain",
    "masked one_hot",
    "clamped_only no_sum offset_of_the_whole modulo neighbours_rows",
)
def vocabulary(w, b, axes, how):
    tp, ids = axes["tp"], b["tok"]
    size = w["emb"].shape[0]
    first = axis_index(tp) * size
    if how == "offset_of_the_whole":
        first = axis_index(tp) * size * tp.size
    if how == "neighbours_rows":
        first = (axis_index(tp) + 1) % tp.size * size
    local = ids - first
    inside = (local >= 0) & (local < size)
    if how == "one_hot":
        x = F.one_hot(ids, size * tp.size).to(w["emb"].dtype)
        x = psum(shard(x, tp, 2) @ w["emb"], tp)
    elif how == "modulo":
        x = psum(w["emb"][ids % size], tp)
    else:
        x = w["emb"][local.clamp(0, size - 1)]
        x = x if how == "clamped_only" else x * inside[..., None]
        x = x if how == "no_sum" else psum(x, tp)
    e = (torch.tanh(x) * w["gain"] - b["seq"]).square().sum(-1) * b["mask"]
    return step.mean(e.sum(), b["mask"].sum())


@loss(
    MESHES,
    "square out",
    "megatron gathered_logits logsumexp_of_parts",
    "local_softmax own_maximum label_everywhere label_not_offset sum_of_logs not_entered label_unmasked",
)
def vocabulary_loss(w, b, axes, how):
    tp, n = axes["tp"], b["x"].shape[0]
    h = torch.tanh(b["x"] @ w["square"])
    logits = (h if how == "not_entered" else enter(h, tp)) @ w["out"]
    size = logits.shape[1]
    local = b["c"] - (0 if how == "label_not_offset" else axis_index(tp) * size)
    inside = (local >= 0) & (local < size)
    label = logits.gather(1, local.clamp(0, size - 1)[:, None])[:, 0]
    label = label if how == "label_unmasked" else label * inside
    if how != "label_everywhere":
        label = psum(label, tp)
    if how == "gathered_logits":
        whole = psum(_padded(logits, tp, 1), tp)
        return step.mean(F.cross_entropy(whole, b["c"], reduction="sum"), n)
    if how == "local_softmax":
        return step.mean((logits.logsumexp(1) - label).sum(), n)
    if how == "sum_of_logs":
        return step.mean((psum(logits.logsumexp(1), tp) - label).sum(), n)
    if how == "logsumexp_of_parts":
        parts = logits.logsumexp(1)
        top = pmax(parts, tp)
        return step.mean((psum((parts - top).exp(), tp).log() + top - label).sum(), n)
    top = logits.amax(1).detach()
    top = top if how == "own_maximum" else pmax(top, tp)
    total = psum((logits - top[:, None]).exp().sum(1), tp)
    return step.mean((total.log() + top - label).sum(), n)


@loss(
    MESHES,
    "square out",
    "summed_over_parts",
    "mean_of_this_part smoothing_of_own_vocabulary entropy_of_own_part teacher_cut_wrongly teacher_softmax_here",
)
def vocabulary_extras(w, b, axes, how):
    """Label smoothing, an entropy bonus, z-loss and a teacher, over a split vocabulary."""
    tp, n = axes["tp"], b["x"].shape[0]
    logits = enter(torch.tanh(b["x"] @ w["square"]), tp) @ w["out"]
    lse = psum(logits.exp().sum(1), tp).log()
    size = logits.shape[1] * tp.size
    mean = psum(logits.sum(1), tp) / size
    if how == "mean_of_this_part":
        mean = logits.mean(1)
    if how == "smoothing_of_own_vocabulary":
        mean = psum(logits.mean(1), tp)
    logp = logits - enter(lse, tp)[:, None]
    entropy = -(logp.exp() * logp).sum(1)
    entropy = entropy if how == "entropy_of_own_part" else psum(entropy, tp)
    teacher = torch.cat([b["x"], b["y"]], 1)
    if how == "teacher_cut_wrongly":
        teacher = shard(teacher.flip(1), tp, 1).flip(1).softmax(1)
    elif how == "teacher_softmax_here":
        teacher = shard(teacher, tp, 1).softmax(1)
    else:
        teacher = shard(teacher.softmax(1), tp, 1)
    soft = -psum((teacher * logp).sum(1), tp)
    return {
        "smooth": step.mean((lse - mean).sum(), n),
        "bonus": -0.1 * step.mean(entropy.sum(), n),
        "z": 0.01 * step.mean(lse.square().sum(), n),
        "teacher": step.mean(soft.sum(), n),
    }


@loss(
    MESHES,
    "square up fb down",
    "moments_of_all",
    "layer_norm_of_a_part squares_of_a_part variance_by_own_width mean_not_entered bias_twice",
)
def norm_between(w, b, axes, how):
    tp = axes["tp"]
    h = enter(torch.tanh(b["x"] @ w["square"]), tp) @ w["up"]
    width = h.shape[1] * tp.size
    if how == "layer_norm_of_a_part":
        h = F.layer_norm(h, h.shape[1:])
    else:
        mean = psum(h.sum(1, keepdim=True), tp) / width
        h = h - (mean if how == "mean_not_entered" else enter(mean, tp))
        square = h.square().sum(1, keepdim=True)
        if how == "squares_of_a_part":
            square = square / h.shape[1]
        else:
            square = enter(psum(square, tp), tp) / (h.shape[1] if how == "variance_by_own_width" else width)
        h = h * (square + 1e-5).rsqrt()
    y = torch.relu(h + w["fb"]) @ w["down"]
    y = psum(y + b["x"], tp) if how == "bias_twice" else psum(y, tp) + b["x"]
    return squared(y, b)


@loss(MESHES, "fused pos", "interleaved_by_head@tp2", "three_chunks chunked_by_parts")
def flat_qkv(w, b, axes, how):
    """[6, 36] split over its columns: q|k|v each of two heads of 6 on one rank, another thing on each of two."""
    tp = axes["tp"]
    x = enter(b["seq"] + w["pos"], tp)
    h = x @ w["fused"]
    if how == "interleaved_by_head":
        q, k, v = h.unflatten(-1, (-1, 3, 6)).unbind(-2)  # [N, T, heads here, 6]
    elif how == "three_chunks":
        q, k, v = (t.unflatten(-1, (-1, 6)) for t in h.chunk(3, -1))
    else:
        q, k, v = (t.unflatten(-1, (-1, 3)) for t in h.chunk(3, -1))
    a = torch.einsum("nqhk,nshk->nhqs", q, k).softmax(-1)
    o = psum(torch.einsum("nhqs,nshk->nqhk", a, v).sum(-2), tp)
    if how == "chunked_by_parts":
        o = torch.cat([o, o], -1)
    return step.mean(((o - b["seq"]).square().sum(-1) * b["mask"]).sum(), b["mask"].sum())


@loss(
    MESHES,
    "qkv pos",
    "scores_summed values_padded",
    "softmax_of_parts summed_behind_the_softmax scaled_by_own_width scores_not_entered values_not_gathered",
)
def split_heads(w, b, axes, how):
    """One head whose 6 features are split: scores are sums over the ranks."""
    tp = axes["tp"]
    q, k, v = torch.einsum("ntd,dcf->cntf", enter(b["seq"] + w["pos"], tp), w["qkv"]).unbind(0)
    width = q.shape[-1] * (1 if how == "scaled_by_own_width" else tp.size)
    scores = torch.einsum("nqf,nsf->nqs", q, k) / width**0.5
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    if how == "softmax_of_parts":
        a = scores.masked_fill(~causal, -1e9).softmax(-1)
    elif how == "summed_behind_the_softmax":
        a = enter(psum(scores.masked_fill(~causal, -1e9).softmax(-1), tp), tp) / tp.size
    else:
        scores = psum(scores, tp)
        scores = scores if how == "scores_not_entered" else enter(scores, tp)
        a = scores.masked_fill(~causal, -1e9).softmax(-1)
    o = a @ v
    if how == "values_padded":
        o = psum(_padded(o, tp, 2), tp)
        e = (o - b["seq"]).square().sum(-1)
    elif how == "values_not_gathered":
        e = psum((o - b["seq"][..., : o.shape[-1]]).square().sum(-1), tp)
    else:
        e = psum((o - shard(b["seq"], tp, 2)).square().sum(-1), tp)
    return step.mean((e * b["mask"]).sum(), b["mask"].sum())


@loss(MESHES, "square glu down", "two_parts", "parts_as_one_dim@dp2·tp2 halves_exchanged gate_of_all")
def gated(w, b, axes, how):
    tp = axes["tp"]
    x = enter(b["x"] @ w["square"], tp)
    h = torch.einsum("nd,dpf->npf", x, w["glu"])
    if how == "parts_as_one_dim":
        g, u = h.transpose(1, 2).flatten(1).chunk(2, 1)  # first and last features, and not gate and value
    elif how == "halves_exchanged":
        g, u = h[:, 0], h[:, 1].roll(h.shape[-1] // 2, 1)
    else:
        g, u = h.unbind(1)
    if how == "gate_of_all":
        return squared(psum((F.silu(g).mean(1, keepdim=True) * u) @ w["down"], tp), b)
    return squared(psum((F.silu(g) * u) @ w["down"], tp), b)


@loss(
    MESHES,
    "gain square up down",
    "entered_gain norm_on_all_rows",
    "gain_not_entered rows_not_gathered added_and_gathered",
    rules=[("up", (None, "tp")), ("down", ("tp", None))],
)
def sequence_parallel(w, b, axes, how):
    tp = axes["tp"]
    x = torch.tanh(b["seq"] @ w["square"])
    if how == "norm_on_all_rows":
        y = enter(x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w["gain"], tp)
        y = x + psum(torch.relu(y @ w["up"]) @ w["down"], tp)
        return step.mean(((y - b["seq"]).square().sum(-1) * b["mask"]).sum(), b["mask"].sum())
    part = shard(x, tp, 1)
    gain = w["gain"] if how == "gain_not_entered" else enter(w["gain"], tp)
    h = part * (part.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain
    whole = h.repeat(1, tp.size, 1) if how == "rows_not_gathered" else all_gather(h, tp, 1)
    y = torch.relu(whole @ w["up"]) @ w["down"]
    if how == "added_and_gathered":
        y = shard(psum(y, tp) / tp.size, tp, 1)
    else:
        y = reduce_scatter(y, tp, 1)
    e = ((part + y - shard(b["seq"], tp, 1)).square().sum(-1) * shard(b["mask"], tp, 1)).sum()
    return step.mean(psum(e, tp), b["mask"].sum())


@loss(
    MESHES, "up down gain", "largest_of_all top_of_all cosine_of_all", "largest_here top_here cosine_here argmax_here"
)
def choosing_features(w, b, axes, how):
    tp = axes["tp"]
    h = enter(b["x"] * w["gain"], tp) @ w["up"]
    whole = psum(_padded(h, tp, 1), tp)
    if how == "largest_of_all":
        e = (whole.amax(1) - 1).square().sum()
    elif how == "largest_here":
        e = (psum(h.amax(1), tp) / tp.size - 1).square().sum()
    elif how == "top_of_all":
        e = (whole.topk(3).values.sum(1) - 1).square().sum()
    elif how == "top_here":
        e = (psum(h.topk(3).values.sum(1), tp) - 1).square().sum()
    elif how == "cosine_of_all":
        e = psum((h * w["down"][:, 0]).sum(1), tp) / (psum(h.square().sum(1), tp) + 1e-6).sqrt()
        e = e.square().sum()
    elif how == "cosine_here":
        e = psum((F.normalize(h, dim=1) * w["down"][:, 0]).sum(1), tp).square().sum()
    else:
        best = F.one_hot(h.argmax(1), h.shape[1])
        e = psum((h * best).sum(1), tp).square().sum()
    return step.mean(e, b["x"].shape[0])


@loss(
    MESHES,
    "up down la lb",
    "entered_low_rank merged",
    "low_rank_not_entered scaled_by_ranks factor_summed_early",
)
def lora(w, b, axes, how):
    tp = axes["tp"]
    x = enter(b["x"], tp)
    if how == "merged":
        h = x @ (w["up"] + enter(w["la"], tp) @ w["lb"])
    else:
        low = b["x"] @ w["la"]
        if how == "factor_summed_early":
            low = psum(low, tp)
        low = low if how == "low_rank_not_entered" else enter(low, tp)
        h = x @ w["up"] + low @ w["lb"] * (tp.size if how == "scaled_by_ranks" else 1)
    return squared(psum(torch.tanh(h) @ w["down"], tp), b)


@loss(
    MESHES, "emb square gain", "tied", "tied_and_detached_read_out@dp2·tp2 tied_without_offset table_read_from_one_rank"
)
def tied(w, b, axes, how):
    tp, size = axes["tp"], w["emb"].shape[0]
    first = axis_index(tp) * size
    local = b["tok"] - first
    inside = ((local >= 0) & (local < size))[..., None]
    x = psum(w["emb"][local.clamp(0, size - 1)] * inside, tp)
    h = torch.tanh(x @ w["square"]) * w["gain"]
    h = h if how == "tied_and_detached_read_out" else enter(h, tp)
    logits = h @ w["emb"].T
    label = b["lab"].clamp(min=0) - (0 if how == "tied_without_offset" else first)
    here = (label >= 0) & (label < size)
    score = logits.gather(-1, label.clamp(0, size - 1)[..., None])[..., 0] * here
    score = score if how == "table_read_from_one_rank" else psum(score, tp)
    lse = psum(logits.exp().sum(-1), tp).log()
    learned = b["lab"] >= 0
    return step.mean(((lse - score) * learned).sum(), learned.sum())


@loss(MESHES, "up down", "by_place", "mask_of_a_part mask_by_rank", samples=True)
def dropped_features(w, b, axes, how, samples):
    tp = axes["tp"]
    h = torch.tanh(enter(b["x"], tp) @ w["up"])
    mesh = axes.mesh
    layout = Layout((12, 12), torch.float32, mesh, (mesh.axes(("dp", "fsdp")), mesh.axes("tp")))
    if how == "mask_of_a_part":
        h = dropout(h, 0.4, key=3, count=samples)
    elif how == "mask_by_rank":
        h = dropout(h, 0.4, key=3, count=samples * tp.size + axis_index(tp))
    else:
        h = dropout(h, 0.4, key=3, count=samples, layout=layout)
    return squared(psum(h @ w["down"], tp), b)
