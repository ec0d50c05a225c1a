"""Without labels: masked parts, codebooks, negatives of all ranks, statistics of a batch, centres, assignments."""

import torch

from fmegatron import step, tree
from fmegatron.collectives import all_gather, axis_index, enter, pmax, psum, shard
from tests.step.arrivals.frame import NET, descend, loss_of, mlp, sgd, step_of, summed


@step_of("dp2 dp3", NET, "by_number", "by_row_here by_rank own_count unscaled_ranks")
def masked_parts(axes, how):
    """A masked autoencoder, whose mask is a hash of a row's number, judged where it hides."""
    data = axes["dp"]

    def part(w, b):
        number = b["id"]
        if how == "by_row_here":
            number = torch.arange(len(b["id"]), device=b["id"].device)
        elif how == "by_rank":
            number = torch.zeros_like(b["id"]) + axis_index(data, b["id"])
        column = torch.arange(8, device=number.device)
        hidden = ((number[:, None] * 7 + column * 5 + number[:, None] * column) % 11 < 5).to(b["x"].dtype)
        error = (mlp(w, b["x"] * (1 - hidden)) - b["x"]).square() * hidden
        if how == "own_count":
            return error.sum() / hidden.sum() / data.size
        return error.sum() / (hidden.sum() if how == "unscaled_ranks" else psum(hidden.sum(), data))

    return lambda w, b: descend(part, w, b, data)


BOOK = {"book": "8,8", "usage": "8 +", "sums": "8,8"}


@step_of(
    "dp2 dp3 dp2·fsdp2",
    BOOK,
    "summed gathered@dp2,dp3",
    "own_usage own_sums averaged_usage one_axis@dp2·fsdp2 perplexity_of_own",
)
def codebook(axes, how):
    """A codebook that follows the mean of what chose each code, by averages of counts and sums."""
    data = axes["dp", "fsdp"]

    def train_step(w, b):
        x = all_gather(b["x"], data, 0) if how == "gathered" else b["x"]
        chosen = torch.cdist(x, w["book"]).argmin(-1)
        hot = torch.nn.functional.one_hot(chosen, 8).to(x.dtype)
        counts, sums = hot.sum(0), hot.T @ x
        over = axes["dp"] if how == "one_axis" else data
        all_counts = psum(counts, over) if how != "gathered" else counts
        sums = psum(sums, over) if how not in ("gathered", "own_sums") else sums
        if how == "averaged_usage":
            all_counts = all_counts / data.size
        usage = 0.9 * w["usage"] + 0.1 * (counts if how == "own_usage" else all_counts)
        sums = 0.9 * w["sums"] + 0.1 * sums
        p = counts / len(x) if how == "perplexity_of_own" else all_counts / 12
        perplexity = (-(p * (p + 1e-9).log()).sum()).exp()
        return {"book": sums / (usage[:, None] + 1e-5), "usage": usage, "sums": sums}, {"perplexity": perplexity}

    return train_step


@step_of(
    "dp2 dp3",
    NET,
    "offset fetched_labels both_ways",
    "labels_from_zero own_negatives whole_on_each detached_keys_of_own",
)
def negatives(axes, how):
    """InfoNCE: every row of all ranks is a negative of mine."""
    data = axes["dp"]

    def part(w, b):
        q = torch.nn.functional.normalize(mlp(w, b["x"]), dim=-1)
        k = torch.nn.functional.normalize(mlp(w, b["x2"]), dim=-1)
        n = len(q)
        here = torch.arange(n, device=q.device)
        if how == "own_negatives":
            return torch.nn.functional.cross_entropy(q @ k.T * 3, here, reduction="sum") / 12
        keys = all_gather(k, data, 0)
        if how == "whole_on_each":
            every = all_gather(q, data, 0) @ keys.T * 3
            return torch.nn.functional.cross_entropy(every, torch.arange(12, device=q.device)) / 2
        if how == "fetched_labels":
            here = b["id"]
        elif how == "detached_keys_of_own":
            keys = keys.detach() + torch.cat([k - k.detach()] * data.size)
            here = here + axis_index(data, q) * n
        elif how != "labels_from_zero":
            here = here + axis_index(data, q) * n
        loss = torch.nn.functional.cross_entropy(q @ keys.T * 3, here, reduction="sum") / 12
        if how == "both_ways":
            back = k @ all_gather(q, data, 0).T * 3
            loss = loss / 2 + torch.nn.functional.cross_entropy(back, here, reduction="sum") / 24
        return loss

    return lambda w, b: descend(part, w, b, data)


