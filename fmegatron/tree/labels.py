"""The layout of a local tensor, kept on the tensor: an attribute of it, as `sharding` is of a jax.Array.

It is stated by who knows it (`init`, a restore, the rows of a batch, `place`, a jit for what its check has proven).
Every op of torch gives a tensor without it, so it can be missing and never stale; dicts, slices of trees and copies of
containers keep it, because they keep the tensor. It is no box, no subclass and no node of a tree: structures and paths
are what they are without it.
"""

from __future__ import annotations

from typing import Any

import torch

from fmegatron.layout import Layout, layout
from fmegatron.tree.structure import Tree

__all__ = ["alike", "in_memory", "is_matrix", "label_of", "labelled", "layout_of"]


def layout_of(x: Tree) -> Layout | None:
    """The layout of the array whose part of this rank `x` is; None: not known.

    Only `x.data = other` leaves a wrong layout; its shape and dtype are compared when a step is traced.
    """
    label = label_of(x)
    return None if label is None else label.layout


def label_of(x: Tree) -> layout.Label | None:
    """What a tensor carries its layout in, one object for each layout, which is quick to compare; None: not known."""
    label = getattr(x, "_layout", None)
    return label if isinstance(label, layout.Label) else None


def is_matrix(leaf: Any) -> bool:
    """Whether an array, or one of which there is a spec or a Layout, is a matrix or a stack of some, not of vectors.

    By default only such leaves decay, and only their gradients travel in 16 bits. Of an array whose layout is known
    `Layout.is_matrix`, which knows dims that count layers or experts; else by its own dims, 2 or more.
    """
    layout = leaf if isinstance(leaf, Layout) else getattr(leaf, "layout", None)
    layout = layout if isinstance(layout, Layout) else layout_of(leaf)
    return len(leaf.shape) > 1 if layout is None else layout.is_matrix


def labelled(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`x`, known to have `layout`: the same tensor, or an alias of it where it is known to have another one.

    What its dims mean stays known where the new layout, as one that comes from a file, does not state it. For the
    library's own functions, which know; `place` compares shapes and dtypes.
    """
    known = label_of(x)
    layout = layout if known is None else layout.meaning(known.layout)
    if known is not None and known.layout.meaning(layout).label != layout.label:
        x = x.detach() if not x.requires_grad else x.view_as(x)
    x._layout = layout.label  # pyright: ignore[reportAttributeAccessIssue]  an attribute of the object
    return x


def alike(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new`, of the shape of `old`: where the layout of `old` is known, that of `new` is too, in its own dtype."""
    layout = layout_of(old)
    return new if layout is None else labelled(new, layout.replace(dtype=new.dtype))


def in_memory(x: torch.Tensor, layout: Layout, device: torch.device | str | None) -> torch.Tensor:
    """`x` in the memory of its layout: on the device, or on its host, where it is page-locked if the device is of CUDA,
    so that copies need not wait. device: None: where it is."""
    if device is None:
        return x
    if layout.memory == "device":
        return x.to(device)
    if torch.device(device).type != "cuda" or (x.device.type == "cpu" and x.is_pinned()):
        return x.cpu()
    return x.cpu().pin_memory()
