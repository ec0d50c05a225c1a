"""`python -m fmegatron.check experiment.py --mesh dp=2,fsdp=2,tp=2`: check the collectives of an experiment's step.

The experiment is a file that defines `experiment`, a `loop.Experiment`; or, of parts, a dataclass `Config` that has a
field `mesh`, and `describe(config) -> step.Description`: the step over symbolic axes, and what its arguments are.
No process group, no device, no memory is used, whatever the size of the mesh.
Exit status: 0 all outputs are proven; 1 findings; 2 wrong use, or it could not be done; 3 no findings, but outputs that
are not proven.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from fmegatron.loop import experiment
from fmegatron.loop.flags import parse
from fmegatron.step import check, description


def main(argv: Sequence[str] | None = None, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Check one experiment; returns the exit status. argv: without the program's name; out, err: the standard ones."""
    out, err = out or sys.stdout, err or sys.stderr
    try:
        options, flags = parser().parse_known_args(argv)
    except SystemExit as stop:  # --help, or wrong use, of which argparse has told
        return int(stop.code or 0)
    try:
        kind, describe = experiment.load_experiment(options.experiment)
        config = parse([options.experiment, f"--mesh={options.mesh}", *flags], kind)
        start = time.perf_counter()
        described = description.require_description(describe(config), options.experiment)
        report = check(*described, allow=dict(options.allow))
    except (ValueError, OSError, SyntaxError, ImportError) as error:
        print(f"check: {options.experiment}: {error}", file=err)
        return 2
    print(report, file=out)
    counts = (
        f"{len(report.findings)} findings, {len(report.silenced)} silenced, "
        f"{len(report.unproven_outputs)} unproven outputs, {time.perf_counter() - start:.1f} s"
    )
    print(f"{options.experiment} on {config.mesh}: {counts}", file=out)
    return 0 if report.ok else 1 if report.findings else 3


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = argparse.ArgumentParser(
        allow_abbrev=False,  # a beginning of a name of ours may be a flag of the experiment
        prog="python -m fmegatron.check",
        description="Check the collectives of an experiment's training step: forward, backward and optimizer.",
        epilog="Further flags (--NAME=VALUE) are the experiment's own. "
        "Exit status: 0 all outputs are proven; 1 findings; 2 wrong use, or it could not be done; 3 no findings, but "
        "outputs that are not proven.",
    )
    p.add_argument("experiment", help="a file that defines experiment (see fmegatron/check.py)")
    p.add_argument("--mesh", required=True, help="axes and sizes, such as dp=2,fsdp=2,tp=2")
    p.add_argument("--allow", action="append", default=[], type=_allowed, metavar="FILE:LINE=REASON",
                   help="do not count findings or unproven ops at a line; may be given again")  # fmt: skip
    return p


def _allowed(text: str) -> tuple[str, str]:
    place, equals, reason = text.partition("=")
    name, colon, line = place.rpartition(":")
    if not (equals and colon and name and line.isdecimal() and reason.strip()):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted FILE:LINE=REASON, such as model.py:12='summed by hand'")
    return f"{Path(name).name}:{line}", reason


if __name__ == "__main__":
    sys.exit(main())
