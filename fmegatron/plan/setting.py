"""The setting of a step: what formulas need of it, read from what an experiment's `describe` gives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from fmegatron import model, tree
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step import Overlap, State
from fmegatron.step.check import Declared

__all__ = ["Described", "Setting", "setting_of"]

Described: TypeAlias = tuple[
    Callable, Any, Any
]  # what `describe(config)` gives: step, specs of its state, layouts of its batch


@dataclass(frozen=True)
class Setting:
    """A step on a mesh, as values.

    state: layouts of its state. strategy, microbatches: as it declares them. rows, length: local rows of a microbatch,
    and positions of a sequence, on one rank. tokens: of the whole batch. decoder: None where the loss is not
    `model.loss` bound by functools.partial: then activations and FLOPs are not known by formula, which is said.
    save, offload, freed: as `model.loss` was given them.
    """

    mesh: Mesh
    state: State
    strategy: DataParallel
    microbatches: int
    rows: int
    length: int
    tokens: int
    decoder: model.Decoder | None = None
    save: Any = None
    offload: int | None = None
    freed: tuple[str, ...] | None = None
    overlap: Overlap | None = None

    @property
    def params(self) -> tree.Tree:
        """Layouts of the parameters."""
        return self.state.params


def setting_of(
    step: Callable, state_specs: tree.Tree, batch_layouts: tree.Tree, mesh: Mesh, overlap: Overlap | None = None
) -> Setting:
    """The setting of a step of `build_train_step`.

    Args:
        step: train_step(state, batch).
        state_specs: State of Layouts or ArraySpecs.
        batch_layouts: of the batch; its largest leaf has the tokens, [B, S].
        mesh: of all of them.
        overlap: as `jit` is given it.

    Raises ValueError for a step that declares no strategy.
    """
    declared = getattr(step, "declared", None)
    if not isinstance(declared, Declared) or not isinstance(declared.batch, DataParallel):
        raise ValueError(
            "plan.quick: got a step that declares no strategy, wanted one of step.build_train_step, from which "
            "formulas know what is sharded; plan.exact counts any step"
        )
    state = State(*(tree.map(_layout, part) for part in state_specs))
    leaves = [_layout(leaf) for leaf in tree.leaves(batch_layouts)]
    largest = max(leaves, key=lambda layout: math.prod(layout.shape))
    local = largest.local_shape(0)
    of_batch = {
        "mesh": mesh,
        "state": state,
        "strategy": declared.batch,
        "microbatches": declared.microbatches,
        "rows": local[0] // declared.microbatches,
        "length": math.prod(local[1:]),
        "tokens": math.prod(largest.shape),
        "overlap": overlap,
    }
    bound = _bound(declared.loss)
    if bound is None:
        return Setting(**of_batch)
    given = {name: bound[name] for name in ("decoder", "save", "offload") if name in bound}
    return Setting(**of_batch, **given, freed=bound.get("reshard_after_forward"))


def _layout(leaf: Any) -> Layout:
    return leaf if isinstance(leaf, Layout) else leaf.layout


def _bound(loss: Callable | None) -> dict[str, Any] | None:
    """What `model.loss` was bound with where it is the step's loss function, else None."""
    found: Any = loss
    bound: dict[str, Any] = {}
    while found is not None:
        if found is model.loss:
            return bound if "decoder" in bound else None
        if isinstance(found, functools.partial):
            bound = {**found.keywords, **bound}
            found = found.func
        else:
            found = getattr(found, "__wrapped__", None)
    return None
