"""Arithmetic over trees of tensors. All of it is local to a rank: nothing here communicates."""

from __future__ import annotations

import math

import torch

from fmegatron.tree.labels import alike, layout_of
from fmegatron.tree.structure import Tree, leaves
from fmegatron.tree.structure import map as tree_map

# Inductor inlines 0-d arithmetic into every kernel that reads it, and so repeats a pow or cos for each element of each
# leaf: the AdamW of 4 leaves of 4 MiB took 4.7 ms instead of 1.9 ms. A concatenation is always written to memory on
# CPU, and on GPU when it has more than 8 inputs (`max_pointwise_cat_inputs`, torch 2.13).
_INPUTS_OF_A_CONCATENATION_THAT_IS_STORED = 9


def add(a: Tree, b: Tree) -> Tree:
    """a + b, leaf by leaf. Of two arrays that are known to have one layout, the result is known to have it too."""
    return tree_map(lambda x, y: _alike(x + y, x, y), a, b)


def subtract(a: Tree, b: Tree) -> Tree:
    """a - b, leaf by leaf. Of two arrays that are known to have one layout, the result is known to have it too."""
    return tree_map(lambda x, y: _alike(x - y, x, y), a, b)


def scale(a: Tree, factor: float | torch.Tensor) -> Tree:
    """a · factor, leaf by leaf; every leaf keeps its dtype.  factor: a number or a 0-d tensor. Times a number, an array
    whose layout is known keeps it; a tensor may be another one on every rank."""

    def one(x: torch.Tensor) -> torch.Tensor:
        y = (x * factor).to(x.dtype)
        return y if isinstance(factor, torch.Tensor) else alike(y, x)

    return tree_map(one, a)


def _alike(new: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`new`, known to have the layout of x and y where they have one: it was made of their elements at each place."""
    a, b = layout_of(x), layout_of(y)
    same = a is not None and b is not None and new.shape == x.shape == y.shape and a == b.replace(dtype=a.dtype)
    return alike(new, x) if same else new


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and updates are computed: float64 for float64, float32 for everything else.

    >>> working_dtype(torch.bfloat16), working_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(a: Tree, dtype: torch.dtype) -> Tree:
    """Every floating-point leaf in another dtype; the others as they are."""
    return tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, a)


def dot(a: Tree, b: Tree) -> torch.Tensor:
    """Sum over all leaves of Σ a·b, a 0-d tensor in fp32 (fp64 where a leaf is fp64). Of this rank's elements only.

    Complex leaves count as their real and imaginary parts: Re Σ a·conj(b).
    """
    return _total([(_wide(x) * _wide(y)).sum() for x, y in zip(leaves(a), leaves(b), strict=True)])


def squared_norm(a: Tree) -> torch.Tensor:
    """Sum over all leaves of Σ |a|², a 0-d tensor in fp32 (fp64 where a leaf is fp64). Of this rank's elements only."""
    return _total([_wide(x).square().sum() for x in leaves(a)])


def count(a: Tree) -> int:
    """Number of elements: of local tensors in a tree of tensors, of global arrays in one of specs or layouts."""
    return sum(math.prod(x.shape) for x in leaves(a))


def stored(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same small tensors (of one shape and dtype), which the compiler now computes once and not in every kernel."""
    padding = max(0, _INPUTS_OF_A_CONCATENATION_THAT_IS_STORED - len(values))
    # behind the other dims, which may be shards of one element: beside zeros along such a dim a check loses them
    return torch.stack([*values, *[torch.zeros_like(values[0])] * padding], -1).unbind(-1)[: len(values)]


def _wide(x: torch.Tensor) -> torch.Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.to(working_dtype(x.dtype))


def _total(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0] if terms else torch.zeros(())
    for term in terms[1:]:
        total = total + term
    return total
