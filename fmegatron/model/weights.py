"""Weights of a decoder as a step uses them: gathered over the data axes group by group, in the dtypes of its policy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fmegatron import nn, tree
from fmegatron.collectives import Axes
from fmegatron.model.decoder import Decoder
from fmegatron.nn import embedding, scaled
from fmegatron.step import partition
from fmegatron.step.layer import layer_layout, layer_of, unstack
from fmegatron.tree import structure

GROUPS = ("blocks", "embed", "head")  # whose gathered weights can be freed after use: each block, the table, the head


def gather_weights(shards, layouts, decoder: Decoder, axes: Axes, reshard_after_forward: bool = True):
    """Matrices in the compute dtype, whole over the data axes: `w[D_fsdp, F_tp] -> w[D, F_tp]`, one all_gather for all.

    They travel as `decoder.policy.wires` says. Vectors (norm weights) keep their dtype: they are small, their maths is
    fp32; they are in the same buffer nevertheless.
    Transpose: one reduce_scatter of all gradients, which arrive in the dtype of the shards. reshard_after_forward: of
    `nn.gather_tree`.
    """
    return nn.gather_tree(shards, layouts, axes[axes.data], decoder.policy.wires(layouts), reshard_after_forward)


def block_weights(
    shards: dict, arrays: dict, layouts: dict, decoder: Decoder, axes: Axes, reshard_after_forward: bool = True
) -> dict:
    """`gather_weights` of one block; what its arrays keep split is another collective, wide ones travel as they are."""
    _, of_arrays, spec = structure.flatten(arrays)
    kept = [array.kept for array in of_arrays]
    if not any(array.kept or array.wide for array in of_arrays):
        return gather_weights(shards, layouts, decoder, axes, reshard_after_forward)
    given: tuple[Any, ...] = (shards, layouts, decoder.policy.wires(layouts))
    leaves, of_leaves, wires = (spec.flatten_up_to(each) for each in given)  # nodes where a weight is one
    for i, array in enumerate(of_arrays):
        if array.wide:
            leaves[i] = tree.map(_without_scale, leaves[i], is_leaf=_is_scaled)
            wires[i] = tree.map(lambda _: decoder.policy.vector, wires[i])
    for names in dict.fromkeys(kept):
        mine = [i for i, own in enumerate(kept) if own == names]
        axis = axes[tuple(name for name in axes.data if name not in names)]
        xs, of, how = ([each[i] for i in mine] for each in (leaves, of_leaves, wires))
        found = nn.gather_tree(xs, of, axis, how, reshard_after_forward)
        for i, leaf in zip(mine, found, strict=True):
            leaves[i] = leaf
    return structure.unflatten(spec, leaves)


def _is_scaled(x: Any) -> bool:
    return isinstance(x, scaled.Scaled)


def _without_scale(x: Any) -> Tensor:
    return x.value if _is_scaled(x) else x


@contextlib.contextmanager
def adapted_named(part: str, w: structure.Tree) -> Iterator[None]:
    """Where a mixer does with a `nn.LowRank` what only a tensor has, the error says which arrays may be meant."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if "LowRank" in str(error):
            whole = structure.map_with_path(
                lambda path, x: f"{part}/{path}" if isinstance(x, nn.LowRank) else None,
                w,
                is_leaf=lambda x: isinstance(x, nn.LowRank),
            )
            error.add_note(f"Arrays with adapters (model.lora): {', '.join(tree.leaves(whole))}")
        raise


def prepared(params: dict, layouts: dict, decoder: Decoder, axes: Axes) -> dict:
    """Parameters as `gather_weights` takes them: matrices that travel in 8 bits get their scales, by one pmax."""
    wire = decoder.policy.wire
    if not wire.scaled or wire.gather is None:
        return params
    names = {name: name if name in decoder.stacks else "" for name in layouts}
    stacked = {name: tree.map(lambda _, name=name: names[name], leaf) for name, leaf in layouts.items()}
    return scaled.with_scales(params, layouts, axes, wire.gather, stacked)


