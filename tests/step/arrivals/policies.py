"""Policies: advantages by group, whitened, run through statistics; references, medians, temperatures, importance."""

import torch

from fmegatron import step
from fmegatron.collectives import all_gather, enter, pmax, psum
from tests.step.arrivals.frame import NET, descend, mlp, sgd, step_of, summed

POLICY = {"up": "8,12", "down": "12,4"}


def log_prob(w, b):
    """[N]: of the action that a row took."""
    return (torch.relu(b["x"] @ w["up"]) @ w["down"]).log_softmax(-1).gather(1, b["grp"][:, None])[:, 0]


@step_of(
    "dp2 dp3 dp2·fsdp2",
    POLICY,
    "by_group gathered",
    "own_groups own_deviation size_own deviation_averaged group_of_axis@dp2·fsdp2",
)
def group_advantages(axes, how):
    """GRPO: a reward against those of its group, whose rows are on several ranks."""
    data = axes["dp", "fsdp"]

    def part(w, b):
        over = axes["dp"] if how == "group_of_axis" else data
        hot = torch.nn.functional.one_hot(b["grp"], 4).to(b["rew"].dtype)
        moments = torch.stack([hot.sum(0), hot.T @ b["rew"], hot.T @ b["rew"].square()])
        if how == "gathered":
            g, r = all_gather(b["grp"], data, 0), all_gather(b["rew"], data, 0)
            same = (b["grp"][:, None] == g).to(r.dtype)
            mean = (same @ r) / same.sum(1)
            deviation = ((same * (r - mean[:, None]).square()).sum(1) / same.sum(1)).sqrt()
            adv = (b["rew"] - mean) / (deviation + 0.1)
        else:
            n, s, q = moments if how == "own_groups" else psum(moments, over)
            if how == "size_own":
                n = moments[0]
            mean = s / n.clamp(min=1)
            var = (q / n.clamp(min=1) - mean.square()).clamp(min=0)
            if how in ("own_deviation", "deviation_averaged"):
                own = moments[1] / moments[0].clamp(min=1)
                var = (moments[2] / moments[0].clamp(min=1) - own.square()).clamp(min=0)
                var = psum(var, data) / data.size if how == "deviation_averaged" else var
            adv = (b["rew"] - mean[b["grp"]]) / ((var + 1e-9).sqrt() + 0.1)[b["grp"]]
        ratio = (log_prob(w, b) - b["old"]).exp()
        return -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).sum() / 12

    return lambda w, b: descend(part, w, b, data)


@step_of(
    "dp2 dp3",
    {"net": POLICY, "mean": "", "var": " +", "seen": " +"},
    "merged",
    "own_merge between_forgotten count_own whitened_by_own",
)
def running_rewards(axes, how):
    """Rewards whitened by statistics that run on, merged as Chan does; weights of zero do not count."""
    data = axes["dp"]

    def train_step(w, b):
        live = (b["wt"] > 0).to(b["rew"].dtype)
        n = psum(live.sum(), data) if how != "own_merge" else live.sum()
        total = (b["rew"] * live).sum()
        mean = total / n if how == "own_merge" else psum(total, data) / n
        about = total / live.sum() if how == "between_forgotten" else mean
        m2 = ((b["rew"] - about).square() * live).sum()
        m2 = m2 if how == "own_merge" else psum(m2, data)
        n = live.sum() if how == "count_own" else n
        seen = 10 * w["seen"]
        every = seen + n
        delta = mean - w["mean"]
        merged = (w["var"] * seen + m2 + delta.square() * seen * n / every) / every
        middle = w["mean"] + delta * n / every
        adv = (b["rew"] - (b["rew"].mean() if how == "whitened_by_own" else middle)) / (merged + 1e-3).sqrt()

        def part(net, b):
            return -(log_prob(net, b) * adv * live).sum() / psum(live.sum(), data)

        (value, _), grads = step.value_and_grad(part)(w["net"], b)
        after = {"net": sgd(w["net"], summed(grads, data)), "mean": middle, "var": merged, "seen": every / 10}
        return after, {"loss": psum(value, data)}

    return train_step


