"""State the layouts of arrays, and read them: of specs, of layouts and of tensors that know theirs."""

from __future__ import annotations

from typing import Any

import torch

from fmegatron.layout import Layout
from fmegatron.tree.checks import check
from fmegatron.tree.labels import labelled, layout_of
from fmegatron.tree.spec import ArraySpec
from fmegatron.tree.structure import Tree, flatten, in_words, map_with_path, unflatten

__all__ = ["layouts", "place"]


def place(arrays: Tree, of: Tree, rank: int = 0) -> Tree:
    """The same arrays, whose layouts are known from now on: a statement, by which a jit checks a step.

    Args:
        arrays: tree of this rank's local tensors.
        of: the same tree of Layouts, ArraySpecs, or arrays whose layouts are known; or one of these for all leaves.
        rank: this rank on the mesh.

    Raises:
        ValueError: naming the path, for trees of two structures, a tensor whose shape or dtype its layout does not
            have, and a tensor that is known to have another layout: it stands elsewhere too, where that is believed.

    >>> from fmegatron.layout import Mesh
    >>> w = place({"w": torch.zeros(2, 4)}, {"w": Layout((4, 4), torch.float32, Mesh(dp=2), ("dp",))})["w"]
    >>> print(layout_of(w), layout_of(w + 1))
    f32[4@dp, 4] on dp2 None
    """
    paths, leaves, spec = flatten(arrays)
    if isinstance(of, Layout | ArraySpec):
        of = unflatten(spec, [of] * len(leaves))
    of = layouts(of)
    check(arrays, of, rank, "place: the arrays")
    for path, x, layout in zip(paths, leaves, flatten(of)[1], strict=True):
        known = layout_of(x)
        layout = layout if known is None else layout.meaning(known)
        if known is not None and known.meaning(layout).label != layout.label:
            raise ValueError(
                f"place: {path}: got a tensor that is known to be {known}, wanted one for {layout}: where it "
                "stands elsewhere, the old layout is believed; give x.detach(), which has the same memory"
            )
        labelled(x, layout)
    return arrays


def layouts(x: Tree) -> Tree:
    """The tree of Layouts of a tree of ArraySpecs, of Layouts, or of tensors whose layouts are known.

    Raises ValueError, naming the path, for a tensor of which it is not known, and for another leaf.
    """
    return map_with_path(_layout, x)


def _layout(path: str, leaf: Any) -> Layout:
    if isinstance(leaf, Layout):
        return leaf
    if isinstance(leaf, ArraySpec):
        return leaf.layout
    if isinstance(leaf, torch.Tensor):
        layout = layout_of(leaf)
        if layout is None:
            raise ValueError(
                f"{path}: got a tensor whose layout is not known (every op gives a new one), wanted one "
                "that was placed: tree.place(arrays, layouts)"
            )
        return layout
    fix = "; tree.specs(shapes, mesh, ...) makes specs of shapes" if isinstance(leaf, int) else ""
    raise ValueError(f"{path}: got {in_words(leaf)}, wanted an ArraySpec, a Layout or a tensor{fix}")
