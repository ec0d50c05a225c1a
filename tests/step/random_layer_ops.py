"""What the programs of random layers are made of: kinds of ops that are awkward to cut into a forward and a backward.

A kind is `kind(rng, pool, arguments) -> (which values of the pool, a function of them)`, or None where nothing fits.
The first `arguments` values of the pool are the layer's arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fmegatron.step.layer import compiled_layer
from tests.step.foreign_layers import Tripled

__all__ = ["KINDS", "PREPARE", "detached", "has_gradient"]


def has_gradient(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def detached(w):
    return {k: t.detach() for k, t in w.items()}


PREPARE = [
    lambda w: w,
    lambda w: dict(reversed(w.items())),
    lambda w: {k: t.clone() for k, t in w.items()},
    lambda w: {k: t * 0.5 if has_gradient(t) else t for k, t in w.items()},
    lambda w: {k: t.t() for k, t in w.items() if t.dim() == 2},
    lambda w: [torch.cat([t, t]) for t in w.values() if t.dim()],
    lambda w: {k: t.double().sum() for k, t in w.items()},
    detached,
]


def _one(rng, found):
    """One of them, mostly a late one: so programs are deep."""
    return rng.choice(found[-3:] if rng.random() < 0.6 else found)


def _of_one(name: str, fits: Callable, *choices: Callable) -> Callable:
    def kind(rng, pool, arguments):
        found = [i for i, t in enumerate(pool) if fits(t)]
        return ([_one(rng, found)], rng.choice(choices)) if found else None

    kind.__name__ = name
    return kind


def real(t):
    return t.is_floating_point()


def filled(t):
    return real(t) and t.numel() > 0 and t.dim() > 0


def matrix(t):
    return filled(t) and t.dim() == 2


pointwise = _of_one(
    "pointwise",
    real,
    torch.tanh,
    torch.relu,
    torch.sigmoid,
    lambda x: x.clamp(max=3).exp(),
    torch.sin,
    F.gelu,
    F.silu,
    F.elu,
    lambda x: x * x,
    lambda x: (x * x + 1).sqrt(),
    lambda x: (x * x + 1).rsqrt(),
    lambda x: (x * x + 1).reciprocal(),
    lambda x: (x * x + 0.5).log(),
    lambda x: x.abs(),
    lambda x: -x * 0.5 + 1,
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: x.clamp(-1, 1),
    lambda x: 2.0 ** x.clamp(-2, 2),
    lambda x: F.dropout(x, 0.5, False),
)
over_a_dim = _of_one(
    "over_a_dim",
    filled,
    lambda x: x.softmax(-1),
    lambda x: x.softmax(0),
    lambda x: x.log_softmax(-1),
    lambda x: x.logsumexp(-1),
    lambda x: x.cumsum(-1),
    lambda x: x.tanh().cumprod(-1),
    lambda x: x.sort(-1).values,
    lambda x: x.amax(-1, keepdim=True),
    lambda x: x.max(-1),
    lambda x: x.topk(2, -1),
    lambda x: x.norm(dim=-1),
    lambda x: x.tanh().prod(-1),
    lambda x: x.mean(0),
    lambda x: x.std(-1),
    lambda x: x.sum(0, keepdim=True),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=0.1),
)
numbers = _of_one(
    "numbers", real, lambda x: x.sum(), lambda x: (x * x).mean(), lambda x: (x * x + 1).sum().sqrt(), torch.mean
)
without_dims = _of_one(
    "without_dims",
    lambda t: real(t) and t.dim() == 0,
    lambda x: x.expand(3, 4),
    lambda x: x.view(1),
    lambda x: x[None, None] * torch.ones(3, 1, dtype=x.dtype),
    lambda x: x.tanh(),
    lambda x: torch.stack([x, x * 2, x]),
    lambda x: torch.full((3, 4), 2.0, dtype=x.dtype) * x,
)
copies = _of_one(
    "copies",
    real,
    lambda x: x * 1,
    lambda x: x + 0,
    lambda x: x.clone(),
    lambda x: x.contiguous(),
    lambda x: x.detach(),
    lambda x: x.detach() * 2,
    lambda x: x.view_as(x),
    lambda x: torch.cat([x]) if x.dim() else x.clone(),
    lambda x: torch.stack([x])[0],
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: torch.zeros_like(x).copy_(x),
    lambda x: x.float(),
    lambda x: x.double(),
    lambda x: torch.where(x == x, x, 7 * x),
    lambda x: torch.no_grad()(torch.tanh)(x),
)
views = _of_one(
    "views",
    filled,
    lambda x: x[1:],
    lambda x: x[0],
    lambda x: x[..., ::2],
    lambda x: x.transpose(0, -1),
    lambda x: x.reshape(-1),
    lambda x: x.flatten(),
    lambda x: x.unsqueeze(-1),
    lambda x: x.squeeze(),
    lambda x: x.expand(2, *x.shape),
    lambda x: x.unsqueeze(1).expand(-1, 2, *x.shape[1:])[:, 0],
    lambda x: x.unbind(0),
    lambda x: x.split(2),
    lambda x: x.chunk(2, -1),
    lambda x: x.flip(0),
    lambda x: x.roll(1, -1),
    lambda x: x.narrow(-1, 1, 2),
    lambda x: x.view(-1, 2),
    lambda x: x.movedim(0, -1),
    lambda x: x.unfold(-1, 2, 1),
    lambda x: F.pad(x, (0, 0)),
    lambda x: F.pad(x, (1, 0)),
)
of_matrices = _of_one(
    "of_matrices",
    matrix,
    lambda x: x.t(),
    lambda x: x.diagonal(),
    lambda x: x @ x.t() * 0.1,
    lambda x: torch.einsum("ij,kj->ik", x, x) * 0.1,
    lambda x: x.tril(),
    lambda x: torch.linalg.inv(x @ x.t() + torch.eye(len(x), dtype=x.dtype)),
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0],
    lambda x: torch.fft.rfft(x).abs(),
    lambda x: torch.view_as_real(torch.view_as_complex(x.contiguous().view(-1, 2)) * 1j),
    lambda x: x.as_strided((2, 2), (1, x.shape[1]), 1) if x.is_contiguous() else x.t(),
    lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 2, dtype=x.dtype)),
)


def _in_steps(x):
    y = torch.zeros_like(x)
    y[..., 1:] = x[..., :-1]
    y[0] = 0.5
    y.view(-1)[:2].mul_(2)
    return y.tanh()


def _beside_its_view(x):
    y = x * 2
    view = y[..., :2]
    y.mul_(0.5).add_(1)
    return y, view


in_place = _of_one(
    "in_place",
    filled,
    _in_steps,
    _beside_its_view,
    lambda x: torch.sigmoid_(x * 2),
    lambda x: torch.relu_(x + 0),
    lambda x: (x * 1).masked_fill_(x > 0.5, 0.0),
    lambda x: x.clone().index_fill_(0, torch.tensor([0]), 0.5),
    lambda x: x.clone().t_() if x.dim() == 2 else x.clone().unsqueeze_(0),
    lambda x: x.clone().fill_(0.3),
    lambda x: torch.empty_like(x).copy_(x).mul_(x),
    lambda x: (x + 1).detach().mul_(2),
)


def _written(change):
    """Changes a value that others may look at too; nothing comes back."""

    def op(x):
        change(x)
        return []

    op.__code__ = op.__code__.replace(co_firstlineno=change.__code__.co_firstlineno)
    return op


WRITES = [_written(lambda x: x.mul_(0.5)), _written(lambda x: x[..., :1].zero_()), _written(lambda x: x.clamp_(-1, 1))]


def written(rng, pool, arguments):
    """A value of the program changes where it lies; never an argument or a view of one."""
    given = {t.untyped_storage().data_ptr() for t in pool[:arguments]}
    found = [
        i for i, t in enumerate(pool) if i >= arguments and filled(t) and t.untyped_storage().data_ptr() not in given
    ]
    return ([_one(rng, found)], rng.choice(WRITES)) if found else None


def both(rng, pool, arguments):
    """Two values that broadcast."""
    ops = [
        lambda x, y: x + y,
        lambda x, y: x * y,
        lambda x, y: x - y.tanh(),
        lambda x, y: x / (y * y + 1),
        torch.maximum,
        lambda x, y: torch.where(x > y, x, y),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.stack([x, y])[1],
        lambda x, y: (x * 1).add_(y),
        lambda x, y: x.clone().copy_(y),
        lambda x, y: x * 0 + y,
        lambda x, y: (y, x),
        lambda x, y: torch.addcmul(x, x, y),
        lambda x, y: x * y.detach(),
        lambda x, y: (x - y.detach()).square().mean(),
        lambda x, y: torch.lerp(x, y, 0.3),
    ]
    found = [i for i, t in enumerate(pool) if real(t)]
    at = _one(rng, found)
    fits = [i for i in found if _broadcasts(pool[i], pool[at])]
    return [at, _one(rng, fits)], rng.choice(ops)


def _broadcasts(a, b):
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.shape), reversed(b.shape), strict=False))


def product(rng, pool, arguments):
    ops = [
        lambda x, y: x @ y * 0.5,
        lambda x, y: F.linear(x, y.t()) * 0.5,
        lambda x, y: torch.einsum("...i,ij->...j", x, y) * 0.5,
        lambda x, y: (x @ y * 0.5).softmax(-1),
        lambda x, y: torch.addmm(x[:1, :1], x, y),
    ]
    pairs = [(i, k) for i, x in enumerate(pool) for k, y in enumerate(pool) if real(x) and x.dim() and matrix(y)]
    pairs = [(i, k) for i, k in pairs if pool[i].shape[-1] == pool[k].shape[0] and pool[i].dtype == pool[k].dtype]
    return (list(_one(rng, pairs)), rng.choice(ops)) if pairs else None


def at_indices(rng, pool, arguments):
    """A value and an argument of three whole numbers below three."""
    ops = [
        lambda x, i: x[i % len(x)],
        lambda x, i: x.index_select(0, i % len(x)),
        lambda x, i: torch.zeros_like(x).index_add(0, i % len(x), x[:1].expand(3, *x.shape[1:])),
        lambda x, i: x.index_put((i % len(x),), x[:1] * 0.5, accumulate=True),
        lambda x, i: F.embedding(i % len(x), x),
        lambda x, i: x.gather(-1, i.expand(*x.shape[:-1], 3) % x.shape[-1]),
        lambda x, i: x.scatter_add(0, (i % len(x)).view(3, *[1] * (x.dim() - 1)), x[:1].tanh().expand(3, *x.shape[1:])),
        lambda x, i: F.one_hot(i, 4).to(x.dtype) * x[..., :1].sum(),
        lambda x, i: x.index_copy(0, i[:1] % len(x), x[-1:]),
    ]
    found = [k for k, t in enumerate(pool) if filled(t)]
    index = [k for k, t in enumerate(pool) if t.dtype == torch.int64 and t.shape == (3,) and k < arguments]
    return ([_one(rng, found), index[-1]], rng.choice(ops)) if found else None


def masked(rng, pool, arguments):
    ops = [
        lambda x, m: torch.where(m, x, x * 0.5),
        lambda x, m: x.masked_fill(m, -1.0),
        lambda x, m: x * m,
        lambda x, m: x.masked_fill(m, -20.0).softmax(-1),
        lambda x, m: (x * 1).masked_fill_(m, 0.0),
    ]
    found = [k for k, t in enumerate(pool) if real(t) and _broadcasts(t, torch.empty(3, 4))]
    masks = [k for k, t in enumerate(pool) if t.dtype == torch.bool and t.shape == (3, 4)]
    return ([_one(rng, found), rng.choice(masks)], rng.choice(ops)) if found else None


whole_numbers = _of_one(
    "whole_numbers",
    filled,
    lambda x: x.argmax(-1),
    lambda x: x > 0,
    lambda x: (x > 0).to(x.dtype),
    lambda x: (x * 2).round().long(),
    lambda x: x.detach().argsort(-1),
)


def constant(rng, pool, arguments):
    ops = [
        lambda: torch.full((3,), 2.0, dtype=torch.float64),
        lambda: torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        lambda: torch.zeros((), dtype=torch.float64),
        lambda: torch.arange(3),
        lambda: torch.eye(4, dtype=torch.float64),
    ]
    return [], rng.choice(ops)


def _gradient_inside(x):
    z = x.detach().requires_grad_()
    with torch.enable_grad():
        (g,) = torch.autograd.grad(z.tanh().sum(), z)
    return x * g


inside = _of_one(
    "inside",
    real,
    Tripled.apply,
    _gradient_inside,
    lambda x: checkpoint(lambda x: x.tanh() * x, x, use_reentrant=False),
    lambda x: compiled_layer("inputs")(lambda x, w: (x * 1.5).tanh())(x, {}),
    lambda x: compiled_layer("all")(lambda x, w: w["w"].tanh() * x)(x, {"w": x}),
)
KINDS = [pointwise] * 4 + [over_a_dim] * 2 + [views] * 3 + [copies] * 3 + [both] * 3 + [in_place] * 2
KINDS += [numbers, without_dims, of_matrices, written, product, at_indices, masked, whole_numbers, constant, inside]
