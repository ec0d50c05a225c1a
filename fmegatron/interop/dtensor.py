"""DTensor <-> (Layout, local tensor), without a copy in either direction.

A DTensor's placements give for each mesh dim the tensor dim that it cuts; a Layout for each tensor dim which axes cut
it, major first. Both cut by torch's chunk rule. Several mesh dims on one tensor dim cut in the order of the mesh;
`_StridedShard` (FSDP over a tensor-parallel dim) means that later mesh dims cut first.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fmegatron.collectives import World
from fmegatron.interop.torch_private import local_of, split_dim, strided_factor, strided_shard
from fmegatron.layout import Layout, Mesh, Split, split

_REST = "rest"  # the axis of the ranks that a submesh leaves out


def mesh_of(mesh: DeviceMesh | World | Mesh | None) -> Mesh:
    """The Mesh of all ranks of the process group, as this device mesh names and numbers them.

    A submesh (`mesh["tp"]`) gets one more axis, "rest", for the ranks of its siblings: a DTensor on it is the same
    kind of tensor on every sibling, held as replicas. None: one axis "world" over all ranks.
    Raises ValueError for ranks that are no regular grid in the world.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, World):
        return mesh.mesh
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh is None:
        return Mesh(world=world) if world > 1 else Mesh()
    ranks = mesh.mesh
    names = mesh.mesh_dim_names or tuple(f"dim{d}" for d in range(ranks.ndim))
    wrong = (
        f"device mesh {names} of ranks {ranks.tolist()}: got ranks that are no regular grid in a world of {world}, "
        "wanted one; make it with init_device_mesh"
    )
    digits = []
    for d, size in enumerate(ranks.shape):
        line = ranks[tuple(slice(None) if d == i else 0 for i in range(ranks.ndim))]
        digits.append((size, int(line[1] - line[0]) if size > 1 else 1, f"own{d}"))
    steps = sum(
        (torch.arange(n) * stride).view([-1 if i == d else 1 for i in range(ranks.ndim)])
        for d, (n, stride, _) in enumerate(digits)
    )
    if not torch.equal(ranks.cpu() - ranks.flatten()[0].cpu(), torch.as_tensor(steps).expand(ranks.shape)):
        raise ValueError(wrong)
    # Digits of the rank number, minor to major: those of the mesh, and what is between them.
    found, at = [], 1
    for size, stride, name in sorted((d for d in digits if d[0] > 1), key=lambda digit: digit[1]):
        if stride < at or stride % at:
            raise ValueError(wrong)
        if stride > at:
            found.append((f"{_REST}{len(found)}", stride // at))
        found.append((name, size))
        at = stride * size
    if world % at:
        raise ValueError(wrong)
    if world > at:
        found.append((f"{_REST}{len(found)}", world // at))
    found.reverse()
    base = Mesh(**dict(found) | {name: 1 for size, _, name in digits if size == 1})
    rest = [name for name, _ in found if name.startswith(_REST)]
    axes = {name: int(size) for name, size in zip(names, ranks.shape, strict=True)}
    if rest:
        free = next(name for name in (_REST, *(f"{_REST}{i}" for i in range(len(axes) + 1))) if name not in axes)
        axes = {free: math.prod(base[name] for name in rest)} | axes
    return base.view(order=[*rest, *(name for _, _, name in digits)], **axes)


def layout_of(x: DTensor) -> tuple[Layout, torch.Tensor]:
    """(Layout, local tensor) of a DTensor; the local tensor is its memory.

    Raises ValueError for Partial (reduce it first), for irregular meshes, and where torch's strided placement cuts an
    uneven dim otherwise than axis after axis.
    """
    mesh, axes = mesh_of(x.device_mesh), x.device_mesh.mesh_dim_names
    axes = axes or tuple(f"dim{d}" for d in range(x.device_mesh.ndim))
    spec = [
        tuple(axes[d] for d in order) or None for order in axis_orders(x.placements, tuple(x.device_mesh.shape), x.ndim)
    ]
    layout, local = Layout(tuple(x.shape), x.dtype, mesh, tuple(spec)), local_of(x)
    for dim in range(x.ndim):
        _check_strided(layout, dim, x)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if tuple(local.shape) != layout.local_shape(rank):
        raise ValueError(
            f"DTensor of shape {tuple(x.shape)} with {list(x.placements)}: got local shape {tuple(local.shape)} on"
            f" rank {rank}, wanted {layout.local_shape(rank)} (torch.chunk, axis after axis); redistribute it first"
        )
    return layout, local


def to_dtensor(x: torch.Tensor, layout: Layout, mesh: DeviceMesh | World) -> DTensor:
    """The DTensor of a local tensor under a layout; it shares the memory of `x`.

    mesh: a DeviceMesh (or the World of one) that has the axes which split the layout, in the same places.
    Of a padded layout the DTensor has the true elements, in uneven shards.
    Raises ValueError for what DTensor cannot express: flattened ranges, interleaved parts, pieces of sizes or an order
    of their own (stages of a pipeline), pending sums, padding in front of true elements of a shard or another cut of
    them (two axes on a dim of which the outer does not divide).
    """
    mesh = mesh.device_mesh() if isinstance(mesh, World) else mesh
    placements, rank = placements_of(layout, mesh), dist.get_rank() if dist.is_initialized() else 0
    if tuple(x.shape) != (wanted := layout.local_shape(rank)):
        raise ValueError(f"to_dtensor: got a local tensor of shape {tuple(x.shape)}, wanted {wanted} of {layout}")
    if layout.padded:
        x = _without_padding(x, layout, rank)
    stride = torch.empty(layout.shape, device="meta").stride()  # torch's own rule for dims of size 0
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=stride)


def _without_padding(x: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The true elements of a padded local tensor, as a view of it."""
    uneven = layout.replace(padded=False)
    for dim in range(len(layout.shape)):
        for index in range(layout.shard_counts[dim]):
            shard = tuple(index if d == dim else 0 for d in range(len(layout.shard_counts)))
            mine, torchs = (one.segments(one.rank_of(shard), dim) for one in (layout, uneven))
            if mine != torchs:
                raise ValueError(
                    f"to_dtensor: got {layout}, whose dim {dim} is cut into rooms as {[s[::2] for s in mine]} at index "
                    f"{index}, wanted {[s[::2] for s in torchs]} (start, length), torch's chunks axis after axis; use "
                    "a mesh of which at most the last axis of the dim does not divide it"
                )
    for dim, n in enumerate(uneven.local_shape(rank)):
        x = x.narrow(dim, 0, n)
    return x


def placements_of(layout: Layout, mesh: DeviceMesh) -> list[Placement]:
    """The placements of a layout on a device mesh. Raises ValueError for what DTensor cannot express."""
    names = mesh.mesh_dim_names or tuple(f"dim{d}" for d in range(mesh.ndim))
    found = mesh_of(mesh)
    # What a layout states of an axis holds on this mesh if its groups are the same ranks.
    if any(name not in names or not _same_places(found, layout.mesh, name) for name in layout.sharded):
        raise ValueError(
            f"{layout}: got the device mesh {names} of {tuple(mesh.shape)}, wanted the same axes and ranks;"
            " make the layout with the mesh's own names and sizes (interop.mesh_of)"
        )
    for what, unfit in (
        (f"flattened ranges over {layout.flat}", layout.flat),
        (f"pending sums over {layout.unreduced}", layout.unreduced),
        ("pieces of sizes or an order of their own", layout.assigned),
        ("interleaved parts", any(isinstance(e, Split) and layout.axes(d) for d, e in enumerate(layout.spec))),
    ):
        if unfit:
            raise ValueError(f"{layout}: got {what}, wanted what a DTensor can have; reshard to a plain layout first")
    placements: list[Placement] = [Replicate()] * len(names)
    for dim in range(len(layout.shape)):
        order = [names.index(name) for name in layout.axes(dim) if name in names]
        for i, at in enumerate(order):
            factor = math.prod(mesh.size(before) for before in order[:i] if before > at)
            placements[at] = strided_shard(dim, factor) if factor > 1 else Shard(dim)
    return placements


def axis_orders(placements: tuple[Placement, ...], sizes: tuple[int, ...], ndim: int) -> list[list[int]]:
    """Per tensor dim the mesh dims that cut it, major first. Raises ValueError for Partial and unknown placements."""
    orders: list[list[int]] = [[] for _ in range(ndim)]
    for at in reversed(range(len(placements))):
        placement, factor = placements[at], strided_factor(placements[at])
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial):
            raise ValueError(
                f"DTensor with {list(placements)}: got a pending sum over mesh dim {at}, wanted a value;"
                " x.redistribute(placements=[Replicate() or Shard(...)]) first"
            )
        if factor is None and type(placement) is not Shard:
            raise ValueError(f"DTensor with {list(placements)}: got {placement!r}, wanted Shard or Replicate")
        dim, before = split_dim(placement), 0
        order = orders[dim]
        while math.prod(sizes[d] for d in order[:before]) < (factor or 1) and before < len(order):
            before += 1
        if math.prod(sizes[d] for d in order[:before]) != (factor or 1):
            raise ValueError(
                f"DTensor with {list(placements)} on a mesh of {sizes}: got the split factor {factor} of mesh dim "
                f"{at}, wanted the size of the mesh dims that cut dim {dim} before it; redistribute it to "
                "Shard first"
            )
        order.insert(before, at)
    return orders


def _same_places(a: Mesh, b: Mesh, axis: str) -> bool:
    """Whether an axis means the same ranks, in the same order, on both meshes."""
    if axis not in a or axis not in b or a.size != b.size:
        return False
    return all(a.group(rank, axis) == b.group(rank, axis) for rank in range(min(a.size, 64)))


def _check_strided(layout: Layout, dim: int, x: DTensor) -> None:
    """Raise ValueError where torch's reading of a strided placement of an uneven dim is not cut axis after axis."""
    found = [(p, d) for d, p in enumerate(x.placements) if getattr(p, "dim", None) == dim]
    n, sizes = layout.shape[dim], x.device_mesh.shape
    if all(strided_factor(p) is None for p, _ in found) or n % math.prod(sizes[d] for _, d in found) == 0:
        return
    names = x.device_mesh.mesh_dim_names or tuple(f"dim{d}" for d in range(x.device_mesh.ndim))
    for flat in range(math.prod(sizes[d] for _, d in found)):
        pieces, at, rest = [(0, n)], {}, flat
        for _, d in reversed(found):
            rest, at[d] = divmod(rest, sizes[d])
        for p, d in found:
            pieces = _cut(pieces, strided_factor(p) or 1, sizes[d], at[d])
        rank = layout.mesh.rank(**{names[d]: i for d, i in at.items()})
        ours = [(s.start, s.length) for s in layout.segments(rank, dim)]
        if pieces != ours:
            raise ValueError(
                f"DTensor of shape {tuple(x.shape)} with {list(x.placements)}: got dim {dim} at {at} as"
                f" {pieces} by torch, wanted {ours} (start, length), axis after axis; pad the dim to a multiple of"
                f" {math.prod(sizes[d] for _, d in found)}, or redistribute it to Shard first"
            )


def _cut(pieces: list[tuple[int, int]], factor: int, count: int, index: int) -> list[tuple[int, int]]:
    """What one placement keeps of the indices `pieces`: piece `index` of `count` of each of `factor` pieces."""
    total, kept = sum(n for _, n in pieces), []
    for f in range(factor):
        start, length = split.chunk(total, factor, f)
        inner, n = split.chunk(length, count, index)
        lo, hi, at = start + inner, start + inner + n, 0
        for a, length in pieces:
            low, high = max(lo, at), min(hi, at + length)
            if low < high:
                if kept and sum(kept[-1]) == a + low - at:
                    kept[-1] = (kept[-1][0], kept[-1][1] + high - low)
                else:
                    kept.append((a + low - at, high - low))
            at += length
    return kept
