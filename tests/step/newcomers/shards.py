"""Newcomers to tensor parallelism: products, heads, vocabularies and norms that are split over tp."""

import torch
import torch.nn.functional as F

from fmegatron import nn, step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, psum, reduce_scatter, shard
from fmegatron.layout import Layout
from tests.step.newcomers.frame import loss


def squared(y, b):
    """Against y of the batch."""
    return step.mean((y - b["y"]).square().sum(), y.numel())


@loss("tp2 tp3 dp2·tp2", "up fb down shift", "megatron by_hand", "no_enter no_sum summed_twice bias_on_each averaged")
def block(axes, how):
    """A residual MLP, columns then rows, with a bias behind the second product."""
    tp = axes["tp"]

    def loss_fn(w, b):
        x = b["x"]
        if how == "megatron":
            h = torch.tanh(nn.column_parallel(x[:, None], w["up"], tp) + w["fb"])
            return squared(x + nn.row_parallel(h, w["down"], tp)[:, 0] + w["shift"], b)
        h = x * w["shift"]
        h = torch.tanh((h if how == "no_enter" else enter(h, tp)) @ w["up"] + w["fb"])
        part = h @ w["down"]
        if how == "bias_on_each":
            return squared(x + psum(part + w["shift"], tp), b)
        y = part if how == "no_sum" else psum(part, tp)
        if how == "summed_twice":
            y = psum(y, tp)
        if how == "averaged":
            y = y / tp.size
        return squared(x + y + w["shift"], b)

    return loss_fn


@loss("tp2 tp3 fsdp2·tp2", "up gate wq down", "two_products", "chunked gate_of_own_half gate_not_entered")
def gated(axes, how):
    """A gated MLP: gate and value are two products, not two halves of one that is split."""
    tp = axes["tp"]

    def loss_fn(w, b):
        scale = w["wq"].square().mean()
        h = b["x"] * (1 + 0.1 * psum(scale, tp) / tp.size)
        x = enter(h, tp)
        if how == "two_products":
            a = F.silu(x @ w["gate"]) * (x @ w["up"])
        elif how == "chunked":
            gate, value = (x @ w["wq"]).chunk(2, -1)
            a = F.silu(gate) * value
        elif how == "gate_of_own_half":
            gate = all_gather(x @ w["gate"], tp, 1)[:, : w["up"].shape[1]]
            a = F.silu(gate) * (x @ w["up"])
        else:
            a = F.silu(h @ w["gate"]) * (x @ w["up"])
        return squared(psum(a @ w["down"], tp), b)

    return loss_fn


@loss("tp2 tp3 dp2·tp2", "wq wk wv wo gain", "plain", "heads_entered_late sum_forgotten scale_of_ranks")
def self_attention(axes, how):
    """Twelve heads of two, split over tp."""
    tp = axes["tp"]

    def loss_fn(w, b):
        x = torch.tanh(b["seq"]) * w["gain"]
        e = x if how == "heads_entered_late" else enter(x, tp)
        q, k, v = ((e @ w[name]).unflatten(-1, (-1, 2)) for name in ("wq", "wk", "wv"))
        scale = 1 / q.shape[2] ** 0.5 if how == "scale_of_ranks" else None
        o = nn.attention(q, k, v, scale=scale).flatten(2) @ w["wo"]
        y = o if how == "sum_forgotten" else psum(o, tp)
        return step.mean((y - x).square().sum(), y.numel())

    return loss_fn


@loss("tp2 tp3 tp4", "wq k1 v1 wo", "shared_entered", "keys_not_entered values_not_entered head_of_rank")
def multi_query(axes, how):
    """All heads share one key and value head, whose projections every rank has in full."""
    tp = axes["tp"]

    def loss_fn(w, b):
        x = torch.tanh(b["seq"]) * 1.5
        q = (x @ w["wq"]).unflatten(-1, (-1, 2))
        k, v = (x @ w[name] for name in ("k1", "v1"))
        k = k if how == "keys_not_entered" else enter(k, tp)
        v = v if how == "values_not_entered" else enter(v, tp)
        if how == "head_of_rank":
            q = q * (1 + axis_index(tp, like=q))
        o = nn.attention(q, k[:, :, None], v[:, :, None]).flatten(2)
        y = psum(o @ w["wo"], tp)
        return step.mean((y - x).square().sum(), y.numel())

    return loss_fn


