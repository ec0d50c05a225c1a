"""Root-mean-square and layer normalization.  Legend: ... any leading dims, D model width."""

import torch
from torch import Tensor


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float = 1e-5, offset: float = 0.0) -> Tensor:
    """Scale each row to unit root mean square, then by a learned weight: `x / sqrt(mean(x^2) + eps) * (offset + w)`.

    `x[..., D]@R(D), w[D]@R -> y[..., D]`, no communication: D is never sharded between blocks. Where x is sharded on
    the sequence over tp, each rank sees other rows, so w's gradient is a partial sum: the caller passes `enter(w,
    tp)`, whose transpose is the psum. Statistics and product are fp32 for narrower inputs and fp64 for fp64; the
    result has x's dtype, whatever w's is (norm weights may stay fp32 beside bf16 activations).
    Source: Zhang and Sennrich 2019, arXiv 1910.07467, equation 4; offset 1: Gemma, whose weights are stored around 0.
    """
    wide = torch.promote_types(x_D.dtype, torch.float32)
    z_D = x_D.to(wide)
    scale_D = torch.rsqrt(z_D.square().mean(-1, keepdim=True) + eps)
    factor_D = weight_D.to(wide) + offset if offset else weight_D.to(wide)
    return (z_D * scale_D * factor_D).to(x_D.dtype)


def layer_norm(x_D: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float = 1e-5) -> Tensor:
    """Each row to mean 0 and variance 1, then a learned weight and bias: `(x - mean) / sqrt(var + eps) * w + b`.

    `x[..., D]@R(D), w[D]@R, b[D]@R -> y[..., D]`; dtypes, and gradients under sequence parallelism, as `rms_norm`.
    Source: Ba et al. 2016, arXiv 1607.06450, equation 4.
    """
    wide = torch.promote_types(x_D.dtype, torch.float32)
    z_D = x_D.to(wide)
    z_D = z_D - z_D.mean(-1, keepdim=True)
    scale_D = torch.rsqrt(z_D.square().mean(-1, keepdim=True) + eps)
    return (z_D * scale_D * weight_D.to(wide) + bias_D.to(wide)).to(x_D.dtype)
