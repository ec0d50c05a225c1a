"""Parity: a step on a mesh against the same step on one rank, with the line to blame for the first difference."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import torch
from torch import fx

from fmegatron import tree
from fmegatron.layout import Mesh, Split
from fmegatron.step import Description, description, every_rank, opaque
from fmegatron.step.graph.nodes import items_of
from fmegatron.testing import drawn
from fmegatron.testing.align import seen_through
from fmegatron.testing.first_difference import Finding, Kept, blame
from fmegatron.testing.microbatches import cuts_of, finding_of_cut
from fmegatron.testing.relate import numbers
from fmegatron.testing.rounding import movements
from fmegatron.testing.simulation import Ranks, Simulation, simulate
from fmegatron.tree import structure

__all__ = ["Parity", "assert_parity", "parity", "relative_error"]

P = ParamSpec("P")


@dataclass(frozen=True)
class Parity:
    """Result of `parity`.

    differences: (path, largest relative error) of the outputs that differ, in the order of the result, at the first
    step that differs (`step`, counted from 0). findings: where meaning is lost; what ended the search for that,
    "IndexError: ...", is `search_failed`. sharded, single: the last simulations on the mesh and on one rank. worst:
    (path, error) of the largest relative error seen, over all steps.
    """

    mesh: Mesh
    step: int
    differences: tuple[tuple[str, float], ...]
    findings: tuple[Finding, ...]
    worst: tuple[str, float]
    sharded: Simulation = field(repr=False)
    single: Simulation = field(repr=False)
    search_failed: str = ""

    @property
    def device(self) -> str:
        """Why the step fails where its arguments are on another device than the CPU, with the line; "": it does not."""
        return self.sharded.on_second_device

    @property
    def ok(self) -> bool:
        """Whether all outputs of all steps agree."""
        return not self.differences

    def __str__(self) -> str:
        if self.ok:
            text = f"{self.mesh} computes what one rank computes (largest relative error {self.worst[1]:.1e})"
            return f"{text}; {self.device}" if self.device else text
        first, error = self.differences[0]
        lines = [
            f"on {self.mesh}, step {self.step}: {len(self.differences)} of {len(self.sharded.paths)} outputs differ "
            f"from one rank; first {first or 'its result'} (relative error {error:.1e})"
        ]
        lines += [f"  also {path} ({error:.1e})" for path, error in self.differences[1:6]]
        dtype = self.single.gather(first).dtype
        if dtype.is_floating_point and error < 1e3 * torch.finfo(dtype).eps:
            lines.append(
                f"  {dtype} is rounded at {torch.finfo(dtype).eps:.0e}, which may be all: give fp64=True, or a "
                "tolerance"
            )
        if self.search_failed:
            lines.append(f"no line can be named, as the search for it failed ({self.search_failed}), please report it")
        else:
            known = (
                "meaning is lost at" if self.findings else "no node loses meaning: a factor that depends on the mesh?"
            )
            lines.append(known)
        return "\n".join(lines + [f"  {finding}" for finding in self.findings[:5]])


def relative_error(got: torch.Tensor, wanted: torch.Tensor, floor: float | torch.Tensor = 0.0) -> float:
    """Largest elementwise |got - wanted| / (|wanted| + typical |wanted|), where typical is the median of the nonzero.

    An elementwise measure: one huge element (a mask's -1e9) must not hide the others, and an element that is zero up
    to rounding must not fail. floor: absolute differences up to this count as none. inf for other shapes or dtypes, and
    where one is NaN and the other is not.
    """
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    a, b = numbers(got.detach()).double(), numbers(wanted.detach()).double()
    if torch.equal(a, b):
        return 0.0
    difference = (a - b).abs()
    difference[(a == b) | (a.isnan() & b.isnan())] = 0.0
    difference[difference <= floor] = 0.0
    magnitude = b.abs().nan_to_num(0.0, 0.0, 0.0)
    nonzero = magnitude[magnitude > 0]
    typical = nonzero.median() if nonzero.numel() else 0.0
    return float((difference / (magnitude + typical + 1e-300)).nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def parity(
    make_step: Callable[[Mesh], Callable | Description] | Description,
    mesh: Mesh,
    *args: Any,
    layouts: tuple | None = None,
    out_layouts: structure.Tree = None,
    steps: int = 1,
    tolerance: float = 1e-10,
    floor: float = 0.0,
    fp64: bool = False,
) -> Parity:
    """Run the step of `mesh` on simulated ranks and the step of a mesh of ones, and compare every output.

    Args:
        make_step: mesh -> step, or the `step.Description` of one, which has the layouts of one rank (else those of
            `mesh`, and nothing is flattened there); called for both meshes, so it must take axes and layouts from its
            argument. Or a Description alone, which knows itself on other meshes (`Description.on`).
        mesh: of the ranks.
        args: trees of global arrays (of torch.float64, or with `fp64`). None of a Description: its state is drawn by
            its specs and its batches at random (whole numbers below the largest size of a dim of the state with which
            one rank can compute the step), and the step runs in torch.float64, whatever its dtypes.
        layouts: of the arguments on `mesh`, as for `simulate`.
        out_layouts: of the result on `mesh`, as for `simulate`.
        steps: how often; then the first item of the result is the first argument of the next call, and any other
            argument may be a function of the number of the step.
        tolerance: of `relative_error`. In torch.float64 a difference counts only where it is larger than rounding can
            make it, at the values of the step: that is run on one rank with errors of rounding in each sum
            (testing/rounding.py).
        floor: of `relative_error`.
        fp64: of `simulate`: all arithmetic in torch.float64, for steps whose arrays have other dtypes.

    Raises ValueError where there are no arguments and no Description to draw them by, and for one that does not know
    itself on another mesh.
    """
    one = Mesh(**dict.fromkeys(mesh.names, 1))
    if isinstance(make_step, Description):
        make_step = _on_meshes(make_step)
    if not args:
        many, single = (description.require_description(make_step(m), "parity without arguments") for m in (mesh, one))
        args, layouts, fp64 = drawn.arguments(single), (many.layouts, tree.layouts(many.batch)), True
        make_step = {mesh: many, one: single}.__getitem__
    layouts = (None,) * len(args) if layouts is None else tuple(layouts)
    placed = {mesh: (layouts, out_layouts), one: (_move(layouts, one), _move(out_layouts, one))}
    sims: dict[Mesh, Simulation] = {}
    worst = ("", 0.0)
    for i in range(steps):
        now = [arg(i) if callable(arg) else arg for arg in args]
        for m, (ins, outs) in placed.items():
            if i == 0:
                step = make_step(m)
                if isinstance(step, Description):
                    if m is one:
                        ins = (tree.layouts(step.state), tree.layouts(step.batch))
                        outs = (ins[0], *outs[1:]) if isinstance(outs, tuple) else outs
                    step = step.function
                sims[m] = simulate(step, m, *now, layouts=ins, out_layouts=outs, fp64=fp64)
            elif not isinstance(sims[m].outputs[0], tuple | list):
                raise ValueError(
                    f"parity: got steps={steps} and {structure.in_words(sims[m].outputs[0])} as the step's result, "
                    "wanted (state, ...): its first item is the first argument of the next call"
                )
            else:
                sims[m] = sims[m].again(Ranks(out[0] for out in sims[m].outputs), *now[1:])
        errors = _compare(sims[mesh], sims[one], floor)
        worst = max([worst, *errors], key=lambda item: item[1])
        differences = tuple(item for item in errors if not item[1] <= tolerance)
        if differences:
            differences = _beyond_rounding(sims[mesh], sims[one], differences, floor, tolerance)
        if differences:
            findings, failed = (), ""
            try:
                findings = tuple(_find(sims[mesh], sims[one], [path for path, _ in differences], tolerance))
            except Exception as error:  # that they differ is known, wherever that begins
                failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            return Parity(mesh, i, differences, findings, worst, sims[mesh], sims[one], failed)
    return Parity(mesh, steps - 1, (), (), worst, sims[mesh], sims[one])


def _asserted(parity: Callable[P, Parity]) -> Callable[P, Parity]:
    @functools.wraps(parity, assigned=())
    def assert_parity(*args: P.args, **how: P.kwargs) -> Parity:
        """`parity`, as an assertion: raises AssertionError with the outputs that differ and the lines to blame."""
        result = parity(*args, **how)
        assert result.ok, str(result)
        return result

    return assert_parity


assert_parity = _asserted(parity)


def _on_meshes(described: Description) -> Callable[[Mesh], Description]:
    """mesh -> the step on it."""
    if described.on is None:
        raise ValueError(
            "parity: got a Description without `on`, which does not know its step on one rank, wanted a function of "
            "the mesh; parity(lambda mesh: describe(replace(config, mesh=mesh)), mesh)"
        )
    return described.on


def _move(layouts, mesh):
    """The same layouts on a mesh of ones with the same axis names, where nothing is flattened, and no piece of a dim
    assigned to a rank."""

    def moved(layout):
        layout = getattr(layout, "layout", layout)
        spec = tuple(None if isinstance(entry, Split) and entry.assigned else entry for entry in layout.spec)
        return layout.replace(mesh=mesh, spec=spec, flat=())

    return tree.map(moved, layouts)


def _compare(sharded: Simulation, single: Simulation, floor):
    if sharded.paths != single.paths:
        missing = sorted(set(sharded.paths) ^ set(single.paths))
        raise ValueError(
            f"parity: got results without the same leaves from the steps of {sharded.mesh} and of one rank, {missing} "
            "from one of them only, wanted steps that differ in their mesh only"
        )
    return [(path, _error_of(sharded, single, path, floor)) for path in sharded.paths]


def _error_of(sharded: Simulation, single: Simulation, path: str, floor: float) -> float:
    """The error of one output; of a count that is a number in the loss the smallest of several: as it is shown, and for
    one rank of some axes, or one microbatch (`tracing.as_count_of_number`). Its mean is another output, and has no such
    choice."""
    error = _error(sharded, path, single.gather(path), floor)
    if not error or not _times(sharded, path):
        return error
    pairs = itertools.product(_for_some(sharded, path), _for_some(single, path))
    return min(relative_error(mine, theirs, floor) for mine, theirs in pairs)


def _for_some(sim: Simulation, path: str) -> list[torch.Tensor]:
    """A count of a number, as it is shown, and for one rank of each choice of axes, or one microbatch."""
    times, shown = _times(sim, path), sim.gather(path)
    return [shown / math.prod(some) for k in range(len(times) + 1) for some in itertools.combinations(times, k)]


def _times(sim: Simulation, path: str) -> tuple[int, ...]:
    """What an output that is a count of a number is multiplied by; () for any other."""
    return seen_through(sim.traced.outputs[sim.paths.index(path)]).meta.get("times", ())


def _beyond_rounding(sharded: Simulation, single: Simulation, differences, floor, tolerance):
    """The differences that are larger than rounding can be, in this step and at these values."""
    try:
        allowed = movements(single.flat, single.mesh, single.inputs)
    except (RuntimeError, ValueError, IndexError):  # an op that takes no magnitudes: they differ, as far as is known
        return differences
    left = []
    for path, error in differences:
        if (room := allowed[single.paths.index(path)]) is not None:
            error = _error(sharded, path, single.gather(path), room.clamp_min(floor))
        left += [] if error <= tolerance else [(path, error)]
    return tuple(left)


def _error(sharded: Simulation, path: str, wanted: torch.Tensor, floor: float | torch.Tensor) -> float:
    try:
        return relative_error(sharded.gather(path), wanted, floor)
    except ValueError:  # replicas differ, or a local shape is not that of the layout
        return float("inf")


def _find(sharded, single, wrong, tolerance=1e-10):
    many, one = (opaque.inline_layers(sim.traced.graph_module.graph) for sim in (sharded, single))
    for node, path in zip(many.find_nodes(op="placeholder"), sharded.traced.in_paths, strict=True):
        node.meta["path"] = path
    layouts = [getattr(x, "layout", x) for x in tree.leaves((sharded.arg_layouts, sharded.layouts))]
    parts = {
        entry.lengths(size)
        for layout in layouts
        for entry, size in zip(layout.spec, layout.shape, strict=False)
        if isinstance(entry, Split)
    }
    # Microbatches of one rank must hold the rows that those of all ranks hold, or nothing inside of them is comparable.
    cuts, inputs = cuts_of(many, one, _layouts_of_inputs(sharded)), [list(values) for values in single.inputs]
    for cut in cuts:
        inputs[cut.argument] = [x.index_select(cut.dim, cut.order) for x in inputs[cut.argument]]
        parts.add((len(cut.order) // cut.n,) * cut.n)
    results, theirs = every_rank.interpret(one, single.mesh, inputs, keep=True)
    at = [sharded.paths.index(path) for path in wrong]
    if cuts:
        at = [i for i in at if not _error(sharded, sharded.paths[i], results[i][0], 0.0) <= tolerance]
        if not at:
            return [finding_of_cut(cuts[0], sharded.mesh)]
    outputs: list[fx.Node] = list(items_of(many.output_node().args[0]))
    nodes = {outputs[i]: sharded.layouts[i] for i in at}
    _, mine = every_rank.interpret(many, sharded.mesh, sharded.inputs, keep=True)
    called_at = sharded.traced.called_at
    return blame(Kept(many, mine), Kept(one, theirs), sharded.mesh, nodes, tuple(sorted(parts)), tolerance, called_at)


def _layouts_of_inputs(sim):
    """A Layout, or None, per tensor of the arguments."""
    flat = []
    for i, layouts in enumerate(sim.arg_layouts):
        count = sum(path.partition("/")[0] == str(i) for path in sim.traced.in_paths)
        flat += [None] * count if layouts is None else [getattr(x, "layout", x) for x in tree.leaves(layouts)]
    return flat
