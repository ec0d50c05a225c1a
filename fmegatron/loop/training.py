"""The training loop as a generator: it updates the state and yields what happened; the caller's code reacts.

for info in train(step, state, source, steps=1000, start=done, tokens_per_step=tokens, stop=stop, world=world):
    if info.metrics:
        log(info.step, info.record())
    if info.step % 100 == 0 or info.last:
        manager.save(info.step, info.state, layouts, wait=info.last)
    for report in manager.poll():
        log(report.step, report.record())
"""

import contextlib
import numbers
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fmegatron.collectives import World
from fmegatron.data import Source, contract
from fmegatron.data.reader import ahead
from fmegatron.loop.faults.inject import Injector
from fmegatron.loop.faults.pulse import Pulse
from fmegatron.loop.losses import BadLoss
from fmegatron.loop.metrics import fetch, mean
from fmegatron.loop.nonfinite import broken, look
from fmegatron.loop.signals import Stop
from fmegatron.loop.verdicts import Verdicts
from fmegatron.step import State
from fmegatron.tree import structure


@dataclass(frozen=True)
class StepInfo:
    """What one step left behind.

    step: number of updates that `state` has seen. last: no further step follows. stopping: last because of a signal.
    metrics: floats at log points, else empty. seconds (per step) and tokens_per_second (all ranks): means since the
    log point before, without the caller's own time; 0.0 between log points.
    state: valid until the next step when the step donates its state, so save or copy it now. Behind a Ctrl-C inside of
    `train`, `step` and `state` of the last info are those of the newest living state; a jitted step has it as `.last`.
    tensors: the metrics of every step, as the step returned them, still on the device.
    save: a signal asked for a checkpoint now (`catch`), on all ranks after the same step.
    waited: seconds per step that it waited for its batch, in the mean since the log point before; 0.0 between them.
    """

    step: int
    state: structure.Tree
    metrics: dict[str, float]
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    last: bool = False
    stopping: bool = False
    tensors: Mapping[str, Any] = field(default_factory=dict, repr=False)
    save: bool = False
    waited: float = 0.0

    def record(self) -> dict[str, float]:
        """Metrics and speed in one flat dict, as loggers want it."""
        speed = {"tokens_per_second": self.tokens_per_second} if self.tokens_per_second else {}
        return {**self.metrics, "seconds": self.seconds, "time_data": self.waited, **speed}

    def finite(self) -> bool:
        """Whether loss and grad_norm of this very step were finite (all metrics, where neither is there), and the state
        that it left, as far as this rank holds it.

        What a save states of itself. The state may be the first to break: the loss of a step is that of the parameters
        before its update. Waits for the device, as a save does, and is to be asked while `state` is valid.
        """
        return not broken(self.metrics or fetch(self.tensors)) and not look(self.state)


