"""show: a tree of Layouts, ArraySpecs or tensors as a table, in notebooks as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from fmegatron.layout import Layout, dtypes
from fmegatron.tree.structure import Tree, flatten, in_words
from fmegatron.tree.text_dump import dump

_COLUMNS = ("path", "shape", "dtype", "split", "on rank 0", "initially")


@dataclass(frozen=True)
class Shown:
    """What `show` returns: `dump`'s text as its repr, and a table in a notebook."""

    tree: Tree

    def __repr__(self) -> str:
        return dump(self.tree)

    def _repr_html_(self) -> str:
        paths, leaves, _ = flatten(self.tree)
        rows = [_row(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        used = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows)]
        lines = ["<table>", _line("th", [_COLUMNS[i] for i in used])]
        lines += [_line("td", [row[i] for i in used]) for row in rows]
        return "\n".join([*lines, "</table>", f"<p>{escape(dump(self.tree).rpartition(chr(10))[2])}</p>"])


def show(values: Tree) -> Shown:
    """A view of a tree of Layouts, ArraySpecs or tensors (parameters, a state), one line a leaf.

    Raises ValueError, naming the path, for a leaf that is none of these.

    >>> show({"w": torch.zeros(2, 3), "b": torch.zeros(3)})
    b: f32[3] on cpu
    w: f32[2, 3] on cpu
    9 elements in 2 leaves, 36 bytes
    """
    for path, leaf in zip(*flatten(values)[:2], strict=True):
        if not isinstance(leaf, torch.Tensor) and not isinstance(getattr(leaf, "layout", leaf), Layout):
            raise ValueError(f"show: {path}: got {in_words(leaf)}, wanted a Layout, an ArraySpec or a tensor")
    return Shown(values)


def _row(path: str, leaf: Any) -> tuple[str, ...]:
    if isinstance(leaf, torch.Tensor):
        return path, _dims(leaf.shape), dtypes.dtype_name(leaf.dtype), "", "", ""
    layout, init = getattr(leaf, "layout", leaf), str(getattr(leaf, "init", ""))
    split = str(layout).removeprefix(dtypes.dtype_name(layout.dtype))
    return path, _dims(layout.shape), dtypes.dtype_name(layout.dtype), split, _local(layout), init


def _local(layout: Layout) -> str:
    """The shape that every rank has, or the largest and on how many ranks it differs."""
    most = layout.local_shape(layout.fullest)
    return _dims(most) if layout.is_even else f"{_dims(most)} or less"


def _dims(shape: Any) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _line(tag: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
