"""Padded shards in checkpoints: no byte of padding is stored, and any mesh restores the same bits with zeros behind."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron import checkpoint, model, optim, step, tree
from fmegatron.layout import DataParallel, Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.layout import strategies
from tests.pairs import few

SENTINEL = 0x5EA7BEEF  # in the padding of what is saved


def state_of(layouts, seed=0):
    """A tree of global arrays without the sentinel."""
    generator = torch.Generator().manual_seed(seed)
    return tree.map(
        lambda x: torch.randint(-999, 999, x.shape, generator=generator).to(x.dtype), layouts
    )  # fmt: skip


def padding_of(local, layout, rank):
    """Where padding is in a local tensor."""
    there = torch.ones(local.shape, dtype=torch.bool)
    for box in layout.boxes(rank):
        box.view(there).fill_(False)
    return there


def saved_with_sentinels(path, state, layouts):
    local = cut_tree(state, layouts)
    for rank, parts in enumerate(local):
        for x, layout in zip(tree.leaves(parts), tree.leaves(layouts), strict=True):
            there = padding_of(x, layout, rank)
            if x.dtype.itemsize == 4:
                x.view(torch.int32)[there] = SENTINEL
            else:
                x[there] = 77
    assert run(len(local), lambda world: checkpoint.save(path, local[world.rank], layouts, world)) == [None] * len(
        local
    )
    stored = b"".join(Path(d, name).read_bytes() for d, _, names in os.walk(path) for name in names)
    assert SENTINEL.to_bytes(4, "little") not in stored
    assert checkpoint.layouts(path) == layouts


def assert_restored(path, state, layouts):
    for rank, wanted in enumerate(cut_tree(state, layouts)):
        for x, layout in zip(tree.leaves(wanted), tree.leaves(layouts), strict=True):
            x[padding_of(x, layout, rank)] = 0
        assert_same_bits(checkpoint.restore(path, layouts, rank=rank), wanted, f"rank {rank}")


@pytest.mark.medium
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_layout_to_any_layout(data):
    shape, dtype = data.draw(strategies.shapes()), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    saved = {"x": data.draw(strategies.layouts(shape=shape, dtype=dtype, padded=True))}
    wanted = {"x": data.draw(strategies.layouts(shape=shape, dtype=dtype, padded=None))}
    state = state_of(saved)
    chunk, band = data.draw(st.sampled_from([(128, 32), (32, 16), (1 << 20, 1 << 20)]))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        with small_sizes(chunk, band):
            saved_with_sentinels(folder + "/a", state, saved)
            assert_restored(folder + "/a", state, wanted)


TINY = model.llama(vocab_size=58, dim=40, layers=2, heads=4, kv_heads=2, ffn_dim=22, max_seq=16)


def layouts_on(mesh, name):
    strategy = DataParallel.named(name)
    specs = model.specs(TINY, mesh, strategy=strategy)
    return tree.layouts(step.state_specs(specs, optim.adamw(1e-3), strategy))._asdict()


SOURCES = [("zero3", Mesh(fsdp=6)), ("hybrid", Mesh(dp=2, fsdp=3, tp=2)), ("zero1", Mesh(fsdp=24))]
TARGETS = [("zero3", Mesh(fsdp=4)), ("zero1", Mesh(fsdp=7)), ("zero3", Mesh()), ("hybrid", Mesh(dp=2, fsdp=3, tp=2))]


@pytest.mark.slow
@pytest.mark.parametrize("source, small", few(1, [(s, small) for s in SOURCES for small in (True, False)]))
def test_a_decoder_across_meshes(tmp_path, source, small):
    name, mesh = source
    saved = layouts_on(mesh, name)
    assert any(layout.padded for layout in tree.leaves(saved))
    state = state_of(saved)
    if small:
        with small_sizes():
            saved_with_sentinels(tmp_path / "a", state, saved)
    else:
        saved_with_sentinels(tmp_path / "a", state, saved)
    for other, where in TARGETS:
        assert_restored(tmp_path / "a", state, layouts_on(where, other))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_from_24_ranks_to_others_and_back(tmp_path, name):
    """Bit for bit, and no byte of padding is in any of the checkpoints."""
    many = layouts_on(Mesh(fsdp=24), name)
    state = state_of(many)
    saved_with_sentinels(tmp_path / "24", state, many)
    for n in (8, 5, 1):
        fewer = layouts_on(Mesh(fsdp=n), name)
        assert_restored(tmp_path / "24", state, fewer)
        saved_with_sentinels(tmp_path / str(n), state, fewer)
        assert_restored(tmp_path / str(n), state, many)


def test_a_range_that_ends_inside_a_row_is_stored_without_padding(tmp_path):
    """A `piece`: the bytes of a local tensor, of which only those of true elements are stored."""
    layouts = {"x": Layout((257, 1023), torch.float32, Mesh(fsdp=5), flat=("fsdp",), padded=True)}
    state = state_of(layouts)
    saved_with_sentinels(tmp_path / "a", state, layouts)
    assert_restored(tmp_path / "a", state, {"x": Layout((257, 1023), torch.float32, Mesh(fsdp=2), ("fsdp",))})
    assert_restored(tmp_path / "a", state, layouts)


def test_the_manifest_states_padded_layouts(tmp_path):
    layouts = {"x": Layout((10, 6), torch.float32, Mesh(fsdp=4), ("fsdp",), padded=True)}
    layouts["y"] = Layout((3, 7), torch.float32, Mesh(fsdp=4), (None, Split("fsdp", (5, 2))), padded=True)
    state = state_of(layouts)
    assert save_all(tmp_path / "a", state, layouts) == [None] * 4
    assert checkpoint.layouts(tmp_path / "a") == layouts
