"""The tools where checkpoints are not plain files: object stores in memory, an S3 server, file:// URLs."""

import io
import json

import pytest
import safetensors.torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.tools import reshard, verify
from fmegatron.checkpoint.tools.differences import diff
from fmegatron.checkpoint.tools.gc import collect
from fmegatron.checkpoint.tools.ls import listing
from fmegatron.checkpoint.tools.resharding import plan_of, target_layouts
from fmegatron.checkpoint.tools.show import show
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.interop import export_safetensors
from fmegatron.layout import Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, save_all, small_sizes
from tests.checkpoint.s3_server import s3_endpoint, s3_store
from tests.checkpoint.test_faults import layouts_on, state


def call(*argv):
    out, err = io.StringIO(), io.StringIO()
    status = main([str(a) for a in argv], out, err)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(params=["memory", "file"])
def run(request, tmp_path):
    """A directory of checkpoints: steps 1 and 2."""
    store = open_store("memory://runs/a", {}) if request.param == "memory" else open_store(f"file://{tmp_path}/a")
    with small_sizes():
        for step in (1, 2):
            place = store.child(f"step_{step:08d}")
            assert save_all(place, state(step), layouts_on(), step=step, metadata={"n": step}) == [None] * 4
        yield store


def test_all_functions(run, tmp_path):
    one, two = (run.child(f"step_{step:08d}") for step in (1, 2))
    found = listing(run)
    assert [(c.step, c.problem, c.metadata) for c in found.checkpoints] == [(1, None, {"n": 1}), (2, None, {"n": 2})]
    assert listing(one).checkpoints[0].leaves == 5 and all(c.nbytes > 500 for c in found.checkpoints)
    a, b = open_source(one), open_source(two)
    values = {row.path: row.statistics for row in show(a, stats=True).leaves}
    assert values["w"].max == state(1)["w"].max()
    for place in (one, two):
        assert verify(place).damages == (), verify(place)
    found = diff(a, b, ignore=frozenset(["metadata"]))
    assert {x.path for x in found.leaves} == {p for p in tree.paths(state()) if p != "step"} | {"step"}
    export_safetensors(a, tmp_path / "x.safetensors")
    got = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert_same_bits({p: got[p] for p in tree.paths(state())}, state(1))
    wanted = target_layouts(a, [Mesh(tp=4, fsdp=1)])
    reshard(a, run.child("step_00000003"), plan_of(wanted), bound=100)
    for rank, local in enumerate(cut_tree(state(1), wanted)):
        assert_same_bits(checkpoint.restore(run.child("step_00000003"), wanted, rank=rank), local)
    assert verify(run.child("step_00000003")).damages == ()
    assert diff(a, open_source(run.child("step_00000003")), ignore=frozenset(["layouts"])).equal


def test_retention(run):
    done = collect(run, keep_last=1)
    assert [a.kind for a in done.actions] == ["remove"] and done.removed > 500
    assert [c.name for c in listing(run).checkpoints] == ["step_00000002"]


def test_damage_of_objects():
    """Lost, altered, cut and foreign objects are named."""
    store = open_store("memory://runs/a", {})
    with small_sizes():
        assert save_all(store, state(), layouts_on(), step=1) == [None] * 4
        storage = store.locate()
        names = sorted(n for n in storage.names() if n.rpartition("/")[2].startswith("c."))
        storage.write("arrays/foreign", [b"x"])
        values = storage.values
        values.remove(names[0])
        data = bytearray(values.read(names[1]))
        data[3] ^= 1
        values.write(names[1], [bytes(data)])
        values.write(names[2], [bytes(data)[:-1]])
        found = {(d.kind, d.file) for d in verify(store).damages}
    assert found == {
        ("missing", names[0]),
        ("bytes", names[1]),
        ("unreadable", names[2]),
        ("extra", "arrays/foreign"),
    }


@pytest.mark.medium
def test_s3_by_command():
    """URLs with options for a server that is not Amazon's."""
    with s3_endpoint() as endpoint, small_sizes():
        assert save_all(s3_store(endpoint, "run/step_00000001"), state(), layouts_on(), step=1) == [None] * 4
        options = {"endpoint": endpoint, "aws_region": "us-east-1", "aws_credentials": {"type": "environment"}}
        more = ("--storage", json.dumps(options))
        assert call("ls", "s3://ckpt/run", *more)[1].count("complete") == 1
        status, out, err = call("verify", "s3://ckpt/run", *more)
        assert (status, err) == (0, "") and ": good (" in out
        argv = ("reshard", "s3://ckpt/run/step_00000001", "s3://ckpt/run/step_00000002", "--mesh", "tp=2")
        assert call(*argv, *more)[0] == 0
        assert call("diff", *argv[1:3], "--ignore", "layouts", *more)[0] == 0
        assert call("show", argv[1], "--stats", *more)[0] == 0
        status, _, err = call("show", "s3://ckpt/none", *more)
        assert status == 2 and "got nothing there, wanted a checkpoint" in err
    assert call("ls", "memory://x")[0] == 2 and call("ls", "s3://x/y", "--storage", "[")[0] == 2
