"""Collectives with a wrong transpose: right forward, and a backward that is not what the forward's use asks for."""

import torch

from fmegatron import collectives as fm
from fmegatron.collectives.ops import lend


def _pair(forward, backward):
    """A function of one tensor with this forward and this backward."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, g):
            return backward(g)

    return Pair.apply


def gather_cut(x, axis, dim):
    """all_gather whose transpose takes this rank's part and sums nothing."""
    return lend(x, axis, dim)


def gather_summed(x, axis, dim):
    """all_gather whose transpose sums over the ranks and keeps the first part on all of them."""
    n = x.shape[dim]
    return _pair(lambda x: fm.all_gather(x, axis, dim), lambda g: fm.psum(g, axis).narrow(dim, 0, n))(x)


def scatter_cut(x, axis, dim):
    """reduce_scatter whose transpose repeats this rank's gradient instead of gathering those of all."""
    repeat = [axis.size if d == dim else 1 for d in range(x.dim())]
    return _pair(lambda x: fm.reduce_scatter(x, axis, dim), lambda g: torch.cat([g] * max(repeat), dim))(x)


def psum_summed(x, axis):
    """psum whose transpose is psum: the gradient is too large by the number of ranks."""
    return _pair(lambda x: fm.psum(x, axis), lambda g: fm.psum(g, axis))(x)


def own_noise(x, axis):
    """Numbers that differ from rank to rank."""
    return (fm.axis_index(axis) * 2654435761 % 4093).to(x.dtype) / 4093 + torch.zeros_like(x)


def enter_mean(x, axis):
    """enter whose transpose is the mean over ranks."""
    return _pair(lambda x: x.view_as(x), lambda g: fm.psum(g, axis) / axis.size)(x)


def scatter_scaled(x, axis, dim):
    """reduce_scatter whose transpose divides by the number of ranks, as for a mean."""
    return _pair(lambda x: fm.reduce_scatter(x, axis, dim), lambda g: fm.all_gather(g, axis, dim) / axis.size)(x)


def shard_padded(x, axis, dim):
    """shard whose transpose leaves this rank's gradient where it is, with zeros for the parts of others."""
    size = x.shape[dim]

    def back(g):
        shape = list(g.shape)
        shape[dim] = size - g.shape[dim]
        return torch.cat([g, g.new_zeros(shape)], dim)

    return _pair(lambda x: fm.shard(x, axis, dim), back)(x)


def exchange_local(x, axis, split_dim, concat_dim):
    """all_to_all whose transpose rearranges what this rank has and sends nothing."""

    def back(g):
        return torch.cat(g.chunk(axis.size, concat_dim), split_dim)

    return _pair(lambda x: fm.all_to_all(x, axis, split_dim, concat_dim), back)(x)


def ring_same(x, axis, shift):
    """ppermute whose transpose moves on in the same direction."""
    return _pair(lambda x: fm.ppermute(x, axis, shift), lambda g: fm.ppermute(g, axis, shift))(x)


# ---- layouts ---------------------------------------------------------------------------------------------------------
def turned(layout):
    """The same shapes with other ranges: several axes of one dim in the opposite order."""
    spec = [axes[::-1] if isinstance(axes, tuple) else axes for axes in layout.spec]
    return layout.replace(spec=tuple(spec), flat=layout.flat[::-1])
