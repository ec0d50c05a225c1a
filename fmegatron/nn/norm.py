"""Root-mean-square normalization.  Legend: ... any leading dims, D model width."""

import torch
from torch import Tensor


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float = 1e-5) -> Tensor:
    """Scale each row to unit root mean square, then by a learned weight: `x / sqrt(mean(x^2) + eps) * w`.

    `x[..., D]@R(D), w[D]@R -> y[..., D]`, no communication: D is never sharded between blocks. Where x is sharded on
    the sequence over tp, each rank sees other rows, so w's gradient is a partial sum: the caller passes `enter(w,
    tp)`, whose transpose is the psum. Statistics and product are fp32 for narrower inputs and fp64 for fp64; the
    result has x's dtype, whatever w's is (norm weights may stay fp32 beside bf16 activations).
    Source: Zhang and Sennrich 2019, arXiv 1910.07467, equation 4.
    """
    wide = torch.promote_types(x_D.dtype, torch.float32)
    z_D = x_D.to(wide)
    scale_D = torch.rsqrt(z_D.square().mean(-1, keepdim=True) + eps)
    return (z_D * scale_D * weight_D.to(wide)).to(x_D.dtype)
