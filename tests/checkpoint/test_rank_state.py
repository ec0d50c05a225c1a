"""State that is not weights: steps, keys, positions, loss scales, and what each rank has for itself."""

import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint import rank_state, restore
from fmegatron.checkpoint.reading.mapping import per_rank
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all


def value(i):
    return {"position": 1000 + i, "files": [f"shard-{i}", None], "rng": {"state": [i, 2**62], "gauss": 0.1}, "ok": True}


def save_values(path, mesh, axes=None, capacity=256):
    """Every position along the axes saves its own value, beside state that all share."""
    layouts = {"loader": rank_state.layout(mesh, axes, capacity), "step": Layout((), torch.int64, mesh)}
    names = mesh.names if axes is None else axes

    def work(world):
        state = {"loader": rank_state.pack(value(mesh.index(world.rank, names)), capacity), "step": torch.tensor(7)}
        checkpoint.save(path, state, layouts, world)

    assert run(mesh.size, work) == [None] * mesh.size


def loaded(path, mesh, axes=None, rules=(), capacity=256):
    """What every rank of a mesh gets back."""
    layouts = {"loader": rank_state.layout(mesh, axes, capacity), "step": Layout((), torch.int64, mesh)}
    got = run(mesh.size, lambda world: restore(path, layouts, world=world, rules=rules))
    return [x if isinstance(x, BaseException) else rank_state.unpack(x["loader"]) for x in got]


def test_the_same_number_of_ranks_on_another_mesh(tmp_path):
    save_values(tmp_path / "a", Mesh(dp=2, tp=2))
    assert loaded(tmp_path / "a", Mesh(dp=2, tp=2)) == [value(i) for i in range(4)]
    assert loaded(tmp_path / "a", Mesh(fsdp=4)) == [value(i) for i in range(4)]
    for error in loaded(tmp_path / "a", Mesh(dp=3)):
        assert "loader: stored with global shape (4, 256), wanted (3, 256)" in str(error)


def test_rules_for_another_number_of_ranks(tmp_path):
    save_values(tmp_path / "a", Mesh(dp=2, tp=2), "dp")
    one, many = Mesh(), Mesh(dp=5)
    assert loaded(tmp_path / "a", Mesh(dp=2, tp=3), "dp") == [value(i // 3) for i in range(6)]
    wrap, first = [per_rank("loader", "wrap")], [per_rank("loader", "first")]
    assert loaded(tmp_path / "a", many, "dp", wrap) == [value(i % 2) for i in range(5)]
    assert loaded(tmp_path / "a", many, "dp", first) == [value(0)] * 5
    assert loaded(tmp_path / "a", Mesh(dp=2), "dp", first) == [value(0)] * 2
    assert loaded(tmp_path / "a", Mesh(dp=2), "dp", wrap) == [value(0), value(1)]
    assert loaded(tmp_path / "a", one, None, wrap) == [value(0)]
    with pytest.raises(ValueError, match="got 'some', wanted 'first' or 'wrap'"):
        per_rank("loader", "some")


def test_arrays_of_each_rank(tmp_path):
    mesh, wide = Mesh(dp=2), Mesh(dp=3)
    states = torch.arange(2 * 5056, dtype=torch.int64).view(2, 5056)

    def layout(mesh):
        return {"generator": Layout((mesh.size, 5056), torch.int64, mesh, ("dp",))}

    save_all(tmp_path / "a", {"generator": states}, layout(mesh))
    rules = [per_rank("generator", "wrap")]
    got = [restore(tmp_path / "a", layout(wide), rank=rank, rules=rules)["generator"] for rank in range(3)]
    assert torch.equal(torch.cat(got), states[[0, 1, 0]])


@pytest.mark.parametrize("value", [None, 0, "ü", [], {}, [[1], {"a": [1.5, None]}], "x" * 4086])
def test_values_come_back(value):
    assert rank_state.unpack(rank_state.pack(value)) == value


def test_what_is_not_json_is_refused():
    for wrong in (float("nan"), {1: 2}, {"a": {2: 3}}, torch.ones(1), {"s": {1, 2}}):
        with pytest.raises(ValueError, match="rank state: got"):
            rank_state.pack(wrong)
    with pytest.raises(ValueError, match="got a value of 4097 bytes as JSON, wanted at most capacity=4096"):
        rank_state.pack("x" * 4087)
    for wrong in (torch.full((1, 64), 255, dtype=torch.uint8), torch.ones(1, 8), torch.ones(0, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="wanted what pack made"):
            rank_state.unpack(wrong)
    damaged = rank_state.pack({"a": 1})
    damaged[0, 8] = 0
    with pytest.raises(ValueError, match="got no JSON"):
        rank_state.unpack(damaged)


@pytest.mark.parametrize("read", ["own", "once"])
def test_scalars_and_short_vectors(tmp_path, read):
    """Steps, keys, positions and loss scales are leaves like others, on any mesh."""
    state = {
        "step": torch.tensor(12_345_678_901),
        "key": torch.tensor([1 << 62, 3], dtype=torch.int64),
        "loss_scale": {"scale": torch.tensor(65536.0), "good_steps": torch.tensor(17, dtype=torch.int32)},
        "position": torch.tensor([4, 5, 6], dtype=torch.uint32),
        "done": torch.tensor(True),
        "groups": [torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.9, 0.95])],
    }

    def on(mesh):
        return tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh), state)

    source, target = on(Mesh(dp=2, tp=2)), on(Mesh(fsdp=3))
    save_all(tmp_path / "a", state, source, metadata={"tokenizer": "gpt2", "flags": {"tied": True}}, step=12)
    got = run(3, lambda world: restore(tmp_path / "a", target, world=world, read=read))
    for rank, local in enumerate(cut_tree(state, target)):
        assert_same_bits(got[rank], local)


def test_a_checkpoint_tells_what_it_is_before_there_is_a_target(tmp_path):
    experts = Mesh(dp=2, tp=2).view(ep=4)
    layouts = {"w": Layout((8, 6), torch.bfloat16, experts, ("ep",)), "n": Layout((), torch.int64, Mesh(dp=2, tp=2))}
    state = {"w": torch.ones(8, 6, dtype=torch.bfloat16), "n": torch.tensor(1)}
    save_all(tmp_path / "a", state, layouts, metadata={"tied": True}, step=12)
    said = checkpoint.describe(tmp_path / "a")
    assert (said.step, said.metadata, said.format, said.version) == (12, {"tied": True}, "fmegatron.checkpoint", 4)
    assert (said.leaves, said.total_bytes, set(said.meshes)) == (2, 8 * 6 * 2 + 8, {experts, Mesh(dp=2, tp=2)})
    with pytest.raises(AttributeError):
        said.step = 13
    with pytest.raises(checkpoint.CheckpointError, match="does not exist"):
        checkpoint.describe(tmp_path / "b")
