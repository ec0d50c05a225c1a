"""The faults of a running job, each in a real job of two ranks: what is said, how it ends, and that nothing is lost.

They are the rows of docs/running.md's table. A job is restarted by torchrun after each fault and ends as if there had
been none: the losses and the last checkpoint are, to the bit, those of a run of the same processes without faults.
"""

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from fmegatron import checkpoint, loop, tree
from fmegatron.layout import Mesh
from tests.experiments.given import flags as flags_of
from tests.experiments.test_shakespeare import SMALL
from tests.house import ROOT

STEPS = 12
SMALL_RUN = {"steps": STEPS, "save_every": 3, "log_every": 1, "mesh": "fsdp=2"}
STOPPED_S = 2
ENDING = "kill:rank=1,step=5", "nan:rank=0,step=8", "exit:rank=1,step=11"
SHAKESPEARE = {**SMALL, **SMALL_RUN, "backend": "aot_eager", "eval_every": 100, "prompts": ""}


@pytest.fixture
def job(tmp_path, python):
    """job(*faults) -> a running torchrun of two ranks of `faulty_run`, in tmp_path/run; ended with the test.

    Each of the faults happens once; as many restarts as there are faults are allowed.
    """
    running = []

    def start(*faults, experiment="tests.experiments.small_run", launch=("--standalone",), ranks=2, **changes):
        torchrun = [sys.executable, "-m", "torch.distributed.run", *launch, f"--max-restarts={len(faults)}"]
        script = [str(ROOT / "tests/experiments/faulty_run.py"), experiment]
        flags = {
            "run": tmp_path / "run",
            "inject": "+".join(faults),
            **(SHAKESPEARE if "shakespeare" in experiment else SMALL_RUN),
            **changes,
        }
        command = [*torchrun, f"--nproc-per-node={ranks}", *script, *flags_of(flags)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        files = {name: open(tmp_path / f"{name}{len(running)}", "w+") for name in ("stdout", "stderr")}
        process = python.popen(command, cwd=ROOT, env=environment, start_new_session=True, **files)
        running.append((process, files))
        return running[-1]

    yield start
    for process, files in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in files.values():
            file.close()


def ended(job, seconds=900):
    """(status, what it printed, what it wrote on stderr) of a job that must end."""
    process, files = job
    process.wait(timeout=seconds)
    texts = []
    for name in ("stdout", "stderr"):
        files[name].seek(0)
        texts.append(files[name].read())
    return process.returncode, *texts


def stopped_process(pid):
    """The one of those that torchrun has started, or that they have, which is stopped."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            found = child if state == "T" else stopped_process(child)
            if found is not None:
                return found
    return None


def losses(run):
    return {r["step"]: r["loss"] for r in loop.read_metrics(run / "metrics.jsonl") if "loss" in r}


def last(run):
    """The leaves of the last checkpoint, whole."""
    path = checkpoint.Manager(run / "checkpoints").path(STEPS)
    whole = tree.map(lambda layout: layout.replace(mesh=Mesh(), spec=()), checkpoint.layouts(path))
    return tree.leaves(checkpoint.restore(path, whole))


def assert_as_if_nothing_had_happened(run, faults):
    clean = run.with_name("run-clean")
    assert losses(run) == losses(clean) and sorted(losses(run)) == list(range(1, STEPS + 1))
    assert all(torch.equal(a, b) for a, b in zip(last(run), last(clean), strict=True))
    happened = [x.name for x in (run / "injected").iterdir()] if faults else []
    assert faults == len([name for name in happened if not name.startswith("stop")])


@pytest.mark.slow
@pytest.mark.long
def test_a_run_survives_what_happens_to_its_ranks(job, tmp_path):
    """A rank is stopped for a while and another killed; then a number is not finite; then a rank leaves."""
    status, _, err = ended(job(f"stop:rank=0,step=2,seconds={STOPPED_S}", *ENDING))
    assert status == 0, err
    assert_as_if_nothing_had_happened(tmp_path / "run", 3)
    assert "(exitcode: -9) local_rank: 1" in err
    text = "NonFiniteError: step 8: loss is nan (finite at step 7); not finite in the state: w, 1 of 1 leaves (first"
    assert re.search(rf"rank [01] of 2 failed: {re.escape(text)} seen on rank 0\)", err)
    assert err.count("rank 1 of 2 failed: SystemExit: 3\n") == 1
    # torchrun names the rank whose end it sees first: on a busy machine the one that ended because of the other.
    assert re.search(r"\(exitcode: 3\) local_rank: 1|\(exitcode: 1\) local_rank: 0", err)
    told = err.count("rank 0 ends because another failed: rank 1: SystemExit: 3\n")
    # Rank 1 closes its groups before it tells why; torchrun may end rank 0 in between.
    lost = err.count("rank 0 of 2 lost its connection to another rank: ")
    assert told == 1 or (told, lost) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank, asynchronous", [(1, False), (0, True)])
def test_every_fault(job, tmp_path, rank, asynchronous):
    """Also with an address that is told beforehand instead of found (`--standalone`)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ("--standalone",) if rank else ("--master-addr=127.0.0.1", f"--master-port={port}")
    faults = [f"{kind}:rank={rank},step=5" for kind in ("kill", "exception", "exit", "nan")]
    if not asynchronous:
        faults.append(f"diskfull:rank={rank},step=7")
    stopped = f"stop:rank={rank},step=2,seconds={STOPPED_S}"
    status, _, err = ended(job(stopped, *faults, launch=launch, async_save=asynchronous))
    assert status == 0, err
    assert_as_if_nothing_had_happened(tmp_path / "run", len(faults))
    assert f"(exitcode: -9) local_rank: {rank}" in err and "(exitcode: 3)" in err
    raised = f"ValueError: injected: got exception:rank={rank},step=5,at=step, wanted none"
    for said in (raised, "SystemExit: 3"):
        assert err.count(f"rank {rank} of 2 failed: {said}\n") == 1
        assert err.count(f"rank {1 - rank} ends because another failed: rank {rank}: {said}\n") == 1
    assert "NonFiniteError: step 5: loss is nan" in err
    assert ("No space left on device" in err) != asynchronous


@pytest.mark.slow
def test_shakespeare(job, tmp_path):
    status, _, err = ended(job("kill:rank=1,step=5", "nan:rank=1,step=8", experiment="experiments.shakespeare"))
    assert status == 0, err
    assert_as_if_nothing_had_happened(tmp_path / "run", 2)
    assert "generator" not in err and "NonFiniteError: step 8: loss is nan" in err


@pytest.mark.slow
def test_two_runs_in_one_folder(job, tmp_path):
    """The second ends in set-up and says whose the folder is; the first does not notice."""
    first = job("stop:rank=0,step=6")
    while not list((tmp_path / "run").glob("injected/stop*")):
        assert first[0].poll() is None, ended(first)
        time.sleep(0.05)
    status, _, err = ended(job())
    assert status != 0 and err.partition("ChildFailedError")[0].count("Traceback") == 1  # torchrun's own
    assert re.search(rf"rank 0 of 2 failed: ClaimedError: .*{socket.gethostname()}.*; wait until it ends, end it", err)
    stopped = stopped_process(first[0].pid)
    assert stopped is not None, "rank 0 is stopped"
    os.kill(stopped, signal.SIGCONT)
    status, _, err = ended(first)
    assert status == 0, err
    assert_as_if_nothing_had_happened(tmp_path / "run", 0)


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_as_long_as_was_said(job, tmp_path):
    status, _, err = ended(job("stop:rank=1,step=5", timeout_s=10))
    assert status == 0, err
    assert_as_if_nothing_had_happened(tmp_path / "run", 0)
    assert "another rank did not come to this collective in time: is it stopped, or does it wait for something" in err


@pytest.mark.slow
def test_nodes_that_count_their_restarts_differently(job, tmp_path):
    """Two agents: the one whose rank is killed counts a restart, the other none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job")
    jobs = [job("kill:rank=1,step=5", "kill:rank=1,step=8", launch=launch, ranks=1) for _ in range(2)]
    for each in jobs:
        status, _, err = ended(each)
        assert status == 0, err
    assert_as_if_nothing_had_happened(tmp_path / "run", 2)
