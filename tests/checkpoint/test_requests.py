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
    refused(tmp_path, {"a/b": x, "a": {"b": x}}, {"a/b": layout, "a": {"b": layout}}, "a/b: got two leaves")
    refused(tmp_path, {"a/b": x, "a": x}, {"a/b": layout, "a": layout}, "a/b: got a path below the leaf a")


def test_odd_names(tmp_path):
    names = ["..", ".", "zarr.json", "manifest.json", "c.0", "a b", "ü", "%2E", "COMPLETE", "c.0.0", "part.1", "a\\b"]
    names += ["a.__lock", ".__lock", "__lock", "a.__lock.__lock"]  # tensorstore refuses files below such names
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
    assert all("2 ranks" in str(e) and "wanted 3, which restore together" in str(e) for e in got)
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


@pytest.mark.long
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


@pytest.mark.long
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
