"""Wrong input is refused before anything is written or read, by errors that name leaf, got, wanted and fix."""

import os

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError
from fmegatron.layout import Layout, Mesh
from fmegatron.tree import ArraySpec
from tests.checkpoint.fake_world import run

F32 = torch.float32
STATE = {"blocks": {"wq": torch.arange(12.0).view(3, 4)}, "step": torch.tensor(7)}
LAYOUTS = {"blocks": {"wq": Layout((3, 4), F32, Mesh())}, "step": Layout((), torch.int64, Mesh())}


def refused(tmp_path, state, layouts, match, **options):
    with pytest.raises(ValueError, match=match):
        checkpoint.save(tmp_path / "deep" / "a", state, layouts, **options)
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def saver():
    with checkpoint.AsyncSaver() as saver:
        yield saver


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path / "a", STATE, LAYOUTS, metadata={"config": {"dim": 3, "names": ["x", None]}}, step=7)
    return tmp_path / "a"


def test_state_and_layouts_disagree(tmp_path):
    refused(tmp_path, {"w": torch.ones(3)}, {"w": Layout((4,), F32, Mesh())}, "w: got local shape")
    refused(tmp_path, {"w": torch.ones(3).bfloat16()}, {"w": Layout((3,), F32, Mesh())}, "w: got dtype")
    refused(tmp_path, {"weight": torch.ones(3)}, {"weights": Layout((3,), F32, Mesh())}, "did you mean")


def test_pending_sums_are_refused(tmp_path):
    mesh = Mesh(dp=2)
    pending = Layout((3,), F32, mesh, unreduced=("dp",))
    got = run(2, lambda world: checkpoint.save(tmp_path / "a", {"g": torch.ones(3)}, {"g": pending}, world))
    assert all(isinstance(e, ValueError) and "g: got pending sums over ('dp',)" in str(e) for e in got)


def test_a_mesh_needs_its_ranks(tmp_path):
    refused(tmp_path, {"w": torch.ones(2)}, {"w": Layout((4,), F32, Mesh(dp=2), ("dp",))}, "w: .*2 ranks.*pass world=")


def test_metadata_is_json(tmp_path):
    state, layouts = {"w": torch.ones(3)}, {"w": Layout((3,), F32, Mesh())}
    refused(tmp_path, state, layouts, r"metadata\['loss'\]: got nan", metadata={"loss": float("nan")})
    refused(tmp_path, state, layouts, r"metadata\['a'\]\[1\]: got tensor", metadata={"a": [1, torch.ones(1)]})
    refused(tmp_path, state, layouts, "metadata: got the key 1", metadata={1: 2})


def test_ambiguous_paths(tmp_path):
    x, layout = torch.ones(3), Layout((3,), F32, Mesh())
    refused(tmp_path, {"a/b": x, "a": {"b": x}}, {"a/b": layout, "a": {"b": layout}}, "a/b: two leaves")
    refused(tmp_path, {"a/b": x, "a": x}, {"a/b": layout, "a": layout}, "a/b: a is a leaf")


def test_odd_names(tmp_path):
    names = ["..", ".", "zarr.json", "manifest.json", "c.0", "a b", "ü", "%2E", "COMPLETE", "c.0.0", "part.1", "a\\b"]
    state = {name: torch.full((1 << 15,), float(i)) for i, name in enumerate(names)}
    layouts = {name: Layout((1 << 15,), F32, Mesh()) for name in names}
    checkpoint.save(tmp_path / "a", state, layouts)
    got = checkpoint.restore(tmp_path / "a", layouts)
    assert all(torch.equal(got[n], state[n]) for n in names) and os.listdir(tmp_path) == ["a"]
    assert checkpoint.layouts(tmp_path / "a") == layouts


def test_specs_serve_as_layouts(tmp_path):
    spec = ArraySpec(Layout((2,), F32, Mesh()))
    checkpoint.save(tmp_path / "a", {"w": torch.ones(2)}, {"w": spec})
    assert torch.equal(checkpoint.restore(tmp_path / "a", {"w": spec})["w"], torch.ones(2))


def test_metadata_comes_back(saved):
    assert checkpoint.metadata(saved) == {"config": {"dim": 3, "names": ["x", None]}}
    assert checkpoint.layouts(saved) == LAYOUTS


@pytest.mark.parametrize(
    "function", [checkpoint.metadata, checkpoint.layouts, lambda p: checkpoint.restore(p, LAYOUTS)]
)
def test_missing_checkpoint(tmp_path, function):
    with pytest.raises(CheckpointError, match="nowhere.*does not exist"):
        function(tmp_path / "nowhere")
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        function(tmp_path / "nowhere")


