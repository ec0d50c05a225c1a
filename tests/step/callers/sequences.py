"""Callers whose sequences are split over cp: halos, scans, attention, pools, losses of whole rows."""

import torch
import torch.nn.functional as F

from fmegatron import step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, ppermute, psum
from tests.step.callers.frame import loss

MESHES = "cp2 dp2·cp2"
ROWS = ("dp", "fsdp")


def token_mean(e, b):
    """Over what the mask has."""
    return step.mean((e * b["mask"]).sum(), b["mask"].sum())


def before(x, axis, reach, how=""):
    """x [N, T, ...] with the last `reach` positions of the rank before in front; zeros at the beginning."""
    if not reach:
        return x
    halo = ppermute(x[:, -reach:], axis, 1)
    first = (axis_index(axis) == 0).to(x.dtype)
    return torch.cat([halo if how == "around" else halo * (1 - first), x], 1)


@loss(
    MESHES + " cp3",
    "pos square",
    "offset sharded_table gathered_positions",
    "from_zero offset_by_one_rank_more scaled_offset@cp2 offset_of_reversed_ranks",
)
def positions(w, b, axes, how):
    cp, t = axes["cp"], b["seq"].shape[1]
    at = torch.arange(t)
    if how == "sharded_table":
        p = w["pos"].unflatten(0, (cp.size, t)).index_select(0, axis_index(cp).view(1))[0]
    elif how == "gathered_positions":
        p = w["pos"][
            all_gather(at + axis_index(cp) * t, cp, 0).view(cp.size, t).index_select(0, axis_index(cp).view(1))[0]
        ]
    else:
        first = axis_index(cp) * t
        if how == "from_zero":
            first = 0
        elif how == "offset_by_one_rank_more":
            first = (axis_index(cp) + 1) % cp.size * t
        elif how == "scaled_offset":
            first = axis_index(cp) * (t // 2)
        elif how == "offset_of_reversed_ranks":
            first = (cp.size - 1 - axis_index(cp)) * t
        p = w["pos"][at + first]
    return token_mean((torch.tanh(b["seq"] @ w["square"] + p) - b["seq"]).square().sum(-1), b)


@loss(
    MESHES,
    "conv square",
    "halo gathered around",
    "padded_here halo_of_the_next gathered_without_offset halo_of_inputs_of_one_tap no_gradient_over_the_edge",
)
def causal_conv(w, b, axes, how):
    cp, t = axes["cp"], b["seq"].shape[1]
    x = torch.tanh(b["seq"] @ w["square"])
    if how in ("gathered", "gathered_without_offset"):
        x = F.pad(all_gather(x, cp, 1), (0, 0, 2, 0))
        first = 0 if how == "gathered_without_offset" else axis_index(cp) * t
        x = x[:, torch.arange(t + 2) + first]
    elif how == "padded_here":
        x = F.pad(x, (0, 0, 2, 0))
    elif how == "halo_of_the_next":
        x = torch.cat([ppermute(x[:, :2], cp, -1) * (axis_index(cp) > 0), x], 1)
    elif how == "halo_of_inputs_of_one_tap":
        x = F.pad(before(x, cp, 1), (0, 0, 1, 0))
    elif how == "no_gradient_over_the_edge":
        x = torch.cat([before(x, cp, 2)[:, :2].detach(), x], 1)
    else:
        x = before(x, cp, 2, how)
    y = sum(x[:, i : i + t] * w["conv"][i] for i in range(3))
    return token_mean((y - b["seq"]).square().sum(-1), b)


@loss(
    MESHES,
    "emb out",
    "label_of_the_next gathered_labels shifted_around",
    "shifted_here last_of_each_dropped labels_of_the_rank_before@cp3 mask_not_shifted",
)
def next_token(w, b, axes, how):
    cp, t = axes["cp"], b["tok"].shape[1]
    logits = w["emb"][b["tok"]] @ w["out"]
    last_rank = axis_index(cp) == cp.size - 1
    at_end = (torch.arange(t) == t - 1) & last_rank
    after = ppermute(b["tok"][:, :1], cp, -1)
    if how == "shifted_here" or how == "last_of_each_dropped":
        after = b["tok"][:, :1]
    if how == "labels_of_the_rank_before":
        after = ppermute(b["tok"][:, :1], cp, 1)
    labels = torch.cat([b["tok"][:, 1:], after], 1)
    mask = torch.cat([b["mask"][:, 1:], ppermute(b["mask"][:, :1], cp, -1)], 1)
    if how == "gathered_labels":
        labels = F.pad(all_gather(b["tok"], cp, 1)[:, 1:], (0, 1))[:, torch.arange(t) + axis_index(cp) * t]
    if how == "mask_not_shifted":
        mask = torch.cat([b["mask"][:, 1:], b["mask"][:, -1:]], 1)
    if how == "last_of_each_dropped":
        mask = mask * (torch.arange(t) < t - 1)
    elif how != "shifted_around":  # where the first token is what comes after the last
        mask = mask * ~at_end
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(mask)
    return step.mean((nll * mask).sum(), mask.sum())


@loss(
    MESHES + " cp3",
    "square pos",
    "exclusive_sums blocks_of_all",
    "no_offset inclusive offset_detached offset_of_inputs suffix",
)
def prefix(w, b, axes, how):
    cp, t = axes["cp"], b["seq"].shape[1]
    x = torch.tanh(b["seq"] @ w["square"])
    here = x.cumsum(1)
    if how == "no_offset":
        total = here
    elif how == "blocks_of_all":
        total = all_gather(x, cp, 1).cumsum(1)[:, torch.arange(t) + axis_index(cp) * t]
    else:
        ends = (b["seq"] if how == "offset_of_inputs" else x).sum(1)
        ends = all_gather(ends[None], cp, 0)  # [ranks, N, D]
        rank, own = torch.arange(cp.size)[:, None, None], axis_index(cp)
        seen = rank <= own if how == "inclusive" else rank > own if how == "suffix" else rank < own
        offset = (ends * seen).sum(0)
        offset = offset.detach() if how == "offset_detached" else offset
        total = here + offset[:, None]
    y = total / 12 + (w["pos"] * 0.1).sum(0)
    return token_mean((y - b["seq"]).square().sum(-1), b)


@loss(
    MESHES,
    "square gain",
    "carried chunks_of_all",
    "from_zero_everywhere carried_without_decay@cp3 carried_from_behind carry_is_the_input",
)
def recurrence(w, b, axes, how):
    """h_t = a h_{t-1} + x_t with a in (0, 1) of each feature."""
    cp, t = axes["cp"], b["seq"].shape[1]
    a = torch.sigmoid(w["gain"])
    x = torch.tanh(b["seq"] @ w["square"])
    if how == "chunks_of_all":
        h, states = x.new_zeros(x.shape[0], 6), []
        for now in all_gather(x, cp, 1).unbind(1):
            h = a * h + now
            states.append(h)
        y = torch.stack(states, 1)[:, torch.arange(t) + axis_index(cp) * t]
    else:
        h, states = x.new_zeros(x.shape[0], 6), []
        for now in x.unbind(1):
            h = a * h + now
            states.append(h)
        y = torch.stack(states, 1)
        ends = all_gather((x[:, -1] if how == "carry_is_the_input" else y[:, -1])[None], cp, 0)
        own, carry = axis_index(cp), torch.zeros_like(h)
        for rank in range(cp.size):  # what stands at the end of all ranks before this one
            grown = carry * (1 if how == "carried_without_decay" else a**t) + ends[rank]
            carry = torch.where(rank > own if how == "carried_from_behind" else rank < own, grown, carry)
        if how != "from_zero_everywhere":
            y = y + carry[:, None] * a ** torch.arange(1, t + 1)[:, None]
    return token_mean((y - b["seq"]).square().sum(-1), b)


@loss(
    MESHES,
    "qkv",
    "gathered_keys ring",
    "own_keys mask_without_offset ring_without_rescale keys_detached softmax_per_block window_here",
    rules=(),
)
def attention(w, b, axes, how):
    cp, t = axes["cp"], b["seq"].shape[1]
    q, k, v = torch.einsum("ntd,dcf->cntf", b["seq"], w["qkv"]).unbind(0)
    at = torch.arange(t) + (0 if how == "mask_without_offset" else axis_index(cp) * t)
    if how in ("ring", "ring_without_rescale", "softmax_per_block"):
        top, den, num = q.new_full((*q.shape[:2], 1), -1e9), 0.0, 0.0
        place = at
        for _ in range(cp.size):
            s = (q @ k.transpose(1, 2)).masked_fill(place > at[:, None], -1e9)
            if how == "softmax_per_block":
                p = s.softmax(-1) * (place <= at[:, None])
                num, den = num + p @ v, 1.0
            else:
                new = torch.maximum(top, s.detach().amax(-1, keepdim=True))
                old = 1.0 if how == "ring_without_rescale" else (top - new).exp()
                p = (s - new).exp()
                den, num, top = den * old + p.sum(-1, keepdim=True), num * old + p @ v, new
            k, v, place = ppermute(k, cp, 1), ppermute(v, cp, 1), ppermute(place, cp, 1)
        o = num / den
    else:
        mine = k, v
        if how != "own_keys":
            k, v = all_gather(k, cp, 1), all_gather(v, cp, 1)
        if how == "keys_detached":  # gathered without history, own keys put back
            own = (torch.arange(k.shape[1]) // t == axis_index(cp))[:, None]
            k, v = (
                torch.where(own, torch.cat([x] * cp.size, 1), y.detach()) for x, y in zip(mine, (k, v), strict=True)
            )
        keys = torch.arange(t) + axis_index(cp) * t if how == "own_keys" else torch.arange(k.shape[1])
        seen = keys <= at[:, None]
        if how == "window_here":
            seen = seen & (keys > torch.arange(t)[:, None] - 3)
        o = (q @ k.transpose(1, 2)).masked_fill(~seen, -1e9).softmax(-1) @ v
    return token_mean((o - b["seq"]).square().sum(-1), b)


@loss(
    MESHES,
    "square gain",
    "summed_and_entered whole_rows_over",
    "pool_of_a_part mean_of_means not_entered counted_here over_all_axes weight_behind_the_pool@cp2",
)
def pooled(w, b, axes, how):
    cp = axes["cp"]
    x = torch.tanh(b["seq"] @ w["square"]) * b["mask"][..., None]
    if how == "whole_rows_over":  # what stands behind the pool is the same on all ranks, but for its gradient
        x = x * w["gain"]
    total, count = x.sum(1), b["mask"].sum(1, keepdim=True)
    if how == "pool_of_a_part":
        mean = total / count.clamp(min=1)
    elif how == "mean_of_means":
        mean = psum(total / count.clamp(min=1), cp) / cp.size
    elif how == "counted_here":
        mean = psum(total, cp) / (count.clamp(min=1) * cp.size)
    else:
        mean = psum(total, cp) / psum(count, cp)
    if how in ("whole_rows_over", "over_all_axes", "mean_of_means", "counted_here", "weight_behind_the_pool"):
        e = ((mean if how == "whole_rows_over" else mean * w["gain"]) - 0.2).square().sum(-1)
        if how == "over_all_axes":
            return step.mean(e.sum() * cp.size, e.shape[0])
        return step.mean(e.sum(), e.shape[0], over=ROWS)
    mean = enter(mean, cp) if how == "summed_and_entered" else mean
    e = (x * mean[:, None] * w["gain"] - 0.2).square().sum(-1)  # of each token with the pool of its row
    return token_mean(e, b)


@loss(
    MESHES,
    "emb out",
    "summed_then_sigmoid",
    "sigmoid_of_parts token_weighted_rows mean_per_part margin_of_here",
)
def preference(w, b, axes, how):
    """Rows against each other's halves: a loss of whole rows, log-probabilities of which are sums over cp."""
    cp = axes["cp"]
    logits = w["emb"][b["tok"]] @ w["out"]
    learned = b["lab"] >= 0
    logp = logits.log_softmax(-1).gather(-1, b["lab"].clamp(min=0)[..., None])[..., 0] * learned
    score, count = logp.sum(1), learned.sum(1)
    if how == "sigmoid_of_parts":
        e = F.softplus(-score - 5)
        return step.mean(e.sum(), e.shape[0], over=ROWS)
    if how == "mean_per_part":
        mean = psum(score / count.clamp(min=1), cp)
    elif how == "token_weighted_rows":
        mean = psum(score, cp) / count.clamp(min=1)
    else:
        mean = psum(score, cp) / psum(count, cp)
    margin = score.detach() * 0.1 if how == "margin_of_here" else psum(score.detach(), cp) * 0.1
    e = F.softplus(-mean * 3 + margin)
    return step.mean(e.sum(), e.shape[0], over=ROWS)


@loss(
    MESHES,
    "square gain",
    "gathered logsumexp_of_all",
    "largest_of_parts max_detached logsumexp_here maximum_summed",
)
def strongest_token(w, b, axes, how):
    cp = axes["cp"]
    s = (torch.tanh(b["seq"] @ w["square"]) * w["gain"]).sum(-1).masked_fill(b["mask"] == 0, -4)
    if how == "gathered":
        best = psum(_placed(s, cp), cp).amax(1)
    elif how == "largest_of_parts":
        best = s.amax(1)
    elif how == "max_detached":
        best = pmax(s.amax(1), cp) + (s.sum(1) - s.sum(1).detach()) / s.shape[1]
    elif how == "logsumexp_of_all":
        best = psum(s.exp().sum(1), cp).log()
    elif how == "logsumexp_here":
        best = psum(s.logsumexp(1), cp)
    else:
        best = psum(s.amax(1), cp)
    e = (best - 1).square()
    return step.mean(e.sum(), e.shape[0], over=ROWS)


def _placed(x, axis):
    """[N, T here] among zeros: [N, T]."""
    hot = F.one_hot(axis_index(axis), axis.size).to(x.dtype)
    return (hot[:, None] * x[:, None]).flatten(1)


@loss(MESHES, "square", "edge_pairs pairs_around", "pairs_of_parts detached_edges edge_in_both")
def smoothness(w, b, axes, how):
    """Total variation along the sequence: there is a pair at every edge between ranks."""
    cp, t = axes["cp"], b["seq"].shape[1]
    y = torch.tanh(b["seq"] @ w["square"])
    after = ppermute(y[:, :1], cp, -1)
    after = after.detach() if how == "detached_edges" else after
    inside = (torch.arange(t) < t - 1) | (axis_index(cp) < cp.size - 1)
    if how == "pairs_of_parts":
        inside = torch.arange(t) < t - 1
    if how == "pairs_around":
        inside = torch.ones(t, dtype=torch.bool)
    e = ((torch.cat([y[:, 1:], after], 1) - y).square().sum(-1) * inside).sum()
    if how == "edge_in_both":
        e = e + ((y[:, :1] - ppermute(y[:, -1:], cp, 1)).square().sum() * (axis_index(cp) > 0))
    fit = (y - b["seq"]).square().sum()
    return step.mean(e + 0.1 * fit, y.shape[0] * t)


@loss(MESHES, "square conv", "ranks_and_places gathered", "places_alone ranks_alone gathered_and_first_half")
def backwards(w, b, axes, how):
    cp, t = axes["cp"], b["seq"].shape[1]
    x = torch.tanh(b["seq"] @ w["square"])
    if how == "gathered":
        other = all_gather(x, cp, 1).flip(1)[:, torch.arange(t) + axis_index(cp) * t]
    elif how == "gathered_and_first_half":
        other = all_gather(x, cp, 1).flip(1)[:, :t]
    elif how == "places_alone":
        other = x.flip(1)
    elif how == "ranks_alone":
        other = ppermute(x, cp, 1)
    else:  # two ranks exchange
        other = ppermute(x, cp, 1).flip(1)
    return token_mean((x * w["conv"][0] + other * w["conv"][1] - b["seq"]).square().sum(-1), b)


@loss(
    MESHES,
    "square pos",
    "per_row_then_rows",
    "rows_of_parts parts_not_summed@dp2·cp2 per_token_of_all_rows@dp2·cp2 count_of_all_rows@dp2·cp2 length_of_the_part",
)
def mean_of_rows(w, b, axes, how):
    cp = axes["cp"]
    e = ((torch.tanh(b["seq"] @ w["square"]) + w["pos"].sum(0) - b["seq"]).square().sum(-1) * b["mask"]).sum(1)
    count = b["mask"].sum(1)
    if how == "rows_of_parts":
        return step.mean((e / count.clamp(min=1)).sum(), e.shape[0])
    if how == "per_token_of_all_rows":
        return step.mean(e.sum(), psum(count.sum(), axes["dp"]))
    if how == "count_of_all_rows":
        return step.mean((e / psum(count.sum(), cp)).sum(), 1.0 / cp.size)
    if how != "parts_not_summed":
        e = psum(e, cp)
    if how == "length_of_the_part":
        return step.mean((e / b["mask"].shape[1]).sum(), e.shape[0], over=ROWS)
    return step.mean((e / psum(count, cp)).sum(), e.shape[0], over=ROWS)