@loss("tp2 tp3 dp2·tp2", "wq wk wv wo gain a", "norm_of_all", "norm_here norm_not_entered gain_of_heads")
def normed_queries(axes, how):
    """RMS norm over all heads' queries at once (OLMo 2), before they are cut into heads."""
    tp = axes["tp"]

    def norm(t):
        square = t.square().sum(-1, keepdim=True)
        if how == "norm_here":
            return t * torch.rsqrt(square / t.shape[-1] + 1e-5)
        square = psum(square, tp)
        square = square if how == "norm_not_entered" else enter(square, tp)
        return t * torch.rsqrt(square / (t.shape[-1] * tp.size) + 1e-5)

    def loss_fn(w, b):
        x = torch.tanh(b["seq"]) * w["gain"]
        e = enter(x, tp)
        q, k = norm(e @ w["wq"]), norm(e @ w["wk"])
        q = q.unflatten(-1, (-1, 2)) * w["a"][:, None]
        if how == "gain_of_heads":
            q = q / w["a"].norm()
        k, v = k.unflatten(-1, (-1, 2)), (e @ w["wv"]).unflatten(-1, (-1, 2))
        y = psum(nn.attention(q, k, v).flatten(2) @ w["wo"], tp)
        return step.mean((y - b["seq"]).square().sum(), y.numel())

    return loss_fn


@loss(
    "tp2 tp3 dp2·tp2",
    "emb up fb down out",
    "library by_hand",
    "no_offset mask_forgotten not_entered maximum_here sum_here",
)
def vocabulary(axes, how):
    """Embedding and cross-entropy of a vocabulary that is split."""
    tp = axes["tp"]

    def embed(ids, table):
        n = table.shape[0]
        at = ids if how == "no_offset" else ids - axis_index(tp, like=table) * n
        inside = (at >= 0) & (at < n)
        rows = table[at.clamp(0, n - 1)]
        return psum(rows if how == "mask_forgotten" else rows * inside[..., None], tp)

    def nll_of(logits, labels):
        n = logits.shape[-1]
        at = labels - axis_index(tp, like=logits) * n
        inside = (at >= 0) & (at < n)
        own = logits.gather(-1, at.clamp(0, n - 1)[..., None])[..., 0] * inside
        top = logits.amax(-1).detach()
        top = top if how == "maximum_here" else pmax(top, tp)
        z = (logits - top[..., None]).exp().sum(-1)
        z = z if how == "sum_here" else psum(z, tp)
        return z.log() + top - psum(own, tp)

    def loss_fn(w, b):
        labels = b["lab"].clamp(min=0)
        x = nn.embed(b["tok"], w["emb"], tp) if how == "library" else embed(b["tok"], w["emb"])
        h = psum(torch.tanh(enter(x, tp) @ w["up"] + w["fb"]) @ w["down"], tp)
        h = h if how == "not_entered" else enter(h, tp)
        logits = h @ w["out"]
        nll = nn.cross_entropy(logits, labels, tp)[0] if how == "library" else nll_of(logits, labels)
        learned = b["lab"] >= 0
        return step.mean((nll * learned).sum(), learned.sum())

    return loss_fn


@loss("tp2 tp3 fsdp2·tp2", "square out", "smoothed", "mean_of_logits_here mean_of_own_columns z_summed")
def smoothed_vocabulary(axes, how):
    """Label smoothing and a z-loss over a vocabulary that is split."""
    tp = axes["tp"]

    def loss_fn(w, b):
        logits = enter(b["seq"] @ w["square"], tp) @ w["out"]
        nll, lse = nn.cross_entropy(logits, b["tok"], tp)
        if how == "mean_of_logits_here":
            even = lse - logits.mean(-1)
        elif how == "mean_of_own_columns":
            even = lse - psum(logits.mean(-1), tp)
        else:
            even = lse - psum(logits.sum(-1), tp) / 24
        z = psum(lse.square(), tp) if how == "z_summed" else lse.square()
        total = (0.9 * nll + 0.1 * even + 0.01 * z).sum()
        return step.mean(total, nll.numel())

    return loss_fn


