"""Gathers full matrices from shards and scatters them back, for optimizers that work on matrices.

A leaf is a stack of matrices [..., m, n]. However layouts cut the leaves, `on_whole_matrices` assigns their matrices to
the ranks that hold pieces of them, lets a function work on them, and takes the results back. Each rank moves as many
bytes as it holds of the leaves, out and back, however many ranks there are.

Matrices of one size, cut and dtype (a tall one counts as the wide one that it is transposed) are assigned as one
stack, whichever leaves they are of. So each rank gets the same number of each size, at most one of which is padding:
the work is balanced as well as one graph for all ranks allows.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, ops, reshard, resharding, shard
from fmegatron.collectives.known_ranks import require_one_rank
from fmegatron.layout import Layout, Split, notation
from fmegatron.tree import structure

Function = Callable[[torch.Tensor], torch.Tensor]


class _Cut(NamedTuple):
    """How one dim of a matrix is split: the axes, and the sizes of its interleaved parts (() for one plain part)."""

    axes: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()


class _Kind(NamedTuple):
    """What matrices of one stack have in common. size: rows <= columns of the full matrix.  leading: axes along which
    ranks hold other matrices.  shared: axes along which they hold the same ones, and divide the work."""

    size: tuple[int, int]
    cuts: tuple[_Cut, _Cut]
    leading: tuple[str, ...]
    shared: tuple[str, ...]
    dtype: torch.dtype

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.shared, *self.cuts[0].axes, *self.cuts[1].axes)


class _Stack(NamedTuple):
    """Matrices x[k, m_a, n_b] of one leaf, as the leaf has them (tall or wide)."""

    x: torch.Tensor
    size: tuple[int, int]
    cuts: tuple[_Cut, _Cut]
    leading: tuple[str, ...]
    shared: tuple[str, ...]

    def wide(self) -> tuple[torch.Tensor, _Kind]:
        """(x or its transpose, so that rows <= columns; its kind). Square ones are turned so that cuts agree."""
        flip = self.size[0] > self.size[1] or (self.size[0] == self.size[1] and self.cuts[0] > self.cuts[1])
        turn = (lambda pair: pair[::-1]) if flip else (lambda pair: pair)
        kind = _Kind(turn(self.size), turn(self.cuts), self.leading, self.shared, self.x.dtype)
        return (self.x.mT if flip else self.x), kind


def on_whole_matrices(
    f: Function,
    xs: Sequence[torch.Tensor],
    layouts: Sequence[Layout | None],
    share: tuple[str, ...] = (),
    parts: Sequence[tuple[int, ...] | None] | None = None,
    scale: Callable[[int, int], float] | None = None,
) -> list[torch.Tensor]:
    """f of the matrices of all leaves, assigned to ranks: `x[..., m_a, n_b] -> y[..., m_a, n_b]` for each leaf.

        x[L, m_a, n_b] -> x[L_ab, m, n]   one all_to_all over a and one over b for all leaves together; L is padded
                                          with zeros to a multiple
        f                                 on L/(a·b) full matrices of each rank
        y[L_ab, m, n] -> y[L, m_a, n_b]   the same exchanges, back

    f maps [k, m, n] with m <= n to the same shape, each matrix on its own, zeros to zeros, and has nothing against its
    matrices being transposed for it. layouts: one for each leaf; None: it is full.
    parts: for each leaf the sizes of consecutive parts of its last dim that are matrices of their own (heads of q, k,
    v; gate and up), or None. Parts that a rank has in full are not exchanged along that dim.  scale(m, n): a factor on
    what becomes of a matrix (or part) of m rows and n columns.
    All leading dims are one L; they may be split too (pipeline stages, experts). Ranks that hold the same pieces do the
    same work, but for those along the axes `share`, which share out the matrices and pay for it with an
    all_gather. A flattened leaf needs no exchange if its ranges are full matrices. If they are not, or if parts cross
    the border of ranks, the leaf is gathered first, and the work is assigned all the same.
    """
    parts = [None] * len(xs) if parts is None else parts
    known = next((layout for layout in layouts if layout is not None), None)
    axes = None if known is None else Axes(known.mesh)
    stacks, undo = [], []
    for x, layout, sizes in zip(xs, layouts, parts, strict=True):
        more, back = _stacks_of(x, layout, share, sizes)
        undo.append((len(more), back))
        stacks += more
    turned = [stack.wide() for stack in stacks]
    pools: dict[_Kind, list[int]] = {}
    for i, (_, kind) in enumerate(turned):
        pools.setdefault(kind, []).append(i)
    batches = [joined([turned[i][0] for i in members]) for members in pools.values()]
    done: dict[int, torch.Tensor] = {}
    for members, y in zip(pools.values(), _dealt(f, batches, list(pools), axes), strict=True):
        for i, part in zip(members, y.split([turned[i][0].shape[0] for i in members]), strict=True):
            part = part if stacks[i].x is turned[i][0] else part.mT
            done[i] = part if scale is None else part * scale(*stacks[i].size)
    out, at = [], 0
    for count, back in undo:
        out.append(back([done[i] for i in range(at, at + count)]))
        at += count
    return out


def in_layout(x: torch.Tensor, src: Layout | None, dst: Layout | None) -> torch.Tensor:
    """x moved from one layout to another; where none is known it is full."""
    return x if src is None or dst is None else reshard(x, src, dst, Axes(src.mesh))


def joined(xs: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The tensors one after another along a dim; a single one is not copied."""
    return torch.cat(xs, dim) if len(xs) > 1 else xs[0]


