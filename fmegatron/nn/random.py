"""Dropout, uniform and normal numbers by keys: the same on every mesh, compiled or not, forward and recomputed.

    def loss_fn(params, batch, samples):  # step.build_train_step(..., with_sample_ids=True)
        ...
        x_BSF = nn.dropout(x_BSF, 0.1, key=tree.fold_in(seed, "mlp", layer), count=samples, layout=hidden)

A number is a function of three things. **key**: what it is for, a Python int; fold the name of the layer in, so that
layers differ. **count**: int64, one number for each index of dim 0 (the number of each sample of the batch among all
samples of the run, as `step.build_train_step` gives it) or of several leading dims (of each token), or a 0-d one (the
number of the step); it is data, so steps differ, and a resumed run repeats what an uninterrupted one draws. **Position
in the global array**: `layout` says where the local tensor lies in it; None for a value that is not sharded (behind the
dims that are counted). With a count for each sample the position is that within the
sample, so the numbers do not depend on how many microbatches a batch is cut into or which rank has the sample. With a
0-d count all microbatches draw the same numbers, and so do rows of equal counts.

A layer that is compiled once for all depths (`step.compiled_layer`) has one key: give it `count * layers + depth`,
among its arguments `rest`. A draw of a generator (`F.dropout`, `torch.rand`) is refused when a step is traced
(`step.purity`); numbers of Python's `random` and of numpy are constants of a compiled step, the same in every step.
"""

import math

import torch
from torch import Tensor

from fmegatron.collectives import Axes, random_words
from fmegatron.layout import Layout

# -2·ln(1 + f) / f on [sqrt(1/2) - 1, sqrt(2) - 1], error of the logarithm 1.3e-7, and cos(pi/2·t) in powers of t² on
# [-1, 1], error 5e-8 (the polynomials of tree/random.py), times 2³¹.
_LOG = (-4294967296, 2147499776, -1431710464, 1072406400, -855271808, 742093312, -692617088, 425002080)
_COS = (2147483520, -2649346816, 544710656, -44690240, 1842830)
_SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2) in fp64
_2_LN_2 = 2977044472  # 2·ln 2 · 2³¹


def dropout(
    x: Tensor,
    rate: float,
    *,
    key: int,
    count: Tensor,
    layout: Layout | None = None,
) -> Tensor:
    """x / (1 - rate) with elements set to 0 at random, each with probability `rate`: any shape, floating point.

    The gradient passes where x did, with the same factor. A pending sum stays one: the mask is the same on the ranks
    that add up. Source: Srivastava et al. 2014, JMLR 15, section 10 (scaled while training).

    Args:
        x: a tensor of any shape, floating point.
        rate: probability of 0; with rate 0 (which is how a model is evaluated) the result is x itself.
        key: of the numbers (`tree.fold_in`).
        count: int64, 0-d or one number for each row or token: see the top of the file.
        layout: of the full array, where the tensor is a shard of it.

    Raises:
        ValueError: a rate outside [0, 1]; a key, count or layout that does not fit.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout: got a rate of {rate}, wanted a probability from 0 to 1")
    _require_floating(x, "dropout")
    if rate == 0:
        return x
    dropped = _words(x, "dropout", key, count, layout) < round(rate * 2**32)
    return torch.where(dropped, 0, x * (1 / (1 - rate) if rate < 1 else 0))


def uniform(like: Tensor, *, key: int, count: Tensor, layout: Layout | None = None) -> Tensor:
    """Numbers from [0, 1) in shape, dtype and device of the local tensor `like` (floating point): multiples of 2^-k, k
    the bits of a significand: 24 of fp32, 8 of bf16, 32 of fp64.

    Args:
        like: the local tensor whose shape, dtype and device the numbers have.
        key: of the numbers (`tree.fold_in`).
        count: int64, 0-d or one number for each row or token: see the top of the file.
        layout: of the full array, where the tensor is a shard of it.
    """
    _require_floating(like, "uniform")
    bits = min(32, 1 - round(math.log2(torch.finfo(like.dtype).eps)))
    return (_words(like, "uniform", key, count, layout) >> (32 - bits)).to(like.dtype) * 2.0**-bits


def normal(like: Tensor, *, key: int, count: Tensor, layout: Layout | None = None) -> Tensor:
    """Numbers of a normal distribution of mean 0 and variance 1 in shape, dtype and device of `like` (floating point).

    The largest possible is 6.7. By Box and Muller (1958) in whole numbers and one
    root and one product of fp64, rounded to fp32: `log` and `cos` of a maths library differ from machine to machine,
    and between vector widths.

    Args:
        like: the local tensor whose shape, dtype and device the numbers have.
        key: of the numbers (`tree.fold_in`).
        count: int64, 0-d or one number for each row or token: see the top of the file.
        layout: of the full array, where the tensor is a shard of it.
    """
    _require_floating(like, "normal")
    radius, angle = (_words(like, f"normal {which}", key, count, layout) for which in ("radius", "angle"))
    return box_muller(radius, angle).to(torch.float32).to(like.dtype)


def box_muller(radius: Tensor, angle: Tensor) -> Tensor:
    """sqrt(-2·ln((radius + 1) / 2³²))·cos(a), fp64, of two int64 words of 32 bits each.

    The low 31 bits of `angle` choose an angle a in the right half plane, its top bit mirrors it. The error is below
    1e-6, and 3e-5 for the 200 largest of the 2³² radii, where the root of almost 0 is taken.
    """
    # radius + 1 = m · 2^e with m in [sqrt(1/2), sqrt(2)): in the bits of the fp64, which holds it exactly.
    bits = (radius + 1).to(torch.float64).view(torch.int64)
    e = bits - _SQRT_HALF >> 52
    f = (((bits - (e << 52)).view(torch.float64) - 1) * 2.0**31).to(torch.int64)  # (m - 1) · 2³¹
    square = (f * _polynomial(_LOG, f) >> 31) + (32 - e) * _2_LN_2  # -2·ln(...) · 2³¹
    t = ((angle & 0x7FFFFFFF) << 1) - 2**31  # a · 2/pi · 2³¹
    cos = _polynomial(_COS, t * t >> 31)
    cos = torch.where(angle > 0x7FFFFFFF, -cos, cos)
    return (square.to(torch.float64) * 2.0**-31).sqrt() * (cos.to(torch.float64) * 2.0**-31)


def _polynomial(coefficients: tuple[int, ...], x: Tensor) -> Tensor:
    """c0 + c1·x + c2·x² + ... by Horner's rule; numbers times 2³¹ in int64, rounded down."""
    out = (x * coefficients[-1] >> 31) + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        out = (x * out >> 31) + coefficient
    return out


def _require_floating(x: Tensor, who: str) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{who}: got a value of {x.dtype}, wanted one of floating point; cast it, x.float()")


def _words(x: Tensor, what: str, key: int, count: Tensor, layout: Layout | None) -> Tensor:
    """Random words of a stream of this kind of numbers: one key for two of them gives different ones."""
    return random_words.random_words(key, what, count, x, layout, None if layout is None else Axes(layout.mesh))