@step_of("dp2 dp3", NET, "entered gathered", "no_enter own_moments correlations_averaged own_n")
def redundancy(axes, how):
    """Barlow twins: the correlation of two views over the batch shall be the identity."""
    data = axes["dp"]

    def moments(z):
        mean = psum(z.sum(0), data) / 12
        mean = mean if how == "no_enter" else enter(mean, data)
        var = psum((z - mean).square().sum(0), data) / 12
        return mean, var if how == "no_enter" else enter(var, data)

    def part(w, b):
        views = [mlp(w, b["x"]), mlp(w, b["x2"])]
        if how == "gathered":
            views = [all_gather(z, data, 0) for z in views]
            one, two = ((z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-4).sqrt() for z in views)
            c = one.T @ two / 12
        elif how == "own_moments":
            one, two = ((z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-4).sqrt() for z in views)
            c = psum(one.T @ two, data) / 12
        else:
            one, two = ((z - m) / (v + 1e-4).sqrt() for z, (m, v) in ((z, moments(z)) for z in views))
            c = one.T @ two / (len(one) if how in ("correlations_averaged", "own_n") else 12)
            c = c if how == "correlations_averaged" else psum(c, data)
        off = c - torch.diag(torch.diagonal(c))
        return ((torch.diagonal(c) - 1).square().sum() + 0.1 * off.square().sum()) / 8

    def train_step(w, b):
        if how == "gathered":  # a share of one loss, as each rank's gather brings all gradients home
            return descend(lambda w, b: part(w, b) / data.size, w, b, data)
        (value, _), grads = step.value_and_grad(part)(w, b)
        value = psum(value, data) / data.size if how == "correlations_averaged" else value
        return sgd(w, summed(grads, data)), {"loss": value}

    return train_step


@step_of("dp2 dp3", NET, "raw_moments", "own_deviation averaged_deviation hinge_before_sum")
def spread(axes, how):
    """VICReg's hinge on the deviation of each feature over the batch."""
    data = axes["dp"]

    def loss_fn(w, b):
        z = mlp(w, b["x"])
        if how in ("own_deviation", "averaged_deviation", "hinge_before_sum"):
            deviation = (z.var(0, unbiased=False) + 1e-4).sqrt()
            if how == "hinge_before_sum":
                return psum(torch.relu(1.5 - deviation).mean(), data) / data.size
            return torch.relu(
                1.5 - (psum(deviation, data) / data.size if how == "averaged_deviation" else deviation)
            ).mean()
        sums = psum(torch.stack([z.sum(0), z.square().sum(0)]), data) / 12
        return torch.relu(1.5 - (sums[1] - sums[0].square() + 1e-4).sqrt()).mean()

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(loss_fn)(w, b)
        return sgd(w, summed(grads, data)), {"loss": value}

    return train_step


@step_of(
    "dp2 dp3", {"net": NET, "teacher": NET, "centre": "8"}, "mean_of_all", "own_centre summed_centre teacher_of_own"
)
def centred(axes, how):
    """DINO: a student, a teacher that follows it, and the centre of what the teacher says."""
    data = axes["dp"]

    def train_step(w, b):
        told = mlp(w["teacher"], b["x2"])

        def part(net, b):
            wanted = ((told - w["centre"]) / 0.3).softmax(-1)
            return -(wanted * mlp(net, b["x"]).log_softmax(-1)).sum(-1).sum() / 12

        (value, _), own = step.value_and_grad(part)(w["net"], b)
        grads = summed(own, data)
        net = sgd(w["net"], grads)
        follows = sgd(w["net"], own, 0.1 * data.size) if how == "teacher_of_own" else net
        teacher = tree.map(lambda t, s: 0.95 * t + 0.05 * s, w["teacher"], follows)
        mean = told.mean(0)
        if how != "own_centre":
            mean = psum(mean, data)
        if how not in ("own_centre", "summed_centre"):
            mean = mean / data.size
        return {"net": net, "teacher": teacher, "centre": 0.9 * w["centre"] + 0.1 * mean}, {"loss": psum(value, data)}

    return train_step


