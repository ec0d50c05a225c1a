"""Newcomers from vision: classifiers, contrast, metric learning, self-supervision; rows over the data ranks."""

import torch
import torch.nn.functional as F

from fmegatron import nn, step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, ppermute, psum
from tests.step.newcomers.frame import loss, mlp


def numbers_of(axis, rows: torch.Tensor) -> torch.Tensor:
    """Which of all rows these are."""
    return axis_index(axis, like=rows) * rows.shape[0] + torch.arange(rows.shape[0], device=rows.device)


@loss("dp2 fsdp3 dp2·fsdp2", "conv head", "parts summed", "rank_mean double_count mean_of_means own_total")
def classify(axes, how):
    """A classifier with label smoothing; images without a label are skipped."""
    data = axes[axes.data]

    def loss_fn(w, b):
        h = F.relu(F.conv2d(b["img"], w["conv"], padding=1)).mean((2, 3))
        nll = F.cross_entropy(h @ w["head"], b["c"], ignore_index=-1, label_smoothing=0.1, reduction="none")
        valid = (b["c"] >= 0).sum()
        match how:
            case "parts":
                return step.mean(nll.sum(), valid)
            case "summed":
                return nll.sum() / psum(valid, data)
            case "rank_mean":
                return nll.sum() / valid / data.size
            case "double_count":
                return step.mean(psum(nll.sum(), data), psum(valid, data))
            case "mean_of_means":
                return step.mean(nll.sum() / valid, 1)
            case _:
                return nll.sum() / valid

    return loss_fn


@loss("dp2 dp3 fsdp4", "up fb down gain head", "parts normed", "mean_here sum_of_own weights_over_ranks")
def weighted(axes, how):
    """Rows with importance weights, normalised by their sum."""
    data = axes[axes.data]

    def loss_fn(w, b):
        nll = F.cross_entropy(mlp(w, b["x"]) @ w["head"], b["k"], reduction="none")
        if how == "parts":
            return step.mean((nll * b["wt"]).sum(), b["wt"].sum())
        if how == "normed":
            weight = b["wt"] / psum(b["wt"].sum(), data)
            return (nll * weight).sum()
        if how == "mean_here":
            return (nll * b["wt"]).sum() / b["wt"].sum().clamp(min=1e-6) / data.size
        if how == "sum_of_own":
            return (nll * b["wt"] / b["wt"].sum().clamp(min=1e-6)).sum()
        return (nll * b["wt"]).mean() / psum(b["wt"].mean(), data) / data.size

    return loss_fn


@loss("dp2 fsdp3 dp4", "up fb down gain", "gathered neighbour", "here backwards@dp3,dp4 targets_here")
def mixup(axes, how):
    """Each row is mixed with the row before it, of all rows."""
    data = axes[axes.data]

    def before(v, way):
        if way == "here":
            return v.roll(1, 0)
        if way == "gathered":
            return all_gather(v, data, 0).roll(1, 0)[numbers_of(data, v)]
        shift = -1 if way == "backwards" else 1
        return torch.cat([ppermute(v[-1:], data, shift), v[:-1]])

    def loss_fn(w, b):
        of_targets = "here" if how == "targets_here" else how
        of_rows = "gathered" if how == "targets_here" else how
        x = 0.7 * b["x"] + 0.3 * before(b["x"], of_rows)
        y = 0.7 * b["y"] + 0.3 * before(b["y"], of_targets)
        return step.mean((mlp(w, x) - y).square().sum(), y.numel())

    return loss_fn