def train(
    step: Callable[[structure.Tree, structure.Tree], tuple[structure.Tree, dict]],
    state: structure.Tree,
    source: Source,
    *,
    steps: int,
    start: int = 0,
    log_every: int = 10,
    tokens_per_step: int | Callable[[int], int] = 0,
    stop: Stop | None = None,
    world=None,
    bad: BadLoss = BadLoss(),  # noqa: B008  a frozen value
    pulse: Pulse | None = None,
    inject: Injector | None = None,
) -> Iterator[StepInfo]:
    """Run updates start + 1 .. steps of `step(state, batch) -> (state, metrics)`, yielding a StepInfo after each.

    Yields nothing when start >= steps, and warns when it is above.

    Args:
        step: the compiled step.
        state: after `start` updates.
        source: this rank's batches, a `data.Source`: on one rank any, on several `own_rows(source, description,
            world)`. Update n reads position n - 1, so a resumed run reads what the first would have read. Batches are
            read ahead (`data.ahead`).
        steps: the last update.
        start: updates that `state` has seen.
        log_every: steps between log points, the only places where the host waits for the device. The first update (it
            compiles) and the last are log points too, so that later means are of steps that only ran.
        tokens_per_step: of all ranks, for the tokens per second; a function of the update where they differ.
        stop: the run ends soon after any rank was asked to stop (`signals.catch`), all ranks after the same step: the
            question of step n is answered at step n + 1, so that no rank waits for the others.
        world: the running ranks, None for one.
        bad: what follows on losses that are not finite, too high, or do not move.
        pulse: is kept informed which section of the run this rank is in (`faults.watched`).
        inject: faults that are to happen; one that is "slow" is felt in `inject.slowed(step)`.

    Raises:
        ValueError: settings that make no sense, and what is no source.
    """
    for name, value, least in (("log_every", log_every, 1), ("start", start, 0), ("steps", steps, 0)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise ValueError(f"train: {name}: got {value!r:.60}, wanted a whole number of at least {least}")
    log_every, start, steps = int(log_every), int(start), int(steps)
    contract.require_source(source, "train: source")
    if start > steps and (world is None or world.rank == 0):
        text = (
            f"train: got steps={steps}, but {start} steps are done: nothing is trained; ask for more than {start} steps"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    tokens = tokens_per_step if callable(tokens_per_step) else lambda number: tokens_per_step
    watch = stop or Stop(), Verdicts(bad, world), pulse or Pulse(), inject or Injector()
    return _read_ahead(_Loop(step, start, steps, log_every, tokens, world, *watch), state, source)


@dataclass(frozen=True)
class _Loop:
    """Updates start + 1 .. steps, what is known of each, and who watches them."""

    step: Callable[[structure.Tree, structure.Tree], tuple[structure.Tree, dict]]
    start: int
    steps: int
    log_every: int
    tokens: Callable[[int], int]
    world: World | None
    stop: Stop
    verdicts: Verdicts
    pulse: Pulse
    inject: Injector


def _read_ahead(loop: _Loop, state: structure.Tree, source: Source) -> Iterator[StepInfo]:
    """`_updates`, whose batches are made while the step before runs."""
    with ahead(source) as reader:
        at, before, info, reached = loop.start, 0.0, None, _Reached(loop.start, state)
        try:
            for info in _updates(loop, state, reader, reached):
                if info.metrics:
                    info = replace(info, waited=(reader.waited - before) / (info.step - at))
                    at, before = info.step, reader.waited
                yield info
        except KeyboardInterrupt:
            if info is not None:
                _bring_up(info, reached)
            raise


@dataclass
class _Reached:
    """The newest state, and the updates that it has seen."""

    step: int
    state: structure.Tree


def _bring_up(info: StepInfo, reached: _Reached) -> None:
    """Behind an interrupt: the info that the caller has gets the state that is alive, and the number of its updates.

    An update that was interrupted has been made, in the memory of the state that the caller has (`step.donation`)."""
    step, state = reached.step, reached.state
    if isinstance(state, State):
        with contextlib.suppress(ValueError):  # lost: a read of it reports that
            step += int(state.step) == step + 1
    object.__setattr__(info, "step", step)
    object.__setattr__(info, "state", state)


def _updates(
    loop: _Loop, state: structure.Tree, batch_at: Callable[[int], structure.Tree], reached: _Reached
) -> Iterator[StepInfo]:
    step, world, stop, verdicts, pulse = loop.step, loop.world, loop.stop, loop.verdicts, loop.pulse
    alone = world is None or world.size == 1
    asked = None  # of the step before: its question
    seconds, counted, words = 0.0, 0, 0
    for number in range(loop.start + 1, loop.steps + 1):
        pulse.enter("compile" if number == loop.start + 1 else "step", number)
        began = time.perf_counter()
        batch = batch_at(number - 1)
        loop.inject("step", number, state)
        before, (state, metrics) = state, step(state, batch)
        if verdicts.skips:
            state = verdicts.skip(number, before, state, metrics)
        reached.step, reached.state = number, state
        del before
        stopping, saving, doubt, about = False, False, [False, False], number  # doubt: about that update
        if alone:
            (stopping,), saving = stop.ask()(), stop.saving
        elif asked is not None:
            (stopping, *doubt), saving, about = asked(), stop.saving, number - 1
        last = stopping or number == loop.steps
        logs = last or number == loop.start + 1 or number % loop.log_every == 0
        values, shown = verdicts.see(number, metrics, logs)
        if alone:
            doubt = list(shown)
        else:
            # Every rank asks after every step, so the order of collectives is the same on all, whatever the caller
            # does in between. An answer that is not fetched (the caller leaves the loop, or raises) needs no rank.
            asked = stop.ask(world, *shown)
            if last:
                (late, *others), more = asked(), stop.saving
                stopping, saving = stopping or late, saving or more
                doubt, about = (doubt, about) if any(doubt) else (others, number)
        if any(doubt):
            verdicts.judge(state, number, about, *doubt)
        seconds, counted = seconds + time.perf_counter() - began, counted + 1
        words += loop.tokens(number)
        pulse.enter("caller")
        if logs:
            speed = words / seconds if words else 0.0
            yield StepInfo(number, state, values, seconds / counted, speed, last, stopping, metrics, saving)
            seconds, counted, words = 0.0, 0, 0
        else:
            yield StepInfo(number, state, values, tensors=metrics, save=saving)
        if stopping:
            return


def evaluate(
    metrics_of: Callable[[structure.Tree, structure.Tree], dict], params: structure.Tree, source: Source, count: int
) -> dict[str, float]:
    """Means of the metrics of `metrics_of(params, batch)` over batches 0 .. count - 1.

    A metric NAME beside "NAME/count", as `step.means` gives them, is the mean over all that counts in all batches,
    others are means over batches. One host synchronization, at the end.

    Args:
        metrics_of: (params, batch) -> dict of 0-d tensors.
        params: this rank's shards.
        source: this rank's batches: on several ranks `own_rows(batches, description, world)`.
        count: number of batches, 1 or more (else ValueError, as for what is no source).
    """
    contract.require_source(source, "evaluate: source")
    if count < 1:
        raise ValueError(f"evaluate: got {count} batches, wanted 1 or more; is the held-out text shorter than a batch?")
    return fetch(mean([metrics_of(params, source.at(index)) for index in range(count)]))