# ---- from a leaf to stacks of matrices -------------------------------------------------------------------------------
def _stacks_of(x, layout, share, sizes):
    """(the stacks of matrices of a leaf, the function from their results to the leaf)."""
    if layout is None:
        size = tuple(x.shape[-2:])
        return _split_columns(_Stack(_stacked(x, size), size, (_Cut(), _Cut()), (), ()), sizes, 1, x.shape)
    whole, size = layout.replace(flat=()), tuple(layout.shape[-2:])
    rows, columns = (_cut(layout, dim) for dim in (-2, -1))
    gathered = ()
    if sizes is not None and (
        (layout.padded and columns.axes) or _columns(columns, sizes, layout.mesh.extent(columns.axes)) is None
    ):
        gathered, columns = columns.axes, _Cut()
        whole = whole.replace(spec=(*whole.spec[:-1], None))
    local = whole.local_shape(0)
    flat = tuple(name for name in layout.flat if layout.mesh[name] > 1)
    if flat and (gathered or layout.flat_from or x.numel() % (local[-2] * local[-1])):
        gathered, flat = (*gathered, *flat), ()
    if gathered:
        x = in_layout(x, layout, whole)
    leading = tuple(a for dim in range(len(layout.shape) - 2) for a in layout.axes(dim) if layout.mesh[a] > 1)
    shared = tuple(a for a in layout.mesh.names if a in gathered or (a in share and a in layout.replicated))
    stack = _Stack(_stacked(x, local[-2:]), size, (rows, columns), (*leading, *flat), shared)
    shape = local if gathered else tuple(x.shape)
    stacks, back = _split_columns(stack, sizes, layout.mesh.extent(columns.axes), shape)
    return stacks, (lambda ys: in_layout(back(ys), whole, layout)) if gathered else back


