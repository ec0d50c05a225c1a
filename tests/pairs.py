"""Products of options for tests: by default so many cases that every pair of values of two options occurs in one.

Faults that need one value of one option, or two values of two, are found by such a set; those that need three at once
are left to `make test-all`, which runs the full product.
"""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

import pytest

__all__ = ["covering", "product"]


def covering(*options: Iterable[Hashable], of: Iterable[tuple] | None = None) -> list[tuple]:
    """Some of the product of these options, in its order: every pair of values of two options is in one of them.

    of: those of the product that are possible; then every pair that one of them has. Greedy: not the fewest.
    """
    possible = list(itertools.product(*options)) if of is None else list(of)
    missing, chosen = {pair for case in possible for pair in _pairs(case)}, set()
    while missing:
        best = max(possible, key=lambda case: sum(pair in missing for pair in _pairs(case)))  # the first of equals
        chosen.add(best)
        missing -= set(_pairs(best))
    return [case for case in possible if case in chosen]


def _pairs(case: tuple) -> Iterable[tuple]:
    """((place, value), (place, value)) of every two values of a case; of one option, its values."""
    return itertools.combinations(enumerate(case), min(2, len(case)))


def product(*options: Iterable[Hashable], of: Iterable[tuple] | None = None, ids: Sequence | None = None) -> list:
    """The full product as parameters of a test; what `covering` leaves out is marked slow.

    ids: for each option what names its values, a function or a mapping; the id of a case joins them.
    """
    possible = list(itertools.product(*options)) if of is None else list(of)
    kept = set(covering(of=possible))
    names = [name.__getitem__ if isinstance(name, Mapping) else name for name in ids or [str] * len(possible[0])]
    return [
        pytest.param(
            *case,
            marks=() if case in kept else pytest.mark.slow,
            id="-".join(name(value) for name, value in zip(names, case, strict=True)),
        )
        for case in possible
    ]
