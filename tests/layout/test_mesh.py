"""Mesh: ranks and coordinates, groups, views; and errors that say what to do."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Layout, Mesh, Rules, Split
from tests.layout.strategies import meshes


@settings(max_examples=100, deadline=None)
@given(meshes(), st.data())
def test_rank_and_coordinates_are_inverse_and_groups_partition_the_ranks(mesh, data):
    assert sorted(mesh.rank(**mesh.coordinates(rank)) for rank in range(mesh.size)) == list(range(mesh.size))
    axes = tuple(data.draw(st.permutations(mesh.names)))[: data.draw(st.integers(0, len(mesh.names)))]
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        for i, rank in enumerate(group):
            assert mesh.group(rank, axes) == group and mesh.index(rank, axes) == i
            here, first = mesh.coordinates(rank), mesh.coordinates(group[0])
            assert all(here[name] == first[name] for name in mesh.names if name not in axes)
    rest = tuple(name for name in mesh.names if name not in axes)
    for rank in range(mesh.size):
        assert mesh.rank_at([(axes, mesh.index(rank, axes)), (rest, mesh.index(rank, rest))]) == rank
    assert Mesh.from_json(mesh.to_json()) == mesh == pickle.loads(pickle.dumps(mesh))
    assert hash(Mesh.from_json(mesh.to_json())) == hash(mesh)


def test_order_is_major_to_minor():
    mesh = Mesh(pp=2, dp=3, tp=4)
    ranks = np.arange(24).reshape(2, 3, 4)
    assert mesh.rank(pp=1, dp=2, tp=3) == ranks[1, 2, 3]
    assert mesh.group(7, "dp") == tuple(ranks[0, :, 3])
    assert mesh.group(7, ("tp", "pp")) == tuple(ranks[:, 1, :].T.reshape(-1))
    assert mesh.groups("tp")[1] == (4, 5, 6, 7)
    assert str(mesh) == "pp2·dp3·tp4" and "tp" in mesh and "cp" not in mesh and mesh["dp"] == 3
    assert Mesh().size == 1 and str(Mesh()) == "one rank" and Mesh().groups(()) == ((0,),)


def test_views_agree_with_numpy():
    mesh, ranks = Mesh(dp=2, cp=3, tp=4), np.arange(24).reshape(2, 3, 4)
    view = mesh.view(order=("cp", "tp", "dp"), edp=6, ep=4)
    expected = ranks.transpose(1, 2, 0).reshape(6, 4)
    assert view.group(0, "ep") == tuple(expected[0])
    assert [view.rank(edp=i, ep=j) for i in range(6) for j in range(4)] == list(expected.reshape(-1))
    again = mesh.view(order=("cp", "tp", "dp"), a=3, b=8).view(order=("b", "a"), c=24)
    assert again.group(0, "c") == tuple(ranks.transpose(1, 2, 0).reshape(3, 8).T.reshape(-1))
    assert mesh.view(order=mesh.names, dp=2, cp=3, tp=4) == mesh
    assert view != Mesh(edp=6, ep=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: m["zz"], r"got mesh axis 'zz', wanted one of dp, tp of the mesh dp2·tp4"),
        (lambda m: m.group(0, ("dp", "dp")), r"mesh: got axis 'dp' twice"),
        (lambda m: m.rank(dp=2), r"got dp=2, wanted 0 to 1"),
        (lambda m: m.coordinates(8), r"got rank 8, wanted 0 to 7: the mesh dp2·tp4 has 8 ranks"),
        (lambda m: Mesh(dp=0), r"mesh axis 'dp': got size 0, wanted"),
        (lambda m: m.view(ep=3), r"got 3 ranks, wanted the 8 of the mesh dp2·tp4; choose sizes whose product is 8"),
        (lambda m: m.view(order=("dp",), ep=8), r"wanted every one of"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make(Mesh(dp=2, tp=4))


def test_a_view_that_cuts_a_permuted_axis_apart_cannot_be_permuted_again():
    odd = Mesh(a=2, b=3).view(order=("b", "a"), x=2, y=3)
    assert odd.rank(x=1, y=2) == 5
    with pytest.raises(ValueError, match="permute the original mesh instead"):
        odd.view(order=("y", "x"), z=6)


def test_standard_axes_that_a_mesh_lacks_have_size_1_everywhere():
    """One program text serves all meshes: layouts, rules, strategies and the axes of collectives agree."""
    mesh, f32 = Mesh(fsdp=2), torch.float32
    assert mesh["tp"] == 1 and mesh.extent(("fsdp", "tp")) == 2 and "tp" not in mesh
    assert mesh.group(1, ("tp", "fsdp")) == (0, 1) and mesh.groups("cp") == ((0,), (1,))
    assert mesh.index(1, ("fsdp", "tp")) == 1 and mesh.rank(fsdp=1, pp=0) == 1 and mesh.moved(1, "ep", 0) == 1
    spec = (("tp", "fsdp"), Split("tp", 2))
    assert Layout((4, 6), f32, mesh, spec) == Layout((4, 6), f32, mesh, ("fsdp",))
    assert Layout((4,), f32, mesh, unreduced=("dp", "fsdp")) == Layout((4,), f32, mesh, unreduced="fsdp")
    assert Rules([("w", ("fsdp", "tp"))]).layout("w", (4, 6), f32, mesh) == Layout((4, 6), f32, mesh, ("fsdp",))
    assert Axes(mesh)["dp", "tp"].names == () and Axes(mesh)["dp", "fsdp"].names == ("fsdp",)
    assert DataParallel.hsdp().batch_layout((4, 8), f32, mesh) == Layout((4, 8), f32, mesh, ("fsdp",))


@pytest.mark.parametrize(
    "use",
    [
        lambda mesh, name: mesh[name],
        lambda mesh, name: mesh.group(0, ("fsdp", name)),
        lambda mesh, name: Layout((4,), torch.float32, mesh, (name,)),
        lambda mesh, name: Rules([("w", (name,))]).layout("w", (4,), torch.float32, mesh),
        lambda mesh, name: Axes(mesh)[name],
        lambda mesh, name: Axes(mesh, data=(name,)),
        lambda mesh, name: DataParallel.zero3(name).batch_layout((4, 8), torch.int64, mesh),
        lambda mesh, name: DataParallel.zero3(name).place(Layout((4,), torch.float32, mesh)),
    ],
)
def test_other_names_are_refused_everywhere(use):
    """They may be misspelled; with size 1 in the mesh they are known."""
    with pytest.raises(ValueError, match="got (mesh )?axis 'fsdpp', wanted one of fsdp"):
        use(Mesh(fsdp=2), "fsdpp")
    use(Mesh(fsdp=2, fsdpp=1), "fsdpp")


def test_axes_have_names():
    with pytest.raises(
        ValueError, match=r"Mesh: got 'cuda', \(2, 4\) without a name, wanted sizes of axes by name; Mesh\(dp"
    ):
        Mesh("cuda", (2, 4))
