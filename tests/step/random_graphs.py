"""Random functions of sharded, replicated and pending arrays, with collectives anywhere: mostly wrong ones, some right.

A program is a list of instructions that name no size of a rank: on one rank, where collectives do nothing, the same
program says what is right. Instructions that do not fit what they are given there are left out.
"""

import random
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fmegatron.collectives import Axes, all_gather, axis_index, enter, pmax, ppermute, psum, reduce_scatter, shard
from fmegatron.layout import Layout, Mesh

MESH = Mesh(dp=2, tp=3)
SHAPES = {"x": (12, 24), "y": (12, 24), "w": (24, 12), "v": (24,), "n": ()}
SPECS = ((), ("dp",), ("tp",), (None, "dp"), (None, "tp"), ("dp", "tp"), ("tp", "dp"), (("dp", "tp"),))
MOVES = (
    *(lambda x, a: x.transpose(0, -1), lambda x, a: x.unsqueeze(a.dim), lambda x, a: x.flatten()),
    *(lambda x, a: x.unflatten(-1, (-1, 2)), lambda x, a: x.flip(a.dim), lambda x, a: x.roll(1, a.dim)),
    *(lambda x, a: x.chunk(2, a.dim)[a.k % 2], lambda x, a: x.narrow(a.dim, 0, 2), lambda x, a: x.select(a.dim, a.k)),
    *(lambda x, a: x.repeat(2, *(1,) * (x.dim() - 1)), lambda x, a: x.unsqueeze(0).expand(3, *x.shape)),
    *(lambda x, a: F.pad(x, (1, 1)), lambda x, a: x.tril(), lambda x, a: x.diagonal(), lambda x, a: x.squeeze()),
    *(lambda x, a: sum(x.unbind(a.dim)), lambda x, a: torch.stack(x.split(2, a.dim)).sum(0), lambda x, a: x.clone()),
)
ELEMENTS = (
    *(lambda x, a: x.tanh(), lambda x, a: x.sin(), lambda x, a: x.abs(), lambda x, a: -x, lambda x, a: x.square()),
    *(lambda x, a: x.relu(), lambda x, a: x * 0.5, lambda x, a: x / 5, lambda x, a: x / 7, lambda x, a: x * 11),
    *(lambda x, a: x + 1, lambda x, a: x * 0, lambda x, a: x.sigmoid(), lambda x, a: x.exp().log1p()),
    *(lambda x, a: x.clamp(max=0.4), lambda x, a: (x > 0.1).to(x.dtype), lambda x, a: x.masked_fill(x > 0.3, 0.0)),
    *(lambda x, a: torch.ones_like(x), lambda x, a: x.square().add(1).rsqrt(), lambda x, a: x.detach()),
)
ROWS = (
    *(lambda x, a: x.sum(a.dim), lambda x, a: x.mean(a.dim, keepdim=True), lambda x, a: x.amax(a.dim)),
    *(lambda x, a: x.amin(a.dim, keepdim=True), lambda x, a: x.softmax(a.dim), lambda x, a: x.log_softmax(a.dim)),
    *(
        lambda x, a: x.cumsum(a.dim),
        lambda x, a: x.logsumexp(a.dim),
        lambda x, a: x.norm(dim=a.dim),
        lambda x, a: x.sum(),
    ),
    *(lambda x, a: x.mean(), lambda x, a: x.sort(a.dim).values, lambda x, a: x.topk(2, a.dim).values),
    *(lambda x, a: x.max(a.dim).values, lambda x, a: x.var(a.dim, unbiased=False), lambda x, a: x.abs().max()),
    *(lambda x, a: F.layer_norm(x, x.shape[-1:]), lambda x, a: x.norm(), lambda x, a: x.unfold(a.dim, 2, 2).sum(-1)),
    *(lambda x, a: x.argmax(a.dim).double(), lambda x, a: x.gather(a.dim, x.argmax(a.dim, keepdim=True))),
    lambda x, a: torch.zeros(8, dtype=x.dtype).index_add(0, labels(x), x.flatten()),
    lambda x, a: torch.zeros(8, dtype=x.dtype).scatter_add(0, labels(x), torch.ones(x.numel(), dtype=x.dtype)),
    lambda x, a: torch.zeros(8, dtype=x.dtype).index_put((labels(x),), x.flatten(), accumulate=True),
    lambda x, a: F.one_hot(labels(x), 8).sum(0).to(x.dtype),
    lambda x, a: x[torch.arange(x.shape[0])] if x.dim() else x,
    lambda x, a: x * (torch.arange(x.shape[0]) % 5).view(-1, *(1,) * (x.dim() - 1)),
)
PAIRS = (
    *(lambda x, y, a: x + y, lambda x, y, a: x * y, lambda x, y, a: x - 0.3 * y, lambda x, y, a: x / (y.square() + 1)),
    *(lambda x, y, a: torch.maximum(x, y), lambda x, y, a: torch.where(x > y, x, y), lambda x, y, a: x @ y),
    *(
        lambda x, y, a: torch.cat([x, y], a.dim),
        lambda x, y, a: torch.stack([x, y], a.dim),
        lambda x, y, a: x @ y.transpose(-1, 0),
    ),
    *(lambda x, y, a: torch.einsum("ab,ac->bc", x, y), lambda x, y, a: torch.lerp(x, y, 0.25)),
    *(lambda x, y, a: torch.bmm(x[None], y[None])[0], lambda x, y, a: torch.outer(x.flatten()[:5], y.flatten())),
    *(
        lambda x, y, a: torch.addcmul(x, x, y),
        lambda x, y, a: (x >= y).to(x.dtype) * x,
        lambda x, y, a: torch.cdist(x, y),
    ),
    lambda x, y, a: grad(lambda x: (x @ y).tanh().sum(), x),
    lambda x, y, a: grad(lambda x: (x * y).softmax(-1).square().sum(), x),
    lambda x, y, a: grad(lambda y: psum(enter(x, a.axis) @ y, a.axis).square().sum(), y),
)
COLLECTIVES = (
    *(lambda x, a: psum(x, a.axis), lambda x, a: pmax(x, a.axis)),
    *(lambda x, a: all_gather(x, a.axis, a.dim), lambda x, a: reduce_scatter(x, a.axis, a.dim)),
    *(lambda x, a: shard(x, a.axis, a.dim), lambda x, a: ppermute(x, a.axis, 1), lambda x, a: enter(x, a.axis)),
    *(lambda x, a: x + axis_index(a.axis), lambda x, a: psum(x.sum(a.dim), a.axis), lambda x, a: -pmax(-x, a.axis)),
    lambda x, a: all_gather(x[None], a.axis, 0).sum(0),
    *(lambda x, a: psum(x.square().sum(), a.axis).sqrt(), lambda x, a: pmax(x.amax(a.dim), a.axis)),
)
SIZED = (
    *(lambda x, a: psum(x, a.axis) / a.axis.size, lambda x, a: psum(x.mean(a.dim), a.axis) / a.axis.size),
    *(lambda x, a: x / a.axis.size, lambda x, a: psum(x.mean() / a.axis.size, a.axis)),
)
KINDS = (
    (MOVES, 1, 3),
    (ELEMENTS, 1, 3),
    (ROWS, 1, 4),
    (PAIRS, 2, 4),
    (COLLECTIVES, 1, 6),
    (SIZED, 1, 1),
)  # operands, weight
MISFITS = (RuntimeError, IndexError, ValueError, TypeError)


