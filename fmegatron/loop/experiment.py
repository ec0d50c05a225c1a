"""An experiment is functions of a config: what is trained, on what data, and how it is evaluated.

    experiment = loop.Experiment(Config, describe, data=read, evaluate=held_out)

    if __name__ == "__main__":
        loop.launch(experiment)

`experiment(config)` trains, in notebooks too; `experiment.prepare(config)` makes the run and what it reads, and writes
nothing; `python -m fmegatron.check`, `plan` and `parity` take the file. `experiments/by_hand.py` shows the parts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmegatron import data, model, step, tree
from fmegatron.collectives import World, connect
from fmegatron.layout import Mesh, mesh
from fmegatron.loop.config import Config, UsageError
from fmegatron.loop.effects import require_axes
from fmegatron.loop.fits import planned_bytes
from fmegatron.loop.flags import set_up
from fmegatron.loop.options import FIELD, Options, Policies
from fmegatron.loop.reading import own_rows
from fmegatron.loop.resume import Settings
from fmegatron.loop.run import Run
from fmegatron.loop.sources import mesh_text
from fmegatron.loop.training import evaluate as evaluated
from fmegatron.step import description
from fmegatron.tree import structure


@dataclass(frozen=True)
class Experiment:
    """The functions of a Config that make an experiment.

    Config: a frozen dataclass with the fields `mesh: Mesh` and `run: loop.Options`, all of them with defaults.
    describe: config -> `step.Description`: the step, the specs of its state, the layouts of its batch.
    data: config -> `data.Source`, such as `data.Batches`: batches of all ranks; the run gives each rank its rows.
    evaluate: config -> {name: held-out batches}, `data.EvaluationBatches`: what `Description.evaluate` makes of each is
        logged as "NAME_loss", every `run.log.eval_every` steps and at the end.
    init: (config, described, world) -> the state of a new run; None: drawn by the specs, of the seed `run.seed`.
    finish: (config, run): after the last step, where the run was not stopped before.
    tokenizer: config -> the tokenizer that checkpoints keep beside a decoder, so that they open without the program.
    policies: what no text can give, such as loggers.

    Raises ValueError for a Config without the two fields.
    """

    Config: type
    describe: Callable[[Config], step.Description]
    data: Callable[[Config], data.Source]
    evaluate: Callable[[Config], Mapping[str, data.EvaluationBatches]] | None = None
    init: Callable[[Config, step.Description, World], structure.Tree] | None = None
    finish: Callable[[Config, Run], Any] | None = None
    tokenizer: Callable[[Config], data.Tokenizer] | None = None
    policies: Policies = Policies()

    def __post_init__(self):
        hints = typing.get_type_hints(self.Config)
        wanted = ("mesh", Mesh, "Mesh = Mesh()"), (FIELD, Options, 'loop.Options = loop.Options("runs/a")')
        for name, kind, text in wanted:
            if hints.get(name) is not kind:
                got = f"{name} of type {hints[name]}" if name in hints else f"the fields {', '.join(hints) or '(none)'}"
                raise ValueError(f"Experiment: {self.Config.__name__}: got {got}, wanted {name}; write {name}: {text}")

    def prepare(self, config: Config = None, world: World | None = None) -> tuple[Run, data.Source]:
        """(the run, what it reads): `for info in run(source, config.run.steps): ...`. Nothing is written.

        config: None: the defaults. world: the ranks, where they are connected already. All ranks call it.
        Raises UsageError for what cannot be meant, for options that can never take effect, and for a step that does
        not fit into the memory of a rank; what `connect` raises.
        """
        config = self.Config() if config is None else config
        options = config.run
        with set_up():
            described = description.require_description(self._described(config), "Experiment")
            require_axes(config.mesh, tree.leaves(tree.layouts((described.state, described.batch))))
            world = _connected(config.mesh) if world is None else world
            source = self.data(config)
            tokenizer = None if self.tokenizer is None else self.tokenizer(config)
            kept = None if described.decoder is None else model.kept(described.decoder, tokenizer)
            held_out = {} if self.evaluate is None else self.evaluate(config)
            faults = options.faults
            skips = faults.nonfinite == "skip" or (faults.spike.factor and faults.spike.then == "skip")
            how = {"backend": options.backend, "overlap": options.overlap}
            donated = () if skips else 0  # what is skipped needs the state of before
            if skips and options.cuda_graph:
                raise UsageError(
                    "--run.cuda_graph: got it with updates that are skipped, which need the state of before, wanted a "
                    "state that is updated in place; leave one out, or skip in the step: optim.skip_nonfinite"
                )
            run = Run(
                options.folder,
                step.jit(described.function, donate=donated, world=world, cuda_graph=options.cuda_graph, **how),
                described,
                world=world,
                settings=Settings(config, kept=kept),
                init=None if self.init is None else functools.partial(self.init, config, described, world),
                evaluate=_evaluations(held_out, described, world, how),
                policies=self.policies,
            )
        on_mesh = functools.partial(self._on_mesh, config)
        run.planned_bytes = planned_bytes(described, world, options.memory, on_mesh, options.overlap)
        return run, source

    def _described(self, config: Config) -> step.Description:
        """`describe`, whose error about an axis that the mesh has a name of its own for is one of the flag."""
        try:
            return self.describe(config)
        except ValueError as error:
            odd = [name for name in config.mesh.names if name not in mesh.STANDARD_AXES and repr(name) in str(error)]
            if not odd:
                raise
            raise UsageError(f"--mesh={mesh_text(config.mesh)}: {error}") from error

    def _on_mesh(self, config: Config, mesh: Mesh) -> step.Description:
        return description.require_description(self.describe(dataclasses.replace(config, mesh=mesh)), "Experiment")

    def __call__(self, config: Config = None, world: World | None = None) -> Run:
        """Train, or go on; evaluate; finish. The run, whose `state` and `metrics` are the last ones."""
        config = self.Config() if config is None else config
        run, source = self.prepare(config, world)
        for _ in run(source, config.run.steps):
            pass
        if not run.stopped:
            run.metrics = run.metrics or run.evaluate()
            if self.finish is not None:
                self.finish(config, run)
        return run


def _connected(mesh: Mesh) -> World:
    """`connect`, whose ValueError is one of the flag."""
    try:
        return connect(mesh)
    except ValueError as error:
        raise UsageError(f"--mesh={mesh_text(mesh)}: {error}") from error


def _evaluations(
    held_out: Mapping[str, data.EvaluationBatches], described: step.Description, world: World, how: Mapping[str, Any]
) -> dict[str, Callable]:
    """{name: state -> metrics}, by the one function of the Description, compiled and checked as the step is.

    how: further arguments of `step.jit`.
    """
    if not held_out:
        return {}
    if described.evaluate is None:
        raise ValueError(
            f"Experiment: evaluate: got {', '.join(held_out)}, and a Description without `evaluate`, wanted one: "
            "(state, batch) -> {name: 0-d tensor}, over symbolic axes"
        )
    metrics_of = step.jit(described.evaluate, world=world, **how)

    def of(batches: data.EvaluationBatches) -> Callable:
        rows = own_rows(batches, described, world)
        return lambda state: evaluated(metrics_of, state, rows, len(batches))

    return {name: of(batches) for name, batches in held_out.items()}


def load_experiment(path: str) -> tuple[type, Callable[[Config], step.Description]]:
    """(Config, describe) of the `experiment` that a file defines, or of a file of parts that defines these two.

    Config: a dataclass with a field `mesh`. describe: config -> `step.Description`, over symbolic axes.
    Raises ValueError for a file that has neither, and what its import raises.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"load_experiment: got {path!r}, wanted a Python file; give the path of an experiment")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    found = vars(module)
    if isinstance(found.get("experiment"), Experiment):
        return found["experiment"].Config, found["experiment"].describe
    if "Config" in found and "describe" in found:
        return found["Config"], found["describe"]
    raise ValueError(
        "load_experiment: got a file that defines no experiment, wanted experiment = loop.Experiment(Config, describe, "
        "data), or a Config with a mesh and describe(config) -> step.Description; see experiments/shakespeare.py"
    )
