"""Low-rank adapters (LoRA) of a decoder: specs beside its specs, both as one tree of weights, and merged into one.

At rest there are two trees: the parameters as they always were, and beside them one that has an `Adapter` for some of
their matrices. In use they are one: `adapted` puts a `nn.LowRank` where the tensor stood, in the tree of tensors and in
the trees of layouts and specs alike. No mixer and no family knows of it.  Legend: D rows, F columns, r rank, L layers,
E experts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fmegatron import nn, tree
from fmegatron.collectives import Axes, reshard
from fmegatron.layout import Layout, notation
from fmegatron.model.array_specs import arrays, at_rest
from fmegatron.model.arrays import Array
from fmegatron.model.decoder import Decoder
from fmegatron.optim import groups
from fmegatron.tree import labels, structure
from fmegatron.tree.spec import Init


class Adapter(NamedTuple):
    """What is beside one matrix [.., D, F] at rest: pairs of factors, and the number that their product is multiplied
    with.

    pairs: one for each matrix that lies side by side in the columns (q, k, v; gate, up), in their order, as PEFT stores
    them (transposed). scale: alpha / rank, fp32, 0-d, or [L] in a stack; data, so that two values of it are one
    compiled step; not to be trained.
    """

    pairs: tuple[nn.Pair, ...]
    scale: structure.Tree


def lora(
    decoder: Decoder, base: dict, *, match: str, rank: int, alpha: float, dtype: torch.dtype | None = None
) -> dict:
    """Specs of an `Adapter` for each matrix of a model whose path matches; the product is 0 at the start.

        base = model.specs(decoder, mesh, strategy=strategy)
        specs = {"base": base, "lora": model.lora(decoder, base, match="wqkv|wo", rank=8, alpha=16)}
        rules = [("lora/.*/[ab]", optim.Group()), (".*", optim.Group(frozen=True))]
        optimizer = optim.grouped(1e-4, rules, adam=optim.scale_by_adam())

        def loss_fn(params, batch):
            return model.loss(model.adapted(params["base"], params["lora"]), batch, decoder, save="mincut")

    a is [.., D, r], split as the rows of the matrix are, b [.., r, F], split as its columns; r is not split. At rest
    both lie over the data axes by the strategy of the base. Only what is trained has gradients, optimizer state and
    bytes in a reduction.

    Args:
        decoder: the model.
        base: its specs (`model.specs`), on any mesh.
        match: a regular expression over full segments of paths, as in `layout.Rules`: "wqkv|wo",
            "attention/.*", "up|down" (of experts). Everything that a product takes can be matched; of a table that is
            looked up, or of a convolution, the dense sum is made.
        rank: r, at least 1. Of experts in bf16 a multiple of 8 (`nn.grouped_matmul`).
        alpha: the product is multiplied with alpha / rank.
        dtype: of a and b, such as torch.float32 beside a base in bf16; None: that of the base.

    Raises ValueError for specs of another decoder, a match without a leaf, a leaf that is no matrix, and values outside
    of their range.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(
            f"lora: rank: got {rank!r}, wanted a whole number of at least 1; leave matrices without an adapter out of "
            "match, and freeze pairs that are not wanted by a rule of optim.grouped, such as lora/.*/pairs/1/.*"
        )
    if not (isinstance(alpha, int | float) and math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"lora: alpha: got {alpha!r}, wanted a number above 0, such as 2 * rank")
    of = arrays(decoder)
    if difference := structure.structure_difference(base, of):
        raise ValueError(
            "lora: got specs of another model, wanted those of the decoder; give model.specs(decoder, mesh):\n"
            + difference
        )
    pattern, paths = groups.whole_segments(match), tree.paths(of)
    found = {
        path: (array, spec)
        for path, array, spec in zip(paths, tree.leaves(of), tree.leaves(base), strict=True)
        if pattern.search(path)
    }
    possible = [
        p for p, array, spec in zip(paths, tree.leaves(of), tree.leaves(base), strict=True) if _fits(array, spec)
    ]
    if not found:
        raise ValueError(f"lora: got match={match!r}, which no path has, wanted some of {', '.join(possible)}")
    out: dict = {}
    for path, (array, spec) in found.items():
        if not _fits(array, spec):
            raise ValueError(
                f"lora: {path}: got shape {spec.shape}, wanted a matrix; match some of "
                f"{', '.join(p for p in found if p in possible) or ', '.join(possible)}"
            )
        if _of_experts(spec) and decoder.policy.compute == torch.bfloat16 and rank % 8:
            raise ValueError(
                f"lora: {path}: got rank={rank}, wanted a multiple of 8: grouped products in bf16 need rows of 16 "
                f"bytes; take rank={-(-rank // 8) * 8} for experts, in a call of its own, and join the trees"
            )
        *names, last = path.split("/")
        inside = out
        for name in names:
            inside = inside.setdefault(name, {})
        inside[last] = _adapter(path, array, spec, rank, alpha, dtype or spec.dtype)
    return out


