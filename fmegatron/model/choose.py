"""How the next token is chosen from logits: penalties, cuts of the tail, and a draw, each a pure function.

Legend: B sequences, V vocabulary. A token that a cut removes has the logit -inf; at least one is left in every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """How a token is chosen, in this order: repetition penalty, temperature, top-k, top-p, min-p, draw.

    temperature: divides the logits; 0 takes the best token. top_k: the best so many stay; None: all. top_p: the
    smallest set of tokens with this probability stays. min_p: tokens stay that have at least this share of the
    probability of the best. repetition_penalty: logits of tokens that the row has are divided by it, or multiplied
    where they are negative; 1: no penalty. ValueError for values that cannot be meant.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        whole = self.top_k is None or isinstance(self.top_k, int) and not isinstance(self.top_k, bool)
        for name, right, wanted in (
            ("temperature", 0 <= self.temperature < float("inf"), ">= 0 (0 is greedy)"),
            ("top_k", whole and (self.top_k is None or self.top_k >= 1), "None or a whole number of at least 1"),
            ("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 <= min_p <= 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "a number above 0"),
        ):
            if not right:
                raise ValueError(f"Choice.{name}: got {getattr(self, name)!r}, wanted {wanted}")


class ChoiceFields(TypedDict, total=False):
    """The fields of `Choice`, as functions take them by name."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float


def choose(logits_BV: Tensor, uniform_B: Tensor | None, how: Choice, seen_BV: Tensor | None = None) -> Tensor:
    """A token id a row, int64 [B]: a function of its arguments and nothing else.

    Args:
        logits_BV: of the vocabulary, not of its padding.
        uniform_B: a number from [0, 1) for each row; None at temperature 0.
        how: the settings.
        seen_BV: bool, which tokens the row has; needed for a repetition penalty.
    """
    if how.repetition_penalty != 1 and seen_BV is not None:
        logits_BV = repetition_penalty(logits_BV, seen_BV, how.repetition_penalty)
    if how.temperature == 0 or uniform_B is None:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.double() / how.temperature
    if how.top_k is not None:
        logits_BV = top_k(logits_BV, how.top_k)
    if how.top_p < 1:
        logits_BV = top_p(logits_BV, how.top_p)
    if how.min_p > 0:
        logits_BV = min_p(logits_BV, how.min_p)
    return draw(logits_BV, uniform_B)


def repetition_penalty(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Logits of tokens that were seen, divided by the penalty where they are positive, multiplied where negative.

    Source: Keskar et al. 2019, arXiv 1909.05858, section 4.1; negative logits as in later implementations.
    """
    punished_BV = torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
    return torch.where(seen_BV, punished_BV, logits_BV)


def top_k(logits_BV: Tensor, k: int) -> Tensor:
    """Only the k best, and those equal to the last of them. Source: Fan et al. 2018, arXiv 1805.04833, section 5.4."""
    worst_B1 = logits_BV.topk(min(k, logits_BV.shape[-1]), -1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < worst_B1, -torch.inf)


def top_p(logits_BV: Tensor, p: float) -> Tensor:
    """Only the shortest prefix of the tokens, by falling probability (equal ones by id), with a mass of at least p.

    Source: Holtzman et al. 2019, arXiv 1904.09751, section 3.1.
    """
    p_BV, id_BV = torch.sort(logits_BV.double().softmax(-1), dim=-1, descending=True, stable=True)
    before_BV = p_BV.cumsum(-1) - p_BV  # mass of the better tokens: below p until the set is full
    out_BV = torch.empty_like(logits_BV, dtype=torch.bool).scatter(-1, id_BV, before_BV >= p)
    return logits_BV.masked_fill(out_BV, -torch.inf)


def min_p(logits_BV: Tensor, p: float) -> Tensor:
    """Only tokens with at least the share p of the best one's probability. Source: arXiv 2407.01082, section 3."""
    p_BV = logits_BV.double().softmax(-1)
    return logits_BV.masked_fill(p_BV < p * p_BV.amax(-1, keepdim=True), -torch.inf)


def draw(logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token at which the cumulative probability, by id, passes `uniform` (from [0, 1)): int64 [B]."""
    p_BV = logits_BV.double().softmax(-1)
    upto_BV = p_BV.cumsum(-1)
    token_B1 = (upto_BV <= uniform_B.to(upto_BV)[:, None] * upto_BV[:, -1:]).sum(-1, keepdim=True)
    # rounding must not step over the last token that there is
    last_B1 = p_BV.shape[-1] - 1 - (p_BV > 0).flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    return token_B1.minimum(last_B1).squeeze(-1)


def seen_in(texts: Sequence[Tensor], vocab_size: int, device: torch.device) -> Tensor:
    """bool [B, V]: which tokens each row has."""
    seen = torch.zeros(len(texts), vocab_size, dtype=torch.bool)
    for row, text in zip(seen, texts, strict=True):
        row[text] = True
    return seen.to(device)