def _stacked(x: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """x as matrices [k, *size]. One matrix gets a new dim: shapes of a view to [1, m, n] leave open whether the axes
    of the rows are those of m, or of that 1."""
    return x.unsqueeze(0) if tuple(x.shape) == size else x.reshape(-1, *size)


def _cut(layout: Layout, dim: int) -> _Cut:
    entry = layout.spec[dim]
    axes = tuple(a for a in layout.axes(len(layout.shape) + dim) if layout.mesh[a] > 1)
    return _Cut(axes, entry.lengths(layout.shape[dim]) if axes and isinstance(entry, Split) else ())


def _columns(cut: _Cut, sizes: tuple[int, ...], ways: int) -> list[tuple[int, int, bool]] | None:
    """How a rank's columns make up parts: [(count, size of a full part, whether ranks hold pieces of it)], in order.

    None when some part crosses the border of two ranks without being split over all of them.

    >>> _columns(_Cut(("tp",), (8, 4, 4)), (8, 4, 4), 2), _columns(_Cut(("tp",), (8, 4)), (2, 2, 2, 2, 4), 2)
    ([(1, 8, True), (1, 4, True), (1, 4, True)], [(2, 2, False), (1, 4, True)])
    """
    found, rest = [], list(sizes)
    if not cut.axes:
        for size in sizes:
            same = found and found[-1][1] == size
            found = [*found[:-1], (found[-1][0] + 1, size, False)] if same else [*found, (1, size, False)]
        return found
    for segment in cut.parts or (sum(sizes),):
        taken = []
        while rest and sum(taken) < segment:
            taken.append(rest.pop(0))
        if taken == [segment]:
            found.append((1, segment, True))
        elif sum(taken) == segment and len(set(taken)) == 1 and len(taken) % ways == 0:
            found.append((len(taken) // ways, taken[0], False))
        else:
            return None
    return found


def _split_columns(stack: _Stack, sizes, ways: int, shape):
    """(the stacks of the parts, the function from their results to the leaf of that local shape)."""
    if sizes is None:
        return [stack], lambda ys: ys[0].reshape(shape)
    k, m, _ = stack.x.shape
    found = _columns(stack.cuts[1], sizes, ways)
    assert found is not None, "a leaf whose parts cross the border of ranks is gathered before"

    def stacked(count: int, split: bool) -> bool:
        return count > 1 or bool(stack.cuts[1].axes and not split)

    widths = [count * size // (ways if split else 1) for count, size, split in found]
    stacks = []
    for x, (count, size, split) in zip(stack.x.split(widths, -1), found, strict=True):
        cut, leading = stack.cuts[1], stack.leading
        if stacked(count, split):  # count·k matrices
            x = x.reshape(k, m, count, size).permute(2, 0, 1, 3).reshape(-1, m, size)
        if not split:
            cut, leading = _Cut(), (*leading, *cut.axes)
        cuts = (stack.cuts[0], _Cut(cut.axes))
        stacks.append(stack._replace(x=x, size=(stack.size[0], size), cuts=cuts, leading=leading))

    def back(ys: list[torch.Tensor]) -> torch.Tensor:
        columns = []
        for y, (count, size, split), width in zip(ys, found, widths, strict=True):
            if stacked(count, split):
                y = y.reshape(count, k, m, size).permute(1, 2, 0, 3).reshape(k, m, width)
            columns.append(y)
        return joined(columns, -1).reshape(shape)

    return stacks, back


# ---- assignment ------------------------------------------------------------------------------------------------------
def _dealt(f: Function, stacks: list[torch.Tensor], kinds: list[_Kind], axes: Axes | None) -> list[torch.Tensor]:
    """f of stacks x[k, m_a, n_b], which only this rank's matrices make up: one exchange for each set of axes, and one
    back."""
    if axes is None:
        return [f(x) for x in stacks]
    mesh, counts = axes.mesh, [x.shape[0] for x in stacks]
    stacks = [_padded(x, mesh.extent(kind.axes)) for x, kind in zip(stacks, kinds, strict=True)]
    stacks = [shard(x, axes[kind.shared], 0) if kind.shared else x for x, kind in zip(stacks, kinds, strict=True)]
    rounds = list(dict.fromkeys(cut.axes for kind in kinds for cut in kind.cuts if cut.axes))
    rounds.sort(key=lambda names: [mesh.names.index(name) for name in names])
    for names in rounds:
        stacks = _exchanged(stacks, kinds, axes, names, back=False)
    stacks = [_by_cut(f, x, kind, mesh) for x, kind in zip(stacks, kinds, strict=True)]
    for names in reversed(rounds):
        stacks = _exchanged(stacks, kinds, axes, names, back=True)
    for names in dict.fromkeys(kind.shared for kind in kinds if kind.shared):
        members = [i for i, kind in enumerate(kinds) if kind.shared == names]
        for i, x in zip(
            members, ops.all_gather_many([stacks[i] for i in members], axes[names], [0] * len(members)), strict=True
        ):
            stacks[i] = x
    return [x[:count] if x.shape[0] > count else x for x, count in zip(stacks, counts, strict=True)]


def _padded(x: torch.Tensor, ways: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) if (padding := -x.shape[0] % ways) else x


def _exchanged(stacks, kinds, axes, names, back):
    """All stacks that are cut by these axes, together: rows or columns against matrices, or back."""
    found = [(i, dim) for i, kind in enumerate(kinds) for dim, cut in enumerate(kind.cuts, 1) if cut.axes == names]
    matrices, dims = [0] * len(found), [dim for _, dim in found]
    split, concat = (dims, matrices) if back else (matrices, dims)
    moved = ops.all_to_all_many([stacks[i] for i, _ in found], axes[names], split, concat)
    out = list(stacks)
    for (i, _), x in zip(found, moved, strict=True):
        out[i] = x
    return out


def _by_cut(f: Function, x: torch.Tensor, kind: _Kind, mesh) -> torch.Tensor:
    """f of matrices whose interleaved dims were put in order."""
    orders = [(dim, cut.parts, mesh.extent(cut.axes)) for dim, cut in enumerate(kind.cuts, 1) if cut.parts]
    for dim, sizes, n in orders:
        x = resharding.whole_parts(x, dim, sizes, n)
    x = f(x)
    for dim, sizes, n in orders:
        x = _by_rank(x, dim, sizes, n)
    return x


def _by_rank(x: torch.Tensor, dim: int, sizes: tuple[int, ...], n: int) -> torch.Tensor:
    """The inverse of `whole_parts`."""
    pieces = x.split([size // n for size in sizes for _ in range(n)], dim)
    return torch.cat([pieces[part * n + rank] for rank in range(n) for part in range(len(sizes))], dim)


def dealt_layout(layout: Layout) -> Layout:
    """The layout in which ranks hold full matrices, for state that belongs to a matrix: the axes that split rows,
    columns or the flattened block go to the leading dims as far as these divide; along the others ranks hold copies.

    >>> from fmegatron.layout import Mesh
    >>> dealt_layout(Layout((8, 64, 256), torch.float32, Mesh(fsdp=4, tp=2), (None, "fsdp", "tp")))
    f32[8@fsdp·tp, 64, 256] on fsdp4·tp2
    """
    last = len(layout.shape) - 2
    # Minor axes first: in this order each leaves its dim by an all_to_all.
    held = (layout.axes(last)[::-1], layout.axes(last + 1)[::-1], layout.flat)
    free = [axis for names in held for axis in names if layout.mesh[axis] > 1]
    found = layout.replace(spec=layout.spec[:last], flat=())
    for axis in free:
        for dim in range(last):
            if isinstance(found.spec[dim], Split):
                continue
            spec = [(*found.axes(d), axis) if d == dim else found.spec[d] for d in range(last)]
            if layout.shape[dim] and (more := found.replace(spec=tuple(spec))).divides:
                found = more
                break
    return found


def layouts_of(params: structure.Tree, who: str, *beside: structure.Tree) -> dict[str, Layout | None]:
    """The layouts of parameters by path, of specs or of tensors that know theirs; None of a full array (one rank).

    beside: trees that may know the mesh where the parameters do not: their gradients, the optimizer's state.

    ValueError, naming the path, for a leaf that does not know its layout among leaves that do, or where there are
    several ranks (`require_one_rank`), and for a layout that full matrices are not made of: an uneven one, a pending
    sum, a padded interleaved dim.
    """
    paths, leaves, _ = structure.flatten(params)
    found = [leaf.layout if isinstance(leaf, tree.ArraySpec) else tree.layout_of(leaf) for leaf in leaves]
    if paths and not any(found):
        require_one_rank(who, paths[0], "parameter", tree.leaves(beside))
    for path, layout in zip(paths, found, strict=True):
        if layout is None:
            if (known := next((p for p, one in zip(paths, found, strict=True) if one is not None), None)) is not None:
                raise ValueError(
                    f"{who}: {path}: got a parameter whose layout is not known, and {known}, whose is, wanted those of "
                    "all parameters; what was computed of a parameter is placed again: tree.place(params, layouts)"
                )
            continue
        notation.require_shares(layout, f"{who}: {path}")
        if layout.unreduced or not layout.is_even:
            what = "a pending sum" if layout.unreduced else "uneven"
            raise ValueError(f"{who}: {path}: got {layout}, which is {what}, wanted it reduced and even")
        if layout.padded and any(
            part % math.prod(ways) for parts, ways in zip(layout.parts[-2:], layout.counts[-2:], strict=True)
            for part in parts if len(parts) > 1
        ):  # fmt: skip
            raise ValueError(
                f"{who}: {path}: got {layout}, of which an interleaved dim is padded, wanted parts that all ranks "
                "divide; use a mesh that divides them, or an optimizer that looks at elements"
            )
    return dict(zip(paths, found, strict=True))
