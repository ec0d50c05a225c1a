"""Arguments of the wrong kind: ValueError in words for people, on all ranks, before anything is written or read."""

import os

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage.tracker import read_latest
from fmegatron.layout import Layout, Mesh
from fmegatron.tree import ArraySpec
from tests.checkpoint.fake_world import run

F32 = torch.float32
LAYOUT = Layout((3,), F32, Mesh())
GOOD = ({"w": torch.ones(3)}, {"w": LAYOUT})
CYCLE = {}
CYCLE["a"] = [CYCLE]


@pytest.fixture(scope="module")
def saver():
    with checkpoint.AsyncSaver() as saver:
        yield saver


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path / "a", *GOOD)
    return tmp_path / "a"


@pytest.mark.medium
@pytest.mark.parametrize(
    "path, said",
    [
        (None, "got None .NoneType., wanted a str, a Path or a Store"),
        (5, "got 5 .int."),
        (b"a", r"got b'a' .bytes., .*os.fsdecode"),
        ("", "got '', wanted the path of a directory"),
        ("a\0b", "got .*, wanted the path of a directory"),
        (GOOD[0], "got .* .dict., wanted a str"),
    ],
    ids=str,
)
def test_what_is_no_path(saver, path, said):
    for call in (
        lambda: checkpoint.save(path, *GOOD),
        lambda: checkpoint.save_async(path, *GOOD, saver=saver),
        lambda: checkpoint.restore(path, GOOD[1]),
        lambda: checkpoint.describe(path),
        lambda: checkpoint.layouts(path),
        lambda: checkpoint.metadata(path),
        lambda: checkpoint.explain(path, GOOD[1]),
        lambda: read_latest(path),
        lambda: open_store(path),
        lambda: checkpoint.Manager(path),
    ):
        with pytest.raises(ValueError, match="path: " + said):
            call()


@pytest.mark.parametrize(
    "layouts, said",
    [
        ({"w": torch.ones(3)}, "w: got a Tensor, wanted a Layout or an ArraySpec; .*is it the state"),
        ({"w": "tp"}, "w: got a str"),
        ({"w": ("tp", None)}, "w/0: got a str"),
        (Mesh(), "layouts: got a Mesh"),
    ],
    ids=str,
)
def test_what_are_no_layouts(saver, tmp_path, saved, layouts, said):
    manager = checkpoint.Manager(tmp_path, saver=saver)
    for call in (
        lambda: checkpoint.save(tmp_path / "b", GOOD[0], layouts),
        lambda: checkpoint.save_async(tmp_path / "b", GOOD[0], layouts, saver=saver),
        lambda: checkpoint.explain(saved, layouts),
        lambda: manager.save(1, GOOD[0], layouts),
        lambda: manager.save(1, GOOD[0], layouts, wait=False),
        lambda: checkpoint.LocalReplicas(tmp_path / "l", "run", copies=1).save(1, GOOD[0], layouts),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert manager.steps() == [] and not os.path.exists(tmp_path / "b")


@pytest.mark.parametrize(
    "target, said",
    [
        ({"w": "tp"}, "w: stored as an array, wanted 'tp'; put a tensor there"),
        ({"w": ("tp", None)}, "w: stored as an array, wanted a tuple of 2; put a tensor there"),
        (Mesh(), "^target: got Mesh.*, wanted a tensor, number"),
    ],
    ids=str,
)
def test_what_are_no_targets(tmp_path, saved, target, said):
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, *GOOD)
        for call in (
            lambda: checkpoint.restore(saved, target),
            lambda: checkpoint.restore(saved, target, rank=0, read="once"),
            lambda: manager.restore(1, target),
            lambda: manager.restore_latest(target),
        ):
            with pytest.raises(ValueError, match=said):
                call()


def test_array_specs_are_layouts(saver, tmp_path):
    """A tree of specs, as a model gives it, serves wherever layouts are wanted."""
    specs = {"w": ArraySpec(LAYOUT)}
    manager = checkpoint.Manager(tmp_path, saver=saver)
    manager.save(1, GOOD[0], specs)
    manager.save(2, GOOD[0], specs, wait=False)
    manager.close()
    local = checkpoint.LocalReplicas(tmp_path / "l", "run", copies=1)
    local.save(3, GOOD[0], specs)
    for state in (
        checkpoint.restore(manager.path(1), specs),
        manager.restore(2, specs)[0],
        manager.restore_latest(specs)[1],
        local.restore_latest(specs)[1],
    ):
        assert torch.equal(state["w"], torch.ones(3))
    assert [read.leaf for read in checkpoint.explain(manager.path(1), specs)] == ["w"]


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", torch.tensor(1), 10**18, [1]], ids=str)
def test_what_is_no_step(saver, tmp_path, step):
    manager = checkpoint.Manager(tmp_path, saver=saver)
    for call in (
        lambda: checkpoint.save(tmp_path / "a", *GOOD, step=step),
        lambda: checkpoint.save_async(tmp_path / "a", *GOOD, step=step, saver=saver),
        lambda: manager.save(step, *GOOD),
        lambda: manager.save(step, *GOOD, wait=False),
        lambda: manager.restore(step, GOOD[1]),
        lambda: manager.path(step),
        lambda: manager.pin(step),
        lambda: manager.unpin(step),
        lambda: checkpoint.LocalReplicas(tmp_path / "l", "run", copies=1).save(step, *GOOD),
    ):
        with pytest.raises(ValueError, match=r"step: got .*, wanted a whole number of 0 or more.*pass int"):
            call()
    assert manager.steps() == [] and "a" not in os.listdir(tmp_path)


