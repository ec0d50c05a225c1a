"""Specs of a decoder: for each array of its mixers the layout on a mesh and the initial values."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from fmegatron import step, tree
from fmegatron.layout import DataParallel, Layout, Mesh, Rules, Split, data_parallel
from fmegatron.model.arrays import Array
from fmegatron.model.decoder import Decoder
from fmegatron.tree import ArraySpec, Normal, structure


def arrays(decoder: Decoder) -> dict:
    """The tree of `Array`s of the model: "embed", a stack [L, ...] for blocks of one kind, "final_norm", "head"."""
    D, V = decoder.dim, decoder.padded_vocab
    embed = {"table": Array((V, D), (("tp", "fsdp"),))}
    if decoder.positions:
        embed["positions"] = Array((decoder.max_seq, D), (None, "fsdp"))
    stacks = {
        name: tree.map(functools.partial(_stacked, len(stack.depths)), stack.arrays)
        for name, stack in decoder.stacks.items()
    }
    head = {} if decoder.tied else {"head": {"w": Array((D, V), ("fsdp", "tp"))}}
    return {"embed": embed, **stacks, "final_norm": decoder.norm.arrays(D), **head}


def _stacked(layers: int, array: Array) -> Array:
    return replace(array, shape=(layers, *array.shape), axes=(None, *array.axes) if array.axes else ())


def rules(decoder: Decoder) -> Rules:
    """How the dims of each leaf are split, as its mixer has it: one row for each path."""
    whole = arrays(decoder)
    return Rules((re.escape(p), array.axes) for p, array in zip(tree.paths(whole), tree.leaves(whole), strict=True))


def specs(
    decoder: Decoder,
    mesh: Mesh,
    rules_of_own: Rules | None = None,
    strategy: DataParallel | str | None = None,
    pipeline: step.Pipeline | None = None,
) -> dict:
    """The tree of ArraySpecs of the model: shape, dtype, layout on `mesh`, initial values.

    strategy: over which data axes parameters are sharded at rest, or its name (`DataParallel.named`); every leaf is,
    vectors too, on the dim where the rules name a data axis, else on another one. Its axes may have other names than dp
    and fsdp, for which the rules' then stand. None: just as the rules say (fsdp shards matrices, dp nothing), except
    that a data axis that does not divide its dim goes to one that it divides.

    rules_of_own: the axes of each leaf; None: `rules(decoder)`. dp, fsdp and tp count as size 1 where the mesh lacks
    them. Dims that hold several matrices side by side (q, k, v; gate, up) are interleaved here, so a rule only names
    the axis.

    pipeline: on a mesh with pp, whose stages hold the blocks: a rank's part of a stack are the layers of its stages, in
    their order, padded where other ranks have more. None: a stage a rank, of equally many blocks. Embedding, norm, head
    and blocks that predict further tokens are shared by all ranks of pp at rest: a step brings them to their stages.
    Raises ValueError when a size does not divide by the axes that split it, naming leaf, size and fix, when an axis of
    the mesh would do nothing, and for a pipeline of other blocks or ranks.
    """
    decoder.check_mesh(mesh)
    stage_of = _stages(decoder, mesh, pipeline)
    table = rules(decoder) if rules_of_own is None else rules_of_own
    strategy = DataParallel.named(strategy) if isinstance(strategy, str) else strategy
    meant = _meant(strategy)
    along = data_parallel.SEQUENCE_AXES if strategy is None else strategy.sequence
    known = tuple(dict.fromkeys((*data_parallel.DATA_AXES, *along, *meant.values(), "tp")))
    of_all = arrays(decoder)
    residual = sum(len(parts) for parts in decoder.blocks)

    def spec_of(path: str, array: Array) -> ArraySpec:
        spec = tuple(_by_strategy(entry, meant) for entry in table.match(path))
        if array.parts and len(spec) == len(array.shape) and (axes := spec[-1]) and not isinstance(axes, Split):
            spec = (*spec[:-1], Split(axes, array.parts))
        dtype = torch.promote_types(decoder.param_dtype, torch.float32) if array.wide else decoder.param_dtype
        found = decoder.stacks.get(path.partition("/")[0])
        stack = () if found is None else (0,)
        layout = Layout(array.shape, dtype, mesh, spec, lead=len(stack) + array.lead, beside=array.parts)
        trunk = found is not None and max(found.depths) < decoder.layers
        if found is not None and trunk and mesh["pp"] > 1:  # those of a rank's stages
            layout = layout.replace(spec=(_by_stages(found.depths, stage_of), *layout.spec[1:]), padded=True)
        # the layer dim of a stack stays whole: a layer is gathered when it runs
        whole = tuple(range(len(array.shape))) if array.full and strategy is not None else stack
        layout = at_rest(path, layout, array.kept, strategy, whole)
        layout = layout if trunk else data_parallel.shared_over(layout, "pp", whole)
        init = array.init
        if array.residual and isinstance(init, Normal):  # GPT-2's scaling of what is added to the stream
            init = Normal(init.std / math.sqrt(residual))
        return ArraySpec(layout, init, strategy=strategy, stacked=bool(stack))

    out = structure.map_with_path(spec_of, of_all)
    _check_every_axis_works(out, mesh, known)
    return out


def _stages(decoder: Decoder, mesh: Mesh, pipeline: step.Pipeline | None) -> tuple[list[int], tuple[int, ...]]:
    """(the stage of each block of the trunk, the rank of each stage)."""
    ranks, blocks = mesh["pp"], decoder.layers
    if ranks == 1:
        return [0] * blocks, (0,)
    if pipeline is None:
        if blocks % ranks:
            raise ValueError(
                f"mesh {mesh}: got {blocks} blocks, which pp of {ranks} does not divide, wanted a pipeline, which says "
                "how many each stage holds; give specs(..., pipeline=), or another mesh"
            )
        return [n * ranks // blocks for n in range(blocks)], tuple(range(ranks))
    if sum(pipeline.stages) != blocks or pipeline.table.ranks != ranks:
        raise ValueError(
            f"mesh {mesh}: got a pipeline of {sum(pipeline.stages)} blocks on {pipeline.table.ranks} ranks, wanted one "
            f"of {blocks} blocks, those of the model, on {ranks}, the size of pp; make it for this model and mesh"
        )
    return [stage for stage, size in enumerate(pipeline.stages) for _ in range(size)], tuple(pipeline.table.place)


def _by_stages(depths: Sequence[int], stages: tuple[list[int], tuple[int, ...]]) -> Split:
    """How the layers of a stack are split over pp, which are the blocks of these numbers."""
    of_block, place = stages
    found = [of_block[depth] for depth in depths]
    return Split("pp", sizes=tuple(found.count(stage) for stage in range(len(place))), order=place)


def at_rest(
    path: str, layout: Layout, kept: tuple[str, ...], strategy: DataParallel | None, whole: tuple[int, ...]
) -> Layout:
    """A layout by the rules with the data axes where they lie at rest, on none of the dims `whole`.

    kept: data axes that split it for another reason. ValueError, naming the path, for a dim that its axes do not
    divide.
    """
    if strategy is not None:
        layout = _beside(strategy, kept).params_layout(layout, whole=whole)
    elif not layout.is_even_otherwise:
        layout = _moved_data_axes(layout, whole)
    # What the strategy's axes do not divide is padded at rest; heads, vocabulary and experts must divide.
    pads = set(strategy.tokens).difference(kept) if strategy is not None and layout.padded else ()
    for dim, (size, entry) in enumerate(zip(layout.shape, layout.spec, strict=True)):
        if dim in layout.assigned:
            continue
        pieces = entry.lengths(size) if isinstance(entry, Split) else (size,)
        names = tuple(name for name in layout.axes(dim) if name not in pads)
        ways = layout.mesh.extent(names)
        if any(piece % ways for piece in pieces):
            pads = "give strategy=DataParallel.hsdp(), or another, which pads at rest; or "
            pads = pads if strategy is None and set(names) <= set(data_parallel.DATA_AXES) else ""
            raise ValueError(
                f"{path}: got dim {dim} of size {' + '.join(map(str, pieces))}, wanted a multiple of {ways} "
                f"({'·'.join(names)} of the mesh {layout.mesh}); {pads}change size or mesh, or the rule"
            )
    return layout


def _beside(strategy: DataParallel, kept: tuple[str, ...]) -> DataParallel:
    """The strategy for an array that some of its axes split for another reason: without these."""
    kinds = (strategy.axes, strategy.params, strategy.grads, strategy.optim, strategy.sequence)
    return DataParallel(*(tuple(name for name in kind if name not in kept) for kind in kinds), block=strategy.block)


def _meant(strategy: DataParallel | None) -> dict[str, str]:
    """For each data axis that rules may name the axis that the strategy has for it: of others the last for fsdp."""
    if strategy is None:
        return {name: name for name in data_parallel.DATA_AXES}
    free = [name for name in data_parallel.DATA_AXES if name not in strategy.axes]
    own = [name for name in strategy.axes if name not in data_parallel.DATA_AXES]
    return {name: name for name in strategy.axes} | dict(zip(reversed(free), reversed(own), strict=False))


def _moved_data_axes(layout: Layout, whole: tuple[int, ...]) -> Layout:
    """The layout with its data axes on a dim that they divide, where they do not divide that of the rule."""
    axes = tuple(name for name in data_parallel.DATA_AXES if name in layout.sharded)
    moved = DataParallel(axes, axes, axes, axes).params_layout(layout, whole) if axes else layout
    return moved if set(moved.sharded) == set(layout.sharded) and not moved.flat else layout


def _check_every_axis_works(specs: dict, mesh: Mesh, known: tuple[str, ...]) -> None:
    """ValueError for an axis that splits neither the model nor the batch: its ranks would all do the same work."""
    used = {*known, *(name for spec in tree.leaves(specs) for name in spec.layout.sharded)}
    if idle := [name for name in mesh.names if mesh[name] > 1 and name not in used]:
        near = structure.did_you_mean(idle[0], list(known))
        raise ValueError(
            f"mesh {mesh}: got the axis {idle[0]!r}{near}, which splits no array of the model and no batch, wanted "
            f"each axis to split one, or its {mesh[idle[0]]} ranks would repeat each other's work; name it "
            f"{', '.join(known)}, give a strategy over it, or a rule that uses it"
        )


def layouts(
    decoder: Decoder,
    mesh: Mesh,
    rules_of_own: Rules | None = None,
    strategy: DataParallel | str | None = None,
    pipeline: step.Pipeline | None = None,
) -> dict:
    """The tree of Layouts of the model on `mesh` (see `specs`)."""
    return tree.layouts(specs(decoder, mesh, rules_of_own, strategy, pipeline))


def init(decoder: Decoder, mesh: Mesh, key: int, rank: int = 0, rules_of_own: Rules | None = None) -> dict:
    """This rank's shards of the initial parameters; the global arrays depend on `key` only, not on mesh or rank.

    Args:
        decoder: the model.
        mesh: of all ranks.
        key: of the random values (`tree.fold_in`).
        rank: whose shards.
        rules_of_own: how the dims of each leaf are split (`specs`).
    """
    return tree.init(specs(decoder, mesh, rules_of_own), key, rank)


def _by_strategy(entry, meant: dict[str, str]):
    """A rule's entry for one dim, by the names that the strategy has for the data axes."""
    axes = entry.names if isinstance(entry, Split) else (entry,) if isinstance(entry, str) else entry or ()
    axes = tuple(meant.get(name, name) for name in axes)
    return entry.over(axes) if isinstance(entry, Split) else axes
