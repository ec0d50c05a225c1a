"""Gathers and reduce-scatters of one tensor in the form in which torch finds the matrix products beside them.

With Inductor's setting `_micro_pipeline_tp` (`jit(..., patches={"_micro_pipeline_tp": True})`) its pass turns a gather
and the product behind it, or a product and the reduce-scatter behind it, into one op that moves a part while it
multiplies another, in symmetric memory, on CUDA. It looks for torch's own way to write a collective of one dim; ours
gathers lists of tensors from buffers. Source: Wang et al. 2022, doi 10.1145/3567955.3567959.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from fmegatron.collectives import real
from fmegatron.collectives.kinds import Collective
from fmegatron.collectives.places import Place
from fmegatron.collectives.table import ALL_GATHER, REDUCE_SCATTER
from fmegatron.collectives.torch_private import allow_symmetric_memory, functional_ops

__all__ = ["in_product_form"]


def in_product_form(collective: Collective) -> Callable[..., Sequence[Tensor]]:
    """The real form of a collective beside products; its usual one where torch has no op for both."""
    return _FORMS.get(collective.name, collective.real)


def _gathered(xs: list[Tensor], group: real.Group, places: list[Place]) -> list[Tensor]:
    dim = _only_dim(xs, group, places)
    if dim is None:
        return real.all_gather(xs, group, places)
    (x,), ops = xs, functional_ops()
    whole = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), group.n, group.name))
    return [whole if dim == 0 else torch.cat(whole.split(x.shape[0], 0), dim)]


def _scattered(xs: list[Tensor], group: real.Group, places: list[Place], exact: bool) -> list[Tensor]:
    dim = None if exact else _only_dim(xs, group, places)
    if dim is None:
        return real.reduce_scatter(xs, group, places, exact)
    (x,), ops = xs, functional_ops()
    whole = x if dim == 0 else torch.cat(x.split(x.shape[dim] // group.n, dim), 0)
    return [ops.wait_tensor(ops.reduce_scatter_tensor(whole.contiguous(), "sum", group.n, group.name))]


def _only_dim(xs: list[Tensor], group: real.Group, places: list[Place]) -> int | None:
    """The dim that is gathered or scattered, where it is one of one tensor, in the order of the group's ranks."""
    if len(xs) > 1 or xs[0].dtype.itemsize == 1 or group.world.order(group.axes) is not None:
        return None
    place, dim = places[0], places[0].dims[0]
    if place.block or place.parts or place.assigned or dim < 0 or set(place.dims) != {dim}:
        return None
    if group.world.device.type == "cuda":
        allow_symmetric_memory(group.name)
    return dim


_FORMS = MappingProxyType({ALL_GATHER.name: _gathered, REDUCE_SCATTER.name: _scattered})
