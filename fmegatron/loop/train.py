"""The loop, a generator: it updates the state and tells what happened; what to do about it is the caller's code.

for info in train(step, state, batch_at, steps=1000, start=done, tokens_per_step=tokens, stop=stop, world=world):
    if info.metrics:
        log(info.step, info.record())
    if info.step % 100 == 0 or info.last:
        manager.save(info.step, info.state, layouts, world, wait=info.last)
    for report in manager.poll():
        log(report.step, report.record())
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fmegatron.loop.metrics import fetch, mean
from fmegatron.loop.signals import Stop


@dataclass(frozen=True)
class StepInfo:
    """What one step left behind.

    step: number of updates that `state` has seen. last: no further step follows. stopping: last because of a signal.
    metrics: floats at log points, else empty. seconds (per step) and tokens_per_second (all ranks): means since the
    log point before, without the caller's own time; 0.0 between log points.
    state: valid until the next step when the step donates its state, so save or copy it now.
    """

    step: int
    state: Any
    metrics: dict[str, float]
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    last: bool = False
    stopping: bool = False

    def record(self) -> dict[str, float]:
        """Metrics and speed in one flat dict, as loggers want it."""
        speed = {"tokens_per_second": self.tokens_per_second} if self.tokens_per_second else {}
        return {**self.metrics, "seconds": self.seconds, **speed}


def train(
    step: Callable[[Any, Any], tuple[Any, dict]],
    state: Any,
    batch_at: Callable[[int], Any],
    *,
    steps: int,
    start: int = 0,
    log_every: int = 10,
    tokens_per_step: int = 0,
    stop: Stop | None = None,
    world=None,
) -> Iterator[StepInfo]:
    """Run updates start + 1 .. steps of `step(state, batch) -> (state, metrics)`, yielding a StepInfo after each.

    batch_at: position -> batch; update n reads position n - 1, so a resumed run reads what the first would have read.
    log_every: steps between log points, the only places where the host waits for the device. The first update (it
    compiles) and the last are log points too, so that later means are of steps that only ran.
    stop, world: the run ends after a step at which any rank was asked to stop (`signals.catch`).
    Raises ValueError for log_every < 1; yields nothing when start >= steps.
    """
    if log_every < 1:
        raise ValueError(f"log_every: got {log_every}, wanted 1 or more")
    seconds, counted = 0.0, 0
    for number in range(start + 1, steps + 1):
        began = time.perf_counter()
        state, metrics = step(state, batch_at(number - 1))
        stopping = stop is not None and stop.agreed(world)
        last = stopping or number == steps
        logs = last or number == start + 1 or number % log_every == 0
        values = fetch(metrics) if logs else {}
        seconds, counted = seconds + time.perf_counter() - began, counted + 1
        if logs:
            each = seconds / counted
            yield StepInfo(number, state, values, each, tokens_per_step / each, last, stopping)
            seconds, counted = 0.0, 0
        else:
            yield StepInfo(number, state, values)
        if stopping:
            return


def evaluate(
    metrics_of: Callable[[Any, Any], dict],
    params: Any,
    batch_at: Callable[[int], Any],
    count: int,
    weight_of: Callable[[int], float] | None = None,
) -> dict[str, float]:
    """Means of the metrics of `metrics_of(params, batch)` over batches 0 .. count - 1.

    weight_of: the weight of a batch, such as its number of tokens (`EvaluationBatches.real_tokens`); None: all alike.
    One host synchronisation, at the end. Raises ValueError for count < 1.
    """
    if count < 1:
        raise ValueError(f"evaluate: got {count} batches, wanted 1 or more; is the held-out text shorter than a batch?")
    weights = None if weight_of is None else [weight_of(index) for index in range(count)]
    return fetch(mean([metrics_of(params, batch_at(index)) for index in range(count)], weights))
