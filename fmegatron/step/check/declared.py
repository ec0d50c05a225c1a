"""What a step says of its own arguments, so that every jit of it can be checked without being told more."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fmegatron import tree
from fmegatron.layout import Layout, Mesh
from fmegatron.step.check.findings import Report
from fmegatron.step.check.walk import check_traced
from fmegatron.step.trace import Traced

__all__ = ["Declared", "check_call", "declared_by"]


@dataclass(frozen=True, eq=False)
class Declared:
    """Layouts of a step's two arguments; the new state (result 0) has those of the old one.

    state: a tree of Layouts or ArraySpecs.  batch: such a tree, or names of the axes to which dim 0 of every leaf is
    dealt.
    """

    state: Any
    batch: Any


def declared_by(fn: Callable) -> Declared | None:
    """What a function says in its attribute `declared` (as steps of `build_train_step` do), else None."""
    found = getattr(fn, "declared", None)
    return found if isinstance(found, Declared) else None


def check_call(traced: Traced, declared: Declared, name: str, allow: Mapping[str, str] | None = None) -> Report:
    """Check a traced call of `step(state, batch)`: the Report, after a warning that lists ops without a rule.

    Raises ValueError with all findings and their lines, or naming the argument that does not have its layout.
    """
    state = _by_path(declared.state, "0")
    mesh = next(iter(state.values())).mesh
    shapes = {path: fake for path, fake in zip(traced.in_paths, traced.fakes, strict=True)}
    data = {path for path in shapes if path.startswith("1/") or path == "1"}
    if isinstance(declared.batch, tuple) and all(isinstance(axis, str) for axis in declared.batch):
        batch = {path: _dealt(shapes[path], mesh, declared.batch) for path in data}
    else:
        batch = _by_path(declared.batch, "1")
    known = state | batch
    for path, fake in shapes.items():
        if path in known and tuple(fake.shape) != known[path].local_shape(0):
            raise ValueError(
                f"{name}: argument {path!r} has shape {tuple(fake.shape)}, its layout {known[path]} gives "
                f"{known[path].local_shape(0)} on each rank; correct the layout, or jit with check=False"
            )
    given = [known.get(path) for path in traced.in_paths]
    wanted = [state.get(path) for path in traced.out_paths]
    report = check_traced(traced, mesh, given, wanted, data=data, allow=allow).require(name)
    if report.unproven:
        ops = "; ".join(f"{op} at {at}" for op, at in report.unproven)
        warnings.warn(f"{name}: the check of collectives has no rule for {ops}: not proven", stacklevel=2)
    return report


def _by_path(layouts: Any, head: str) -> dict[str, Layout]:
    leaves = [x if isinstance(x, Layout) else x.layout for x in tree.leaves(layouts)]
    return {f"{head}/{path}" if path else head: x for path, x in zip(tree.paths(layouts), leaves, strict=True)}


def _dealt(fake: Any, mesh: Mesh, axes: tuple[str, ...]) -> Layout:
    """The layout of a leaf of the batch; a 0-d one is the same on all ranks."""
    if not fake.dim():
        return Layout((), fake.dtype, mesh)
    names = tuple(axis for axis in axes if axis in mesh)
    return Layout((fake.shape[0] * mesh.extent(names), *fake.shape[1:]), fake.dtype, mesh, (names,))
