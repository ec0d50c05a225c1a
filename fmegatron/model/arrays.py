"""Arrays of a mixer: shape, axes and initial values of each, from which specs, layouts, names and counts follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.tree import Normal, spec


@dataclass(frozen=True)
class Array:
    """One array of one block.

    axes: for each dim the axis that splits it, several axes, or None; dims that are left out are not split. Where tp
    splits the rows of a matrix, data axes split them further, ("tp", "fsdp"): their pieces follow each other in memory,
    so that gathers and reduce-scatters copy nothing. parts: widths of the matrices that lie side by side in the last
    dim, each of which its axes split. residual: its products are added to the stream, so its standard deviation is
    divided by the root of the number of such arrays on the way (GPT-2). init: of every element, where it is
    a number. used: share of it that one token multiplies with. kept: axes of the data that still split it when a block
    uses it (experts). full: no strategy splits it over the data axes, since a rule after the step sets it on every rank
    (`post_update`). wide: it is fp32 or wider at rest and in a step, whatever the dtypes of the model are. lead: how
    many leading dims count arrays (experts).
    """

    shape: tuple[int, ...]
    axes: tuple[str | tuple[str, ...] | None, ...] = ()
    parts: tuple[int, ...] = ()
    init: spec.Init | float = Normal(0.02)
    residual: bool = False
    used: float = 1.0
    kept: tuple[str, ...] = ()
    full: bool = False
    wide: bool = False
    lead: int = 0


Arrays: TypeAlias = Array | Mapping[str, "Arrays"]


class TokenContext(NamedTuple):
    """What a block knows of its tokens, as data.

    positions: int64, [S] for consecutive tokens of one text in order, or [B, S] for any. documents: int64 [B, S]; a
    token looks at tokens of its own document only. None: all are of one. angles: (cos, sin) of the rotary embedding at
    these positions, for a mixer that has one; for a block by the names of its parts. draws: int64 [B, S], a number for
    each token of the run and this block, the count of its random numbers (`nn.dropout`); None: none are drawn. padding:
    bool [B, S], True where there is no token, which no statistic and no loss of a router counts ("not learned from" is
    another thing: the mask and the labels of the loss); None: there is none. axes: of the mesh, by which tokens and
    arrays are split (`Axes(mesh)`).
    """

    positions: Tensor
    documents: Tensor | None = None
    angles: tuple[Tensor, Tensor] | dict[str, tuple[Tensor, Tensor]] | None = None
    draws: Tensor | None = None
    padding: Tensor | None = None
    axes: Axes = Axes(Mesh())

    def splits(self, x_BSD: Tensor) -> bool:
        """Whether x holds this tp rank's part of the sequence only (sequence parallelism)."""
        return x_BSD.shape[1] != self.positions.shape[-1]

    def unsplit(self) -> TokenContext:
        """The same of sequences that nothing splits, as generation reads them."""
        return self._replace(axes=Axes(Mesh()))

    def rotation(self, who: str) -> tuple[Tensor, Tensor]:
        """`angles` of one mixer. ValueError where there are none: positions would be ignored in silence."""
        if not isinstance(self.angles, tuple):
            raise ValueError(
                f"{who}.rope: got a rope and no angles of it in `at`, wanted those that `Decoder.at` makes for a mixer "
                "with a rope; give what calls it the same rope, or derive that from model.Wrapped"
            )
        return self.angles

    def of(self, name: str) -> TokenContext:
        """What the part of this name is given: the angles are its own."""
        return self._replace(angles=self.angles.get(name) if isinstance(self.angles, dict) else self.angles)
