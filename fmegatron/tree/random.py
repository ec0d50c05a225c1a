"""Numbers from counters: the value at a global index depends on (key, index) only.

Two neighbouring elements share one 64-bit word: pair p holds elements 2p and 2p + 1. The word is a keyed permutation of
p (a Feistel network of three rounds whose round function is a 32-bit mixer, so no word repeats within a leaf). Normal
values come from it by Box and Muller (1958).

All of it is integer operations and single additions, multiplications and square roots of float32, which IEEE 754 rounds
in one way only. So the bits do not depend on the machine, on vector widths, or on where in a buffer an element stands,
which `log` and `cos` of a maths library cannot promise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fmegatron.tree.keys import fold_in

# -2·ln(1 + f) / f on [sqrt(1/2) - 1, sqrt(2) - 1], error of the logarithm 1.3e-7; interpolated at Chebyshev nodes
_LOG = (-2.0, 1.0000075101852417, -0.6666921377182007, 0.49937814474105835, -0.3982669711112976, 0.3455641269683838)
_LOG += (-0.3225249648094177, 0.19790701568126678)
# sin(pi/2·t) / t and cos(pi/2·t) in powers of t² on [-1, 1], errors 7e-9 and 5e-8
_SIN = (1.5707963705062866, -0.6459637880325317, 0.07968991994857788, -0.004674143623560667, 0.00015167170204222202)
_COS = (0.9999999403953552, -1.2336982488632202, 0.2536506652832031, -0.02081051468849182, 0.0008581344736739993)


class Scratch(NamedTuple):
    """Buffers of one block of pairs, reused from block to block so that they stay in the processor's cache.

    counters: 0, 1, 2, ... uint32.  words: six uint32 buffers.  values: float32, two for each pair.
    """

    counters: np.ndarray
    words: tuple[np.ndarray, ...]
    values: np.ndarray


def scratch(pairs: int = 32768) -> Scratch:
    """Buffers for blocks of up to `pairs` pairs."""
    words = tuple(np.empty(pairs, np.uint32) for _ in range(6))
    return Scratch(np.arange(pairs, dtype=np.uint32), words, np.empty(2 * pairs, np.float32))


def round_keys(key: int) -> tuple[np.uint32, ...]:
    """The three 32-bit keys of the permutation of a leaf."""
    return tuple(np.uint32(fold_in(key, i) & 0xFFFFFFFF) for i in range(3))


def _mix(x: np.ndarray, t: np.ndarray) -> None:
    """x <- a 32-bit permutation of x that spreads every bit (lowbias32 of C. Wellons' hash-prospector); t: buffer."""
    np.right_shift(x, 16, out=t)
    np.bitwise_xor(x, t, out=x)
    np.multiply(x, np.uint32(0x21F0AAAD), out=x)
    np.right_shift(x, 15, out=t)
    np.bitwise_xor(x, t, out=x)
    np.multiply(x, np.uint32(0xD35A2D97), out=x)
    np.right_shift(x, 15, out=t)
    np.bitwise_xor(x, t, out=x)


def pair_words(
    keys: tuple[np.uint32, ...], low: np.ndarray, high: np.ndarray | np.uint32 | None, space: Scratch
) -> tuple[np.ndarray, np.ndarray]:
    """Two random uint32 words for each pair, in buffers of `space` (valid until its next use).

    low, high: uint32 halves of the pair numbers; high None: all 0.
    """
    n = low.size
    left, right, t = (buffer[:n] for buffer in space.words[:3])
    np.bitwise_xor(low, keys[0], out=left)
    _mix(left, t)
    if high is not None:
        np.bitwise_xor(left, high, out=left)
    np.bitwise_xor(left, keys[1], out=right)
    _mix(right, t)
    np.bitwise_xor(right, low, out=right)
    last = space.words[3][:n]
    np.bitwise_xor(right, keys[2], out=last)
    _mix(last, t)
    np.bitwise_xor(left, last, out=left)
    return left, right


def uniform_values(left: np.ndarray, right: np.ndarray, lo: float, hi: float, space: Scratch) -> np.ndarray:
    """float32 values uniform on [lo, hi), 24 random bits each: element 2p from the left word, 2p + 1 from the right."""
    n = left.size
    values, t = space.values[: 2 * n], space.words[2][:n]
    for word, out in ((left, values[0::2]), (right, values[1::2])):
        np.right_shift(word, 8, out=t)
        np.copyto(out, t.view(np.int32), casting="unsafe")
    np.multiply(values, np.float32((hi - lo) * 2.0**-24), out=values)
    np.add(values, np.float32(lo), out=values)
    return values


def normal_values(left: np.ndarray, right: np.ndarray, std: float, space: Scratch) -> np.ndarray:
    """float32 values of a normal distribution of mean 0, from two words for each pair (which are overwritten).

    Elements 2p, 2p + 1 are std·sqrt(-2·ln u)·(cos a, sin a) with u = (left // 256 + 1) / 2²⁴ and a an angle whose low
    31 bits choose it in the right half plane and whose top bit mirrors it. The largest possible is 5.8·std.
    """
    n = left.size
    m, s = (buffer[:n].view(np.float32) for buffer in space.words[2:4])
    e = space.words[4][:n].view(np.int32)
    # s = -2·ln u, from u·2²⁴ = 2^e·(1 + f) with 1 + f in [sqrt(1/2), sqrt(2))
    np.right_shift(left, 8, out=left)
    np.add(left, np.uint32(1), out=left)
    np.copyto(m, left.view(np.int32), casting="unsafe")  # exact: at most 24 bits
    bits, shifted, exponent = m.view(np.int32), left.view(np.int32), left.view(np.float32)
    np.subtract(bits, np.int32(0x3F3504F3), out=e)  # the bits of sqrt(1/2)
    np.right_shift(e, 23, out=e)
    np.left_shift(e, 23, out=shifted)
    np.subtract(bits, shifted, out=bits)
    np.subtract(m, np.float32(1), out=m)
    _polynomial(_LOG, m, s)
    np.multiply(s, m, out=s)
    np.subtract(e, np.int32(24), out=e)
    np.copyto(exponent, e, casting="unsafe")
    np.multiply(exponent, np.float32(-1.3862943611198906), out=exponent)  # -2·ln 2
    np.add(s, exponent, out=s)
    radius = np.sqrt(s, out=s)
    np.multiply(radius, np.float32(std), out=radius)
    # the angle is t·pi/2 with t in [-1, 1): the right half plane; the top bit mirrors it to the left one
    sign, t, cos = left, m, e.view(np.float32)
    sin = space.words[5][:n].view(np.float32)
    np.bitwise_and(right, np.uint32(0x80000000), out=sign)
    np.left_shift(right, 1, out=right)
    np.copyto(t, right.view(np.int32), casting="unsafe")
    np.multiply(t, np.float32(2.0**-31), out=t)
    square = np.multiply(t, t, out=right.view(np.float32))
    _polynomial(_COS, square, cos)
    _polynomial(_SIN, square, sin)
    values = space.values[: 2 * n]
    np.multiply(cos, radius, out=cos)
    np.bitwise_xor(cos.view(np.uint32), sign, out=values.view(np.uint32)[0::2])
    np.multiply(sin, t, out=sin)
    np.multiply(sin, radius, out=values[1::2])
    return values


def _polynomial(coefficients: tuple[float, ...], x: np.ndarray, out: np.ndarray) -> None:
    """out <- c0 + c1·x + c2·x² + ... by Horner's rule, every step rounded to float32."""
    np.multiply(x, np.float32(coefficients[-1]), out=out)
    for coefficient in coefficients[-2:0:-1]:
        np.add(out, np.float32(coefficient), out=out)
        np.multiply(out, x, out=out)
    np.add(out, np.float32(coefficients[0]), out=out)
