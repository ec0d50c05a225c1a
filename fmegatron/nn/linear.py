"""The two tensor-parallel matrix products.  Legend: B batch, S sequence, D input width, F output width."""

from torch import Tensor

from fmegatron.collectives import all_gather, axes, enter, psum, reduce_scatter
from fmegatron.nn.weight import Weight, matmul


def column_parallel(x_BSD: Tensor, w_DF: Weight, tp: axes.Axis, sequence_parallel: bool = False) -> Tensor:
    """x @ w with w's columns split over tp: every rank makes its own part of the output.

    `x[B, S, D]@R(tp), w[D, F_tp] -> y[B, S, F_tp]`; with sequence_parallel `x[B, S_tp, D] -> y[B, S, F_tp]`.
    Transpose: x's gradient is a partial sum over tp (each rank knows its columns' share); `enter` sums it (psum), or
    the transpose of the all_gather does (reduce_scatter). w's gradient is complete: `x^T @ dy`, sharded like w.
    Source: Megatron-LM, arXiv 1909.08053, section 3 (its operator f); sequence parallel: arXiv 2205.05198 (its g).
    """
    x_BSD = all_gather(x_BSD, tp, 1) if sequence_parallel else enter(x_BSD, tp)
    return matmul(x_BSD, w_DF)


def row_parallel(x_BSF: Tensor, w_FD: Weight, tp: axes.Axis, sequence_parallel: bool = False) -> Tensor:
    """x @ w with w's rows split over tp: the product is a sum over ranks.

    `x[B, S, F_tp], w[F_tp, D] -> y[B, S, D]@R(tp)`; with sequence_parallel `-> y[B, S_tp, D]`.
    Transpose: psum's is the identity, so dy arrives replicated and dx = dy @ w^T is sharded like x; reduce_scatter's
    is all_gather, which makes dy whole again. w's gradient is complete.
    Source: as column_parallel (operators g and g-bar).
    """
    y_BSD = matmul(x_BSF, w_FD)
    return reduce_scatter(y_BSD, tp, 1) if sequence_parallel else psum(y_BSD, tp)
