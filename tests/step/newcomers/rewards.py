"""Newcomers from reinforcement learning and preferences: PPO, GRPO, DPO, KTO, rankers; rows over the data ranks."""

import torch
import torch.nn.functional as F

from fmegatron import nn, step
from fmegatron.collectives import all_gather, axis_index, enter, psum
from tests.step.newcomers.frame import loss, mlp, sgd, whole


def log_prob(w, b):
    """Of a discrete action, [rows]."""
    return F.log_softmax(mlp(w, b["x"]) @ w["head"], -1).gather(-1, b["k"][:, None])[:, 0]


@loss("dp2 fsdp2 dp3", "up fb down gain head", "whitened moments", "here mean_only_of_all unbiased_here std_averaged")
def ppo(axes, how):
    """The clipped surrogate of advantages that are whitened over the batch."""
    data = axes[axes.data]

    def whiten(a):
        n = a.shape[0] * data.size
        if how == "here":
            return (a - a.mean()) / (a.std() + 1e-8)
        mean = psum(a.sum(), data) / n
        if how == "moments":
            return (a - mean) * torch.rsqrt(psum(a.square().sum(), data) / n - mean.square() + 1e-8)
        if how == "mean_only_of_all":
            return (a - mean) / (a.std() + 1e-8)
        if how == "std_averaged":
            return (a - mean) / (psum(a.std(), data) / data.size + 1e-8)
        square = psum((a - mean).square().sum(), data)
        return (a - mean) / ((square / (n - 1 if how == "whitened" else a.shape[0] - 1)).sqrt() + 1e-8)

    def loss_fn(w, b):
        ratio, a = (log_prob(w, b) - b["old"] + 2).exp(), whiten(b["rew"])
        surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        return step.mean(-surrogate.sum(), len(a))

    return loss_fn


@loss("dp2 dp3 fsdp4", "up fb down gain head", "scattered one_hot", "groups_here baseline_here counts_here")
def grpo(axes, how):
    """Rewards minus the mean of their group; a group's samples may be on several ranks."""
    data = axes[axes.data]

    def advantage(b):
        hot = F.one_hot(b["grp"], 4).to(b["rew"].dtype)
        if how == "one_hot":
            every, group = all_gather(b["rew"], data, 0), all_gather(b["grp"], data, 0)
            same = (b["grp"][:, None] == group).to(every.dtype)
            mean = same @ every / same.sum(1)
            square = (same * (every - mean[:, None]).square()).sum(1) / same.sum(1)
            return (b["rew"] - mean) / (square + 1e-4).sqrt()
        sums, counts = b["rew"] @ hot, hot.sum(0)
        if how != "groups_here":
            sums = psum(sums, data)
            counts = counts if how == "counts_here" else psum(counts, data)
        mean = (sums / counts.clamp(min=1))[b["grp"]]
        off = (b["rew"] - mean).square() @ hot
        off = off if how in ("groups_here", "baseline_here") else psum(off, data)
        seen = hot.sum(0) if how == "groups_here" else psum(hot.sum(0), data)
        return (b["rew"] - mean) / (off / seen.clamp(min=1) + 1e-4).sqrt()[b["grp"]]

    def loss_fn(w, b):
        ratio = (log_prob(w, b) - log_prob(w, b).detach()).exp()
        return step.mean(-(ratio * advantage(b)).sum(), len(ratio))

    return loss_fn


@loss("dp2 fsdp2 dp2·fsdp2", "up fb down gain head", "parts averaged", "mean_forgets_ranks margin_of_batch_here")
def dpo(axes, how):
    """Direct preferences against a frozen reference."""
    data = axes[axes.data]

    def loss_fn(w, b):
        chosen, rejected = log_prob(w, b), log_prob(w, {"x": b["x2"], "k": b["k"]})
        margin = 0.5 * ((chosen - b["ref"]) - (rejected - b["old"]))
        if how == "margin_of_batch_here":
            margin = margin - margin.mean().detach()
        nll = -F.logsigmoid(margin)
        if how in ("parts", "margin_of_batch_here"):
            return step.mean(nll.sum(), len(nll)), {"right": step.mean((margin > 0).sum().to(nll.dtype), len(nll))}
        return nll.mean() / data.size if how == "averaged" else nll.mean()

    return loss_fn


@loss("dp2 fsdp3 dp4", "up fb down gain head", "kl_of_all", "kl_here kl_of_all_twice clamp_first")
def kto(axes, how):
    """Rows that are liked and rows that are not, against the batch's mean KL, clamped, without gradient."""
    data = axes[axes.data]

    def loss_fn(w, b):
        over = log_prob(w, b) - b["ref"]
        with torch.no_grad():
            kl = over.mean()
            if how == "kl_of_all":
                kl = psum(kl, data) / data.size
            if how == "kl_of_all_twice":
                kl = psum(psum(over.sum(), data), data) / (len(over) * data.size)
            if how == "clamp_first":
                kl = psum((over + 3).mean().clamp(min=0), data) / data.size
            kl = kl if how == "clamp_first" else (kl + 3).clamp(min=0)
        liked = b["rew"] > 1
        value = torch.where(liked, (over - kl + 2.5).sigmoid(), (kl - over - 2.5).sigmoid())
        return step.mean((1 - value).sum(), len(value))

    return loss_fn