@loss("tp2 tp3 dp2·tp2", "square out head", "kl_over_shards entropy_too@dp2·tp2", "teacher_here kl_not_summed")
def distilled_vocabulary(axes, how):
    """KL between two sets of logits that are split by vocabulary."""
    tp = axes["tp"]

    def log_softmax(logits, here=False):
        top = logits.amax(-1, keepdim=True).detach()
        top = top if here else pmax(top, tp)
        z = (logits - top).exp().sum(-1, keepdim=True)
        z = z if here else enter(psum(z, tp), tp)
        return logits - top - z.log()

    def loss_fn(w, b):
        student = log_softmax(enter(b["seq"] @ w["square"], tp) @ w["out"])
        with torch.no_grad():
            teacher = log_softmax(b["seq"] @ w["out"], here=how == "teacher_here")
        kl = (teacher.exp() * (teacher - student)).sum(-1)
        if how == "entropy_too":
            kl = kl + (student.exp() * student).sum(-1).mean()
        kl = kl if how == "kl_not_summed" else psum(kl, tp)
        return step.mean(kl.sum(), kl.numel())

    return loss_fn


@loss("tp2 tp3 tp4", "up fb down gain", "scattered", "gain_not_entered gathered_again norm_of_whole_gain wrong_dim")
def sequence_parallel(axes, how):
    """Norms on a part of the sequence, products on all of it."""
    tp = axes["tp"]

    def loss_fn(w, b):
        x = shard(b["seq"], tp, 1)
        gain = w["gain"] if how == "gain_not_entered" else enter(w["gain"], tp)
        h = nn.rms_norm(x, gain)
        h = all_gather(h, tp, 1)
        if how == "gathered_again":
            h = enter(h, tp)
        y = torch.tanh(h @ w["up"] + w["fb"]) @ w["down"]
        if how == "wrong_dim":
            y = reduce_scatter(y.transpose(0, 1), tp, 1).transpose(0, 1) if y.shape[0] % tp.size == 0 else y
            error = (y - shard(b["seq"], tp, 0)).square().sum() + x.sum() * 0
            return step.mean(error, b["seq"].numel())
        y = x + reduce_scatter(y, tp, 1)
        if how == "norm_of_whole_gain":
            y = y * w["gain"]
        error = psum((y - shard(b["seq"], tp, 1)).square().sum(), tp)
        return step.mean(error, b["seq"].numel())

    return loss_fn


@loss("tp2 tp3 dp2·tp2", "up fb down square k1 v1", "both", "first_factor_alone second_not_summed scaled_by_own_rank")
def low_rank(axes, how):
    """LoRA of a product whose rows are split: the first factor meets the split dim, the second is whole."""
    tp = axes["tp"]

    def loss_fn(w, b):
        h = torch.tanh(enter(b["x"], tp) @ w["up"] + w["fb"])
        # The first factor's rows are split like those of `down`: its columns are two of them.
        first = w["down"][:, :2]
        low = h @ first
        base = h @ w["down"]
        if how == "both":
            y = psum(base, tp) + psum(low, tp) @ w["k1"].mT
        elif how == "first_factor_alone":
            y = psum(base, tp) + low @ w["k1"].mT
        elif how == "second_not_summed":  # the product with the whole factor on each rank's term
            y = psum(base + low @ w["k1"].mT, tp)
        else:
            y = psum(base + low @ w["k1"].mT, tp) + low @ w["v1"].mT / tp.size
        return squared(y, b)

    return loss_fn


@loss("tp2 tp3 tp4", "up fb down", "by_place", "same_mask_for_all own_layout", samples=True)
def dropped_columns(axes, how):
    """Dropout between the two products, on columns that are split."""
    tp = axes["tp"]

    def loss_fn(w, b, samples):
        h = torch.tanh(enter(b["x"], tp) @ w["up"] + w["fb"])
        where = Layout((12, 12), h.dtype, axes.mesh, (axes.mesh.axes(("dp",)), ("tp",)))
        if how == "by_place":
            h = nn.dropout(h, 0.3, key=2, count=samples, layout=where)
        elif how == "same_mask_for_all":
            h = nn.dropout(h, 0.3, key=2, count=samples)
        else:
            keep = nn.uniform(h.detach(), key=2, count=samples + axis_index(tp, like=samples)) > 0.3
            h = h * keep / 0.7
        return squared(psum(h @ w["down"], tp), b)

    return loss_fn


