"""Lodgers whose weights are split over tp: Megatron's layers with part sizes as plain numbers."""

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, axis_index, enter, pmax, psum, reduce_scatter, shard
from tests.step.lodgers.frame import loss

MESHES = "tp2 dp2·tp2"


def of_rows(e, axes):
    """The mean over all rows of e [N], which all tp ranks have."""
    return e.mean() / int(axes[axes.data].size)


@loss(
    MESHES,
    "up fb down gain square",
    "copy_and_reduce gather_output bias_once sequence_parallel",
    "no_reduce no_copy copied_twice reduced_twice averaged bias_on_each reduced_before_tanh halves_of_input",
)
def mlp(axes, how):
    tp = axes["tp"]
    size = int(tp.size)

    def fn(w, b):
        x = b["x"] @ w["square"]
        if how == "sequence_parallel":
            rows = all_gather(shard(x, tp, 0), tp, 0)
            y = reduce_scatter(torch.tanh(rows @ w["up"] + w["fb"]) @ w["down"], tp, 0) * enter(w["gain"], tp)
            e = (y - shard(b["y"], tp, 0)).square().sum(-1)
            return psum(e.sum(), tp) / (12 if axes[axes.data].size == 1 else 6 * int(axes[axes.data].size))
        x = x if how == "no_copy" else enter(x, tp)
        x = enter(x, tp) if how == "copied_twice" else x
        h = x @ w["up"] + w["fb"]
        h = psum(h, tp) if how == "reduced_before_tanh" else h
        if how == "gather_output":
            down = all_gather(w["down"], tp, 0)
            y = all_gather(torch.tanh(h), tp, 1) @ down * enter(w["gain"], tp)
            return psum(of_rows((y - b["y"]).square().sum(-1) / size, axes), tp)
        y = torch.tanh(h) @ w["down"]
        if how == "bias_once":
            bias = torch.where(axis_index(tp) == 0, enter(w["gain"], tp), 0)
            y = psum(y + bias, tp)
        elif how == "bias_on_each":
            y = psum(y + w["gain"], tp)
        elif how == "no_reduce":
            y = y * w["gain"]
        elif how == "reduced_twice":
            y = psum(psum(y, tp), tp) * w["gain"]
        elif how == "averaged":
            y = psum(y, tp) / size * w["gain"]
        elif how == "halves_of_input":
            y = psum(y / size, tp) * w["gain"]
        else:
            y = psum(y, tp) * w["gain"]
        return of_rows((y - b["y"]).square().sum(-1), axes)

    return fn


@loss(
    MESHES,
    "emb gain",
    "masked_lookup floor_of_vocabulary range_of_rank one_hot_product",
    "offset_forgotten mask_forgotten offset_added no_reduce clamped_only one_id_short",
)
def vocabulary(axes, how):
    tp = axes["tp"]
    size = int(tp.size)
    per_partition = 12 // size

    def fn(w, b):
        ids, table = b["c"].clamp(0, 11), w["emb"]
        start = axis_index(tp) * (table.shape[0] if how == "masked_lookup" else per_partition)
        if how == "one_hot_product":
            part = shard(F.one_hot(ids, 12).to(table.dtype), tp, 1)
            y = psum(part @ table, tp)
            return of_rows((y * w["gain"] - b["y"]).square().sum(-1), axes)
        at = ids if how == "offset_forgotten" else ids + start if how == "offset_added" else ids - start
        inside = (at >= 0) & (at < per_partition)
        if how == "floor_of_vocabulary":
            inside = ids // per_partition == axis_index(tp)
        if how == "range_of_rank":
            inside = (ids >= start) & (ids < start + per_partition)
        if how == "one_id_short":
            inside = (at >= 0) & (at < per_partition - (1 if size > 1 else 0))
        if how == "clamped_only":
            inside = at < per_partition
        found = F.embedding(torch.where(inside, at, 0).clamp(0, table.shape[0] - 1), table)
        found = found if how == "mask_forgotten" else torch.where(inside[:, None], found, 0)
        y = found if how == "no_reduce" else psum(found, tp)
        return of_rows((y * w["gain"] - b["y"]).square().sum(-1), axes)

    return fn


