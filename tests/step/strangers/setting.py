"""Arrays of strangers' steps, written before the rules that they ask for; each step is right, or wrong in named ways.

A step is fn(ax, s, b, bug) -> (state, metrics): right where `bug` is "", wrong for each name in its row of a table.
Parity in fp64 is the judge of both.
"""

import torch

from fmegatron import step
from fmegatron.collectives import Axes, psum
from fmegatron.layout import Layout, Mesh

F64 = torch.float64
# Names -> (shape by the sizes of the mesh, axes of the dims).
STATE = {
    "emb": (lambda d, t: (12, 6), (None, None)),
    "vocab": (lambda d, t: (6 * t, 6), ("tp", None)),
    "q": (lambda d, t: (6, 4 * t), (None, "tp")),
    "k": (lambda d, t: (6, 4 * t), (None, "tp")),
    "v": (lambda d, t: (6, 4 * t), (None, "tp")),
    "o": (lambda d, t: (4 * t, 6), ("tp", None)),
    "up": (lambda d, t: (6, 5 * t), (None, "tp")),
    "gate": (lambda d, t: (6, 5 * t), (None, "tp")),
    "down": (lambda d, t: (5 * t, 6), ("tp", None)),
    "bias": (lambda d, t: (6,), (None,)),
    "wide": (lambda d, t: (5 * t,), ("tp",)),
    "gain": (lambda d, t: (6,), (None,)),
    "t": (lambda d, t: (6, 6), (None, None)),
    "u": (lambda d, t: (6, 6), (None, None)),
    "a": (lambda d, t: (6, 3), (None, None)),
    "head": (lambda d, t: (6, 6 * t), (None, "tp")),
    "route": (lambda d, t: (6, 2 * t), (None, None)),
    "ein": (lambda d, t: (2 * t, 6, 3), ("tp", None, None)),
    "eout": (lambda d, t: (2 * t, 3, 6), ("tp", None, None)),
    "one": (lambda d, t: (), ()),
    "flat": (lambda d, t: (6 * d,), ("dp",)),
    "book": (lambda d, t: (4, 6), (None, None)),
}
BATCH = {
    "x": (lambda d, t: (4 * d, 6), ("dp", None)),
    "y": (lambda d, t: (4 * d, 6), ("dp", None)),
    "tok": (lambda d, t: (3 * d, 5, 6), ("dp", None, None)),
    "seq": (lambda d, t: (2 * d, 4 * t, 6), ("dp", "tp", None)),
    "mask": (lambda d, t: (4 * d, 6), ("dp", None)),
    "rew": (lambda d, t: (4 * d,), ("dp",)),
    "ids": (lambda d, t: (4 * d,), ("dp",)),
    "words": (lambda d, t: (3 * d, 5), ("dp", None)),
}
WHOLE = ("ids", "words")
MESHES = (Mesh(dp=2, tp=2), Mesh(dp=3, tp=2))


def layouts(mesh):
    """Of the state and the batch."""
    d, t = mesh["dp"], mesh["tp"]
    return tuple(
        {n: Layout(shape(d, t), torch.int64 if n in WHOLE else F64, mesh, at) for n, (shape, at) in part.items()}
        for part in (STATE, BATCH)
    )


def values(mesh):
    """Global arrays for the layouts of a mesh."""
    g = torch.Generator().manual_seed(0)
    state, batch = layouts(mesh)
    s = {n: 0.5 * torch.randn(x.shape, generator=g, dtype=F64) for n, x in state.items()}
    b = {
        n: torch.randint(6, x.shape, generator=g) if n in WHOLE else torch.randn(x.shape, generator=g, dtype=F64)
        for n, x in batch.items()
    }
    return s, {**b, "mask": (b["mask"] > 0).double()}


def trained(names, loss):
    """One step of descent on loss(ax, p, b, bug), this rank's term of a sum over dp, which is reported."""

    def fn(ax, s, b, bug):
        (total, _), grads = step.value_and_grad(lambda p: (loss(ax, {**s, **p}, b, bug), {}))(
            {n: s[n] for n in names.split()}
        )
        new = {n: s[n] - 0.1 * (g if n == "flat" else psum(g, ax["dp"])) for n, g in grads.items()}
        return {**s, **new}, {"loss": psum(total.detach(), ax["dp"])}

    return fn


def metric(of):
    """The step that reports a number."""
    return lambda ax, s, b, bug: (s, {"m": of(ax, s, b, bug)})


def make(fn, bug):
    """mesh -> the step."""
    return lambda mesh, axes=None: lambda s, b: fn(Axes(mesh), s, b, bug)
