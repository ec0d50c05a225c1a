"""The setting of a step: what formulas need of it, read from what an experiment's `describe` gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fmegatron import model, tree
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step import Description, Overlap, Pipeline, State
from fmegatron.step.overlap.schedule import overlap_of
from fmegatron.tree import spec, structure

__all__ = ["Setting", "setting_of"]


@dataclass(frozen=True)
class Setting:
    """A step on a mesh, as values.

    state: layouts of its state. strategy: of its specs. rows, length: local rows of a microbatch, and positions of a
    sequence, on one rank. tokens: of the whole batch. decoder: whose parameters are those of the state; None:
    activations and FLOPs are not known by formula, which is said.
    save, offload, freed: as `model.loss` was given them. pipeline: what computes the microbatches by stages, where the
    mesh has pp and the decoder is known, which has the blocks.
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
    pipeline: Pipeline | None = None

    @property
    def params(self) -> structure.Tree:
        """Layouts of the parameters."""
        return self.state.params


def setting_of(described: Description, overlap: Overlap | bool = True) -> Setting:
    """The setting of a step.

    Args:
        described: what `describe(config)` gives: a state `State(step, params, opt)`, whose specs know the strategy, and
            a batch whose largest leaf has the tokens, [B, S]. The mesh is theirs.
        overlap: as `jit` is given it.

    Raises ValueError for a state that is none, specs of two strategies, and stages that do not go with the blocks.
    """
    if not isinstance(described.state, State):
        raise ValueError(
            f"plan.quick: got {structure.in_words(described.state)} as the state's specs, wanted a State(step, params, "
            "opt), of which formulas know what is sharded (step.state_specs); plan.exact counts any step"
        )
    state = State(*(tree.map(_layout, part) for part in described.state))
    leaves = [_layout(leaf) for leaf in tree.leaves(described.batch)]
    largest = max(leaves, key=lambda layout: math.prod(layout.shape))
    local, mesh = largest.local_shape(0), largest.mesh
    decoder = described.decoder if _is_of(described.decoder, state.params) else None
    pipeline = described.pipeline if decoder is not None and mesh["pp"] > 1 else None
    return Setting(
        mesh=mesh,
        state=state,
        strategy=spec.strategy_of(described.state) or DataParallel(),
        microbatches=described.microbatches,
        rows=local[0] // described.microbatches,
        length=math.prod(local[1:]),
        tokens=math.prod(largest.shape),
        decoder=decoder,
        save=described.save,
        offload=described.offload,
        freed=described.reshard_after_forward,
        overlap=overlap_of(overlap),
        pipeline=None if pipeline is None or decoder is None else pipeline.on(mesh["pp"], decoder.layers),
    )


def _is_of(decoder: model.Decoder | None, params: structure.Tree) -> bool:
    """Whether the parameters of a state are those of the decoder, and not, say, a part of them beside adapters."""
    return decoder is not None and isinstance(params, dict) and all(name in params for name in decoder.stacks)


def _layout(leaf: Any) -> Layout:
    return leaf if isinstance(leaf, Layout) else leaf.layout
