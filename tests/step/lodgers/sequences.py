"""Lodgers whose sequences are split over cp: windows, positions, scans, attention, and one number of a sequence."""

import torch
import torch.nn.functional as F

from fmegatron import step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, ppermute, psum
from tests.step.lodgers.frame import loss

MESHES = "cp2 cp3"


@loss(
    MESHES,
    "emb out",
    "masked_mean parts plain_ranks next_token ids_of_range",
    "mean_of_means mask_here cut_at_border wrong_direction wrapped rows_averaged_here",
)
def tokens(axes, how):
    cp, data = axes["cp"], axes[axes.data]
    ranks = int(cp.size)

    def fn(w, b):
        tok, lab, mask = b["tok"].clamp(0, 11), b["lab"], b["mask"]
        logits = w["emb"][tok] @ w["out"]
        if how in ("next_token", "cut_at_border", "wrong_direction", "wrapped"):
            first = tok[:, :1]
            if how == "cut_at_border":
                following = torch.cat([tok[:, 1:], first], 1)
            else:
                following = torch.cat([tok[:, 1:], ppermute(first, cp, 1 if how == "wrong_direction" else -1)], 1)
            at = torch.arange(tok.shape[1]) + axis_index(cp) * tok.shape[1]
            last = at == (18 if how == "wrapped" and ranks > 1 else 17)
            nll = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none").view(tok.shape)
            return (nll * ~last).sum() / (12 * 17)
        valid = (lab >= 0) & (lab < 12)
        if how == "ids_of_range":
            mask = valid.to(logits.dtype)
        nll = F.cross_entropy(logits.transpose(1, 2), torch.where(valid, lab, 0), reduction="none") * mask
        if how == "parts":
            return step.mean(nll.sum(), mask.sum())
        if how == "plain_ranks":
            return nll.mean() / ranks
        if how == "mean_of_means":
            return nll.sum() / mask.sum().clamp(min=1) / ranks
        if how == "mask_here":
            return nll.sum() / psum(mask.sum().clamp(min=60), data)
        if how == "rows_averaged_here":
            return (nll.sum(1) / mask.sum(1).clamp(min=1)).mean() / ranks
        return nll.sum() / psum(mask.sum(), data)

    return fn


@loss(
    MESHES,
    "conv square",
    "halo_of_before gathered_and_cut halo_of_both differences",
    "no_halo halo_of_behind halo_around halo_too_short differences_cut",
)
def windows(axes, how):
    cp = axes["cp"]
    size = int(cp.size)

    def fn(w, b):
        x = b["seq"] @ w["square"]
        t = x.shape[1]
        rank = axis_index(cp)
        if how == "gathered_and_cut":
            every = F.pad(all_gather(x, cp, 1), (0, 0, 2, 0))
            y = sum(every[:, i : i + 18] * w["conv"][i] for i in range(3))
            y = y.index_select(1, torch.arange(t) + rank * t)
            return y.square().mean() / size
        if how == "halo_of_both":
            left = torch.where(rank > 0, ppermute(x[:, -1:], cp, 1), 0)
            right = torch.where(rank < size - 1, ppermute(x[:, :1], cp, -1), 0)
            wide = torch.cat([left, x, right], 1)
            return sum(wide[:, i : i + t] * w["conv"][i] for i in range(3)).square().mean() / size
        if how.startswith("differences"):
            before = torch.zeros_like(x[:, :1]) if how == "differences_cut" else ppermute(x[:, -1:], cp, 1)
            before = torch.where(rank == 0, 0, before)
            return ((x - torch.cat([before, x[:, :-1]], 1)) * w["conv"][0]).abs().mean() / size
        halo = ppermute(x[:, -2:], cp, -1 if how == "halo_of_behind" else 1)
        if how == "no_halo":
            halo = torch.zeros_like(x[:, :2])
        if how == "halo_too_short":
            halo = F.pad(ppermute(x[:, -1:], cp, 1), (0, 0, 1, 0))
        if how != "halo_around":
            halo = halo * (rank > 0).to(x.dtype)
        elif size == 1:
            halo = torch.zeros_like(halo)
        wide = torch.cat([halo, x], 1)
        return sum(wide[:, i : i + t] * w["conv"][i] for i in range(3)).square().mean() / size

    return fn


