"""Newcomers with sequences: language models, packing, state-space scans, audio; dp of rows and cp of positions."""

import torch
import torch.nn.functional as F

from fmegatron import nn, step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, ppermute, psum
from tests.step.newcomers.frame import loss, mlp


def places(axis, x: torch.Tensor) -> torch.Tensor:
    """Positions of x[B, S_cp, ...] in the whole sequence."""
    return axis_index(axis, like=x) * x.shape[1] + torch.arange(x.shape[1], device=x.device)


def token_nll(w, b):
    """[B, S], 0 where there is no label."""
    logits = mlp(w, w["emb"][b["tok"]]) @ w["out"]
    nll = F.cross_entropy(logits.flatten(0, 1), b["lab"].flatten(), ignore_index=-1, reduction="none")
    return nll.view(b["lab"].shape)


LM = "emb up fb down gain out"


@loss("dp2 fsdp2 cp2 dp2·cp2", LM, "parts divided", "rank_mean padded_positions tokens_here sums_of_cp_alone@dp2·cp2")
def masked_lm(axes, how):
    """Mean over the tokens that have a label."""
    data = axes[axes.data]

    def loss_fn(w, b):
        nll, learned = token_nll(w, b), (b["lab"] >= 0).sum()
        match how:
            case "parts":
                return step.mean(nll.sum(), learned)
            case "divided":
                return nll.sum() / psum(learned, data).clamp(min=1)
            case "rank_mean":
                return nll.sum() / learned.clamp(min=1) / data.size
            case "padded_positions":
                return nll.sum() / learned.clamp(min=1)
            case "tokens_here":
                return step.mean(nll.sum() / learned.clamp(min=1), 1)
            case _:
                return nll.sum() / psum(learned, axes["cp"])

    return loss_fn


@loss("dp2 dp3 fsdp2 cp2", LM, "rows_then_batch", "rows_on_cp_alone@cp2,dp2·cp2 mean_of_row_means ranks_forgotten")
def by_sequence(axes, how):
    """Each sequence has the same weight, however long it is."""
    data, cp = axes[axes.data], axes["cp"]

    def loss_fn(w, b):
        nll, mask = token_nll(w, b), (b["lab"] >= 0).float()
        length = mask.sum(1)
        if how != "rows_on_cp_alone":
            length = psum(length, cp)
        of_row = nll.sum(1) / length.clamp(min=1).to(nll.dtype)
        if how == "mean_of_row_means":
            return of_row.mean()
        if how == "ranks_forgotten":
            return of_row.sum() / len(of_row) / cp.size
        return of_row.sum() / (of_row.shape[0] * data.size / cp.size)

    return loss_fn


@loss("cp2 cp3 dp2·cp2", LM, "from_the_next gathered", "own_shift from_the_rank_before@cp3 last_token_learned")
def next_tokens(axes, how):
    """Labels are made from the tokens: the next one, which may be on the next rank."""
    cp = axes["cp"]

    def loss_fn(w, b):
        tok = b["tok"]
        if how == "own_shift":
            nxt = tok.roll(-1, 1)
        elif how == "gathered":
            nxt = all_gather(tok, cp, 1).roll(-1, 1)[:, places(cp, tok)]
        else:
            shift = 1 if how == "from_the_rank_before" else -1
            nxt = torch.cat([tok[:, 1:], ppermute(tok[:, :1], cp, shift)], 1)
        logits = mlp(w, w["emb"][tok]) @ w["out"]
        nll = F.cross_entropy(logits.flatten(0, 1), nxt.flatten(), reduction="none").view(tok.shape)
        at = places(cp, tok)
        keep = at < tok.shape[1] * cp.size - 1
        if how == "last_token_learned":
            keep = torch.arange(tok.shape[1]) < tok.shape[1] - 1
        return step.mean((nll * keep).sum(), keep.sum() * len(tok))

    return loss_fn


