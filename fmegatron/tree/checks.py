"""check: do the local tensors of a tree agree with its layouts on this rank?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fmegatron.layout import Layout, Mesh, dtypes
from fmegatron.tree.structure import Tree, flatten, in_words, structure_difference


def check(params: Tree, layouts: Tree, rank: int, name: str = "the tree", of: str = "its layouts") -> None:
    """Raise ValueError, naming path, got, wanted and fix, unless every leaf of `params` is what its layout states.

    Compares structure, shape and dtype. It cannot see a wrong `unreduced` mark: parity tests do.

    Args:
        params: tree of this rank's local tensors.
        layouts: tree of the same structure, of Layouts or ArraySpecs.
        rank: this rank on the layouts' mesh.
        name: what the error calls the tensors, such as "state.params".
        of: what it calls the layouts, such as "the layouts of build_train_step".
    """
    paths, wanted, spec = flatten(layouts)
    _, got, got_spec = flatten(params)
    if spec != got_spec:
        lines = structure_difference(params, layouts).splitlines() or [f"  got {got_spec}, wanted {spec}"]
        more = [f"  ... and {len(lines) - 10} more"] if len(lines) > 10 else []
        raise ValueError(
            f"{name}: got another structure than {of}, wanted the same names and containers:\n"
            + "\n".join([*lines[:10], *more])
        )
    problems, shapes = [], dict[Layout, tuple[int, ...]]()
    for path, x, item in zip(paths, got, wanted, strict=True):
        layout = item if isinstance(item, Layout) else getattr(item, "layout", None)
        if not isinstance(layout, Layout):
            raise ValueError(
                f"{of}: {path}: got {in_words(item)}, wanted a Layout or an ArraySpec; are the two trees in "
                "each other's place?"
            )
        if not isinstance(x, torch.Tensor):
            problems.append(
                f"  {path}: got {type(x).__name__}, wanted a local torch.Tensor of {layout}; make it one with "
                "torch.as_tensor"
            )
            continue
        if (shape := shapes.get(layout)) is None:
            shape = shapes[layout] = layout.local_shape(rank)
        if tuple(x.shape) != shape:
            problems.append(
                f"  {path}: got local shape {tuple(x.shape)}, wanted {shape} on rank {rank} of {layout}; "
                f"{_fix(tuple(x.shape), shape, layout)}"
            )
        elif x.dtype is not layout.dtype:
            problems.append(
                f"  {path}: got dtype {dtypes.dtype_name(x.dtype)}, wanted {dtypes.dtype_name(layout.dtype)} of "
                f"{layout}; cast with x.to({layout.dtype}) or change the layout"
            )
    if problems:
        more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ValueError(
            f"{name}: got {len(problems)} of {len(paths)} leaves that disagree with {of}, wanted none:\n"
            + "\n".join(problems[:10])
            + more
        )


def require_saved_by(paths: Sequence[str], layouts: Sequence[Layout], size: int) -> None:
    """ValueError, naming the path, for a layout on another number of ranks than that which saves together, and for a
    pending sum, which is no value."""
    for path, layout in zip(paths, layouts, strict=True):
        if layout.mesh.size != size:
            raise ValueError(
                f"{path}: got a layout on {layout.mesh} ({layout.mesh.size} ranks), wanted {size}, which save together;"
                " pass world= of the ranks that hold the state, or layouts on their mesh"
            )
        if layout.unreduced:
            raise ValueError(
                f"{path}: got pending sums over {layout.unreduced}, wanted a value; reduce it before the save"
            )


def _fix(got: tuple[int, ...], wanted: tuple[int, ...], layout: Layout) -> str:
    if got == layout.shape:
        return "this is the global shape: keep only this rank's part"
    if sorted(got) == sorted(wanted):
        return "its dims are in another order: permute them, or make the layout's those of the array"
    return "make it with this layout (tree.init, checkpoint.restore), or give the layout the array's global shape"


def require_mesh(layouts: Tree, mesh: Mesh, who: str, whose: str) -> None:
    """ValueError, naming the leaf, unless all layouts of a tree are on a mesh that gives every rank the same place.

    layouts: a tree of Layouts or ArraySpecs.  who: what was called; whose: what else was given, with the mesh `mesh`.
    """
    paths, leaves, _ = flatten(layouts)
    for path, leaf in zip(paths, leaves, strict=True):
        mesh.require_same(leaf.mesh, who, whose, f"a layout of {path!r}" if path else "a layout")
