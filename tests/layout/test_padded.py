"""Padded layouts: true elements once, rooms of one size, torch's chunk rule, and nothing new where all divides."""

import json
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron import tree
from fmegatron.layout import Layout, Mesh, Split, check_cover, plan_reshard
from fmegatron.testing import join, split
from tests.layout.arrays import cut, execute, numbered, reference_local
from tests.layout.strategies import layouts, meshes, shapes


def true(local, layout, rank):
    """The elements of a rank that are no padding."""
    return torch.cat([torch.zeros(0), *(box.view(local).reshape(-1) for box in layout.boxes(rank))])


@settings(max_examples=150, deadline=None)
@given(layouts(padded=True, unreduced=True))
def test_true_elements_are_held_once_and_all_rooms_are_one(layout):
    x, rooms = numbered(layout.shape), set()
    held = torch.zeros(layout.shape, dtype=torch.int64)
    for rank, local in enumerate(cut(x, layout)):
        rooms.add(local.shape)
        for box in layout.boxes(rank):
            held[box.slices] += 1
        assert (local > 0).sum() == sum(box.size for box in layout.boxes(rank))
    assert (held == layout.replicas * layout.mesh.extent(layout.unreduced)).all()
    assert len(rooms) == 1 and layout.is_even_otherwise and layout.is_even
    assert bool(layout.padded) == bool(layout.padding_axes)
    if layout.padded > 1:  # only where it makes other ranges
        assert layout.local_shape(0)[-1] % layout.padded == 0
        assert layout.flat_counts and layout != layout.replace(padded=True)
    else:
        assert bool(layout.padded) == (not layout.replace(padded=False).is_even)
    assert layout.nbytes == math.prod(layout.shape) * 4
    check_cover(layout)
    alone = layout.replace(padded=False)
    assert alone.padded is False and (alone.divides == layout.divides or layout.padded > 1 and not layout.divides)
    if not layout.padded:  # canonical
        assert layout == alone and hash(layout) == hash(alone) and layout.to_json() == alone.to_json()
    else:
        assert layout != alone and repr(alone) != repr(layout)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


@settings(max_examples=100, deadline=None)
@given(layouts(padded=True), st.data())
def test_overlapping_finds_the_same_as_looking_at_every_shard(layout, data):
    start = [data.draw(st.integers(0, n)) for n in layout.shape]
    stop = [data.draw(st.integers(a, n)) for a, n in zip(start, layout.shape, strict=True)]
    found = dict(layout.overlapping(start, stop))
    for rank in range(layout.mesh.size):
        boxes = [b for box in layout.boxes(rank) if (b := box.intersect(start, stop))]
        assert found.get(layout.shard(rank), []) == boxes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reshard_plans_between_padded_and_other_layouts(data):
    shape, mesh = data.draw(shapes()), data.draw(meshes())
    src = data.draw(layouts(shape=shape, mesh=mesh, padded=None))
    dst = data.draw(layouts(shape=shape, mesh=data.draw(st.sampled_from([mesh, data.draw(meshes())])), padded=None))
    plans = [plan_reshard(src, dst, rank) for rank in range(max(src.mesh.size, dst.mesh.size))]
    moved = execute(src, dst, cut(numbered(shape), src), plans)
    assert all(torch.equal(a, b) for a, b in zip(moved, cut(numbered(shape), dst), strict=True))


def test_one_axis_is_the_chunk_rule_of_torch():
    mesh = Mesh(fsdp=4)
    for shape, spec, flat in (((10, 3), ("fsdp",), ()), ((3, 5), (), ("fsdp",)), ((9,), (Split("fsdp", (7, 2)),), ())):
        layout = Layout(shape, torch.float32, mesh, spec, flat=flat, padded=True)
        for rank, local in enumerate(cut(numbered(shape), layout)):
            assert torch.equal(true(local, layout, rank), reference_local(numbered(shape), layout, rank).reshape(-1))


def test_an_inner_axis_cuts_the_room_of_the_outer_chunk():
    layout = Layout((7,), torch.float32, Mesh(fsdp=2, tp=2), (("fsdp", "tp"),), padded=True)
    assert [[(s.start, s.local, s.length) for s in layout.segments(rank, 0)] for rank in range(4)] == [
        [(0, 0, 2)], [(2, 0, 2)], [(4, 0, 2)], [(6, 0, 1)],
    ]  # fmt: skip
    assert layout.without("tp").local_shape(0) == (4,) and layout.padding_axes == ("fsdp",)
    assert str(layout) == "f32[7@fsdp·tp] padded on fsdp2·tp2"


def test_padding_lies_behind_each_part_of_an_interleaved_dim():
    layout = Layout((5,), torch.float32, Mesh(fsdp=2), (Split("fsdp", (3, 2)),), padded=True)
    assert [local.tolist() for local in cut(numbered((5,)), layout)] == [[1, 2, 4], [3, -1, 5]]


@settings(max_examples=60, deadline=None)
@given(layouts(padded=True, unreduced=True))
def test_split_and_join_are_inverse_and_padding_is_zero(layout):
    x = numbered(layout.shape)
    ranks = split(x, layout)
    assert torch.equal(join(ranks, layout), x)
    for rank, local in enumerate(ranks):
        assert local.count_nonzero() == sum(box.size for box in layout.boxes(rank))


@pytest.mark.parametrize("init", [tree.Normal(1.0), 3.0], ids=str)
def test_init_draws_true_elements_only(init):
    for layout in (
        Layout((10, 3), torch.float32, Mesh(fsdp=4), ("fsdp",), padded=True),
        Layout((7, 3), torch.float32, Mesh(fsdp=2, tp=2), (("fsdp", "tp"),), padded=True),
        Layout((3, 5), torch.float32, Mesh(fsdp=4), flat=("fsdp",), padded=True),
    ):
        specs = {"w": tree.ArraySpec(layout, init)}
        whole = {"w": tree.ArraySpec(Layout(layout.shape, torch.float32, Mesh()), init)}
        parts = [tree.init(specs, 3, rank)["w"] for rank in range(layout.mesh.size)]
        assert torch.equal(join(parts, layout), tree.init(whole, 3, 0)["w"])
        for rank, local in enumerate(parts):
            assert tuple(local.shape) == layout.local_shape(rank)
            assert local.count_nonzero() == sum(box.size for box in layout.boxes(rank))
