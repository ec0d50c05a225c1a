"""Run: a training run in a directory, resumed where it stopped, logged, saved, evaluated and closed.

run = loop.Run("runs/a", train_step, state_specs, world=world, settings=settings, evaluate=held_out_loss)
for info in run(batches, steps=1000):
    ...  # code of one's own after each step, or pass

It is made of public parts (`checkpoint.claim`, `Manager`, `Settings`, `train`, `Log`, `catch`), each of which can be
used alone; `experiments/by_hand.py` shows such a loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fmegatron import checkpoint, tree
from fmegatron.collectives import World
from fmegatron.data import RankBatches, StepBatches
from fmegatron.layout import DataParallel, Layout
from fmegatron.loop.loggers import JsonLines, Log, Table, progress
from fmegatron.loop.resume import Settings
from fmegatron.loop.signals import catch
from fmegatron.loop.startup import startup
from fmegatron.loop.train import StepInfo, train
from fmegatron.step import Declared


@dataclasses.dataclass(frozen=True)
class _NoConfig:
    """The Config of a run that has none."""


class Run:
    """A run of `step(state, batch) -> (state, metrics)` in a directory; called with data, it trains.

    The directory holds `checkpoints/`, `metrics.jsonl` and `config.json`. A run that is there goes on behind its newest
    good checkpoint, on any mesh; a second process is refused as long as the first one runs.

    Args:
        directory: of the run.
        step: the training step, usually jitted.
        specs: tree of ArraySpecs of the state: its layouts, and its initial values.
        world: the ranks; None for one process.
        settings: `Settings`, or the Config dataclass itself (its field `allow`, if it has one, names changes that are
            not refused): what a resumed run is compared with. None: nothing is compared.
        key: of the initial values.
        init: makes the state of a new run, on the device of the world; default `tree.init(specs, key, ...)`.
        evaluate: state -> metrics, every `eval_every` steps and at the end.
        log_every, eval_every, save_every: steps.
        keep: checkpoints that stay (`checkpoint.Manager`).
        async_save: train on while a checkpoint is written.
        loggers: more of them, beside the table on stdout and `metrics.jsonl`.
        flops_per_token: for what is printed at the beginning.
        on_nonfinite: as in `train`.

    Attributes:
        start: updates that the state had seen when this process began; 0 for a new run.
        state: the newest state; from `step` with a donated state, valid until the next step.
        metrics: of the last evaluation; without `evaluate`, those of the last step that was logged.
        stopped: whether a signal ended the run before its last step.
        manager: the `checkpoint.Manager` of `checkpoints/`.

    Raises:
        ValueError: for arguments of another kind. UsageError, when it is called, for settings that must not change.
    """

    def __init__(
        self,
        directory: str | Path,
        step: Callable[[Any, Any], tuple[Any, dict]],
        specs: tree.Tree,
        *,
        world: World | None = None,
        settings: Settings | Any | None = None,
        key: int = 0,
        init: Callable[[], tree.Tree] | None = None,
        evaluate: Callable[[Any], Mapping[str, float]] | None = None,
        log_every: int = 10,
        eval_every: int = 100,
        save_every: int = 100,
        keep: int | checkpoint.Keep | None = 2,
        async_save: bool = False,
        loggers: Sequence[Any] = (),
        flops_per_token: float | None = None,
        on_nonfinite: str = "raise",
    ):
        for name, value in (("log_every", log_every), ("eval_every", eval_every), ("save_every", save_every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Run: {name}: got {value!r:.60}, wanted a whole number of at least 1")
        layouts = tree.leaves(tree.layouts(specs))
        if not layouts:
            raise ValueError("Run: specs: got a tree without leaves, wanted the ArraySpecs of the state")
        self.world = World.alone() if world is None else world
        self.mesh = layouts[0].mesh
        self.mesh.require_same(self.world.mesh, "Run", "the specs", "the world")
        self.directory, self.step, self.specs = Path(directory), step, specs
        self.manager = checkpoint.Manager(self.directory / "checkpoints", keep, world=self.world)
        self.settings = settings if isinstance(settings, Settings) else _settings(settings)
        self.log_every, self.eval_every, self.save_every = log_every, eval_every, save_every
        self.async_save, self.loggers, self.on_nonfinite = async_save, tuple(loggers), on_nonfinite
        self._init = init or (lambda: tree.init(specs, key, self.world.rank, self.world.device))
        self._evaluate, self._flops = evaluate, flops_per_token
        self.start, self.state, self.stopped = 0, None, False
        self.metrics: dict[str, float] = {}

    def __repr__(self) -> str:
        at = "not begun" if self.state is None else f"begun at step {self.start}{', stopped' * self.stopped}"
        return f"Run({str(self.directory)!r}, rank {self.world.rank} of {self.mesh}): {at}; {self.manager!r}"

    def __call__(self, batches: StepBatches | RankBatches | Callable[[int], Any], steps: int) -> Iterator[StepInfo]:
        """Train until `steps` updates are done, yielding a StepInfo after each.

        What is yielded has been logged, saved and evaluated where it was due. A loop that is left early ends the run:
        with one rank its pending saves are finished, with several they are given up, as the others may go on.

        Args:
            batches: `data.Batches` (rows are given to ranks as the step declares), one rank's part of them
                (`for_rank`), or a function from position to this rank's batch.
            steps: updates in all, those of earlier processes included.

        Raises:
            ValueError: for batches whose rows belong elsewhere than the step declares; what `train` raises.
        """
        return self._train(_rows_of(batches, self.step, self.mesh, self.world), steps)

    def _train(self, batches: RankBatches | Callable[[int], Any], steps: int) -> Iterator[StepInfo]:
        world, lead = self.world, self.world.rank == 0
        with ExitStack() as open_:
            claim = open_.enter_context(checkpoint.claim(self.directory, world=world))
            begun = self.settings.begin(self.manager, self.specs, self._init)
            self.start, self.state = begun.step, begun.state
            batch_at, samples, tokens = _from(batches, begun.samples, begun.step)
            if lead:
                self.settings.write(self.directory / "config.json")
                if isinstance(batches, RankBatches):
                    print(self._startup(batches, steps), flush=True)
            records = JsonLines(self.directory / "metrics.jsonl", after=self.start, mesh=str(self.mesh))
            log = open_.enter_context(Log(Table(), records, *self.loggers, active=lead))
            stop = open_.enter_context(catch())
            manager = open_.enter_context(self.manager)
            if self.start and self._evaluate is not None:
                self.metrics = dict(self._evaluate(self.state))
                log(self.start, {f"resumed_{name}": value for name, value in self.metrics.items()})
            infos = train(
                self.step,
                self.state,
                batch_at,
                steps=steps,
                start=self.start,
                log_every=self.log_every,
                tokens_per_step=tokens,
                stop=stop,
                world=world,
                on_nonfinite=self.on_nonfinite,
            )
            try:
                for info in progress(infos, steps, active=lead):
                    self.state, self.stopped = info.state, info.stopping
                    if info.metrics:
                        log(info.step, info.record())
                        if self._evaluate is None:
                            self.metrics = dict(info.metrics)
                    if info.last or info.step % self.save_every == 0:
                        claim.check()
                        known = self.settings.metadata(samples(info.step))
                        wait = info.last or not self.async_save
                        manager.save(info.step, info.state, self.specs, known, finite=info.finite(), wait=wait)
                    for report in manager.poll():
                        log(report.step, report.record())
                    if self._evaluate is not None and (info.last or info.step % self.eval_every == 0):
                        self.metrics = dict(self._evaluate(info.state))
                        log(info.step, self.metrics)
                    yield info
                    if info.stopping and lead:
                        print(f"stopped after step {info.step}; the same command goes on from there", flush=True)
            except GeneratorExit:  # the caller has left the loop: not an error of this rank
                manager.close(wait=world.size == 1)
                raise

    def _startup(self, batches: RankBatches, steps: int) -> str:
        of, parts = batches.batches, _declared(self.step)
        return startup(
            tree.layouts(getattr(self.specs, "params", self.specs)),
            of.batch_size,
            of.seq_len,
            steps,
            self.start,
            batches.layout.shard_counts[0],
            microbatches=1 if parts is None else parts.microbatches,
            sequence_ranks=batches.layout.shard_counts[1],
            flops_per_token=self._flops,
        )


def _settings(config: Any) -> Settings:
    config = _NoConfig() if config is None else config
    return Settings(config, allow=getattr(config, "allow", ()))


def _declared(step: Any) -> Declared | None:
    found = getattr(step, "declared", None)
    return found if isinstance(found, Declared) else None


def _rows_of(batches: Any, step: Any, mesh: Any, world: World) -> RankBatches | Callable[[int], Any]:
    """One rank's part of the batches, by the layout that the step declares for its batch."""
    if isinstance(batches, StepBatches):
        declared = _declared(step)
        if declared is not None and isinstance(declared.batch, DataParallel):
            layout = batches.layout(mesh, declared.batch, declared.microbatches)
        elif mesh.size == 1:
            layout = Layout((batches.batch_size, batches.seq_len), torch.int64, mesh)
        else:
            raise ValueError(
                "Run: batches: got data.Batches and a step that does not declare which rows a rank needs, wanted one "
                "of step.build_train_step, or the part of a rank: batches.for_rank(layout, world.rank, world.device)"
            )
        return batches.for_rank(layout, world.rank, world.device)
    if not isinstance(batches, RankBatches) and not callable(batches):
        raise ValueError(
            f"Run: batches: got {tree.in_words(batches)}, wanted data.Batches, or a function from position to a batch"
        )
    return batches


def _from(
    batches: Any, samples: int | None, step: int
) -> tuple[Callable[[int], Any], Callable[[int], int | None], int]:
    """(position -> batch, updates -> samples seen, tokens per step) of data that goes on behind these samples."""
    if not isinstance(batches, RankBatches) or not isinstance(batches.batches, StepBatches):
        at = batches.at if isinstance(batches, RankBatches) else batches
        return at, lambda step: None, 0
    of = batches.batches.after(samples, step)
    return dataclasses.replace(batches, batches=of).at, of.samples, of.batch_size * of.seq_len
