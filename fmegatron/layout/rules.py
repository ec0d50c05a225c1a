"""Rules: an ordered table from path patterns to how the dims of a leaf are split; the first match wins."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from fmegatron.layout.layout import Layout
from fmegatron.layout.mesh import Mesh


@dataclass(frozen=True, init=False)
class Rules:
    """(pattern, spec) rows. A pattern is a regular expression over full segments of a path, anywhere in it:
    `attention/wo` matches `blocks/attention/wo` and `opt/mu/blocks/attention/wo`, not `attention/wo2`.

    >>> rules = Rules([(r"mlp/w_.*", (None, "fsdp", "tp")), (r".*norm", ())])
    >>> rules.match("blocks/mlp/w_down")
    (None, 'fsdp', 'tp')
    """

    table: tuple[tuple[str, tuple], ...]

    def __init__(self, table: Iterable[tuple[str, tuple]]):
        rows = tuple((pattern, tuple(spec)) for pattern, spec in table)
        for pattern, _ in rows:
            try:
                _compiled(pattern)
            except re.error as error:
                raise ValueError(f"got rule pattern {pattern!r}, wanted a regular expression: {error}") from None
        object.__setattr__(self, "table", rows)

    def row(self, path: str) -> int:
        """Number of the first row that matches a path. Raises ValueError, listing the rules, when none does."""
        for i, (pattern, _) in enumerate(self.table):
            if _compiled(pattern).search(path):
                return i
        rows = "\n".join(f"  {pattern!r}: {spec}" for pattern, spec in self.table) or "  (none)"
        raise ValueError(
            f"got no rule for the path {path!r}, wanted one that matches it; add (pattern, spec) to the rules:\n{rows}"
        )

    def match(self, path: str) -> tuple:
        """The spec of the first row that matches a path. Raises ValueError when none does."""
        return self.table[self.row(path)][1]

    def layout(self, path: str, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh) -> Layout:
        """The layout of a leaf by its path. Raises ValueError naming the path and the rule that does not fit."""
        pattern, spec = self.table[self.row(path)]
        try:
            return Layout(shape, dtype, mesh, spec)
        except ValueError as error:
            raise ValueError(f"{path}: by the rule {pattern!r}: {error}") from None

    def report(self, paths: Iterable[str]) -> str:
        """One line for each rule with the paths that it decides, so that a rule that never matches is seen."""
        hits: list[list[str]] = [[] for _ in self.table]
        for path in paths:
            hits[self.row(path)].append(path)
        return "\n".join(
            f"{pattern!r} {spec}: {', '.join(found) or 'no path'}"
            for (pattern, spec), found in zip(self.table, hits, strict=True)
        )


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern:
    return re.compile(f"(?:^|/)(?:{pattern})(?:/|$)")
