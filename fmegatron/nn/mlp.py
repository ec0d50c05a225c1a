"""Feed-forward layers.  Legend: B batch, S sequence, D model width, F hidden width, 2F gate and up."""

from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor

from fmegatron.collectives import axes
from fmegatron.nn.linear import column_parallel, row_parallel
from fmegatron.nn.weight import Weight

ACTIVATIONS = MappingProxyType(
    {
        "silu": F.silu,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu2": lambda x: F.relu(x).square(),
    }
)


def gated_mlp(
    x_BSD: Tensor,
    gate_up_D2F: Weight,
    down_FD: Weight,
    tp: axes.Axis,
    sequence_parallel: bool = False,
    activation: str = "silu",
) -> Tensor:
    """(act(x @ gate) * (x @ up)) @ down, gate and up fused in one matrix product: SwiGLU, or GeGLU with a gelu.

    `x[B, S, D]@R(tp), gate_up[D, 2F_tp], down[F_tp, D] -> y[B, S, D]@R(tp)` (S_tp both ends with sequence_parallel).
    gate_up is interleaved over tp (`Split("tp", parts=2)`): a rank's columns are its gate part, then its up part, so
    the product is elementwise local. One reduction forward (row_parallel) and one backward (column_parallel's
    transpose).
    Source: Shazeer 2020, arXiv 2002.05202, equation 6.

    Args:
        x_BSD: activations, replicated over tp, or with S split over it under sequence parallelism.
        gate_up_D2F: both weights in one, interleaved over tp.
        down_FD: rows split over tp.
        tp: the axis of tensor parallelism.
        sequence_parallel: whether S is split over tp at both ends.
        activation: a name of `ACTIVATIONS`.
    """
    gate_BSF, up_BSF = column_parallel(x_BSD, gate_up_D2F, tp, sequence_parallel).chunk(2, -1)
    return row_parallel(ACTIVATIONS[activation](gate_BSF) * up_BSF, down_FD, tp, sequence_parallel)