def test_unknown_leaf(saved):
    target = {"blocks": {"wk": LAYOUTS["blocks"]["wq"]}, "step": LAYOUTS["step"]}
    with pytest.raises(ValueError, match=r"(?s)blocks/wk: not in the checkpoint \(did you mean blocks/wq\?\)") as error:
        checkpoint.restore(saved, target)
    assert not isinstance(error.value, CheckpointError)
    with pytest.raises(ValueError, match="blocks/wk: not in"):
        checkpoint.restore(saved, target, strict="subset")


def test_leaves_that_nobody_asks_for(saved):
    with pytest.raises(ValueError, match="not asked for: step; .*strict='subset'"):
        checkpoint.restore(saved, {"blocks": LAYOUTS["blocks"]})
    assert checkpoint.restore(saved, {"step": LAYOUTS["step"]}, strict="subset") == {"step": torch.tensor(7)}
    with pytest.raises(ValueError, match="strict: got 'maybe'"):
        checkpoint.restore(saved, LAYOUTS, strict="maybe")


def test_wrong_shape_and_dtype(saved):
    def ask(layout, **options):
        return checkpoint.restore(saved, {"blocks": {"wq": layout}}, strict="subset", **options)

    with pytest.raises(ValueError, match=r"blocks/wq: stored with global shape \(3, 4\), wanted \(4, 3\)"):
        ask(Layout((4, 3), F32, Mesh()))
    with pytest.raises(ValueError, match="blocks/wq: stored as float32, wanted bfloat16; pass cast=True"):
        ask(Layout((3, 4), torch.bfloat16, Mesh()))
    with pytest.raises(ValueError, match="blocks/wq: stored as float32, wanted int32, which cannot hold it"):
        ask(Layout((3, 4), torch.int32, Mesh()), cast=True)
    with pytest.raises(ValueError, match="pending sum"):
        ask(Layout((3, 4), F32, Mesh(dp=1), unreduced=("dp",)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_cast_on_the_way(tmp_path, dtype):
    mesh = Mesh(tp=2)
    x = {"big": torch.randn(300, 200), "small": torch.randn(3, 10)}
    checkpoint.save(tmp_path / "a", x, {k: Layout(tuple(v.shape), F32, Mesh()) for k, v in x.items()})
    target = {k: Layout(tuple(v.shape), dtype, mesh, (None, "tp")) for k, v in x.items()}
    got = checkpoint.restore(tmp_path / "a", target, rank=1, cast=True)
    for k, v in x.items():
        wanted = v.chunk(2, 1)[1].to(dtype)
        assert torch.equal(got[k].contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_which_rank(saved):
    two = {"blocks": {"wq": Layout((3, 4), F32, Mesh(tp=2), (None, "tp"))}, "step": Layout((), torch.int64, Mesh(tp=2))}
    with pytest.raises(ValueError, match="got no rank"):
        checkpoint.restore(saved, two)
    assert torch.equal(checkpoint.restore(saved, two, rank=1)["blocks"]["wq"], STATE["blocks"]["wq"][:, 2:])
    with pytest.raises(ValueError, match="got rank 2"):
        checkpoint.restore(saved, two, rank=2)
    got = run(3, lambda world: checkpoint.restore(saved, two, world=world))
    assert all("2 ranks" in str(e) and "3 restore together" in str(e) for e in got)
    got = run(2, lambda world: checkpoint.restore(saved, two, world=world, rank=0))
    assert any("pass one of them" in str(e) for e in got)


def test_an_error_on_one_rank_is_raised_on_all(saved):
    two = {"blocks": {"wq": Layout((3, 4), F32, Mesh(tp=2), (None, "tp"))}, "step": Layout((), torch.int64, Mesh(tp=2))}

    def work(world):
        layouts = two if world.rank == 0 else {**two, "step": Layout((1,), torch.int64, Mesh(tp=2))}
        return checkpoint.restore(saved, layouts, world=world)

    got = run(2, work)
    assert isinstance(got[0], RuntimeError) and isinstance(got[1], ValueError)
    assert all("step: stored with global shape ()" in str(e) for e in got)


def test_the_device(saved):
    assert checkpoint.restore(saved, LAYOUTS, device="meta")["step"].device.type == "meta"


@pytest.mark.parametrize(
    "options, said",
    [
        ({"step": "5"}, r"step: got '5' \(str\), wanted a whole number"),
        ({"step": True}, "step: got True"),
        ({"step": 2.0}, "step: got 2.0"),
        ({"step": 1 << 62}, "step: got 46116860"),
        ({"metadata": [1]}, "metadata: got .1., wanted a dict"),
        ({"metadata": "x"}, "metadata: got 'x', wanted a dict"),
        ({"key": "a" * 5000}, "got a path of 5000 characters"),
        ({"key": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_what_no_reader_would_take_back_is_never_written(saver, tmp_path, options, said):
    """Such a save would replace a good checkpoint by one that cannot be restored."""
    key = options.pop("key", "w")
    good = {"w": Layout((2, 3), torch.float32, Mesh())}
    checkpoint.save(tmp_path / "a", {"w": torch.ones(2, 3)}, good)
    layouts = {key: good["w"]}
    with pytest.raises(ValueError, match=said):
        checkpoint.save(tmp_path / "a", {key: torch.zeros(2, 3)}, layouts, **options)
    with pytest.raises(ValueError, match=said):
        checkpoint.save_async(tmp_path / "a", {key: torch.zeros(2, 3)}, layouts, saver=saver, **options)
    assert torch.equal(checkpoint.restore(tmp_path / "a", good)["w"], torch.ones(2, 3))
    assert os.listdir(tmp_path) == ["a"]


def test_a_path_that_is_wrong_on_one_rank_is_told_to_all(tmp_path):
    layouts = {"w": Layout((2, 4), torch.float32, Mesh(fsdp=2), ("fsdp",))}
    state = {"w": torch.ones(1, 4)}

    def path(world):
        return "nowhere://x" if world.rank else tmp_path / "a"

    for call in (
        lambda world: checkpoint.save(path(world), state, layouts, world),
        lambda world: checkpoint.restore(path(world), layouts, world=world),
        lambda world: checkpoint.restore(tmp_path / "a", layouts, world=world, read="own" if world.rank else "twice"),
    ):
        assert all(isinstance(error, (ValueError, RuntimeError)) for error in run(2, call))
    assert os.listdir(tmp_path) == []


LAYOUT = Layout((3,), F32, Mesh())
GOOD = ({"w": torch.ones(3)}, {"w": LAYOUT})
CYCLE = {}
CYCLE["a"] = [CYCLE]


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
        lambda: checkpoint.read_latest(path),
        lambda: checkpoint.open_store(path),
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
        lambda: checkpoint.restore(saved, layouts),
        lambda: checkpoint.restore(saved, layouts, rank=0, read="once"),
        lambda: checkpoint.explain(saved, layouts),
        lambda: manager.save(1, GOOD[0], layouts),
        lambda: manager.save(1, GOOD[0], layouts, wait=False),
        lambda: checkpoint.LocalReplicas(tmp_path / "l", "run", copies=1).save(1, GOOD[0], layouts),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert manager.steps() == [] and not os.path.exists(tmp_path / "b")


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
    manager = [checkpoint.Manager(tmp_path), checkpoint.Manager(tmp_path)]

    def save(world):
        manager[world.rank].save(5 - 6 * world.rank, {"w": torch.ones(1, 4)}, layouts, world)

    def restore(world):
        manager[world.rank].restore(5 - 6 * world.rank, layouts, world=world)

    for call in (save, restore):
        got = run(2, call)
        assert [type(error) for error in got] == [RuntimeError, ValueError], got
        assert all("step: got -1" in str(error) for error in got)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "metadata, said",
    [
        (CYCLE, r"metadata\['a'\]\[0\].*nested deeper than 100"),
        ({"n": 10**5000}, r"metadata\['n'\]: got a number of more than 4000 digits"),
        ({"many": [[]] * 2_000_000}, "bytes of memory, which no reader takes; keep large values in tensors"),
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
        checkpoint.restore(saved, LAYOUTS, **options)


@pytest.mark.parametrize("world", [5, 0, Mesh()], ids=str)
def test_what_is_no_world(saver, tmp_path, world):
    manager = checkpoint.Manager(tmp_path, saver=saver)
    for call in (
        lambda: checkpoint.save(tmp_path / "a", *GOOD, world),
        lambda: checkpoint.save_async(tmp_path / "a", *GOOD, world, saver=saver),
        lambda: manager.save(1, *GOOD, world),
        lambda: manager.latest(world),
        lambda: manager.restore(1, GOOD[1], world=world),
        lambda: manager.restore_latest(GOOD[1], world=world),
        lambda: checkpoint.LocalReplicas(tmp_path / "l", "run", copies=1).save(1, *GOOD, world),
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