@step_of("dp2 dp3", POLICY, "of_batch", "own_reference clamped_before_mean mean_summed wanted_share_own")
def desirable(axes, how):
    """KTO: what is wanted and what is not, against the mean divergence of the batch."""
    data = axes["dp"]

    def part(w, b):
        ratio = log_prob(w, b) - b["ref"]
        apart = (b["old"] - log_prob(w, {**b, "x": b["x2"]})).detach() - 1.3
        if how == "own_reference":
            zero = apart.mean().clamp(min=0)
        elif how == "clamped_before_mean":
            zero = psum(apart.mean().clamp(min=0), data) / data.size
        else:
            zero = (psum(apart.mean(), data) / (1 if how == "mean_summed" else data.size)).clamp(min=0)
        good = (b["rew"] > 1.5).to(ratio.dtype)
        share = good.mean() if how == "wanted_share_own" else psum(good.sum(), data) / 12
        gain = good * torch.sigmoid(ratio - zero) / (share + 0.1) + (1 - good) * torch.sigmoid(zero - ratio) / (
            1.1 - share
        )
        return (1 - gain).sum() / 12

    return lambda w, b: descend(part, w, b, data)


@step_of("dp2 dp3", NET, "median_of_all ranked", "own_median medians_averaged kth_of_own ranks_here")
def robust(axes, how):
    """A Huber loss whose border is the median error of the batch; or errors that weigh by their rank."""
    data = axes["dp"]

    def part(w, b):
        error = (mlp(w, b["x"]) - b["y"]).square().mean(-1)
        own = error.detach()
        if how in ("ranked", "ranks_here"):
            every = own if how == "ranks_here" else all_gather(own, data, 0)
            rank = (every < own[:, None]).sum(1).to(error.dtype)
            return (error * (rank + 1)).sum() / (12 * 13 / 2)
        if how == "own_median":
            border = own.median()
        elif how == "medians_averaged":
            border = psum(own.median(), data) / data.size
        elif how == "kth_of_own":
            border = pmax(own.sort().values[len(own) // 2], data)
        else:
            border = all_gather(own, data, 0).median()
        return torch.where(error > border, border.sqrt() * (2 * error.sqrt() - border.sqrt()), error).sum() / 12

    return lambda w, b: descend(part, w, b, data)


@step_of(
    "dp2 dp3 fsdp2",
    {"net": POLICY, "log_alpha": ""},
    "summed",
    "alpha_unreduced alpha_by_own_mean entropy_summed_twice target_by_ranks",
)
def entropy_weight(axes, how):
    """SAC's temperature: it goes up where the entropy of the policy is below a target."""
    data = axes["dp", "fsdp"]

    def train_step(w, b):
        alpha = w["log_alpha"].exp()

        def part(net, b):
            logs = (torch.relu(b["x"] @ net["up"]) @ net["down"]).log_softmax(-1)
            entropy = -(logs.exp() * logs).sum(-1)
            gain = logs.gather(1, b["grp"][:, None])[:, 0] * b["rew"]
            return -(gain + alpha * entropy).sum() / 12, {"entropy": entropy.detach().sum() / 12}

        (value, aux), grads = step.value_and_grad(part)(w["net"], b)
        entropy = psum(aux["entropy"], data)
        if how == "entropy_summed_twice":
            entropy = psum(entropy, data)
        elif how == "alpha_by_own_mean":
            entropy = aux["entropy"] * data.size
        target = 0.9 * data.size if how == "target_by_ranks" else 0.9
        move = aux["entropy"] - target / data.size if how == "alpha_unreduced" else entropy - target
        return {"net": sgd(w["net"], summed(grads, data)), "log_alpha": w["log_alpha"] - 0.1 * alpha * move}, {
            "loss": psum(value, data)
        }

    return train_step


@step_of("dp2 dp3", POLICY, "of_all", "own_weights own_largest_kept normaliser_not_entered clipped_at_own_mean")
def importance(axes, how):
    """Self-normalised importance weights, with their gradient, and the effective size of the sample."""
    data = axes["dp"]

    def part(w, b):
        logs = log_prob(w, b) - b["old"]
        top = logs.detach().max()
        top = top if how in ("own_weights", "own_largest_kept") else pmax(top, data)
        e = (logs - top).exp()
        if how == "own_weights":
            total = e.sum() * data.size
        else:
            total = psum(e.sum(), data)
            total = total if how == "normaliser_not_entered" else enter(total, data)
        weights = e / total
        if how == "clipped_at_own_mean":
            weights = torch.minimum(weights, 1.2 * weights.detach().mean())
        return -(weights * b["rew"]).sum(), {"size": weights.detach().square().sum()}

    def train_step(w, b):
        (value, aux), grads = step.value_and_grad(part)(w, b)
        return sgd(w, summed(grads, data)), {"loss": psum(value, data), "size": 1 / psum(aux["size"], data)}

    return train_step
