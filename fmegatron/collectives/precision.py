"""The precision policy of a run: dtypes of storage, compute, communication, accumulation and optimizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron.collectives.wires import Wire
from fmegatron.tree import structure

__all__ = ["Precision"]


@dataclass(frozen=True)
class Precision:
    """A policy of dtypes.

    Args:
        param: of weights at rest.
        compute: of matrices and activations in a step.
        gather: of weights on the wire; None: as they are computed with.
        reduce: of gradients on the wire; None: as the backward makes them.
        exact: whether gradients of less than 32 bits are summed in fp32 though they travel as they are (`Wire`).
        accumulate: in which microbatches are added up.
        master: of the optimizer's copies of narrower weights; None: no copies.
        moments: how the optimizer stores its moments, a value of `optim`; None: in full.

    gather and reduce in 16 bits or less are for matrices. Vectors (norm weights, biases) travel in their own dtype, and
    their gradients as the backward makes them, which in a train step is `accumulate` or wider: wherever they are
    reduced, under every strategy (`wires`). They cost no bytes to speak of, and what scales all of the activations is
    not rounded on the way.
    ValueError for dtypes that are no floating ones, or in which nothing can be computed or summed.

    >>> Precision.bf16().wire
    Wire(gather=torch.bfloat16, reduce=torch.float32, exact=False, arrive=torch.bfloat16)
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    gather: torch.dtype | None = None
    reduce: torch.dtype | None = None
    exact: bool = False
    accumulate: torch.dtype = torch.float32
    master: torch.dtype | None = torch.float32
    moments: Any = None

    def __post_init__(self):
        for name in ("param", "compute", "gather", "reduce", "accumulate", "master"):
            dtype = getattr(self, name)
            if dtype is None and name in ("gather", "reduce", "master"):
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(
                    f"Precision.{name}: got {dtype!r}, wanted a floating dtype such as torch.bfloat16"
                    + (", or None" if name in ("gather", "reduce", "master") else "")
                )
            if dtype.itemsize < 2 and name in ("compute", "accumulate", "master"):
                raise ValueError(f"Precision.{name}: got {dtype}, in which nothing is added up, wanted 16 bits or more")
        if self.accumulate.itemsize < 4:
            raise ValueError(
                f"Precision.accumulate: got {self.accumulate}, wanted torch.float32 or wider: sums of microbatches in "
                "16 bits lose gradients"
            )
        self.wire  # noqa: B018  checks gather, reduce and exact

    @property
    def wire(self) -> Wire:
        """How matrices travel when they are gathered, and their gradients when they are reduced."""
        return Wire(self.gather or self.compute, self.reduce, self.exact, self.compute)

    @property
    def vector(self) -> Wire:
        """How vectors travel, and whatever else keeps its own dtype: gathered as they are, reduced in fp32 or wider."""
        wide = self.reduce is not None and self.reduce.itemsize >= 4
        return Wire(None, self.reduce if wide else None, self.exact)

    def wires(self, layouts: structure.Tree) -> structure.Tree:
        """How each leaf travels: the tree of `layouts` with a Wire for each.

        Vectors are leaves of one dim or none, and stacks of them, whose layouts know dims that count layers or experts
        (`Layout.lead`, of specs `stacked`).
        """
        return structure.map(lambda layout: self.wire if layout.is_matrix else self.vector, layouts)

    # ---- the usual ones

    @staticmethod
    def fp32(**changes: Any) -> Precision:
        """Everything in fp32."""
        return Precision(**changes)

    @staticmethod
    def fp64(**changes: Any) -> Precision:
        """Everything in fp64: for proofs of equality."""
        wide = torch.float64
        return dataclasses.replace(Precision(wide, wide, accumulate=wide, master=wide), **changes)

    @staticmethod
    def bf16(**changes: Any) -> Precision:
        """fp32 weights, bf16 matrices and activations; weights travel in bf16, gradients are reduced in fp32."""
        policy = Precision(compute=torch.bfloat16, gather=torch.bfloat16, reduce=torch.float32)
        return dataclasses.replace(policy, **changes)

    @staticmethod
    def fp8_wire(**changes: Any) -> Precision:
        """As bf16, and matrices travel in 8 bits with one scale for each: a quarter of the bytes of fp32."""
        return dataclasses.replace(Precision.bf16(gather=torch.float8_e4m3fn), **changes)

    @staticmethod
    def bf16_wire(**changes: Any) -> Precision:
        """As bf16, and gradients travel in bf16 too: half the bytes of `bf16`.

        Each reduction rounds its terms to bf16 once and adds them in fp32. With HSDP there are two in a row, inner and
        outer; a gradient that was accumulated is rounded when it is reduced, not while it is added up.
        """
        return dataclasses.replace(Precision.bf16(reduce=torch.bfloat16, exact=True), **changes)
