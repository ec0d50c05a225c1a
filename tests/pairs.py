"""Products of options for tests: by default so many cases that every pair of values of two options occurs in one.

Faults that need one value of one option, or two values of two, are found by such a set (`product`); those that need
three at once are left to `make test-all`, which runs the full product. Where cases are expensive, or the options are
two, the default cases have every value of each option (`each_value`). Of cases that are no product, or of a product of
which a few are enough (`mixed`), those run by default that have most values between them (`few`). All of these choose
the same cases in every run: of the clock, the process and the seed nothing is asked.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import pytest

__all__ = ["array", "covering", "each_value", "few", "mixed", "product", "shifted"]


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


def array(options: Mapping[str, Sequence], allowed: Callable[[dict], bool], strength: int = 2) -> list[dict]:
    """Cases, name -> value, so that every `strength` values of different options that may occur together do so in one.

    For products too large to be listed. Greedy: a case begins with values that are missing, and takes of each further
    option the value by which most is new.

    Args:
        options: name -> its values.
        allowed: of some of the options (name -> value) whether they may occur together.
        strength: 2: pairs; 3: triples.
    """
    missing = {
        tuple(zip(names, values, strict=True)): None
        for names in itertools.combinations(options, strength)
        for values in itertools.product(*(options[name] for name in names))
    }
    chosen, turn = [], 0
    while missing:
        first = next(iter(missing))
        turn += 1
        case = _completed(dict(first), options, allowed, missing, strength, turn)
        if case is None:
            del missing[first]
            continue
        ordered = {name: case[name] for name in options}
        chosen.append(ordered)
        for some in itertools.combinations(ordered.items(), strength):
            missing.pop(some, None)
    return chosen


def _completed(
    case: dict, options: Mapping, allowed: Callable[[dict], bool], missing: Mapping, strength: int, turn: int
) -> dict | None:
    """The case with a value for every option; None where there is none."""
    if not allowed(case):
        return None
    left = [name for name in options if name not in case]
    if not left:
        return case
    name = max(left, key=lambda one: len(options[one]))  # those of many values while there is a choice
    place = list(options).index

    def new(value: Hashable) -> int:
        found = 0
        for others in itertools.combinations(case.items(), strength - 1):
            found += tuple(sorted((*others, (name, value)), key=lambda item: place(item[0]))) in missing
        return found

    values, shift = list(options[name]), turn % len(options[name])
    for value in sorted(values[shift:] + values[:shift], key=new, reverse=True):
        full = _completed({**case, name: value}, options, allowed, missing, strength, turn)
        if full is not None:
            return full
    return None


def product(*options: Iterable[Hashable], of: Iterable[tuple] | None = None, ids: Sequence | None = None) -> list:
    """The full product as parameters of a test; what `covering` leaves out is marked slow.

    ids: for each option what names its values, a function or a mapping; the id of a case joins them.
    """
    possible = list(itertools.product(*options)) if of is None else list(of)
    return _marked(possible, set(covering(of=possible)), ids)


def shifted(by: int, *options: Sequence[Hashable]) -> list[tuple]:
    """Of the product as many cases as the longest option has values: every value of every option is in one of them.

    by: which; those of as many numbers in a row as the other options have combinations are the full product.
    """
    longest = max(range(len(options)), key=lambda i: len(options[i]))
    shifts = []
    for i, option in enumerate(options):
        shifts.append(0 if i == longest else by % len(option))
        by = by if i == longest else by // len(option)
    return [
        tuple(option[(n + shift) % len(option)] for option, shift in zip(options, shifts, strict=True))
        for n in range(len(options[longest]))
    ]


def mixed(*options: Sequence[Hashable]) -> list[tuple]:
    """The full product so that neighbours differ in as much as they can: for `few` of its cases."""
    options = [list(option) for option in options]
    longest, full = max(map(len, options)), math.prod(map(len, options))
    return [case for by in range(full // longest) for case in shifted(by, *options)]


def each_value(*options: Iterable[Hashable], ids: Sequence | None = None) -> list:
    """The full product as parameters of a test; but for one case of each value, all marked slow. ids: as above."""
    options = [list(option) for option in options]
    return _marked(list(itertools.product(*options)), set(shifted(0, *options)), ids)


def few(count: int, cases: Iterable, ids: Iterable[str] | None = None) -> list:
    """Cases as parameters of a test, a tuple of values each: `count` of them run by default, the rest is slow.

    Each of the `count` has most pairs of values that none before it has; of equals, the ones that lie evenly.
    """
    cases = list(cases)
    kept, names = _spread(count, cases), [None] * len(cases) if ids is None else list(ids)
    return [
        pytest.param(*case, marks=() if i in kept else pytest.mark.slow, id=name)
        for i, (case, name) in enumerate(zip(cases, names, strict=True))
    ]


def _spread(count: int, cases: Sequence[tuple]) -> set[int]:
    """The places of `count` cases that differ; see `few`."""
    evenly = [i * len(cases) // count for i in range(count)] if count < len(cases) else []
    left, had, kept = dict.fromkeys([*evenly, *range(len(cases))]), set(), set()
    while left and len(kept) < count:
        best = max(left, key=lambda i: sum(pair not in had for pair in _pairs(_hashable(cases[i]))))
        had.update(_pairs(_hashable(cases[best])))
        kept.add(best)
        del left[best]
    return kept


def _hashable(case: tuple) -> tuple:
    """The case with the identity of what has no hash in its place."""
    return tuple(value if _has_hash(value) else id(value) for value in case)


def _has_hash(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _marked(possible: list[tuple], kept: set[tuple], ids: Sequence | None) -> list:
    """Parameters of a test: all that is possible, those that are not kept marked slow."""
    names = [name.__getitem__ if isinstance(name, Mapping) else name for name in ids or [str] * len(possible[0])]
    return [
        pytest.param(
            *case,
            marks=() if case in kept else pytest.mark.slow,
            id="-".join(name(value) for name, value in zip(names, case, strict=True)),
        )
        for case in possible
    ]
