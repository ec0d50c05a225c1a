"""What there is to know of a step before it runs: the function, and what its arguments are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from fmegatron import tree
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step.pipeline.options import Pipeline, Scheduled
from fmegatron.tree import spec, structure

__all__ = ["Description", "require_description"]


@dataclass(frozen=True, eq=False)
class Description:
    """What `describe(config)` of an experiment returns: a value that check, parity, plan and search read.

    Nothing of it is an attribute of the function, so the function may be wrapped in any way.
    `step, state, batch = describe(config)` takes it apart.

    function: train_step(state, batch) -> (state, metrics), over symbolic axes.
    state: tree of ArraySpecs of its first argument; they know the strategy (`tree.strategy_of`).
    batch: of its second, of all ranks together: a tree of Layouts or ArraySpecs; or {name: shape} of int64 arrays,
    {name: (shape, dtype)}, arrays like them, whose rows then are split by the strategy of the state's specs. The field
    has Layouts or ArraySpecs.
    microbatches: into how many the step cuts the rows of a rank.
    decoder: the `model.Decoder` whose loss the step takes the gradient of; None: another loss, of which formulas
    (`plan.quick`) count state and traffic, and say that activations are not counted.
    save, offload, reshard_after_forward: as `model.loss` is given them.
    evaluate: (state, batch) -> metrics of held-out rows, for evaluations; None: there is none.
    pipeline: what computes the microbatches on a mesh with pp (`Pipelining(...).of(n)`, or a `Pipeline`); None: each
    rank all. `print` shows its table.
    on: mesh -> the same step on another mesh, or ValueError; None: `describe` of another config alone knows it.
    """

    function: Callable
    state: structure.Tree
    batch: structure.Tree
    microbatches: int = 1
    decoder: Any = None
    save: Any = None
    offload: int | None = None
    reshard_after_forward: tuple[str, ...] | None = None
    evaluate: Callable | None = None
    pipeline: Scheduled | Pipeline | None = None
    on: Callable[[Mesh], Description] | None = None

    def __post_init__(self):
        if not callable(self.function):
            raise ValueError(
                f"Description: function: got {structure.in_words(self.function)}, wanted train_step(state, batch)"
            )
        if not tree.leaves(tree.layouts(self.state)):
            raise ValueError(
                f"Description: state: got {structure.in_words(self.state)}, wanted specs of a state, "
                "step.state_specs(specs, optimizer)"
            )
        if isinstance(self.batch, Mapping):
            rows = {name: _rows(name, x, self.state, self.microbatches) for name, x in self.batch.items()}
            object.__setattr__(self, "batch", rows)
        tree.layouts(self.batch)

    @property
    def layouts(self) -> structure.Tree:
        """Those of the state: what a checkpoint is restored into (`checkpoint.restore(path, value.layouts, ...)`)."""
        return tree.layouts(self.state)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the state."""
        return tree.leaves(self.layouts)[0].mesh

    def __iter__(self) -> Iterator[Any]:
        return iter((self.function, self.state, self.batch))


def _rows(name: str, x: Any, state: structure.Tree, microbatches: int) -> structure.Tree:
    """Layouts of an entry of a batch, which are kept as they are, or the Layout of what is given in their place."""
    leaves = tree.leaves(x)
    if leaves and all(isinstance(leaf, Layout | tree.ArraySpec) for leaf in leaves):
        return x
    given: Any = (x.shape, x.dtype) if isinstance(x, torch.Tensor) else x
    typed = isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], torch.dtype)
    shape, dtype = (given[0], given[1]) if typed else (given, torch.int64)
    if not isinstance(shape, tuple | list) or not all(type(n) is not bool and isinstance(n, Integral) for n in shape):
        got = structure.in_words(x) if isinstance(x, Mapping) or not isinstance(x, tuple | list) else f"{x!r:.60}"
        raise ValueError(
            f"Description: batch[{name!r}]: got {got}, wanted the shape of an int64 array, (shape, torch dtype), a "
            "tensor like it, or its Layout; ((8, 64), torch.float32)"
        )
    by, mesh = spec.strategy_of(state) or DataParallel(), tree.leaves(tree.layouts(state))[0].mesh
    return by.batch_layout(tuple(shape), dtype, mesh, microbatches)


def require_description(found: Any, who: str) -> Description:
    """What an experiment's `describe` returned; ValueError for another value, such as a tuple of its first three."""
    if isinstance(found, Description):
        return found
    fix = "return step.Description(train_step, state_specs, batch_layouts)"
    raise ValueError(f"{who}: describe(config): got {structure.in_words(found)}, wanted a step.Description; {fix}")