def test_a_step_that_is_wrong_on_one_rank_is_told_to_all(tmp_path):
    layouts = {"w": Layout((2, 4), F32, Mesh(fsdp=2), ("fsdp",))}

    def save(world):
        checkpoint.Manager(tmp_path, world=world).save(5 - 6 * world.rank, {"w": torch.ones(1, 4)}, layouts)

    def restore(world):
        checkpoint.Manager(tmp_path, world=world).restore(5 - 6 * world.rank, layouts)

    for call in (save, restore):
        got = run(2, call)
        assert [type(error) for error in got] == [RuntimeError, ValueError], got
        assert all("step: got -1" in str(error) for error in got)
    assert os.listdir(tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "metadata, said",
    [
        (CYCLE, r"metadata\['a'\]\[0\].*nested deeper, wanted at most 100"),
        ({"n": 10**5000}, r"metadata\['n'\]: got a longer number, wanted at most 4000 digits"),
        ({"many": [[]] * 2_000_000}, "got a manifest that no reader takes .*bytes of memory.*keep large values"),
    ],
    ids=["cycle", "digits", "memory"],
)
def test_metadata_that_no_reader_takes_back(saver, tmp_path, metadata, said):
    checkpoint.save(tmp_path / "a", *GOOD)
    with pytest.raises((ValueError, RuntimeError), match=said):
        checkpoint.save(tmp_path / "a", *GOOD, metadata=metadata)
    assert checkpoint.metadata(tmp_path / "a") == {} and os.listdir(tmp_path) == ["a"]
    if "many" not in metadata:
        with pytest.raises(ValueError, match=said):
            checkpoint.save_async(tmp_path / "a", *GOOD, metadata=metadata, saver=saver)


def test_metadata_that_readers_do_take(tmp_path):
    nested = []
    for _ in range(95):
        nested = [nested]
    metadata = {"deep": nested, "number": 10**3999, "state": -(1 << 127), "text": "\N{SNOWMAN}"}
    checkpoint.save(tmp_path / "a", *GOOD, metadata=metadata)
    assert checkpoint.metadata(tmp_path / "a") == metadata


@pytest.mark.parametrize(
    "options, said",
    [
        ({"world": 5}, "world: got 5 .int., wanted a World, or None"),
        ({"world": 0}, "world: got 0 .int."),
        ({"world": Mesh()}, "world: got Mesh.* .Mesh., .*connect.mesh."),
        ({"rank": "0"}, "rank: got '0' .str."),
        ({"rank": True}, "rank: got True .bool."),
        ({"rules": 5}, "rules: got 5, wanted rules such as rename"),
        ({"rules": "x"}, "rules: got 'x', wanted rules such as rename"),
        ({"prefix": None}, "prefix: got None, wanted the path of a stored subtree"),
        ({"device": "gpu9"}, "device: got 'gpu9', wanted a torch.device or its name"),
        ({"device": 3.5}, "device: got 3.5"),
    ],
    ids=str,
)
def test_other_arguments_of_restore(saved, options, said):
    with pytest.raises(ValueError, match=said):
        checkpoint.restore(saved, GOOD[1], **options)


@pytest.mark.parametrize("world", [5, 0, Mesh()], ids=str)
def test_what_is_no_world(saver, tmp_path, world):
    for call in (
        lambda: checkpoint.save(tmp_path / "a", *GOOD, world),
        lambda: checkpoint.save_async(tmp_path / "a", *GOOD, world, saver=saver),
        lambda: checkpoint.Manager(tmp_path, saver=saver, world=world),
        lambda: checkpoint.LocalReplicas(tmp_path / "l", "run", world, copies=1),
    ):
        with pytest.raises(ValueError, match="world: got .*, wanted a World, or None for one process"):
            call()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "options, said",
    [
        ({"arena_bytes": "x"}, "arena_bytes='x', wanted a whole number, more than 0"),
        ({"arena_bytes": 1.5}, "arena_bytes=1.5"),
        ({"in_flight": True}, "in_flight=True"),
        ({"in_flight": 0}, "in_flight=0"),
        ({"time_limit_s": None}, "time_limit_s=None, wanted seconds"),
        ({"time_limit_s": float("nan")}, "time_limit_s=nan"),
        ({"nice": "a"}, "nice='a'"),
    ],
    ids=str,
)
def test_arguments_of_a_saver(options, said):
    with pytest.raises(ValueError, match="AsyncSaver: got " + said):
        checkpoint.AsyncSaver(**options)


@pytest.mark.parametrize("metrics, said", [(5, "metrics: got 5"), ({"a": None}, "metrics.*: got None, wanted a num")])
def test_metrics(tmp_path, metrics, said):
    with pytest.raises(ValueError, match=said):
        checkpoint.Manager(tmp_path).save(1, *GOOD, metrics=metrics)
    with pytest.raises(ValueError, match="metadata: got 5"):
        checkpoint.Manager(tmp_path).save(1, *GOOD, metadata=5, metrics={"a": 1.0})
    with pytest.raises(ValueError, match="saver: got 5 .int., wanted an AsyncSaver or None"):
        checkpoint.Manager(tmp_path, saver=5)
    with pytest.raises(ValueError, match="saver: got 5"):
        checkpoint.save_async(tmp_path / "a", *GOOD, saver=5)
    assert os.listdir(tmp_path) == []