@loss("cp2 cp3 dp2·cp2", LM + " pos", "global", "from_zero reversed_ranks")
def learned_positions(axes, how):
    """A table of positions is added."""
    cp = axes["cp"]

    def loss_fn(w, b):
        at = places(cp, b["tok"])
        if how == "from_zero":
            at = torch.arange(b["tok"].shape[1])
        if how == "reversed_ranks":
            at = (cp.size - 1 - axis_index(cp, like=at)) * len(at) + torch.arange(len(at))
        x = w["emb"][b["tok"]] + w["pos"][at]
        error = (mlp(w, x) @ w["out"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


def heads_of(w, x, name):
    """[B, S, 12, 2]"""
    return (x @ w[name]).unflatten(-1, (-1, 2))


@loss(
    "cp2 cp3 dp2·cp2", "wq wk wv wo", "gathered library keys_detached@dp2·cp2", "causal_by_own own_keys documents_here"
)
def attention_over_cp(axes, how):
    """Causal attention inside of documents; keys and values are gathered."""
    cp = axes["cp"]

    def loss_fn(w, b):
        q, k, v = (heads_of(w, b["seq"], name) for name in ("wq", "wk", "wv"))
        at, doc = places(cp, b["seq"]), b["doc"]
        if how == "own_keys":
            every, of = at, doc
        else:
            if how == "keys_detached":
                k, v = k.detach(), v.detach()
            k, v = all_gather(k, cp, 1), all_gather(v, cp, 1)
            every, of = torch.arange(k.shape[1]), all_gather(doc, cp, 1)
        if how == "causal_by_own":
            at = torch.arange(q.shape[1])
        mask = at[:, None] >= every
        mask = mask & (doc[:, :, None] == of[:, None])
        if how == "documents_here":
            mask = (at[:, None] >= every) & (doc[:, :1, None] == of[:, None])
        if how == "library":
            o = nn.attention(q, k, v, mask)
        else:
            scores = torch.einsum("bshk,bthk->bhst", q, k) / 2**0.5
            p = scores.masked_fill(~mask[:, None], -1e4).softmax(-1)
            o = torch.einsum("bhst,bthk->bshk", p, v)
        error = (o.flatten(2) @ w["wo"] - b["seq"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@loss("cp2 cp3", "wq wk wv wo", "online", "no_rescale source_is_off maximum_lost@cp3 causal_by_turn@cp3")
def ring_by_hand(axes, how):
    """Blocks of keys go round; an online softmax merges what they give."""
    cp = axes["cp"]

    def loss_fn(w, b):
        q, k, v = (heads_of(w, b["seq"], name).transpose(1, 2) for name in ("wq", "wk", "wv"))
        n, me = q.shape[2], axis_index(cp, like=q)
        mine = me * n + torch.arange(n)
        top = torch.full_like(q[..., :1], -1e4)
        total, norm = torch.zeros_like(q), torch.zeros_like(q[..., :1])
        for turn in range(cp.size):
            source = (me - turn) % cp.size
            if how == "source_is_off":
                source = (me + turn + 1) % cp.size
            theirs = source * n + torch.arange(n)
            scores = (q @ k.mT / 2**0.5).masked_fill(mine[:, None] < theirs, -1e4)
            if how == "causal_by_turn":
                hidden = torch.arange(n)[:, None] < torch.arange(n) if turn == 0 else torch.zeros(n, n).bool()
                scores = (q @ k.mT / 2**0.5).masked_fill(hidden, -1e4)
            best = scores.amax(-1, keepdim=True)
            new = torch.maximum(top, best).detach() if how != "maximum_lost" else best.detach()
            p, old = (scores - new).exp(), (top - new).exp()
            if how == "no_rescale":
                old = torch.ones_like(old)
            total, norm, top = total * old + p @ v, norm * old + p.sum(-1, keepdim=True), new
            if turn < cp.size - 1:
                k, v = ppermute(k, cp, 1), ppermute(v, cp, 1)
        o = (total / norm).transpose(1, 2).flatten(2)
        error = (o @ w["wo"] - b["seq"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@loss("cp2 cp3 dp2·cp2", "taps square", "halo", "zeros_at_borders halo_detached wrapped future@cp3")
def causal_conv(axes, how):
    """Three taps: a position and the two before it, which may be on the rank before."""
    cp = axes["cp"]

    def loss_fn(w, b):
        x = b["seq"] @ w["square"]
        tail = x[:, -2:]
        if how == "halo_detached":
            tail = tail.detach()
        before = ppermute(tail, cp, -1 if how == "future" else 1)
        if how != "wrapped":
            before = before * (axis_index(cp, like=x) > 0)
        if how == "zeros_at_borders":
            before = torch.zeros_like(tail)
        padded = torch.cat([before, x], 1)
        y = sum(padded[:, i : i + x.shape[1]] * w["taps"][i] for i in range(3))
        if how == "wrapped" and cp.size == 1:
            y = sum(torch.cat([torch.zeros_like(tail), x], 1)[:, i : i + x.shape[1]] * w["taps"][i] for i in range(3))
        error = (y - b["seq"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@loss("cp2 cp3 dp2·cp2", "square other", "carried", "from_zero carry_includes_own carry_detached")
def linear_attention(axes, how):
    """Sums of outer products of all positions before, without a softmax; ranks add the sums of those before them."""
    cp = axes["cp"]

    def loss_fn(w, b):
        q, k = F.elu(b["seq"] @ w["square"]) + 1, F.elu(b["seq"] @ w["other"]) + 1
        kv = k[..., :, None] * b["seq"][..., None, :]
        states, norms = kv.cumsum(1), k.cumsum(1)
        if how != "from_zero":
            last, last_norm = states[:, -1], norms[:, -1]
            if how == "carry_detached":
                last, last_norm = last.detach(), last_norm.detach()
            every = all_gather(last[None], cp, 0)
            every_norm = all_gather(last_norm[None], cp, 0)
            me = axis_index(cp, like=q)
            who = torch.arange(cp.size)
            earlier = ((who <= me) if how == "carry_includes_own" else (who < me)).to(q.dtype)
            if how == "carry_includes_own" and cp.size == 1:
                earlier = earlier * 0
            states = states + torch.einsum("r,rbij->bij", earlier, every)[:, None]
            norms = norms + torch.einsum("r,rbi->bi", earlier, every_norm)[:, None]
        y = torch.einsum("bsi,bsij->bsj", q, states) / (q * norms).sum(-1, keepdim=True)
        error = (y - b["seq"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@loss("cp2 cp3", "gain shift square", "scan", "scan_restarts decay_of_one_step last_rank_carries@cp3")
def decayed_scan(axes, how):
    """h[t] = d h[t-1] + x[t], as a product with a matrix of decays, and a carry from the ranks before."""
    cp = axes["cp"]

    def loss_fn(w, b):
        x, d = b["seq"] @ w["square"], w["gain"].sigmoid()
        n = x.shape[1]
        age = torch.arange(n)[:, None] - torch.arange(n)
        power = (age.clamp(min=0)[..., None] * d.log()).exp() * (age >= 0)[..., None]
        h = torch.einsum("std,btd->bsd", power, x)
        if how != "scan_restarts":
            ends = all_gather(h[:, -1][None], cp, 0)
            me, who = axis_index(cp, like=x), torch.arange(cp.size)
            gap = (me - 1 - who) * (1 if how == "decay_of_one_step" else n)
            seen = who == me - 1 if how == "last_rank_carries" else who < me
            reach = (gap.clamp(min=0)[:, None] * d.log()).exp() * seen[:, None]
            carry = torch.einsum("rd,rbd->bd", reach, ends)
            h = h + ((torch.arange(n) + 1)[:, None] * d.log()).exp() * carry[:, None]
        error = (h * w["shift"] - b["seq"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@loss("cp2 cp3 dp2·cp2", "square head", "entered over_rows", "own_mean no_enter length_here rows_counted_on_all")
def pooled_text(axes, how):
    """The mean of a text's states is classified: one label a text, whose positions are on several ranks."""
    data, cp = axes[axes.data], axes["cp"]

    def loss_fn(w, b):
        h = torch.tanh(b["seq"] @ w["square"]) * b["mask"][..., None]
        total, length = h.sum(1), b["mask"].sum(1)
        if how != "own_mean":
            total = psum(total, cp)
            total = total if how == "no_enter" else enter(total, cp)
            length = length if how == "length_here" else psum(length, cp)
        pooled = total / length.clamp(min=1)[:, None]
        nll = F.cross_entropy(pooled @ w["head"], b["k"], reduction="sum")
        if how == "rows_counted_on_all":
            return nll / (len(b["k"]) * data.size / cp.size)
        if how == "over_rows":
            return step.mean(nll / cp.size, len(b["k"]) / cp.size)
        return nll / (len(b["k"]) * data.size)

    return loss_fn


@loss("cp2 cp3", "square head", "chosen_by_place", "last_of_each_rank first_of_each_rank no_enter")
def last_state(axes, how):
    """The state of the last real token is classified."""
    cp = axes["cp"]

    def loss_fn(w, b):
        h = torch.tanh(b["seq"] @ w["square"])
        at = places(cp, h)
        last = psum(b["mask"].sum(1), cp).long() - 1
        if how == "last_of_each_rank":
            last = b["mask"].sum(1).long().clamp(min=1) - 1
            at = torch.arange(h.shape[1])
        if how == "first_of_each_rank":
            last, at = torch.zeros_like(last), torch.arange(h.shape[1])
        hit = (at == last[:, None]).to(h.dtype)
        one = psum((h * hit[..., None]).sum(1), cp)
        one = one if how == "no_enter" else enter(one, cp)
        nll = F.cross_entropy(one @ w["head"], b["k"], reduction="sum")
        return nll / (len(b["k"]) * cp.size)

    return loss_fn


@loss("cp2 cp3 dp2·cp2", "square k1", "stable", "no_maximum_of_all own_softmax weights_entered_once")
def attention_pooling(axes, how):
    """One learned query over a text: a softmax over positions of all ranks."""
    cp = axes["cp"]

    def loss_fn(w, b):
        h = torch.tanh(b["seq"] @ w["square"])
        score = (h @ w["k1"])[..., 0].masked_fill(b["mask"] == 0, -1e4)
        top = score.amax(1, keepdim=True).detach()
        if how != "no_maximum_of_all":
            top = pmax(top, cp)
        p = (score - top).exp()
        if how == "own_softmax":
            out = psum((p[..., None] * h).sum(1) / p.sum(1, keepdim=True), cp) / cp.size
        else:
            out = psum((p[..., None] * h).sum(1), cp) / psum(p.sum(1, keepdim=True), cp)
        if how != "weights_entered_once":
            out = enter(out, cp)
        return step.mean(out.square().sum() / cp.size, len(out) / cp.size)

    return loss_fn


@loss("dp2 cp2 dp2·cp2", LM, "several", "z_by_rows@cp2,dp2·cp2 one_count weights_as_mean")
def several_parts(axes, how):
    """Token loss, z-loss and a loss by weights, each with its own count."""

    def loss_fn(w, b):
        logits = mlp(w, w["emb"][b["tok"]]) @ w["out"]
        lse = logits.logsumexp(-1)
        nll = lse - logits.gather(-1, b["lab"].clamp(min=0)[..., None])[..., 0]
        learned = b["lab"] >= 0
        lm = step.mean((nll * learned).sum(), learned.sum())
        seen = b["mask"].sum()
        if how == "several":
            return {"lm": lm, "z": 0.01 * step.mean((lse.square() * b["mask"]).sum(), seen)}
        if how == "z_by_rows":
            z = (lse.square() * b["mask"]).sum(1) / b["mask"].sum(1).clamp(min=1)
            return {"lm": lm, "z": 0.01 * step.mean(z.mean(), 1)}
        if how == "one_count":
            heavy = b["adv"] > 0.3
            z = (lse.square() * heavy).sum() / heavy.sum().clamp(min=1) * learned.sum()
            return step.mean((nll * learned).sum() + 0.01 * z, learned.sum())
        return {
            "lm": lm,
            "z": step.mean((lse.square() * (b["mask"] / b["mask"].mean().clamp(min=0.1))).sum(), lse.numel()),
        }

    return loss_fn


@loss("dp2 fsdp2 cp2", LM, "by_place", "by_row_alone@cp2 by_own_place", samples=True)
def token_dropout(axes, how):
    """Whole tokens are dropped, by the number of the sample and the position."""
    cp = axes["cp"]

    def loss_fn(w, b, samples):
        x = w["emb"][b["tok"]]
        n = x.shape[1]
        at = places(cp, x) if how == "by_place" else torch.arange(n)
        row = torch.arange(len(x)) if how == "by_own_place" else samples
        count = row[:, None] * 12 + at
        x = nn.dropout(x, 0.3, key=9, count=count)
        error = (mlp(w, x) @ w["out"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@loss("cp2 cp3 cp4", "square gain", "whole_norm", "frames_here mean_of_frames_only_here")
def audio_norm(axes, how):
    """Features are normalised by mean and deviation of the whole recording."""
    cp = axes["cp"]

    def loss_fn(w, b):
        x = b["seq"] @ w["square"]
        n = x.shape[1] * cp.size
        if how == "frames_here":
            x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-4).sqrt()
        else:
            mean = enter(psum(x.sum(1, keepdim=True), cp), cp) / n
            mean = x.mean(1, keepdim=True) if how == "mean_of_frames_only_here" else mean
            square = enter(psum((x - mean).square().sum(1, keepdim=True), cp), cp) / n
            x = (x - mean) / (square + 1e-4).sqrt()
        error = (x * w["gain"] - b["seq"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@loss("cp2 cp3", "square taps", "frames", "offset_of_the_next@cp3 edges_dropped")
def subsampled(axes, how):
    """Every third frame is made of itself and its two followers (12 frames, 4 or 6 a rank)."""
    cp = axes["cp"]

    def loss_fn(w, b):
        x = b["seq"] @ w["square"]
        follow = ppermute(x[:, :2], cp, 1 if how == "offset_of_the_next" else -1)
        follow = follow * (axis_index(cp, like=x) < cp.size - 1)
        if how == "edges_dropped":
            follow = torch.zeros_like(follow)
        x = torch.cat([x, follow], 1)
        n = x.shape[1] - 2
        y = sum(x[:, i : i + n] * w["taps"][i] for i in range(3))
        keep = (places(cp, b["seq"]) % 3 == 0).to(y.dtype)[:, None]
        error = ((y - b["seq"]) * keep).square()
        return step.mean(error.sum(), keep.sum() * y.shape[0] * 6)

    return loss_fn


@loss("dp2 fsdp3 cp2", LM, "tokens_of_documents", "documents_here@cp2 each_rank_its_mean")
def packed_documents(axes, how):
    """Every document of the packed rows has the same weight."""
    data, cp = axes[axes.data], axes["cp"]

    def loss_fn(w, b):
        nll = token_nll(w, b)
        hot = F.one_hot(b["doc"], 12).to(nll.dtype) * (b["lab"] >= 0)[..., None]
        tokens = hot.sum(1)
        if how != "documents_here":
            tokens = psum(tokens, cp)
        of = torch.einsum("bs,bsd->bd", nll, hot) / tokens.clamp(min=1)
        documents = (tokens > 0).sum()
        if how == "each_rank_its_mean":
            return of.sum() / documents / data.size
        if how == "documents_here":
            return of.sum() / (psum(documents, data))
        return of.sum() / (psum(documents, data) / cp.size)

    return loss_fn
