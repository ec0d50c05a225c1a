"""Metrics from the device to Python floats: one transfer, and only when they are read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def fetch(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A flat dict of 0-d tensors (or numbers) as floats, by one host synchronisation for all values together.

    Raises ValueError, naming the metric, for what is no dict, and for values that are not one number.

    >>> fetch({"loss": torch.tensor(1.5), "step": 3})
    {'loss': 1.5, 'step': 3.0}
    """
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise ValueError(
            f"metrics: got {metrics!r:.60} ({kind}), wanted a dict of numbers by name; a step returns (state, metrics),"
            " and {} where it has none"
        )
    tensors = {name: value for name, value in metrics.items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        if value.numel() != 1:
            raise ValueError(
                f"metric {name!r}: got shape {tuple(value.shape)}, wanted one number; reduce it in the step"
            )
    values = {}
    if tensors:
        # float64, so that step counts and token counts survive beside losses.
        stacked = torch.stack([value.detach().reshape(()).double() for value in tensors.values()])
        values = dict(zip(tensors, stacked.tolist(), strict=True))
    return {name: values[name] if name in values else _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"metric {name!r}: got {value!r:.60} ({type(value).__name__}), wanted one number; leave it out of what the"
            " step returns, or make it a 0-d tensor"
        ) from None


def mean(many: Sequence[Mapping[str, Any]], weights: Sequence[float] | None = None) -> dict[str, Any]:
    """The (weighted) mean of each metric over several dicts of the same names, in float64, still on the device.

    >>> float(mean([{"loss": 1.0}, {"loss": 4.0}], weights=[2, 1])["loss"])
    2.0
    """
    if not many:
        raise ValueError("got no metrics to average, wanted at least one dict")
    weights = [1.0] * len(many) if weights is None else weights
    total = float(sum(weights))
    return {
        name: torch.stack(
            [torch.as_tensor(metrics[name]).detach().double() * w for metrics, w in zip(many, weights, strict=True)]
        ).sum()
        / total
        for name in many[0]
    }
