"""Agents of torchrun: two on two addresses, a node that goes away, and restarts that get no further."""

import os
import re
import signal
import time

import pytest

from fmegatron import loop
from fmegatron.layout import Mesh
from fmegatron.loop.restart import Restart
from tests.experiments.decoder_run import STEPS, trained
from tests.experiments.jobs import assert_nothing_works_in, ended, free_port, start, torchrun, with_all_below


def losses(run):
    return {r["step"]: r["loss"] for r in loop.read_metrics(run / "metrics.jsonl") if "loss" in r}


def agents(port, least=2):
    """What two torchruns are told, so that they are nodes of one job, each with an address of its own."""
    place = (f"--nnodes={least}:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job")
    short = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={}"
    return [(*place, short.format(int(not i)), f"--local-addr=127.0.0.{i + 1}") for i in range(2)]


@pytest.mark.slow
def test_a_job_goes_on_with_the_node_that_is_left(python, ranks, tmp_path):
    """Two agents of two ranks; all of the second is killed. The first begins again, its free axis with two ranks."""
    values = {"mesh": Mesh(fsdp=4), "folder": f"{tmp_path / 'clean'}", "dtype": "float64"}
    ranks.run(trained, values, ranks=4)
    flags = ("--dtype=float64", "--inject=hang:rank=3,step=8")
    how = {"mesh": "fsdp=*", "ranks": 2, "restarts": 3, "program": "decoder_run"}
    jobs = [start(python, tmp_path, *flags, launch=launch, **how) for launch in agents(free_port(), least=1)]
    records = tmp_path / "run" / "metrics.jsonl"
    while not (records.exists() and '"step": 7' in records.read_text()):
        assert jobs[0][0].poll() is None, ended(jobs[0], tmp_path).err
        time.sleep(0.05)
    for pid in with_all_below(jobs[1][0].pid):  # torchrun gives each rank a session of its own
        os.kill(pid, signal.SIGKILL)
    done = ended(jobs[0], tmp_path)
    assert done.status == 0, done.err
    assert 'mesh "fsdp=4" -> "fsdp=2"' in done.out
    got, wanted = losses(tmp_path / "run"), losses(tmp_path / "clean")
    assert sorted(got) == list(range(1, STEPS + 1))
    assert max(abs(got[n] - wanted[n]) / wanted[n] for n in wanted) <= 1e-10
    ended(jobs[1], tmp_path)
    assert_nothing_works_in(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_a_fault_on_one_node_restarts_both(python, ranks, tmp_path, kind):
    """Two agents on two addresses; the run ends with the bits of one that had no fault."""
    ranks.run(trained, {"mesh": Mesh(fsdp=4), "folder": f"{tmp_path / 'clean'}"}, ranks=4)
    flags = (f"--inject={kind}:rank=3,step=8", "--step_s=5")
    how = {"mesh": "fsdp=4", "ranks": 2, "restarts": 2, "program": "decoder_run"}
    jobs = [start(python, tmp_path, *flags, launch=launch, **how) for launch in agents(free_port())]
    for done in [ended(job, tmp_path) for job in jobs]:
        assert done.status == 0, done.err
    assert losses(tmp_path / "run") == losses(tmp_path / "clean")
    assert_nothing_works_in(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("again", ["torchrun", "process"])
def test_restarts_that_get_no_further_are_ended(python, tmp_path, again):
    """A fault in every attempt at the same update: torchrun would start it ten times."""
    most = Restart().most
    kind = "exit" if again == "torchrun" else "exception"
    # Each happens once, in its own attempt: they differ in the update from which on they are due.
    faults = "+".join(f"{kind}:rank=1,step={n},at=save" for n in range(6, 6 - most - 3, -1))
    flags = (f"--inject={faults}", "--restarts=3", "--save_every=6")
    restarts = 10 if again == "torchrun" else 0
    done = torchrun(python, tmp_path, *flags, ranks=2, restarts=restarts, program="decoder_run")
    assert done.status == 1, done.err
    happened = done.err.count(": injected ")
    if again == "torchrun":
        assert "restarts went on from step 0, and none got to a checkpoint behind it; look at what ended" in done.err
        assert happened == most + 1
    else:
        assert f"No restart in the process: {most} did not get beyond update 6" in done.err
        assert len(re.findall(r"restart \d+ in the process", done.err)) == most
    assert_nothing_works_in(tmp_path)
