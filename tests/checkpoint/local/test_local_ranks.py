"""The same with real processes and gloo: lost nodes, and ranks killed in the middle of a save."""

import itertools
import os
import shutil
import signal
import warnings

import pytest
import torch

from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files.folder import Folder
from fmegatron.checkpoint.local.replicas import LocalReplicas
from fmegatron.collectives import connect
from fmegatron.layout import Layout, Mesh
from fmegatron.testing.ranks import RankError

BIG = 5 * (1 << 20) + 3  # elements of a rank's part: portions and bands of the real sizes, a ragged end


def layouts_and_state(rank, step):
    mesh = Mesh(fsdp=4)
    layouts = {"w": Layout((BIG + 1, 1), torch.uint8, mesh, ("fsdp",)), "step": Layout((), torch.int64, mesh)}
    n = layouts["w"].local_shape(rank)[0]
    return layouts, {"w": (torch.arange(n) * (rank + 3) + step).to(torch.uint8).view(n, 1), "step": torch.tensor(step)}


def replicas_of(folder, rank, world=None):
    return LocalReplicas(f"{folder}/node-{rank}", "run", world, spacing=1, portion_bytes=1 << 20)


def save(rank, folder, step):
    layouts, state = layouts_and_state(rank, step)
    with connect(Mesh(fsdp=4), device="cpu") as world:
        replicas_of(folder, rank, world).save(step, state, layouts, {"note": step})


def save_and_die(rank, folder, step, moments):
    """Rank r kills its process at its moments[r]-th thing done to a file, if it has such a moment."""
    count = itertools.count(1)  # files are written by several threads

    def mortal(function):
        def call(*args, **options):
            if next(count) == moments.get(rank):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    real = Folder.write, os.rename
    Folder.write, os.rename = map(mortal, real)
    try:
        save(rank, folder, step)
    finally:
        Folder.write, os.rename = real


def restore(rank, folder):
    layouts, _ = layouts_and_state(rank, 0)
    with connect(Mesh(fsdp=4), device="cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            step, got, metadata = replicas_of(folder, rank, world).restore_latest(layouts)
        except CheckpointError as error:
            return str(error)
    wanted = layouts_and_state(rank, step)[1]
    same = all(torch.equal(got[name], wanted[name]) for name in wanted) and metadata == {"note": step}
    return step, same


def restore_by_two(rank, folder):
    """Nodes 1 and 2 of four, under another mesh: the parts of what four ranks saved."""
    mesh, wanted = Mesh(tp=2), torch.cat([layouts_and_state(r, 2)[1]["w"] for r in range(4)])
    layouts = {"w": Layout(wanted.shape, torch.uint8, mesh, ("tp",)), "step": Layout((), torch.int64, mesh)}
    with connect(mesh, device="cpu") as world:
        step, got, metadata = replicas_of(folder, rank + 1, world).restore_latest(layouts)
        mine = wanted[layouts["w"].boxes(rank)[0].slices]
        assert (step, metadata, int(got["step"])) == (2, {"note": 2}, 2) and torch.equal(got["w"], mine)
        # Then each of the two has both parts again.
        if rank:
            shutil.rmtree(f"{folder}/node-{rank + 1}")
        world.barrier()
        step, got, _ = replicas_of(folder, rank + 1, world).restore_latest(layouts, protect=False)
        return step, torch.equal(got["w"], mine)


@pytest.mark.slow
@pytest.mark.long
def test_lost_nodes(ranks, tmp_path):
    ranks.run(save, str(tmp_path), 1)
    ranks.run(save, str(tmp_path), 2)
    names = sorted(os.listdir(tmp_path / "node-2" / "run"))
    assert [name[:24] for name in names] == ["step_00000002.rank_00002", "step_00000002.rank_00003"]
    shutil.copytree(tmp_path, tmp_path / "two", symlinks=True)
    assert ranks.run(restore_by_two, str(tmp_path / "two"), ranks=2) == [(2, True)] * 2
    shutil.rmtree(tmp_path / "node-0"), shutil.rmtree(tmp_path / "node-3")
    assert ranks.run(restore, str(tmp_path)) == [(2, True)] * 4
    shutil.rmtree(tmp_path / "node-1"), shutil.rmtree(tmp_path / "node-2")  # 0 and 3 hold everything again
    assert ranks.run(restore, str(tmp_path)) == [(2, True)] * 4
    shutil.rmtree(tmp_path / "node-0"), shutil.rmtree(tmp_path / "node-1")
    assert all("no node holds the shards of ranks 0, 1" in text for text in ranks.run(restore, str(tmp_path)))


def killed(ranks, folder, moments):
    """The newest whole step comes back bit for bit after the kill, and the next save works."""
    ranks.run(save, str(folder), 1)
    with pytest.raises(RankError):
        ranks.run(save_and_die, str(folder), 2, moments)
    got = ranks.run(restore, str(folder))
    assert got in ([(1, True)] * 4, [(2, True)] * 4), (moments, got)
    ranks.run(save, str(folder), 3)
    assert ranks.run(restore, str(folder)) == [(3, True)] * 4
    for rank in range(4):
        assert all(name.startswith("step_00000003") for name in os.listdir(folder / f"node-{rank}" / "run"))
    return got[0][0]


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_killed_while_it_writes(ranks, tmp_path):
    assert killed(ranks, tmp_path, {2: 3}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(1, 9))
def test_a_rank_killed_at_any_moment(ranks, tmp_path, moment):
    killed(ranks, tmp_path, {moment % 4: moment})


@pytest.mark.slow
@pytest.mark.parametrize("moment", (2, 6, 8))
def test_all_ranks_killed(ranks, tmp_path, moment):
    killed(ranks, tmp_path, dict.fromkeys(range(4), moment))
