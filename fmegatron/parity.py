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
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch

from fmegatron import testing, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import experiment
from fmegatron.loop.flags import parse
from fmegatron.step import description
from fmegatron.testing import compare_ranks


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
        result, below = compare(describe, config, options.steps, options.tolerance, options.below)
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


def compare(
    describe: Callable, config: Any, steps: int = 2, tolerance: float = 1e-10, below: int | None = None
) -> tuple[compare_ranks.Parity, int]:
    """(result of `testing.parity` for the step of a Config, the bound of whole numbers in its batches).

    Args:
        describe: config -> `step.Description`.
        config: with the mesh.
        steps: updates.
        tolerance: of the relative error.
        below: bound of the whole numbers in a batch; None: the largest size of a dim of the state for which one
            rank computes a step.

    Raises:
        ValueError: for a step that cannot be simulated, and where no bound fits.
    """
    mesh, one = config.mesh, Mesh(**dict.fromkeys(config.mesh.names, 1))
    steps_of = {
        m: description.require_description(describe(dataclasses.replace(config, mesh=m)), "parity") for m in (one, mesh)
    }
    _, specs, batch_layouts = steps_of[mesh]
    step, single_specs, _ = steps_of[one]
    state = tree.init(single_specs, key=0, rank=0)
    if below is None:
        below = _bound(step, state, batch_layouts, one)
    result = testing.parity(
        steps_of.__getitem__,
        mesh,
        state,
        lambda i: _batch(batch_layouts, i, below),
        layouts=(tree.layouts(specs), tree.layouts(batch_layouts)),
        steps=steps,
        tolerance=tolerance,
        fp64=True,
    )
    return result, below


def _bound(step: Callable, state: Any, batch_layouts: Any, mesh: Mesh) -> int:
    """The largest bound of the whole numbers in a batch with which one rank can compute the step."""
    if all(layout.dtype.is_floating_point for layout in tree.leaves(tree.layouts(batch_layouts))):
        return 2
    sizes = sorted({n for x in tree.leaves(state) for n in x.shape if n > 1}, reverse=True)
    for size in sizes:
        try:
            testing.simulate(step, mesh, state, _batch(batch_layouts, 0, size))
            return size
        except ValueError as error:
            if not any(words in str(error) for words in ("out of range", "out of bounds")):  # torch's, of an index
                raise
    raise ValueError(
        "--below: got none, wanted the bound of the whole numbers in a batch, as no size of a dim of the state "
        f"({', '.join(map(str, sizes))}) is one; give --below N"
    )


def _batch(layouts: Any, step: int, below: int) -> Any:
    """A tree of global arrays: whole numbers from 0 to below - 1, normal floats, bools; a function of its arguments."""
    generator = torch.Generator().manual_seed(step)

    def one(layout: Layout) -> torch.Tensor:
        layout = getattr(layout, "layout", layout)
        if layout.dtype.is_floating_point:
            return torch.randn(layout.shape, generator=generator, dtype=torch.float64).to(layout.dtype)
        values = torch.randint(2 if layout.dtype is torch.bool else below, layout.shape, generator=generator)
        # All values at least once where there is room: the rows of the last rank's part of a table among them.
        values.view(-1)[:below] = torch.arange(min(below, values.numel())) if layout.dtype is not torch.bool else 0
        return values.to(layout.dtype)

    return tree.map(one, layouts)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
