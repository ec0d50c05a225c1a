"""Random pure steps: a seed draws a state, a batch and a program over them that a plain run and a jit must agree on.

All values are small whole numbers, in every dtype, so that every backend computes the same bits and what is tried is
where values lie: views, swaps, copies that change nothing, writes at indices and into temporaries, leaves without dims,
integers and bools, outputs that are inputs, several outputs that are one value, constants, nested jits and gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fmegatron.step import jit, value_and_grad
from fmegatron.step.layer import compiled_layer

__all__ = ["RandomStep", "random_step"]

SHAPES = [(), (), (3,), (3,), (3, 3), (3, 3), (3, 3), (2, 3), (2, 3), (1, 3), (4,), (0, 3)]
DTYPES = [torch.float32] * 6 + [torch.float64] * 2 + [torch.int64] * 2 + [torch.bool, torch.bfloat16, torch.int8]
Op = tuple[list[int], Callable]  # which values of the pool, and what is done with them


@dataclass
class RandomStep:
    """`(state, batch) -> (new state, outputs)`.

    names: of the leaves of the state. ops: what is computed; the results go behind the values that are there already:
    the leaves, then those of the batch. new, outs: which values come back as leaves and as outputs; outs may also hold
    constants.
    """

    seed: int
    names: list[str]
    ops: list[Op] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    outs: dict[str, Any] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)

    def __call__(self, state: dict, batch: list) -> tuple[dict, dict]:
        pool = [*(state[name] for name in self.names), *batch]
        for where, op in self.ops:
            found = op(*(pool[i] for i in where))
            pool += found if isinstance(found, (list, tuple)) else [found]
        new = {name: pool[i] for name, i in zip(self.names, self.new, strict=True)}
        return new, {key: pool[i] if type(i) is int else i for key, i in self.outs.items()}


def random_step(seed: int, length: int = 10, nested: bool = True) -> tuple[RandomStep, dict, list]:
    """(the step of a seed, a state, a batch)."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    leaves = {f"s{i}": _leaf(rng, generator) for i in range(rng.randint(2, 6))}
    batch = [torch.tensor([1, 0]), torch.randint(-3, 4, (3,), generator=generator).float(), _leaf(rng, generator)]
    step = RandomStep(seed, list(leaves))
    pool = [*leaves.values(), *batch]
    kinds = [*KINDS, *(NESTED if nested else [])]
    while len(step.ops) < length:
        kind = rng.choice(kinds)
        op = kind(rng, pool)
        if op is not None:
            where, run = op
            found = run(*(pool[i] for i in where))
            found = list(found) if isinstance(found, (list, tuple)) else [found]
            step.ops.append((where, run))
            step.code.append(f"{', '.join(f'v{len(pool) + i}' for i in range(len(found)))} = {kind.__name__}{where}")
            pool += found
    for i, leaf in enumerate(leaves.values()):
        fits = [k for k, x in enumerate(pool) if x.shape == leaf.shape and x.dtype == leaf.dtype]
        step.new.append(rng.choice(fits) if rng.random() < 0.9 else i)
    for i in range(rng.randint(0, 4)):
        step.outs[f"o{i}"] = rng.choice(
            [rng.randrange(len(pool)), rng.randrange(len(pool)), rng.choice(step.new), "text"]
        )
    return step, leaves, batch


