"""Losses over classes: heads for several tokens, smoothing, focal and unlikely ones, a vocabulary that tp splits."""

import torch

from fmegatron import step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, ppermute, psum, shard
from tests.step.arrivals.frame import descend, loss_of, sgd, step_of, summed

TOKENS = {"emb": "24,8", "one": "8,24", "two": "8,24"}
SPLIT = {"emb": "24,8", "up": "8,12", "down": "12,8", "out": "8,24@tp"}


def log_sum_exp(logits, tp):
    """[..., V_tp] -> [...]: over all ranks' columns."""
    top = pmax(logits.detach().amax(-1), tp)
    return psum((logits - top[..., None]).exp().sum(-1), tp).log() + top


def picked(logits, ids, tp):
    """The columns of `ids`, wherever they are."""
    at = ids - axis_index(tp, logits) * logits.shape[-1]
    here = (at >= 0) & (at < logits.shape[-1])
    found = logits.gather(-1, at.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
    return psum(torch.where(here, found, torch.zeros_like(found)), tp)


def hidden_of(w, tokens):
    """[...] -> [..., 8]."""
    h = w["emb"][tokens]
    return h + torch.tanh(h @ w["up"]) @ w["down"]


@step_of(
    "dp2 dp3 dp2·fsdp2",
    TOKENS,
    "by_hand as_means@dp2,dp3 weighed_late",
    "second_own_count means_of_ranks unreduced_head count_psummed_twice@dp3",
)
def two_tokens(axes, how):
    """Heads for the next token and the one behind it, over masks that no two ranks have alike."""
    data = axes["dp", "fsdp"]

    def nll(w, b, head, ahead):
        h = w["emb"][b["tok"][:, :-ahead]]
        logs = (h @ w[head]).log_softmax(-1)
        live = b["mask"][:, ahead:]
        return (-logs.gather(-1, b["tok"][:, ahead:, None])[..., 0] * live).sum(), live.sum()

    def as_means(w, b):
        return {"one": step.mean(*nll(w, b, "one", 1)), "two": 0.3 * step.mean(*nll(w, b, "two", 2))}

    def part(w, b):
        (one, n1), (two, n2) = nll(w, b, "one", 1), nll(w, b, "two", 2)
        if how == "means_of_ranks":
            return (one / n1 + 0.3 * two / n2) / data.size
        n1 = psum(n1, data)
        n2 = n2 * data.size if how == "second_own_count" else psum(n2, data)
        if how == "count_psummed_twice":
            n2 = psum(n2, data)
        return one / n1 + 0.3 * two / n2

    def train_step(w, b):
        if how == "as_means":
            (value, _), grads = step.value_and_grad(as_means)(w, b)
            return sgd(w, step.reduce_gradients(grads)), {"loss": value}
        if how == "weighed_late":
            after, loss = w, 0.0
            for head, ahead, weight in (("one", 1, 1.0), ("two", 2, 0.3)):
                (total, count), grads = step.value_and_grad(nll)(w, b, head, ahead)
                count = psum(count, data)
                after = sgd(after, summed(grads, data), 0.1 * weight / count)
                loss = loss + weight * psum(total, data) / count
            return after, {"loss": loss}
        (value, _), grads = step.value_and_grad(part)(w, b)
        reduced = summed(grads, data)
        if how == "unreduced_head":
            reduced["two"] = grads["two"]
        return sgd(w, reduced), {"loss": psum(value, data)}

    return train_step


@step_of("cp2 cp3 dp2·cp2", TOKENS, "gathered permuted", "rolled_here cut_here wrong_neighbour@cp3 first_of_gathered")
def shifted_targets(axes, how):
    """The next token of a rank's last one is another rank's first."""
    data, cp = axes["dp", "cp"], axes["cp"]

    def part(w, b):
        tokens, mask, n = b["tok"], b["mask"], b["tok"].shape[1]
        last = (axis_index(cp, tokens) + 1) * n == n * cp.size
        if how == "gathered":
            whole = all_gather(tokens, cp, 1)
            targets = shard(torch.cat([whole[:, 1:], whole[:, :1]], 1), cp, 1)
        elif how in ("rolled_here", "cut_here"):
            targets = tokens.roll(-1, 1)
        elif how == "first_of_gathered":
            targets = all_gather(tokens, cp, 1).roll(-1, 1)[:, :n]
        else:
            first = ppermute(tokens[:, :1], cp, 1 if how == "wrong_neighbour" else -1)
            targets = torch.cat([tokens[:, 1:], first], 1)
        ends = torch.arange(n, device=tokens.device) == n - 1
        live = mask * ~(ends if how == "cut_here" else ends & last)
        logs = (w["emb"][tokens] @ w["one"]).log_softmax(-1)
        return (-logs.gather(-1, targets[..., None])[..., 0] * live).sum() / psum(live.sum(), data)

    return lambda w, b: descend(part, w, b, data)


@step_of("tp2 tp3 dp2·tp2", SPLIT, "smoothed", "own_mean divided_by_own no_enter own_lse mean_twice@tp3")
def smoothing(axes, how):
    """Label smoothing over a vocabulary that is split."""
    data, tp = axes["dp"], axes["tp"]

    def part(w, b):
        h = hidden_of(w, b["k"])
        logits = (h if how == "no_enter" else enter(h, tp)) @ w["out"]
        lse = logits.logsumexp(-1) if how == "own_lse" else log_sum_exp(logits, tp)
        total = logits.sum(-1) if how == "own_mean" else psum(logits.sum(-1), tp)
        mean = total / (logits.shape[-1] if how in ("own_mean", "divided_by_own") else 24)
        if how == "mean_twice":
            mean = psum(mean, tp)
        nll = lse - 0.9 * picked(logits, (b["k"] * 5) % 24, tp) - 0.1 * mean
        return (nll * b["wt"]).sum() / psum(b["wt"].sum(), data)

    return lambda w, b: descend(part, w, b, data)


@step_of("tp2 tp3", SPLIT, "by_column", "own_columns last_of_each gradient_halved")
def uneven_vocabulary(axes, how):
    """22 words in 24 columns: the last two are nobody's."""
    tp = axes["tp"]

    def loss_fn(w, b):
        logits = enter(hidden_of(w, b["tok"]), tp) @ w["out"]
        n = logits.shape[-1]
        column = torch.arange(n, device=logits.device)
        if how not in ("own_columns", "last_of_each"):
            column = column + axis_index(tp, logits) * n
        dead = column >= n - 2 if how == "last_of_each" else column >= 22
        logits = logits.masked_fill(dead, -1e4)
        nll = log_sum_exp(logits, tp) - picked(logits, b["tgt"].clamp(max=5) if how == "last_of_each" else b["tgt"], tp)
        loss = (nll * b["mask"]).sum() / b["mask"].sum()
        return loss / tp.size if how == "gradient_halved" else loss

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(loss_fn)(w, b)
        return sgd(w, grads), {"loss": psum(value, tp) if how == "gradient_halved" else value}

    return train_step


@loss_of(
    "dp2 dp3 fsdp2", {"up": "8,12", "bias": "12"}, "sum_and_count alpha_of_all", "own_alpha own_mean hardest_own@dp3"
)
def focal(axes, how):
    """Focal loss with rows that weigh nothing, and a factor for classes that are rare."""
    data = axes[axes.data]

    def loss_fn(w, b):
        logs = (torch.relu(b["x"] @ w["up"]) * w["bias"]).log_softmax(-1)
        hot = torch.nn.functional.one_hot(b["k"], 12).to(logs.dtype)
        logp = (logs * hot).sum(-1)
        nll = -((1 - logp.exp()) ** 2) * logp
        live = (b["wt"] > 0).to(logs.dtype)
        counts = hot.sum(0)
        if how == "alpha_of_all":
            counts = psum(counts, data)
        if how in ("own_alpha", "alpha_of_all"):
            nll = nll / (counts + 1)[b["k"]]
        if how == "hardest_own":
            live = live * (nll.detach() >= nll.detach().median())
        if how == "own_mean":
            return (nll * live).sum() / live.sum().clamp(min=1) / data.size
        return step.mean((nll * live).sum(), live.sum())

    return loss_fn


@step_of("tp2 tp3 dp2·tp2", SPLIT, "whole", "own_softmax not_summed entered_twice@tp2,dp2·tp2")
def unlikelihood(axes, how):
    """The probability of a word that was there before is pushed down."""
    data, tp = axes["dp"], axes["tp"]

    def part(w, b):
        h = enter(hidden_of(w, b["tok"][:, 1:]), tp)
        logits = (enter(h, tp) if how == "entered_twice" else h) @ w["out"]
        lse = logits.logsumexp(-1) if how == "own_softmax" else log_sum_exp(logits, tp)
        if how == "not_summed":
            at = (b["tok"][:, :-1] - axis_index(tp, logits) * logits.shape[-1]).clamp(0, logits.shape[-1] - 1)
            logp = logits.gather(-1, at[..., None])[..., 0] - lse
        else:
            logp = picked(logits, b["tok"][:, :-1], tp) - lse
        live = b["mask"][:, 1:]
        return (-(1 - logp.exp().clamp(max=0.999)).log() * live).sum() / psum(live.sum(), data)

    return lambda w, b: descend(part, w, b, data)


@step_of(
    "tp2 tp3", {**SPLIT, "teacher": "8,24@tp"}, "of_candidates", "own_three ids_of_rank gathered_student largest_of_own"
)
def top_distilled(axes, how):
    """A student learns the three likeliest words of a teacher, both split."""
    tp = axes["tp"]

    def loss_fn(w, b):
        told = (b["x"] @ w["teacher"]).detach()
        values, ids = told.topk(3, -1)
        if how != "ids_of_rank":
            ids = ids + axis_index(tp, told) * told.shape[-1]
        if how == "largest_of_own":
            values = pmax(values, tp)
        elif how != "own_three":
            values, best = all_gather(values, tp, 1).topk(3, -1)
            ids = all_gather(ids, tp, 1).gather(1, best)
        logits = enter(hidden_of(w, b["k"]), tp) @ w["out"]
        if how == "gathered_student":
            chosen = all_gather(logits, tp, 1).gather(1, ids)
        else:
            chosen = torch.stack([picked(logits, ids[:, i], tp) for i in range(3)], 1)
        logp = chosen - log_sum_exp(logits, tp)[:, None]
        return -((values / 2).softmax(-1) * logp).sum(-1).mean()

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(loss_fn)(w, b)
        return sgd(w, grads), {"loss": value}

    return train_step


@step_of("dp2 dp3", {"up": "8,12", "old": "8,12"}, "of_batch", "own_deviation deviations_averaged own_count")
def tempered(axes, how):
    """Distillation at a temperature that is the deviation of the teacher's logits over the batch."""
    data = axes["dp"]

    def part(w, b):
        told, said = (b["x"] @ w["old"]).detach(), b["x"] @ w["up"]
        if how == "own_deviation":
            t = told.std()
        elif how == "deviations_averaged":
            t = psum(told.std(), data) / data.size
        else:
            n = told.numel() * (1 if how == "own_count" else data.size)
            mean = psum(told.sum(), data) / n
            t = (psum((told - mean).square().sum(), data) / (n - 1)).sqrt()
        kl = ((told / t).softmax(-1) * ((told / t).log_softmax(-1) - (said / t).log_softmax(-1))).sum(-1)
        return (kl * b["wt"]).sum() / psum(b["wt"].sum(), data)

    return lambda w, b: descend(part, w, b, data)
