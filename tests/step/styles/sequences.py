"""Attention, positions, recurrences, convolutions and segments by hand; images; parts of a sequence over tp."""

import math

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, axis_index, enter, psum, reduce_scatter, shard
from tests.step.styles.setting import B, D, H, K, S, by_loss, layouts, values  # noqa: F401


def said(z, b, dp):
    """Squared distance of features from the target, as a share of the mean over all rows."""
    loss = (z - b["target"][:, : z.shape[1]]).square().sum() / B
    return loss, {"loss": psum(loss.detach(), dp)}


def projected(p, b, tp):
    return enter(b["xs"] * p["gain"], tp) @ p["qkv"]


def attention_unbound(p, b, dp, tp):
    q, k, v = projected(p, b, tp).unflatten(-1, (3, -1, K)).unbind(2)
    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    return said(psum(o.transpose(1, 2).flatten(2) @ p["proj"], tp).mean(1), b, dp)


def attention_chunked(p, b, dp, tp):
    q, k, v = (t.view(*t.shape[:2], -1, K) for t in projected(p, b, tp).chunk(3, dim=-1))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(K)
    mask = torch.triu(torch.ones(S, S, dtype=torch.bool), diagonal=1)
    weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
    o = torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], -1)
    return said(psum(o @ p["proj"], tp)[:, -1], b, dp)


def attention_with_lengths(p, b, dp, tp):
    q, k, v = projected(p, b, tp).reshape(-1, S, 3, H // tp.size, K).permute(2, 0, 3, 1, 4)
    keep = torch.arange(S)[None, :] <= b["length"][:, None]
    scores = (q @ k.transpose(-2, -1) * K**-0.5).masked_fill(~keep[:, None, None, :], -1e9)
    o = (scores.softmax(-1) @ v).permute(0, 2, 1, 3).flatten(-2)
    pooled = (o * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True)
    return said(psum(pooled @ p["proj"], tp), b, dp)


def attention_with_slopes(p, b, dp, tp):
    q, k, v = projected(p, b, tp).unflatten(-1, (3, -1, K)).permute(2, 0, 3, 1, 4)
    heads = torch.arange(q.shape[1]) + axis_index(tp) * q.shape[1]
    slopes = 2.0 ** (-(heads + 1).double())
    far = (torch.arange(S)[:, None] - torch.arange(S)[None, :]).abs()
    scores = q @ k.transpose(-1, -2) - slopes[:, None, None] * far
    return said(psum((scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ p["proj"], tp).sum(1) / S, b, dp)


def attention_rotated(p, b, dp, tp):
    q, k, v = projected(p, b, tp).unflatten(-1, (3, -1, K)).unbind(-3)
    angle = torch.arange(S)[:, None, None] * torch.ones(1, 1, 1, dtype=torch.float64)

    def rotate(x):
        out = torch.empty_like(x)
        out[..., :1] = x[..., :1] * angle.cos() - x[..., 1:2] * angle.sin()
        out[..., 1:2] = x[..., :1] * angle.sin() + x[..., 1:2] * angle.cos()
        out[..., 2:] = x[..., 2:]
        return out

    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (rotate(q), rotate(k), v)))
    return said(psum(o.transpose(1, 2).flatten(2) @ p["proj"], tp).amax(1), b, dp)


def linear_attention(p, b, dp, tp):
    q, k, v = projected(p, b, tp).unflatten(-1, (3, -1, K)).unbind(2)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("bshk,bshv->bshkv", k, v).cumsum(1)
    o = torch.einsum("bshk,bshkv->bshv", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)
    return said(psum(o.flatten(2) @ p["proj"], tp)[:, -1], b, dp)


def recurrence(p, b, dp, tp):
    x = enter(b["xs"], tp) @ p["up"]
    h = torch.zeros_like(x[:, 0])
    for t in range(S):
        h = torch.tanh(0.5 * h * p["hidden"] + x[:, t])
    return said(psum(h @ p["down"], tp), b, dp)


