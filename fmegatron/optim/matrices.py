"""Whole matrices from shards and back: what an optimizer needs that looks at a matrix and not at its elements.

A leaf is a stack of matrices [..., m, n]. However a layout cuts it, `on_whole_matrices` deals the matrices to the ranks
that hold pieces of them, each rank the same number, lets a function work on them, and takes the results back: two
all_to_all for each split dim, which move as many bytes as the rank holds of the leaf, however many ranks there are.
"""

from collections.abc import Callable
from typing import Any

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, all_gather, all_to_all, reshard, shard
from fmegatron.layout import Layout, Split

Tree = Any
Function = Callable[[torch.Tensor], torch.Tensor]


def on_whole_matrices(
    f: Function, x: torch.Tensor, layout: Layout | None, axes: Axes | None, share: tuple[str, ...] = ()
) -> torch.Tensor:
    """f of the matrices of a leaf, dealt to ranks: `x[L, m_a, n_b] -> y[L, m_a, n_b]`, where f maps `[k, m, n]` to the
    same shape, each matrix on its own, and zero matrices to zeros.

        x[L, m_a, n_b] -> x[L_ab, m, n]   all_to_all over a and over b; L is padded with zeros to a multiple
        f                                 on L/(a·b) whole matrices of each rank
        y[L_ab, m, n] -> y[L, m_a, n_b]   the same exchanges, back

    All leading dims are one L; they may be split too (pipeline stages, experts). Ranks that hold the same pieces do the
    same work, but for those along the axes `share`, which deal the matrices among them and pay for it with one
    all_gather. Interleaved dims (`Split`) are put in order for f. A flattened leaf needs no exchange if its ranges are
    whole matrices, and is gathered otherwise. layout None: x is whole.
    """
    if layout is None:
        return f(x.reshape(-1, *x.shape[-2:])).view(x.shape)
    flat = tuple(name for name in layout.flat if layout.mesh[name] > 1)
    block = layout.replace(flat=())
    shape = block.local_shape(0)
    if layout.flat:
        size = shape[-2] * shape[-1]
        if flat and x.numel() % size:
            y = on_whole_matrices(f, reshard(x, layout, block, axes), block, axes, (*share, *flat))
            return reshard(y, block, layout, axes)
        y = _dealt(f, x.view(-1, *shape[-2:]), block, axes, ())
        return y.flatten()
    shared = tuple(name for name in share if name in layout.replicated)
    return _dealt(f, x.reshape(-1, *shape[-2:]), layout, axes, shared).view(x.shape)


def _dealt(f: Function, x: torch.Tensor, layout: Layout, axes: Axes | None, shared: tuple[str, ...]) -> torch.Tensor:
    """`on_whole_matrices` of x[L, m_a, n_b] with one leading dim, which only this rank's matrices make up."""
    mesh, last = layout.mesh, len(layout.shape) - 1
    names = [tuple(name for name in layout.axes(dim) if mesh[name] > 1) for dim in (last - 1, last)]
    splits = [(axes[axis], dim) for dim, axis in zip((1, 2), names, strict=True) if axis]
    entries = [layout.spec[last - 1], layout.spec[last]]
    orders = [
        (dim, entry.sizes(layout.shape[last - 2 + dim]), mesh.extent(axis))
        for dim, entry, axis in zip((1, 2), entries, names, strict=True)
        if axis and isinstance(entry, Split)
    ]
    count, ways = x.shape[0], mesh.extent((*shared, *names[0], *names[1]))
    if padding := -count % ways:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding))
    if shared:
        x = shard(x, axes[shared], 0)
    for axis, dim in splits:
        x = all_to_all(x, axis, split_dim=0, concat_dim=dim)
    for dim, sizes, n in orders:
        x = _in_order(x, dim, sizes, n)
    x = f(x)
    for dim, sizes, n in orders:
        x = _by_rank(x, dim, sizes, n)
    for axis, dim in reversed(splits):
        x = all_to_all(x, axis, split_dim=dim, concat_dim=0)
    if shared:
        x = all_gather(x, axes[shared], 0)
    return x[:count] if padding else x


def _in_order(x: torch.Tensor, dim: int, sizes: tuple[int, ...], n: int) -> torch.Tensor:
    """From the ranks' pieces one after the other, each with its piece of every part, to whole parts."""
    pieces = x.split([size // n for _ in range(n) for size in sizes], dim)
    return torch.cat([pieces[rank * len(sizes) + part] for part in range(len(sizes)) for rank in range(n)], dim)


def _by_rank(x: torch.Tensor, dim: int, sizes: tuple[int, ...], n: int) -> torch.Tensor:
    """The inverse of `_in_order`."""
    pieces = x.split([size // n for size in sizes for _ in range(n)], dim)
    return torch.cat([pieces[part * n + rank] for rank in range(n) for part in range(len(sizes))], dim)


def layouts_by_path(layouts: Tree | None, axes: Axes | None, who: str) -> Callable[[str, Any], Layout | None]:
    """A function (path, leaf) -> layout, None for every path when `layouts` is None: everything is whole.

    ValueError, naming the path, for a path that `layouts` does not have, for an uneven layout or a pending sum, and
    when a leaf is split and `axes` is None; for an ArraySpec that is split when no `layouts` were given.
    """
    if layouts is None:

        def whole(path: str, leaf: Any) -> None:
            if isinstance(leaf, tree.ArraySpec) and leaf.layout.sharded:
                raise ValueError(
                    f"{who}: {path}: got {leaf.layout}, which is split, and no layouts; {who} looks at whole matrices:"
                    " give layouts=tree.layouts(specs) and axes=Axes(mesh)"
                )

        return whole
    known = dict(zip(tree.paths(layouts), tree.leaves(tree.layouts(layouts)), strict=True))

    def layout_of(path: str, leaf: Any) -> Layout:
        if path not in known:
            raise ValueError(f"{who}: {path}: got no layout for it{tree.did_you_mean(path, list(known))}")
        layout = known[path]
        if layout.unreduced or not layout.is_even:
            what = "a pending sum" if layout.unreduced else "uneven"
            raise ValueError(f"{who}: {path}: got {layout}, which is {what}; want it reduced and even")
        if layout.sharded and axes is None:
            raise ValueError(f"{who}: {path}: got {layout}, which is split; give axes=Axes(mesh) too")
        return layout

    return layout_of
