"""Specs from a tree of shapes: layouts by rules over paths, initial values by rules over paths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch

from fmegatron.layout import DataParallel, Layout, Mesh, Rules, Split
from fmegatron.tree.labels import labelled
from fmegatron.tree.spec import ArraySpec, Init, Normal, initial
from fmegatron.tree.structure import Tree, in_words, map_with_path

NARROW = Normal(0.02)  # GPT-2's


def specs(
    shapes: Tree,
    mesh: Mesh,
    rules: Rules | Iterable[tuple[str, tuple]] = (),
    init: Init | float | Iterable[tuple[str, Init | float]] = NARROW,
    dtype: torch.dtype = torch.float32,
    strategy: DataParallel | str | None = None,
    stacked: str | Iterable[tuple[str, Split | None]] | None = None,
) -> Tree:
    """The ArraySpecs of arrays with these global shapes: the one source of layouts, initial values and checkpoints.

    Args:
        shapes: tree with tuples of whole numbers as leaves.
        mesh: on which the arrays are.
        rules: (pattern, spec) rows or `Rules`, by which axes split the dims of an array; the first row whose pattern
            matches full segments of the path decides, and an array that no row matches is not split.
        init: initial values of all arrays, Normal(std), Uniform(lo, hi) or the number that every element is; or rows of
            (pattern, init), of which the first that matches decides.
        dtype: of all arrays.
        strategy: over which data axes the arrays are sharded at rest; every array is, on the dim where its rule names a
            data axis, else on one that the axis divides. Or its name (`DataParallel.named`). None: as the rules state.
            The specs keep it: gradients, the optimizer's state and rows of batches follow it.
        stacked: pattern of paths of arrays whose dim 0 counts layers; the strategy does not split it, so that each rank
            holds a part of every layer. An axis pp of the mesh does, where it divides it: a rank holds those of its
            stage. Or (pattern, `Split` over pp) rows, `[("blocks", config.pipeline.split(mesh, layers))]`, where stages
            may be uneven, or a rank have several: its part are their layers, padded where others have more.

    Raises:
        ValueError: for a leaf that is no shape, a rule that does not fit its array, a path that no row of `init`
            matches; naming the path.

    >>> shapes = {"embed": (256, 64), "blocks": {"norm": (4, 64), "w": (4, 64, 64)}}
    >>> rules = [("embed", ("tp",)), ("blocks/w", (None, "fsdp", "tp"))]
    >>> made = specs(shapes, Mesh(fsdp=2, tp=2), rules, init=[("norm", 1.0), (".*", Normal(0.02))])
    >>> print(made["blocks"]["w"].layout, made["blocks"]["norm"].init)
    f32[4, 64@fsdp, 64@tp] on fsdp2·tp2 Constant(value=1.0)
    """
    layout_rules = rules if isinstance(rules, Rules) else Rules([*rules, (".*", ())])
    inits = _inits(init)
    strategy = DataParallel.named(strategy) if isinstance(strategy, str) else strategy
    rows = () if stacked is None else [(stacked, None)] if isinstance(stacked, str) else [*stacked]
    layers = Rules([*((pattern, (0,)) for pattern, _ in rows), (".*", ())])
    stages = Rules([*((pattern, (split,)) for pattern, split in rows), (".*", (None,))])

    def one(path: str, shape: Any) -> ArraySpec:
        if not _is_tuple_of_numbers(shape) or min(shape, default=0) < 0:
            got = str(shape) if isinstance(shape, tuple) else in_words(shape)
            raise ValueError(
                f"specs: {path}: got {got}, wanted a shape, a tuple of whole numbers of 0 or more: (512, 64)"
            )
        layout = layout_rules.layout(path, tuple(shape), dtype, mesh)
        counts = bool(layers.match(path))
        if counts and mesh["pp"] > 1 and not layout.axes(0):
            (split,) = stages.match(path)
            if split is not None:
                layout = layout.replace(spec=(split, *layout.spec[1:]), padded=True)
            elif shape[0] % mesh["pp"] == 0:
                layout = layout.replace(spec=("pp", *layout.spec[1:]))
        if strategy is not None:
            layout = strategy.params_layout(layout, whole=layers.match(path))
        try:
            return ArraySpec(layout, inits.match(path)[0], strategy=strategy, stacked=counts)
        except ValueError as error:
            raise ValueError(f"specs: {path}: {error}") from None

    return map_with_path(one, shapes, is_leaf=_is_tuple_of_numbers)


def _inits(init: Any) -> Rules:
    """Rows of (pattern, initial values) as rules; one value is that of every path."""
    if not isinstance(init, Iterable) or isinstance(init, str | torch.Tensor):
        return Rules([(".*", (initial(init),))])
    rows = [*init]
    for row in rows:
        if not (isinstance(row, Sequence) and len(row) == 2 and isinstance(row[0], str)) or isinstance(row, str):
            raise ValueError(
                f"specs: init: got {row!r:.60} as a row, wanted (pattern, initial values); "
                "[('norm', 1.0), ('.*', tree.Normal(0.02))]"
            )
    return Rules([(pattern, (value,)) for pattern, value in rows])


def _is_tuple_of_numbers(x: Any) -> bool:
    return type(x) in (tuple, torch.Size) and all(isinstance(n, Integral) and not isinstance(n, bool) for n in x)


def local(values: Tree, layouts: Tree, rank: int) -> Tree:
    """The parts of a rank of a tree of global tensors: what `Layout.boxes(rank)` of each leaf names, copied.

    Args:
        values: tree of global tensors, such as a batch.
        layouts: the same tree of Layouts or ArraySpecs; or one Layout for all leaves.
        rank: whose parts.

    Raises:
        ValueError: naming the path, for trees of two structures, a tensor of another shape than its layout's, or a
            layout with a pending sum.

    >>> rows = Layout((4, 2), torch.float32, Mesh(dp=2), ("dp",))
    >>> local({"x": torch.arange(8.0).view(4, 2)}, {"x": rows}, rank=1)["x"].tolist()
    [[4.0, 5.0], [6.0, 7.0]]
    """

    def one(path: str, x: torch.Tensor, of: Any) -> torch.Tensor:
        layout = of.layout if isinstance(of, ArraySpec) else of
        if not isinstance(layout, Layout) or not isinstance(x, torch.Tensor) or layout.unreduced:
            raise ValueError(
                f"local: {path}: got {in_words(x)} and {of!r:.120}, wanted a tensor and a Layout without pending sums"
            )
        if tuple(x.shape) != layout.shape:
            raise ValueError(
                f"local: {path}: got shape {tuple(x.shape)}, wanted {layout.shape} of {layout}; give the global tensor"
            )
        if not layout.sharded and not layout.flat:
            return labelled(x.detach(), layout)
        make = torch.zeros if layout.padded else torch.empty
        part = make(layout.local_shape(rank), dtype=x.dtype, device=x.device)
        for box in layout.boxes(rank):
            box.view(part).copy_(x[box.slices])
        return labelled(part, layout)

    if isinstance(layouts, Layout):
        return map_with_path(lambda path, x: one(path, x, layouts), values)
    return map_with_path(one, values, layouts)
