"""Text output: aligned tables, trees of paths, sizes, one-line errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table


def size(n: int | float) -> str:
    """Bytes in the largest unit that leaves a number of at least 1.

    >>> size(0), size(1023), size(1536), size(5 << 30)
    ('0 B', '1023 B', '1.5 KiB', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if n < 1024 or unit == "PiB":
            break
        n /= 1024
    return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"


def number(x: int | float | None) -> str:
    """A statistic in few characters; '-' for None.

    >>> number(None), number(12), number(0.123456789), number(float("nan"))
    ('-', '12', '0.123457', 'nan')
    """
    return "-" if x is None else f"{x:.6g}" if isinstance(x, float) else str(x)


def short(value: Any, most: int = 60) -> str:
    """Text in one line of at most `most` characters; control characters of a hostile file are quoted."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))
    return text if len(text) <= most else text[: most - 3] + "..."


def print_table(out: TextIO, header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> None:
    """Aligned columns under a header; numbers of columns in `right` are aligned right. Plain when not a terminal."""
    rows, right = [list(row) for row in rows], set(right)
    if not out.isatty():
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in [list(header), *rows]:
            cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            print("  ".join(cells).rstrip(), file=out)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(file=out, markup=False, highlight=False).print(table)


def tree_rows(paths: Iterable[str]) -> list[tuple[str, str | None]]:
    """Lines of a tree: (indented name, path of the leaf) for a leaf, (indented name/, None) for what holds leaves.

    >>> tree_rows(["a/x", "a/y", "b"])
    [('a/', None), ('  x', 'a/x'), ('  y', 'a/y'), ('b', 'b')]
    """
    lines: list[tuple[str, str | None]] = []
    open_parts: list[str] = []
    for path in paths:
        *above, last = path.split("/")
        same = next((i for i, (a, b) in enumerate(zip(above, open_parts, strict=False)) if a != b), None)
        same = min(len(above), len(open_parts)) if same is None else same
        lines += [("  " * i + short(above[i]) + "/", None) for i in range(same, len(above))]
        lines.append(("  " * len(above) + short(last), path))
        open_parts = above
    return lines


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers that JSON lacks (NaN, infinity) as text.

    >>> plain({"a": (1, float("inf"))})
    {'a': [1, 'inf']}
    """
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def one_line(error: BaseException) -> str:
    """An error as one readable line."""
    return " ".join(short(error, 2000).split()) or type(error).__name__
