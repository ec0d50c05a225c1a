"""How an experiment runs: one field of its Config, `run`, of text, numbers and groups of these, each of them a flag.

    @dataclass(frozen=True)
    class Config:
        mesh: Mesh = Mesh()
        run: loop.Options = loop.Options("runs/mine", steps=1000)

    python mine.py --run.steps=2000 --run.save.every=50 --run.faults.spike.factor=4 --run.until.hours=11.5

What no text can give (loggers of one's own) is in `Policies`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import xxhash

from fmegatron import checkpoint
from fmegatron.collectives import World
from fmegatron.loop.config import check, field
from fmegatron.loop.faults.inject import Injection
from fmegatron.loop.faults.pulse import Patience
from fmegatron.loop.losses import LossSpike, LossStuck
from fmegatron.loop.plain import plain
from fmegatron.loop.restart import Restart
from fmegatron.loop.services import check_services
from fmegatron.loop.until import Until
from fmegatron.loop.windows import windows


@dataclass(frozen=True)
class Log:
    """When something is shown, and what observes the run."""

    every: int = field(10, resume="free", least=1)  # steps between two records
    eval_every: int = field(100, resume="free", least=1)  # steps between two evaluations
    profile: str = field("", resume="free")  # steps that a profiler observes: trace:steps=10-12,rank=0
    straggler_ratio: float | None = field(1.5, resume="free", least=1)  # times the median: a rank is slow
    peak_flops: float | None = field(None, resume="free", above=0)  # FLOP/s of a device, for MFU; none: found
    flops_per_token: float | None = field(None, resume="free", above=0)  # of a step, for MFU; none: of the decoder
    to: tuple[str, ...] = field((), resume="free")  # services: tensorboard,wandb,mlflow,opentelemetry, or NAME=PLACE

    def __post_init__(self):
        check(self)
        check_services(self.to)
        windows(self.profile)


@dataclass(frozen=True)
class Memory:
    """What a rank may take: the plan of the step is compared with it before anything is written."""

    plan: Literal["auto", "exact", "off"] = field("auto", resume="free")  # of the step; auto: counted where near
    limit_bytes: float | None = field(None, resume="free", above=0)  # bytes of a rank; none: its device, container
    planned_bytes: float | None = field(None, resume="free", above=0)  # bytes of a rank, by a plan of before; none: now

    __post_init__ = check


@dataclass(frozen=True)
class Local:
    """Where nodes keep each other's states (`checkpoint.LocalReplicas`): preferred to older checkpoints."""

    folder: str = field("", resume="free")  # of this node, on a RAM disk or an SSD; empty: none are kept
    run: str = field("", resume="free")  # the name of the run in it; empty: made of the run's folder
    every: int = field(10, resume="free", least=1)  # steps
    copies: int = field(2, resume="free", least=1)  # nodes that hold each shard
    keep: int = field(1, resume="free", least=1)  # newest steps that stay
    durable: bool = field(True, resume="free")  # whether a save waits for the disk

    __post_init__ = check

    def replicas(self, folder: Path, world: World) -> checkpoint.LocalReplicas | None:
        """Those of a run in `folder`; None where none are kept."""
        if not self.folder:
            return None
        whole = os.path.abspath(folder)
        name, digest = os.path.basename(whole)[:60], xxhash.xxh3_64(whole.encode()).hexdigest()
        made = f"{re.sub('[^A-Za-z0-9_-]', '_', name)}-{digest}"
        how = {"copies": self.copies, "keep": self.keep, "durable": self.durable}
        return checkpoint.LocalReplicas(self.folder, self.run or made, world, **how)


@dataclass(frozen=True)
class Save:
    """When the state is saved, and which checkpoints stay: those that any of the rules of `checkpoint.Keep` wants."""

    every: int = field(100, resume="free", least=1)  # steps between two checkpoints
    keep: int | None = field(2, resume="free")  # the newest checkpoints stay; none without other rules: all
    keep_every: int | None = field(None, resume="free")  # steps: those that it divides stay for ever
    keep_best: tuple[str, str, int] | None = field(None, resume="free")  # metric,min or max,number: the best stay
    keep_newer_s: float | None = field(None, resume="free")  # seconds: what was saved within them stays
    in_background: bool = field(False, resume="free")  # train on while a checkpoint is written
    on_failure: Literal["raise", "warn"] | None = field(None, resume="free")  # none: warn of one in the background
    local: Local = field(Local(), resume="free")

    def __post_init__(self):
        check(self)
        self.kept()

    def kept(self) -> checkpoint.Keep | None:
        """The rules, as a Manager has them; None: all stay."""
        rules = self.keep, self.keep_every, self.keep_best, self.keep_newer_s
        if rules == (None,) * 4:
            return None
        try:
            return checkpoint.Keep(*rules)
        except ValueError as error:
            own = {"Keep.last": "keep", "Keep.every": "keep_every", "Keep.best": "keep_best"}
            own["Keep.newer_than_s"] = "keep_newer_s"
            name, colon, text = str(error).partition(": ")
            raise ValueError(f"Save.{own[name]}: {text}" if colon and name in own else str(error)) from None


