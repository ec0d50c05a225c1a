"""Grouped matrix products: the rows of each group times the matrix of that group (experts).

Legend: N rows, D width, E groups, F width of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fmegatron.nn.first_gradient import first_only
from fmegatron.nn.torch_private import grouped_mm as torch_grouped_mm

__all__ = ["grouped_mm"]  # of tensors: `grouped_matmul` takes any weight


def grouped_mm(x_ND: Tensor, w_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """`x[N, D], w[E, D, F] -> y[N, F]`: row i of group e is x_i w_e; rows behind the last group are zeros.

    x and w have one floating dtype. Of rows behind the last group neither x nor their gradients are read: they may be
    anything. bf16 is `torch._grouped_mm`, other dtypes are products one by one in one opaque op.

    Args:
        x_ND: rows, sorted by group.
        w_EDF: a matrix for each group.
        ends_E: int32, where the rows of each group end, ascending and at most N: cumsum of the counts.

    Raises ValueError for shapes and dtypes that do not fit.
    """
    fits = x_ND.dim() == 2 and w_EDF.dim() == 3 and x_ND.shape[1] == w_EDF.shape[1] and ends_E.shape == w_EDF.shape[:1]
    if not fits or x_ND.dtype != w_EDF.dtype or ends_E.dtype != torch.int32:
        got = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in (x_ND, w_EDF, ends_E))
        raise ValueError(
            f"grouped_mm: got {got}, wanted x[N, D] and w[E, D, F] of one dtype and int32 ends[E]; cast x to the dtype "
            "of w, and ends = counts.cumsum(0).to(torch.int32)"
        )
    return _Grouped.apply(x_ND, w_EDF, ends_E)


class _Grouped(torch.autograd.Function):
    """y_e = x_e w_e; transposes: dx_e = g_e w_eᵀ, dw_e = x_eᵀ g_e."""

    @staticmethod
    def forward(ctx, x, w, ends):
        ctx.save_for_backward(x, w, ends)
        return _rows_of_groups(x, w, ends)

    @staticmethod
    def backward(ctx, g):
        x, w, ends = ctx.saved_tensors
        # That of the weights first: x is free then when what follows from dx is made. Inductor would make it last.
        with torch.no_grad():  # the products write into memory that is made for them
            dw = _product(x.t(), g, ends) if ctx.needs_input_grad[1] else None
            dx = _rows_of_groups(g, w.transpose(1, 2), ends, dw) if ctx.needs_input_grad[0] else None
        return *first_only("grouped_matmul", (dx, dw), x, w, g), None


def _rows_of_groups(x, w, ends, after=None):
    y = _product(x, w, ends, after)
    if x.dtype != torch.bfloat16:
        return y
    # torch leaves the rows behind the last group unwritten (pytorch#154557)
    return torch.where((torch.arange(x.shape[0], device=x.device) < ends[-1])[:, None], y, 0)


def _product(a, b, ends, after=None):
    """torch's where it can be traced, which is bf16 alone (2.13); else one by one, when `after` exists."""
    if a.dtype == torch.bfloat16:
        return torch_grouped_mm(a, b, offs=ends)
    return torch.ops.fmegatron_nn.grouped_mm(a, b, ends, after)


def _one_by_one(self, mat2, offs, after=None):
    ends = offs.tolist()
    groups = list(zip([0, *ends], ends, strict=False))
    if mat2.dim() == 3:
        out = self.new_empty(self.shape[0], mat2.shape[2])
        for (start, end), w in zip(groups, mat2, strict=True):
            torch.mm(self[start:end], w, out=out[start:end])
        out[ends[-1] :].zero_()
        return out
    out = self.new_empty(len(ends), self.shape[0], mat2.shape[1])
    for (start, end), y in zip(groups, out, strict=True):
        torch.mm(self[:, start:end], mat2[start:end], out=y)
    return out


def _shape_only(self, mat2, offs, after=None):
    if mat2.dim() == 3:
        return self.new_empty(self.shape[0], mat2.shape[2])
    return self.new_empty(offs.shape[0], self.shape[0], mat2.shape[1])


def _define_ops() -> torch.library.Library:
    library = torch.library.Library("fmegatron_nn", "DEF")
    # The arguments of torch's, so that step.check has one rule for both; `after` is only waited for.
    library.define("grouped_mm(Tensor self, Tensor mat2, Tensor offs, Tensor? after=None) -> Tensor")
    library.impl("grouped_mm", _one_by_one, "CompositeExplicitAutograd")
    library.impl("grouped_mm", _shape_only, "Meta")
    return library


_LIBRARY = _define_ops()
