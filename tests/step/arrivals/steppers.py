"""Updates written out: Lion, Shampoo, Muon, factored moments over shards, norms by leaf and group, averages, widths."""

import torch

from fmegatron import step, tree
from fmegatron.collectives import all_gather, enter, psum, reduce_scatter, shard
from tests.step.arrivals.frame import NET, mlp, sgd, step_of, summed


def part_of_mean(data, net=mlp):
    """loss(w, b): this rank's part of the mean over all rows."""

    def part(w, b):
        error = (net(w, b["x"]) - b["y"]).square()
        return error.sum() / (error.numel() * data.size)

    return part


def flat(parts):
    """Leaves end to end."""
    return torch.cat([x.reshape(-1) for x in tree.leaves(parts)])


def unflat(vector, like):
    """Leaves of a vector."""
    pieces = iter(vector.split([x.numel() for x in tree.leaves(like)]))
    return tree.map(lambda x: next(pieces).view(x.shape), like)


@step_of(
    "dp2 dp3",
    {"net": NET, "m": "204@dp"},
    "scattered summed_first",
    "own_slice sign_before_sum averaged_twice@dp3 moment_of_mean@dp2",
)
def lion(axes, how):
    """Lion with a momentum that is split over dp: flat gradients are scattered, flat parameters gathered."""
    data = axes["dp"]

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part_of_mean(data))(w["net"], b)
        g = flat(grads)
        if how == "summed_first":
            g = shard(psum(g, data), data, 0)
        elif how == "own_slice":
            g = shard(g, data, 0)
        elif how == "sign_before_sum":
            g = reduce_scatter(g.sign(), data, 0)
        else:
            g = reduce_scatter(g, data, 0)
        if how == "averaged_twice":
            g = g / data.size
        own = shard(flat(w["net"]), data, 0)
        towards = 0.9 * w["m"] + 0.1 * g
        if how == "moment_of_mean":
            towards = towards - towards.mean()
        own = own - 0.01 * torch.tanh(20 * towards) - 0.001 * own
        m = 0.99 * w["m"] + 0.01 * g
        return {"net": unflat(all_gather(own, data, 0), w["net"]), "m": m}, {"loss": psum(value, data)}

    return train_step


@step_of(
    "fsdp2 fsdp3 fsdp2·dp2", {"w": "12@fsdp,8", "right": "8,8 +"}, "gram", "own_gram mean_gram gathered_and_summed"
)
def shampoo(axes, how):
    """One-sided Shampoo of a matrix whose rows are split: its 8 x 8 statistics are a sum over the shards."""
    data, split = axes["dp", "fsdp"], axes["fsdp"]

    def train_step(w, b):
        def part(shards, b):
            whole = all_gather(shards, split, 0)
            error = (torch.tanh(b["x"] @ whole.T) @ whole - b["y"]).square()
            return error.sum() / (error.numel() * data.size)

        (value, _), g = step.value_and_grad(part)(w["w"], b)
        g = psum(g, axes["dp"])
        gram = g.T @ g
        if how == "gathered_and_summed":
            whole = all_gather(g, split, 0)
            gram = psum(whole.T @ whole, split)
        elif how != "own_gram":
            gram = psum(gram, split)
        if how == "mean_gram":
            gram = gram / split.size
        right = w["right"] + gram
        scale = torch.linalg.inv(right @ right.T + 0.1 * torch.eye(8, dtype=right.dtype, device=right.device))
        return {"w": w["w"] - 0.1 * g @ scale, "right": right}, {"loss": psum(value, data)}

    return train_step


def newton_schulz(x, norm, gram):
    """Three steps towards the nearest orthogonal matrix."""
    x = x / (norm + 1e-7)
    for _ in range(3):
        a = gram(x)
        x = 3.4445 * x + x @ (-4.775 * a + 2.0315 * a @ a)
    return x


