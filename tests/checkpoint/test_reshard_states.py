"""Whole training states and any pair of layouts, from mesh to mesh: bitwise, ranks reading alone or in groups."""

import itertools
import os
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron import checkpoint, tree
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.states import covering_pairs, dense, experts, features, meshes
from tests.checkpoint.test_reshard import DTYPES, state_for
from tests.layout import strategies
from tests.pairs import few

MESHES = meshes()
PAIRS = list(covering_pairs(MESHES, features))
FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None


def there_and_back(saved, wanted, sizes=(512, 128), reads=("own", "once")):
    """Save under one tree of layouts, restore under another: every rank, both ways to read."""
    state = state_for(saved)
    source, target = tree.leaves(saved)[0].mesh.size, tree.leaves(wanted)[0].mesh.size
    local = cut_tree(state, wanted)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder, small_sizes(*sizes):
        assert save_all(folder + "/a", state, saved) == [None] * source
        for read in reads:
            got = run(target, lambda world, r=read: checkpoint.restore(folder + "/a", wanted, world=world, read=r))
            for rank, result in enumerate(got):
                if isinstance(result, BaseException):
                    raise result
                assert_same_bits(result, local[rank], f"rank {rank}, read={read}")


def test_the_pairs_cover():
    """Every size of every axis meets every other, from source to target."""
    all_features = set().union(*map(features, MESHES))
    met = {pair for a, b in PAIRS for pair in itertools.product(features(a), features(b))}
    assert met == set(itertools.product(all_features, repeat=2))
    assert len(PAIRS) < 60 and len({str(m) for pair in PAIRS for m in pair}) > 12


@pytest.mark.medium
@pytest.mark.parametrize("i", few(2, zip(range(len(PAIRS)))))
def test_states(i):
    source, target = PAIRS[i]
    there_and_back(dense(source, virtual=True), dense(target, virtual=i % 2 == 0))
    there_and_back(experts(source), experts(target))


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(PAIRS)))
def test_states_of_all_pairs(i):
    source, target = PAIRS[i]
    for virtual in itertools.product((False, True), repeat=2):
        there_and_back(dense(source, virtual[0]), dense(target, virtual[1]))
    there_and_back(experts(source), experts(target))


@st.composite
def real_layouts(draw, shape, dtype):
    """A layout as training has them: stages and virtual stages, fused and uneven dims, flat ranges, views."""
    mesh = draw(st.sampled_from(MESHES))
    if draw(st.booleans()):
        n = mesh.size // mesh["pp"]
        ep = draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
        etp = draw(st.sampled_from([k for k in range(1, n // ep + 1) if n // ep % k == 0]))
        mesh = Mesh(pp=mesh["pp"], dp=n // ep // etp, fsdp=ep, tp=etp)
    L, D, F = shape
    V = (*range(mesh["pp"]), *range(mesh["pp"])[::-1])
    assigned = [Split("pp", sizes=(L - 1, *[0] * (mesh["pp"] - 2), 1)[: mesh["pp"]])] if mesh["pp"] > 1 else []
    assigned += [Split("pp", sizes=(*[0] * (len(V) - 2), 1, L - 1), order=V)]
    stages = draw(st.sampled_from(["pp", None, Split("pp", parts=2), Split("pp", parts=(1, L - 1)), *assigned]))
    columns = draw(
        st.sampled_from(["tp", Split("tp", parts=3), Split("tp", (F // 2, F - F // 2)), ("tp", "fsdp"), None])
    )
    used = {
        name
        for e in (stages, columns)
        for name in (e.names if isinstance(e, Split) else (e,) if isinstance(e, str) else e or ())
    }
    rows = draw(st.sampled_from(["fsdp", ("fsdp", "dp"), ("dp", "fsdp"), Split("fsdp", parts=D), None]))
    names = rows.names if isinstance(rows, Split) else (rows,) if isinstance(rows, str) else rows or ()
    rows = None if used & set(names) else rows
    used |= set(names) if rows is not None else set()
    flat = draw(st.permutations([name for name in mesh.names if name not in used]))
    flat = tuple(flat[: draw(st.integers(0, len(flat)))]) if draw(st.booleans()) else ()
    return Layout(shape, dtype, mesh, (stages, rows, columns), flat=flat)


def any_pair(data, layouts_of):
    dtype = data.draw(st.sampled_from(DTYPES))
    saved, wanted = ({"x": data.draw(layouts_of(dtype))} for _ in range(2))
    there_and_back(saved, wanted, data.draw(st.sampled_from([(128, 32), (32, 16), (1 << 20, 1 << 20)])))


@st.composite
def drawn(draw, dtype, shape):
    mesh = draw(strategies.meshes(most_ranks=8))
    return draw(strategies.layouts(shape=shape, mesh=mesh, dtype=dtype))


@pytest.mark.medium
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_layouts_as_training_has_them(data):
    shape = data.draw(st.sampled_from([(4, 7, 12), (4, 6, 9), (2, 5, 6), (6, 1, 12)]))
    any_pair(data, lambda dtype: real_layouts(shape, dtype))


@pytest.mark.medium
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_layouts(data):
    shape = data.draw(strategies.shapes())
    any_pair(data, lambda dtype: drawn(dtype, shape))


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(data=st.data())
def test_layouts_as_training_has_them_many(data):
    shape = data.draw(st.sampled_from([(4, 7, 12), (4, 6, 9), (2, 5, 6), (6, 1, 12), (8, 3, 15)]))
    any_pair(data, lambda dtype: real_layouts(shape, dtype))


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(data=st.data())
def test_any_layouts_many(data):
    shape = data.draw(strategies.shapes())
    any_pair(data, lambda dtype: drawn(dtype, shape))
