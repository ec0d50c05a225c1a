"""Differentiable collectives over named axes. Each is one op with one transpose; nothing else sums or moves gradients.

Types in the notation of the scaling book: `x[S_a]` is sharded over axis a on dim S, `x{U_a}` is a partial sum over a,
no mark is replicated. For the gradient of a replicated value two meanings exist: every rank holds the whole gradient,
or each holds a part of the sum. `enter` is the border between them, and the only op that sums gradients:
a value that is replicated and used differently by each rank must pass through `enter` exactly once.

Over an axis of size 1 every function returns its argument: no node is left in the graph.
"""

import torch

from fmegatron.collectives import real
from fmegatron.collectives.axes import Axis

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "declare",
    "enter",
    "pmax",
    "ppermute",
    "psum",
    "reduce_scatter",
    "shard",
]


# ---- what a call emits: a symbolic node, or functional collectives on a process group --------------------------------
def _emit_all_gather(x, axis, dim):
    if axis.world is None:
        return torch.ops.fmegatron.all_gather(x, axis.names, axis.size, dim, mesh=axis.mesh.fingerprint)
    return real.emit("all_gather", x, axis.world, axis.names, axis.size, dim)


def _emit_reduce_scatter(x, axis, dim):
    if axis.world is None:
        return torch.ops.fmegatron.reduce_scatter(x, axis.names, axis.size, dim, mesh=axis.mesh.fingerprint)
    return real.emit("reduce_scatter", x, axis.world, axis.names, axis.size, dim)


def _emit_psum(x, axis):
    if axis.world is None:
        return torch.ops.fmegatron.psum(x, axis.names, mesh=axis.mesh.fingerprint)
    return real.emit("psum", x, axis.world, axis.names)


def _emit_pmax(x, axis):
    if axis.world is None:
        return torch.ops.fmegatron.pmax(x, axis.names, mesh=axis.mesh.fingerprint)
    return real.emit("pmax", x, axis.world, axis.names)


def _emit_all_to_all(x, axis, split_dim, concat_dim):
    if axis.world is None:
        return torch.ops.fmegatron.all_to_all(
            x, axis.names, axis.size, split_dim, concat_dim, mesh=axis.mesh.fingerprint
        )
    return real.emit("all_to_all", x, axis.world, axis.names, axis.size, split_dim, concat_dim)


def _emit_ppermute(x, axis, shift):
    if axis.world is None:
        return torch.ops.fmegatron.ppermute(x, axis.names, axis.size, shift, mesh=axis.mesh.fingerprint)
    return real.emit("ppermute", x, axis.world, axis.names, axis.size, shift)


def _emit_shard(x, axis, dim):
    """This rank's part of `dim`, with the rank as a tensor, so that the graph does not depend on it."""
    parts = x.unflatten(dim, (axis.size, x.shape[dim] // axis.size))
    return parts.index_select(dim, axis_index(axis, like=x).view(1)).squeeze(dim)


def _emit_declare(x, axis, kind):
    name, dim = (kind, -1) if isinstance(kind, str) else kind
    return torch.ops.fmegatron.declare(x, axis.names, name, dim, mesh=axis.mesh.fingerprint)


# ---- the pairs of an op and its transpose ----------------------------------------------------------------------------
class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dim):
        ctx.axis, ctx.dim = axis, dim
        return _emit_all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx, g):
        return _emit_reduce_scatter(g, ctx.axis, ctx.dim), None, None


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dim):
        ctx.axis, ctx.dim = axis, dim
        return _emit_all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx, g):
        return _emit_shard(g, ctx.axis, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dim):
        ctx.axis, ctx.dim = axis, dim
        return _emit_reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx, g):
        return _emit_all_gather(g, ctx.axis, ctx.dim), None, None


class _Psum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return _emit_psum(x, axis)

    @staticmethod
    def backward(ctx, g):
        return g, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return _emit_psum(g, ctx.axis), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, split_dim, concat_dim):
        ctx.axis, ctx.split_dim, ctx.concat_dim = axis, split_dim, concat_dim
        return _emit_all_to_all(x, axis, split_dim, concat_dim)

    @staticmethod
    def backward(ctx, g):
        return _emit_all_to_all(g, ctx.axis, ctx.concat_dim, ctx.split_dim), None, None, None


class _Ppermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, shift):
        ctx.axis, ctx.shift = axis, shift
        return _emit_ppermute(x, axis, shift)

    @staticmethod
    def backward(ctx, g):
        return _emit_ppermute(g, ctx.axis, -ctx.shift), None, None


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dim):
        ctx.axis, ctx.dim = axis, dim
        return _emit_shard(x, axis, dim)

    @staticmethod
    def backward(ctx, g):
        return _emit_all_gather(g, ctx.axis, ctx.dim), None, None