@loss("dp2 fsdp2 dp3", "up fb down gain", "hard soft frozen_others@fsdp2", "own_rows labels_here sum_of_means")
def triplet(axes, how):
    """Batch-hard triplets: the farthest of the same class, the nearest of another one."""
    data = axes[axes.data]

    def loss_fn(w, b):
        z = F.normalize(mlp(w, b["x"]), dim=-1)
        if how == "own_rows":
            others, classes, numbers = z, b["k"], torch.arange(len(z))
        else:
            others = all_gather(z.detach() if how == "frozen_others" else z, data, 0)
            classes = all_gather(b["k"], data, 0)
            numbers = numbers_of(data, z)
        if how == "labels_here":
            classes = b["k"].repeat(data.size)
        far = 2 - 2 * z @ others.mT
        same = b["k"][:, None] == classes
        itself = numbers[:, None] == torch.arange(len(others))
        if how == "soft":
            worst = (far.masked_fill(~same | itself, -1e4)).logsumexp(1) - (-far.masked_fill(same, 1e4)).logsumexp(1)
        else:
            worst = far.masked_fill(~same, -1e4).amax(1) - far.masked_fill(same, 1e4).amin(1)
        hinge = F.softplus(worst + 0.2)
        return hinge.mean() if how == "sum_of_means" else step.mean(hinge.sum(), len(hinge))

    return loss_fn


@loss("dp2 dp3 dp4", "square other temp", "ring gathered", "one_turn_less diagonal_in_each texts_stay")
def siglip(axes, how):
    """Sigmoid loss over all pairs; texts go round the ranks."""
    data = axes[axes.data]

    def loss_fn(w, b):
        image = F.normalize(b["x"] @ w["square"], dim=-1)
        text = F.normalize(b["x2"] @ w["other"], dim=-1)
        n, scale = len(image), w["temp"].exp()
        if how == "gathered":
            sign = 2.0 * (numbers_of(data, image)[:, None] == torch.arange(n * data.size)) - 1
            return step.mean(-F.logsigmoid(sign * scale * (image @ all_gather(text, data, 0).mT)).sum(), n)
        total = 0.0
        for turn in range(max(data.size - 1, 1) if how == "one_turn_less" else data.size):
            own = turn == 0 or how == "diagonal_in_each"
            sign = 2.0 * torch.eye(n) - 1 if own else -torch.ones(n, n)
            total = total - F.logsigmoid(sign * scale * (image @ text.mT)).sum()
            text = text if how == "texts_stay" else ppermute(text, data, 1)
        return step.mean(total, n)

    return loss_fn


@loss("dp2 fsdp2 dp3", "square other", "both", "no_enter means_here labels_from_zero over_ranks_twice")
def clip_with_both_sides(axes, how):
    """InfoNCE, image to text and back, computed from the whole matrix on each rank."""
    data = axes[axes.data]

    def loss_fn(w, b):
        image = F.normalize(b["x"] @ w["square"], dim=-1)
        text = F.normalize(b["x2"] @ w["other"], dim=-1)
        own = numbers_of(data, image)
        if how == "labels_from_zero":
            own = torch.arange(len(image))
        if how == "means_here":
            scores = 5 * image @ text.mT
            return step.mean(F.cross_entropy(scores, torch.arange(len(image)), reduction="sum"), len(image))
        a, t = all_gather(image, data, 0), all_gather(text, data, 0)
        if how == "no_enter":  # the whole loss on each rank, shared out by hand
            scores, labels = 5 * a @ t.mT, torch.arange(len(a))
            return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.mT, labels)) / 2
        there = F.cross_entropy(5 * image @ t.mT, own, reduction="sum")
        back = F.cross_entropy(5 * text @ a.mT, own, reduction="sum")
        if how == "over_ranks_twice":
            return (there + back) / 2 / len(a) / data.size
        return (there + back) / 2 / len(a)

    return loss_fn


