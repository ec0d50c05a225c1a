"""The zigzag order of a sequence: two chunks for each rank, one early and one late, so that causal work is equal."""

from __future__ import annotations


def zigzag(length: int, n: int) -> tuple[tuple[int, int], ...]:
    """Ranges (start, stop) of positions: in this order, equal parts for n ranks have the chunks r and 2n - 1 - r.

    n = 1 is the sequence in order. Raises ValueError for a length that 2n does not divide.

    >>> zigzag(8, 2)
    ((0, 2), (6, 8), (2, 4), (4, 6))
    """
    if n == 1:
        return ((0, length),)
    if n < 1 or length % (2 * n):
        raise ValueError(
            f"zigzag: got {length} positions for {n} ranks, wanted a multiple of {2 * n}, two chunks for each; pad the "
            "sequence, or choose another number of ranks"
        )
    size = length // (2 * n)
    return tuple((c * size, c * size + size) for r in range(n) for c in (r, 2 * n - 1 - r))
