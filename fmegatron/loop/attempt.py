"""What `Run` does when it is called: attempts, one after another, until one ends well, or nothing more is tried."""

from __future__ import annotations

import itertools
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from fmegatron import checkpoint, tree
from fmegatron.loop import doubt
from fmegatron.loop.determinism import deterministic
from fmegatron.loop.effects import named_metrics, require_metrics
from fmegatron.loop.events import Events
from fmegatron.loop.faults.hang import watched
from fmegatron.loop.faults.inject import Injector
from fmegatron.loop.faults.notice import lost_peer
from fmegatron.loop.faults.pulse import Pulse
from fmegatron.loop.loggers import JsonLines, Loggers, Table, progress
from fmegatron.loop.losses import BadLoss, BadLossError, RollBack, RunAgain
from fmegatron.loop.meter import Meter
from fmegatron.loop.metrics import fetch
from fmegatron.loop.onlookers import Onlooker
from fmegatron.loop.reading import Begun, Reading, own_part
from fmegatron.loop.rerun import good_step, rerun
from fmegatron.loop.restart import Restarts, started
from fmegatron.loop.signals import Stop, catch
from fmegatron.loop.startup import memory, startup
from fmegatron.loop.stragglers import Stragglers
from fmegatron.loop.training import StepInfo, train
from fmegatron.loop.windows import Windows
from fmegatron.step import jitted, replicas

MOST_ROLL_BACKS = 10  # of one process


class _Attempts:
    """What lasts from one attempt of a process to the next. finished: updates of the newest StepInfo."""

    def __init__(self, run: Any, reading: Reading, length: tuple[str, int], pulse: Pulse, stop: Stop):
        self.run, self.reading, self.length, self.pulse, self.stop = run, reading, length, pulse, stop
        about = reading.describe()
        self.settings = run.settings if about is None else run.settings.about(data=about)
        self.inject = Injector(run.inject, run.world.rank, run.folder / "injected")
        self.finished, self.began, self.count = 0, False, 0
        self.compared = 0  # the newest update behind which replicas were compared, and equal
        self.judged = False  # whether an attempt began behind a verdict, and has not saved yet
        # The checkpoint that the next attempt begins with; 0: a new run; None: the newest.
        self.back_to: int | None = None
        self.newest = reading.begin(0, 0)  # the data of the newest attempt
        self.skip: tuple[tuple[int, int], ...] = ()
        self.checked = False

    def check_metrics(self, logged: Mapping[str, float]) -> None:
        """Behind the first update of the process: raise for an option that names a metric which there is not.

        Evaluates for it where the name is none of the step's.
        """
        run = self.run
        if self.checked:
            return
        self.checked, names = True, {**logged, **run.metrics}
        if run.evaluations and any(name not in names for _, name in named_metrics(run.options)):
            with _section(self.pulse, "evaluation"):
                names |= run.evaluate()
        require_metrics(run.options, names)


def running(run: Any, reading: Reading, length: tuple[str, int]) -> Iterator[StepInfo]:
    """`Run.__call__`: the claim of the folder, the signals and the watch last as long as the process trains."""
    world, pulse = run.world, Pulse(run.patience, run.world.rank)
    restarts = Restarts(run.restart, world, pulse)
    with ExitStack() as open_:
        open_.enter_context(deterministic(run.options.deterministic))
        size = world.size if run.patience is not None or run.restart is not None else 1
        open_.enter_context(watched(pulse, run.folder, size))
        claim = open_.enter_context(checkpoint.claim(run.folder, world=world))
        stop = open_.enter_context(catch(run.options.until.asked()))
        own = _Attempts(run, reading, length, pulse, stop)
        open_.callback(lambda: pulse.enter("end"))
        while True:
            restarts.listen()
            try:
                yield from _attempt(own, claim)
                return
            except RollBack as back:
                doubt.note(run, back.first, str(back))
                _go_back(own, back)
            except RunAgain as again:
                doubt.note(run, again.first, str(again))
                rerun(run, again, reading, pulse)
            except BadLossError as bad:
                doubt.note(run, bad.first, str(bad))
                raise
            except Exception as error:
                if not restarts.again(error, own.finished, lambda: stop.signal is not None, own.began):
                    raise
                own.began = True  # the same on all ranks
            run.state = None
            if isinstance(run.step, jitted.Jitted):
                run.step.last = None  # its memory is that of the state that is read now


