"""Norms and statistics of batches by hand."""

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, enter, pmax, psum
from tests.step.styles.setting import B, C, D, by_loss, layouts, values  # noqa: F401
from tests.step.styles.setting import F as HIDDEN


def squared(z, b, dp):
    """Squared error of the first features, as a share of the mean over all rows."""
    loss = (z - b["target"][:, : z.shape[1]]).square().sum() / (B * z.shape[1])
    return loss, {"loss": psum(loss.detach(), dp)}


def layer_norm_of_var(p, b, dp, tp):
    x = b["x"] * p["gain"]
    mu, var = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    return squared((x - mu) / torch.sqrt(var + 1e-5) @ p["out"] + p["bias"], b, dp)


def layer_norm_of_torch(p, b, dp, tp):
    return squared(F.layer_norm(b["x"], (D,), p["gain"]) @ p["out"], b, dp)


def by_einsum(p, b, dp, tp):
    h = torch.einsum("bd,de->be", b["x"] * p["gain"], p["out"])
    h = torch.bmm(h.view(1, *h.shape), torch.diag(p["bias"]).expand(1, -1, -1))[0]
    return squared(F.layer_norm(h, (C,)), b, dp)


def unit_rows(p, b, dp, tp):
    z = b["x"] @ p["out"]
    z = z / z.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    return squared(z * D**0.5, b, dp)


def normalized_both(p, b, dp, tp):
    z, w = F.normalize(b["x"] * p["gain"], dim=-1), F.normalize(p["out"], dim=0)
    return squared(z @ w, b, dp)


def groups_of_features(p, b, dp, tp):
    x = (b["x"] * p["gain"]).view(-1, 4, 2)
    x = x - x.mean(2, keepdim=True)
    x = x * torch.rsqrt(x.pow(2).mean(dim=2, keepdim=True) + 1e-5)
    return squared(x.flatten(1) @ p["out"], b, dp)


def group_norm_of_torch(p, b, dp, tp):
    h = F.group_norm(b["image"].repeat(1, 2, 1, 1), 2)
    return squared(h.mean((2, 3)) @ p["out"][:4], b, dp)


def batch_norm(p, b, dp, tp):
    h = b["x"] @ p["out"]
    mean = enter(psum(h.sum(0), dp), dp) / B
    var = enter(psum((h - mean).square().sum(0), dp), dp) / B
    return squared((h - mean) / (var + 1e-5).sqrt() + p["bias"], b, dp)


def batch_norm_of_moments(p, b, dp, tp):
    h = b["x"] @ p["out"]
    first, second = enter(psum(torch.stack([h.sum(0), (h * h).sum(0)]), dp), dp).unbind(0)
    mean = first / B
    return squared((h - mean) * torch.rsqrt(second / B - mean**2 + 1e-3), b, dp)


def batch_norm_of_means(p, b, dp, tp):
    h = b["x"] @ p["out"]
    mean = enter(psum(h.mean(0), dp) / dp.size, dp)
    square = enter(psum(h.pow(2).mean(0), dp) / dp.size, dp)
    return squared((h - mean) / torch.sqrt(square - mean * mean + 0.1), b, dp)


def batch_norm_of_gathered_means(p, b, dp, tp):
    h = b["x"] @ p["out"]
    mean = all_gather(h.mean(0, keepdim=True), dp, 0).mean(0)
    return squared(h - mean, b, dp)


def batch_norm_of_gathered_rows(p, b, dp, tp):
    h = b["x"] @ p["out"]
    everyone = all_gather(h, dp, 0)
    std, mean = torch.std_mean(everyone, dim=0)
    return squared((h - mean) / (std + 1e-3), b, dp)


def centred_by_rows_of_others(p, b, dp, tp):
    total = psum(b["x"].sum(dim=0), dp)
    x = b["x"] - (total - b["x"]) / (B - 1)
    return squared(x * p["gain"] @ p["out"], b, dp)


def weight_norm(p, b, dp, tp):
    w = p["up"] / p["up"].norm(dim=0) * p["hidden"]
    z = psum(torch.tanh(enter(b["x"] * p["gain"], tp) @ w) @ p["down"], tp)
    return squared(z, b, dp)


def rms_over_hidden(p, b, dp, tp):
    h = enter(b["x"] * p["gain"], tp) @ p["up"]
    mean_square = enter(psum(h.square().sum(-1, keepdim=True), tp), tp) / HIDDEN
    h = h * (mean_square + 1e-6) ** -0.5 * p["hidden"]
    return squared(psum(h @ p["down"], tp), b, dp)


def softmax_over_hidden(p, b, dp, tp):
    h = enter(b["x"], tp) @ p["up"]
    top = pmax(h.amax(-1, keepdim=True), tp)
    e = (h - top).exp()
    a = e / enter(psum(e.sum(-1, keepdim=True), tp), tp)
    return squared(psum((a * p["hidden"]) @ p["down"], tp), b, dp)


def largest_feature_of_batch(p, b, dp, tp):
    top = pmax(b["x"].abs().max(0).values, dp)
    return squared(b["x"] / (top + 0.1) * p["gain"] @ p["out"], b, dp)


def range_of_batch(p, b, dp, tp):
    x = b["x"]
    high, low = pmax(x.amax(0), dp), -pmax(-x.amin(0), dp)
    return squared((x - low) / (high - low) * p["gain"] @ p["out"], b, dp)


def whitened(p, b, dp, tp):
    h = b["x"] @ p["out"]
    mean = enter(psum(h.sum(0), dp), dp) / B
    z = h - mean
    cov = enter(psum(z.t() @ z, dp), dp) / B
    return squared(z @ torch.linalg.inv(cov + torch.eye(5, dtype=z.dtype)), b, dp)


LOSSES = {
    f.__name__: f
    for f in (
        layer_norm_of_var,
        layer_norm_of_torch,
        by_einsum,
        unit_rows,
        normalized_both,
        groups_of_features,
        group_norm_of_torch,
        batch_norm,
        batch_norm_of_moments,
        batch_norm_of_means,
        batch_norm_of_gathered_means,
        batch_norm_of_gathered_rows,
        centred_by_rows_of_others,
        weight_norm,
        rms_over_hidden,
        softmax_over_hidden,
        largest_feature_of_batch,
        range_of_batch,
        whitened,
    )
}
STEPS = tuple(LOSSES)


def make_step(mesh, of):
    """The step of that name over a mesh with axes dp and tp."""
    return by_loss(LOSSES[of], mesh)
