"""Pictures of a layout: which ranks hold which boxes, as text and as SVG; large ones are abridged, with a note."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from html import escape

MOST_LINES = 24
MOST_COLUMNS = 8
MOST_SHARDS = 128


def holders(layout, shard: tuple[int, ...], most: int = 4) -> str:
    """The ranks of a shard: replicas joined by ',', the parts of a pending sum by '+'; `0,8,…×128`: 128 replicas."""
    mesh, replicas = layout.mesh, layout.replicas
    labels = []
    for replica in range(replicas if replicas <= most else 2):
        group = mesh.group(layout.rank_of(shard, replica), layout.unreduced)
        labels.append("+".join(map(str, group if len(group) <= most else (*group[:2], f"…×{len(group)}"))))
    return ",".join(labels + [f"…×{replicas}"] * (replicas > most))


def picture_text(layout) -> str:
    """A table: rows and columns are ranges of the split dims, cells are the ranks that hold them.

    Columns belong to the last split dim, rows to the others. Flattened layouts are listed shard by shard.
    """
    if layout.flat_counts:
        return "\n".join([repr(layout), *_flat_lines(layout)])
    split = [dim for dim, counts in enumerate(layout.counts) if counts]
    rows = [_pieces(layout, dim) for dim in split[:-1]]
    columns = _pieces(layout, split[-1]) if split else [("all", 0)]
    shown = columns if len(columns) <= MOST_COLUMNS else columns[: MOST_COLUMNS - 1]
    table = [["", *(text for text, _ in shown)]]
    row_count = 0
    for row in itertools.product(*rows):
        row_count += 1
        if row_count > MOST_LINES:
            continue
        cells = []
        for _, index in shown:
            shard = [0] * len(layout.shard_counts)
            for dim, (_, i) in zip(split[:-1], row, strict=True):
                shard[dim] = i
            if split:
                shard[split[-1]] = index
            cells.append(holders(layout, tuple(shard)))
        table.append([", ".join(text for text, _ in row), *cells])
    if split[:-1]:
        table[0][0] = "dim " + ", ".join(str(dim) for dim in split[:-1])
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    if len(shown) < len(columns):
        lines = [line + "  …" for line in lines] + [f"… {len(columns) - len(shown)} more columns"]
    if row_count > MOST_LINES:
        lines.append(f"… {row_count - MOST_LINES} more rows")
    title = f"ranks by range of dim {split[-1]}" if split else "ranks that hold the whole array"
    return "\n".join([repr(layout), title + (" (columns) and of the others (rows)" if split[:-1] else ""), *lines])


def _pieces(layout, dim: int) -> list[tuple[str, int]]:
    """The ranges of a dim in global order, with the index that holds each."""
    found = []
    for index in range(layout.shard_counts[dim]):
        shard = tuple(index if d == dim else 0 for d in range(len(layout.shard_counts)))
        pieces = layout.segments(layout.rank_of(shard), dim)
        found += [(piece.start, f"{piece.start}:{piece.start + piece.length}", index) for piece in pieces]
        if not pieces:
            found.append((layout.shape[dim], "nothing", index))
    return [(text, index) for _, text, index in sorted(found)]


def _flat_lines(layout) -> Iterable[str]:
    for number, shard in enumerate(_shards(layout)):
        if number == MOST_LINES:
            yield "  …"
            return
        boxes = " + ".join(_range_text(box.start, box.stop) for box in layout.shard_boxes(shard)) or "nothing"
        size = sum(box.size for box in layout.shard_boxes(shard))
        yield f"  rank {holders(layout, shard)}: {size} elements = {boxes}"


def _shards(layout) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(count) for count in layout.shard_counts))


def _range_text(start: Sequence[int], stop: Sequence[int]) -> str:
    return "[" + ", ".join(f"{a}:{z}" for a, z in zip(start, stop, strict=True)) + "]"


def picture_svg(layout) -> str:
    """The array as rectangles, one for each box, labelled and coloured by the ranks that hold it.

    The last two split dims (all dims of a flattened layout) are drawn down and across; other split dims make panels.
    """
    shown = list(itertools.islice(_shards(layout), MOST_SHARDS))
    dims = [d for d in range(len(layout.shape)) if layout.counts[d] or layout.flat_counts or len(layout.shape) <= 2]
    dims = dims or list(range(len(layout.shape)))[-2:]
    drawn, fixed = dims[-2:], dims[:-2]
    panels: dict[tuple, list[tuple]] = {}
    for number, shard in enumerate(shown):
        label = holders(layout, shard)
        for box in layout.shard_boxes(shard):
            key = tuple((box.start[d], box.stop[d]) for d in fixed)
            panels.setdefault(key, []).append((number, label, box))
    width, height, gap, top = 320, 160 if len(drawn) == 2 else 44, 24, 40
    svg = [f'<text x="8" y="18" font-weight="bold">{escape(repr(layout))}</text>']
    for column, (key, boxes) in enumerate(sorted(panels.items())):
        left = 8 + column * (width + gap)
        if key:
            where = ", ".join(f"dim {d}: {a}:{z}" for d, (a, z) in zip(fixed, key, strict=True))
            svg.append(f'<text x="{left}" y="{top - 6}">{escape(where)}</text>')
        for number, label, box in boxes:
            x, w = _span(layout, box, drawn[-1], left, width) if drawn else (left, width)
            y, h = _span(layout, box, drawn[0], top, height) if len(drawn) == 2 else (top, height)
            hue = round(360 * number / max(1, len(shown)))
            svg.append(
                f"<g><title>rank {escape(label)}: {_range_text(box.start, box.stop)}</title>"
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
                f' fill="hsl({hue},65%,82%)" stroke="#444"/>'
            )
            if w > 7 * len(label) and h > 13:
                svg.append(
                    f'<text x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}" text-anchor="middle">{escape(label)}</text>'
                )
            svg.append("</g>")
    bottom = top + height + 18
    total_shards = math.prod(layout.shard_counts)
    more = f"; {len(shown)} of {total_shards} shards drawn" if len(shown) < total_shards else ""
    names = " across, ".join(f"dim {d} ({layout.shape[d]})" for d in reversed(drawn))
    note = (
        (names + (" down" if len(drawn) == 2 else " across") if drawn else "one element") + "; numbers are ranks" + more
    )
    svg.append(f'<text x="8" y="{bottom}" fill="#666">{note}</text>')
    total = max(16 + max(1, len(panels)) * (width + gap), 8 * len(repr(layout)) + 16)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{bottom + 10}"'
        f' font-family="monospace" font-size="12">{"".join(svg)}</svg>'
    )


def _span(layout, box, dim: int, origin: float, length: float) -> tuple[float, float]:
    """Where a box begins along a drawn dim, and how far it goes, in pixels."""
    scale = length / max(1, layout.shape[dim])
    return origin + box.start[dim] * scale, box.shape[dim] * scale