@loss("dp2 fsdp3 dp2·fsdp2", "up fb down gain", "entered inside", "forgotten inside_alike here of_the_rank")
def barlow(axes, how):
    """The cross-correlation of two views should be the identity (arXiv 2103.03230)."""
    data = axes[axes.data]

    def loss_fn(w, b):
        z1, z2 = mlp(w, b["x"]), mlp(w, b["x2"])
        n = len(z1) * data.size
        c = z1.mT @ z2
        if how == "entered":
            c = enter(psum(c, data), data) / n
            return (c - torch.eye(6)).square().sum() / data.size
        if how in ("inside", "inside_alike"):
            c = psum(c, data) / n if how == "inside_alike" else enter(psum(c, data), data) / n
            return step.mean((c - torch.eye(6)).square().sum(), 1)
        if how == "forgotten":
            c = psum(c, data) / n
            return (c - torch.eye(6)).square().sum() / data.size
        if how == "here":
            return (c / len(z1) - torch.eye(6)).square().sum() / data.size
        c = enter(psum(c / len(z1), data), data)
        return (c - torch.eye(6)).square().sum() / data.size

    return loss_fn


@loss("dp2 dp3 fsdp2", "up fb down gain", "whole", "here variance_of_own unbiased_by_own no_enter")
def vicreg(axes, how):
    """The hinge on the deviation of each dim over the batch."""
    data = axes[axes.data]

    def loss_fn(w, b):
        z = mlp(w, b["x"])
        n = z.shape[0] * data.size
        if how == "here":
            std = (z.var(0) + 1e-4).sqrt()
            return F.relu(1 - std).mean() / data.size
        mean = psum(z.sum(0), data) / n
        mean = mean if how == "no_enter" else enter(mean, data)
        if how == "variance_of_own":
            mean = z.mean(0)
        square = psum((z - mean).square().sum(0), data)
        square = square if how == "no_enter" else enter(square, data)
        std = (square / (z.shape[0] - 1 if how == "unbiased_by_own" else n - 1) + 1e-4).sqrt()
        return F.relu(3 - std).mean() / data.size

    return loss_fn


@loss("dp2 fsdp2 dp3", "up fb down gain", "sums parts", "counts_here no_enter mean_of_centroids")
def prototypes(axes, how):
    """Rows are classified by their distance to the mean embedding of each class."""
    data = axes[axes.data]

    def loss_fn(w, b):
        z = mlp(w, b["x"])
        hot = F.one_hot(b["k"], 12).to(z.dtype)
        sums, counts = hot.mT @ z, hot.sum(0)
        if how == "mean_of_centroids":
            centre = enter(psum(sums / counts.clamp(min=1)[:, None], data), data) / data.size
        elif how == "counts_here":
            centre = enter(psum(sums, data), data) / counts.clamp(min=1)[:, None]
        else:
            total, seen = psum(sums, data), psum(counts, data)
            total = total if how == "no_enter" else enter(total, data)
            centre = total / seen.clamp(min=1)[:, None]
        nll = F.cross_entropy(-(z[:, None] - centre).square().sum(-1), b["k"], reduction="none")
        return step.mean(nll.sum(), nll.shape[0]) if how == "parts" else nll.sum() / (len(nll) * data.size)

    return loss_fn


@loss("dp2 dp3 fsdp2", "up fb down gain book", "global", "columns_here rows_here maximum_here")
def swav(axes, how):
    """Sinkhorn over the whole batch gives the targets of the other view."""
    data = axes[axes.data]

    def sinkhorn(scores):
        top = scores.max() if how == "maximum_here" else pmax(scores.max(), data)
        q = ((scores - top) / 0.3).exp()
        for _ in range(3):
            column = q.sum(0) if how == "columns_here" else psum(q.sum(0), data)
            q = q / column / 8
            q = q / (q.sum() if how == "rows_here" else q.sum(1, keepdim=True))
        return q

    def loss_fn(w, b):
        z1, z2 = F.normalize(mlp(w, b["x"]), dim=-1), F.normalize(mlp(w, b["x2"]), dim=-1)
        book = F.normalize(w["book"], dim=-1)
        q = sinkhorn((z1 @ book.mT).detach())
        return step.mean(-(q * F.log_softmax(z2 @ book.mT / 0.1, -1)).sum(), len(z1))

    return loss_fn


