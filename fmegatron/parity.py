"""`python -m fmegatron.parity experiment.py --mesh dp=2,tp=2`: does a mesh compute what one rank computes?

The experiment's step runs on simulated ranks of the mesh and on one rank, in this process and in fp64, on values that
are drawn here: the state by its specs, batches at random. Every leaf of the state and every metric is compared. Give
small shapes (--dim=32 ...). The experiment is as `python -m fmegatron.check` takes it.
Exit status: 0 all outputs agree; 1 outputs differ (the line to blame is printed); 2 wrong use, or it could not be done.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from fmegatron import testing, tree
from fmegatron.layout import Mesh
from fmegatron.loop import experiment
from fmegatron.loop.flags import parse
from fmegatron.step import description
from fmegatron.testing import drawn


def main(argv: Sequence[str] | None = None, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Compare one experiment; returns the exit status. argv: without the program's name; out, err: standard ones."""
    out, err = out or sys.stdout, err or sys.stderr
    try:
        options, flags = parser().parse_known_args(argv)
    except SystemExit as stop:  # --help, or wrong use, which argparse has reported
        return int(stop.code or 0)
    try:
        kind, describe = experiment.load_experiment(options.experiment)
        config = parse([options.experiment, f"--mesh={options.mesh}", *flags], kind)
        start = time.perf_counter()
        one = Mesh(**dict.fromkeys(config.mesh.names, 1))
        steps_of = {
            mesh: description.require_description(describe(dataclasses.replace(config, mesh=mesh)), "parity")
            for mesh in (one, config.mesh)
        }
        below = options.below or drawn.bound(steps_of[one])
        result = testing.parity(
            steps_of.__getitem__,
            config.mesh,
            *drawn.arguments(steps_of[one], below),
            layouts=(steps_of[config.mesh].layouts, tree.layouts(steps_of[config.mesh].batch)),
            steps=options.steps,
            tolerance=options.tolerance,
            fp64=True,
        )
    except (ValueError, OSError, SyntaxError, ImportError) as error:
        print(f"parity: {options.experiment}: {error}", file=err)
        return 2
    print(result, file=out)
    path, error = result.worst
    print(
        f"{options.experiment} on {config.mesh}: {len(result.sharded.paths)} outputs of {result.step + 1} steps in "
        f"fp64, largest relative error {error:.1e}{f' ({path})' if error else ''}, bar {options.tolerance:.0e}, whole "
        f"numbers of the batch below {below}, {time.perf_counter() - start:.1f} s",
        file=out,
    )
    return 0 if result.ok else 1


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = argparse.ArgumentParser(
        allow_abbrev=False,  # a beginning of a name of ours may be a flag of the experiment
        prog="python -m fmegatron.parity",
        description="Run an experiment's step on simulated ranks and on one rank, in fp64, and compare all outputs.",
        epilog="Further flags (--NAME=VALUE) are the experiment's own; give small shapes. "
        "Exit status: 0 all outputs agree; 1 outputs differ; 2 wrong use, or it could not be done.",
    )
    p.add_argument("experiment", help="a file that defines experiment (see fmegatron/check.py)")
    p.add_argument("--mesh", required=True, help="axes and sizes, such as dp=2,fsdp=2,tp=2")
    p.add_argument("--steps", type=_count, default=2, help="updates that are compared (default: 2)")
    p.add_argument("--tolerance", type=float, default=1e-10, help="largest relative error (default: 1e-10)")
    p.add_argument("--below", type=_count, help="whole numbers of the batch are drawn from 0 to N - 1 (default: the "
                   "largest size of a dim of the state that the step can index with)", metavar="N")  # fmt: skip
    return p


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
