"""The results of the tools as text."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from fmegatron.checkpoint.files.manifest import to_json_text
from fmegatron.checkpoint.tools.differences import Difference, LeafDifference
from fmegatron.checkpoint.tools.gc import Collected
from fmegatron.checkpoint.tools.ls import Leftover, Listing
from fmegatron.checkpoint.tools.resharding import Resharded
from fmegatron.checkpoint.tools.show import LeafRow, Shown
from fmegatron.checkpoint.tools.verification import Report
from fmegatron.layout import Layout


def listing(out: TextIO, found: Listing, now: float) -> None:
    """Checkpoints as a table, then leftovers."""
    print(short(found.directory, 200), file=out)
    rows = [
        (
            short(c.name),
            "-" if c.step is None else str(c.step),
            "BAD" if c.problem is not None else "not finite" if c.finite is False else "complete",
            size(c.nbytes),
            str(c.files),
            str(c.leaves),
            _when(c.changed),
            short(c.problem or _held(c.name, c.held_by) or to_json_text(c.metadata), 100 if c.problem else 60),
        )
        for c in found.checkpoints
    ]
    if rows:
        print_table(out, ("NAME", "STEP", "STATE", "SIZE", "FILES", "LEAVES", "SAVED", "METADATA"), rows, (1, 3, 4, 5))
    else:
        print("no checkpoints", file=out)
    leftovers(out, found.leftovers, now)


def leftovers(out: TextIO, found: Sequence[Leftover], now: float) -> None:
    """What killed saves have left, and what saves in progress have there."""
    if found:
        total = size(sum(left.nbytes for left in found))
        what = "saves in progress or killed, steps set aside"
        print(f"hidden ({what}): {len(found)}, {total}; gc removes old ones", file=out)
        ago = ["-" if x.changed is None else f"{max(now - x.changed, 0):.0f} s ago" for x in found]
        rows = [(short(x.name), x.what, size(x.nbytes), when) for x, when in zip(found, ago, strict=True)]
        print_table(out, ("  NAME", "WHAT", "SIZE", "LAST CHANGE"), [(f"  {a}", *rest) for a, *rest in rows], (2, 3))


def shown(out: TextIO, found: Shown, layouts: bool) -> None:
    """The tree of leaves, and totals."""
    print(short(found.root, 200), file=out)
    finite = {None: "", True: ", finite", False: ", loss or gradient norm NOT FINITE"}[found.finite]
    print(f"step {found.step}{finite}, metadata {short(to_json_text(found.metadata), 200)}", file=out)
    print(f"meshes when written: {short('; '.join(found.meshes), 400) or 'none'}", file=out)
    rows = {row.path: row for row in found.leaves}
    stats = any(row.statistics for row in found.leaves)
    header = ["LEAF", "DTYPE", "SHAPE", "SIZE", "STORED", *(["LAYOUT"] if layouts else [])]
    header += ["MIN", "MAX", "MEAN", "STD", "NONFINITE", "ZEROS"] if stats else []
    table = []
    for name, path in tree_rows(rows):
        cells = [name, *_leaf_cells(rows[path], layouts)] if path is not None else [name]
        table.append(cells + [""] * (len(header) - len(cells)))
    print_table(out, header, table, (3, *range(len(header) - 6, len(header))) if stats else (3,))
    print(f"{len(rows)} leaves, {found.elements:,} elements, {size(found.nbytes)}", file=out)


def _leaf_cells(row: LeafRow, layouts: bool) -> list[str]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    stored = f"chunks {'x'.join(map(str, row.chunk))}" if row.chunk is not None else row.home
    cells = [row.dtype, shape, size(row.nbytes), stored, *([short(row.layout, 120)] if layouts else [])]
    if (s := row.statistics) is not None:
        cells += [number(x) for x in (s.min, s.max, s.mean, s.std, s.nonfinite, s.zeros)]
    return cells


def reports(out: TextIO, found: Sequence[Report], left: Sequence[Leftover], seconds: float) -> None:
    """Every damage of every checkpoint, and one line for each checkpoint."""
    for report in found:
        count = len(report.damages)
        state = f"{count} damage{'s' * (count > 1)}" if count else "good"
        read = f"{report.leaves} leaves, {report.files} files, {size(report.nbytes)} read"
        print(f"{short(report.path, 200)}: {state} (step {report.step}, {read})", file=out)
        for damage in report.damages:
            print(f"  {damage.kind:<10}  {short(damage, 400)}", file=out)
    total = sum(report.nbytes for report in found)
    print(f"{size(total)} in {seconds:.2f} s, {size(total / max(seconds, 1e-9))}/s", file=out)
    if left:
        print(f"{len(left)} hidden directories (saves in progress or killed, set aside) were not looked at", file=out)


def difference(out: TextIO, found: Difference) -> None:
    """What differs, a line each."""
    print(f"a: {short(found.a, 200)} (step {found.steps[0]})", file=out)
    print(f"b: {short(found.b, 200)} (step {found.steps[1]})", file=out)
    for key, (a, b) in found.metadata.items():
        print(f"metadata {short(key)}: {short(a)} | {short(b)}", file=out)
    for leaf in found.leaves:
        print(f"{short(leaf.path, 200)}: {'; '.join(_differences(leaf))}", file=out)
    count = len(found.leaves)
    skipped = f", {size(found.skipped_bytes)} equal by digest" if found.skipped_bytes else ""
    print(f"{count} of {found.compared + sum(bool(x.only) for x in found.leaves)} leaves differ{skipped}", file=out)


def _differences(leaf: LeafDifference) -> list[str]:
    texts = [f"only in {leaf.only}"] if leaf.only else []
    for what, pair in (("shape", leaf.shapes), ("dtype", leaf.dtypes), ("layout", leaf.layouts)):
        if pair is not None:
            texts.append(f"{what} {short(pair[0], 120)} | {short(pair[1], 120)}")
    v = leaf.values
    if v is not None and v.within:
        texts.append("values equal" if not v.values else "values within the tolerance")
    elif v is not None and not v.values:
        texts.append(
            f"{v.bits} of {v.count} elements have other bits and equal values, first at {list(leaf.index or ())}"
        )
    elif v is not None:
        where = f"first at {list(leaf.index or ())}, max abs {number(v.max_abs)}, max rel {number(v.max_rel)}"
        texts.append(f"{v.beyond or v.values} of {v.count} elements differ, {where}")
    return texts


def resharded(out: TextIO, done: Resharded, layouts: Mapping[str, Layout]) -> None:
    """What was written, and under which layouts."""
    print_table(out, ("LEAF", "LAYOUT"), [(short(path, 100), short(x, 150)) for path, x in layouts.items()])
    print(f"{done.leaves} leaves, {done.files} chunk files, {size(done.nbytes)} -> {short(done.path, 200)}", file=out)


def collected(out: TextIO, done: Collected) -> None:
    """What was, or would be, removed."""
    words = {"remove": "would remove" if done.dry_run else "removed", "keep": "kept"}
    words["finish"] = "would rename" if done.dry_run else "renamed"
    for a in done.actions:
        print(f"{words[a.kind]} {short(a.path, 200)} ({size(a.nbytes)}): {short(a.why, 300)}", file=out)
    count = sum(a.kind == "remove" for a in done.actions)
    print(f"{count} in all, {size(done.removed)} {'to be removed' if done.dry_run else 'removed'}", file=out)


def _held(name: str, held_by: str) -> str:
    held = held_by.rstrip("/").rsplit("/", 1)[-1]
    return f"is in {held}: a re-save was killed" if held.startswith(f".{name}.") else ""


def _when(seconds: float | None) -> str:
    return "-" if seconds is None else f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


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