@loss("dp2 fsdp2 dp3", "head up fb down gain", "by_positives", "positives_here positives_over_ranks clamped_here")
def focal(axes, how):
    """Focal loss over all classes, normalised by the number of positives (RetinaNet)."""
    data = axes[axes.data]

    def loss_fn(w, b):
        logits = mlp(w, b["x"]) @ w["head"]
        hot = (b["c"][:, None] == torch.arange(12)).to(logits.dtype)
        p = logits.sigmoid()
        bce = F.binary_cross_entropy_with_logits(logits, hot, reduction="none")
        total = (bce * (1 - (p * hot + (1 - p) * (1 - hot))).square()).sum()
        positives = hot.sum()
        if how == "by_positives":
            return step.mean(total, positives)
        if how == "positives_here":
            return total / positives.clamp(min=1) / data.size
        if how == "positives_over_ranks":
            return total / (psum(positives, data) / data.size)
        return total / psum(positives.clamp(min=3), data)

    return loss_fn


@loss("dp2 fsdp3 dp2·fsdp2", "conv", "ratio_of_sums", "ratio_here smooth_on_each no_enter")
def dice(axes, how):
    """1 - 2 Σ p t / (Σ p + Σ t) over all images."""
    data = axes[axes.data]

    def loss_fn(w, b):
        p = F.conv2d(b["img"], w["conv"], padding=1).mean(1).sigmoid()
        t = (b["img"][:, 0] > 0).to(p.dtype)
        both, either = (p * t).sum(), p.sum() + t.sum()
        if how == "ratio_here":
            return (1 - 2 * both / either) / data.size
        if how == "smooth_on_each":
            both, either = both + 1, either + 1
        both, either = psum(both, data), psum(either, data)
        if how != "no_enter":
            both, either = enter(both, data), enter(either, data)
        smooth = 0 if how == "smooth_on_each" else 1
        return (1 - 2 * (both + smooth) / (either + smooth)) / data.size

    return loss_fn


@loss("dp2 fsdp2 dp3", "up fb down gain head", "sums one_divisor", "batchmean temperature_summed")
def distilled(axes, how):
    """KL to the softened outputs of a teacher, beside the plain loss."""
    data = axes[axes.data]

    def loss_fn(w, b):
        student = mlp(w, b["x"]) @ w["head"]
        with torch.no_grad():
            teacher = b["x"] @ w["head"]
        kl = F.kl_div(F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1), reduction="none").sum(-1)
        nll = F.cross_entropy(student, b["k"], reduction="none")
        rows = student.shape[0]
        match how:
            case "sums":
                return {"kl": 4 * step.mean(kl.sum(), rows), "nll": step.mean(nll.sum(), rows)}
            case "one_divisor":
                return (4 * kl + nll).sum() / (rows * data.size)
            case "batchmean":
                return 4 * kl.sum() / rows + nll.sum() / (rows * data.size)
            case _:
                return step.mean(psum(4 * kl.sum(), data) + nll.sum(), rows)

    return loss_fn


@loss("dp2 fsdp2 dp3", "up fb down gain", "keyed", "local_counts same_for_all", samples=True)
def augmented(axes, how):
    """Noise on the inputs and a random crop of features, by the number of each sample."""

    def loss_fn(w, b, samples):
        count = samples
        if how == "local_counts":
            count = torch.arange(len(b["x"]))
        x = b["x"] + 0.1 * nn.normal(b["x"], key=5, count=count)
        if how == "same_for_all":
            keep = nn.uniform(b["x"][:1], key=6, count=samples[:1]) > 0.3
        else:
            keep = nn.uniform(b["x"], key=6, count=samples) > 0.3
        error = (mlp(w, nn.dropout(x * keep, 0.2, key=7, count=count)) - b["y"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn
