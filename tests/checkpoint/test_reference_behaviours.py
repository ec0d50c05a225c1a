"""Behaviours that the reference's tests pin and that no other file here pins: REFERENCE_CHECKLIST.md names them all."""

import itertools

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.tools import verify
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes

F32 = torch.float32


def values(n):
    return {"x": torch.arange(n, dtype=F32)}


def save_here_restore_there(folder, n, source, target):
    """Save a vector under one layout and restore it on every rank under another."""
    assert save_all(folder, values(n), {"x": source}) == [None] * source.mesh.size
    wanted = cut_tree(values(n), {"x": target})
    for rank in range(target.mesh.size):
        assert_same_bits(checkpoint.restore(folder, {"x": target}, rank=rank), wanted[rank], (n, rank))


@pytest.mark.long
@pytest.mark.parametrize(
    "n, ranks, other",
    [(64, 8, 8), (64, 8, 4), (65, 8, 8), (63, 8, 5), (57, 8, 3), (9, 8, 8), (7, 8, 2), (3, 8, 8), (1, 8, 8)],
    ids=["equal", "halved", "tail+1", "tail-1", "ragged", "two for some", "empty last", "mostly empty", "one element"],
)
def test_uneven_vectors(tmp_path, n, ranks, other):
    """Nine ways to cut a vector, ranks without any of it included, to the same and to another number of ranks."""
    source, target = (Layout((n,), F32, Mesh(tp=k), ("tp",)) for k in (ranks, other))
    with small_sizes():
        save_here_restore_there(tmp_path / "there", n, source, target)
        save_here_restore_there(tmp_path / "back", n, target, source)


@pytest.mark.parametrize("parts", [2, 4, (40, 24), (1, 62, 1), (0, 64), (3, 5, 56)], ids=str)
def test_several_shards_on_a_rank(tmp_path, parts):
    """Six ways in which a rank holds several ranges of a vector, some of none."""
    source = Layout((64,), F32, Mesh(tp=4), (Split("tp", parts),))
    assert max(len(source.boxes(rank)) for rank in range(4)) > (parts != (0, 64))
    with small_sizes():
        for target in (Layout((64,), F32, Mesh(tp=8), ("tp",)), Layout((64,), F32, Mesh(tp=1))):
            save_here_restore_there(tmp_path / f"{target.mesh}", 64, source, target)


def test_a_small_view_of_a_large_tensor_is_a_small_file(tmp_path):
    """Ten elements of a million: nothing of the storage behind them is written."""
    x = torch.arange(1_000_000, dtype=F32)
    for name, view in (("slice", x[500:510]), ("strided", x[::100_000])):
        layout = {"x": Layout((10,), F32, Mesh())}
        checkpoint.save(tmp_path / name, {"x": view}, layout)
        assert sum(p.stat().st_size for p in (tmp_path / name).rglob("*") if p.is_file()) < 10_000
        assert_same_bits(checkpoint.restore(tmp_path / name, layout), {"x": view.contiguous()})


def test_ranks_without_content_take_part(tmp_path):
    """Rank 3 holds nothing of any leaf; all ranks save and restore together, and rank 0's metadata reaches all."""
    mesh = Mesh(tp=4)
    layouts = {"x": Layout((3,), F32, mesh, ("tp",)), "none": Layout((0, 4), F32, mesh)}
    state = {**values(3), "none": torch.empty(0, 4)}
    local = cut_tree(state, layouts)
    assert local[3]["x"].numel() == 0

    def work(world):
        checkpoint.save(tmp_path / "a", local[world.rank], layouts, world, {"from": f"rank {world.rank}"})
        got = checkpoint.restore(tmp_path / "a", layouts, world=world)
        assert_same_bits(got, local[world.rank])
        return checkpoint.metadata(tmp_path / "a")

    with small_sizes():
        assert run(4, work) == [{"from": "rank 0"}] * 4


@pytest.mark.parametrize(
    "content",
    [{}, {"sharding": "fully", "singleton": True}, {"optimizer": {"format": {"kind": "x", "list": [1, [2, None]]}}}],
    ids=["empty", "flat", "nested"],
)
def test_content_metadata(tmp_path, content):
    """Readable before there is a target, and equal to what was saved."""
    checkpoint.save(tmp_path / "a", values(4), {"x": Layout((4,), F32, Mesh())}, metadata=content)
    assert checkpoint.metadata(tmp_path / "a") == content == checkpoint.describe(tmp_path / "a").metadata


def test_lists_keep_their_places(tmp_path):
    """Tensors and subtrees mixed inside one list come back at their indices."""
    layout = Layout((2,), F32, Mesh())
    state = {"items": [torch.ones(2), {"deep": (torch.full((2,), 2.0),)}, torch.full((2,), 3.0)]}
    layouts = {"items": [layout, {"deep": (layout,)}, layout]}
    checkpoint.save(tmp_path / "a", state, layouts)
    got = checkpoint.restore(tmp_path / "a", layouts)
    assert isinstance(got["items"], list) and isinstance(got["items"][1]["deep"], tuple)
    assert_same_bits(got, state)


