"""Metrics by hand: counts, extremes, ranks of a vocabulary, moments, what is finite."""

import math

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, axis_index, enter, pmax, psum
from tests.step.styles.setting import B, C, D, E, V, by_loss, layouts, values  # noqa: F401


def classified(p, b):
    z = (b["x"] * p["gain"]) @ p["out"] + p["bias"]
    return z, F.cross_entropy(z, b["y"], reduction="sum") / B


def accuracy(p, b, dp, tp):
    z, loss = classified(p, b)
    return loss, {"accuracy": psum((z.argmax(1) == b["y"]).sum(), dp) / B}


def accuracy_in_floats(p, b, dp, tp):
    z, loss = classified(p, b)
    hits = (z.detach().max(dim=1).indices == b["y"]).float()
    return loss, {"hits": psum(hits.sum().to(torch.int64), dp), "rate": psum(hits.mean(), dp) / dp.size}


def top_three(p, b, dp, tp):
    z, loss = classified(p, b)
    hit = (z.topk(3, dim=-1).indices == b["y"][:, None]).any(-1)
    return loss, {"top": psum(hit.double().sum(), dp) / B}


def rank_of_label(p, b, dp, tp):
    z, loss = classified(p, b)
    own = z.gather(1, b["y"][:, None])
    return loss, {"mrr": psum((1.0 / (1 + (z > own).sum(1))).sum(), dp) / B}


def confusion(p, b, dp, tp):
    z, loss = classified(p, b)
    table = torch.zeros(C * C, dtype=torch.int64).scatter_add(0, b["y"] * C + z.argmax(1), torch.ones_like(b["y"]))
    table = psum(table, dp).view(C, C)
    recall = table.diagonal() / table.sum(1).clamp(min=1)
    return loss, {"table": table, "recall": recall.mean()}


def counts_by_index_add(p, b, dp, tp):
    _, loss = classified(p, b)
    seen = torch.zeros(V).index_add(0, b["tokens"].flatten(), torch.ones(b["tokens"].numel()))
    return loss, {"seen": psum(seen, dp), "kinds": (psum(seen, dp) > 0).sum()}


def counts_by_index_put(p, b, dp, tp):
    _, loss = classified(p, b)
    seen = torch.zeros(C)
    seen.index_put_((b["y"],), torch.ones(b["y"].shape[0]), accumulate=True)
    return loss, {"seen": psum(seen, dp)}


def counts_by_comparison(p, b, dp, tp):
    _, loss = classified(p, b)
    return loss, {"seen": psum((b["y"][None, :] == torch.arange(C)[:, None]).sum(1), dp)}


def mean_of_groups(p, b, dp, tp):
    z, loss = classified(p, b)
    sums = torch.zeros(4, C, dtype=z.dtype).index_add(0, b["group"], z.detach())
    counts = torch.zeros(4, dtype=z.dtype).scatter_add(0, b["group"], torch.ones(b["group"].shape, dtype=z.dtype))
    return loss, {"means": psum(sums, dp) / psum(counts, dp).clamp(min=1)[:, None]}


def f1(p, b, dp, tp):
    z, loss = classified(p, b)
    said, true = z.argmax(1) > 2, b["y"] > 2
    tp_, fp, fn = psum(torch.stack([(said & true).sum(), (said & ~true).sum(), (~said & true).sum()]), dp).unbind()
    return loss, {"f1": 2 * tp_ / (2 * tp_ + fp + fn)}


def largest_logit(p, b, dp, tp):
    z, loss = classified(p, b)
    return loss, {"max": pmax(z.max(), dp), "min": -pmax(-z.min(), dp), "abs": pmax(z.detach().abs().amax(), dp)}


def largest_of_leaves(p, b, dp, tp):
    _, loss = classified(p, b)
    local = torch.stack([x.detach().abs().max() for x in (p["up"], p["down"], p["head"])]).amax()
    whole = torch.maximum(p["gain"].abs().max(), p["out"].abs().max()).detach()
    return loss, {"largest": torch.maximum(pmax(local, tp), whole)}


def finite(p, b, dp, tp):
    z, loss = classified(p, b)
    bad = z.isnan().any() | z.isinf().any()
    fine = torch.isfinite(b["x"]).all() & torch.isfinite(z).all()
    return loss, {"bad": pmax(bad.float(), dp), "fine": 1 - pmax(1 - fine.float(), dp)}


def nonfinite_elements(p, b, dp, tp):
    z, loss = classified(p, b)
    return loss, {
        "bad": psum((~torch.isfinite(z)).sum(), dp),
        "logical": pmax(torch.logical_not(z < 1e9).any().int(), dp),
    }


def perplexity(p, b, dp, tp):
    _, loss = classified(p, b)
    total = psum(loss.detach(), dp)
    return loss, {"ppl": total.exp(), "bits": total / math.log(2)}


def counted_by_full(p, b, dp, tp):
    z, loss = classified(p, b)
    count = psum(torch.full((), z.numel(), dtype=z.dtype), dp)
    return loss, {"mean": psum(z.detach().sum(), dp) / count}


def counted_by_ones(p, b, dp, tp):
    z, loss = classified(p, b)
    rows = psum(torch.ones(z.shape[0]).sum(), dp)
    mean = psum(z.detach().mean(), dp) / psum(torch.ones(()), dp)
    return loss, {"rows": rows, "mean": mean}


def counted_by_tensor(p, b, dp, tp):
    z, loss = classified(p, b)
    rows = psum(torch.tensor(float(len(z))), dp)
    return loss, {"per_row": psum(loss.detach() * B, dp) / rows}


