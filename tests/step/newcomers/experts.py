"""Newcomers with mixtures by hand: rows over dp and ep, experts over ep."""

import torch
import torch.nn.functional as F

from fmegatron import step
from fmegatron.collectives import all_gather, all_to_all, axis_index, enter, psum, reduce_scatter
from tests.step.newcomers.frame import loss, sgd, whole

EXPERTS = "router w1 w2 gain"


def of_experts(w, x):
    """[E_ep, N, 6] -> the same."""
    return torch.bmm(torch.tanh(torch.bmm(x, w["w1"])), w["w2"])


def error_of(y, b, axes):
    """This rank's part of the mean error."""
    return (y - b["y"]).square().sum() / (y.numel() * axes["dp", "ep"].size)


def stepped(loss_fn, axes):
    """The update: experts' gradients are complete over ep, all others are sums over all ranks."""

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(loss_fn)(w, b)
        over = {name: axes["dp"] if name in ("w1", "w2") else axes["dp", "ep"] for name in w}
        return sgd(w, {name: psum(g, over[name]) for name, g in grads.items()}), {"loss": psum(value, axes["dp", "ep"])}

    return train_step


@whole("ep2 ep3 dp2·ep2", EXPERTS, "scattered", "summed_and_cut gates_of_own own_tokens scattered_and_summed")
def dense_dispatch(axes, how):
    """Tokens of all ranks go to all experts of each; gates weigh; a reduce-scatter brings the sums home."""
    ep = axes["ep"]

    def loss_fn(w, b):
        x = b["x"] * w["gain"]
        gates = (x @ w["router"]).softmax(-1)
        n = w["w1"].shape[0]
        if how == "own_tokens":
            at = axis_index(ep, like=x) * n + torch.arange(n)
            y = of_experts(w, x.expand(n, -1, -1))
            return error_of(torch.einsum("end,ne->nd", y, gates[:, at]), b, axes)
        every, of = all_gather(x, ep, 0), all_gather(gates, ep, 0)
        at = axis_index(ep, like=x) * n + torch.arange(n)
        mine = of[:, :n] if how == "gates_of_own" else of.index_select(1, at)
        y = torch.einsum("end,ne->nd", of_experts(w, every.expand(n, -1, -1)), mine)
        if how == "summed_and_cut":
            rows = axis_index(ep, like=x) * x.shape[0] + torch.arange(x.shape[0])
            y = psum(y, ep)[rows]
        elif how == "scattered_and_summed":
            y = psum(reduce_scatter(y, ep, 0), ep)
        else:
            y = reduce_scatter(y, ep, 0)
        return error_of(y, b, axes)

    return stepped(loss_fn, axes)


@whole("ep2 ep3 dp2·ep2", EXPERTS, "there_and_back transposed@ep3", "not_sent_back gates_of_rank one_way_twice")
def soft_slots(axes, how):
    """Each row gives every expert a slot of its own; an exchange brings slots to experts, another one back."""
    ep = axes["ep"]

    def loss_fn(w, b):
        x = b["x"] * w["gain"]
        gates = (x @ w["router"]).softmax(-1)
        slots = x[:, None] * gates[..., None]  # [rows, E, 6]
        there = all_to_all(slots, ep, 1, 0)  # [rows of all, E_ep, 6]
        out = of_experts(w, there.transpose(0, 1)).transpose(0, 1)
        if how == "not_sent_back":
            y = psum(out.sum(1), ep)[: x.shape[0]]
        elif how == "transposed":
            back = all_to_all(out.transpose(0, 1), ep, 1, 0)
            y = back.transpose(0, 1).sum(1)
        elif how == "one_way_twice":
            y = all_to_all(all_to_all(out, ep, 0, 1), ep, 1, 0)[: x.shape[0]].sum(1)
        else:
            y = all_to_all(out, ep, 0, 1)
            if how == "gates_of_rank":
                y = y / gates.sum(0)[:, None]
            y = y.sum(1)
        return error_of(y, b, axes)

    return stepped(loss_fn, axes)


