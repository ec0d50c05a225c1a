"""Retention: which steps of a run may be deleted, and the metrics that it goes by. Pure: values in, steps out."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from fmegatron.checkpoint.calls.arguments import check_words


@dataclass(frozen=True)
class Keep:
    """Which complete steps a Manager keeps: those that any of the rules wants. At least one rule is needed.

    last: the n newest.  every: steps that k divides, for ever.  best: (metric, "min" or "max", n): the n best by
    `metadata["metrics"][metric]`; equals: the newer one.  newer_than_s: all that were saved within so many seconds.

    The newest step is always kept, the newest good one (its manifest is readable, and its save did not
    report that loss or gradient norm were not finite), and steps that are pinned, read, or being written.

    >>> Keep(last=2, every=1000, best=("heldout_loss", "min", 3))
    Keep(last=2, every=1000, best=('heldout_loss', 'min', 3), newer_than_s=None)
    """

    last: int | None = None
    every: int | None = None
    best: tuple[str, str, int] | None = None
    newer_than_s: float | None = None

    def __post_init__(self):
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is not None and not is_count(value):
                raise ValueError(f"Keep.{name}: got {value!r}, wanted a whole number of at least 1, or None")
        if self.best is not None:
            match self.best:
                case (str(), "min" | "max", n) if is_count(n):
                    pass
                case _:
                    raise ValueError(
                        f'Keep.best: got {self.best!r}, wanted (metric, "min" or "max", number of steps),'
                        ' e.g. ("heldout_loss", "min", 3)'
                    )
        age = self.newer_than_s
        if age is not None and (isinstance(age, bool) or not isinstance(age, numbers.Real) or not age > 0):
            raise ValueError(f"Keep.newer_than_s: got {age!r}, wanted seconds above 0, or None")
        if self.last is self.every is self.best is self.newer_than_s is None:
            raise ValueError("Keep: got no rule, wanted at least one, e.g. last=2; to keep all steps, pass keep=None")


@dataclass(frozen=True)
class Saved:
    """What retention knows of a complete step. saved_at: seconds since 1970, None if that is not known."""

    step: int
    saved_at: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)


def to_delete(
    saved: Sequence[Saved], keep: Keep | None, protected: Collection[int] = (), now: float = math.inf
) -> list[int]:
    """The steps that no rule wants, rising. `protected` steps and the newest are never among them; `now` as `saved_at`.

    A step whose time is not known, or is in the future, counts as new; one without the metric, or with one that is
    not finite, is not among the best.

    >>> to_delete([Saved(step) for step in (100, 200, 250, 300, 350)], Keep(last=2, every=200))
    [100, 250]
    """
    if keep is None or not saved:
        return []
    newest_first = sorted(saved, key=lambda s: s.step, reverse=True)
    kept = {newest_first[0].step, *protected}
    if keep.last is not None:
        kept.update(s.step for s in newest_first[: keep.last])
    if keep.every is not None:
        kept.update(s.step for s in saved if s.step % keep.every == 0)
    if keep.best is not None:
        metric, mode, count = keep.best
        rated = [(value, s.step) for s in newest_first if _is_number(value := s.metrics.get(metric))]
        rated.sort(key=lambda pair: pair[0] if mode == "min" else -pair[0])  # stable: of equals, the newer first
        kept.update(step for _, step in rated[:count])
    if keep.newer_than_s is not None:
        kept.update(s.step for s in saved if s.saved_at is None or now - s.saved_at < keep.newer_than_s)
    return sorted({s.step for s in saved} - kept)


def with_metrics(metadata: dict[str, Any] | None, metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """Metadata that holds the metrics under "metrics"; numbers that are not finite become null, as JSON has none.

    >>> with_metrics({"note": "warm-up"}, {"loss": float("nan")})
    {'note': 'warm-up', 'metrics': {'loss': None}}
    """
    if metrics is None:
        return metadata or {}
    check_words(metadata, None)
    if "metrics" in (metadata or {}):
        raise ValueError(
            'Manager.save: got metrics= and metadata["metrics"], wanted one of them; pass them in one place'
        )
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics: got {metrics!r:.60}, wanted a dict of numbers; pass {{'heldout_loss': 1.7}}")
    values = {}
    for name, value in metrics.items():
        try:
            values[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"metrics[{name!r}]: got {value!r:.60}, wanted a number; leave it out") from None
    return {**(metadata or {}), "metrics": {name: v if math.isfinite(v) else None for name, v in values.items()}}


def is_count(value: object) -> bool:
    """Whether this is a whole number, of any library, of at least 1."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