class _Declare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, forward, backward):
        ctx.axis, ctx.backward_kind = axis, backward
        return x.view_as(x) if forward is None else _emit_declare(x, axis, forward)

    @staticmethod
    def backward(ctx, g):
        return g if ctx.backward_kind is None else _emit_declare(g, ctx.axis, ctx.backward_kind), None, None, None


# ---- the public functions --------------------------------------------------------------------------------------------
def _dim(x: torch.Tensor, dim: int, what: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what}: dim {dim} of a tensor with shape {tuple(x.shape)}; give a dim in [0, {x.dim()})")
    return dim % x.dim()


def _divisible(x: torch.Tensor, dim: int, axis: Axis, what: str) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"{what} over {axis}: dim {dim} of shape {tuple(x.shape)} is not divisible by {axis.size}; "
            "pad it or choose another dim"
        )


def all_gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """`x[S_a] -> x[S]`; transpose: reduce_scatter over a on the same dim.

    Each rank uses the gathered value for its own purpose, so the gradients of all ranks are summed on the way back.
    """
    dim = _dim(x, dim, "all_gather")
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim)


def lend(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """`x[S_a] -> x[S]` as all_gather, for a value that every rank then treats alike and cuts by a again (in `reshard`).

    Transpose: shard over a. After the cut's transpose, an all_gather, each rank has the whole gradient: the
    reduce-scatter of a plain all_gather would add up as many copies as there are ranks.
    """
    return x if axis.size == 1 else _Lend.apply(x, axis, dim)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """`x[S]{U_a} -> x[S_a]`; transpose: all_gather over a on the same dim. The dim must divide by the axis size."""
    dim = _dim(x, dim, "reduce_scatter")
    if axis.size == 1:
        return x
    _divisible(x, dim, axis, "reduce_scatter")
    return _ReduceScatter.apply(x, axis, dim)


def psum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`x{U_a} -> x`; transpose: identity. The sum is used alike on every rank, so its gradient is already whole."""
    return x if axis.size == 1 else _Psum.apply(x, axis)


def enter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`x -> x`, the identity; transpose: psum over a. Marks where a replicated value begins to be used differently."""
    return x if axis.size == 1 else _Enter.apply(x, axis)


def pmax(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Elementwise maximum over a; no gradient passes (the argument is detached)."""
    return x.detach() if axis.size == 1 else _emit_pmax(x.detach(), axis)


def all_to_all(x: torch.Tensor, axis: Axis, split_dim: int, concat_dim: int) -> torch.Tensor:
    """`x[S, C_a] -> x[S_a, C]` (split_dim S, concat_dim C); transpose: all_to_all with the dims exchanged."""
    split_dim, concat_dim = _dim(x, split_dim, "all_to_all"), _dim(x, concat_dim, "all_to_all")
    if axis.size == 1:
        return x
    _divisible(x, split_dim, axis, "all_to_all")
    return _AllToAll.apply(x, axis, split_dim, concat_dim)


def ppermute(x: torch.Tensor, axis: Axis, shift: int) -> torch.Tensor:
    """Rank i receives the value of rank i - shift (a ring); transpose: ppermute by -shift."""
    return x if axis.size == 1 else _Ppermute.apply(x, axis, shift)


def axis_index(axis: Axis, like: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's position along the axis, a 0-d int64 tensor on the device of `like`.

    A tensor and never a Python int: all ranks share one graph, and a checker can see what depends on the rank.
    """
    device = None if like is None else like.device
    if axis.size == 1:
        return torch.zeros((), dtype=torch.int64, device=device)
    if axis.world is not None:
        return torch.full((), axis.world.index(axis.names), dtype=torch.int64, device=device)
    like = torch.zeros(()) if like is None else like.detach()
    return torch.ops.fmegatron.axis_index(like, axis.names, mesh=axis.mesh.fingerprint)


def shard(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """`x[S] -> x[S_a]`, this rank's part of a value replicated over a; transpose: all_gather over a."""
    dim = _dim(x, dim, "shard")
    if axis.size == 1:
        return x
    _divisible(x, dim, axis, "shard")
    return _Shard.apply(x, axis, dim)


def declare(
    x: torch.Tensor,
    axis: Axis,
    forward: str | tuple[str, int] | None = None,
    backward: str | tuple[str, int] | None = None,
) -> torch.Tensor:
    """State what no rule can see of a value: "partial", ("sharded", dim) or "replicated", for value and gradient.

    An identity that leaves a node only in symbolic graphs. It is the one statement that a checker believes, so use it
    only where rules end (a lookup of this rank's rows, an op that the check calls unproven); `testing.simulate` tests
    it.
    """
    for kind in (forward, backward):
        words = kind in (None, "partial", "replicated")
        if not words and not (isinstance(kind, tuple) and len(kind) == 2 and kind[0] == "sharded"):
            raise ValueError(f'declare got {kind!r}; say "partial", "replicated" or ("sharded", dim)')
    if axis.size == 1 or axis.world is not None:
        return x
    return _Declare.apply(x, axis, forward, backward)