@dataclass(frozen=True)
class Faults:
    """What happens when something goes wrong, or is to go wrong."""

    nonfinite: Literal["raise", "warn", "skip", "roll back", "rerun"] = field("raise", resume="free")  # loss or norm
    on_difference: Literal["raise", "roll back", "rerun"] = field("raise", resume="free")  # of replicas
    hash_every: int | None = field(None, resume="free", least=1)  # steps between comparisons of replicas, bit by bit
    inject: str = field("", resume="free")  # faults that are to happen, such as kill:rank=1,step=17
    patience: str = field("", resume="free")  # seconds until a rank hangs: step=300,save=900; off
    spike: LossSpike = field(LossSpike(0.0), resume="free")
    stuck: LossStuck = field(LossStuck(0), resume="free")
    restart: Restart = field(Restart(0), resume="free")

    def __post_init__(self):
        check(self)
        Injection.parse(self.inject)
        if self.patience != "off":
            Patience.parse(self.patience)


@dataclass(frozen=True)
class Options:
    """How a run goes: folder, length, seed, memory, and when something is shown, saved, and done about faults."""

    folder: str = field("runs/run", resume="free", least=1)  # checkpoints and metrics; a run that is there is resumed
    steps: int = field(500, resume="named", least=1)  # updates in all, those before a resume included
    seed: int = field(0, resume="refused")  # of the initial values and the order of the data
    allow: tuple[str, ...] = field((), resume="free")  # fields and facts that may differ from the run that is resumed
    backend: Literal["inductor", "compile", "aot_eager", "eager"] = field("inductor", resume="named")  # of step.jit
    overlap: bool = field(True, resume="named")  # collectives run beside computation; false: the order of the graph
    cuda_graph: bool = field(False, resume="free")  # a step is launched as one graph of CUDA, from the third on
    deterministic: bool = field(False, resume="named")  # the same bits in every process of a machine
    log: Log = field(Log(), resume="free")
    memory: Memory = field(Memory(), resume="free")
    save: Save = field(Save(), resume="free")
    faults: Faults = field(Faults(), resume="free")
    until: Until = field(Until(), resume="free")

    __post_init__ = check


@dataclass(frozen=True)
class Policies:
    """What code gives a run, and no text can.

    loggers: objects with write(step, values) and close(), beside the table on stdout, `metrics.jsonl` and the services
        of `Log.to`.
    """

    loggers: Sequence[Any] = ()


# ---- where things were before ----------------------------------------------------------------------------------------
# Names of arguments of Run, and of fields of Configs, up to 2026-11; now in `Options`, or in `Policies`.
MOVED: Mapping[str, str] = MappingProxyType(
    {
        "run": "folder",
        "directory": "folder",
        "steps": "steps",
        "seed": "seed",
        "key": "seed",
        "allow": "allow",
        "backend": "backend",
        "deterministic": "deterministic",
        "log_every": "log.every",
        "eval_every": "log.eval_every",
        "profile": "log.profile",
        "straggler_ratio": "log.straggler_ratio",
        "peak": "log.peak_flops",
        "every": "save.every",
        "save_every": "save.every",
        "keep": "save.keep",
        "async_save": "save.in_background",
        "on_failed_save": "save.on_failure",
        "local": "save.local",
        "local_every": "save.local.every",
        "on_nonfinite": "faults.nonfinite",
        "on_difference": "faults.on_difference",
        "hash_every": "faults.hash_every",
        "inject": "faults.inject",
        "patience": "faults.patience",
        "spike": "faults.spike",
        "stuck": "faults.stuck",
        "restart": "faults.restart",
        "until": "until",
        "signals": "until.signals",
        "loggers": "policies.loggers",
        "flops_per_token": "log.flops_per_token",
        "planned_bytes": "memory.planned_bytes",
    }
)
FIELD = "run"  # the field of a Config that has its Options


def options_of(config: Any) -> Options | None:
    """The field `run` of a Config, where it is Options; else None."""
    if dataclasses.is_dataclass(config) and FIELD in {item.name for item in dataclasses.fields(config)}:
        found = config.run  # pyright: ignore[reportAttributeAccessIssue]  a field of this Config
        return found if isinstance(found, Options) else None
    return None


def of_before(values: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The values of a config.json, those of a run before 2026-11 as a Config with Options has them.

    Then `run` was the folder, and steps, save_every and the like were fields beside it. What it does not state was the
    default. Values of other files, and for Configs without Options, stay what they are.
    """
    if options_of(config) is None or isinstance(values.get(FIELD), Mapping):
        return dict(values)
    own = {item.name for item in dataclasses.fields(config)} - {FIELD}
    found, run = {}, plain(Options())
    for name, value in values.items():
        place = MOVED.get(name, "policies")
        if name in own or place.startswith("policies"):
            found[name] = value
            continue
        table = run
        *groups, last = place.split(".")
        for group in groups:
            table = table[group]
        table[last] = value
    return {**found, FIELD: run}
