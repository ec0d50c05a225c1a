"""How a step of visitors is written: a function that names its own arrays, right, or wrong in each way of `bugs`.

Written without a look at the check or at the cases beside it; parity in fp64 is the judge of each.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from fmegatron.collectives import Axes, psum
from fmegatron.layout import Layout, Mesh

F64 = torch.float64
MESHES = {"dp tp": (Mesh(dp=3, tp=2), Mesh(dp=2, tp=2)), "fsdp cp": (Mesh(fsdp=3, cp=2), Mesh(fsdp=2, cp=2))}


@dataclass(frozen=True)
class Case:
    """fn(ax, s, b, bug) -> (state, metrics). s, b: name -> "4@dp 6": dims of a rank, and the axes that split them.

    "int5 4@dp": whole numbers below 5; "mask 4@dp": zeros and ones. "4*dp": whole on each rank.
    """

    fn: Callable
    s: dict[str, str]
    b: dict[str, str]
    bugs: tuple[str, ...]
    axes: str

    def layouts(self, mesh):
        """Of the state and the batch."""
        return tuple({name: _layout(text, mesh) for name, text in part.items()} for part in (self.s, self.b))

    def values(self, mesh):
        """Global arrays for the layouts of a mesh."""
        seed = count()
        return tuple(
            {name: _values(part[name], x, next(seed)) for name, x in layouts.items()}
            for part, layouts in zip((self.s, self.b), self.layouts(mesh), strict=True)
        )

    def make(self, bug):
        """mesh -> the step."""
        return lambda mesh, axes=None: lambda s, b: self.fn(Axes(mesh), s, b, bug)


def table():
    """(the table, the decorator that adds to it)."""
    cases = {}

    def case(s, b, *bugs, axes="dp tp"):
        def added(fn):
            cases[fn.__name__] = Case(fn, s, b, bugs, axes)
            return fn

        return added

    return cases, case


def _dims(text):
    """(size on a rank, axis by which it is multiplied, axis that splits it) of each."""
    words = [word for word in text.split() if not word.startswith(("int", "mask"))]
    return [(int(re.match(r"\d+", word)[0]), *word.partition("*")[2:], word.partition("@")[2]) for word in words]


def _layout(text, mesh):
    shape = tuple(n * (mesh[times or at] if times or at else 1) for n, times, at in _dims(text))
    dtype = torch.int64 if text.startswith("int") else F64
    return Layout(shape, dtype, mesh, tuple(at or None for *_, at in _dims(text)))


def _values(text, layout, seed):
    g = torch.Generator().manual_seed(seed)
    if text.startswith("int"):
        return torch.randint(int(text.split()[0][3:]), layout.shape, generator=g)
    x = torch.randn(layout.shape, generator=g, dtype=F64)
    return (x > 0).to(F64) if text.startswith("mask") else 0.5 * x


def grads(loss, s, names):
    """(loss, {name: gradient}) of loss(params) by autograd itself."""
    p = {n: s[n].detach().requires_grad_() for n in names.split()}
    total = loss({**s, **p})
    return total.detach(), dict(zip(p, torch.autograd.grad(total, list(p.values())), strict=True))


def sgd(ax, s, names, loss, over="dp", also=""):
    """Descent on this rank's term of a sum over an axis; `also`: names of gradients that are complete as they are."""
    total, g = grads(loss, s, names)
    new = {n: s[n] - 0.1 * (x if n in also.split() else psum(x, ax[over])) for n, x in g.items()}
    return {**s, **new}, {"loss": psum(total, ax[over])}
