"""The real binding: each collective as functional collectives of torch on a named process group.

Every function takes the *local* tensor and the name of a group (see `World.group_name`), works in eager mode and under
tracing, and returns a fresh contiguous tensor. Groups are named by axis, never by rank, so all ranks trace one graph.

torch numbers the ranks of a group in ascending order. Over joint axes that are not in the order of the mesh the index
along the axes is another number; `order[index]` is then the position in the group (`World.order`), None where equal.
"""

import torch
import torch.distributed as dist

from fmegatron.collectives.torch_private import functional_ops, group_named

__all__ = ["all_gather", "all_to_all", "emit", "pmax", "ppermute", "psum", "reduce_scatter"]

Order = tuple[int, ...] | None


def emit(name: str, x: torch.Tensor, world, axes: tuple[str, ...], *arguments: int) -> torch.Tensor:
    """The real form of a symbolic collective, by its name, tensor and axes; `arguments`: what else the op takes."""
    group, order = world.group_name(axes), world.order(axes)
    if name == "psum":
        return psum(x, group)
    if name == "pmax":
        return pmax(x, group)
    function = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_to_all": all_to_all}.get(
        name, ppermute
    )
    return function(x, group, *arguments, order=order)


def by_index(parts, order: Order):
    """From parts in the order of the group to parts in the order of the index."""
    return parts if order is None else [parts[position] for position in order]


def by_position(parts, order: Order):
    """From parts in the order of the index to parts in the order of the group."""
    return parts if order is None else [parts[order.index(position)] for position in range(len(order))]


def all_gather(x: torch.Tensor, group: str, n: int, dim: int, order: Order = None) -> torch.Tensor:
    """Concatenate the `n` ranks' tensors on `dim`."""
    ops = functional_ops()
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), n, group))
    if dim in (0, -x.dim()) and order is None:
        return gathered
    return torch.cat(by_index(gathered.chunk(n, 0), order), dim)


def reduce_scatter(x: torch.Tensor, group: str, n: int, dim: int, order: Order = None) -> torch.Tensor:
    """Sum over the ranks; keep this rank's part of `dim`."""
    ops = functional_ops()
    straight = dim in (0, -x.dim()) and order is None
    rows = x.contiguous() if straight else torch.cat(by_position(x.chunk(n, dim), order), 0)
    return ops.wait_tensor(ops.reduce_scatter_tensor(rows, "sum", n, group))


def psum(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum over the ranks."""
    ops = functional_ops()
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))


def pmax(x: torch.Tensor, group: str) -> torch.Tensor:
    """Elementwise maximum over the ranks."""
    ops = functional_ops()
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "max", group))


def all_to_all(
    x: torch.Tensor, group: str, n: int, split_dim: int, concat_dim: int, order: Order = None
) -> torch.Tensor:
    """Part j of `split_dim` goes to rank j; what arrives is concatenated on `concat_dim` in rank order."""
    ops = functional_ops()
    parts = torch.stack(by_position(x.chunk(n, split_dim), order))
    flat = parts.flatten(0, 1) if parts.dim() > 1 else parts
    sizes = [flat.shape[0] // n] * n
    moved = ops.wait_tensor(ops.all_to_all_single(flat, sizes, sizes, group))
    return torch.cat(by_index(moved.view(parts.shape).unbind(0), order), concat_dim)


def ppermute(x: torch.Tensor, group: str, n: int, shift: int, order: Order = None) -> torch.Tensor:
    """Send to the rank `shift` further along the axis (a ring), receive from the one `shift` before.

    One opaque op, because the split sizes of an all-to-all that moves one block would differ per rank, and the graph
    must be the same on all ranks.
    """
    return torch.ops.fmegatron_real.ppermute(x.contiguous(), group, shift, order or range(n))


def _ppermute(x, group_name, shift, order):
    group = group_named(group_name)
    n, me = len(order), order.index(dist.get_rank(group))
    received = torch.empty_like(x)
    to, source = (dist.get_global_rank(group, order[(me + s) % n]) for s in (shift, -shift))
    if shift % n == 0:
        return x.clone()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, received, source, group)]
    ):
        work.wait()
    return received


def _define_ops():
    library = torch.library.Library("fmegatron_real", "DEF")
    library.define("ppermute(Tensor x, str group, int shift, int[] order) -> Tensor")
    library.impl("ppermute", _ppermute, "CompositeExplicitAutograd")
    library.impl("ppermute", lambda x, group, shift, order: torch.empty_like(x), "Meta")
    return library


_LIBRARY = _define_ops()
