"""Declarations: the layouts of a step's arguments, attached to it, so that every jit of it can be checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fmegatron import tree
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step.batch_rows import microbatches_of, require_batch, require_rows
from fmegatron.step.check.findings import Report
from fmegatron.step.check.walk import check_traced
from fmegatron.step.trace import Traced

__all__ = ["Declared", "check_call", "declared_by"]


@dataclass(frozen=True, eq=False)
class Declared:
    """Layouts of a step's two arguments; the new state (result 0) has those of the old one.

    state: a tree of Layouts or ArraySpecs.  batch: such a tree, or names of the axes over which dim 0 of every leaf is
    split, as `DataParallel.batch_layout` does for as many microbatches as the step cuts it into (microbatches).
    """

    state: Any
    batch: Any
    microbatches: int = 1

    def require_batch(self, layout: Layout, who: str) -> None:
        """ValueError unless what has this layout may be the step's batch: for whoever assigns rows to the ranks."""
        if isinstance(self.batch, tuple) and all(isinstance(axis, str) for axis in self.batch):
            require_batch(layout, self.batch, self.microbatches, tree.leaves(self.state)[0].mesh, who)


def declared_by(fn: Callable) -> Declared | None:
    """What a function says in its attribute `declared` (as steps of `build_train_step` do), else None."""
    found = getattr(fn, "declared", None)
    return found if isinstance(found, Declared) else None


def check_call(
    traced: Traced, declared: Declared, name: str, allow: Mapping[str, str] | None = None, speak: bool = True
) -> Report:
    """Check a traced call of `step(state, batch)`: the Report, after a warning where outputs are unproven.

    speak: whether this process warns: of the ranks of a job, one does. Raises ValueError with all findings and their
    lines, or naming the argument that does not have its layout.
    """
    state = _by_path(declared.state, "0")
    mesh = next(iter(state.values())).mesh
    shapes = {path: fake for path, fake in zip(traced.in_paths, traced.fakes, strict=True)}
    data = {path for path in shapes if path.startswith("1/") or path == "1"}
    if isinstance(declared.batch, tuple) and all(isinstance(axis, str) for axis in declared.batch):
        parts = microbatches_of(traced)
        batch = {path: _of_rows(shapes[path], mesh, declared.batch, parts.get(path, 1)) for path in data}
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
    require_rows(traced, given, name)
    wanted = [state.get(path) for path in traced.out_paths]
    report = check_traced(traced, mesh, given, wanted, data=data, allow=allow).require(name)
    if report.unproven and speak:
        lines = "\n  ".join(map(str, report.unproven))
        count, all_ = len(report.unproven_outputs), len(traced.out_paths)
        warnings.warn(
            f"{name}: the check of collectives cannot prove {count} of {all_} outputs:\n  {lines}", stacklevel=2
        )
    return report


def _by_path(layouts: Any, head: str) -> dict[str, Layout]:
    leaves = [x if isinstance(x, Layout) else x.layout for x in tree.leaves(layouts)]
    return {f"{head}/{path}" if path else head: x for path, x in zip(tree.paths(layouts), leaves, strict=True)}


def _of_rows(fake: Any, mesh: Mesh, axes: tuple[str, ...], microbatches: int) -> Layout:
    """The layout of a leaf of the batch; a 0-d one is the same on all ranks."""
    shape = tuple(fake.shape)
    ranks = mesh.extent([axis for axis in axes if axis in mesh])
    whole = (shape[0] * ranks, *shape[1:]) if shape else ()
    return DataParallel(axes).batch_layout(whole, fake.dtype, mesh, microbatches)
