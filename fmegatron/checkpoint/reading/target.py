"""What a restore asks for where the target is no tree of layouts: everything, or what a state in its place has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fmegatron import tree
from fmegatron.checkpoint.calls.ranks import Ranks
from fmegatron.checkpoint.dicts.arrays import as_numpy, as_tensor, layout_of
from fmegatron.checkpoint.dicts.described import stored_containers, stored_values
from fmegatron.checkpoint.dicts.flat import ARRAY, SCALAR, Absent, Flat, flatten, nested, rebuilt
from fmegatron.checkpoint.dicts.values import to_json
from fmegatron.checkpoint.files.format import CheckpointError
from fmegatron.checkpoint.files.manifest import RESTORE_ANOTHER
from fmegatron.checkpoint.reading.mapping import Rule, apply_rules
from fmegatron.checkpoint.reading.request import subtree
from fmegatron.checkpoint.reading.source import Source
from fmegatron.checkpoint.reading.strict import Difference, Strictness, complaints
from fmegatron.layout import Layout, Mesh
from fmegatron.tree import structure


@dataclass(frozen=True)
class Wanted:
    """What `restore` is asked for on one process.

    like: state whose tensors (meta tensors too) and arrays have the shapes, dtypes and devices that are wanted, and
    whose plain values are to be replaced; None: everything that is stored.  in_place: its memory takes the elements.
    """

    like: Any
    in_place: bool

    @cached_property
    def flat(self) -> Flat:
        """The leaves of `like`."""
        return flatten(self.like)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of the arrays of `like`."""
        return {path: layout_of(x, path) for path, x in self.flat.arrays.items()}

    def asked(self, source: Source, rules: Sequence[Rule], prefix: str) -> dict[str, Layout]:
        """The layouts of the arrays that are wanted of a save."""
        if self.like is not None:
            return self.layouts
        leaves = subtree(source.leaves, prefix) if source.leaves else {}
        views = apply_rules(rules, {name: leaf.shape for name, leaf in leaves.items()})
        return {
            path: Layout(view.shape, leaves[min(view.sources)].torch_dtype, Mesh())
            for path, view in views.items()
            if view.sources
        }

    def memory(self) -> dict[str, torch.Tensor]:
        """The memory that takes the elements, where bytes can be read straight into it."""
        if not self.in_place:
            return {}
        found = {path: _tensor(x, path) for path, x in self.flat.arrays.items()}
        return {p: x for p, x in found.items() if x is not None and is_direct(x)}

    def compare(self, stored: Mapping[str, Any], arrays: Mapping[str, Any], mode: Strictness, where: str) -> Difference:
        """Which plain values only one side has. Raises ValueError for what this mode refuses.

        stored: plain values by path.  arrays: stored leaves by path.
        """
        if self.like is None:
            return Difference()
        wanted, kinds = self.flat.values, []
        kinds += [f"{p}: stored as an array, wanted {structure.in_words(x)}; put a tensor there"
                  for p, x in wanted.items() if p in arrays and not _is_empty(x)]  # fmt: skip
        kinds += [f"{p}: stored as {structure.in_words(stored[p])}, wanted an array; put a plain value there"
                  for p in self.layouts if p in stored]  # fmt: skip
        difference = Difference(
            tuple(p for p, x in stored.items() if p not in wanted and not _is_empty(x)),
            tuple(p for p, x in wanted.items() if p not in stored and not _is_empty(x)),
        )
        if problems := kinds or complaints(difference, mode):
            lines = "\n".join(f"  {p}" for p in problems[:10])
            raise ValueError(f"{where}: got leaves that do not fit the target, wanted all to fit:\n{lines}")
        return difference

    def build(
        self,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        containers: Mapping[str, Any],
        initial: Mapping[str, Any],
        device: Any,
        where: str,
    ) -> Any:
        """The restored state. initial: leaves for what is not stored."""
        if self.like is None:
            leaves = {p: _as_stored(x, containers.get(p)) for p, x in tensors.items()} | dict(values)
            try:
                return nested(leaves, containers) if leaves else {}
            except (ValueError, TypeError, RecursionError) as error:
                raise CheckpointError(f"{where}: its containers cannot be read ({error}); {RESTORE_ANOTHER}") from None
        leaves = {}
        for path, x in self.flat.leaves.items():
            if path in tensors:
                leaves[path] = self._placed(x, tensors[path], device)
            elif path in values:
                leaves[path] = values[path]
            else:
                leaves[path] = initial.get(path, x if _is_empty(x) else Absent)
        return rebuilt(self.like, leaves, self.in_place)

    def _placed(self, x: Any, read: torch.Tensor, device: Any) -> Any:
        """What was read, as the leaf `x` of `like` asks for it."""
        if self.in_place and (own := _tensor(x, "")) is not None:
            if own.data_ptr() != read.data_ptr() or own.device != read.device:
                own.copy_(read)
            return x
        if isinstance(x, np.ndarray | np.generic):
            return _as_stored(read, ARRAY if isinstance(x, np.ndarray) else SCALAR)
        if isinstance(x, torch.Tensor) and not x.is_meta and device is None:
            return read.to(x.device)
        return read