def _leaf(rng: random.Random, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    x = torch.randint(-3, 4, shape, generator=generator).to(dtype)
    how = rng.random()
    if how < 0.1 and len(shape) == 2:
        return x.t().contiguous().t()  # other strides
    return torch.cat([x, x])[: x.shape[0]] if how < 0.2 and shape else x  # a piece of something larger


# ---- what a program is made of: kind(rng, pool) -> an op, or None where nothing fits ---------------------------------
def _one(rng, pool, fits=lambda x: True):
    found = [i for i, x in enumerate(pool) if fits(x)]
    return rng.choice(found) if found else None


def _of_one(name, fits, *choices):
    """A kind of ops of one value."""

    def kind(rng, pool):
        at = _one(rng, pool, fits)
        return None if at is None else ([at], rng.choice(choices))

    kind.__name__ = name
    return kind


def number(x):
    return x.dtype != torch.bool


def floating(x):
    return x.is_floating_point()


def matrix(x):
    return x.dim() == 2 and x.numel() > 0


def rows(x):
    return x.dim() >= 1 and x.shape[0] >= 2 and x.numel() > 0


def small(x):
    """Values stay small and whole."""
    return x.clamp(-8, 8) if x.dtype != torch.bool else x


def assigned(x, value):
    x[...] = value
    return x


pointwise = _of_one(
    "pointwise",
    number,
    lambda x: small(x + 1),
    lambda x: small(x * 2),
    lambda x: -x,
    lambda x: x.abs(),
    lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    lambda x: x > 0,
    lambda x: x.clamp(-2, 2),
    lambda x: x * 0 + 3,
)
boolean = _of_one(
    "boolean", lambda x: x.dtype == torch.bool, torch.logical_not, lambda x: x.to(torch.int64), lambda x: x & x
)
nothing = _of_one(
    "nothing",
    number,
    lambda x: x + 0,
    lambda x: x * 1,
    lambda x: x * torch.ones_like(x),
    lambda x: x.to(torch.float64).to(x.dtype),
    lambda x: x.clone(),
    lambda x: x.detach(),
    lambda x: torch.empty_like(x).copy_(x),
    lambda x: assigned(torch.zeros_like(x), x),
    lambda x: x.contiguous(),
    lambda x: x.view_as(x),
    lambda x: x.expand_as(x),
    lambda x: torch.stack([x])[0],
    lambda x: torch.cat([x.view(-1)]).view(x.shape) if x.is_contiguous() else x.clone(),
    lambda x: x.repeat([1] * x.dim()),
    lambda x: torch.where(x == x, x, 7 * x),
    lambda x: x.unsqueeze(0).squeeze(0),
)
views = _of_one(
    "views",
    lambda x: matrix(x) and x.shape[0] > 1,
    lambda x: x.t(),
    lambda x: x[1:],
    lambda x: x[:, ::2],
    lambda x: x[0],
    lambda x: x.flip(0),
    lambda x: x.roll(1, 0),
    lambda x: x.narrow(1, 0, 2),
    lambda x: x.reshape(-1),
    lambda x: x.unbind(0),
    lambda x: x.split(2),
    lambda x: x.diagonal(),
    lambda x: x.unsqueeze(1).expand(-1, 2, -1)[:, 0],
    lambda x: x.permute(1, 0).contiguous().permute(1, 0),
    lambda x: x.contiguous().view(x.shape[1], x.shape[0]),
)
vectors = _of_one(
    "vectors",
    lambda x: x.dim() == 1 and x.numel() >= 3,
    lambda x: x[1:],
    lambda x: x[0],
    lambda x: x.expand(2, -1),
    lambda x: x[:3].unsqueeze(0),
    lambda x: x.as_strided((2,), (1,), x.storage_offset() + 1) if x.stride() == (1,) else x[1:],
    lambda x: x.flip(0),
)
scalars = _of_one(
    "scalars", lambda x: x.dim() == 0, lambda x: x.expand(3), lambda x: x.view(1), lambda x: x[None, None]
)
reduced = _of_one(
    "reduced",
    lambda x: number(x) and x.numel() > 0,
    lambda x: small(x.sum()).to(x.dtype),
    lambda x: x.amax(),
    lambda x: small(x.sum(-1, keepdim=True)).to(x.dtype) if x.dim() else x + 0,
    lambda x: x.reshape(-1).sort().values,
    lambda x: small(x.reshape(-1).cumsum(0)).to(x.dtype),
)


def both(rng, pool):
    """Two values of one shape and dtype."""
    at = _one(rng, pool, number)
    other = _one(rng, pool, lambda x: at is not None and x.shape == pool[at].shape and x.dtype == pool[at].dtype)
    ops = [
        lambda x, y: small(x + y),
        lambda x, y: small(x * y),
        lambda x, y: x - y + y,
        torch.maximum,
        lambda x, y: torch.where(x > y, x, y),
        lambda x, y: torch.cat([x[None], y[None]])[1],
        lambda x, y: (y, x),
        lambda x, y: x.clone().copy_(y),
        lambda x, y: small(x.clone().add_(y)),
        lambda x, y: torch._foreach_add([x, y], 0),
    ]
    return None if at is None else ([at, other], rng.choice(ops))


def broadcast(rng, pool):
    """A matrix and a row, or anything and a value without dims."""
    at = _one(rng, pool, lambda x: floating(x) and x.dim() == 2 and x.shape[1] == 3)
    row = _one(rng, pool, lambda x: at is not None and x.dtype == pool[at].dtype and x.shape in ((), (3,), (1, 3)))
    return None if row is None else ([at, row], rng.choice([lambda x, y: small(x + y), lambda x, y: small(x * y)]))


def product(rng, pool):
    at = _one(rng, pool, lambda x: matrix(x) and x.dtype in (torch.float32, torch.float64))
    return None if at is None else ([at], lambda x: small(x @ x.t()))


def at_indices(rng, pool):
    """Reads and writes at indices; the batch's first leaf is two different ones."""
    at = _one(rng, pool, lambda x: rows(x) and number(x))
    index = next(i for i, x in enumerate(pool) if x.dtype == torch.int64 and x.shape == (2,))
    ops = [
        lambda x, i: x.index_put((i % 2,), x[:2] * 0 + 5),
        lambda x, i: small(x.index_put((i % 2,), x[:2], accumulate=True)),
        lambda x, i: assigned_at(x.clone(), i % 2, 4),
        lambda x, i: x.index_copy(0, i % 2, x[-2:].clone()),
        lambda x, i: small(x.index_add(0, i % 2, x[:2])),
        lambda x, i: x.index_fill(0, i % 2, 2),
        lambda x, i: x.index_select(0, i % 2),
        lambda x, i: x[i % 2],
        lambda x, i: x.slice_scatter(x[:1] * 0, 0, 1, 2),
        lambda x, i: x.select_scatter(x[0], 0, 1),
        lambda x, i: x.put(i % 2, x.reshape(-1)[:2]),
        lambda x, i: x.scatter(0, torch.zeros_like(x[:1], dtype=torch.int64), x[:1] + 0),
        lambda x, i: x.masked_fill(x > 1, 0),
        lambda x, i: assigned_at(x.clone().t(), ..., 1).t() if x.dim() == 2 else x + 0,
        lambda x, i: torch.zeros_like(x).index_copy_(0, i % 2, x[:2]),
    ]
    return None if at is None else ([at, index], rng.choice(ops))


def assigned_at(x, at, value):
    x[at] = value
    return x


def in_place(rng, pool):
    """A temporary that is changed, as a whole, in part, or through a view."""
    at = _one(rng, pool, lambda x: number(x) and x.numel() > 0)

    def through_a_view(x):
        y = x.clone(memory_format=torch.contiguous_format)
        y.view(-1)[:1].fill_(3)
        return y

    def and_a_view(x):
        y = x.clone(memory_format=torch.contiguous_format)
        view = y.view(-1)
        y.mul_(0).add_(2)
        return y, view

    ops = [lambda x: x.clone().zero_(), lambda x: small(x.clone().add_(1)), through_a_view, and_a_view]
    return None if at is None else ([at], rng.choice(ops))


def constant(rng, pool):
    ops = [
        lambda: torch.full((3,), 2.0),
        lambda: torch.tensor([1.0, 2.0, 3.0]),
        lambda: torch.zeros(()),
        lambda: torch.arange(3),
    ]
    return [], rng.choice(ops)


# ---- graphs inside ---------------------------------------------------------------------------------------------------
def nested_jit(rng, pool):
    """A jit inside, which is compiled by the backend of the one around it; no output of it is one of its inputs."""
    at = _one(rng, pool, number)
    ops = [
        lambda x: (small(x + 1), x * 1),
        lambda x: [small(x + 1)] * 2,
        lambda x: (x.clone(), (x + 1).reshape(-1), (x + 1)),
        lambda x: torch.zeros_like(x).copy_(x),
        lambda x: (x + 1).expand(2, *x.shape),
    ]
    return None if at is None else ([at], jit(rng.choice(ops), backend="eager"))


def gradient(rng, pool):
    """Gradients that may be an input, a constant, or the same for two parameters; the loss; and an aux."""
    at = _one(rng, pool, lambda x: x.dtype in (torch.float32, torch.float64) and x.dim() == 2)
    losses = [
        lambda p, x: ((p["w"] * x).sum(), {}),
        lambda p, x: ((p["w"] + p["v"]).sum(), {"n": x.sum().clamp(-8, 8)}),
        lambda p, x: ((p["w"] * p["v"]).sum() * 0.5, {}),
        lambda p, x: ((p["w"] - x).abs().sum(), {}),
    ]
    layers = [lambda x, w: x * w["w"], lambda x, w: x + w["w"] - w["v"], lambda x, w: (x @ x.t() @ w["w"]).clamp(-2, 2)]
    layer = compiled_layer(rng.choice(["mincut", "inputs", "all", 0.5]))(rng.choice(layers))
    losses += [lambda p, x: (layer(x, p).sum(), {}), lambda p, x: (layer(layer(x, p), p).sum(), {})]
    loss, as_jit = rng.choice(losses), rng.random() < 0.3

    def grads(w, x):
        (value, aux), found = value_and_grad(loss)({"w": w, "v": w + 1}, x)
        return [small(value), *map(small, found.values()), *aux.values()]

    other = _one(rng, pool, lambda x: at is not None and x.shape == pool[at].shape and x.dtype == pool[at].dtype)
    return None if at is None else ([at, other], jit(grads, backend="eager") if as_jit else grads)


KINDS = [pointwise, boolean, nothing, nothing, views, views, vectors, scalars, reduced, both, both, broadcast, product]
KINDS += [at_indices, at_indices, in_place, constant]
NESTED = [nested_jit, gradient]