@loss(
    MESHES,
    "pos square gain",
    "table_at_positions cut_of_table rotary cumulative pooled last_token maximum attention packed_order",
    "positions_of_here offset_by_rank rotary_of_here cumulative_of_here pooled_here last_of_each maximum_here "
    "mask_of_here attention_here pooled_not_entered mean_of_pools carry_behind keys_of_neighbour",
)
def whole_sequences(axes, how):
    cp = axes["cp"]
    n = int(cp.size)

    def fn(w, b):
        x = b["seq"] @ w["square"]
        t, rank = x.shape[1], axis_index(cp)
        at = torch.arange(t) + rank * t
        if how in ("table_at_positions", "positions_of_here", "offset_by_rank", "cut_of_table"):
            if how == "cut_of_table":
                pos = w["pos"].view(n, 18 // n, 6).index_select(0, rank.view(1))[0]
            else:
                where = {"table_at_positions": at, "positions_of_here": torch.arange(t)}
                pos = w["pos"][where.get(how, torch.arange(t) + rank)]
            return (torch.tanh(x + pos) * w["gain"] - 1).square().mean() / n
        if how.startswith("rotary"):
            turn = (at if how == "rotary" else torch.arange(t)).to(x.dtype)[:, None] * 0.3
            a, c = x[..., :3], x[..., 3:]
            y = torch.cat([a * turn.cos() - c * turn.sin(), a * turn.sin() + c * turn.cos()], -1)
            return (y * w["gain"] + 0.5).square().mean() / n
        if how.startswith("cumulative") or how == "carry_behind":
            y = x.cumsum(1)
            if how != "cumulative_of_here":
                sums = all_gather(x.sum(1, keepdim=True), cp, 1)
                ahead = (torch.arange(n) > rank) if how == "carry_behind" else (torch.arange(n) < rank)
                y = y + (sums * ahead[:, None].to(x.dtype)).sum(1, keepdim=True)
            return torch.tanh(0.2 * y * w["gain"]).square().mean() / n
        if how in ("pooled", "pooled_here", "pooled_not_entered", "mean_of_pools", "packed_order"):
            m = b["mask"]
            total, count = (x * m[..., None]).sum(1), m.sum(1, keepdim=True)
            if how == "packed_order":  # each row's longest run counts: numbers of tokens, sorted
                long = psum(count, cp)
                order = long[:, 0].sort(stable=True).indices
                total = enter(psum(total, cp), cp)[order] / long[order].clamp(min=1)
                return (total * w["gain"]).tanh().square().mean() / n
            if how == "pooled_here":
                return (total / count.clamp(min=1) * w["gain"]).tanh().square().mean() / n
            if how == "mean_of_pools":
                pool = enter(psum(total / count.clamp(min=1), cp), cp) / n
            else:
                pool = psum(total, cp) / psum(count, cp).clamp(min=1)
                pool = pool if how == "pooled_not_entered" else enter(pool, cp)
            return (pool * w["gain"]).tanh().square().mean() / n
        if how.startswith("last"):
            length = b["mask"].sum(1)
            if how == "last_token":
                last = psum(length, cp) - 1
                y = enter(psum((x * (at == last[:, None])[..., None]).sum(1), cp), cp)
            else:
                y = x[torch.arange(len(x)), (length.long() - 1).clamp(min=0)]
            return (y * w["gain"]).tanh().square().mean() / n
        if how.startswith("maximum"):
            y = x.amax(1)
            if how == "maximum":
                top = pmax(y, cp)
                y = enter(psum(torch.where(x == top[:, None], x, 0).sum(1), cp), cp)
            return (y * w["gain"]).tanh().square().mean() / n
        k = x if how == "attention_here" else all_gather(x, cp, 1)
        if how == "keys_of_neighbour":
            k = all_gather(ppermute(x, cp, 1), cp, 1)
        scores = x @ k.transpose(1, 2) / 6**0.5
        q_at = torch.arange(t) if how in ("mask_of_here", "attention_here") else at
        scores = scores.masked_fill(torch.arange(k.shape[1]) > q_at[:, None], float("-inf"))
        return (scores.softmax(-1) @ k * w["gain"] - 0.3).square().mean() / n

    return fn
