"""Engines of a notebook as ranks: they train, and a failure on one of them is an error on all and never a wait."""

import ast
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from fmegatron import loop
from fmegatron.collectives import World
from fmegatron.layout import Mesh
from tests.house import ROOT
from tests.loop.engine_losses import losses

# Programs in the place of a notebook.
BEGINS = """
import os, sys
from fmegatron import loop
from ipyparallel.error import CompositeError, EngineError

def run(cell):
    try:
        ranks.view.execute(cell, silent=False, block=False).get(120)
    except (CompositeError, EngineError) as error:
        return str(error).replace("\\n", " ")

ranks = loop.engines(2, patience_s=2)
run("from fmegatron.collectives import connect\\nfrom fmegatron.layout import Mesh\\nworld = connect(Mesh(fsdp=2))")
"""
TRAINS = """
print(ranks)
run("from tests.loop.engine_losses import losses\\nfound = losses(world.mesh, world)\\nworld.close()")
run("world = connect(Mesh(dp=2))\\nagain = losses(world.mesh, world)")
print(ranks.view["found"] + ranks.view["again"])
print(run("no_such_name"), ranks)
print(*ranks.view.apply_sync(os.getpid), flush=True)
print(run("while True: world.barrier()"), flush=True)
while "all there" in repr(ranks):
    pass
print(ranks)
ranks.close()
print(ranks)
"""
RAISES = """
print(*ranks.view.apply_sync(os.getpid))
print(run("import os; kept = 3\\nif os.environ['RANK'] == '0': raise KeyError('one only')\\nworld.barrier()"))
while "all there" in repr(ranks):
    pass
print(ranks.client[0]["kept"])
try:
    ranks.check()
except RuntimeError as error:
    print(error, flush=True)
sys.stdin.readline()
"""


FOREIGN = """
import os, sys, ipyparallel
from fmegatron import loop
cluster = ipyparallel.Cluster(n=3, controller_ip="127.0.0.1", profile_dir=os.getcwd() + "/profile", log_level=50)
client = cluster.start_and_connect_sync()
where = client[:].apply_sync(os.getcwd)
cell = '''
from fmegatron.collectives import connect
from fmegatron.layout import Mesh
world = connect(Mesh(fsdp=2))
found = world.ask(world.rank == 1)(), world.rank
'''
with loop.engines(2, client=client) as ranks:
    ranks.view.execute(cell, silent=False, block=False).get(120)
    print(ranks, ranks.view["found"])
    try:
        loop.engines(4, client=client)
    except ValueError as error:
        print(error)
print(ranks, len(client.ids), client[:].apply_sync(os.getcwd) == where)
cluster.stop_cluster_sync()
"""


@pytest.fixture
def program(python, tmp_path):
    """program(text) -> a running process, in a folder of its own."""
    running, environment = (
        [],
        {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path)},
    )
    pipe = subprocess.PIPE

    def begin(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
        running.append(python.popen([sys.executable, str(path)], **streams, env=environment, cwd=tmp_path))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def gone(pids, seconds=60):
    """Whether these processes end."""
    until = time.monotonic() + seconds
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(map(psutil.pid_exists, pids))


@pytest.mark.slow
@pytest.mark.long
def test_engines_train_and_one_that_is_killed_is_an_error_within_seconds(program):
    process = program(BEGINS + TRAINS)
    begun, found, typo, pids = (process.stdout.readline().strip() for _ in range(4))
    assert begun == "Engines(2 ranks): all there", process.communicate()
    alone, found = losses(Mesh(), World.alone("cpu")), ast.literal_eval(found)
    torch.testing.assert_close(found, [alone] * 4, rtol=0, atol=1e-10)  # two ranks on two meshes
    assert alone[1] < alone[0]
    assert typo.count("NameError") == 2 and typo.endswith("all there")  # a mistake on all harms none
    pids = list(map(int, pids.split()))
    time.sleep(0.5)
    killed = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    error = process.stdout.readline()
    assert (
        "Engine 1 died" in error
        and ("0:execute" in error or "Engine 0 died" in error)
        and time.monotonic() - killed < 20
    )
    out, err = process.communicate(timeout=60)
    died, closed = out.splitlines()
    assert died.startswith("Engines(2 ranks): ") and "engine 1 died, killed or out of memory (/" in died, err
    assert closed == "Engines(2 ranks): closed" and gone(pids)


@pytest.mark.slow
def test_what_waits_for_an_engine_that_raised_is_ended_and_all_end_with_their_notebook(program):
    process = program(BEGINS + RAISES)
    pids, raised, kept, told = (process.stdout.readline().strip() for _ in range(4))
    pids = list(map(int, pids.split()))
    assert "KeyError" in raised and "Engine 1 died" in raised and kept == "3"
    assert "engine 1 was ended after 2 s in its cell, as engine 0 raised KeyError in the same cell; start" in told
    assert "engine 0" not in told.replace("engine 0 raised", "") and not psutil.pid_exists(pids[1])
    family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    assert pids[0] in family and len(family) > 2  # the controller has processes of its own
    process.kill()
    assert gone(family)


@pytest.mark.slow
def test_engines_that_are_there_become_ranks_and_stay(program):
    out, err = program(FOREIGN).communicate(timeout=300)
    first, refused, last = out.splitlines()
    assert first == "Engines(2 ranks): all there [((True,), 0), ((True,), 1)]", err
    assert refused == "engines: n: got 4, wanted at most the client's 3; start more"
    assert last == "Engines(2 ranks): closed 3 True"


@pytest.mark.medium
def test_refused():
    for bad in (0, True, 1.5):
        with pytest.raises(ValueError, match="engines: n: got .*, wanted a whole number of at least 1"):
            loop.engines(bad)
    with pytest.raises(RuntimeError, match=r"engines: 2 engines were not ready within 0 s: .*timeout_s= waits longer"):
        loop.engines(2, timeout_s=0)
