"""Arrays of a mixer: shape, axes and initial values of each, from which specs, layouts, names and counts follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from fmegatron.collectives import Axes
from fmegatron.tree import Init, Normal, Tree


@dataclass(frozen=True)
class Array:
    """One array of one block.

    axes: for each dim the axis that splits it, several axes, or None; dims that are left out are not split. Where tp
    splits the rows of a matrix, data axes split them further, ("tp", "fsdp"): their pieces follow each other in memory,
    so that gathers and reduce-scatters copy nothing. parts: widths of the matrices that lie side by side in the last
    dim, each of which its axes split. residual: its products are added to the stream, so its standard deviation is
    divided by the root of the number of such arrays on the way (GPT-2). used: share of it that one token multiplies
    with. kept: axes of the data that still split it when a block uses it (experts). full: no strategy splits it over
    the data axes, since a rule after the step sets it on every rank (`settled`).
    """

    shape: tuple[int, ...]
    axes: tuple[str | tuple[str, ...] | None, ...] = ()
    parts: tuple[int, ...] = ()
    init: Init = Normal(0.02)
    residual: bool = False
    used: float = 1.0
    kept: tuple[str, ...] = ()
    full: bool = False


Arrays: TypeAlias = Array | Mapping[str, "Arrays"]


class At(NamedTuple):
    """What a block knows of its tokens, as data.

    positions: int64, [S] for consecutive tokens of one text in order, or [B, S] for any. documents: int64 [B, S]; a
    token looks at tokens of its own document only. None: all are of one. angles: (cos, sin) of the rotary embedding at
    these positions, for a mixer that has one; for a block by the names of its parts. draws: int64 [B, S], a number for
    each token of the run and this block, the count of its random numbers (`nn.dropout`); None: none are drawn.
    """

    positions: Tensor
    documents: Tensor | None = None
    angles: tuple[Tensor, Tensor] | dict[str, tuple[Tensor, Tensor]] | None = None
    draws: Tensor | None = None

    def splits(self, x_BSD: Tensor) -> bool:
        """Whether x holds this tp rank's part of the sequence only (sequence parallelism)."""
        return x_BSD.shape[1] != self.positions.shape[-1]

    def of(self, name: str) -> At:
        """What the part of this name is given: the angles are its own."""
        return self._replace(angles=self.angles.get(name) if isinstance(self.angles, dict) else self.angles)


class Mixer(Protocol):
    """What stands in a part of a block: a frozen dataclass of sizes, with its arrays and its maths.

    `arrays(dim)`: the tree of its arrays, in a model of width `dim`. `mixer(u[B, S, D], w, at, axes) -> y[B, S, D]`:
    the maths on local shards, or (y, statistics), a dict of tensors of
    which "loss" is added to the loss; w the arrays, gathered over the data axes and split over the others.
    u is replicated over tp, or with sequence parallelism split over it on the sequence (`at.splits(u)`); y as u is.

    Also looked for: `rope`, a `Rope` whose angles it is given; `check_mesh(mesh)`, which raises ValueError where tp
    does not divide it; `products(seq_len, causal)`, the multiply-adds times 2 of a token besides those with its arrays.
    `in_order = True`: a sequence that cp splits must lie in its order, not in that of `nn.zigzag`.
    For `generate`: `per_token = True` where no token looks at another, else `project`, `attend`, `finish` and
    `cache_width` as `Attention` has them, or `read` and `advance` as `Mamba` has them.
    """

    def arrays(self, dim: int) -> Arrays:
        """The tree of arrays."""
        ...

    def __call__(self, u_BSD: Tensor, w: Tree, at: At, axes: Axes) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """What is added to the stream."""
        ...
