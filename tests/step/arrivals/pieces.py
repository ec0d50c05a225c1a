"""Models in pieces over tp: adapters, generated weights, norms, members, dropout, memories, mixtures, tied tables."""

import torch

from fmegatron import nn, step
from fmegatron.collectives import axis_index, enter, pmax, psum
from tests.step.arrivals.frame import NET, descend, loss_of, sgd, step_of


def trained(loss_fn, w, b, only=None):
    """An update by a loss that all ranks have alike."""
    (value, _), grads = step.value_and_grad(loss_fn)(w, b)
    return {k: w[k] if only and k not in only else w[k] - 0.1 * grads[k] for k in w}, {"loss": value}


LORA = {"up": "8,12@tp", "a": "8,4", "b": "4,12@tp", "down": "12@tp,8", "c": "12@tp,4", "d": "4,8"}


@step_of(
    "tp2 tp3",
    LORA,
    "entered whole_factor_behind_the_sum",
    "first_not_entered second_before_sum rank_not_summed base_and_factor_apart",
)
def adapters(axes, how):
    """LoRA on a column-parallel and a row-parallel matrix; the base is frozen."""
    tp = axes["tp"]

    def loss_fn(w, b):
        x = b["x"]
        low = x @ w["a"]
        low = low if how == "first_not_entered" else enter(low, tp)
        h = torch.relu(x @ w["up"] + low @ w["b"])
        if how == "second_before_sum":
            out = psum(h @ w["down"] + psum(h @ w["c"], tp) @ w["d"], tp)
        elif how == "rank_not_summed":
            out = psum(h @ w["down"], tp) + (h @ w["c"]) @ w["d"]
        elif how == "whole_factor_behind_the_sum":
            both = psum(h @ torch.cat([w["down"], w["c"]], 1), tp)
            out = both[:, :8] + both[:, 8:] @ w["d"]
        elif how == "base_and_factor_apart":
            out = psum(h @ w["down"], tp) + psum((h @ w["c"]) @ w["d"], tp)
        else:
            out = psum(h @ w["down"], tp) + psum(h @ w["c"], tp) @ w["d"]
        return (out - b["y"]).square().mean()

    return lambda w, b: trained(loss_fn, w, b, ("a", "b", "c", "d"))


@step_of(
    "dp2·tp2 dp3 tp2",
    {"up": "8,12@tp", "down": "12@tp,8", "make": "8,12@tp", "look": "8,8"},
    "of_batch",
    "own_batch context_not_entered@tp2 context_summed_twice@dp3 not_entered_over_rows@dp2·tp2",
)
def generated(axes, how):
    """A hypernetwork: the mean of the batch makes the scales of the hidden units."""
    dp, tp = axes["dp"], axes["tp"]

    def part(w, b):
        seen = torch.tanh(b["x2"] @ w["look"])
        if how == "own_batch":
            context = seen.mean(0)
        else:
            context = psum(seen.sum(0), dp) / 12
            if how == "context_summed_twice":
                context = psum(context, dp)
            if how != "not_entered_over_rows":
                context = enter(context, dp)
        scales = (context if how == "context_not_entered" else enter(context, tp)) @ w["make"]
        out = psum(torch.relu(enter(b["x"], tp) @ w["up"] * scales) @ w["down"], tp)
        return (out - b["y"]).square().sum() / (12 * 8)

    return lambda w, b: descend(part, w, b, dp)


@step_of(
    "tp2 tp3 dp2·tp2",
    {"up": "8,12@tp", "v": "12@tp,8", "g": "8"},
    "squares_summed gain_late",
    "own_norm norm_not_entered norms_summed",
)
def weight_norm(axes, how):
    """A matrix whose columns have length g, and whose rows are split."""
    dp, tp = axes["dp"], axes["tp"]

    def part(w, b):
        square = w["v"].square().sum(0)
        if how == "norms_summed":
            norm = enter(psum(square.sqrt(), tp), tp)
        elif how == "own_norm":
            norm = square.sqrt()
        else:
            norm = psum(square, tp).sqrt()
            norm = norm if how in ("norm_not_entered", "gain_late") else enter(norm, tp)
        h = torch.relu(enter(b["x"], tp) @ w["up"])
        if how == "gain_late":
            out = psum(h @ w["v"], tp) / norm * w["g"]
        else:
            out = psum(h @ (w["v"] / norm), tp) * w["g"]
        return (out - b["y"]).square().sum() / (12 * 8)

    return lambda w, b: descend(part, w, b, dp)


