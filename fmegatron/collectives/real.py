"""The real binding: each collective as functional collectives of torch on a named process group.

Every function takes the *local* tensor and the name of a group (see `World.group_name`), works in eager mode and under
tracing, and returns a fresh contiguous tensor. Groups are named by axis, never by rank, so all ranks trace one graph.
"""

import torch
import torch.distributed as dist

__all__ = ["all_gather", "all_to_all", "pmax", "ppermute", "psum", "reduce_scatter"]


def _c10d():
    return torch.ops._c10d_functional


def all_gather(x: torch.Tensor, group: str, n: int, dim: int) -> torch.Tensor:
    """Concatenate the `n` ranks' tensors on `dim`."""
    ops = _c10d()
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), n, group))
    return gathered if dim in (0, -x.dim()) else torch.cat(gathered.chunk(n, 0), dim)


def reduce_scatter(x: torch.Tensor, group: str, n: int, dim: int) -> torch.Tensor:
    """Sum over the ranks; keep this rank's part of `dim`."""
    ops = _c10d()
    rows = x.contiguous() if dim in (0, -x.dim()) else torch.cat(x.chunk(n, dim), 0)
    return ops.wait_tensor(ops.reduce_scatter_tensor(rows, "sum", n, group))


def psum(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum over the ranks."""
    ops = _c10d()
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))


def pmax(x: torch.Tensor, group: str) -> torch.Tensor:
    """Elementwise maximum over the ranks."""
    ops = _c10d()
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "max", group))


def all_to_all(x: torch.Tensor, group: str, n: int, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Part j of `split_dim` goes to rank j; what arrives is concatenated on `concat_dim` in rank order."""
    ops = _c10d()
    parts = torch.stack(x.chunk(n, split_dim))
    flat = parts.flatten(0, 1) if parts.dim() > 1 else parts
    sizes = [flat.shape[0] // n] * n
    moved = ops.wait_tensor(ops.all_to_all_single(flat, sizes, sizes, group))
    return torch.cat(moved.view(parts.shape).unbind(0), concat_dim)


def ppermute(x: torch.Tensor, group: str, shift: int) -> torch.Tensor:
    """Send to the rank `shift` further along the group (a ring), receive from the one `shift` before.

    One opaque op, because the split sizes of an all-to-all that moves one block would differ per rank, and the graph
    must be the same on all ranks.
    """
    return torch.ops.fmegatron_real.ppermute(x.contiguous(), group, shift)


def _ppermute(x, group_name, shift):
    group = torch._C._distributed_c10d._resolve_process_group(group_name)
    n, me = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(x)
    to, source = (dist.get_global_rank(group, (me + s) % n) for s in (shift, -shift))
    if shift % n == 0:
        return x.clone()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, received, source, group)]
    ):
        work.wait()
    return received


def _define_ops():
    library = torch.library.Library("fmegatron_real", "DEF")
    library.define("ppermute(Tensor x, str group, int shift) -> Tensor")
    library.impl("ppermute", _ppermute, "CompositeExplicitAutograd")
    library.impl("ppermute", lambda x, group, shift: torch.empty_like(x), "Meta")
    return library


_LIBRARY = _define_ops()
