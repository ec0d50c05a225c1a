"""A function that was made for a mesh, as it is on one rank: what it closes over, moved to a mesh of ones.

A step closes over its mesh: axes, layouts, numbers of ranks, functions that were made with them. A `OneRank` makes the
same function with these on a mesh whose axes all have size 1: cells, defaults, what its code reads as globals,
attributes and items of what is in them. Code is the same, and nothing that was there is changed. Plain numbers stay as
they are: some may have been made of the mesh (`int(mesh["dp"])`), which nothing tells, so a caller is told of them and
gives each reading a try (`plain`, `instead`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from typing import Any

import torch

from fmegatron.collectives import Axes, axes
from fmegatron.layout import Layout, Mesh, Split, rank_counts
from fmegatron.step.code_reads import inner_codes
from fmegatron.step.read_tokens import GONE, held, is_users, is_users_class, is_users_file
from fmegatron.tree import ArraySpec

__all__ = ["OneRank", "on_one_rank", "ones"]

_ATOMS = (type(None), bool, str, bytes, complex, torch.dtype, torch.device, torch.Tensor, type, types.ModuleType)


def on_one_rank(layout: Layout, axes: Collection[str] | None = None) -> Layout:
    """The layout of the whole array on a mesh of ones; axes: on one where these have one rank."""
    assigned = [entry for entry in layout.spec if isinstance(entry, Split) and entry.assigned]
    whole = axes is None or ones(layout.mesh, axes).size == 1
    if not whole and (assigned or layout.flat or layout.padded):
        raise ValueError(f"on one rank: got the layout {layout}, wanted an even split of dims; leave that out")
    spec = tuple(None if entry in assigned else entry for entry in layout.spec)
    return layout.replace(mesh=ones(layout.mesh, axes), spec=spec, flat=(), padded=False)


class OneRank:
    """Moves values from a mesh to one rank. instead: {a plain number of the user's: what it is taken for}.

    plain: whole numbers beyond 1 that were met in the user's functions and values, outside of their code. taken: those
    numbers of `instead` that were met. told: what users asked of meshes that were met (`layout.rank_counts`). axes:
    those that have one rank then; None: all. made: meshes that it made.
    Raises ValueError for a number that is made of sizes, or a rest, of which nothing is known on one rank.
    """

    def __init__(self, mesh: Mesh, instead: Mapping[float, float] | None = None, axes: Collection[str] | None = None):
        self.mesh, self.instead, self.axes = mesh, dict(instead or {}), axes
        self.made: list[Mesh] = []
        self.plain, self.taken, self.told = set[int](), set[float](), set[rank_counts.Told]()
        self._done: dict[int, tuple[Any, Any]] = {}  # id -> (the object, which is kept, and what it became)

    def __call__(self, x: Any, users: bool = True) -> Any:
        """The value on one rank; what has nothing of the mesh in it is itself. users: whether it is the user's."""
        if isinstance(x, rank_counts.OF_RANKS):
            return self._number(x)
        if isinstance(x, _ATOMS):
            return x
        if isinstance(x, (int, float)):
            if users and x in self.instead:
                self.taken.add(x)
                return type(x)(self.instead[x])
            if users and isinstance(x, int) and x > 1:
                self.plain.add(x)
            return x
        if id(x) not in self._done:
            self._done[id(x)] = (x, x)  # what holds itself
            self._done[id(x)] = (x, self._moved(x, users))
        return self._done[id(x)][1]

    def _moved(self, x: Any, users: bool) -> Any:
        if isinstance(x, (Mesh, Layout, Axes, axes.Axis)):
            told = (x if isinstance(x, Mesh) else x.mesh).told
            self.told.update(one for one in told if is_users_file(one.file))
        if isinstance(x, Mesh):
            self.made.append(ones(x, self.axes))
            return self.made[-1]
        if isinstance(x, Layout):
            return on_one_rank(x, self.axes)
        if isinstance(x, ArraySpec):
            return dataclasses.replace(x, layout=on_one_rank(x.layout, self.axes))
        if isinstance(x, Axes):
            return Axes(self(x.mesh), data=x.data)
        if isinstance(x, axes.Axis):
            return Axes(self(x.mesh))[x.names]
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType):
            return types.MethodType(self(x.__func__), self(x.__self__, users))
        if isinstance(x, functools.partial):
            return functools.partial(self(x.func), *map(self, x.args), **{k: self(v) for k, v in x.keywords.items()})
        if isinstance(x, dict):
            items = {key: self(value, users) for key, value in x.items()}
            return x if all(items[key] is x[key] for key in x) else _like(x, items)
        if isinstance(x, (list, tuple)):
            items = [self(one, users) for one in x]
            return x if all(a is b for a, b in zip(items, x, strict=True)) else _like(x, items)
        return self._object(x)

    def _object(self, x: Any) -> Any:
        kind = type(x)
        values = getattr(x, "__dict__", None)
        users = is_users_class(kind)
        if not isinstance(values, dict) or not (users or kind.__module__.startswith("fmegatron.")):
            return x
        changed = {name: one for name, value in values.items() if (one := self(value, users)) is not value}
        if not changed:
            return x
        made = copy.copy(x)
        for name, value in changed.items():
            object.__setattr__(made, name, value)
        return made

    def _function(self, f: types.FunctionType) -> types.FunctionType:
        users = is_users(f.__code__)
        if not users and not f.__globals__.get("__name__", "").startswith("fmegatron."):  # its own may be another's
            return f
        cells = tuple(types.CellType() for _ in f.__closure__ or ())
        names = dict(f.__globals__) if users else f.__globals__
        made = types.FunctionType(f.__code__, names, f.__name__, None, cells or None)
        self._done[id(f)] = (f, made)
        made.__dict__.update(f.__dict__)
        made.__module__, made.__qualname__, made.__doc__ = f.__module__, f.__qualname__, f.__doc__
        for cell, old in zip(cells, f.__closure__ or (), strict=True):
            if (value := held(old)) is not GONE:
                cell.cell_contents = self(value, users)
        made.__defaults__ = tuple(self(x, users) for x in f.__defaults__) if f.__defaults__ else None
        made.__kwdefaults__ = {k: self(x, users) for k, x in f.__kwdefaults__.items()} if f.__kwdefaults__ else None
        if users:
            for name in {name for code in inner_codes(f.__code__) for name in code.co_names} & names.keys():
                names[name] = self(names[name])
        return made

    def _number(self, x: Any) -> Any:
        one = rank_counts.plain(x) * self._ratio(x.over)
        left = tuple((k, p) for k, p in x.over if isinstance(k, str) and self.axes is not None and k not in self.axes)
        if isinstance(x, int) and abs(one - round(one)) > 1e-9:
            raise ValueError(
                f"on one rank: got {x}, wanted a number of ranks that is a whole one there; make it of sizes"
            )
        if left:
            return rank_counts.RankCount(round(one), left) if isinstance(x, int) else rank_counts.RankShare(one, left)
        return round(one) if isinstance(x, int) else one

    def _ratio(self, over: Any) -> float:
        """How many times as large a number is on one rank."""
        ratio = 1.0
        for key, power in over:
            if isinstance(key, str):
                ratio *= int(self.mesh[key]) ** -float(power) if self.axes is None or key in self.axes else 1
            elif isinstance(key, rank_counts.SumOf) and key.parts and key.number:
                terms = zip(key.parts, key.terms, strict=True)
                ratio *= (sum(part * self._ratio(of) for part, of in terms) / key.number) ** float(Fraction(power))
            else:
                raise ValueError(
                    f"on one rank: got a number of {key!r:.60}, wanted one of ranks alone; make it of these"
                )
        return ratio


def ones(mesh: Mesh, axes: Collection[str] | None = None) -> Mesh:
    """The mesh with the same axes, each of size 1; axes: these alone."""
    if axes is None:
        return Mesh(**dict.fromkeys(mesh.names, 1))
    return Mesh(**{name: 1 if name in axes else int(mesh[name]) for name in mesh.names})


def _like(x: Any, items: Any) -> Any:
    kind: Callable[..., Any] = type(x)
    if hasattr(x, "_fields"):
        return kind(*items)
    if kind in (dict, list, tuple):
        return kind(items)
    made = copy.copy(x)
    if isinstance(x, dict):
        made.update(items)
    elif isinstance(x, list):
        made[:] = items
    else:
        raise ValueError(f"on one rank: got a {kind.__name__} with axes in it, wanted a tuple; make it one")
    return made
