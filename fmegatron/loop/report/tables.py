"""Tables of a report as HTML text; every text in them is escaped."""

from collections.abc import Sequence
from html import escape
from typing import Any

from fmegatron.loop.report.figures import COLOURS, number


def key(run: int) -> str:
    """The colour of a run."""
    return f'<span class="key" style="background:{COLOURS[run % len(COLOURS)]}"></span>'


def cell(value: Any) -> str:
    """A cell of a table: numbers to the right, as they are shown everywhere."""
    if value is None:
        return '<td class="n"></td>'
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="n">{number(value)}</td>'
    return f"<td>{escape(str(value))}</td>"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], keys: Sequence[int] | None = None) -> str:
    """keys: for each row the number of the run whose colour stands before its first cell."""
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for i, row in enumerate(rows):
        first = f"<td>{key(keys[i])}{escape(str(row[0]))}</td>" if keys else cell(row[0])
        lines.append(f"<tr>{first}{''.join(cell(value) for value in row[1:])}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