@step_of(
    "dp2 dp3 fsdp2",
    {"net": NET, "mean": "12", "var": "12 +"},
    "two_sums",
    "own_statistics mean_of_variances no_enter running_own unbiased_by_own",
)
def batch_norm(axes, how):
    """Batch normalisation by hand, and its running statistics."""
    data = axes["dp", "fsdp"]

    def part(w, b):
        h = b["x"] @ w["up"]
        own = h.mean(0), h.var(0, unbiased=False)
        if how == "own_statistics":
            mean, var = own
        elif how == "mean_of_variances":
            mean, var = (enter(psum(s, data) / data.size, data) for s in own)
        else:
            both = psum(torch.stack([h.sum(0), h.square().sum(0)]), data) / 12
            both = both if how == "no_enter" else enter(both, data)
            mean, var = both[0], both[1] - both[0].square()
        out = torch.tanh((h - mean) / (var + 1e-3).sqrt() + w["bias"]) @ w["down"]
        n = len(h) if how == "unbiased_by_own" else 12
        kept = own if how == "running_own" else (mean, var)
        return (out - b["y"]).square().sum() / (12 * 8), {
            "mean": kept[0].detach(),
            "var": kept[1].detach() * n / (n - 1),
        }

    def train_step(w, b):
        (value, aux), grads = step.value_and_grad(part)(w["net"], b)
        moved = {name: 0.9 * w[name] + 0.1 * aux[name] for name in ("mean", "var")}
        return {"net": sgd(w["net"], summed(grads, data)), **moved}, {"loss": psum(value, data)}

    return train_step


@step_of("dp2 dp3", {**NET, "protos": "8,6"}, "of_all", "own_columns own_total last_division_own top_of_own@dp3")
def assignments(axes, how):
    """SwAV: Sinkhorn over the whole batch gives each row a soft prototype."""
    data = axes["dp"]

    def balanced(scores):
        top = scores.amax() if how == "top_of_own" else pmax(scores.amax(), data)
        q = ((scores - top) / 0.5).exp()
        q = q / (q.sum() if how == "own_total" else psum(q.sum(), data))
        for turn in range(3):
            own = how == "own_columns" or (how == "last_division_own" and turn == 2)
            q = q / (q.sum(0) if own else psum(q.sum(0), data)) / 6
            q = q / q.sum(1, keepdim=True) / 12
        return q * 12

    def part(w, b):
        told = balanced((mlp(w, b["x2"]) @ w["protos"]).detach())
        return -(told * (mlp(w, b["x"]) @ w["protos"]).log_softmax(-1)).sum() / 12

    return lambda w, b: descend(part, w, b, data)


@loss_of("dp2 dp3 fsdp2", NET, "partners_of_all", "partners_here rolled_here same_partner")
def mixed(axes, how):
    """Mixup with the row that stands as far from the other end of the batch."""
    data = axes["dp", "fsdp"]

    def other(x):
        if how == "partners_here":
            return x.flip(0)
        if how == "rolled_here":
            return x.roll(1, 0)
        every = all_gather(x, data, 0).flip(0)
        return every[: len(x)] if how == "same_partner" else shard(every, data, 0)

    def loss_fn(w, b):
        error = (mlp(w, 0.7 * b["x"] + 0.3 * other(b["x"])) - 0.7 * b["y"] - 0.3 * other(b["y"])).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@step_of("dp2 dp3", {"net": NET, "queue": "24,8"}, "gathered_keys", "own_keys_tiled oldest_of_own first_rank")
def queued(axes, how):
    """MoCo: negatives wait in a queue that all ranks hold alike."""
    data = axes["dp"]

    def train_step(w, b):
        keys = torch.nn.functional.normalize(mlp(w["net"], b["x2"]), dim=-1)

        def part(net, b):
            q = torch.nn.functional.normalize(mlp(net, b["x"]), dim=-1)
            good = (q * keys).sum(-1, keepdim=True)
            logits = torch.cat([good, q @ w["queue"].T], 1) * 3
            return -(logits.log_softmax(-1)[:, 0]).sum() / 12

        (value, _), grads = step.value_and_grad(part)(w["net"], b)
        fresh = all_gather(keys, data, 0)
        if how == "own_keys_tiled":
            fresh = torch.cat([keys] * data.size)
        elif how == "oldest_of_own":
            fresh = keys
        elif how == "first_rank":
            fresh = psum(keys * (axis_index(data, keys) == 0), data)
        queue = torch.cat([fresh, w["queue"]])[:24]
        return {"net": sgd(w["net"], summed(grads, data)), "queue": queue}, {"loss": psum(value, data)}

    return train_step
