"""Run: a training run in a folder, resumed where it stopped, logged, saved, evaluated and closed.

run = loop.Run("runs/a", train_step, described, world=world, settings=config, evaluate=held_out_loss)
for info in run(batches, steps=1000):
    ...  # code of one's own after each step, or pass

It is made of public parts (`checkpoint.claim`, `Manager`, `Settings`, `train`, `Loggers`, `catch`), each of which can
be used alone; `experiments/by_hand.py` shows such a loop.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fmegatron import checkpoint, model, tree
from fmegatron.collectives import Axes, World
from fmegatron.data import Source
from fmegatron.files import disk
from fmegatron.layout import Layout
from fmegatron.loop.arguments import check_hashes, check_loggers, check_policies
from fmegatron.loop.attempt import running
from fmegatron.loop.effects import require_effects, require_in_length
from fmegatron.loop.faults.inject import Injection
from fmegatron.loop.faults.pulse import Patience
from fmegatron.loop.hardware import Peak
from fmegatron.loop.options import MOVED, Options, Policies
from fmegatron.loop.reading import reading_of
from fmegatron.loop.resume import Settings
from fmegatron.loop.services import loggers_of
from fmegatron.loop.signals import is_interactive
from fmegatron.loop.training import StepInfo
from fmegatron.loop.windows import windows
from fmegatron.model import counts, sample
from fmegatron.step import Description
from fmegatron.tree import structure


@dataclasses.dataclass(frozen=True)
class _NoConfig:
    """The Config of a run that has none."""


def _names_what_moved(init: Callable) -> Callable:
    """`Run.__init__`, whose TypeError for an argument of before 2026-11 names where it is now."""

    @functools.wraps(init)
    def named(self, *given, **by_name):
        for name in by_name:
            if name in MOVED and name not in ("run", "steps", "allow", "backend", "every"):
                raise TypeError(f"Run: got {name}=, wanted it in another place: {_place(MOVED[name])}")
        init(self, *given, **by_name)

    return named


def _place(path: str) -> str:
    """`save.every` -> `options=loop.Options(save=loop.Save(every=...)), or the flag --run.save.every`."""
    if path == "folder":
        return "folder, the first argument"
    *groups, last = path.split(".")
    text, flag = f"{last}=...", f", or the flag --run.{path}"
    if groups[:1] != ["policies"]:
        groups, flag = ["options", *groups], flag if last not in ("local", "spike", "stuck", "restart", "until") else ""
    else:
        flag = ""
    for group in reversed(groups):
        text = f"{group}=loop.{group.capitalize()}({text})"
    return text + flag


class Run:
    """A run of `step(state, batch) -> (state, metrics)` in a folder; called with data, it trains.

    The folder holds `checkpoints/`, `metrics.jsonl`, `events.jsonl` and `config.json`, and `python -m
    fmegatron.report` makes a page of it. A run that is there goes on behind its newest
    good checkpoint, on any mesh; a second process is refused as long as the first one runs.

    Args:
        folder: of the run.
        step: the training step, usually jitted.
        specs: tree of ArraySpecs of the state: its layouts, its initial values, and the strategy by which rows of
            batches are given to ranks; or the `step.Description`, which has the number of microbatches and the decoder,
            too.
        world: the ranks; None for one process.
        settings: `Settings`, or the Config dataclass itself: what a resumed run is compared with. What the batches
            state (`describe()`: digest of the data, tokenizer, order, blend, seed) is compared in any case, as the fact
            "data".
        init: makes the state of a new run, on the device of the world; default `tree.init(specs, options.seed, ...)`.
        evaluate: state -> metrics, every `options.log.eval_every` steps and at the end; several by name: `{"wiki": ...,
            "code": ...}`, whose metrics are logged as "wiki_loss".
        options: when something is logged, saved, and done about faults, and of which seed the initial values are; None:
            the field `run` of the Config in `settings`, where it is `Options`, else the defaults. Of it `folder`,
            `steps` and `backend` are for who makes the run, calls it, and jits the step.
        policies: what no text can give: loggers of one's own.

    Attributes:
        start: updates that the state had seen when this process began; 0 for a new run.
        state: the newest state; from `step` with a donated state, valid until the next step.
        metrics: of the last evaluation; without `evaluate`, those of the last step that was logged.
        stopped: whether a signal, or `options.until`, ended the run before its last step.
        planned_bytes: memory of a rank in a step, as it was planned: printed beside what the first step took; None: not
            known. An `Experiment` has it planned.
        manager: the `checkpoint.Manager` of `checkpoints/`.
        described: the `step.Description`, None where only specs were given.

    Raises:
        ValueError: for arguments of another kind. TypeError: for arguments of before 2026-11, naming where they are
        now. UsageError: for an option that can never take effect, when it is called also for one that cannot in a run
        of this length, and for settings that must not change; after the first update for one that names a metric
        which there is not.
    """

    @_names_what_moved
    def __init__(
        self,
        folder: str | Path,
        step: Callable[[Any, Any], tuple[Any, dict]],
        specs: structure.Tree | Description,
        *,
        world: World | None = None,
        settings: Settings | Any | None = None,
        init: Callable[[], structure.Tree] | None = None,
        evaluate: Callable[[Any], Mapping[str, float]] | Mapping[str, Callable] | None = None,
        options: Options | None = None,
        policies: Policies | None = None,
    ):
        self._given, self.described = specs, specs if isinstance(specs, Description) else None
        described = self.described
        self.microbatches = 1 if described is None else described.microbatches
        specs = specs.state if isinstance(specs, Description) else specs
        layouts: list[Layout] = tree.leaves(tree.layouts(specs))
        if not layouts:
            raise ValueError("Run: specs: got a tree without leaves, wanted the ArraySpecs of the state")
        check_policies(
            world=(world, World, "connect(mesh)"),
            options=(options, Options, "Options(steps=1000)"),
            policies=(policies, Policies, "Policies(loggers=[logger])"),
        )
        settings = _NoConfig() if settings is None else settings
        self.settings = settings if isinstance(settings, Settings) else Settings(settings)
        self.options = options = options or self.settings.options or Options()
        self.policies = policies = policies or Policies()
        self.world = World.alone() if world is None else world
        self.mesh = layouts[0].mesh
        self.mesh.require_same(self.world.mesh, "Run", "the specs", "the world")
        self.folder, self.step, self.specs = Path(folder), step, specs
        self.init = init or (lambda: tree.init(specs, options.seed, self.world.rank, self.world.device))
        self.evaluations = _by_name(evaluate)
        log, save, faults = options.log, options.save, options.faults
        where, on_failure = self.folder / "checkpoints", save.on_failure or "warn"
        self.manager = checkpoint.Manager(where, save.kept(), world=self.world, on_failure=on_failure)
        self.local = save.local.replicas(self.folder, self.world)
        self.profile, self.inject = windows(log.profile), Injection.parse(faults.inject)
        self.peak = None if log.peak_flops is None else Peak(log.peak_flops, "given")
        self.loggers = (*loggers_of(log.to, self.folder), *check_loggers(policies.loggers))
        self.flops_per_token = log.flops_per_token or _flops(described)
        self.planned_bytes = options.memory.planned_bytes
        self.spike, self.stuck, self.restart = (
            of if on else None
            for of, on in (
                (faults.spike, faults.spike.factor),
                (faults.stuck, faults.stuck.updates),
                (faults.restart, faults.restart.most),
            )
        )
        self.patience = _patience(faults.patience, self.world.size)
        self.hash_every = check_hashes(faults.hash_every, layouts, self.world.size)
        goes_on = self.manager.latest() is not None or disk.is_there(str(self.folder / "injected"))
        known = bool(self.evaluations), self.flops_per_token is not None
        require_effects(options, self.world.size, goes_on, *known)
        self.start, self.stopped, self.began = 0, False, time.monotonic()
        self.state: Any = None
        self.metrics: dict[str, float] = {}

    def __repr__(self) -> str:
        at = "not begun" if self.state is None else f"begun at step {self.start}{', stopped' * self.stopped}"
        return f"Run({str(self.folder)!r}, rank {self.world.rank} of {self.mesh}): {at}; {self.manager!r}"

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
        reading = reading_of(batches, self._given, self.world, batch_sizes, skip)
        length = reading.length(steps, samples, tokens)
        require_in_length(self.options, reading.steps(length))
        return running(self, reading, length)

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

    def inference(self) -> sample.Inference:
        """The decoder of the newest state, ready to write: `model.generate(run.inference(), prompts, 100)`. All ranks.

        Raises ValueError for a run whose step is not that of a decoder.
        """
        if self.described is None or self.described.decoder is None:
            raise ValueError(
                "Run.inference: got a step of another model, wanted that of a decoder: a Description with `decoder`, "
                "as model.build makes it"
            )
        axes = Axes(self.mesh, self.world if self.world.size > 1 else None)
        return model.inference(self.state.params, self.described.decoder, axes)


def _by_name(evaluate: Any) -> dict[str, Callable]:
    if evaluate is None:
        return {}
    found = dict(evaluate) if isinstance(evaluate, Mapping) else {"": evaluate}
    for name, one in found.items():
        if not callable(one):
            raise ValueError(f"Run: evaluate: {name}: got {one!r:.60}, wanted a function of the state")
    return found


def _flops(described: Description | None) -> float | None:
    """FLOPs per token, forward and backward, where the step is that of a decoder."""
    if described is None or described.decoder is None:
        return None
    shape = tree.leaves(tree.layouts(described.batch))[0].shape
    return counts.flops_per_token(described.decoder, shape[1])["total"]


def _patience(text: str, ranks: int) -> Patience | None:
    """Limits of a text; of none: the default for several ranks, nothing for one and in notebooks."""
    if text == "off" or not text and (ranks == 1 or is_interactive()):
        return None
    return Patience.parse(text)