@loss("dp2 fsdp2 dp3", "up fb down gain head k1", "several", "values_by_actors entropy_summed same_denominator")
def actor_critic(axes, how):
    """Policy, value and entropy, each over its own rows."""
    data = axes[axes.data]

    def loss_fn(w, b):
        h = mlp(w, b["x"])
        logp = F.log_softmax(h @ w["head"], -1)
        chosen = logp.gather(-1, b["k"][:, None])[:, 0]
        value = (h @ w["k1"])[:, 0]
        acted = b["c"] >= 0
        policy = -(chosen * (b["rew"] - value.detach()) * acted).sum()
        error = ((value - b["rew"]).square() * (b["wt"] > 0)).sum()
        entropy = -(logp.exp() * logp).sum()
        if how == "several":
            return {
                "policy": step.mean(policy, acted.sum()),
                "value": 0.5 * step.mean(error, (b["wt"] > 0).sum()),
                "entropy": -0.01 * step.mean(entropy, len(h)),
            }
        if how == "values_by_actors":
            return {"policy": step.mean(policy, acted.sum()), "value": step.mean(error / (b["wt"] > 0).sum(), 1)}
        if how == "entropy_summed":
            total = psum(entropy, data)
            return {"policy": step.mean(policy, acted.sum()), "entropy": -0.01 * step.mean(total, len(h))}
        return (policy / acted.sum() + 0.5 * error / (b["wt"] > 0).sum()) / data.size

    return loss_fn


@loss(
    "dp2 dp3 fsdp2", "up fb down gain k1", "lists scores_frozen@dp3 sum_over_ranks@dp2", "lists_here gold_here no_enter"
)
def listwise(axes, how):
    """Softmax over the items of one query (ListNet); items of a query are on several ranks."""
    data = axes[axes.data]

    def loss_fn(w, b):
        score = (mlp(w, b["x"]) @ w["k1"])[:, 0]
        hot = F.one_hot(b["grp"], 4).to(score.dtype)
        if how == "lists_here":
            z = score.exp() @ hot
            gold = b["rew"].exp() / (b["rew"].exp() @ hot)[b["grp"]]
        else:
            mine = score.detach() if how == "scores_frozen" else score
            z = psum(mine.exp() @ hot, data)
            z = z if how == "no_enter" else enter(z, data)
            of_gold = b["rew"].exp() @ hot
            gold = b["rew"].exp() / (of_gold if how == "gold_here" else psum(of_gold, data))[b["grp"]]
        nll = -(gold * (score - z.log()[b["grp"]])).sum()
        return psum(nll, data) / 4 if how == "sum_over_ranks" else nll / 4

    return loss_fn


@loss("dp2 fsdp2 dp3", "up fb down gain k1", "all_pairs", "own_pairs pairs_counted_here weights_here")
def ranknet(axes, how):
    """Pairs of rows of which one is better: logistic loss over all pairs of the batch."""
    data = axes[axes.data]

    def loss_fn(w, b):
        score = (mlp(w, b["x"]) @ w["k1"])[:, 0]
        if how == "own_pairs":
            others, reward = score, b["rew"]
        else:
            others, reward = all_gather(score, data, 0), all_gather(b["rew"], data, 0)
        better = b["rew"][:, None] > reward
        pairs = F.softplus(others - score[:, None]) * better
        if how == "weights_here":
            pairs = pairs * (b["wt"] / b["wt"].sum().clamp(min=0.1))[:, None]
        if how == "pairs_counted_here":
            return pairs.sum() / better.sum().clamp(min=1) / data.size
        return step.mean(pairs.sum(), better.sum())

    return loss_fn


@loss("dp2 fsdp3 dp4", "up fb down gain k1", "at_risk risk_without_gradient@dp4", "at_risk_here events_here")
def survival(axes, how):
    """Cox: each event against all rows that lived longer."""
    data = axes[axes.data]

    def loss_fn(w, b):
        hazard = (mlp(w, b["x"]) @ w["k1"])[:, 0]
        event = (b["c"] >= 0).to(hazard.dtype)
        others, time = hazard, b["rew"]
        if how != "at_risk_here":
            others = all_gather(hazard.detach() if how == "risk_without_gradient" else hazard, data, 0)
            time = all_gather(b["rew"], data, 0)
        alive = time >= b["rew"][:, None]
        risk = others.masked_fill(~alive, -1e4).logsumexp(1)
        nll = (event * (risk - hazard)).sum()
        if how == "events_here":
            return nll / event.sum() / data.size
        return step.mean(nll, event.sum())

    return loss_fn


@whole("dp2 dp3", "up fb down gain head", "reward_of_all", "reward_here baseline_of_ranks_summed grads_not_summed")
def reinforce(axes, how):
    """REINFORCE with the batch's mean reward as baseline, update by hand."""
    dp = axes["dp"]

    def loss_fn(w, b):
        baseline = b["rew"].mean()
        if how != "reward_here":
            baseline = psum(baseline, dp)
            baseline = baseline if how == "baseline_of_ranks_summed" else baseline / dp.size
        return -(log_prob(w, b) * (b["rew"] - baseline)).mean() / dp.size

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(loss_fn)(w, b)
        if how != "grads_not_summed":
            grads = {name: psum(g, dp) for name, g in grads.items()}
        return sgd(w, grads), {"loss": psum(value, dp)}

    return train_step


@loss("dp2 dp3 fsdp2", "up fb down gain head", "one_generator", "rank_in_the_key own_numbers", samples=True)
def sampled_actions(axes, how):
    """Gumbel noise on the policy's logits, one draw for each row of the batch."""
    data = axes[axes.data]

    def loss_fn(w, b, samples):
        logits = mlp(w, b["x"]) @ w["head"]
        count = samples
        if how == "own_numbers":
            count = samples - axis_index(data, like=samples) * len(samples)
        if how == "rank_in_the_key":
            count = samples + 1000 * axis_index(data, like=samples)
        draw = nn.uniform(logits.detach(), key=11, count=count)
        soft = F.softmax(logits - (-(draw + 1e-6).log() + 1e-6).log(), -1)
        return step.mean((soft * torch.arange(12)).sum(), len(logits))

    return loss_fn