def labels(x):
    """Whole numbers of 0 to 7 that depend on the values."""
    return (x.detach().flatten() * 997).long().abs() % 8


def grad(loss, x):
    """The gradient of a loss."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


class Arguments(NamedTuple):
    """What an instruction is given beside its operands."""

    dim: int
    k: int
    axis: object


class Program(NamedTuple):
    """layouts: of the arguments.  code: (function, operands as places from the end, dim, k, names of axes).  sized:
    whether it divides by the number of ranks, of which no type tells whether it is right.
    """

    layouts: dict
    code: list
    sized: bool


def run(code: list, given: dict, mesh: Mesh) -> torch.Tensor:
    """The last value that a program makes of its arguments."""
    values, axes = list(given.values()), Axes(mesh)
    for one in code:
        values.append(_value(one, values, axes))
    return values[-1]


def _value(instruction: tuple, values: list, axes: Axes) -> torch.Tensor:
    function, places, dim, k, names = instruction
    return function(*[values[-1 - place % len(values)] for place in places], Arguments(dim, k, axes[names]))


def _fitting(code: list) -> list:
    """The instructions that fit on one rank."""
    kept, at, axes = [], list(values(0).values()), Axes(Mesh(**dict.fromkeys(MESH.names, 1)))
    for one in code:
        try:
            out = _value(one, at, axes)
        except MISFITS:
            continue
        if 0 < out.numel() < 2000:
            kept, at = [*kept, one], [*at, out]
    return kept


def program(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    layouts = {}
    for name, shape in SHAPES.items():
        spec = r.choice(SPECS)[: len(shape)]
        used = {a for s in spec for a in (s if isinstance(s, tuple) else (s,))}
        rest = [a for a in MESH.names if a not in used]
        layouts[name] = Layout(shape, torch.float64, MESH, spec, unreduced=tuple(a for a in rest if r.random() < 0.15))
    code = []
    for _ in range(r.randint(2, 9)):
        functions, operands, _ = r.choices(KINDS, [weight for *_, weight in KINDS])[0]
        places = [min(int(r.expovariate(0.6)), 9) for _ in range(operands)]
        names = r.choice((("dp",), ("tp",), ("dp", "tp")))
        code.append((r.choice(functions), places, r.choice((0, -1)), r.randint(0, 1), names))
    closing = r.choice((None, "sum", "max", "sum", "norm"))
    for name in MESH.names if closing else ():
        code.append(({"sum": _total, "max": _top, "norm": _norm}[closing], [0], 0, 0, (name,)))
    code = _fitting(code)
    return Program(layouts, code, any(function in SIZED for function, *_ in code))


def _total(x, a):
    return psum(x.sum(), a.axis)


def _top(x, a):
    return pmax(x.max(), a.axis)


def _norm(x, a):
    return psum(x.square().sum(), a.axis).sqrt()


def values(seed: int) -> dict:
    """Global arguments, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.rand(s, generator=generator, dtype=torch.float64) - 0.4 for k, s in SHAPES.items()}