@step_of(
    "fsdp2 fsdp3", {"w": "12@fsdp,8", "m": "12@fsdp,8"}, "gathered of_grams", "own gram_own norm_own norm_of_norms"
)
def muon(axes, how):
    """Muon of a matrix whose rows are split."""
    data = axes["fsdp"]

    def train_step(w, b):
        def part(shards, b):
            whole = all_gather(shards, data, 0)
            return (torch.tanh(b["x"] @ whole.T) @ whole - b["y"]).square().sum() / (12 * 8)

        (value, _), g = step.value_and_grad(part)(w["w"], b)
        m = 0.9 * w["m"] + g
        if how == "gathered":
            whole = all_gather(m, data, 0)
            direction = shard(newton_schulz(whole, whole.norm(), lambda x: x.T @ x), data, 0)
        elif how == "own":
            direction = newton_schulz(m, m.norm(), lambda x: x.T @ x)
        else:
            norm = psum(m.square().sum(), data).sqrt()
            if how == "norm_own":
                norm = m.norm()
            elif how == "norm_of_norms":
                norm = psum(m.norm(), data)
            direction = newton_schulz(m, norm, lambda x: x.T @ x if how == "gram_own" else psum(x.T @ x, data))
        return {"w": w["w"] - 0.05 * direction, "m": m}, {"loss": psum(value, data)}

    return train_step


@step_of("fsdp2 fsdp3", {"w1": "12@fsdp,8", "w2": "8,12@fsdp"}, "squares", "own_norms sum_of_norms weights_only")
def trust_ratios(axes, how):
    """LARS: each matrix moves by a part of its own norm."""
    data = axes["fsdp"]

    def train_step(w, b):
        def part(w, b):
            first, second = all_gather(w["w1"], data, 0), all_gather(w["w2"], data, 1)
            error = (torch.relu(b["x"] @ first.T) @ second.T - b["y"]).square()
            return error.sum() / (error.numel() * data.size)

        (value, _), grads = step.value_and_grad(part)(w, b)

        def norm(x, both=True):
            if how == "own_norms" or (how == "weights_only" and not both):
                return x.norm()
            if how == "sum_of_norms":
                return psum(x.norm(), data)
            return psum(x.square().sum(), data).sqrt()

        after = tree.map(lambda p, g: p - 0.01 * norm(p) / (norm(g, False) + 1e-6) * g, w, grads)
        return after, {"loss": psum(value, data)}

    return train_step


@step_of("fsdp2 fsdp3", {"w": "12@fsdp,8", "rows": "12@fsdp +", "cols": "8 +"}, "factored", "cols_own mean_own rms_own")
def factored(axes, how):
    """Adafactor: a second moment of row means and column means, and an update that is clipped by its RMS."""
    data = axes["fsdp"]

    def train_step(w, b):
        def part(shards, b):
            whole = all_gather(shards, data, 0)
            return (torch.tanh(b["x"] @ whole.T) @ whole - b["y"]).square().sum() / (12 * 8)

        (value, _), g = step.value_and_grad(part)(w["w"], b)
        square = g.square() + 1e-6
        cols = square.sum(0) if how == "cols_own" else psum(square.sum(0), data)
        rows, cols = 0.9 * w["rows"] + 0.1 * square.mean(1), 0.9 * w["cols"] + 0.1 * cols / 12
        mean = rows.mean() if how == "mean_own" else psum(rows.sum(), data) / 12
        update = g / (rows[:, None] * cols / mean).sqrt()
        total = update.square().sum()
        rms = (total / update.numel()).sqrt() if how == "rms_own" else (psum(total, data) / (12 * 8)).sqrt()
        return {"w": w["w"] - 0.05 * update / rms.clamp(min=0.01), "rows": rows, "cols": cols}, {
            "loss": psum(value, data)
        }

    return train_step


