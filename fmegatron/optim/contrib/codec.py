"""Codec: the leaves of an optimizer's state, from float32 to the format in which each is stored, and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch

from fmegatron import tree
from fmegatron.collectives import Axes, random_words
from fmegatron.layout import Layout
from fmegatron.optim.contrib.blockwise import Blockwise, in_blocks
from fmegatron.optim.contrib.formats import Bfloat16, Float32, FormatTable, NoMaster, Remainder
from fmegatron.optim.contrib.rounding import join_master, split_master, stochastic_bfloat16
from fmegatron.tree import ArraySpec, structure


@dataclass(frozen=True)
class Codec:
    """How each leaf of a state is stored. Paths are those of the state ("adam/m/w"), of masters "master/w".

    table: the format of a leaf.  layouts: of the uncompressed state by path; None: every leaf is full on every rank.
    key: of the words of random rounding, which depend on key, count, path and global index.
    """

    table: FormatTable
    layouts: Mapping[str, Layout] | None
    key: int

    def layout_of(self, path: str) -> Layout | None:
        """The layout of a leaf, None where none are known. ValueError for a path without one."""
        if self.layouts is None:
            return None
        if path not in self.layouts:
            near = structure.did_you_mean(path, list(self.layouts))
            raise ValueError(f"compressed: {path}: got no layout for it{near}, wanted those of all parameters")
        return self.layouts[path]

    # ---- moments
    def spec(self, path: str, spec: ArraySpec) -> Any:
        """Spec or specs of what is stored of a leaf. ValueError for a format that it cannot have."""
        if spec.dtype is not torch.float32:
            return spec
        form = self.table(path)
        if isinstance(form, Blockwise) and form.applies(spec.shape):
            return form.specs(f"compressed: {path}", spec)
        return spec.replace(dtype=torch.bfloat16) if isinstance(form, Bfloat16) else spec

    def encode(self, path: str, x: torch.Tensor, count: torch.Tensor | None) -> Any:
        """What is stored of a float32 leaf after `count` updates (None: at the start, which is not rounded at random);
        another dtype as it is."""
        if x.dtype is not torch.float32:
            return x
        form, layout = self.table(path), self.layout_of(path)
        if isinstance(form, Blockwise) and form.applies(tuple(x.shape) if layout is None else layout.shape):
            return form.encode(x, layout)
        if isinstance(form, Bfloat16):
            if not form.stochastic or count is None:
                return x.to(torch.bfloat16)
            return stochastic_bfloat16(x, self._words(path, count, x))
        return x

    def decode(self, path: str, stored: Any) -> torch.Tensor:
        """The leaf in float32 again."""
        form = self.table(path)
        if in_blocks(stored) and isinstance(form, Blockwise):
            return form.decode(stored, self.layout_of(path))
        return stored.to(torch.float32) if stored.dtype is torch.bfloat16 and isinstance(form, Bfloat16) else stored

    def decode_tree(self, state: structure.Tree) -> structure.Tree:
        """`decode` of every leaf. One in blocks is one leaf; where both of its parts are absent (None), it is."""

        def absent(node: Any) -> bool:
            in_parts = isinstance(node, dict) and node.keys() == {"codes", "scale"}
            return in_parts and all(x is None for x in node.values())

        leaves, spec = optree.tree_flatten(state, is_leaf=lambda node: in_blocks(node) or absent(node))
        paths = tree.paths(optree.tree_unflatten(spec, range(len(leaves))))
        found = [None if absent(x) else self.decode(path, x) for path, x in zip(paths, leaves, strict=True)]
        return optree.tree_unflatten(spec, found)

    # ---- masters, which their parameters hold in part
    def first_master(self, path: str, master: Any, param: Any) -> Any:
        """What is stored of a float32 master (tensor or spec) at the start, None if nothing."""
        form = self.table(path)
        if isinstance(form, Float32):
            return master
        if param.dtype is not torch.bfloat16:
            raise ValueError(
                f"compressed: {path}: got {form} for a parameter of {param.dtype}, wanted bfloat16;"
                f" put a rule ({path!r}, Float32()) before"
            )
        if isinstance(form, Remainder):
            return tree.zeros_like(param, torch.int16)
        return None

    def join(self, path: str, param: torch.Tensor, stored: torch.Tensor | None) -> torch.Tensor | None:
        """The float32 master of a parameter and what is stored of it."""
        form = self.table(path)
        if isinstance(form, Remainder) and stored is not None:
            return join_master(param, stored)
        return param.to(torch.float32) if isinstance(form, NoMaster) else stored

    def split(self, path: str, master: torch.Tensor, param: torch.Tensor, count: torch.Tensor) -> tuple[Any, Any]:
        """(the parameter, what is stored) of a float32 master.  param: the parameter rounded to nearest."""
        form = self.table(path)
        if isinstance(form, Remainder):
            return split_master(master)
        if isinstance(form, NoMaster):
            return stochastic_bfloat16(master, self._words(path, count, master)), None
        return param, master

    # ---- what formats need
    def _words(self, path: str, count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        layout = self.layout_of(path)
        return random_words.random_words(
            self.key, path, count, x, layout, None if layout is None else Axes(layout.mesh)
        )
