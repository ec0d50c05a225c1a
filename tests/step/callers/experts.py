"""Callers with experts by hand: over ep beside copies of the rows, or with all_to_all among ranks that split them."""

import torch
import torch.nn.functional as F

from fmegatron import step
from fmegatron.collectives import all_gather, all_to_all, axis_index, enter, psum, reduce_scatter, shard
from fmegatron.layout import DataParallel
from tests.step.callers.frame import loss

AMONG_ROWS = DataParallel(("dp", "ep"))  # ep splits rows too


def expert(x, first, second):
    """x [..., N, D] of experts [..., D, D]."""
    return torch.tanh(x @ first) @ second


@loss(
    "ep2 dp2·ep2",
    "square gate e_in e_out",
    "entered gate_cut",
    "no_sum tokens_not_entered gate_not_entered gate_not_offset softmax_over_own mean_of_experts gate_summed_too",
)
def soft_experts(w, b, axes, how):
    ep = axes["ep"]
    x = torch.tanh(b["x"] @ w["square"])
    logits = x @ w["gate"]
    few = w["e_in"].shape[0]
    p = logits.softmax(-1)
    if how == "gate_summed_too":
        p = psum(p, ep)
    if how == "gate_not_offset":
        p = enter(p, ep)[:, :few]
    elif how == "softmax_over_own":
        p = shard(logits, ep, 1).softmax(-1)
    elif how == "gate_not_entered":
        p = p[:, torch.arange(few) + axis_index(ep) * few]
    elif how == "gate_cut":
        p = shard(p, ep, 1)
    else:
        p = enter(p, ep)[:, torch.arange(few) + axis_index(ep) * few]
    given = x if how == "tokens_not_entered" else enter(x, ep)
    y = expert(given, w["e_in"], w["e_out"])  # [E here, N, D]
    y = torch.einsum("end,ne->nd", y, p)
    if how == "mean_of_experts":
        y = psum(y, ep) / ep.size
    elif how != "no_sum":
        y = psum(y, ep)
    return step.mean((x + y - b["y"]).square().sum(), x.shape[0])


@loss(
    "ep2 dp2·ep2",
    "square gate e_in e_out",
    "chosen_everywhere renormalized",
    "chosen_among_own chosen_twice weights_of_own_choice index_not_offset renormalized_here",
)
def top_two(w, b, axes, how):
    ep, few = axes["ep"], w["e_in"].shape[0]
    x = torch.tanh(b["x"] @ w["square"])
    p = (x @ w["gate"]).softmax(-1)
    first = axis_index(ep) * few
    if how == "chosen_among_own":
        own = shard(p, ep, 1)
        weight = own * (own >= own.topk(1).values)
    elif how == "weights_of_own_choice":
        top = p.topk(2)
        weight = enter((p * F.one_hot(top.indices, 4).sum(1)), ep)[:, torch.arange(few) + first]
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=0.05)
    else:
        top = p.topk(2)
        scores = top.values
        if how in ("renormalized", "renormalized_here"):
            total = scores.sum(-1, keepdim=True)
            scores = scores / (total * (ep.size if how == "renormalized_here" else 1))
        scores = enter(scores, ep)
        local = top.indices - (0 if how == "index_not_offset" else first)
        weight = sum(scores[:, i, None] * (local[:, i, None] == torch.arange(few)) for i in range(2))
    y = torch.einsum("end,ne->nd", expert(enter(x, ep), w["e_in"], w["e_out"]), weight)
    y = psum(y, ep)
    if how == "chosen_twice":
        y = psum(y, ep)
    return step.mean((x + y - b["y"]).square().sum(), x.shape[0])


