"""What rounding alone can do to the results of a step, by the magnitudes in it.

A mesh adds up the same terms in another order. In a sum, or a product of matrices, that moves a result by up to the
terms' magnitudes times eps, whatever is left of them: a gradient that is zero but for rounding (of a key's bias in
attention) is other noise on each mesh, and AdamW makes steps of it that are 1e8 times as large. So a step is run again
with such errors drawn at random in every sum, and what its results move by is what two meshes may differ by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fmegatron.collectives.torch_private import schema_of
from fmegatron.layout import Mesh
from fmegatron.step import every_rank
from fmegatron.step.graph import nodes

__all__ = ["movements"]

_RUNS = 3
_ROOM = 64.0  # a sum of n terms errs by about sqrt(n) of what is drawn here once; and a run may draw small numbers
# Linear in their terms, so that of magnitudes they give the magnitude of the terms.
_SUMS = frozenset(
    {
        *(
            "sum",
            "mean",
            "mm",
            "bmm",
            "addmm",
            "baddbmm",
            "mv",
            "dot",
            "convolution",
            "cumsum",
            "index_add",
            "scatter_add",
        ),
        *("embedding_dense_backward", "index_put", "convolution_backward"),
    }
)
# Sums inside of them, of magnitudes like that of their result.
_OTHERS = frozenset(
    {
        *(
            "_softmax",
            "_log_softmax",
            "_softmax_backward_data",
            "_log_softmax_backward_data",
            "logsumexp",
            "var_mean",
            "var",
        ),
        *("native_layer_norm", "native_layer_norm_backward", "linalg_vector_norm", "norm", "prod"),
        *("_fused_rms_norm", "_fused_rms_norm_backward", "_scaled_dot_product_flash_attention_for_cpu"),
    }
)


def movements(graph: fx.Graph, mesh: Mesh, inputs: list[list]) -> list[torch.Tensor | None]:
    """Per output of a flat graph of one rank, by how much rounding in torch.float64 can move each element; None of
    those that are in another dtype. inputs: as of `interpret`. Those of integers are exact, and stay."""
    clean, _ = every_rank.interpret(graph, mesh, inputs)
    most: list[torch.Tensor | None] = [torch.zeros_like(x) if _moves(x) else None for (x,) in clean]
    for run in range(_RUNS):
        rounded = functools.partial(_rounded, torch.Generator().manual_seed(run))
        found, _ = every_rank.interpret(graph, mesh, inputs, around=rounded)
        for i, ((x,), (y,)) in enumerate(zip(clean, found, strict=True)):
            if (known := most[i]) is not None:
                most[i] = torch.maximum(known, (x - y).abs().nan_to_num(0.0, 0.0, 0.0))
    return [None if x is None else _ROOM * x for x in most]


def _moves(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.float64


def _rounded(generator: torch.Generator, node: fx.Node, run: Callable, args: tuple, kwargs: dict) -> Any:
    """What a node computes, with an error of rounding in each sum."""
    found, schema = run(*args, **kwargs), schema_of(node.target)
    name = "" if schema is None else schema.name.partition("::")[2]
    if name not in _SUMS and name not in _OTHERS:
        return found
    sizes = found
    if name in _SUMS:
        apart = [_magnitude(x) for x in args], {k: _magnitude(x) for k, x in kwargs.items()}
        sizes = run(*apart[0], **apart[1])
    if isinstance(found, torch.Tensor):
        return _moved(found, sizes, generator)
    return tuple(_moved(x, y, generator) for x, y in zip(found, sizes, strict=True))


def _magnitude(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(_magnitude(item) for item in nodes.items_of(x))
    return x.abs() if _moves(x) else x


def _moved(x: Any, size: torch.Tensor, generator: torch.Generator) -> Any:
    if not _moves(x):
        return x
    error = torch.rand(x.shape, generator=generator, dtype=x.dtype).mul(2).sub(1).to(x.device) * size.abs()
    exact = size == size.round()  # a sum of whole numbers, perhaps
    return x + (error * torch.finfo(x.dtype).eps).masked_fill(exact | ~error.isfinite(), 0.0)
