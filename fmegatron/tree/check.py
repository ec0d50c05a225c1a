"""check: do the local tensors of a tree agree with its layouts on this rank?"""

from __future__ import annotations

from typing import Any

import torch

from fmegatron.layout import Layout, Mesh, dtype_name
from fmegatron.tree.structure import flatten, structure_difference


def check(params: Any, layouts: Any, rank: int) -> None:
    """Raise ValueError, naming path, got, wanted and fix, unless every leaf of `params` is what its layout says.

    params: tree of this rank's local tensors.  layouts: tree of the same structure, of Layouts or ArraySpecs. Compares
    structure, shape and dtype. It cannot see a wrong `unreduced` mark: parity tests do.
    """
    paths, wanted, spec = flatten(layouts)
    _, got, got_spec = flatten(params)
    if spec != got_spec:
        difference = structure_difference(params, layouts) or f"  containers differ: got {got_spec}, wanted {spec}"
        raise ValueError(f"the tree does not have the structure of its layouts:\n{difference}")
    problems = []
    for path, x, layout in zip(paths, got, wanted, strict=True):
        layout = layout if isinstance(layout, Layout) else layout.layout
        if not isinstance(x, torch.Tensor):
            problems.append(f"  {path}: got {type(x).__name__}, wanted a local torch.Tensor of {layout}")
            continue
        shape = layout.local_shape(rank)
        if tuple(x.shape) != shape:
            hint = "; this is the global shape: keep only this rank's part" if tuple(x.shape) == layout.shape else ""
            problems.append(
                f"  {path}: got local shape {tuple(x.shape)}, wanted {shape} on rank {rank} of {layout}{hint}"
            )
        elif x.dtype is not layout.dtype:
            problems.append(
                f"  {path}: got dtype {dtype_name(x.dtype)}, wanted {dtype_name(layout.dtype)} of {layout};"
                f" cast with x.to({layout.dtype}) or change the layout"
            )
    if problems:
        more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ValueError(
            f"{len(problems)} of {len(paths)} leaves disagree with their layouts:\n" + "\n".join(problems[:10]) + more
        )


def require_mesh(layouts: Any, mesh: Mesh, who: str, whose: str) -> None:
    """ValueError, naming the leaf, unless all layouts of a tree are on a mesh that gives every rank the same place.

    layouts: a tree of Layouts or ArraySpecs.  who: what was called; whose: what else was given, with the mesh `mesh`.
    """
    paths, leaves, _ = flatten(layouts)
    for path, leaf in zip(paths, leaves, strict=True):
        mesh.require_same(leaf.mesh, who, whose, f"a layout of {path!r}" if path else "a layout")