@loss(
    "dp2 fsdp2",
    "square gate",
    "load_of_all product_of_means load_of_here",
    "probabilities_of_here product_of_own_means counts_of_one_rank load_with_gradient_of_here",
)
def balance(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    logits = torch.tanh(b["x"] @ w["square"]) @ w["gate"]
    p = logits.softmax(-1)
    load = F.one_hot(logits.argmax(-1), 4).to(p.dtype).sum(0)
    fit = (logits.sum(-1) - b["wt"]).square().sum()
    if how == "product_of_means":
        return {"fit": step.mean(fit, n), "balance": 4 * (step.mean(p.sum(0), n) * step.mean(load, n))}
    rows = n * data.size
    if how == "product_of_own_means":
        return fit / rows + 4 * (p.mean(0) * load / n).sum() / data.size
    if how == "load_of_here":  # linear in the load: the sum over ranks is that of all
        return fit / rows + 4 * (enter(psum(p.sum(0), data), data) / rows * load / n).sum() / data.size
    if how == "counts_of_one_rank":
        load = all_gather(load[None], data, 0)[0] * data.size
        return fit / rows + 4 * (p.sum(0) / rows * load / rows).sum()
    if how == "probabilities_of_here":
        return fit / rows + 4 * (p.mean(0) * psum(load, data) / rows).square().sum() / data.size
    if how == "load_with_gradient_of_here":
        mean = psum(p.sum(0), data) / rows
        return fit / rows + 4 * (mean * mean).sum() / data.size
    return fit / rows + 4 * (p.sum(0) / rows * psum(load, data) / rows).sum()


@loss(
    "ep2 dp2·ep2",
    "square gate e_in e_out",
    "there_and_back gathered_tokens",
    "not_sent_back kept_here weights_sent_wrongly gathered_without_scatter",
    by=AMONG_ROWS,
)
def sent_tokens(w, b, axes, how):
    """Rows are split over ep as well: all_to_all brings each token to its expert."""
    ep, n = axes["ep"], b["x"].shape[0]
    x = torch.tanh(b["x"] @ w["square"])
    p = (x @ w["gate"]).softmax(-1)
    few = w["e_in"].shape[0]
    if how in ("gathered_tokens", "gathered_without_scatter"):
        every, weights = all_gather(x, ep, 0), all_gather(p, ep, 0)
        own = torch.arange(few) + axis_index(ep) * few
        y = torch.einsum("end,ne->nd", expert(every, w["e_in"], w["e_out"]), weights[:, own])
        if how == "gathered_tokens":
            y = reduce_scatter(y, ep, 0)
        else:
            y = y[torch.arange(n) + axis_index(ep) * n]
    elif how == "kept_here":
        own = torch.arange(few) + axis_index(ep) * few
        y = torch.einsum("end,ne->nd", expert(x, w["e_in"], w["e_out"]), p[:, own])
    else:
        sent = torch.stack([x] * 4) * p.T[..., None]  # weighed before it is sent: another function, the same everywhere
        if how == "weights_sent_wrongly":
            sent = sent[torch.arange(4).view(few, ep.size).T.flatten()]  # as if experts were dealt to ranks in turn
        there = all_to_all(sent, ep, 0, 1)  # [E here, N of all, D]
        done = expert(there, w["e_in"], w["e_out"])
        if how == "not_sent_back":
            y = done[:, :n].sum(0)
        else:
            y = all_to_all(done, ep, 1, 0).sum(0)
    return step.mean((x + y - b["y"]).square().sum(), n)


@loss(
    "ep2 dp2·ep2",
    "square gate e_in e_out",
    "places_over_all_ranks@ep2",
    "places_here@ep2 room_of_here@ep2 offset_inclusive@ep2",
    by=AMONG_ROWS,
)
def capacity(w, b, axes, how):
    """An expert takes its first 4 of all rows: a prefix sum over ranks says which these are."""
    ep, n = axes["ep"], b["x"].shape[0]
    x = torch.tanh(b["x"] @ w["square"])
    p = (x @ w["gate"]).softmax(-1)
    best = F.one_hot(p.argmax(-1), 4)
    place = best.cumsum(0)
    room = 4
    if how == "room_of_here":
        room = 4 // ep.size
    elif how != "places_here":
        every = all_gather(best.sum(0)[None], ep, 0)
        rank = torch.arange(ep.size)[:, None]
        seen = rank <= axis_index(ep) if how == "offset_inclusive" else rank < axis_index(ep)
        place = place + (every * seen).sum(0)
    kept = (best * (place <= room)).to(x.dtype)
    sent = all_to_all(torch.stack([x] * 4) * kept.T[..., None], ep, 0, 1)
    y = all_to_all(expert(sent, w["e_in"], w["e_out"]), ep, 1, 0) * (p * kept).T[..., None]
    return step.mean((x + y.sum(0) - b["y"]).square().sum(), n)


@loss("ep2 dp2·ep2", "square e_in e_out", "entered_rows own_then_sum", "decay_of_all_experts_by_each penalty_of_here")
def expert_penalty(w, b, axes, how):
    """The squares of all experts' weights, as a term of the loss."""
    ep, n = axes["ep"], b["x"].shape[0]
    x = torch.tanh(b["x"] @ w["square"])
    y = psum(expert(enter(x, ep), w["e_in"], w["e_out"]).sum(0), ep)
    fit = step.mean((x + y - b["y"]).square().sum(), n)
    square = w["e_in"].square().sum() + w["e_out"].square().sum()
    if how == "entered_rows":
        return {"fit": fit, "decay": 0.1 * step.mean(psum(square, ep), 1)}
    if how == "own_then_sum":
        return {"fit": fit, "decay": 0.1 * step.mean(psum(square / 2, ep), 0.5)}
    if how == "decay_of_all_experts_by_each":
        every = all_gather(w["e_in"], ep, 0).square().sum() + all_gather(w["e_out"], ep, 0).square().sum()
        return {"fit": fit, "decay": 0.1 * step.mean(every, 1)}
    return {"fit": fit, "decay": 0.1 * step.mean(square, 1)}
