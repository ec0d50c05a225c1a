"""What the steps of this folder share: one state and one batch, and how a loss of one's own becomes a step.

Letters: B rows, S places, D features, F hidden, V vocabulary, C classes, E experts, H heads, K width of a head. Sizes
differ from each other and on ranks, so that nothing fits by chance. The steps are written in the styles of many people,
on purpose: they are the test, not examples to follow.
"""

import torch

from fmegatron.collectives import Axes, psum
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.step import value_and_grad

MESH = Mesh(dp=3, tp=2)
B, S, D, F, V, C, E, H, K = 12, 10, 8, 20, 14, 5, 6, 4, 3
PARAMS = {
    "gain": ((D,), ()),
    "out": ((D, C), ()),
    "bias": ((C,), ()),
    "up": ((D, F), (None, "tp")),
    "down": ((F, D), ("tp",)),
    "hidden": ((F,), ("tp",)),
    "table": ((V, D), ("tp",)),
    "head": ((D, V), (None, "tp")),
    "router": ((D, E), ()),
    "experts": ((E, D, D), ("tp",)),
    "qkv": ((D, 3 * H * K), (None, Split("tp", 3))),
    "proj": ((H * K, D), ("tp",)),
    "unused": ((7,), ()),
}
NUMBERS = ("step", "average", "scale")
BATCH = {
    "x": ((B, D), torch.float64),
    "xs": ((B, S, D), torch.float64),
    "image": ((B, 2, 4, 6), torch.float64),
    "target": ((B, D), torch.float64),
    "y": ((B,), C),
    "token": ((B,), V),
    "tokens": ((B, S), V),
    "group": ((B,), 4),
    "length": ((B,), S),
    "mask": ((B,), torch.bool),
    "weight": ((B,), torch.float64),
}


def layouts(mesh: Mesh, of: str) -> tuple:
    """Layouts of the arguments (state, batch): tp splits what a model would split, dp deals the rows."""
    p = {k: Layout(shape, torch.float64, mesh, spec) for k, (shape, spec) in PARAMS.items()}
    number = Layout((), torch.float64, mesh)
    state = {"p": p, "m": p, "v": p} | dict.fromkeys(NUMBERS, number)
    kinds = {k: (shape, torch.int64 if isinstance(kind, int) else kind) for k, (shape, kind) in BATCH.items()}
    return state, {k: Layout(shape, dtype, mesh, ("dp",)) for k, (shape, dtype) in kinds.items()}


def values(of: str) -> tuple:
    """Global arguments: nothing is zero or one by chance, second moments are positive, masks leave other counts on all
    ranks."""
    generator = torch.Generator().manual_seed(5)

    def draw(shape, low=0.0):
        return torch.rand(shape, generator=generator, dtype=torch.float64) + low

    def one(shape, kind):
        if isinstance(kind, int):
            return torch.randint(0, kind, shape, generator=generator)
        return torch.arange(shape[0]) % 7 < 4 if kind == torch.bool else draw(shape, -0.5)

    state = {
        name: {k: draw(s, low) for k, (s, _) in PARAMS.items()} for name, low in (("p", -0.4), ("m", -0.5), ("v", 0.1))
    }
    state |= {"step": torch.tensor(3.0).double(), "average": draw(()), "scale": torch.tensor(4.0).double()}
    batch = {k: one(*shape_and_kind) for k, shape_and_kind in BATCH.items()}
    return state, batch | {"weight": batch["weight"].abs() + 0.2}


def by_loss(loss, mesh: Mesh):
    """A step of `loss(p, b, dp, tp) -> (this rank's part of it, metrics)`: gradients summed over dp, plain SGD."""
    axes = Axes(mesh)
    dp, tp = axes["dp"], axes["tp"]

    def step(state, batch):
        (_, metrics), grads = value_and_grad(lambda p, b: loss(p, b, dp, tp))(state["p"], batch)
        p = {k: x - 0.1 * psum(grads[k], dp) for k, x in state["p"].items()}
        return {**state, "p": p}, metrics

    return step


def by_hand(update, mesh: Mesh):
    """A step that is written whole: `update(state, batch, dp, tp) -> (state, metrics)`."""
    axes = Axes(mesh)
    return lambda state, batch: update(state, batch, axes["dp"], axes["tp"])
