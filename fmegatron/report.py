"""`python -m fmegatron.report RUN [RUN ...]`: one self-contained HTML page about runs, compared if there are several.

RUN is a run's folder, or a metrics file. The page has its pictures in it and needs no network. A run may be new, half
written, killed or still running; the page states what could not be read. Exit status: 0, or 2 for wrong use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from fmegatron.files import whole
from fmegatron.loop import read_run, report_page


def main(argv: Sequence[str] | None = None, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Write the page of some runs; returns the exit status. argv: without the program's name."""
    out, err = out or sys.stdout, err or sys.stderr
    parser = argparse.ArgumentParser(
        prog="python -m fmegatron.report", description="One HTML page about runs: losses, rates, memory, time, events."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or a metrics.jsonl")
    parser.add_argument("--out", default=None, help="the page; default report.html in the folder of the first run")
    parser.add_argument("--title", default="", help="default: the names of the runs")
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # --help, or wrong use, of which argparse has told
        return int(stop.code or 0)
    first = Path(options.runs[0])
    path = Path(options.out or (first if first.is_dir() else first.parent) / "report.html")
    try:
        if not path.parent.is_dir():
            raise ValueError(
                f"--out: got {path}, whose folder is not there, wanted a file in a folder that is; make it"
            )
        page = report_page([read_run(run) for run in options.runs], options.title)
        whole.write_whole(path, page.encode("utf-8", errors="replace"))
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=err)
        return 2
    print(path, file=out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
