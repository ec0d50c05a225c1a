"""A run that is stopped at a random update by random means, and goes on, is the run that was never stopped.

Ten configurations of a tiny decoder on real ranks. On the mesh it began on: the losses and the last state to the bit,
and every rank has read the same rows in the same order. On another mesh: losses to 1e-10 in fp64, 1e-5 in fp32.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from fmegatron import checkpoint, loop, tree
from fmegatron.layout import Mesh
from fmegatron.loop.sources import mesh_of
from tests import pairs, sampling
from tests.experiments.decoder_run import STEPS, trained
from tests.experiments.jobs import assert_nothing_works_in, torchrun


@dataclass(frozen=True)
class Case:
    """before, after: meshes. within: restarts of the first job, by torchrun or in the process. end: how it ends."""

    before: str
    after: str
    dtype: str
    within: tuple[str, ...] = ()
    end: str = ""
    flags: tuple[str, ...] = ()

    def __str__(self):
        how = "+".join((*self.within, self.end) if self.end else self.within)
        return f"{self.before or 'alone'} to {self.after or 'alone'} {self.dtype} {how}{''.join(self.flags)}"


CASES = [
    Case("fsdp=2", "fsdp=2", "float32", end="signal"),
    Case("dp=2,fsdp=2", "dp=2,fsdp=2", "float64", end="kill", flags=("--async_save",)),
    Case("tp=2", "tp=2", "float32", ("torchrun", "torchrun")),
    Case("fsdp=2", "fsdp=2", "float32", ("process", "process"), flags=("--near",)),
    Case("fsdp=2,tp=2", "fsdp=2,tp=2", "float64", ("process", "torchrun"), flags=("--microbatches=2",)),
    Case("dp=2", "fsdp=4", "float64", end="signal"),
    Case("fsdp=2,tp=2", "fsdp=2", "float64", ("torchrun",), "kill", ("--microbatches=2",)),
    Case("fsdp=4", "", "float64", ("process",), "signal", ("--async_save",)),
    Case("tp=2", "dp=2,tp=2", "float32", end="kill"),
    Case("fsdp=2", "tp=2", "float32", ("torchrun",), "signal"),
]


@pytest.mark.medium
@pytest.mark.parametrize("case", pairs.few(1, [(case,) for case in CASES], map(str, CASES)))
def test_a_stopped_run_is_the_run_that_was_not(python, ranks, tmp_path, case):
    draw = random.Random(f"{sampling.seed()} {case}")
    clean, mesh = tmp_path / "clean", mesh_of(case.before)
    values = {"mesh": mesh, "folder": f"{clean}", "dtype": case.dtype}
    values["microbatches"] = 2 if "--microbatches=2" in case.flags else 1
    ranks.run(trained, values, ranks=mesh.size)
    common = [f"--dtype={case.dtype}", *case.flags]
    done = _first_job(python, tmp_path, draw, case, common)
    if case.end:
        assert done.status == (1 if case.end == "kill" else 0), done.err
        size = mesh_of(case.after).size
        how = {"mesh": case.after, "ranks": size, "restarts": 0, "program": "decoder_run"}
        done = torchrun(python, tmp_path, *common, **how)
    assert done.status == 0, done.err
    assert_nothing_works_in(tmp_path)
    _assert_equal(tmp_path / "run", clean, case)


def _first_job(python, folder, draw, case, common):
    """It begins the run, is restarted as often as the case has it, and ends as it has it; updates are drawn."""
    size, last = mesh_of(case.before).size, STEPS - 3  # a signal ends a run two updates later
    means = (*case.within, *([case.end] if case.end else []))
    ats = sorted(draw.sample(range(2, last), len(means)))  # updates that are done, or that the fault is in
    faults, flags = [], [*common]
    for mean, at in zip(means, ats, strict=True):
        rank = draw.randrange(size)
        if mean == "signal":
            flags.append(f"--sent={draw.choice(('SIGTERM', 'SIGUSR1'))}:{rank}:{at}")
            continue
        kinds = {"kill": ["kill"], "process": ["exception"], "torchrun": ["kill", "exit"]}
        faults.append(f"{draw.choice(kinds[mean])}:rank={rank},step={at}")
    flags += [f"--inject={'+'.join(faults)}"] if faults else []
    flags += ["--restarts=2"] if "process" in case.within else []
    how = {"mesh": case.before, "ranks": size, "program": "decoder_run"}
    done = torchrun(python, folder, *flags, restarts=case.within.count("torchrun"), **how)
    assert done.err.count(": injected ") == len(faults), done.err
    assert done.err.count(" in the process, after ") == case.within.count("process"), done.err
    assert ("stopped after step" in done.out) == (case.end == "signal"), done.err
    return done


def _assert_equal(run, clean, case):
    found, wanted = (
        {r["step"]: r["loss"] for r in loop.read_metrics(folder / "metrics.jsonl") if "loss" in r}
        for folder in (run, clean)
    )
    assert sorted(found) == sorted(wanted) == list(range(1, STEPS + 1))
    states = [_last(folder) for folder in (run, clean)]
    if case.before == case.after:
        assert found == wanted
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
        for rank in range(mesh_of(case.before).size):
            _assert_read_in_order(*(folder.with_name(f"{folder.name}-rows-{rank}") for folder in (run, clean)))
        return
    tolerance = 1e-10 if case.dtype == "float64" else 1e-5
    assert max(abs(found[n] - wanted[n]) / abs(wanted[n]) for n in wanted) <= tolerance
    if case.dtype == "float64":
        for a, b in zip(*states, strict=True):
            assert (a - b).abs().max() <= 1e-10 * max(1.0, float(b.abs().max()))


def _last(run):
    """The leaves of the last checkpoint, whole."""
    path = checkpoint.Manager(run / "checkpoints").path(STEPS)
    return tree.leaves(
        checkpoint.restore(path, tree.map(lambda x: x.replace(mesh=Mesh(), spec=()), checkpoint.layouts(path)))
    )


def _assert_read_in_order(path, clean):
    """What a rank read: the same rows, one after the other; a restart goes back, by what no save has kept."""
    order = {rows: number for number, rows in enumerate(clean.read_text().split(), 1)}
    assert len(order) == STEPS
    read = [order[rows] for rows in path.read_text().split()]
    assert read[0] == 1 and read[-1] == STEPS
    assert all(b == a + 1 or a - 6 <= b <= a for a, b in zip(read, read[1:], strict=False)), read