def _fits(array: Array, spec: tree.ArraySpec) -> bool:
    """Whether it is a matrix, or one for each expert."""
    return _of_experts(spec) or (len(spec.shape) - spec.stacked == 2 and not array.kept)


def _of_experts(spec: tree.ArraySpec) -> bool:
    return len(spec.shape) - spec.stacked == 3


def _adapter(path: str, array: Array, spec: tree.ArraySpec, rank: int, alpha: float, dtype: torch.dtype) -> Adapter:
    # Widths come from the array: without tp a layout has no Split, and the tree would be another one on every mesh.
    layout, strategy = spec.layout.replace(flat=(), dtype=dtype), spec.strategy
    (*lead, D, F), (*at, rows, columns) = layout.shape, layout.spec
    whole = tuple(range(len(lead)))

    def factor(shape: tuple[int, ...], entries: tuple, init: Init | float) -> tree.ArraySpec:
        split = layout.replace(shape=(*lead, *shape), spec=(*at, *entries), beside=())
        return dataclasses.replace(spec, layout=at_rest(path, split, array.kept, strategy, whole), init=init)

    pairs = tuple(
        nn.Pair(
            factor((D, rank), (rows, None), tree.Normal(D**-0.5)),
            factor((rank, width), (None, notation.entry_axes(columns)), 0.0),
        )
        for width in array.parts or (F,)
    )
    layers = tuple(lead[: int(spec.stacked)])
    scale = layout.replace(shape=layers, spec=(None,) * len(layers), dtype=torch.float32, lead=len(layers))
    return Adapter(pairs, dataclasses.replace(spec, layout=scale, init=alpha / rank))


def adapted(base: dict, adapters: dict) -> dict:
    """The weights of a model with its adapters, as all functions of this room take them: one tree of two, of tensors,
    of layouts, or of specs.

    Raises ValueError, naming the path, for an adapter of a leaf that there is not.
    """
    return _joined(base, adapters, "", lambda _, w, own: nn.LowRank(w, *own))


def merged(base: dict, adapters: dict, axes: Axes | None = None) -> dict:
    """The parameters of the model with its adapters in its matrices: structure, layouts and dtypes are those of the
    base, so it can be saved, exported and read without knowing of adapters.

    On a mesh all ranks call it, over axes that have processes behind them, or in a jit. The sum is made in the dtype of
    the factors where that is wider.

    Args:
        base: this rank's shards, whose layouts are known (`tree.place`).
        adapters: as well.
        axes: of the mesh; None: symbolic ones, in a function that is traced.

    Raises ValueError, naming the path, for a tensor whose layout is not known.
    """
    if not tree.leaves(adapters):
        return base
    axes = axes or Axes(tree.leaves(tree.layouts(adapters))[0].mesh)

    def one(path: str, w: Tensor, own: Adapter) -> Tensor:
        of: Layout = tree.layouts({path: w})[path]
        *lead, rows, _ = of.spec
        split = of.replace(spec=(*lead, rows, None), flat=())
        pairs = []
        for pair in own.pairs:
            # b whole: where a data axis splits fused columns and tp does not, they are one range across q, k and v.
            to = ((*lead, rows, None), (*lead, None, None))
            known = tree.layouts({path: pair})[path]
            a, b = (reshard(x, at, at.replace(spec=spec), axes) for x, at, spec in zip(pair, known, to, strict=True))
            pairs.append(nn.Pair(a, b))
        wide = torch.promote_types(w.dtype, pairs[0].a.dtype)
        zero = pairs[0].a.new_zeros((), dtype=wide)
        added = nn.dense(nn.LowRank(zero, tuple(pairs), own.scale))
        added = reshard(added, split.replace(dtype=added.dtype), of.replace(dtype=added.dtype), axes)
        return labels.labelled((w.to(wide) + added).to(w.dtype), of)

    return _joined(base, adapters, "", one)


def _joined(base, adapters, path: str, join):
    """`base` with join(path, leaf, adapter) in the place of leaves that have one."""
    if isinstance(adapters, Adapter) and not isinstance(base, dict):
        return join(path, base, adapters)
    if not isinstance(adapters, dict) or not isinstance(base, dict):
        got, wanted = structure.in_words(adapters), structure.in_words(base)
        raise ValueError(f"adapters: {path or 'the tree'}: got {got} beside {wanted}, wanted what model.lora made")
    if unknown := [name for name in adapters if name not in base]:
        raise ValueError(
            f"adapters: {path}{'/' if path else ''}{unknown[0]}: got one of a leaf that the base has not, wanted some "
            f"of {', '.join(base)}{structure.did_you_mean(unknown[0], list(base))}"
        )
    at = f"{path}/" if path else ""
    return {
        name: _joined(w, adapters[name], f"{at}{name}", join) if name in adapters else w for name, w in base.items()
    }
