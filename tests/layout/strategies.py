"""Hypothesis strategies: any mesh, any layout. For the tests of every room that takes layouts."""

import torch
from hypothesis import strategies as st

from fmegatron.layout import Layout, Mesh, Split

NAMES = ("dp", "fsdp", "tp", "pp")


@st.composite
def meshes(draw, most_ranks: int = 12) -> Mesh:
    """A mesh of 0 to 4 axes, sizes 1 to 4, now and then a view that permutes ranks."""
    sizes, world = {}, 1
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4)):
        size = draw(st.integers(1, max(1, min(4, most_ranks // world))))
        sizes[name], world = size, world * size
    mesh = Mesh(**sizes)
    if len(sizes) > 1 and draw(st.integers(0, 4)) == 0:
        return mesh.view(order=draw(st.permutations(mesh.names)), **sizes)
    return mesh


@st.composite
def shapes(draw) -> tuple[int, ...]:
    """0 to 3 dims of sizes 0 to 9."""
    return tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 6]), max_size=3)))


@st.composite
def layouts(
    draw, shape=None, mesh=None, unreduced: bool = False, dtype=torch.float32, padded=False, assigned: bool = True
) -> Layout:
    """Any layout: even, uneven, several axes on a dim, interleaved, flattened, replicated; unreduced if asked.

    padded: False, True (all ranks of one shape, ranges perhaps in multiples of a unit), or None for either.
    assigned: pieces too of any sizes and order.
    """
    padded = draw(st.booleans()) if padded is None else padded
    shape = draw(shapes()) if shape is None else shape
    mesh = draw(meshes()) if mesh is None else mesh
    places = {dim: [] for dim in range(len(shape))} | {"flat": [], "none": [], "unreduced": []}
    for name in draw(st.permutations(mesh.names)):
        choices = [*range(len(shape)), *range(len(shape)), "flat", "none"] + ["unreduced"] * unreduced
        places[draw(st.sampled_from(choices))].append(name)
    if draw(st.booleans()):
        places["flat"] = []  # most real layouts are not flat
    spec = []
    for dim, n in enumerate(shape):
        axes = tuple(places[dim])
        kind = draw(st.sampled_from(["plain", "plain", "equal", "sizes"] + ["assigned"] * assigned))
        if kind == "equal":
            spec.append(Split(axes, draw(st.sampled_from([p for p in range(1, n + 1) if n % p == 0] or [1]))))
        elif kind == "sizes":
            cuts = sorted(draw(st.lists(st.integers(0, n), max_size=3)))
            spec.append(Split(axes, tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True))))
        elif kind == "assigned" and axes:
            ranks = mesh.extent(axes)
            count = draw(st.sampled_from([ranks, ranks, 2 * ranks, 1 + ranks // 2]))
            cuts = sorted(draw(st.lists(st.integers(0, n), min_size=count - 1, max_size=count - 1)))
            sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True))
            in_order = count == ranks and draw(st.booleans())
            order = () if in_order else draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
            spec.append(Split(axes, sizes=sizes, order=tuple(order)))
        else:
            spec.append(axes)
    flat, first = places["flat"], draw(st.integers(0, max(0, len(shape) - 1)))
    padded = draw(st.sampled_from([True, True, 2, 3])) if padded and flat else padded
    cuts = {"flat": flat, "flat_from": first if flat else 0, "padded": padded}
    return Layout(shape, dtype, mesh, tuple(spec), unreduced=places["unreduced"], **cuts)
