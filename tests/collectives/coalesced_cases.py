"""Lists of tensors for coalesced collectives: where each lies by its Layout, in every dtype that travels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fmegatron.collectives import Axes
from fmegatron.collectives.ops import all_gather_many
from fmegatron.collectives.places import Place
from fmegatron.collectives.wires import Wire
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.testing import split


class Case(NamedTuple):
    """An array: shape, the layout's spec and flat axes on a mesh of a and b."""

    shape: tuple
    spec: tuple = ()
    dtype: torch.dtype = torch.float64
    flat: tuple = ()


B16, F8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
ONE_AXIS = {  # gathered over "a"; "b" may split more
    "rows": Case((8, 3), ("a",)),
    "columns": Case((3, 8), (None, "a")),
    "last of three": Case((2, 3, 8), (None, None, "a")),
    "below another": Case((16, 3), (("b", "a"),)),
    "beside another": Case((8, 4), ("a", "b")),
    "interleaved": Case((3, 24), (None, Split("a", (16, 4, 4)))),
    "interleaved below another": Case((3, 48), (None, Split(("b", "a"), (32, 8, 8)))),
    "flat": Case((3, 8), flat=("a",)),
    "flat below another": Case((3, 16), flat=("b", "a")),
    "flat below rows": Case((8, 4), ("b",), flat=("a",)),
    "vector": Case((8,), ("a",), F32),
    "bf16": Case((4, 8), (None, "a"), B16),
    "a byte each": Case((5, 4), (None, "a"), F8),  # an odd number of bytes
}
TWO_AXES = {  # gathered over "a" and "b" at once
    "one dim": Case((8, 3), (("a", "b"),)),
    "two dims": Case((8, 12), ("a", "b")),
    "two dims, the other way": Case((8, 12), ("b", "a")),
    "three dims": Case((8, 3, 4), ("a", None, "b"), B16),
    "interleaved": Case((4, 24), ("b", Split("a", 3))),
    "interleaved by both": Case((3, 32), (None, Split(("a", "b"), (16, 16))), F32),
    "flat": Case((3, 8), flat=("a", "b")),
    "rows, then flat": Case((4, 6), ("a",), F32, ("b",)),
    "flat and rows of the other": Case((4, 6), ("b",), flat=("a",)),
    "a byte each": Case((5, 16), (None, ("a", "b")), F8),
}
GROUPS = {  # name: (cases, gathered axes, dtype that all have, or None for their own)
    "one axis": (ONE_AXIS, ("a",), None),
    "one axis, one dtype": (ONE_AXIS, ("a",), torch.float64),
    "two axes": (TWO_AXES, ("a", "b"), None),
    "two axes, one dtype": (TWO_AXES, ("a", "b"), torch.float32),
    "one tensor": ({"columns": ONE_AXIS["columns"]}, ("a",), None),
    "one tensor by rows": ({"rows": ONE_AXIS["rows"]}, ("a",), None),
}
FEW = {name: ONE_AXIS[name] for name in ("columns", "interleaved", "flat below another", "bf16", "a byte each")}
LITTLE_GROUPS = {"a few": (FEW, ("a",), None), "a few, one dtype": (FEW, ("a",), torch.float64)}  # to be compiled
MESHES = [Mesh(a=2, b=2), Mesh(a=4, b=1), Mesh(a=2, b=1), Mesh(b=2, a=2)]


def draw(seed: int, shape, dtype) -> torch.Tensor:
    """Small whole numbers: sums of up to 4 of them are exact in fp8, in every order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Problem:
    """Arrays of a group on a mesh. Per array i and rank: shards, wholes (what the rank holds when the axes are
    gathered), terms (of that shape, another one on every rank: a pending sum)."""

    def __init__(self, mesh: Mesh, group: str):
        cases, self.names, dtype = (GROUPS | LITTLE_GROUPS)[group]
        self.mesh, gone = mesh, (*self.names, *(a for a in mesh.names if mesh[a] == 1 and a not in self.names))
        self.layouts = [
            Layout(case.shape, dtype or case.dtype, mesh, case.spec, flat=case.flat) for case in cases.values()
        ]
        self.gathered = [layout.without(gone) for layout in self.layouts]
        self.places = [Place.of(layout, self.axis().names) for layout in self.layouts]
        arrays = [draw(i, layout.shape, layout.dtype) for i, layout in enumerate(self.layouts)]
        self.shards, self.wholes = split(arrays, self.layouts), split(arrays, self.gathered)
        self.terms = [
            [draw(100 + 10 * r + i, x.shape, x.dtype) for i, x in enumerate(local)]
            for r, local in enumerate(self.wholes)
        ]

    def axis(self, world=None):
        """The joint axis, symbolic or of a world."""
        return Axes(self.mesh, world)[self.names]

    def sums(self, rank: int) -> list[torch.Tensor]:
        """What the terms of the rank's group add up to, fp64."""
        group = next(g for g in self.mesh.groups(self.names) if rank in g)
        return [sum(self.terms[r][i].double() for r in group) for i in range(len(self.layouts))]

    def scattered(self, rank: int) -> list[torch.Tensor]:
        """The rank's shards of the sums, by the boxes of the layouts, fp64."""
        out = []
        for layout, gathered, local in zip(self.layouts, self.gathered, self.sums(rank), strict=True):
            whole = torch.zeros(layout.shape, dtype=torch.float64)
            for box in gathered.boxes(rank):
                whole[box.slices] = box.view(local)
            out.append(split([whole], [layout.replace(dtype=torch.float64)])[rank][0])
        return out


def gather_step(problem: Problem, axis):
    """`step(shards, terms) -> (wholes, gradients of the shards)`."""
    wires = [Wire(reduce=F32) if layout.dtype == F8 else Wire() for layout in problem.layouts]  # no sums in fp8

    def step(shards, terms):
        leaves = [x.detach().requires_grad_() for x in shards]
        with torch.enable_grad():
            wholes = all_gather_many(leaves, axis, problem.places, wires)
        return [x.detach() for x in wholes], list(torch.autograd.grad(wholes, leaves, terms))

    return step