@step_of("dp2 dp3", {"net": NET, "ema": "204@dp"}, "of_new", "of_own_gradient gathered_sum other_slice")
def shadow(axes, how):
    """An average of the parameters, of which each rank keeps a range; the loss of the average is reported."""
    data = axes["dp"]

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part_of_mean(data))(w["net"], b)
        reduced = summed(grads, data)
        net = sgd(w["net"], reduced)
        toward = flat(sgd(w["net"], grads)) if how == "of_own_gradient" else flat(net)
        piece = toward[: w["ema"].shape[0]] if how == "other_slice" else shard(toward, data, 0)
        ema = 0.9 * w["ema"] + 0.1 * piece
        if how == "gathered_sum":
            whole = psum(torch.cat([ema] * data.size), data)
        else:
            whole = all_gather(ema, data, 0)
        held = psum(part_of_mean(data)(unflat(whole, net), b), data)
        return {"net": net, "ema": ema}, {"loss": psum(value, data), "averaged": held}

    return train_step


@step_of(
    "tp2 tp3 dp2·tp2",
    {"up": "8,12@tp", "bias": "12@tp", "down": "12@tp,8", "gain": "8"},
    "by_layout",
    "all_summed none_summed before_reduction@dp2·tp2 one_norm_own",
)
def clipped_groups(axes, how):
    """Two groups, each clipped by its own norm: matrices, which tp splits, and vectors, of which it splits one."""
    data, tp = axes["dp"], axes["tp"]

    def train_step(w, b):
        def part(w, b):
            hidden = torch.tanh(enter(b["x"] * w["gain"], tp) @ w["up"] + w["bias"])
            error = (psum(hidden @ w["down"], tp) - b["y"]).square()
            return error.sum() / (error.numel() * data.size)

        (value, _), grads = step.value_and_grad(part)(w, b)
        reduced = summed(grads, data)
        of = grads if how == "before_reduction" else reduced
        squares = tree.map(lambda g: g.square().sum(), of)
        matrices, vectors = squares["up"] + squares["down"], squares["bias"]
        if how == "all_summed":
            matrices, vectors = psum(matrices, tp), psum(vectors + squares["gain"], tp)
        elif how == "none_summed":
            vectors = vectors + squares["gain"]
        elif how == "one_norm_own":
            matrices, vectors = psum(matrices, tp), vectors + squares["gain"]
        else:
            matrices, vectors = psum(matrices, tp), psum(vectors, tp) + squares["gain"]

        def clip(name):
            square = matrices if name in ("up", "down") else vectors
            return reduced[name] * (0.05 / (square.sqrt() + 1e-6)).clamp(max=1)

        return {name: w[name] - clip(name) for name in w}, {"loss": psum(value, data)}

    return train_step


@step_of("dp2 dp3 dp2·fsdp2", NET, "after_sum", "before_sum by_own_norm after_one_axis@dp2·fsdp2")
def clipped_leaves(axes, how):
    """Each leaf is clipped by itself."""
    data = axes["dp", "fsdp"]

    def clip(g, norm):
        return g * (0.02 / (norm + 1e-6)).clamp(max=1)

    def train_step(w, b):
        (value, _), own = step.value_and_grad(part_of_mean(data))(w, b)
        total = summed(own, axes["dp"] if how == "after_one_axis" else data)
        if how == "before_sum":
            grads = summed(tree.map(lambda g: clip(g, g.norm()), own), data)
        elif how == "by_own_norm":
            grads = tree.map(lambda g, mine: clip(g, mine.norm()), total, own)
        else:
            grads = tree.map(lambda g: clip(g, g.norm()), total)
        return sgd(w, grads, 1), {"loss": psum(value, data)}

    return train_step


@step_of(
    "tp2 tp3",
    {"up": "8,12@tp", "down": "12@tp,8", "head": "8,24@tp"},
    "whole_width",
    "own_width own_rate output_multiplier",
)
def widths(axes, how):
    """muP: what a layer's output and rate are divided by is the width of the model."""
    tp = axes["tp"]

    def train_step(w, b):
        width = w["down"].shape[0] if how == "own_width" else w["down"].shape[0] * tp.size

        def loss_fn(w, b):
            hidden = torch.relu(enter(b["x"], tp) @ w["up"])
            out = psum(hidden @ w["down"], tp) / width
            logits = enter(out, tp) @ w["head"] / (w["head"].shape[1] if how == "output_multiplier" else 8)
            return psum(logits.exp().sum(-1), tp).log().mean() + out.square().mean()

        (value, _), grads = step.value_and_grad(loss_fn)(w, b)
        fan = w["down"].shape[0] if how == "own_rate" else 12
        rates = {"up": 0.1, "down": 1.2 / fan, "head": 0.1}
        return {name: w[name] - rates[name] * grads[name] for name in w}, {"loss": value}

    return train_step