def recurrence_of_parts(p, b, dp, tp):
    states, h = [], b["x"] * p["gain"]
    for x in b["xs"].unbind(1):
        gate = torch.sigmoid(x * p["gain"])
        h = gate * h + (1 - gate) * x
        states.append(h)
    return said(torch.stack(states, 1).mean(1) @ p["out"], b, dp)


def scan_by_doubling(p, b, dp, tp):
    h, step = b["xs"] * p["gain"], 1
    while step < S:
        h = h + 0.9**step * F.pad(h, (0, 0, step, 0))[:, :S]
        step *= 2
    return said(h[:, -1] @ p["out"], b, dp)


def both_directions(p, b, dp, tp):
    x = b["xs"] * p["gain"]
    ahead, back = x.cumsum(1), x.flip(1).cumsum(1).flip(1)
    return said(torch.cat([ahead, back], -1).amax(1)[:, :D] @ p["out"], b, dp)


def shifted(p, b, dp, tp):
    x = b["xs"]
    mixed = torch.lerp(x, torch.roll(x, 1, 1), p["gain"]) + F.pad(x[:, 1:], (0, 0, 0, 1))
    return said(mixed.sum(1) @ p["out"] / S, b, dp)


def convolution(p, b, dp, tp):
    w = (p["up"].t().unsqueeze(-1) * torch.arange(1.0, 4.0)).double()
    h = F.conv1d(enter(b["xs"], tp).transpose(1, 2), w, padding=1)
    return said(psum(F.gelu(h).mean(2) @ p["down"], tp), b, dp)


def convolution_of_each(p, b, dp, tp):
    w = p["gain"][:, None, None] * torch.tensor([0.2, 0.3, 0.5]).double()
    h = F.conv1d(F.pad(b["xs"].transpose(1, 2), (2, 0)), w, groups=D)
    return said(h[..., -1] @ p["out"], b, dp)


def image_patches(p, b, dp, tp):
    x = F.pixel_unshuffle(b["image"], 2).permute(0, 2, 3, 1)
    return said(F.silu(x * p["gain"]).mean((1, 2)) @ p["out"], b, dp)


def image_pools(p, b, dp, tp):
    x = F.avg_pool2d(b["image"], 2) + F.max_pool2d(b["image"], 2)
    return said(x.flatten(1)[:, :D] * p["gain"] @ p["out"], b, dp)


def image_convolved(p, b, dp, tp):
    w = p["up"].t().reshape(-1, 2, 2, 2)
    h = F.conv2d(enter(b["image"], tp), w, stride=2)
    return said(psum(torch.relu(h).mean(dim=(-2, -1)) @ p["down"], tp), b, dp)


def image_enlarged(p, b, dp, tp):
    x = F.interpolate(b["image"], scale_factor=2, mode="nearest").mean((2, 3))
    return said(x * p["gain"][:2] @ p["out"][:2], b, dp)


def pooled_by_mask(p, b, dp, tp):
    keep = (torch.arange(S) < b["length"].unsqueeze(1)).double()
    pooled = torch.einsum("bs,bsd->bd", keep, b["xs"]) / keep.sum(1, keepdim=True).clamp_min(1.0)
    return said(pooled * p["gain"] @ p["out"], b, dp)


def last_of_each(p, b, dp, tp):
    rows = torch.arange(b["xs"].shape[0])
    last = b["xs"][rows, (b["length"] - 1).clamp(min=0)]
    other = b["xs"].gather(1, b["length"].clamp(max=S - 1)[:, None, None].expand(-1, 1, D))[:, 0]
    return said((last + other) * p["gain"] @ p["out"], b, dp)


def segments_of_batch(p, b, dp, tp):
    z = b["x"] @ p["out"]
    sums = psum(torch.zeros(4, 5, dtype=z.dtype).index_add(0, b["group"], z), dp)
    counts = psum(torch.zeros(4, dtype=z.dtype).index_add(0, b["group"], torch.ones(z.shape[0], dtype=z.dtype)), dp)
    means = enter(sums, dp) / counts.clamp(min=1)[:, None]
    return said(z - means[b["group"]], b, dp)