@step_of(
    "tp2 tp3",
    {"w": "12@tp,8", "out": "12@tp,8", "u": "12@tp", "v": "8"},
    "iterated",
    "v_own u_norm_own sigma_own sigma_not_entered",
)
def spectral(axes, how):
    """A matrix over its largest singular value, by one turn of power iteration each step."""
    tp = axes["tp"]

    def train_step(w, b):
        with torch.no_grad():
            v = w["w"].T @ w["u"]
            v = v if how == "v_own" else psum(v, tp)
            v = v / v.norm()
            u = w["w"] @ v
            u = u / (u.norm() if how == "u_norm_own" else psum(u.square().sum(), tp).sqrt())

        def loss_fn(w, b):
            sigma = u @ w["w"] @ v
            sigma = sigma if how == "sigma_own" else psum(sigma, tp)
            sigma = sigma if how in ("sigma_own", "sigma_not_entered") else enter(sigma, tp)
            h = torch.relu(enter(b["x"], tp) @ (w["w"] / sigma).T)
            return (psum(h @ w["out"], tp) - b["y"]).square().mean()

        (value, _), grads = step.value_and_grad(loss_fn)({"w": w["w"], "out": w["out"]}, b)
        return {**sgd({"w": w["w"], "out": w["out"]}, grads), "u": u, "v": v}, {"loss": value}

    return train_step


@step_of(
    "tp2 tp3",
    {"one": "6@tp,8,8", "two": "6@tp,8"},
    "mean_of_all each_by_itself",
    "mean_of_own sum_over_ranks_of_means member_here disagreement_with_own",
)
def members(axes, how):
    """An ensemble, whose six members are split over tp: each drops other inputs, and is drawn from the mean."""
    tp = axes["tp"]

    def loss_fn(w, b):
        n = w["one"].shape[0]
        member = torch.arange(n, device=b["x"].device)
        member = member if how == "member_here" else member + axis_index(tp, b["x"]) * n
        column = torch.arange(8, device=member.device)
        kept = ((member[:, None] * 5 + column * 3) % 7 < 5).to(b["x"].dtype)
        h = torch.tanh(torch.einsum("nd,md,mdh->mnh", b["x"], kept, w["one"]))
        said = torch.einsum("mnh,mh->mn", h, w["two"])
        if how == "each_by_itself":
            return psum((said - b["rew"]).square().sum(), tp) / (6 * 12)
        total = psum(said.sum(0), tp)
        if how == "mean_of_own":
            mean = said.mean(0)
        elif how == "sum_over_ranks_of_means":
            mean = psum(said.mean(0), tp)
        else:
            mean = total / 6
        about = said.mean(0) if how == "disagreement_with_own" else enter(mean, tp)
        apart = psum((said - about).square().sum(), tp) / (6 * 12)
        return (mean - b["rew"]).square().mean() - 0.1 * apart

    return lambda w, b: trained(loss_fn, w, b)