@step_of("dp2 dp3", NET, "reduced", "own_ascent norm_own ascent_of_mean")
def sharpness(axes, how):
    """SAM: the gradient at a point up the hill."""
    data = axes["dp"]

    def train_step(w, b):
        (value, _), own = step.value_and_grad(part_of_mean(data))(w, b)
        up = own if how == "own_ascent" else summed(own, data)
        if how == "ascent_of_mean":
            up = tree.map(lambda g: g - 0.5 * g.mean() * data.size, up)
        of = own if how == "norm_own" else up
        norm = torch.stack([g.square().sum() for g in tree.leaves(of)]).sum().sqrt()
        there = tree.map(lambda p, g: p + 0.1 * g / (norm + 1e-6), w, up)
        _, grads = step.value_and_grad(part_of_mean(data))(there, b)
        return sgd(w, summed(grads, data)), {"loss": psum(value, data)}

    return train_step


@step_of("dp2 dp3", NET, "sums weights_first", "mean_of_chunks summed_in_loop_and_after last_counted")
def accumulated(axes, how):
    """Gradients of two halves of a rank's rows, added up by hand and divided once."""
    data = axes["dp"]

    def scaled(value, grads, by):
        return value / by, tree.map(lambda g: g / by, grads)

    def total(w, b):
        return ((mlp(w, b["x"]) - b["y"]).square().mean(-1) * b["wt"]).sum()

    def train_step(w, b):
        halves = [{name: b[name].chunk(2)[i] for name in ("x", "y", "wt")} for i in range(2)]
        grads, value, count = tree.map(torch.zeros_like, w), 0.0, 0.0
        everything = psum(b["wt"].sum(), data)
        for half in halves:
            (here, _), more = step.value_and_grad(total)(w, half)
            if how == "mean_of_chunks":
                here, more = scaled(here, more, half["wt"].sum() + 1e-6)
            elif how == "weights_first":
                here, more = scaled(here, more, everything)
            elif how == "summed_in_loop_and_after":
                more = summed(more, data)
            grads, value = tree.map(torch.add, grads, more), value + here
            count = half["wt"].sum() if how == "last_counted" else count + half["wt"].sum()
        scale = {"mean_of_chunks": 2 * data.size, "weights_first": 1}.get(how)
        scale = psum(count, data) if scale is None else scale
        grads = tree.map(lambda g: g / scale, summed(grads, data))
        return sgd(w, grads), {"loss": psum(value, data) / scale}

    return train_step


@step_of(
    "tp2 tp3",
    {"up": "8,12@tp", "down": "12@tp,8"},
    "by_unit",
    "own_part both_summed gradient_own",
)
def unit_clipping(axes, how):
    """AGC: the gradient of each output unit is clipped by the norm of its weights."""
    tp = axes["tp"]

    def train_step(w, b):
        def loss_fn(w, b):
            return (psum(torch.relu(enter(b["x"], tp) @ w["up"]) @ w["down"], tp) - b["y"]).square().mean()

        (value, _), grads = step.value_and_grad(loss_fn)(w, b)

        def norm(x, split):
            square = x.square().sum(0)
            return (psum(square, tp) if split else square).sqrt()

        def clip(name):
            split = name == "down" and how != "own_part" or how == "both_summed"
            most = 0.05 * norm(w[name], split)
            size = norm(grads[name], split and how != "gradient_own")
            return grads[name] * torch.minimum(most / (size + 1e-6), torch.ones_like(most))

        return {name: w[name] - clip(name) for name in w}, {"loss": value}

    return train_step
