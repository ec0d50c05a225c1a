"""Whatever the layout: boxes cover exactly once, agree with torch.chunk, and reshard plans move every element home."""

import json
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.layout import Layout, check_cover, plan_reshard
from tests.layout.arrays import cut, execute, numbered, reference_local
from tests.layout.strategies import layouts, meshes, shapes


@pytest.mark.medium
@settings(max_examples=250, deadline=None)
@given(layouts(unreduced=True))
def test_every_element_is_held_exactly_once_per_replica(layout):
    held = torch.zeros(layout.shape, dtype=torch.int64)
    owned = torch.zeros(layout.shape, dtype=torch.int64)
    x = numbered(layout.shape)
    for rank, local in enumerate(cut(x, layout)):
        assert (local > 0).all(), "a local element that no box fills"
        assert torch.equal(local, reference_local(x, layout, rank))
        assert sum(box.size for box in layout.boxes(rank)) == local.numel()
        assert layout.local_nbytes(rank) == local.nbytes
        assert layout.rank_of(layout.shard(rank), layout.replica(rank)) == rank or layout.unreduced
        for box in layout.boxes(rank):
            held[box.slices] += 1
            owned[box.slices] += layout.owner(rank, turn=5)
    pending = layout.mesh.extent(layout.unreduced)
    assert (held == layout.replicas * pending).all()
    assert (owned == pending).all()
    shapes_of_ranks = {layout.local_shape(rank) for rank in range(layout.mesh.size)}
    assert layout.is_even == (len(shapes_of_ranks) == 1 and not layout.assigned)
    most = max(layout.local_nbytes(rank) for rank in range(layout.mesh.size))
    assert layout.most_nbytes == most
    check_cover(layout)


@pytest.mark.medium
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_reshard_plans_are_exact_and_invertible(data):
    shape = data.draw(shapes())
    mesh = data.draw(meshes())
    src = data.draw(layouts(shape=shape, mesh=mesh))
    dst = data.draw(layouts(shape=shape, mesh=data.draw(st.sampled_from([mesh, mesh, data.draw(meshes())]))))
    x = numbered(shape)
    start, wanted = cut(x, src), cut(x, dst)
    world = max(src.mesh.size, dst.mesh.size)
    plans = [plan_reshard(src, dst, rank) for rank in range(world)]
    moved = execute(src, dst, start, plans)
    assert all(torch.equal(a, b) for a, b in zip(moved, wanted, strict=True))
    back = execute(dst, src, moved, [plan_reshard(dst, src, rank) for rank in range(world)])
    assert all(torch.equal(a, b) for a, b in zip(back, start, strict=True))
    for rank, plan in enumerate(plans):
        assert all(transfer.peer != rank for transfer in plan.sends + plan.receives)
        assert all(transfer.peer == rank for transfer in plan.local)
        if src == dst:
            assert not plan.sends and not plan.receives


@settings(max_examples=100, deadline=None)
@given(layouts(unreduced=True), st.data())
def test_overlapping_finds_the_same_as_looking_at_every_shard(layout, data):
    start = [data.draw(st.integers(0, n)) for n in layout.shape]
    stop = [data.draw(st.integers(a, n)) for a, n in zip(start, layout.shape, strict=True)]
    found = dict(layout.overlapping(start, stop))
    for rank in range(layout.mesh.size):
        boxes = [b for box in layout.boxes(rank) if (b := box.intersect(start, stop))]
        assert found.get(layout.shard(rank), []) == boxes


@settings(max_examples=100, deadline=None)
@given(layouts(unreduced=True))
def test_layouts_survive_json_pickle_and_without(layout):
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout and hash(copy) == hash(layout) and repr(copy) == repr(layout)
    for axis in layout.mesh.names:
        gathered = layout.without(axis)
        assert set(gathered.sharded) == set(layout.sharded) - {axis}
        assert set(gathered.unreduced) == set(layout.unreduced) - {axis}
    assert layout.without(layout.mesh.names).local_shape(0) in (layout.shape, (math.prod(layout.shape),))
