"""On a real FUSE mount whose renames are copies: savers and the process behind it are killed, nothing is lost."""

import os
import signal
import time

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.files.stores import open_store
from tests.checkpoint import fuse
from tests.checkpoint.fake_world import assert_same_bits, small_sizes
from tests.checkpoint.test_crash import PHASES, campaign
from tests.sampling import seeds

pytestmark = pytest.mark.slow
STATES = {v: {"w": torch.full((64, 96), float(v)), "n": torch.tensor(v)} for v in (1, 2)}


@pytest.fixture
def mounted(tmp_path):
    fuse.require(tmp_path)
    with fuse.Mounted(tmp_path / "backing", tmp_path / "mount") as found:
        yield found


def save(at, version):
    with small_sizes(chunk=4096, band=1024):
        checkpoint.save(f"{at}/step", STATES[version])


def test_each_file_is_synced_before_the_pointer_and_names_before_and_behind_it(mounted):
    for version in (1, 2):
        count = len(mounted.synced())
        save(mounted.at, version)
        token = open_store(f"{mounted.at}/step").pointer()["root"]
        at, synced = f"{mounted.backing}/step/{token}", mounted.synced()[count:]
        wanted = {os.path.relpath(os.path.join(d, n), mounted.backing) for d, _, names in os.walk(at) for n in names}
        folders = {os.path.relpath(d, mounted.backing) for d, _, _ in os.walk(at)}
        pointer = synced.index(f"step/.COMPLETE-{token}")
        assert len(wanted) > 5 and wanted | folders <= {*synced[:pointer]}
        assert synced[pointer + 1 :].count("step") >= 2  # what is beside it before it takes the name, and the name
    assert_same_bits(checkpoint.restore(f"{mounted.at}/step"), STATES[2])


def test_killed_savers(mounted, python):
    (seed,) = seeds("killed savers on FUSE", 0, 1)
    results = campaign(python, mounted.at, 32, seed)
    assert len({got["where"] for got in results} & {*PHASES}) >= 4


def test_the_file_system_dies(tmp_path, python):
    """Half of the deaths are among the last requests: pointer, names, removal of the older one."""
    fuse.require(tmp_path)
    (seed,) = seeds("the file system dies", 0, 1)
    found = campaign(python, tmp_path, 30, seed, "fuse_campaign")
    assert sum(got["died"] for got in found) >= 20 and {got["version"] for got in found} == {1, 2}
    assert any(got["acknowledged"] for got in found)


@pytest.mark.parametrize("behind", ["a file", "all files"])
def test_a_disk_that_does_not_answer_ends_a_save_in_the_background_in_words(mounted, fresh_writers, behind):
    """The process behind the mount stands still while the writer is inside of a call, which no signal ends before the
    kernel says so: the trainer hears of it within the limit, and of the next save that it is durable."""
    state = {f"w{i}": torch.full(((1 << 18) + i,), float(i)) for i in range(8)}
    limit_s = 3.0
    with checkpoint.AsyncSaver(time_limit_s=600.0, nice=0) as saver:
        checkpoint.save_async(f"{mounted.at}/step", state, saver=saver).result()
        before = len(mounted.synced())
        handle = checkpoint.save_async(f"{mounted.at}/next", state, saver=saver)
        while len(mounted.synced()) == before and behind == "all files" and not handle.poll():
            time.sleep(0.001)
        os.kill(mounted.process.pid, signal.SIGSTOP)
        saver._flights.time_limit_s, began = limit_s, time.monotonic()
        try:
            while True:
                try:
                    if handle.poll():
                        break
                except RuntimeError as error:
                    said = str(error)
                    break
                time.sleep(0.01)
            took = time.monotonic() - began
        finally:
            os.kill(mounted.process.pid, signal.SIGCONT)
        assert f"made no progress for {limit_s:.0f}" in said and "the limit is 3 s) and was killed" in said, said
        assert took < limit_s + 20.0  # two seconds for the process, two for what it left, on a busy machine
        saver._flights.time_limit_s = 600.0
        checkpoint.save_async(f"{mounted.at}/next", state, saver=saver).result()
        assert_same_bits(checkpoint.restore(f"{mounted.at}/next"), state)
