"""Pictures of a table on the clock: text, a row a rank, and a PNG."""

from __future__ import annotations

import os
from types import MappingProxyType

from fmegatron.step.pipeline.clock import Clock, Costs, clock
from fmegatron.step.pipeline.table import Action, Table

__all__ = ["picture", "plot"]

_COLOURS = MappingProxyType(
    {"F": "#4C72B0", "B": "#DD8452", "W": "#55A868", "BW": "#C44E52", "G": "#8172B3", "R": "#937860"}
)
_WORDS = MappingProxyType(
    {
        "F": "F forward",
        "B": "B gradient of the input",
        "W": "W gradients of the weights",
        "BW": "BW both",
        "G": "G gathers",
        "R": "R reductions",
    }
)


def picture(table: Table, costs: Costs | None = None, width: int = 120) -> str:
    """A row for each rank, time to the right: "F3===" runs from its first to its last column, dots are idle time.

    A letter is the kind of an action, the number its microbatch. Of a rank with two stages, actions of the second are
    in small letters; with more, a letter a, b, ... follows. Where there is too little room, only the kind is there. At
    the end of a row: what is idle and what the rank holds at most. width: of a line, in characters.

    Raises ValueError for a table that is wrong.
    """
    found = clock(table, costs)
    tails = [f"|{idle:6.4g} {peak:6.4g}" for idle, peak in zip(found.idle, found.peaks, strict=True)]
    digits = len(str(table.ranks - 1))
    columns = max(width - digits - 1 - max(map(len, tails)), 10)
    scale = columns / (found.duration or 1.0)
    if scale > 1 and all(float(x).is_integer() for row in found.spans for span in row for x in span):
        scale = float(int(scale))  # equal actions in equal columns
    columns = max(int(found.duration * scale), 1)
    title = f"{table.name}: {found.duration:g} long, {found.idle_share:.1%} idle"
    lines = [title + " " * (digits + 1 + columns - len(title)) + "|  idle   held"]
    for rank, row in enumerate(table.rows):
        cells, stages = ["."] * columns, table.held(rank)
        for action, (start, end) in zip(row, found.spans[rank], strict=True):
            first, last = int(start * scale + 1e-6), int(end * scale + 1e-6)
            if last > first:
                cells[first:last] = _block(action, stages, last - first)
        lines.append(f"{rank:{digits}}|{''.join(cells)}{tails[rank]}")
    kinds = dict.fromkeys(a.kind for row in table.rows for a in row)
    legend = ", ".join(words for kind, words in _WORDS.items() if kind in kinds)
    most = max(len(table.held(rank)) for rank in range(table.ranks))
    if most > 1:
        legend += "; small: a rank's second stage" if most == 2 else "; a, b, ... a rank's stages"
    return "\n".join([*lines, legend])


def _block(action: Action, stages: tuple[int, ...], columns: int) -> str:
    """An action in so many columns, the last one empty where there is room."""
    number, which = stages.index(action.stage), ""
    kind = action.kind.lower() if len(stages) == 2 and number else action.kind
    if len(stages) > 2:
        which = chr(ord("a") + number)
    for name in (f"{kind}{action.microbatch}{which}", f"{kind}{which}", kind):
        if len(name) < columns:
            return name + "=" * (columns - len(name) - 1) + " "
        if len(name) == columns:
            return name
    return kind[:columns]


def plot(table: Table, path: str | os.PathLike, costs: Costs | None = None) -> None:
    """Draw a table on the clock into a PNG: a lane for each rank, a colour for each kind. Needs matplotlib.

    Raises ValueError for a table that is wrong.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found: Clock = clock(table, costs)
    figure = Figure(figsize=(12, 1 + 0.5 * table.ranks), dpi=120)
    axes = figure.add_subplot()
    labelled = set[str]()
    for rank, row in enumerate(table.rows):
        stages = table.held(rank)
        for action, (start, end) in zip(row, found.spans[rank], strict=True):
            axes.barh(
                rank,
                end - start,
                left=start,
                height=0.9,
                color=_COLOURS[action.kind],
                alpha=1 - 0.5 * stages.index(action.stage) / len(stages),  # later stages of a rank are paler
                edgecolor="white",
                linewidth=0.5,
                label=None if action.kind in labelled else _WORDS[action.kind],
            )
            labelled.add(action.kind)
            axes.text((start + end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=6)
    axes.set(
        xlabel="time", ylabel="rank", title=f"{table.name}: {found.idle_share:.1%} idle", yticks=range(table.ranks)
    )
    axes.set_xlim(0, found.duration)
    axes.invert_yaxis()
    axes.legend(frameon=False, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.tight_layout()
    FigureCanvasAgg(figure).print_png(os.fspath(path))
