"""Arguments of a step that is compared, where none are given: the state by its specs, batches at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fmegatron import tree
from fmegatron.layout import Layout
from fmegatron.step import Description
from fmegatron.testing.simulation import simulate

__all__ = ["arguments", "bound"]


def arguments(one: Description, below: int | None = None) -> tuple[Any, Callable[[int], Any]]:
    """(the state of one rank, as a run with key 0 begins; the number of a step -> its batch). below: of whole numbers
    in batches; None: `bound`."""
    limit = below or bound(one)
    return tree.init(one.state, key=0, rank=0), lambda i: _batch(one, i, limit)


def bound(one: Description) -> int:
    """The largest bound of the whole numbers in a batch with which one rank can compute the step: a size of a dim of
    the state. Raises ValueError where none is one, and for a step that cannot be simulated."""
    if all(layout.dtype.is_floating_point for layout in tree.leaves(tree.layouts(one.batch))):
        return 2
    state = tree.init(one.state, key=0, rank=0)
    sizes = sorted({n for x in tree.leaves(state) for n in x.shape if n > 1}, reverse=True)
    for size in sizes:
        try:
            simulate(one.function, one.mesh, state, _batch(one, 0, size))
            return size
        except ValueError as error:
            if not any(words in str(error) for words in ("out of range", "out of bounds")):  # torch's, of an index
                raise
    raise ValueError(
        "--below: got none, wanted the bound of the whole numbers in a batch, as no size of a dim of the state "
        f"({', '.join(map(str, sizes))}) is one; give --below N, or arguments: parity(..., state, batch)"
    )


def _batch(described: Description, step: int, below: int) -> Any:
    """A tree of global arrays: whole numbers from 0 to below - 1, normal floats, bools; a function of its arguments."""
    generator = torch.Generator().manual_seed(step)

    def one(layout: Layout) -> torch.Tensor:
        if layout.dtype.is_floating_point:
            return torch.randn(layout.shape, generator=generator, dtype=torch.float64).to(layout.dtype)
        values = torch.randint(2 if layout.dtype is torch.bool else below, layout.shape, generator=generator)
        # All values at least once where there is room: the rows of the last rank's part of a table among them.
        values.view(-1)[:below] = torch.arange(min(below, values.numel())) if layout.dtype is not torch.bool else 0
        return values.to(layout.dtype)

    return tree.map(one, tree.layouts(described.batch))
