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
from pathlib import Path
from typing import Any

from fmegatron import checkpoint, tree
from fmegatron.collectives import World
from fmegatron.data import Source
from fmegatron.loop.arguments import check_hashes, check_injections, check_loggers, check_policies, check_windows
from fmegatron.loop.attempt import running
from fmegatron.loop.faults import Injection, Patience
from fmegatron.loop.hardware import Peak
from fmegatron.loop.losses import LossSpike, LossStuck, check_action
from fmegatron.loop.reading import reading_of
from fmegatron.loop.restart import Restart
from fmegatron.loop.resume import Settings
from fmegatron.loop.signals import is_interactive
from fmegatron.loop.train import StepInfo
from fmegatron.loop.until import Until
from fmegatron.loop.windows import windows
from fmegatron.step import Description


@dataclasses.dataclass(frozen=True)
class _NoConfig:
    """The Config of a run that has none."""


class Run:
    """A run of `step(state, batch) -> (state, metrics)` in a directory; called with data, it trains.

    The directory holds `checkpoints/`, `metrics.jsonl`, `events.jsonl` and `config.json`, and `python -m
    fmegatron.report` makes a page of it. A run that is there goes on behind its newest
    good checkpoint, on any mesh; a second process is refused as long as the first one runs.

    Args:
        directory: of the run.
        step: the training step, usually jitted.
        specs: tree of ArraySpecs of the state: its layouts, its initial values, and the strategy by which rows of
            batches are given to ranks; or the `step.Description`, which has the number of microbatches, too.
        world: the ranks; None for one process.
        settings: `Settings`, or the Config dataclass itself (its field `allow`, if it has one, names changes that are
            not refused): what a resumed run is compared with. What the batches state (`describe()`: digest
            of the data, tokenizer, order, blend, seed) is compared in any case, as the fact "data".
        key: of the initial values.
        init: makes the state of a new run, on the device of the world; default `tree.init(specs, key, ...)`.
        evaluate: state -> metrics, every `eval_every` steps and at the end; several by name: `{"wiki": ..., "code":
            ...}`, whose metrics are logged as "wiki_loss".
        log_every, eval_every, save_every: steps.
        keep: checkpoints that stay (`checkpoint.Manager`).
        async_save: train on while a checkpoint is written.
        loggers: more of them, beside the table on stdout and `metrics.jsonl`.
        flops_per_token, planned_bytes: for what is printed at the beginning; the first also for MFU, the latter is
            memory of a rank.
        peak: FLOP/s of one device, which MFU is relative to (`loop.Peak`); None: `loop.peak_of`.
        profile: steps that a profiler observes: "trace:steps=10-12,rank=0" (`windows.py`).
        on_nonfinite, spike, stuck: as in `train`; "roll back" goes back to the newest good checkpoint from before, and
            leaves the data of the bad updates out.
        on_failed_save: "raise", or "warn" and go on (the last save raises in any case); None: "raise" for a save that
            is waited for, "warn" for one in the background.
        patience: how long a rank may take before it counts as hanging (`Patience`); then all ends with status 75.
            Default (True): `Patience()` for several ranks, nothing for one and in notebooks. None: nothing.
        restart: restarts in the process after an exception, and how often in a row any restart may get no further.
            None: none; an exception ends the run.
        local: where nodes keep each other's states (`checkpoint.LocalReplicas`), every `local_every` steps; a restart
            prefers them to older checkpoints.
        until: why a run may end before its last step.
        signals: what further signals ask for (`catch`).
        inject: faults that are to happen (`faults.Injection`), for trying out what a run does.
        hash_every: steps between comparisons of what ranks hold replicas of, bit by bit; None: none.
        on_difference: what follows on a difference: "raise", "roll back" or "rerun".
        deterministic: the same bits in every process of a machine (`loop.deterministic`), while it is called.
        straggler_ratio: at log points the work, wait and data times of all ranks go into `ranks.jsonl`, and a rank that
            takes so many times the median is warned of; None: not.

    Attributes:
        start: updates that the state had seen when this process began; 0 for a new run.
        state: the newest state; from `step` with a donated state, valid until the next step.
        metrics: of the last evaluation; without `evaluate`, those of the last step that was logged.
        stopped: whether a signal, or `until`, ended the run before its last step.
        manager: the `checkpoint.Manager` of `checkpoints/`.

    Raises:
        ValueError: for arguments of another kind. UsageError, when it is called, for settings that must not change.
    """

    def __init__(
        self,
        directory: str | Path,
        step: Callable[[Any, Any], tuple[Any, dict]],
        specs: tree.Tree | Description,
        *,
        world: World | None = None,
        settings: Settings | Any | None = None,
        key: int = 0,
        init: Callable[[], tree.Tree] | None = None,
        evaluate: Callable[[Any], Mapping[str, float]] | Mapping[str, Callable] | None = None,
        log_every: int = 10,
        eval_every: int = 100,
        save_every: int = 100,
        keep: int | checkpoint.Keep | None = 2,
        async_save: bool = False,
        loggers: Sequence[Any] = (),
        flops_per_token: float | None = None,
        planned_bytes: float | None = None,
        peak: Peak | None = None,
        profile: str = "",
        on_nonfinite: str = "raise",
        spike: LossSpike | None = None,
        stuck: LossStuck | None = None,
        on_failed_save: str | None = None,
        patience: Patience | bool | None = True,
        restart: Restart | None = None,
        local: checkpoint.LocalReplicas | None = None,
        local_every: int = 10,
        until: Until | None = None,
        signals: Mapping[str, str] | None = None,
        inject: str | tuple[Injection, ...] = (),
        hash_every: int | None = None,
        on_difference: str = "raise",
        straggler_ratio: float | None = 1.5,
        deterministic: bool = False,
    ):
        counts = {"log_every": log_every, "eval_every": eval_every, "save_every": save_every}
        counts |= {"local_every": local_every} | ({} if hash_every is None else {"hash_every": hash_every})
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Run: {name}: got {value!r:.60}, wanted a whole number of at least 1")
        self.described = specs
        self.microbatches = specs.microbatches if isinstance(specs, Description) else 1
        specs = specs.state if isinstance(specs, Description) else specs
        layouts = tree.leaves(tree.layouts(specs))
        if not layouts:
            raise ValueError("Run: specs: got a tree without leaves, wanted the ArraySpecs of the state")
        check_action("Run: on_nonfinite", on_nonfinite)
        check_policies(
            world=(world, World, "connect(mesh)"),
            spike=(spike, LossSpike, "LossSpike(factor=3.0)"),
            stuck=(stuck, LossStuck, "LossStuck(updates=1000)"),
            patience=(None if isinstance(patience, bool) else patience, Patience, "Patience(step=300)"),
            restart=(restart, Restart, "Restart(most=3)"),
            local=(local, checkpoint.LocalReplicas, "LocalReplicas(folder, world=world)"),
            until=(until, Until, "Until(hours=11.5)"),
            peak=(peak, Peak, "Peak(989e12, 'dense bf16 of an H100')"),
        )
        if on_difference not in ("raise", "roll back", "rerun"):
            raise ValueError(f"Run: on_difference: got {on_difference!r:.60}, wanted 'raise', 'roll back' or 'rerun'")
        for name, value in {"async_save": async_save, "deterministic": deterministic}.items():
            if not isinstance(value, bool):
                raise ValueError(f"Run: {name}: got {value!r:.60}, wanted True or False")
        number = isinstance(straggler_ratio, int | float) and not isinstance(straggler_ratio, bool)
        if straggler_ratio is not None and not (number and straggler_ratio >= 1):
            raise ValueError(f"Run: straggler_ratio: got {straggler_ratio!r:.60}, wanted 1 or more, or None")
        if on_failed_save not in ("raise", "warn", None):
            raise ValueError(f"Run: on_failed_save: got {on_failed_save!r:.60}, wanted 'raise', 'warn' or None")
        self.world = World.alone() if world is None else world
        self.mesh = layouts[0].mesh
        self.mesh.require_same(self.world.mesh, "Run", "the specs", "the world")
        self.directory, self.step, self.specs = Path(directory), step, specs
        in_background = "warn" if on_failed_save is None else on_failed_save
        where = self.directory / "checkpoints"
        self.manager = checkpoint.Manager(where, keep, world=self.world, on_failure=in_background)
        self.settings = settings if isinstance(settings, Settings) else _settings(settings)
        self.log_every, self.eval_every, self.save_every = log_every, eval_every, save_every
        self.async_save, self.loggers, self.on_nonfinite = async_save, check_loggers(loggers), on_nonfinite
        self.spike, self.stuck, self.on_failed_save = spike, stuck, on_failed_save or "raise"
        if patience is True:
            patience = Patience() if self.world.size > 1 and not is_interactive() else None
        self.patience = patience or None
        self.restart, self.local, self.local_every = restart, local, local_every
        self.hash_every = check_hashes(hash_every, layouts, self.world.size)
        self.on_difference, self.straggler_ratio = on_difference, straggler_ratio
        self.until, self.signals, self.deterministic = until or Until(), signals, deterministic
        self.init = init or (lambda: tree.init(specs, key, self.world.rank, self.world.device))
        self.evaluations = _by_name(evaluate)
        self.inject = check_injections(inject, self.world.size, bool(self.evaluations))
        self.flops_per_token, self.planned_bytes = flops_per_token, planned_bytes
        self.peak, self.profile = peak, check_windows(windows(profile), self.world.size)
        self.start, self.state, self.stopped = 0, None, False
        self.metrics: dict[str, float] = {}

    def __repr__(self) -> str:
        at = "not begun" if self.state is None else f"begun at step {self.start}{', stopped' * self.stopped}"
        return f"Run({str(self.directory)!r}, rank {self.world.rank} of {self.mesh}): {at}; {self.manager!r}"

    def __call__(
        self,
        batches: Source,
        steps: int | None = None,
        *,
        samples: int | None = None,
        tokens: int | None = None,
        batch_sizes: Sequence[tuple[int, int]] = (),
        skip: Sequence[tuple[int, int]] = (),
    ) -> Iterator[StepInfo]:
        """Train until `steps` updates are done, yielding a StepInfo after each.

        What is yielded has been logged, saved and evaluated where it was due. A loop that is left early ends the run:
        with one rank its pending saves are finished, with several they are given up, as the others may go on.

        Args:
            batches: a `data.Source` of the batches of all ranks: `data.Batches` and their like, a subclass of one's
                own, or `data.source(function)`. The run gives each rank its rows, by the strategy of the specs or by
                the Description's layouts of the batch, puts them on its device and reads ahead. What the source
                states (`describe`) is compared with what the checkpoint states; its `state` is in every checkpoint.
            steps: updates in all, those of earlier processes included.
            samples, tokens: the length of the run in their place, for `data.Batches`; the last batch is a full one.
            batch_sizes: (updates after which it holds, batch size), for `data.Batches`: ((0, 16), (200, 32)). The step
                is compiled once for each size.
            skip: ranges (start, stop) of samples that are left out; of positions, where the source is one's own.

        Raises:
            ValueError: for what is no source, batches that the ranks cannot share evenly, and arrays that are not those
                of the Description; for a checkpoint whose state of the source is of other rows; what `train` raises.
        """
        reading = reading_of(batches, self.described, self.world, batch_sizes, skip)
        return running(self, reading, reading.length(steps, samples, tokens))

    def evaluate(self) -> dict[str, float]:
        """The metrics of all evaluations of the state."""
        found = {}
        for name, evaluate in self.evaluations.items():
            got = evaluate(self.state)
            if not isinstance(got, Mapping):
                what = f"evaluate{name and f'[{name!r}]'}"
                raise ValueError(
                    f"Run: {what}: got {got!r:.60}, wanted a mapping of name to number; return {{'loss': x}}"
                )
            found.update({f"{name}_{key}" if name else key: value for key, value in got.items()})
        return found


def _by_name(evaluate: Any) -> dict[str, Callable]:
    if evaluate is None:
        return {}
    found = dict(evaluate) if isinstance(evaluate, Mapping) else {"": evaluate}
    for name, one in found.items():
        if not callable(one):
            raise ValueError(f"Run: evaluate: {name}: got {one!r:.60}, wanted a function of the state")
    return found


def _settings(config: Any) -> Settings:
    config = _NoConfig() if config is None else config
    return Settings(config, allow=getattr(config, "allow", ()))
