"""float32 to bfloat16 and back: a remainder that makes it exact, and rounding at random that makes it unbiased."""

import torch

_QUIET = 0x00400000  # the bit of a NaN that is not a signalling one


# ---- the remainder ---------------------------------------------------------------------------------------------------
def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 -> (bfloat16, int16 remainder), from which `join_master` makes the same 32 bits again.

    The bfloat16 is the nearest one, ties away from zero: with ties to even, 65537 numbers round to an even neighbour,
    one more than 16 bits can distinguish. NaN stays NaN with its sign and payload, and becomes quiet if it is not (no
    arithmetic makes a signalling one).
    """
    nan, bits = master.isnan(), master.view(torch.int32)
    bits = torch.where(nan, bits | _QUIET, bits)
    # NaN is cut off: the carry could run over into the sign.
    high = (torch.where(nan, bits, torch.where(nan, 0, bits) + 0x8000)) >> 16
    return _bfloat16_of(high), (bits - (high << 16)).to(torch.int16)


def join_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 of `split_master`."""
    high, low = param.view(torch.int16).to(torch.int32) << 16, remainder.to(torch.int32)
    return (high + torch.where(param.isnan(), low & 0xFFFF, low)).view(torch.float32)


def _bfloat16_of(high: torch.Tensor) -> torch.Tensor:
    """The bfloat16 of these 16 bits (in int32): no cast, for instructions that cast may flush denormal numbers."""
    return high.to(torch.int16).view(torch.bfloat16)


# ---- rounding at random ----------------------------------------------------------------------------------------------
def stochastic_bfloat16(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """float32 -> one of the two neighbours in bfloat16, the nearer the likelier, so that the mean is x.

    words: int64 of x's shape (`collectives.random_words`), of which the low 16 bits are used. What bfloat16 has exactly
    (zeros and infinities too) stays; NaN stays NaN; above the largest finite bfloat16 the upper neighbour is infinity,
    as in rounding to nearest.
    """
    nan, bits = x.isnan(), x.view(torch.int32)
    up = torch.where(nan, 0, bits) + (words.to(torch.int32) & 0xFFFF)
    return _bfloat16_of(torch.where(nan, bits | _QUIET, up) >> 16)