def _attempt(own: _Attempts, claim) -> Iterator[StepInfo]:
    """From the newest state to the end, or to an error."""
    run, pulse, stop, inject = own.run, own.pulse, own.stop, own.inject
    world, lead, first = run.world, run.world.rank == 0, not own.began
    shown, measured = Onlooker("what a run shows of itself"), Onlooker("the meter")
    pulse.enter("setup")
    with ExitStack() as open_:
        inject("setup", 0)
        own.judged = own.back_to is not None
        if not own.judged:
            own.judged, own.back_to = doubt.before(run)
        begun = own.settings.begin(run.manager, run.specs, run.init, local=run.local, step=own.back_to)
        own.back_to, run.start, run.state, own.finished = None, begun.step, begun.state, begun.step
        own.compared = begun.step
        left_out = tuple((a, b) for a, b in begun.metadata.get("skip", ()))
        skip = (*own.skip, *left_out)
        data = own.reading.begin(begun.samples, begun.step, skip, begun.metadata.get("source"))
        steps, own.newest = data.steps(own.length), data
        if first:
            started(run.folder / "starts.json", begun.step, run.restart, world)
        if lead:
            shown(own.settings.write, run.folder / "config.json")
            if first and (text := _startup(run, own.reading, data, steps)):
                shown(print, text, flush=True)
        records = JsonLines(run.folder / "metrics.jsonl", after=run.start, mesh=str(run.mesh))
        loggers = [logger for logger in run.loggers if first or hasattr(logger, "resume")]
        log = open_.enter_context(Loggers(Table(), records, *loggers, active=lead, after=run.start))
        meter = Meter(world.device, world.size, run.flops_per_token, run.peak, active=lead, start=run.start)
        events = open_.enter_context(Events(run.folder / "events.jsonl", active=lead))
        events.started(run.start, mesh=str(run.mesh), device=str(world.device), **meter.about())
        seen = (run.profile if first else (), world.rank, world.device, events, meter.measured_exposed)
        observed = open_.enter_context(Windows(run.folder, *seen))
        manager = open_.enter_context(run.manager)
        if run.start and run.evaluations:
            with _section(pulse, "evaluation"):
                run.metrics = run.evaluate()
            log(run.start, {f"resumed_{name}": value for name, value in run.metrics.items()})
        times, step = None, inject.slowed(observed.around(_told(pulse, data, run.step), run.start))
        if run.options.log.straggler_ratio is not None and world.size > 1:
            times = Stragglers(world, run.folder / "ranks.jsonl", run.options.log.straggler_ratio)
            step = times.timed(step)
            open_.callback(times.close)
        infos = train(
            step,
            run.state,
            data.source,
            steps=steps,
            start=run.start,
            log_every=run.options.log.every,
            tokens_per_step=data.tokens,
            stop=stop,
            world=world,
            bad=BadLoss(run.options.faults.nonfinite, run.spike, run.stuck),
            pulse=pulse,
            inject=inject,
        )
        saves = _Saves(own, claim, data)
        open_.callback(saves.abandon)
        try:
            for info in progress(infos, steps, active=lead):
                run.state, run.stopped, own.finished = info.state, info.stopping, info.step
                own.began = True
                if info.metrics:
                    observed.look()
                    record = measured(meter.record, info) or info.record()
                    with meter.section("log"):
                        log(info.step, record)
                    if times is not None:
                        times.forget() if info.step == run.start + 1 else times.log(info.step, info.waited)
                    if not run.evaluations:
                        run.metrics = dict(info.metrics)
                    own.check_metrics(info.metrics)
                if lead and first and info.step == run.start + 1:
                    shown(print, memory(run.planned_bytes, world.device, info.seconds), flush=True)
                if run.hash_every is not None and (info.step % run.hash_every == 0 or saves.saves(info)):
                    _compare(own, info)  # also before a save: a difference that is saved is none any more
                evaluates = bool(run.evaluations) and (info.last or info.step % run.options.log.eval_every == 0)
                first_evaluates = saves.is_chosen_by_evaluation(info)
                if first_evaluates:
                    _evaluate(own, info, log, meter)
                with meter.section("save"):
                    saves.due(info)
                _record_saves(manager, log, events)
                if evaluates and not first_evaluates:
                    _evaluate(own, info, log, meter)
                if stop.signal is None:
                    known, look = {**info.metrics, **run.metrics}, lead and bool(info.metrics)
                    stop.signal = shown(run.options.until.reached, known, time.monotonic() - run.began, look)
                pulse.enter("caller")
                events.step = info.step
                with meter.section("caller"):
                    yield info
                if info.stopping:
                    events("stopped", info.step, why=stop.signal)
                if info.stopping and lead:
                    why = f", as {stop.signal}" if stop.signal and not stop.signal.startswith("SIG") else ""
                    text = f"stopped after step {info.step}{why}; the same command goes on from there"
                    shown(print, text, flush=True)
        except GeneratorExit:  # the caller has left the loop: not an error of this rank
            manager.close(wait=world.size == 1)
            raise
        pulse.enter("end")
        manager.close()  # finishes the saves in the background that the last one, which is waited for, has overtaken
        _record_saves(manager, log, events)