def target_of(target: Any, into: Any, ranks: Ranks, rank: int | None) -> Wanted | None:
    """The Wanted of a restore, or None where the target is a tree of layouts. Raises ValueError."""
    if into is not None:
        if target is not None:
            raise ValueError("restore: got a target and into=, wanted one of them; into is the target and its memory")
        found = Wanted(into, True)
    elif target is None:
        found = Wanted(None, False)
    elif all(isinstance(x, Layout | tree.ArraySpec) for x in tree.leaves(target)):
        return None
    else:
        found = Wanted(target, False)
    if ranks.size > 1:
        got = "no target" if found.like is None else "a state as the target"
        raise ValueError(
            f"target: got {got} and {ranks.size} ranks that restore together, wanted a Layout for each tensor; pass a"
            " tree of those, or use interop.load_state_dict for DTensors and replicas"
        )
    if rank not in (None, 0):
        raise ValueError(f"rank: got {rank!r} without layouts, wanted 0; pass layouts on the mesh of that rank")
    if found.like is not None:
        for path, x in found.flat.values.items():
            to_json(x, path or "target")
        for path, x in found.flat.arrays.items():
            layout_of(x, path)
            if found.in_place and isinstance(x, Layout | tree.ArraySpec):
                raise ValueError(f"{path}: got a {type(x).__name__} in into=, wanted a tensor; pass it as the target")
            if found.in_place and isinstance(x, torch.Tensor):
                as_tensor(x, path)  # a meta tensor has no memory
    return found


def values_of(source: Source, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(plain values, containers) that are stored below a path, by the rest of their paths."""
    metadata = source.metadata
    found = stored_values(metadata, source.text), stored_containers(metadata)
    start = prefix.strip("/")
    if not start:
        return found
    cut = [{p[len(start) + 1 :]: x for p, x in t.items() if p == start or p.startswith(start + "/")} for t in found]
    return cut[0], cut[1]


def _as_stored(x: torch.Tensor, kind: Any) -> Any:
    if kind not in (ARRAY, SCALAR):
        return x
    value = as_numpy(x)
    return value if kind == ARRAY or value.ndim else value[()]


def _tensor(x: Any, path: str) -> torch.Tensor | None:
    """A leaf's own memory as a tensor; None where it cannot be written."""
    if isinstance(x, torch.Tensor):
        return None if x.is_meta else x.detach()
    if isinstance(x, np.ndarray) and x.flags.writeable and x.flags.c_contiguous and x.dtype.isnative:
        return as_tensor(x, path)
    return None


def is_direct(x: torch.Tensor) -> bool:
    """Whether bytes can be read straight into its memory."""
    return x.device.type == "cpu" and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _is_empty(x: Any) -> bool:
    """None and empty containers, which a state saved with layouts does not store."""
    return x is None or (isinstance(x, dict | list | tuple) and not x)
