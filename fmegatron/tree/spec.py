"""ArraySpec: one leaf's layout and how it is initialised, the single source for init, optimizer state, checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fmegatron.layout import Layout, Mesh
from fmegatron.tree.structure import map as tree_map


@dataclass(frozen=True)
class Constant:
    """Every element is `value`."""

    value: float = 0.0


@dataclass(frozen=True)
class Normal:
    """Normal distribution of mean 0 and standard deviation `std`."""

    std: float = 1.0


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution on [lo, hi)."""

    lo: float = 0.0
    hi: float = 1.0


Init = Constant | Normal | Uniform
zeros = Constant(0.0)
ones = Constant(1.0)


@dataclass(frozen=True)
class ArraySpec:
    """An array that does not exist yet: its layout and its initial values. A leaf in trees of specs."""

    layout: Layout
    init: Init = zeros

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the array."""
        return self.layout.dtype

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout."""
        return self.layout.mesh

    def replace(self, init: Init | None = None, **changes) -> ArraySpec:
        """This spec with another init and/or with fields of its layout changed (`Layout.replace`)."""
        layout = self.layout.replace(**changes) if changes else self.layout
        return replace(self, layout=layout, init=self.init if init is None else init)


def layouts(specs: Any) -> Any:
    """The tree of layouts of a tree of ArraySpecs (Layouts stay as they are)."""
    return tree_map(lambda leaf: leaf if isinstance(leaf, Layout) else leaf.layout, specs)


def zeros_like(x: Any, dtype: torch.dtype | None = None) -> Any:
    """Zeros of the same kind, for every leaf of a tree: tensors for tensors, ArraySpecs of zeros for ArraySpecs.

    So `opt.init(specs)` runs the same code as `opt.init(params)` and gives the specs of the state.  dtype: another
    dtype for the zeros.
    """

    def one(leaf):
        if isinstance(leaf, ArraySpec):
            return leaf.replace(zeros, **({} if dtype is None else {"dtype": dtype}))
        if isinstance(leaf, Layout):
            return leaf if dtype is None else leaf.replace(dtype=dtype)
        return torch.zeros_like(leaf, dtype=dtype)

    return tree_map(one, x)
