"""What a step sets by a rule and not by a gradient: the biases with which experts are chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmegatron import nn
from fmegatron.model.decoder import Decoder
from fmegatron.model.moe import MoE

__all__ = ["loads", "settled"]


def _moved(decoder: Decoder) -> dict[str, dict[str, float]]:
    """{stack: {part: rate}} of the biases that a step moves."""
    found: dict[str, dict[str, float]] = {}
    for name, stack in decoder.stacks.items():
        for part in decoder.block(stack.depths[0]):
            rates = {_rate(p.mixer) for d in stack.depths for p in decoder.block(d) if p.name == part.name}
            if len(rates) > 1:
                raise ValueError(
                    f"MoE.bias_rate: got {sorted(rates)} in the blocks of one stack ({name!r}), wanted one rate; give "
                    "all blocks with equal arrays the same"
                )
            if rate := rates.pop():
                found.setdefault(name, {})[part.name] = rate
    return found


def _rate(mixer: Any) -> float:
    return mixer.bias_rate if isinstance(mixer, MoE) else 0.0


def loads(statistics: list[dict], decoder: Decoder) -> dict[str, dict[str, Tensor]]:
    """{stack: {part: int64 [L, E]}}: the loads by which `settled` moves biases; empty for a model without any.

    statistics: of each block, those of its parts.
    """
    return {
        name: {part: torch.stack([statistics[depth][part]["load"] for depth in decoder.stacks[name].depths])
               for part in parts}
        for name, parts in _moved(decoder).items()
    }  # fmt: skip


def settled(params: dict, metrics: dict, decoder: Decoder) -> tuple[dict, dict]:
    """(parameters with the biases of the next step, metrics without the loads): `build_train_step(settle=...)`.

        settle = functools.partial(model.settled, decoder=decoder)
        train_step = step.build_train_step(loss_fn, optimizer, layouts, axes, settle=settle)

    Of each router with a `MoE.bias_rate`, by `nn.balanced_bias` of the loads of all tokens of the step, which
    `model.loss` gives as the metric "load".

    Args:
        params: this rank's shards; every rank has these biases in full.
        metrics: of `model.loss`, summed over microbatches.
        decoder: the model.

    Raises ValueError for metrics without the loads.
    """
    metrics, params = dict(metrics), dict(params)
    moved, found = _moved(decoder), metrics.pop("load", {})
    if moved and not found:
        raise ValueError(
            "settled: got metrics without 'load', wanted those of model.loss for this decoder; return them from loss_fn"
        )
    for name, parts in moved.items():
        for part, rate in parts.items():
            weights = params[name][part]
            bias_LE = nn.balanced_bias(weights["choice_bias"], found[name][part], rate)
            params[name] = {**params[name], part: {**weights, "choice_bias": bias_LE}}
    return params, metrics