def _evaluate(own: _Attempts, info: StepInfo, log: Loggers, meter: Meter) -> None:
    """All evaluations, and their record."""
    with _section(own.pulse, "evaluation"), meter.section("evaluation"):
        own.inject("evaluation", info.step, info.state)
        own.run.metrics = own.run.evaluate()
    log(info.step, own.run.metrics)


def _record_saves(manager: checkpoint.Manager, log: Loggers, events: Events) -> None:
    """The saves that have ended, for records and events."""
    for report in manager.poll():
        log(report.step, report.record())
        events("saved", report.step, durable=report.durable, error=report.error, **report.record())


def _startup(run: Any, reading: Reading, data: Begun, steps: int) -> str:
    """`startup`, with a line for each change on the way; "" for data of one's own."""
    if data.course is None:
        return ""
    (_, of), *later = data.course.pieces
    tokens: Any = own_part(of, reading.of, reading.rank).layout  # of tokens: one Layout
    text = startup(
        tree.layouts(getattr(run.specs, "params", run.specs)),
        tokens,
        steps,
        run.start,
        microbatches=run.microbatches,
        flops_per_token=run.flops_per_token,
        in_all=data.all_tokens(steps),
    )
    for first, piece in later:
        begins = piece.samples(first)
        text += f"\n{'':13}from step {first + 1:,} on {piece.batch_size} sequences per step, from sample {begins:,} on"
    return text


def _compare(own: _Attempts, info: StepInfo) -> None:
    """`compare`, and what follows on a difference."""
    run = own.run
    try:
        replicas.compare(info.state, run.specs, run.world, info.step)
        own.compared = info.step
    except replicas.ReplicasDifferError as error:
        first = own.compared + 1
        doubt.note(run, first, str(error))
        if run.options.faults.on_difference == "raise":
            raise
        if run.options.faults.on_difference == "roll back":
            raise RollBack(f"{error}", first, first - 1) from error
        again = RunAgain(f"{error}", first, info.step)
        again.state = info.state
        raise again from error


def _told(pulse: Pulse, data: Begun, step: Callable) -> Callable:
    """The same step; a batch of another size makes it compile again, which may take long."""
    pieces = [] if data.course is None else data.course.pieces
    new = {b[0] for a, b in itertools.pairwise(pieces) if a[1].batch_size != b[1].batch_size}
    positions = itertools.count(data.start)

    def told(state: Any, batch: Any) -> Any:
        if next(positions) in new:
            pulse.enter("compile")
        return step(state, batch)

    return told if new else step


