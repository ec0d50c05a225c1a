"""Optimizers, averages of parameters, clips and gradients by hand."""

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, axis_index, enter, pmax, psum, reduce_scatter, shard
from fmegatron.step import value_and_grad
from tests.step.styles.setting import PARAMS, B, by_hand, layouts, values  # noqa: F401

SPLIT = tuple(k for k, (_, spec) in PARAMS.items() if spec)
WHOLE = tuple(k for k in PARAMS if k not in SPLIT)
LR = 0.1


def loss_of(p, b, tp):
    """This rank's sum of squared errors of a small MLP, as a share of the mean over all rows."""
    h = torch.tanh(enter(b["x"] * p["gain"], tp) @ p["up"] + p["hidden"])
    z = psum(h @ p["down"], tp)
    fit = (z - b["target"]).square().sum() + F.cross_entropy(z @ p["out"] + p["bias"], b["y"], reduction="sum")
    return fit / B


def grads_of(state, b, dp, tp):
    """(loss, gradients), both summed over dp."""
    (loss, _), grads = value_and_grad(lambda p: loss_of(p, b, tp))(state["p"])
    return psum(loss, dp), {k: psum(g, dp) for k, g in grads.items()}


def squares(tensors, tp):
    return psum(sum(tensors[k].pow(2).sum() for k in SPLIT), tp) + sum(tensors[k].pow(2).sum() for k in WHOLE)


def averaged_gradients(state, b, dp, tp):
    def loss_fn(p):
        h = torch.tanh(enter(b["x"] * p["gain"], tp) @ p["up"])
        return (psum(h @ p["down"], tp) - b["target"]).square().mean()

    (loss, _), grads = value_and_grad(loss_fn)(state["p"])
    grads = {k: psum(g, dp) / dp.size for k, g in grads.items()}
    p = {k: x - LR * grads[k] for k, x in state["p"].items()}
    return {**state, "p": p}, {"loss": psum(loss, dp) / dp.size}