def test_what_layouts_returns_is_a_valid_request(tmp_path):
    """The stored tree of layouts restores as it is; so does the same tree without any mesh."""
    layouts = {"a": {"x": Layout((8, 4), F32, Mesh(tp=2), ("tp",))}, "b": Layout((3,), torch.int64, Mesh(tp=2))}
    state = {"a": {"x": torch.rand(8, 4)}, "b": torch.tensor([1, 2, 3])}
    assert save_all(tmp_path / "a", state, layouts) == [None] * 2
    stored, local = checkpoint.layouts(tmp_path / "a"), cut_tree(state, layouts)
    assert stored == layouts
    for rank in range(2):
        assert_same_bits(checkpoint.restore(tmp_path / "a", stored, rank=rank), local[rank])


def test_the_first_replica_is_what_counts(tmp_path):
    """Replicas that differ (they must not) are saved as one of them, whole: never a mixture inside a chunk."""
    layout = {"x": Layout((64,), F32, Mesh(dp=2))}
    got = run(
        2, lambda world: checkpoint.save(tmp_path / "a", {"x": torch.full((64,), world.rank + 1.0)}, layout, world)
    )
    assert got == [None] * 2
    x = checkpoint.restore(tmp_path / "a", {"x": Layout((64,), F32, Mesh())})["x"]
    assert x.unique().tolist() in ([1.0], [2.0])


def test_repeated_saves_hold_what_was_saved_last(tmp_path):
    """Nothing is cached from save to save: a leaf that is new at the second save is there (the reference lost it)."""
    layout, names = Layout((8,), F32, Mesh()), ["a", "b", "c", "d"]
    for count in range(1, 5):
        state = {name: torch.full((8,), float(count)) for name in names[:count]}
        layouts = dict.fromkeys(names[:count], layout)
        checkpoint.save(tmp_path / "same", state, layouts)
        checkpoint.save(tmp_path / f"{count}", state, layouts)
        for path in ("same", f"{count}"):
            assert_same_bits(checkpoint.restore(tmp_path / path, layouts), state)
            assert not verify(tmp_path / path).damages


def test_saves_on_two_orders_of_ranks_are_the_same_bytes(tmp_path):
    """tp-dp-pp or pp-dp-tp: the same global arrays whatever rank holds what."""
    x = {"w": torch.rand(8, 8)}
    mesh = Mesh(pp=2, dp=2, tp=2)
    other = mesh.view(order=("tp", "dp", "pp"), pp=2, dp=2, tp=2)
    files = []
    with small_sizes():
        for name, m in (("a", mesh), ("b", other)):
            assert save_all(tmp_path / name, x, {"w": Layout((8, 8), F32, m, ("pp", "tp"))}) == [None] * 8
            files.append({p.name: p.read_bytes() for p in (tmp_path / name / "arrays/w").iterdir()})
    assert files[0] == files[1]


@pytest.mark.parametrize("pair", list(itertools.permutations(("fsdp", "tp"), 2)), ids="-".join)
def test_two_dims_cut_then_whole_then_cut_otherwise(tmp_path, pair):
    """A grid of two axes is restored whole, and saved from there to pipeline stages with a leading dim."""
    x, mesh = {"w": torch.rand(4, 6, 8)}, Mesh(fsdp=2, tp=2)
    with small_sizes():
        assert save_all(tmp_path / "a", x, {"w": Layout((4, 6, 8), F32, mesh, (None, *pair))}) == [None] * 4
        got = checkpoint.restore(tmp_path / "a", {"w": Layout((4, 6, 8), F32, Mesh())})
        assert_same_bits(got, x)
        staged = {"w": Layout((4, 6, 8), F32, Mesh(pp=2, tp=2), ("pp", None, "tp"))}
        for rank, wanted in enumerate(cut_tree(x, staged)):
            assert_same_bits(checkpoint.restore(tmp_path / "a", staged, rank=rank), wanted)


def test_any_dtype_is_exchanged_bit_for_bit(tmp_path):
    """read="once" of bf16, fp16 and fp8 by four replicas, NaNs with their bits."""
    kinds = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64)
    layouts = {str(k): Layout((64, 8), k, Mesh(dp=4)) for k in kinds}
    generator = torch.Generator().manual_seed(0)

    def bits(kind):
        data = torch.randint(0, 2 if kind is torch.bool else 256, (64, 8 * kind.itemsize), generator=generator)
        return data.to(torch.uint8).view(kind)

    state = {str(k): bits(k) for k in kinds}
    with small_sizes():
        assert save_all(tmp_path / "a", state, layouts) == [None] * 4
        for got in run(4, lambda world: checkpoint.restore(tmp_path / "a", layouts, world=world, read="once")):
            assert_same_bits(got, state)