def segments_of_rows(p, b, dp, tp):
    z = (b["xs"] * p["gain"]).transpose(0, 1)
    ids = (torch.arange(S) // 3)[:, None, None].expand_as(z)
    sums = torch.zeros(4, *z.shape[1:], dtype=z.dtype).scatter_add(0, ids, z)
    return said(sums.amax(0) @ p["out"], b, dp)


def segments_of_places(p, b, dp, tp):
    ids = b["tokens"] % 3
    hot = F.one_hot(ids, 3).double()
    means = torch.einsum("bsg,bsd->bgd", hot, b["xs"] * p["gain"]) / (hot.sum(1)[..., None] + 1)
    return said(means.flatten(1)[:, :D] @ p["out"], b, dp)


def sorted_features(p, b, dp, tp):
    x = (b["x"] * p["gain"]).sort(dim=-1, descending=True).values
    weights = torch.softmax(torch.linspace(1, 0, D, dtype=x.dtype), 0)
    return said((x * weights).cumsum(1) @ p["out"], b, dp)


def best_places(p, b, dp, tp):
    score = b["xs"] @ p["out"][:, 0]
    value, place = score.topk(3, dim=1)
    picked = torch.take_along_dim(b["xs"], place[..., None], dim=1)
    return said((picked * value.softmax(1)[..., None]).sum(1) @ p["out"], b, dp)


def windows(p, b, dp, tp):
    w = (b["xs"] * p["gain"]).unfold(1, 4, 2)
    return said(w.mean(-1).std(1) @ p["out"], b, dp)


def mixed_by_fourier(p, b, dp, tp):
    spectrum = torch.fft.rfft(b["xs"] * p["gain"], dim=1)
    y = torch.fft.irfft(spectrum * torch.arange(1, spectrum.shape[1] + 1)[:, None].reciprocal(), n=S, dim=1)
    return said(y[:, 0] @ p["out"], b, dp)


def places_looked_up(p, b, dp, tp):
    table = torch.stack([torch.sin(torch.arange(S) * w) for w in (0.1, 0.7)], -1).double()
    x = b["xs"] + F.pad(table, (0, D - 2)) * p["gain"]
    return said(x.logsumexp(1) @ p["out"], b, dp)


def sequence_split(p, b, dp, tp):
    x = shard(b["xs"], tp, 1)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * enter(p["gain"], tp)
    h = torch.relu(all_gather(x, tp, 1) @ p["up"])
    y = reduce_scatter(h @ p["down"], tp, 1) + x
    return said(psum(y.sum(1), tp) / S, b, dp)


def dropout_by_places(p, b, dp, tp):
    rows = torch.arange(b["x"].numel()).view(b["x"].shape) + axis_index(dp) * b["x"].numel()
    word = (rows * 1103515245 + 12345) % 2**31
    keep = ((word >> 8) % 10 < 9).to(b["x"].dtype)
    return said(b["x"] * keep / 0.9 * p["gain"] @ p["out"], b, dp)


LOSSES = {
    f.__name__: f
    for f in (
        *(attention_unbound, attention_chunked, attention_with_lengths, attention_with_slopes, attention_rotated),
        *(linear_attention, recurrence, recurrence_of_parts, scan_by_doubling, both_directions, shifted),
        *(convolution, convolution_of_each, image_patches, image_pools, image_convolved, image_enlarged),
        *(pooled_by_mask, last_of_each, segments_of_batch, segments_of_rows, segments_of_places, sorted_features),
        *(best_places, windows, mixed_by_fourier, places_looked_up, sequence_split, dropout_by_places),
    )
}
STEPS = tuple(LOSSES)


def make_step(mesh, of):
    """The step of that name over a mesh with axes dp and tp."""
    return by_loss(LOSSES[of], mesh)