def momentum(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    m = {k: 0.9 * state["m"][k] + g for k, g in grads.items()}
    return {**state, "p": {k: p - LR * m[k] for k, p in state["p"].items()}, "m": m}, {"loss": loss}


def adam(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    t = state["step"] + 1
    m = {k: torch.lerp(state["m"][k], g, 0.1) for k, g in grads.items()}
    v = {k: 0.99 * state["v"][k] + 0.01 * g * g for k, g in grads.items()}
    p = {}
    for k, x in state["p"].items():
        denominator = (v[k] / (1 - 0.99**t)).sqrt().add(1e-8)
        p[k] = torch.addcdiv(x, m[k] / (1 - 0.9**t), denominator, value=-LR)
    return {**state, "p": p, "m": m, "v": v, "step": t}, {"loss": loss}


def nesterov_in_place(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    p, m = {}, {}
    for k, g in grads.items():
        m[k] = state["m"][k].clone().mul_(0.9).add_(g)
        step = g.clone()
        step.add_(m[k], alpha=0.9)
        p[k] = state["p"][k].clone()
        p[k].sub_(step, alpha=LR)
    return {**state, "p": p, "m": m}, {"loss": loss}


def lists_at_once(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    names = list(grads)
    p, m, g = ([tree[k] for k in names] for tree in (state["p"], state["m"], grads))
    m = torch._foreach_add(torch._foreach_mul(m, 0.9), g, alpha=0.1)
    p = torch._foreach_sub(p, torch._foreach_mul(m, LR))
    norms = torch._foreach_norm(g)
    big = psum(sum(n * n for n, k in zip(norms, names, strict=True) if k in SPLIT), tp)
    norm = (big + sum(n * n for n, k in zip(norms, names, strict=True) if k in WHOLE)).sqrt()
    return {**state, "p": dict(zip(names, p, strict=True)), "m": dict(zip(names, m, strict=True))}, {"norm": norm}


def average_of_parameters(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    p = {k: x - LR * grads[k] for k, x in state["p"].items()}
    average = {k: 0.99 * a + (1 - 0.99) * p[k].detach() for k, a in state["m"].items()}
    return {**state, "p": p, "m": average}, {"loss": loss, "far": squares({k: p[k] - average[k] for k in p}, tp).sqrt()}


def average_with_warmup(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    decay = torch.minimum(torch.full((), 0.999), (1 + state["step"]) / (10 + state["step"]))
    p = {k: x.sub(grads[k], alpha=LR) for k, x in state["p"].items()}
    average = {k: torch.lerp(p[k], a, decay) for k, a in state["m"].items()}
    return {**state, "p": p, "m": average, "step": state["step"] + 1}, {"loss": loss, "decay": decay}


def slow_and_fast(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    fast = {k: x - LR * grads[k] for k, x in state["p"].items()}
    sync = (state["step"] + 1) % 4 == 0
    slow = {k: torch.where(sync, s + 0.5 * (fast[k] - s), s) for k, s in state["m"].items()}
    p = {k: torch.where(sync, slow[k], x) for k, x in fast.items()}
    return {**state, "p": p, "m": slow, "step": state["step"] + 1}, {"loss": loss}


def clipped(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    norm = squares(grads, tp) ** 0.5
    scale = (0.5 / (norm + 1e-6)).clamp(max=1)
    return {**state, "p": {k: x - LR * scale * grads[k] for k, x in state["p"].items()}}, {"loss": loss, "norm": norm}


def clipped_by_norms(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    whole = torch.stack([grads[k].norm() for k in WHOLE]).norm()
    mine = torch.stack([torch.linalg.vector_norm(grads[k]) for k in SPLIT]).norm()
    norm = torch.hypot(whole, psum(mine**2, tp).sqrt())
    scale = torch.where(norm > 0.5, 0.5 / norm, torch.ones_like(norm))
    return {**state, "p": {k: x - LR * scale * grads[k] for k, x in state["p"].items()}}, {"loss": loss, "norm": norm}


def clipped_by_largest(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    mine = torch.stack([g.abs().max() for g in grads.values()]).max()
    scale = 1 / pmax(mine, tp).clamp(min=1e-3)
    return {**state, "p": {k: x - LR * (scale * grads[k]).clamp(-0.5, 0.5) for k, x in state["p"].items()}}, {
        "loss": loss
    }


def signs(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    p = {k: x * (1 - 0.01) - 0.01 * torch.sign(0.9 * state["m"][k] + 0.1 * grads[k]) for k, x in state["p"].items()}
    return {**state, "p": p}, {"loss": loss}


def trust_ratios(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    p = {}
    for k, x in state["p"].items():
        both = torch.stack([x.square().sum(), grads[k].square().sum()])
        size, change = (psum(both, tp) if k in SPLIT else both).sqrt().unbind()
        ratio = torch.where((size > 0) & (change > 0), size / change, torch.ones_like(size))
        p[k] = x - 0.01 * ratio.clamp(max=10.0) * grads[k]
    return {**state, "p": p}, {"loss": loss}


def centred(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    g = {**grads, "up": grads["up"] - grads["up"].mean(0, keepdim=True), "out": grads["out"] - grads["out"].mean()}
    g["down"] = grads["down"] - psum(grads["down"].sum(0, keepdim=True), tp) / PARAMS["down"][0][0]
    return {**state, "p": {k: x - LR * g[k] for k, x in state["p"].items()}}, {"loss": loss}


def skipped_when_not_finite(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    bad = torch.stack([~torch.isfinite(g).all() for g in grads.values()]).any()
    bad = pmax(bad.int(), tp).bool() | ~loss.isfinite()
    p = {k: torch.where(bad, x, x - LR * grads[k]) for k, x in state["p"].items()}
    scale = torch.where(bad, state["scale"] * 0.5, state["scale"] * 1.001)
    return {**state, "p": p, "scale": scale}, {"skipped": bad.float()}


def scaled_loss(state, b, dp, tp):
    scale = state["scale"]
    (loss, _), grads = value_and_grad(lambda p: loss_of(p, b, tp) * scale)(state["p"])
    grads = {k: psum(g, dp).div(scale) for k, g in grads.items()}
    return {**state, "p": {k: x - LR * grads[k] for k, x in state["p"].items()}}, {"loss": psum(loss / scale, dp)}


def microbatches(state, b, dp, tp):
    grads, total = {k: torch.zeros_like(x) for k, x in state["p"].items()}, 0.0
    for rows in zip(*(x.chunk(2) for x in b.values()), strict=True):
        part = dict(zip(b, rows, strict=True))
        (loss, _), g = value_and_grad(lambda p, part=part: loss_of(p, part, tp))(state["p"])
        grads, total = {k: grads[k] + g[k] for k in g}, total + loss
    return {**state, "p": {k: x - LR * psum(grads[k], dp) for k, x in state["p"].items()}}, {"loss": psum(total, dp)}


def rows_of_batch_one_by_one(state, b, dp, tp):
    def loss_fn(p):
        total = 0.0
        for x, t in zip(b["x"].unbind(0), b["target"].unbind(0), strict=True):
            total = total + (x * p["gain"] - t).square().sum()
        return total / B

    (loss, _), grads = value_and_grad(loss_fn)(state["p"])
    p = {**state["p"], "gain": state["p"]["gain"] - LR * psum(grads["gain"], dp)}
    return {**state, "p": p}, {"loss": psum(loss, dp)}


def gradients_of_func(state, b, dp, tp):
    def loss_fn(p):
        return ((torch.relu(b["x"] * p["gain"]) @ p["out"] + p["bias"] - b["target"][:, :5]) ** 2).sum() / B

    used = {k: state["p"][k] for k in ("gain", "out", "bias")}
    grads, loss = torch.func.grad_and_value(loss_fn)(used)
    p = {**state["p"], **{k: x - LR * psum(grads[k], dp) for k, x in used.items()}}
    return {**state, "p": p}, {"loss": psum(loss, dp)}


def clipped_per_example(state, b, dp, tp):
    def one(w, x, y):
        return F.cross_entropy(x @ w, y)

    w = state["p"]["out"]
    each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(w, b["x"], b["y"])
    norms = each.flatten(1).norm(dim=1)
    g = psum((each * (0.3 / norms).clamp(max=1)[:, None, None]).sum(0), dp) / B
    return {**state, "p": {**state["p"], "out": w - LR * g}}, {"clipped": psum((norms > 0.3).sum(), dp)}


def gradient_penalty(state, b, dp, tp):
    def loss_fn(p):
        x = b["x"].detach().requires_grad_()
        score = torch.tanh(x * p["gain"]) @ p["out"][:, 0]
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return (score.sum() + (slope.norm(dim=1) - 1).square().sum()) / B

    (loss, _), grads = value_and_grad(loss_fn)(state["p"])
    return {**state, "p": {k: x - LR * psum(grads[k], dp) for k, x in state["p"].items()}}, {"loss": psum(loss, dp)}


def curvature(state, b, dp, tp):
    def gradient(w):
        z = b["x"] @ w
        return psum(b["x"].t() @ (z.softmax(-1) - F.one_hot(b["y"], z.shape[-1])), dp) / B

    w = state["p"]["out"]
    g, hg = torch.func.jvp(lambda w: b["x"].t() @ (b["x"] @ w).softmax(-1) / B, (w,), (state["m"]["out"],))
    return {**state, "p": {**state["p"], "out": w - LR * (gradient(w) + 0.1 * psum(hg, dp))}}, {"g": psum(g.sum(), dp)}


def sharded_state(state, b, dp, tp):
    (loss, _), grads = value_and_grad(lambda p: loss_of(p, b, tp))(state["p"])
    p = dict(state["p"])
    for k in ("unused", "gain"):
        flat = F.pad(grads[k].flatten(), (0, -grads[k].numel() % dp.size))
        mine = reduce_scatter(flat, dp, 0)
        own = shard(F.pad(p[k].flatten(), (0, -p[k].numel() % dp.size)), dp, 0)
        new = own - LR * mine / (mine.abs() + 1e-3)
        p[k] = all_gather(new, dp, 0)[: p[k].numel()].view_as(p[k])
    return {**state, "p": p}, {"loss": psum(loss, dp)}


def noise_by_position(state, b, dp, tp):
    loss, grads = grads_of(state, b, dp, tp)
    x = state["p"]["hidden"]
    word = torch.arange(x.numel()).view(x.shape) + axis_index(tp) * x.numel()
    noise = ((word * 2654435761 % 4093) / 4093 - 0.5).to(x.dtype)
    return {**state, "p": {**state["p"], "hidden": x - LR * (grads["hidden"] + 0.01 * noise)}}, {"loss": loss}


UPDATES = {
    f.__name__: f
    for f in (
        *(averaged_gradients, momentum, adam, nesterov_in_place, lists_at_once, average_of_parameters),
        *(average_with_warmup, slow_and_fast, clipped, clipped_by_norms, clipped_by_largest, signs, trust_ratios),
        *(centred, skipped_when_not_finite, scaled_loss, microbatches, rows_of_batch_one_by_one, gradients_of_func),
        *(clipped_per_example, gradient_penalty, curvature, sharded_state, noise_by_position),
    )
}
STEPS = tuple(UPDATES)


def make_step(mesh, of):
    """The step of that name over a mesh with axes dp and tp."""
    return by_hand(UPDATES[of], mesh)