@loss("tp2 tp3 dp2·tp2", "up fb down a", "statistics_of_all", "statistics_here mean_not_entered width_of_part")
def wide_layer_norm(axes, how):
    """LayerNorm of the hidden layer, whose columns are split."""
    tp = axes["tp"]

    def loss_fn(w, b):
        h = enter(b["x"], tp) @ w["up"] + w["fb"]
        n = h.shape[-1]
        if how == "statistics_here":
            h = F.layer_norm(h, (n,))
        else:
            mean = psum(h.sum(-1, keepdim=True), tp) / (n if how == "width_of_part" else n * tp.size)
            mean = mean if how == "mean_not_entered" else enter(mean, tp)
            var = enter(psum((h - mean).square().sum(-1, keepdim=True), tp), tp) / (n * tp.size)
            h = (h - mean) * torch.rsqrt(var + 1e-5)
        return squared(psum(torch.tanh(h * w["a"]) @ w["down"], tp), b)

    return loss_fn


@loss("tp2 tp3 dp2·tp2", "square head", "index_of_all", "index_of_own top_here probability_here")
def hits(axes, how):
    """Cross-entropy over classes that are split, and as metric how often the largest is the label."""
    tp = axes["tp"]

    def loss_fn(w, b):
        logits = enter(torch.tanh(b["x"] @ w["square"]), tp) @ w["head"]
        nll = nn.cross_entropy(logits[:, None], b["k"][:, None], tp)[0]
        top, at = logits.max(-1)
        at = at + axis_index(tp, like=at) * logits.shape[-1]
        if how == "index_of_own":
            at = logits.argmax(-1)
        best = top if how == "top_here" else pmax(top, tp)
        hit = ((top == best) & (at == b["k"])).to(nll.dtype)
        hit = hit.sum() if how == "top_here" else psum(hit.sum(), tp)
        if how == "probability_here":
            hit = logits.softmax(-1).amax(-1).sum()
        return step.mean(nll.sum(), len(nll)), {"hits": step.mean(hit, len(nll))}

    return loss_fn


@loss("tp2 tp3 dp2·tp2", "up head a down", "penalty_once", "penalty_of_shard penalty_on_all entered_penalty")
def penalised(axes, how):
    """An L2 penalty on weights that are split over tp and one that is not, beside the loss."""
    tp = axes["tp"]

    def loss_fn(w, b):
        h = torch.tanh(enter(b["x"], tp) @ w["up"]) * w["a"]
        main = step.mean((psum(h @ w["down"], tp) - b["y"]).square().sum(), b["y"].numel())
        square = w["up"].square().sum()
        if how == "penalty_once":
            square = psum(square, tp)
        if how == "entered_penalty":
            square = psum(enter(square, tp), tp)
        if how == "penalty_on_all":
            square = psum(psum(square, tp), tp)
        return {"main": main, "penalty": 0.1 * step.mean(square, 1)}

    return loss_fn


@loss("tp2 tp3 dp2·tp2", "square wq book", "over_shards", "own_codes index_not_shifted nearest_of_each")
def nearest_code(axes, how):
    """The nearest of 24 codes that are split over tp (columns of wq), straight through."""
    tp = axes["tp"]

    def loss_fn(w, b):
        z = b["x"] @ w["square"]
        codes = w["wq"].mT
        far = (z[:, None] - codes).square().sum(-1).detach()
        least = far.amin(-1)
        best = least if how in ("own_codes", "nearest_of_each") else -pmax(-least, tp)
        hit = (far == best[:, None]).to(z.dtype)
        if how == "index_not_shifted":
            hit = F.one_hot(far.argmin(-1), far.shape[-1]).to(z.dtype)
        code = hit @ codes
        if how != "own_codes":
            code = psum(code, tp)
        return step.mean((z - code).square().sum(), z.numel())

    return loss_fn
