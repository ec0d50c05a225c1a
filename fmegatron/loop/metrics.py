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


def mean(many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each metric over several dicts of the same names, in float64, still on the device.

    Of a metric NAME beside "NAME/count", as `step.means` gives them, the mean over all that counts, and the sum of the
    counts. NaN where nothing does.

    >>> found = mean([{"loss": 1.0, "loss/count": 2, "lr": 0.5}, {"loss": 4.0, "loss/count": 1, "lr": 0.5}])
    >>> {name: float(value) for name, value in found.items()}
    {'loss': 2.0, 'loss/count': 3.0, 'lr': 0.5}
    """
    if not many:
        raise ValueError("got no metrics to average, wanted at least one dict")
    found: dict[str, torch.Tensor] = {}
    for name in many[0]:
        values = _stacked(name, many)
        if name.endswith(COUNT) and name.removesuffix(COUNT) in many[0]:
            found[name] = values.sum()
        elif f"{name}{COUNT}" in many[0]:
            counts = _stacked(f"{name}{COUNT}", many)
            found[name] = torch.where(counts != 0, values * counts, 0).sum() / counts.sum()
        else:
            found[name] = values.mean()
    return found


COUNT = "/count"  # behind the name of a mean: how much counted


def _stacked(name: str, many: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(metrics[name]).detach().double() for metrics in many])
