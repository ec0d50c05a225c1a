"""Gather a small tree of shards over the data axes in a single collective (the weights of a layer, before it runs)."""

from __future__ import annotations

import contextlib
from typing import Any

from fmegatron import tree
from fmegatron.collectives import Axes, ops, places
from fmegatron.collectives.axes import Axis
from fmegatron.collectives.kept import kept
from fmegatron.collectives.wires import Wire
from fmegatron.layout import Layout
from fmegatron.nn.scaled import Scaled
from fmegatron.nn.weight import of_products
from fmegatron.tree import structure


def gather_tree(
    shards: structure.Tree,
    layouts: structure.Tree | None = None,
    axis: Axis | None = None,
    wire: Wire | structure.Tree = Wire(),  # noqa: B008  a frozen value
    reshard_after_forward: bool = True,
) -> structure.Tree:
    """The same tree with every leaf that is sharded over `axis` made whole along it; other leaves stay as they are.

    `w[D_fsdp, F_tp] -> w[D, F_tp]`, for all leaves at once, whatever their dtypes and wherever the axis splits them:
    rows, columns, interleaved dims, ranges of the flattened block (which comes back in its own shape). Over joined axes
    (`axes["dp", "fsdp"]`) leaves that all of them split are gathered at once, on one dim or on several; those that only
    some of them split are another collective, since gathering what is replicated would send it in vain.
    Transpose: the same path backwards, so one reduce_scatter over `axis` sums and shards all the weights' gradients.
    A factor of a `LowRank` that tp does not split, where it splits the base, gets a gradient that is a sum over tp.

    Args:
        shards: this rank's parts.
        layouts: of the same structure (a leaf where that has a `Scaled`); None: those that the shards know.
        axis: to gather over; None: the data axes of the mesh, `Axes(mesh).data`.
        wire: a `Wire`, or a tree of them of the same structure: the dtypes in which leaves travel and their gradients
            are reduced; leaves that stay are cast alike.
        reshard_after_forward: False keeps what is gathered here until the backward has read it. In a step that is
            traced, each leaf is else gathered before its first use, dropped behind its last one in the forward, and
            gathered again for the backward, wherever this stands (`step.regather`); outside of one nothing is dropped.

    Raises ValueError naming the leaf when its layout is not known (it was cut or cast before), or uneven, or when
    another axis splits the same dim below this one (the minor axis must be gathered first).
    """
    if layouts is None:
        try:
            layouts = tree.layouts(shards)
        except ValueError as error:
            raise ValueError(
                f"gather_tree: got weights without layouts ({error}), wanted shards that know theirs; the weights that "
                "`step.build` gives a loss are gathered already, but for shards=True"
            ) from None
    if not tree.leaves(layouts):
        return shards
    if axis is None:
        axes = Axes(tree.leaves(layouts)[0].mesh)
        axis = axes[axes.data]
    axis.require(layouts, "gather_tree")
    nodes = layouts
    paths, layouts, spec = structure.flatten(layouts)
    leaves: list[Any] = spec.flatten_up_to(shards)
    scales = [leaf.scale if isinstance(leaf, Scaled) else None for leaf in leaves]
    leaves = [leaf.value if isinstance(leaf, Scaled) else leaf for leaf in leaves]
    wires = [wire] * len(leaves) if isinstance(wire, Wire) else tree.leaves(wire)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, layout in enumerate(layouts):
        if layout.flat and not layout.flat_counts:  # flattened over nothing
            leaves[i] = leaves[i].view(layout.replace(flat=(), unreduced=()).local_shape(0))
        groups.setdefault(_axes_of(layout, axis), []).append(i)
    for names, mine in groups.items():
        places = [_place(paths[i], layouts[i], names) for i in mine]
        xs, of_each = [leaves[i] for i in mine], ([wires[i] for i in mine], [scales[i] for i in mine])
        with contextlib.nullcontext() if reshard_after_forward else kept():
            whole = ops.all_gather_many(xs, axis.only(names), places, *of_each)
        for i, x in zip(mine, whole, strict=True):
            leaves[i] = x
    return of_products(structure.unflatten(spec, leaves), nodes, axis)


def _axes_of(layout: Layout, axis: Axis) -> tuple[str, ...]:
    """The axes to gather a leaf over, in the order of `axis`, or that of the leaf's dims where that is another one."""
    found = [name for dim in range(len(layout.shape)) for name in layout.axes(dim) if name in axis.names]
    found += [name for name in layout.flat if name in axis.names]
    ordered = tuple(name for name in axis.names if name in found)
    entries = [*(layout.axes(dim) for dim in range(len(layout.shape))), layout.flat]
    kept = all([n for n in ordered if n in entry] == [n for n in entry if n in ordered] for entry in entries)
    return ordered if kept else tuple(found)


def _place(path: str, layout: Layout, names: tuple[str, ...]) -> places.Place | int:
    if not names:
        return 0  # only cast
    try:
        return places.Place.of(layout, names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
