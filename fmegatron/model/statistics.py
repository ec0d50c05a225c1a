"""What mixers count of their tokens, as parts of the loss and as metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fmegatron import step
from fmegatron.model.decoder import Block

__all__ = ["counted", "learned", "losses_of", "padding_of", "without_labels_of_padding"]


def padding_of(batch: Mapping[str, Tensor]) -> Tensor | None:
    """bool [B, S], where a batch has no token: its "padding", and where its documents are below 0; None: nowhere."""
    padding_BS, documents_BS = batch.get("padding"), batch.get("documents")
    if padding_BS is not None and padding_BS.dtype != torch.bool:
        raise ValueError(f"batch['padding']: got {padding_BS.dtype}, wanted bool, True where there is no token")
    if documents_BS is None:
        return padding_BS
    return documents_BS < 0 if padding_BS is None else padding_BS | (documents_BS < 0)


def without_labels_of_padding(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with labels of -100 where it has no token, so that nothing depends on what stands there."""
    padding_BS = padding_of(batch)
    if padding_BS is None:
        return dict(batch)
    return {**batch, "labels": torch.where(padding_BS, -100, batch["labels"])}


def learned(labels: Tensor, mask: Tensor | None) -> Tensor:
    """By how much each token is learned from: its mask, or 1; 0 where its label is below 0. Bool where the mask is."""
    known = labels >= 0
    if mask is None or mask.dtype == torch.bool:
        return known if mask is None else known & mask
    return torch.where(known, mask, 0)


def losses_of(
    blocks: Sequence[Block], statistics: Sequence[dict[str, dict[str, Tensor]]], tokens: Tensor | int
) -> dict[str, step.Part]:
    """{name: part} of what all mixers add to the loss (`Mixer.losses`), those of equal names as one."""
    found: dict[str, list[step.Part]] = {}
    for block, of_block in zip(blocks, statistics, strict=True):
        for part in block:
            given = of_block.get(part.name, {})
            if "loss" in given:
                raise ValueError(
                    f"{type(part.mixer).__name__} of the part {part.name!r}: got a statistic 'loss', wanted its total "
                    "under another name, and a method losses(statistics, tokens) that gives {name: weight * "
                    "step.mean(total, tokens)}"
                )
            for name, one in part.mixer.losses(given, tokens).items():
                found.setdefault(name, []).append(one)
    return {name: _together(name, parts) for name, parts in found.items()}


def _together(name: str, parts: Sequence[step.Part]) -> step.Part:
    """The sum of means of one count: of scalars their totals are added, of those with a mean as a weight stacked."""
    if len(parts) == 1:
        return parts[0]
    means = [[w for w in part.weights if isinstance(w, step.Part)] for part in parts]
    same = all(_count_of(part) == _count_of(parts[0]) and part.over == parts[0].over for part in parts)
    if not same or len(set(map(len, means))) > 1:
        raise ValueError(
            f"part {name!r}: got means of several blocks with other counts, axes or weights, wanted one count, that of "
            "the tokens, and as many means among the weights; give them other names"
        )
    numbers = [math.prod(w for w in part.weights if not isinstance(w, step.Part)) for part in parts]
    totals, factor = [part.total for part in parts], numbers[0]
    if len(set(numbers)) > 1:
        totals, factor = [total * number for total, number in zip(totals, numbers, strict=True)], 1.0
    whole = torch.stack(totals)
    one = factor * step.mean(whole if means[0] else whole.sum(0), parts[0].count, parts[0].over)
    for of_all in zip(*means, strict=True):
        one = one * step.mean(torch.stack([w.total for w in of_all]), of_all[0].count, of_all[0].over)
    return one


def _count_of(part: step.Part) -> Any:
    """A number, or which tensor it is."""
    return id(part.count) if isinstance(part.count, Tensor) else part.count


def counted(statistics: Sequence[dict[str, dict[str, Tensor]]], tokens: Tensor | int) -> dict[str, Any]:
    """Metrics of the blocks' statistics: "imbalance", the largest load of an expert over the mean, of a microbatch with
    tokens; "router_entropy", of all blocks the mean; "overflow" and "dropped", sums."""
    found = [one for block in statistics for one in block.values()]
    metrics: dict[str, Any] = {}
    if loads := [one["load"].double() for one in found if "load" in one]:
        mean_L = torch.stack([load.mean() for load in loads])
        ratio_L = torch.stack([load.max() for load in loads]) / mean_L.clamp(min=1e-30)
        any_tokens = (mean_L > 0).any()  # else the microbatch is padding, and none of its numbers is a load
        metrics["imbalance"] = step.mean(ratio_L.max(), any_tokens.to(torch.int64), over=())
    if entropies := [one["entropy"] for one in found if "entropy" in one]:
        metrics["router_entropy"] = step.mean(torch.stack(entropies).sum(), tokens * len(entropies))
    for name in ("overflow", "dropped"):
        if counts := [one[name] for one in found if name in one]:
            metrics[name] = torch.stack(counts).sum()
    return metrics
