"""Random layers: a seed draws arguments and a program over them, to be compiled and compared with autograd.

Programs are made of what is awkward to cut into a forward and a backward: results that the backward reads, views,
copies that change nothing, writes into temporaries and into views of them, values without dims, whole numbers,
constants, parts without a gradient, layers and gradients inside. Any value may be the result: an argument too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fmegatron import tree
from fmegatron.tree.structure import flatten
from tests.step.random_layer_ops import KINDS, PREPARE, detached, has_gradient

__all__ = ["POLICIES", "RandomLayer", "gradients", "random_layer"]

POLICIES = {
    "inputs": "inputs", "mincut": "mincut", "all": "all", "a third": 0.3, "none of it": 0.0,
    "products": lambda node: node.target is torch.ops.aten.mm.default,
}  # fmt: skip
SHAPES = [(), (3,), (3,), (4,), (3, 4), (3, 4), (3, 4), (4, 4), (4, 4), (1, 4), (2, 3, 4), (0, 4)]
LARGEST = 30.0  # of the values of a program, so that rounding stays small


@dataclass
class RandomLayer:
    """`fn(x, weights, *rest, mask) -> y`, its `prepare`, and the arguments of two calls.

    ops: what is computed, each (which values of the pool, a function of them); the pool begins with the leaves of the
    arguments. result: which value is returned. rounding: relative, of the narrowest dtype in it.
    """

    seed: int
    calls: list[tuple]
    prepare: Callable | None
    ops: list[tuple] = field(default_factory=list)
    result: int = 0
    rounding: float = 1e-8
    code: list[str] = field(default_factory=list)

    def fn(self, *args, **named):
        pool = tree.leaves((args, named))
        for where, op in self.ops:
            found = op(*(pool[i] for i in where))
            pool += found if isinstance(found, list | tuple) else [found]
        return pool[self.result]

    def plain(self, x, shards, *rest, **named):
        return self.fn(x, shards if self.prepare is None else self.prepare(shards), *rest, **named)

    def expected(self) -> dict:
        """`gradients` of the plain layer. Whether results have one is left out where `prepare` detaches the weights:
        the compiled one then may have a gradient, of zeros."""
        found = gradients(self.plain, self.calls)
        return {k: v for k, v in found.items() if k != "has a gradient" or self.prepare is not detached}

    def __str__(self) -> str:
        names = [f"{path}{list(t.shape)}" for path, t in zip(*flatten(self.calls[0])[:2], strict=True)]
        return "\n".join([f"seed {self.seed}: pool {names}", *self.code, f"return v{self.result}"])


def random_layer(seed: int, length: int = 8) -> RandomLayer:
    """The layer of a seed. Autograd takes its gradients; programs for which it refuses to are drawn again."""
    for attempt in range(1000):
        layer = _draw(seed, random.Random(f"{seed}.{attempt}"), length)
        try:
            found = gradients(layer.plain, layer.calls)
        except RuntimeError:  # a value that the backward needs was written over
            continue
        if all(t.isfinite().all() and t.double().abs().max() < 1e6 for t in tree.leaves(found) if t.numel()):
            return layer
    raise AssertionError(f"seed {seed}: no program")


def gradients(layer: Callable, calls: list[tuple], spoil: bool = False) -> dict:
    """Results of a layer at two calls, the second with what was made of the first, whether they have gradients, the
    gradients of a number that depends on both, and the arguments afterwards.

    spoil: write over the results before the backward; a compiler may do so with memory that nothing else uses.
    """
    (x, shards, *rest), (again, others, *_) = calls
    *rest, named = rest
    given = tree.map(lambda t: t.clone().requires_grad_(has_gradient(t)), {"x": x, "w": shards, "again": again})
    first = layer(_used(given["x"]), given["w"], *rest, **named)
    other = tree.map(lambda a, b: a * 0.5 + b * 0.5 if has_gradient(a) else a, given["w"], others)
    second = layer(_shifted(given["again"], first), other, *rest, **named)
    total = given["x"].double().sum() + sum(_weighed(y) for y in (first, second))
    results = [y.detach().clone() for y in (first, second)]
    if spoil:
        with torch.no_grad():
            for y in (first, second):
                y.detach().zero_()
    leaves = tree.leaves(given)
    wanted = [t for t in leaves if t.requires_grad]
    found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    grads = [next(found) if t.requires_grad else None for t in leaves]
    grads = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]
    return {
        "y": results,
        "has a gradient": [torch.tensor(y.requires_grad) for y in (first, second)],
        "gradients": dict(zip(tree.paths(given), grads, strict=True)),
        "arguments": tree.map(lambda t: t.detach().clone(), given),
    }


def _used(x):
    return x * 1.25 if has_gradient(x) else x


def _shifted(x, y):
    """x, moved by what was made of y."""
    return x + (0.1 * y.double() + 0.1).sin().sum() * 0.01 if has_gradient(x) else x


def _weighed(y):
    """A number that depends on each element of y in another way, and whose gradient does not read y."""
    return (y.double() * (torch.arange(y.numel(), dtype=torch.float64).view(y.shape) * 0.7 + 0.3).cos()).sum()


# ---- programs --------------------------------------------------------------------------------------------------------
def _draw(seed: int, rng: random.Random, length: int) -> RandomLayer:
    generator = torch.Generator().manual_seed(rng.randrange(2**40))
    calls = _draw_arguments(rng, generator)
    prepare = rng.choice(PREPARE) if rng.random() < 0.3 else None
    layer = RandomLayer(seed, calls, prepare)
    pools = [tree.leaves((x, w if prepare is None else prepare(w), *rest)) for x, w, *rest in calls]
    arguments = len(pools[0])
    while len(layer.ops) < length:
        kind = rng.choice(KINDS)
        chosen = kind(rng, pools[0], arguments)
        if chosen is None:
            continue
        where, op = chosen
        try:
            found = [op(*(pool[i] for i in where)) for pool in pools]
        except (RuntimeError, IndexError):  # it does not take these shapes
            continue
        found = [list(f) if isinstance(f, list | tuple) else [f] for f in found]
        if all(_tame(t) for f in found for t in f):
            names = ", ".join(f"v{len(pools[0]) + i}" for i in range(len(found[0])))
            line = op.__code__.co_firstlineno if hasattr(op, "__code__") else op
            layer.ops.append((where, op))
            layer.code.append(f"{names} = {kind.__name__} (line {line}) of {where}")
            for pool, values in zip(pools, found, strict=True):
                pool += [t.detach() for t in values]
    layer.rounding = 1e-3 if any(t.dtype == torch.float32 for t in pools[0]) else layer.rounding
    n = len(pools[0])
    layer.result = rng.randrange(n) if rng.random() < 0.3 else rng.randrange(max(arguments, n - 3), n)
    return layer


def _draw_arguments(rng: random.Random, generator: torch.Generator) -> list[tuple]:
    """(x, weights, index, gain, {"mask"}) twice, alike in shapes, dtypes and strides."""
    shapes = {name: rng.choice(SHAPES) for name in ["x", *"abcd"[: rng.randint(0, 4)]]}
    transposed = {name for name, shape in shapes.items() if len(shape) == 2 and rng.random() < 0.15}
    narrow = {name for name in shapes if rng.random() < 0.3} if rng.random() < 0.2 else set()
    ids, count = rng.random() < 0.1, rng.random() < 0.1

    def draw(name, shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = x.t().contiguous().t() if name in transposed else x
        return x.float() if name in narrow else x

    calls = []
    for _ in range(2):
        values = {name: draw(name, shape) for name, shape in shapes.items()}
        x = values.pop("x")
        x = torch.randint(0, 3, x.shape, generator=generator) if ids else x  # as an embedding takes them
        weights = values | ({"count": torch.tensor(3)} if count else {})
        index, gain = torch.randint(0, 3, (3,), generator=generator), draw("gain", ())
        calls.append((x, weights, index, gain, {"mask": torch.rand((3, 4), generator=generator) > 0.5}))
    return calls


def _tame(t) -> bool:
    return isinstance(t, torch.Tensor) and (
        t.numel() == 0 or bool(t.isfinite().all()) and float(t.double().abs().max()) < LARGEST
    )
