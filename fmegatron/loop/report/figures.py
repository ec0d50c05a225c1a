"""Figures as SVG text: lines over steps, stacked bars, and a timeline of checkpoints."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 620, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 12, 34
COLOURS = ("#3b6fb6", "#d9822b", "#3a9a5b", "#c23b4a", "#7a5fb0", "#8a6d3b", "#d16ba5", "#5f6b7a", "#a3a32a", "#2aa3a3")
PARTS = (
    ("data", "#d9822b"),
    ("step", "#3b6fb6"),
    ("log", "#8a6d3b"),
    ("save", "#3a9a5b"),
    ("evaluation", "#7a5fb0"),
    ("caller", "#9aa4b2"),
)
MOST_POINTS = 800  # of one line; more are thinned out

Points = Sequence[tuple[float, float]]


def number(value: float) -> str:
    """A number as the page shows it.

    >>> number(1234567.0), number(0.00012345678), number(12), number(float("nan"))
    ('1.23457e+06', '0.000123457', '12', 'nan')
    """
    if isinstance(value, int) and abs(value) < 10**9:
        return str(value)
    return f"{value:.6g}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two, both included where they are round.

    >>> ticks(0, 10), ticks(0.12, 0.31)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.15, 0.2, 0.25, 0.3])
    """
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    pace = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / pace - 1e-9)
    return [
        round(i * pace, 12 - math.floor(math.log10(pace))) for i in range(first, math.floor(high / pace + 1e-9) + 1)
    ]


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most about so many of the points: the lowest and the highest of each part, in their order."""
    if len(points) <= most:
        return points
    width = math.ceil(2 * len(points) / most)
    found = []
    for i in range(0, len(points), width):
        part = range(i, min(i + width, len(points)))
        ends = {min(part, key=lambda j: points[j][1]), max(part, key=lambda j: points[j][1])}
        found += [points[j] for j in sorted(ends)]
    return found


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest, a little apart where they are the same."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        pad = abs(low) * 0.05 or 0.5
        return low - pad, high + pad
    return low, high


def _axes(xs: tuple[float, float], ys: tuple[float, float], label: str) -> tuple[list[str], float, float]:
    """(lines of the frame, pixels per unit of x, of y)."""
    sx = (WIDTH - LEFT - RIGHT) / (xs[1] - xs[0])
    sy = (HEIGHT - TOP - BOTTOM) / (ys[1] - ys[0])
    out = []
    for y in ticks(*ys):
        at = HEIGHT - BOTTOM - (y - ys[0]) * sy
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in ticks(*xs):
        at = LEFT + (x - xs[0]) * sx
        out.append(
            f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number(x)}</text>'
        )
    out.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(label)}</text>')
    return out, sx, sy


def lines(title: str, series: Sequence[tuple[int, str, Sequence[Points], bool]], label: str = "step") -> str:
    """A chart of lines.

    series: (number of the run, name, pieces of points, whether they are dots). Each piece is drawn apart.
    """
    everything = [point for _, _, pieces, _ in series for piece in pieces for point in piece]
    xs, ys = bounds([x for x, _ in everything]), bounds([y for _, y in everything])
    out, sx, sy = _axes(xs, ys, label)

    def place(point: tuple[float, float]) -> str:
        return f"{LEFT + (point[0] - xs[0]) * sx:.1f},{HEIGHT - BOTTOM - (point[1] - ys[0]) * sy:.1f}"

    for run, name, pieces, dots in series:
        colour, pieces = COLOURS[run % len(COLOURS)], [thinned(piece) for piece in pieces]
        out.append(f'<g class="run r{run}" data-name="{escape(name)}">')
        for piece in pieces:
            places = [place(point) for point in piece]
            if dots or len(piece) == 1:
                pairs = [text.split(",") for text in places]
                stroke = f'fill="{colour}"' if not dots else f'fill="white" stroke="{colour}" stroke-width="1.6"'
                out += [f'<circle cx="{x}" cy="{y}" r="3" {stroke}/>' for x, y in pairs]
            if len(piece) > 1:
                dash = ' stroke-dasharray="4 3" opacity="0.6"' if dots else ""
                out.append(
                    f'<polyline fill="none" stroke="{colour}" stroke-width="1.5"{dash} points="{" ".join(places)}"/>'
                )
        out.append("</g>")
    scale = f'data-x0="{xs[0]!r}" data-sx="{sx!r}" data-y0="{ys[0]!r}" data-sy="{sy!r}"'
    return _svg(title, HEIGHT, out, f'class="chart" {scale}')


def stacked(title: str, rows: Sequence[tuple[int, str, Mapping[str, float]]]) -> str:
    """A bar of seconds per step for each run, in the parts of `PARTS`."""
    most = max((sum(parts.values()) for _, _, parts in rows), default=0.0) or 1.0
    out, height = [], 26
    for run, name, parts in rows:
        at = float(LEFT * 2)
        out.append(f'<g class="run r{run}">')
        shown = name if len(name) < 18 else name[:16] + "…"
        out.append(f'<text x="{LEFT * 2 - 8}" y="{height + 4}" text-anchor="end">{escape(shown)}</text>')
        for part, colour in PARTS:
            width = parts.get(part, 0.0) / most * (WIDTH - LEFT * 2 - RIGHT)
            if width > 0:
                what = f"{part}: {number(parts[part])} s"
                out.append(
                    f'<rect x="{at:.2f}" y="{height - 11}" width="{width:.2f}" height="22" fill="{colour}">'
                    f"<title>{escape(what)}</title></rect>"
                )
            at += width
        out.append("</g>")
        height += 32
    for i, (part, colour) in enumerate(PARTS):
        out.append(f'<rect x="{LEFT * 2 + i * 78}" y="{height - 8}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text class="tick" x="{LEFT * 2 + i * 78 + 14}" y="{height + 1}">{part}</text>')
    return _svg(title, height + 12, out)


def timeline(title: str, rows: Sequence[tuple[int, str, Sequence[tuple[float, float, str, str]]]]) -> str:
    """A lane for each run. rows: (number of the run, name, marks (begin, end in seconds, kind, text for a tooltip))."""
    begin = {run: min((b for b, *_ in marks), default=0.0) for run, _, marks in rows}
    most = max((end - begin[run] for run, _, marks in rows for _, end, *_ in marks), default=0.0) or 1.0
    unit, name_of_unit = (3600, "h") if most > 7200 else (60, "min") if most > 180 else (1, "s")
    scale, out, height = (WIDTH - LEFT * 2 - RIGHT) / most, [], 26
    for run, name, marks in rows:
        shown = name if len(name) < 18 else name[:16] + "…"
        out.append(f'<g class="run r{run}">')
        out.append(f'<text x="{LEFT * 2 - 8}" y="{height + 4}" text-anchor="end">{escape(shown)}</text>')
        out.append(f'<line class="grid" x1="{LEFT * 2}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}"/>')
        for first, last, kind, text in marks:
            x, width = LEFT * 2 + (first - begin[run]) * scale, max(2.0, (last - first) * scale)
            tip = f"<title>{escape(text)}</title>"
            if kind in ("saved", "save failed"):
                colour = "#3a9a5b" if kind == "saved" else "#c23b4a"
                out.append(
                    f'<rect x="{x:.1f}" y="{height - 9}" width="{width:.1f}" height="18" fill="{colour}">{tip}</rect>'
                )
            else:
                colour = {"started": "#3b6fb6", "resumed": "#3b6fb6", "failed": "#c23b4a"}.get(kind, "#5f6b7a")
                out.append(
                    f'<path d="M{x:.1f} {height + 13}l-5 8h10z" fill="{colour}">{tip}</path>'
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{height - 11}" y2="{height + 13}" stroke="{colour}"/>'
                )
        out.append("</g>")
        height += 44
    for t in ticks(0, most / unit):
        out.append(f'<text class="tick" x="{LEFT * 2 + t * unit * scale:.1f}" y="{height + 2}">{number(t)}</text>')
    out.append(f'<text class="tick" x="{LEFT * 2 - 8}" y="{height + 2}" text-anchor="end">{name_of_unit}</text>')
    return _svg(title, height + 12, out)


def _svg(title: str, height: int, inside: Sequence[str], more: str = "") -> str:
    text = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" {more}>'
    return "\n".join([text, *inside, "</svg>"])
