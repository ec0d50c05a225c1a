"""How far it is from an experiment to its maths, as the stack has it: files to open, and calls to follow.

Counted are all functions of the package and of the experiment that are on the stack, from the step (for bytes on disk:
from the call of the experiment) to the line in question.
"""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from experiments import shakespeare
from fmegatron import step, tree
from fmegatron.checkpoint.writing import write as writing
from fmegatron.collectives.kinds import Collective
from fmegatron.layout import Mesh
from tests.experiments.given import made
from tests.house import ROOT

SMALL = {"dim": 12, "layers": 2, "heads": 2, "seq_len": 8, "batch_size": 4, "prompts": ()}


def here(begin: str = "train_step") -> list[tuple[str, str]]:
    """(file, function) of the frames from the first function of this name to the caller's caller."""
    frames = []
    for frame in reversed(inspect.stack(0)[2:]):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT / "fmegatron") or path.is_relative_to(ROOT / "experiments"):
            frames.append((path.relative_to(ROOT).as_posix(), frame.function))
    first = next(i for i, (_, function) in enumerate(frames) if function == begin)
    return frames[first:]


def traced(**changes):
    """The step of shakespeare.py is recorded once, on rank 0 of a mesh."""
    config = shakespeare.Config(mesh=Mesh(fsdp=2), **SMALL, **changes)
    train_step, specs, rows = shakespeare.describe(config)
    batch = tree.map(lambda layout: torch.zeros(layout.local_shape(0), dtype=layout.dtype), rows)
    step.trace(train_step, (tree.init(specs, 0, 0), batch))


def test_from_the_experiment_to_the_product_of_attention(monkeypatch):
    product, found = F.scaled_dot_product_attention, []

    def noted(*args, **options):
        found.append(here())
        return product(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    traced()
    assert len(found) == 1  # of all layers, once
    for frames in found:
        files = {"experiments/shakespeare.py", *(file for file, _ in frames)}
        assert len(files) <= 6 and len(frames) <= 9, frames


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"strategy": "zero1"}, {"strategy": "zero2", "microbatches": 2}, {}], ids=str)
def test_from_the_step_to_the_reduce_scatter_of_a_gradient(monkeypatch, changes):
    emit, found = Collective.emit, []

    def noted(collective, *args):
        if collective.name.startswith("reduce_scatter"):
            found.append(here())
        return emit(collective, *args)

    monkeypatch.setattr(Collective, "emit", noted)
    traced(**changes)
    assert found
    for frames in found:
        assert len({file for file, _ in frames}) <= 6, frames


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"dim": 128, "heads": 2}], ids=str)
def test_from_the_experiment_to_bytes_on_disk(monkeypatch, tmp_path, changes):
    """From the call of the experiment, and from what `Run` does when it is called, to where files are made."""
    write, found, made_files = writing._run, [], []

    def noted(storage, jobs, *rest):
        found.append(here("__call__"))
        made_files.extend(jobs)
        return write(storage, jobs, *rest)

    monkeypatch.setattr(writing, "_run", noted)
    config = {**SMALL, "run": str(tmp_path / "run"), "steps": 1, "warmup": 0, "eval_windows": 4, "backend": "eager"}
    shakespeare.experiment(made(shakespeare.Config, **config | changes))
    assert found and len(made_files) > 10 and not list((tmp_path / "run").rglob(".new-*"))
    for frames in found:
        assert frames[0] == ("fmegatron/loop/experiment.py", "__call__") and frames[-1][0].startswith(
            "fmegatron/checkpoint/"
        )
        assert len({file for file, _ in frames}) <= 5 and len(frames) <= 9, frames
        of_run = frames[frames.index(("fmegatron/loop/attempt.py", "running")) :]
        assert len({file for file, _ in of_run}) <= 4 and len(of_run) <= 8, of_run
