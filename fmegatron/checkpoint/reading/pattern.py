"""Patterns of paths: regular expressions in which `{name}` stands for a number.

`layers/{i}/(.*)` matches `layers/12/mlp/w`. A replacement takes groups as in `re.sub` (`\\1`, `\\g<name>`; `{i}` does
not count as a group), and numbers as `{i}`, `{i+4}` or `{i-4}`.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\{([a-z_]+)([+-]\d+)?\}")
_PREFIX = "number_"


def regex(pattern: str) -> re.Pattern:
    """The regular expression of a pattern."""
    return re.compile(_NUMBER.sub(lambda m: rf"(?P<{_PREFIX}{m[1]}>\d+)", pattern))


def number(match: re.Match, name: str) -> int:
    """The number that stands for `{name}` in a match."""
    return int(match[_PREFIX + name])


def checked(pattern: str) -> str:
    """The pattern, or ValueError when it is not one."""
    try:
        regex(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"got the pattern {pattern!r:.100}, wanted a regular expression ({error})") from None
    return pattern


def numbers(text: str) -> set[str]:
    """Names of the numbers of a pattern or a replacement."""
    return {m[1] for m in _NUMBER.finditer(text)}


def only_number(names: set[str], pattern: str, replacement: str) -> str:
    """The one name of a set of those that only one side has. Raises ValueError for none or several."""
    if len(names) != 1:
        raise ValueError(
            f"got numbers {sorted(names)} that only one of {pattern!r} and {replacement!r} has, wanted exactly one;"
            " write e.g. layers/{i}/(.*) on one side"
        )
    return next(iter(names))


def expand(match: re.Match, replacement: str, more: dict[str, int] | None = None) -> str:
    """The replacement for a match of `regex(pattern)`; `more`: further numbers.

    A number may become negative: that leaf cannot be asked for, and is reported as stored but not asked for.

    >>> expand(regex(r"(.*)/layers/{i}/(.*)").fullmatch("opt/layers/7/mlp/w"), r"\\1/{i-4}/\\2")
    'opt/3/mlp/w'
    """
    own = {name.removeprefix(_PREFIX): i for name, i in match.re.groupindex.items() if name.startswith(_PREFIX)}
    known = {**{name: int(match[i]) for name, i in own.items()}, **(more or {})}

    def number(m: re.Match) -> str:
        return str(known[m[1]] + int(m[2] or 0)) if m[1] in known else m[0]

    plain = [0, *(i for i in range(1, match.re.groups + 1) if i not in own.values())]
    try:
        groups = re.sub(r"\\(\d)", lambda m: rf"\g<{plain[int(m[1])]}>", _NUMBER.sub(number, replacement))
        return match.expand(groups)
    except (re.error, IndexError) as error:
        raise ValueError(f"got the replacement {replacement!r}, wanted one that fits its pattern ({error})") from None