class Weights:
    """The weights of a decoder for a forward pass: `weights["embed"]`, `weights["head"]`, `weights.layers(...)`.

    Those outside of the blocks are gathered together at once and kept, or each group when it is asked for.

    Args:
        params: this rank's shards.
        layouts: of the parameters.
        decoder: the model.
        axes: Axes(mesh).
        save: what a block, compiled once for all, keeps for its backward (`step.layers`); None: as autograd does.
        offload: bytes from which on it waits in host memory.
        reshard_after_forward: the groups of `GROUPS` that are gathered for each use. None: all, but with a tied table
            not "head".
    """

    def __init__(
        self,
        params: dict,
        layouts: dict,
        decoder: Decoder,
        axes: Axes,
        save: partition.Policy | None = None,
        offload: int | None = None,
        reshard_after_forward: tuple[str, ...] | None = None,
    ):
        freed = reshard_after_forward
        if freed is None:
            freed = tuple(name for name in GROUPS if name != "head" or not decoder.tied)
        if unknown := [name for name in freed if name not in GROUPS]:
            raise ValueError(f"reshard_after_forward: got {unknown[0]!r}, wanted names among {', '.join(GROUPS)}")
        self.layouts, self.decoder, self.axes, self.freed = layouts, decoder, axes, freed
        self.params, self.save, self.offload = prepared(params, layouts, decoder, axes), save, offload
        self.groups = {"embed": ("embed",), "head": ("final_norm", "embed" if decoder.tied else "head")}
        kept = [name for group, names in self.groups.items() if group not in freed for name in names]
        self.kept = self._gather(list(dict.fromkeys(kept)), reshard_after_forward=False)

    def _gather(self, names: list[str], reshard_after_forward: bool = True) -> dict:
        params, layouts = ({name: whole[name] for name in names} for whole in (self.params, self.layouts))
        return gather_weights(params, layouts, self.decoder, self.axes, reshard_after_forward) if names else {}

    def __getitem__(self, group: str) -> dict:
        names = self.groups[group]
        missing = [name for name in names if name not in self.kept]
        return {**{name: self.kept[name] for name in names if name in self.kept}, **self._gather(missing)}

    def layers(self, functions: Sequence[tuple[int, Callable]]) -> Iterator[tuple[Callable, dict]]:
        """For each function (run, weights): `run(x, weights, at)` applies it. Equal functions share one compiled pair.

        functions: (depth, f(x, weights, at) -> x), of blocks or of what lies behind them, in the order of their use.
        """
        shards, gathers, wanted = {}, {}, {depth for depth, _ in functions}
        for name, stack in self.decoder.stacks.items():
            if not wanted & set(stack.depths):
                continue
            of_one = tree.map(layer_layout, self.layouts[name])
            how = {"arrays": stack.arrays, "layouts": of_one, "decoder": self.decoder, "axes": self.axes}
            gather = functools.partial(block_weights, **how, reshard_after_forward="blocks" in self.freed)
            for depth, layer in zip(stack.depths, unstack(self.params[name]), strict=True):
                shards[depth], gathers[depth] = layer, (name, gather)
        ready: dict[tuple, Callable] = {}
        for depth, run in functions:
            name, gather = gathers[depth]
            if (name, run) not in ready:
                ready[name, run] = layer_of(run, gather, self.save, self.offload, "blocks" in self.freed)
            yield ready[name, run](shards[depth])


def embedded(tokens_BS: Tensor, w: dict, positions: Tensor, decoder: Decoder, axes: Axes, split: bool) -> Tensor:
    """`tokens[B, S] -> x[B, S, D]` of the embedding's weights w; split: S_tp.

    Raises ValueError for a sequence that tp does not divide.
    """
    tp = axes["tp"]
    x_BSD = nn.embed(tokens_BS, w["table"], tp, split, decoder.vocab_size)
    if decoder.embed_scale != 1.0:
        x_BSD = x_BSD * x_BSD.new_full((), decoder.embed_scale)
    if not decoder.positions:
        return x_BSD
    table_SD = embedding.positions(positions, w["positions"], tp, split)
    return x_BSD + table_SD.to(x_BSD.dtype)