@loss_of(
    "dp2 dp3 fsdp2",
    NET,
    "by_sample by_number",
    "by_row_here scaled_by_kept by_rank",
    samples=True,
)
def dropped(axes, how):
    """Dropout by the numbers of samples; or by a hash of them, by hand."""
    data = axes["dp", "fsdp"]

    def loss_fn(w, b, samples):
        h = torch.relu(b["x"] @ w["up"] + w["bias"])
        if how == "by_number":
            column = torch.arange(12, device=h.device)
            h = h * ((b["id"][:, None] * 7 + column * 3) % 5 > 0) / 0.8
        else:
            numbers = samples
            if how == "by_row_here":
                numbers = torch.arange(len(h), device=h.device)
            elif how == "by_rank":
                numbers = numbers * 0 + axis_index(data, numbers)
            h = nn.dropout(h, 0.3, key=11, count=numbers)
        if how == "scaled_by_kept":
            h = h * h.numel() / (h > 0).sum()
        error = (h @ w["down"] - b["y"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@step_of(
    "tp2 tp3 dp2·tp2",
    {"q": "8,8", "keys": "24@tp,8", "values": "24@tp,8"},
    "combined",
    "own_softmax own_top mean_of_answers denominators_own",
)
def memory(axes, how):
    """A bank of 24 keys and values that is split: each rank answers for its part, and the parts are combined."""
    dp, tp = axes["dp"], axes["tp"]

    def part(w, b):
        scores = enter(b["x"] @ w["q"], tp) @ w["keys"].T
        if how in ("own_softmax", "mean_of_answers"):
            out = psum(scores.softmax(-1) @ w["values"], tp)
            out = out / tp.size if how == "mean_of_answers" else out
        else:
            top = scores.detach().amax(-1, keepdim=True)
            top = top if how == "own_top" else pmax(top, tp)
            e = (scores - top).exp()
            total = e.sum(-1, keepdim=True)
            if how == "denominators_own":
                out = psum(e @ w["values"] / total, tp)
            else:
                out = psum(e @ w["values"], tp) / psum(total, tp)
        return (out - b["y"]).square().sum() / (12 * 8)

    return lambda w, b: descend(part, w, b, dp)


@step_of(
    "tp2 tp3",
    {"weight": "12@tp", "mean": "12@tp,8", "scale": "12@tp +"},
    "log_sum",
    "weights_of_own sum_of_logs largest_own entropy_of_own",
)
def gaussians(axes, how):
    """The likelihood of a mixture whose twelve components are split."""
    tp = axes["tp"]

    def lse(x, dim):
        top = x.detach().amax(dim, keepdim=True)
        top = top if how == "largest_own" else pmax(top, tp)
        return psum((x - top).exp().sum(dim, keepdim=True), tp).log() + top

    def loss_fn(w, b):
        if how == "weights_of_own":
            weights = w["weight"].log_softmax(0)
        else:
            weights = w["weight"] - enter(lse(w["weight"], 0), tp)
        d = (b["x"][:, None] - w["mean"]).square().sum(-1)
        logs = weights - 8 * w["scale"].log() - d / (2 * w["scale"].square())
        likely = psum(logs.logsumexp(1), tp) if how == "sum_of_logs" else lse(logs, 1)[:, 0]
        entropy = -(weights.exp() * weights).sum()
        return -likely.mean() - 0.1 * (entropy if how == "entropy_of_own" else psum(entropy, tp))

    return lambda w, b: trained(loss_fn, w, b)


@step_of("tp2 tp3", {"table": "24@tp,8", "mix": "8,8"}, "masked", "not_masked not_entered own_target table_by_rank")
def tied(axes, how):
    """One table for the words that go in and the words that come out, split by words."""
    tp = axes["tp"]

    def loss_fn(w, b):
        n = w["table"].shape[0]

        def own(ids):
            at = ids - axis_index(tp, ids) * n
            return at.clamp(0, n - 1), (at >= 0) & (at < n)

        at, here = own(b["tok"])
        if how == "table_by_rank":
            at = b["tok"] % n
        found = w["table"][at]
        h = psum(found if how in ("not_masked", "table_by_rank") else found * here[..., None], tp)
        h = h + torch.tanh(h @ w["mix"])
        logits = (h if how == "not_entered" else enter(h, tp)) @ w["table"].T
        top = pmax(logits.detach().amax(-1), tp)
        lse = psum((logits - top[..., None]).exp().sum(-1), tp).log() + top
        at, here = own(b["tgt"])
        said = logits.gather(-1, at[..., None])[..., 0] * here
        said = said if how == "own_target" else psum(said, tp)
        return ((lse - said) * b["mask"]).sum() / b["mask"].sum()

    return lambda w, b: trained(loss_fn, w, b)


@step_of(
    "tp2 tp3",
    {"up": "8,12@tp", "gain": "12@tp", "small": "12@tp,4", "large": "4,12@tp", "down": "12@tp,8"},
    "normed",
    "own_mean own_count statistics_not_entered squeeze_own gate_not_entered",
)
def channels(axes, how):
    """A layer norm over channels that are split, and a squeeze-and-excite gate over them."""
    tp = axes["tp"]

    def loss_fn(w, b):
        h = b["seq"] @ w["up"]
        n = h.shape[-1] * (1 if how == "own_count" else tp.size)
        both = torch.stack([h.sum(-1, keepdim=True), h.square().sum(-1, keepdim=True)])
        both = both / h.shape[-1] if how == "own_mean" else psum(both, tp) / n
        both = both if how == "statistics_not_entered" else enter(both, tp)
        h = (h - both[0]) / (both[1] - both[0].square() + 1.0).sqrt() * w["gain"]
        squeezed = torch.tanh(h.mean(1)) @ w["small"]
        squeezed = squeezed if how == "squeeze_own" else psum(squeezed, tp)
        squeezed = torch.relu(squeezed)
        gate = torch.sigmoid((squeezed if how == "gate_not_entered" else enter(squeezed, tp)) @ w["large"])
        return (psum((h * gate[:, None]) @ w["down"], tp) - b["seq"]).square().mean()

    return lambda w, b: trained(loss_fn, w, b)
