"""Routers: which experts a token goes to and with what weight, losses and biases that balance them, statistics.

Legend: T tokens ([B, S] or any other leading dims), E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fmegatron.collectives import axes, psum
from fmegatron.layout import Layout
from fmegatron.nn.random import normal, uniform
from fmegatron.tree import arithmetic

__all__ = ["Router", "Routing", "balanced_bias", "router_entropy", "jittered", "expert_load", "expert_probs", "noisy"]
__all__ += ["router_z_loss", "sequence_balance_loss"]

_SCORES = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """What a router decides.

    gates: [T, K], fp32 or wider, what the result of each chosen expert is multiplied by. experts: [T, K], int64,
    sorted by falling score; -1: none. probs: [T, E], the scores divided by their sum, for losses and statistics.
    """

    gates: Tensor
    experts: Tensor
    probs: Tensor

    def without(self, padding_T: Tensor | None) -> Routing:
        """The same, but padding goes to no expert, takes no room of one and is counted nowhere. None: there is none."""
        if padding_T is None:
            return self
        return self._replace(experts=torch.where(padding_T[..., None], -1, self.experts))


@dataclass(frozen=True)
class Router:
    """Top-k choice among experts. ValueError for sizes that do not fit.

    scores: "softmax" of the logits over the experts (Shazeer et al. 2017, arXiv 1701.06538), or "sigmoid" of each
    (DeepSeek V3, arXiv 2412.19437, equation 15). normalised: gates are divided by their sum (Mixtral, gpt-oss: a
    softmax over the chosen logits). scale: of the gates. groups: experts stand in so many groups of consecutive ones;
    a token chooses among the experts of its best `top_groups`; a group is as good as the sum of its `group_best` best
    scores (DeepSeek V2, arXiv 2405.04434, section 2.1.2: 1; V3: 2).
    """

    experts: int
    top_k: int
    scores: str = "softmax"
    normalised: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1

    def __post_init__(self):
        if self.scores not in _SCORES:
            raise ValueError(f"Router.scores: got {self.scores!r}, wanted one of {', '.join(_SCORES)}")
        if not (isinstance(self.experts, int) and isinstance(self.top_k, int) and 1 <= self.top_k <= self.experts):
            raise ValueError(f"Router.top_k: got {self.top_k} of {self.experts} experts, wanted 1 to {self.experts}")
        if self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"Router.groups: got {self.groups}, wanted a divisor of experts={self.experts}")
        of_group = self.experts // self.groups
        if not (1 <= self.top_groups <= self.groups and self.top_k <= self.top_groups * of_group):
            raise ValueError(
                f"Router.top_groups: got {self.top_groups} of {self.groups} groups with {of_group} experts each, "
                f"wanted at least top_k={self.top_k} experts in them; raise top_groups"
            )
        if not 1 <= self.group_best <= of_group:
            raise ValueError(
                f"Router.group_best: got {self.group_best}, wanted 1 to {of_group}, the experts of a group"
            )

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None = None) -> Routing:
        """`logits[..., E] -> Routing`. bias: is added to the scores for the choice alone; no gradient reaches it.

        Ties are broken in the same way on every mesh: each token is looked at alone.
        """
        logits_TE = logits_TE.to(arithmetic.working_dtype(logits_TE.dtype))
        scores_TE = logits_TE.softmax(-1) if self.scores == "softmax" else logits_TE.sigmoid()
        choice_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E.detach().to(scores_TE.dtype)
        if self.groups > 1:
            choice_TE = torch.where(self._in_best_groups(choice_TE), choice_TE, -torch.inf)
        experts_TK = choice_TE.topk(self.top_k, -1).indices
        gates_TK = scores_TE.gather(-1, experts_TK)
        if self.normalised:
            gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True).clamp(min=1e-20)
        gates_TK = gates_TK * self.scale if self.scale != 1.0 else gates_TK
        sums_T1 = scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)
        return Routing(gates_TK, experts_TK, scores_TE if self.scores == "softmax" else scores_TE / sums_T1)

    def _in_best_groups(self, choice_TE: Tensor) -> Tensor:
        choice_TGX = choice_TE.unflatten(-1, (self.groups, -1))
        best_TG = choice_TGX.topk(self.group_best, -1).values.sum(-1)
        chosen_TL = best_TG.topk(self.top_groups, -1).indices
        allowed_TG = (chosen_TL[..., None] == torch.arange(self.groups, device=chosen_TL.device)).any(-2)
        return allowed_TG[..., None].expand(choice_TGX.shape).flatten(-2)


# ---- noise -----------------------------------------------------------------------------------------------------------
def jittered(x: Tensor, eps: float, *, key: int, count: Tensor, layout: Layout | None = None) -> Tensor:
    """x times numbers from [1 - eps, 1 + eps): on a router's argument (Switch, arXiv 2101.03961, section 2.2).

    Args:
        x: any shape, floating point.
        eps: half the width.
        key: of the numbers, as for `nn.dropout`, and so are the others; the numbers are the same on every mesh.
        count: of the step or of each sample.
        layout: of the full array, where x is a shard of it.
    """
    return x * (1 - eps + 2 * eps * uniform(x, key=key, count=count, layout=layout))


def noisy(logits_TE: Tensor, std: float, *, key: int, count: Tensor, layout: Layout | None = None) -> Tensor:
    """Logits and normal numbers of this standard deviation (Shazeer et al. 2017, equation 4, with a constant width).

    Args:
        logits_TE: any shape, floating point.
        std: standard deviation.
        key: of the numbers, as for `nn.dropout`, and so are the others; the numbers are the same on every mesh.
        count: of the step or of each sample.
        layout: of the full array, where the logits are a shard of it.
    """
    return logits_TE + std * normal(logits_TE, key=key, count=count, layout=layout)


# ---- load and losses -------------------------------------------------------------------------------------------------
def expert_load(experts_TK: Tensor, experts: int, dims: int | None = None) -> Tensor:
    """`experts[..., K] -> counts[E]`, int64: how often this rank's tokens chose each; padding chose none.

    Of tokens that ranks share, a pending sum: psum over their axes makes it the load of all.
    dims: keep so many leading dims.
    """
    chosen = experts_TK[..., None] == torch.arange(experts, device=experts_TK.device)
    return chosen.sum(list(range(dims or 0, chosen.dim() - 1)))


def expert_probs(probs_TE: Tensor, real_T: Tensor | None = None) -> Tensor:
    """The sum over this rank's tokens of their probabilities, [E]: the total of a mean over tokens.

    Switch's balance is `E * (step.mean(expert_probs, tokens) * step.mean(expert_load, K * tokens))`, 1 where all have
    equal shares (arXiv 2101.03961, equations 4 to 6), over the batch (arXiv 2501.11873).
    real_T: bool, which tokens count; None: all.
    """
    return _of_real(probs_TE, real_T).reshape(-1, probs_TE.shape[-1]).sum(0)


def sequence_balance_loss(
    probs_BSE: Tensor, experts_BSK: Tensor, sequence: axes.Axis, real_BS: Tensor | None = None
) -> Tensor:
    """The sum over this rank's tokens of E Σ_e f_e p_e, f of their sequence, for a mean over tokens (DeepSeek V3,
    equations 17-20).

    Args:
        probs_BSE: of this rank's tokens.
        experts_BSK: that they chose; padding chose none (`Routing.without`).
        sequence: the axis over which the sequences are split; size 1 where each rank has full ones.
        real_BS: bool, which tokens count; None: all.
    """
    E, K = probs_BSE.shape[-1], experts_BSK.shape[-1]
    load_BE, S = psum(expert_load(experts_BSK, E, 1), sequence), probs_BSE.shape[1] * sequence.size
    chosen = S * K if real_BS is None else K * psum(real_BS.sum(1, keepdim=True), sequence).clamp(min=1)
    share_BE = load_BE.to(probs_BSE.dtype) / chosen
    return E * (share_BE * _of_real(probs_BSE, real_BS).sum(1)).sum()


def router_z_loss(logits_TE: Tensor, real_T: Tensor | None = None) -> Tensor:
    """The sum over tokens of logsumexp(logits)², for a mean over tokens (ST-MoE, arXiv 2202.08906, equation 5).

    real_T: bool, which tokens count; None: all.
    """
    z_T = logits_TE.to(arithmetic.working_dtype(logits_TE.dtype)).logsumexp(-1).square()
    return (z_T if real_T is None else torch.where(real_T, z_T, 0)).sum()


def _of_real(x_TE: Tensor, real_T: Tensor | None) -> Tensor:
    return x_TE if real_T is None else torch.where(real_T[..., None], x_TE, 0)


def balanced_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """The router's bias for the next step: up by `rate` for experts with less than the mean load, down for the others.

    load_E: of all tokens of the step; leading dims, as of layers, stand for themselves.
    Source: arXiv 2408.15664, algorithm 1 (DeepSeek V3, section 2.1.2).
    """
    missing_E = load_E.to(torch.float64).mean(-1, keepdim=True) - load_E.to(torch.float64)
    return bias_E + rate * missing_E.sign().to(bias_E.dtype)


def router_entropy(probs_TE: Tensor, real_T: Tensor | None = None) -> Tensor:
    """The sum over tokens of -Σ_e p_e ln p_e, for a metric, a mean over tokens: ln E where a token has no preference.

    real_T: bool, which tokens count; None: all.
    """
    probs_TE = probs_TE.detach()
    return -_of_real(torch.special.xlogy(probs_TE, probs_TE), real_T).sum()