@loss("ep2 dp2·ep2 dp2", "router gain", "switch by_parts load_here@ep2", "probabilities_here no_enter product_of_means")
def balance(axes, how):
    """Switch's loss: shares of tokens times mean probabilities, over the batch."""
    data = axes[axes.data]

    def loss_fn(w, b):
        probs = (b["x"] * w["gain"] @ w["router"]).softmax(-1)
        load = F.one_hot(probs.argmax(-1), 12).to(probs.dtype).sum(0)
        rows = probs.shape[0]
        n = rows * data.size
        if how == "by_parts":
            return {"balance": 12 * (step.mean(probs.sum(0), rows) * step.mean(load, rows))}
        if how == "load_here":
            return 12 * (enter(psum(probs.sum(0), data), data) / n * load / rows).sum() / data.size
        if how == "probabilities_here":
            return 12 * (probs.sum(0) / rows * psum(load, data) / n).sum()
        if how == "product_of_means":
            return 12 * (probs.mean(0) * load / rows).sum() / data.size
        share = psum(probs.sum(0), data)
        share = share if how == "no_enter" else enter(share, data)
        return 12 * (share / n * psum(load, data) / n).sum() / data.size

    return loss_fn


@whole("ep2 ep3 dp2·ep2", EXPERTS, "top_of_all", "top_of_own ties_by_rank capacity_here")
def capacity(axes, how):
    """Each expert takes the four tokens of the batch with its largest gates (expert choice)."""
    data, ep = axes["dp", "ep"], axes["ep"]

    def loss_fn(w, b):
        x = b["x"] * w["gain"]
        gates = (x @ w["router"]).softmax(0 if how == "ties_by_rank" else -1)
        if how == "top_of_own":
            least = gates.topk(4 // (2 if data.size > 1 else 1), 0).values[-1]
        elif how == "capacity_here":
            least = gates.topk(2, 0).values[-1]
        else:
            least = all_gather(gates, data, 0).topk(4, 0).values[-1]
        chosen = gates * (gates >= least.detach())
        slots = all_to_all(x[:, None] * chosen[..., None], ep, 1, 0)
        out = of_experts(w, slots.transpose(0, 1)).transpose(0, 1)
        return error_of(all_to_all(out, ep, 0, 1).sum(1), b, axes)

    return stepped(loss_fn, axes)


@whole("ep2 ep3 dp2·ep2", EXPERTS, "shared_and_routed", "penalty_of_all_experts penalty_averaged shared_in_each")
def with_penalty(axes, how):
    """An L2 penalty on experts' weights, which are split over an axis of the data."""
    ep, data = axes["ep"], axes["dp", "ep"]

    def loss_fn(w, b):
        x = b["x"] * w["gain"]
        gates = (x @ w["router"]).softmax(-1)
        there = all_to_all(x[:, None] * gates[..., None], ep, 1, 0)
        routed = all_to_all(of_experts(w, there.transpose(0, 1)).transpose(0, 1), ep, 0, 1).sum(1)
        if how == "shared_in_each":
            routed = psum(routed + x, ep) / ep.size
        main = (routed + x - b["y"]).square().sum() / (b["y"].numel() * data.size)
        square = w["w1"].square().sum()
        if how == "penalty_of_all_experts":
            return main + 0.1 * psum(square, ep)
        if how == "penalty_averaged":
            return main + 0.1 * square / data.size
        return main + 0.1 * square / (data.size / ep.size)

    return stepped(loss_fn, axes)


@whole("ep2 ep3 dp2·ep2", EXPERTS, "choice gate_detached@ep3", "one_expert_off nobody_for_others")
def one_expert(axes, how):
    """Top one, computed by a mask: tokens of all ranks, experts of this one."""
    ep = axes["ep"]

    def loss_fn(w, b):
        x = b["x"] * w["gain"]
        gates = (x @ w["router"]).softmax(-1)
        gate, choice = gates.max(-1)
        if how == "gate_detached":
            gate = gate.detach()
        tokens = all_gather(x * gate[:, None], ep, 0)
        expert = all_gather(choice, ep, 0)
        n = w["w1"].shape[0]
        first = axis_index(ep, like=expert) * n
        if how == "one_expert_off":
            first = (axis_index(ep, like=expert) + 1) % ep.size * n
        if how == "nobody_for_others":
            first = torch.zeros_like(first)
        hit = (expert == (first + torch.arange(n))[:, None]).to(x.dtype)  # [E_ep, tokens]
        y = (of_experts(w, tokens * hit[..., None]) * hit[..., None]).sum(0)
        return error_of(x + reduce_scatter(y, ep, 0), b, axes)

    return stepped(loss_fn, axes)
