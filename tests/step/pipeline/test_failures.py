"""A stage that is killed, or stopped: the others end in their time limit and say who waited for which message."""

import datetime
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fmegatron import step, tree
from fmegatron.collectives import World, connect, waiting
from fmegatron.layout import Layout, Mesh
from fmegatron.loop.faults import notice
from fmegatron.step import Pipelining, pipelined
from fmegatron.step.pipeline import run, table
from fmegatron.testing import split
from fmegatron.testing.ranks import RankError, RankPool
from tests.step.pipeline import hand

LIMIT, LATE = 4.0, table.Action("F", 1, 1)  # the action before which stage 1 is lost
WAITS = "pipeline: rank 0 (0 of pp) waits before BW0.1 for what B1.1 made to come from rank 1 (1 of pp)"


def lost(rank: int, how: str, folder: str):
    """A step whose second stage is killed or stopped; what rank 0 says, and after how long."""
    mesh, error = Mesh(pp=2), ""
    world, params, batch = connect(mesh), hand.params_of(2), hand.batch_of(8)
    limited = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=LIMIT))
    layouts = hand.state_layouts(hand.layouts_of(params, mesh))
    own = split(hand.whole_state(params), layouts, mesh)[rank]
    given = tree.place(batch, tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh), batch))
    grad_fn = pipelined(hand.loss_fn, Pipelining().of(4), dtype=hand.F64)
    jitted = step.jit(hand.train_step_of(grad_fn), world=world, backend="eager")
    do, pid, main, seen = run.Held.do, Path(folder) / "pid", threading.get_ident(), []

    def watch():
        while not seen or seen[-1] != WAITS:
            seen.append(waiting.doing_of(main))
            time.sleep(0.01)

    def stops(held, action):
        if rank == 1 and action == LATE:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        do(held, action)

    pid.write_text(str(os.getpid())) if rank else None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(World, "group", lambda self, axes: limited)
        patched.setattr(run.Held, "do", stops)
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start() if not rank else None
        began = time.monotonic()
        try:
            jitted(tree.place(tree.map(torch.clone, own), layouts), given)
        except RuntimeError as raised:
            error = str(raised)
            if not rank:
                watcher.join(timeout=5)
                (Path(folder) / "said").write_text(f"{error}\n{notice.lost_peer(raised)} {WAITS in seen}")
                (Path(folder) / "took").write_text(str(time.monotonic() - began))
                os.kill(int(pid.read_text()), signal.SIGCONT) if how == "stopped" else None
    return error


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_who_waited_for_what(how, tmp_path, forkserver):
    with RankPool(2, timeout_s=120, server=forkserver) as pool:
        try:
            pool.run(lost, how, str(tmp_path))
        except RankError:
            assert how == "killed"
    text, flags = (tmp_path / "said").read_text().rsplit("\n", 1)
    assert text.startswith(f"{WAITS}: failed after "), text
    assert flags == f"{how == 'killed'} True"  # whether it is known as a lost peer; a report of a hang has the action
    assert float((tmp_path / "took").read_text()) < 60


def test_what_a_rank_is_at():
    peers, action = (4, 6), (table.Action("B", 0, 2),)
    sent, taken = table.Message("F", 0, 3, 0, 1), table.Message("B", 1, 2, 1, 0)
    assert str(run.Doing(0, peers, action)) == "pipeline: rank 4 (0 of pp) runs B0.2"
    pair = (table.Action("F", 0, 3), *action)
    assert str(run.Doing(0, peers, pair)) == "pipeline: rank 4 (0 of pp) runs F0.3 with B0.2"
    told = "pipeline: rank 4 (0 of pp) waits"
    assert (
        str(run.Doing(0, peers, action, taken))
        == f"{told} before B0.2 for what B1.2 made to come from rank 6 (1 of pp)"
    )
    assert str(run.Doing(0, peers, (), sent)) == f"{told} for what F0.3 made to be taken by rank 6 (1 of pp)"

    def fails():
        assert waiting.doing_of(threading.get_ident()) == "pipeline: rank 4 (0 of pp) runs B0.2"
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match=r"runs B0.2: failed after 0.0 s: Connection closed by peer"):
        waiting.at_work(run.Doing(0, peers, action), fails)