@loss(
    MESHES,
    "square out",
    "parallel_cross_entropy gathered_logits smoothed without_maximum",
    "maximum_of_here no_copy sum_of_here offset_forgotten gathered_undivided lse_summed",
)
def heads(axes, how):
    """Cross entropy over a vocabulary that is split."""
    tp = axes["tp"]
    size = int(tp.size)

    def fn(w, b):
        x = b["x"] @ w["square"]
        ids, valid = b["c"].clamp(0, 11), (b["c"] >= 0).to(x.dtype)
        if how.startswith("gathered"):
            logits = all_gather(enter(x, tp) @ w["out"], tp, 1)
            nll = F.cross_entropy(logits, ids, reduction="none") * valid
            return of_rows(nll, axes) if how == "gathered_undivided" else psum(of_rows(nll, axes) / size, tp)
        z = (x if how == "no_copy" else enter(x, tp)) @ w["out"]
        top = z.detach().amax(-1)
        top = top if how == "maximum_of_here" else torch.zeros_like(top) if how == "without_maximum" else pmax(top, tp)
        z = z - top[:, None]
        at = ids - (0 if how == "offset_forgotten" else axis_index(tp) * z.shape[1])
        inside = (at >= 0) & (at < z.shape[1])
        own = torch.where(inside, z.gather(1, torch.where(inside, at, 0)[:, None])[:, 0], 0)
        if how == "sum_of_here":
            lse = z.exp().sum(-1).log()
        elif how == "lse_summed":
            lse = psum(z.logsumexp(-1), tp)
        else:
            lse = psum(z.exp().sum(-1), tp).log()
        own = psum(own, tp)
        nll = lse - own
        if how == "smoothed":
            nll = lse - 0.9 * own - 0.1 * psum(z.sum(-1), tp) / 12
        return of_rows(nll * valid, axes)

    return fn


@loss(
    MESHES,
    "up fb down",
    "norm_of_all layer_norm softmax_of_all largest_of_all standardized",
    "norm_of_here mean_of_here softmax_here norm_not_entered eps_on_each largest_here",
)
def features(axes, how):
    """What looks over the split features."""
    tp = axes["tp"]
    size = int(tp.size)

    def fn(w, b):
        h = enter(b["x"], tp) @ w["up"] + w["fb"]
        if how == "norm_of_all":
            h = h * torch.rsqrt(enter(psum(h.square().sum(-1, keepdim=True), tp), tp) / 8 + 1e-3)
        elif how == "norm_of_here":
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3)
        elif how == "norm_not_entered":
            h = h * torch.rsqrt(psum(h.square().sum(-1, keepdim=True), tp) / (h.shape[1] * size) + 1e-3)
        elif how == "eps_on_each":
            h = h * torch.rsqrt(enter(psum(h.square().sum(-1, keepdim=True) + 0.1, tp), tp) / 8)
        elif how in ("layer_norm", "standardized"):
            n = h.shape[1] * size
            mean = enter(psum(h.sum(-1, keepdim=True), tp), tp) / n
            var = enter(psum((h - mean).square().sum(-1, keepdim=True), tp), tp) / (
                n - 1 if how == "standardized" else n
            )
            h = (h - mean) / (var + 1e-5).sqrt()
        elif how == "mean_of_here":
            h = h - h.mean(-1, keepdim=True)
        elif how == "softmax_of_all":
            ex = (h - pmax(h.amax(-1, keepdim=True), tp)).exp()
            h = ex / enter(psum(ex.sum(-1, keepdim=True), tp), tp)
        elif how == "softmax_here":
            h = h.softmax(-1)
        elif how == "largest_of_all":
            bar = all_gather(h.detach(), tp, 1).topk(4, dim=-1).values[:, -1:]
            h = torch.where(h >= bar, h, 0)
        else:
            bar = h.detach().topk(4 // size, dim=-1).values[:, -1:]
            h = torch.where(h >= bar, h, 0)
        return of_rows((psum(h @ w["down"], tp) - b["y"]).square().sum(-1), axes)

    return fn