def moments(p, b, dp, tp):
    z, loss = classified(p, b)
    z = z.detach()
    mean = psum(z.mean(), dp) / dp.size
    var = psum((z - mean).pow(2).mean(), dp) / dp.size
    return loss, {"mean": mean, "std": var.sqrt(), "skew": psum(((z - mean) ** 3).sum(), dp) / (B * C * var**1.5)}


def moments_of_gathered(p, b, dp, tp):
    z, loss = classified(p, b)
    sums = all_gather(torch.stack([z.sum(), z.square().sum()]).detach()[None], dp, 0)
    first, second = sums.sum(0) / (B * C)
    return loss, {"var": second - first * first, "median": all_gather(z.detach(), dp, 0).median()}


def explained_variance(p, b, dp, tp):
    z, loss = classified(p, b)
    t, z = b["target"][:, :C], z.detach()
    centre = psum(t.sum(0), dp) / B
    rest, total = psum(((t - z) ** 2).sum(0), dp), psum(((t - centre) ** 2).sum(0), dp)
    return loss, {"r2": (1 - rest / total).mean()}


def vocabulary_argmax(p, b, dp, tp):
    _, loss = classified(p, b)
    z = (b["x"] @ p["head"]).detach()
    value, place = z.max(-1)
    best = pmax(value, tp)
    place = place + axis_index(tp) * z.shape[1]
    found = -pmax(-torch.where(value == best, place, V), tp)
    return loss, {"hits": psum((found == b["token"]).sum(), dp)}


def vocabulary_argmax_of_gathered(p, b, dp, tp):
    _, loss = classified(p, b)
    z = (b["x"] @ p["head"]).detach()
    value, place = z.max(-1, keepdim=True)
    values_, places = all_gather(value, tp, 1), all_gather(place + axis_index(tp) * z.size(1), tp, 1)
    return loss, {"sum": psum(places.gather(1, values_.argmax(1, keepdim=True)).sum(), dp)}


def top_of_tops(p, b, dp, tp):
    _, loss = classified(p, b)
    z = (b["x"] @ p["head"]).detach()
    best = all_gather(z.topk(2, dim=1).values, tp, 1).topk(2, dim=1).values
    return loss, {"margin": psum((best[:, 0] - best[:, 1]).sum(), dp) / B}


def rank_in_vocabulary(p, b, dp, tp):
    _, loss = classified(p, b)
    z = (b["x"] @ p["head"]).detach()
    columns = torch.arange(z.shape[1]) + axis_index(tp) * z.shape[1]
    own = psum((z * (columns == b["token"][:, None])).sum(1, keepdim=True), tp)
    better = psum((z > own).sum(1), tp)
    return loss, {"mrr": psum((1 / (1.0 + better)).sum(), dp) / B}


def expert_load(p, b, dp, tp):
    _, loss = classified(p, b)
    choice = (b["x"] @ p["router"]).argmax(-1)
    load = psum(torch.zeros(E).index_add(0, choice, torch.ones(choice.shape[0])), dp)
    return loss, {"load": load / B, "imbalance": load.max() / load.mean(), "idle": (load == 0).sum()}


def entropy(p, b, dp, tp):
    z, loss = classified(p, b)
    q = z.detach().softmax(-1)
    rows = -(q * (q + 1e-12).log()).sum(-1)
    marginal = psum(q.sum(0), dp) / B
    return loss, {"rows": psum(rows.sum(), dp) / B, "all": -(marginal * marginal.log()).sum()}


def quantiles(p, b, dp, tp):
    z, loss = classified(p, b)
    every = all_gather(z.detach().abs().flatten(), dp, 0).sort().values
    return loss, {"p90": every[int(0.9 * every.numel())], "p50": every[every.numel() // 2]}


def histogram(p, b, dp, tp):
    _, loss = classified(p, b)
    bins = torch.bucketize(b["x"].flatten(), torch.linspace(-0.4, 0.4, 5, dtype=torch.float64))
    return loss, {"hist": psum(F.one_hot(bins, 6).sum(0), dp)}


def norms_of_activations(p, b, dp, tp):
    z, loss = classified(p, b)
    h = enter(b["x"], tp) @ p["up"]
    total = psum(psum(torch.linalg.vector_norm(h.detach()) ** 2, tp), dp).sqrt()
    return loss, {"hidden": total, "largest": pmax(pmax(h.detach().norm(p=float("inf")), tp), dp)}


def first_rows(p, b, dp, tp):
    z, loss = classified(p, b)
    first = axis_index(dp) == 0
    shown = psum(torch.where(first, z.detach()[0], 0.0), dp)
    return loss, {"shown": psum(first.double() * p["gain"].detach().sum(), dp)} | {"kept": shown * 0}


def kept_tokens(p, b, dp, tp):
    _, loss = classified(p, b)
    kept = torch.arange(b["tokens"].shape[1])[None] < b["length"][:, None]
    return loss, {"tokens": psum(kept.sum(), dp), "padding": 1 - psum(kept.double().mean(), dp) / dp.size}


LOSSES = {
    f.__name__: f
    for f in (
        *(accuracy, accuracy_in_floats, top_three, rank_of_label, confusion, counts_by_index_add, counts_by_index_put),
        *(counts_by_comparison, mean_of_groups, f1, largest_logit, largest_of_leaves, finite, nonfinite_elements),
        *(perplexity, counted_by_full, counted_by_ones, counted_by_tensor, moments, moments_of_gathered),
        *(explained_variance, vocabulary_argmax, vocabulary_argmax_of_gathered, top_of_tops, rank_in_vocabulary),
        *(expert_load, entropy, quantiles, histogram, norms_of_activations, first_rows, kept_tokens),
    )
}
STEPS = tuple(LOSSES)


def make_step(mesh, of):
    """The step of that name over a mesh with axes dp and tp."""
    return by_loss(LOSSES[of], mesh)