class _Saves:
    """The checkpoints of one attempt, global and local."""

    def __init__(self, own: _Attempts, claim, data: Begun):
        self.own, self.claim, self.data, self.pending = own, claim, data, None

    def whole(self, info: StepInfo) -> bool:
        """Whether a checkpoint is due after this update."""
        return info.last or info.save or info.step % self.own.run.options.save.every == 0

    def near(self, info: StepInfo) -> bool:
        """Whether a local replica is due; what is durable when the save returns needs none."""
        run = self.own.run
        due = run.local is not None and info.step % run.options.save.local.every == 0
        return due and not (self.whole(info) and (info.last or not run.options.save.in_background))

    def saves(self, info: StepInfo) -> bool:
        """Whether anything is saved after this update."""
        return self.whole(info) or self.near(info)

    def is_chosen_by_evaluation(self, info: StepInfo) -> bool:
        """Whether one is due that stays if an evaluation is good: it is made first."""
        best, run = self.own.run.options.save.keep_best, self.own.run
        return best is not None and bool(run.evaluations) and best[0] not in info.tensors and self.whole(info)

    def due(self, info: StepInfo) -> None:
        """Save what is due after this update."""
        own, run = self.own, self.own.run
        whole, near = self.whole(info), self.near(info)
        if self.pending is not None and (self.pending.poll() or near or info.last):
            self.pending = self.pending.result()
        if not (whole or near):
            return
        with _section(own.pulse, "save"):
            if whole:
                self.claim.check()
                own.inject("save", info.step, info.state)
            known = {**own.settings.metadata(self.data.samples(info.step)), "skip": [list(x) for x in self.data.skip]}
            known |= own.reading.written() | self.data.states(info.step, run.world)
            if run.hash_every is not None:
                known["compared"] = own.compared
            finite = info.finite()
            if near and run.local is not None:
                self.pending = run.local.save_async(info.step, info.state, run.specs, known, finite=finite)
            if whole:
                wait = info.last or not run.options.save.in_background
                with self._warned(info):
                    rated = self._rated(info)
                    run.manager.save(info.step, info.state, run.specs, known, metrics=rated, finite=finite, wait=wait)
                    if own.judged:
                        doubt.over(run)
                        own.judged = False
                own.inject("flight", info.step, info.state)

    def abandon(self) -> None:
        """An attempt ends: a replica that does not count yet will not."""
        if self.pending is not None:
            self.pending.abandon()

    def _rated(self, info: StepInfo) -> dict[str, float] | None:
        """By what the best checkpoints are kept: the step's own metric, or that of the evaluation of just now."""
        best = self.own.run.options.save.keep_best
        if best is None:
            return None
        of_step = fetch({best[0]: info.tensors[best[0]]}) if best[0] in info.tensors else self.own.run.metrics
        return {best[0]: of_step[best[0]]}

    @contextmanager
    def _warned(self, info: StepInfo) -> Iterator[None]:
        """Around a save: a warning in place of an error, as `on_failure` states."""
        run = self.own.run
        try:
            yield
        except (RuntimeError, OSError) as error:
            if run.options.save.on_failure != "warn" or info.last or lost_peer(error):
                raise
            if run.world.rank == 0:
                text = f"step {info.step}: the save failed: {error}; training goes on, as on_failure='warn' says"
                warnings.warn(text, RuntimeWarning, stacklevel=3)


@contextmanager
def _section(pulse: Pulse, name: str) -> Iterator[None]:
    pulse.enter(name)
    yield
    pulse.enter("caller")


def _go_back(own: _Attempts, back: RollBack) -> None:
    """All ranks: the next attempt begins at the newest good checkpoint before the bad updates, without their data."""
    run, world = own.run, own.run.world
    own.count += 1
    if own.count > MOST_ROLL_BACKS:
        back.add_note(f"{MOST_ROLL_BACKS} roll backs of this process are behind it: the data are not the cause.")
        raise back
    began = time.monotonic()
    run.manager.close(wait=True)
    own.back_to = good_step(run, back.first)
    text = f"{back}\nrolled back to step {own.back_to} (found in {time.monotonic() - began:.2f} s)"
    if back.last >= back.first:
        left_out = own.newest.of_updates(back.first, back.last)
        own.skip = (*own.skip, left_out)
        what = "positions" if own.newest.course is None else "samples"
        text += f"; {what} {left_out[0]} to {left_out[1] - 1} are left out"
    if run.local is not None:  # they are of what is given up
        shutil.rmtree(run.local.shelf.path, ignore_errors=True)
        world.barrier()
    if world.rank == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
