"""Layers as people write them elsewhere, `fn(x_BD, {"a": [D, D], "b": [D]}, *rest) -> y`; none knows of fmegatron.

By what makes them awkward to cut in two: the last op's backward reads its result (`LAST`), the result is an argument or
a view (`VIEWS`), nothing is differentiable (`CONSTANT`), and all else (`OTHERS`).
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fmegatron.step.layer import compiled_layer

B, D = 3, 4
REST = {"index": torch.tensor([2, 0, 1]), "mask": torch.eye(B, D, dtype=torch.bool), "gain": torch.tensor(0.7)}


def arguments(rows: int = B, dtype: torch.dtype = torch.float64) -> dict:
    """{"x", "s": [rows, D], "a": [D, D], "b": [D]}; x * s is what a layer is given."""
    generator = torch.Generator().manual_seed(rows)
    shapes = {"x": (rows, D), "s": (rows, D), "a": (D, D), "b": (D,)}
    return {k: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for k, shape in shapes.items()}


class Tripled(torch.autograd.Function):
    """sin, with a backward of its own that reads the result."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return 3 * g * y


def _after_linear(op):
    return lambda x, w: op(x @ w["a"] + w["b"])


# ---- the backward of the last op reads its result --------------------------------------------------------------------
LAST = {
    name: _after_linear(op)
    for name, op in {
        "tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid, "exp": torch.exp, "expm1": torch.expm1,
        "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1), "tan": torch.tan,
        "sqrt": lambda x: (x * x + 1).sqrt(), "rsqrt": lambda x: (x * x + 1).rsqrt(), "elu": F.elu,
        "reciprocal": lambda x: (x * x + 1).reciprocal(), "logsumexp": lambda x: x.logsumexp(-1),
        "norm": lambda x: x.norm(dim=-1), "cumprod": lambda x: x.cumprod(-1), "prod": lambda x: x.prod(-1),
        "amax": lambda x: x.amax(-1), "std": lambda x: x.std(-1), "power of two": lambda x: 2.0**x,
        "inverse": lambda x: torch.linalg.inv(x.t() @ x + torch.eye(D, dtype=x.dtype)),
        "cholesky": lambda x: torch.linalg.cholesky(x.t() @ x + torch.eye(D, dtype=x.dtype)),
        "distances": lambda x: torch.cdist(x, 2 * x + 1), "sort": lambda x: x.sort(-1).values,
        "hardtanh": F.hardtanh, "threshold": lambda x: F.threshold(x, 0.1, 0.0), "own function": Tripled.apply,
        "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0],
        # the result again, under another name that a compiler may drop
        "tanh, transposed": lambda x: torch.tanh(x).t(), "tanh, part": lambda x: torch.tanh(x)[1:],
        "tanh, clone": lambda x: torch.tanh(x).clone(), "tanh * 1": lambda x: torch.tanh(x) * 1,
        "tanh + 0": lambda x: torch.tanh(x) + 0, "tanh, cat of one": lambda x: torch.cat([torch.tanh(x)]),
        "tanh, there and back": lambda x: torch.tanh(x).float().double(), "tanh, all": lambda x: torch.tanh(x)[:, :],
        "tanh, unbind": lambda x: torch.tanh(x).unbind(0)[1], "softmax, row": lambda x: x.softmax(-1)[0],
        "tanh, expanded": lambda x: torch.tanh(x).sum(0).expand(B, D), "exp of a sum": lambda x: x.sum().exp(),
        "in place": lambda x: torch.sigmoid_(x * 2), "tanh as float": lambda x: torch.tanh(x).float(),
        "tanh as complex": lambda x: torch.view_as_complex(torch.tanh(x).view(-1, 2)).abs(),
        "tanh beside its square": lambda x: torch.tanh(x) ** 2 * 0 + torch.tanh(x),
    }.items()
}  # fmt: skip

# ---- the result is an argument, a view of one, or a copy that a compiler may drop ------------------------------------
VIEWS = {
    "x": lambda x, w: x, "x, flat": lambda x, w: x.view(-1), "x, transposed": lambda x, w: x.t(),
    "x, part": lambda x, w: x[1:], "x, expanded": lambda x, w: x.expand(2, *x.shape), "x * 1": lambda x, w: x * 1,
    "x, clone": lambda x, w: x.clone(), "a weight": lambda x, w: w["a"], "a weight's column": lambda x, w: w["a"][:, 1],
    "x, contiguous": lambda x, w: x.contiguous(), "x, diagonal": lambda x, w: x.diagonal(),
    "x, padded by nothing": lambda x, w: F.pad(x, (0, 0)), "dropout that is off": lambda x, w: F.dropout(x, 0.5, False),
}  # fmt: skip

# ---- nothing to differentiate ----------------------------------------------------------------------------------------
CONSTANT = {
    "detached": lambda x, w: x.detach() * 2, "detached, as float": lambda x, w: w["a"].detach().float(),
    "ones": lambda x, w: torch.ones(B, D, dtype=x.dtype),
    "argmax": lambda x, w: (x @ w["a"]).argmax(-1), "comparison": lambda x, w: x > 0,
    "float of a comparison": lambda x, w: (x @ w["a"] > 0).to(x.dtype), "without gradient": torch.no_grad()(
        lambda x, w: (x @ w["a"]).tanh()),
}  # fmt: skip


# ---- all else --------------------------------------------------------------------------------------------------------
def shifted_in_place(x, w):
    """Slices of temporaries written one by one."""
    y = x @ w["a"]
    z = torch.zeros_like(y)
    z[:, 1:] = y[:, :-1]
    z[0] = w["b"]
    z[:, ::2].mul_(2)
    return z.tanh()


def recurrent(x, w):
    """The same op three times, each reading the last one's result."""
    for _ in range(3):
        x = (x @ w["a"]).tanh()
    return x


def gradient_inside(x, w):
    """A layer that differentiates something itself, as implicit and meta-learned ones do."""
    z = x.detach().requires_grad_()
    with torch.enable_grad():
        (g,) = torch.autograd.grad((z @ w["a"].detach()).tanh().sum(), z)
    return x * g + w["b"]


def gated(x, w, mask, gain):
    """Arguments without a gradient: a mask and a 0-d number."""
    return torch.where(mask, (x @ w["a"]).sigmoid(), x * gain)


OTHERS = {
    "residual": lambda x, w: x + w["b"], "unused x": lambda x, w: w["a"].tanh(), "unused weights": lambda x, w: x * 2,
    "number": lambda x, w: (x * w["b"]).sum(), "partly detached": lambda x, w: x.detach() * w["b"] + x.tanh().detach(),
    "two equal values": lambda x, w: (x * w["b"]).sin() * (x * w["b"]).cos(),
    "a value, and times 1": lambda x, w: ((h := x * w["b"]) * 1).sin() * h.cos() * (h + 0).exp(),
    "constants": lambda x, w: x * torch.tensor([1.0, 2, 3, 4]) + torch.tanh(w["b"]) * (torch.arange(D) % 2),
    "0-d values": lambda x, w: x * w["b"].norm() / (x * x).sum().sqrt(),
    "chunks": lambda x, w: torch.cat([p.tanh() * q for p, q in zip(x.chunk(2, -1), w["b"].chunk(2), strict=True)], -1),
    "index_add": lambda x, w: torch.zeros(5, D, dtype=x.dtype).index_add(0, torch.arange(len(x)) + 1, x @ w["a"]),
    "complex inside": lambda x, w: torch.fft.rfft(x @ w["a"]).abs(), "float32 inside": lambda x, w: (
        x.float() @ w["a"].float()).double(), "softmax of masked": lambda x, w: (x @ w["a"]).masked_fill(
        torch.eye(*x.shape, dtype=torch.bool), -1e9).softmax(-1), "zeros": lambda x, w: torch.zeros_like(x) * w["b"],
    "einsum": lambda x, w: torch.einsum("bd,de->be", x, w["a"]).tanh(), "glu": lambda x, w: F.glu(x @ w["a"]),
    "convolution": lambda x, w: F.conv1d(x[:, None], w["a"][:, None, :3], padding=1).tanh(),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, w["b"], training=True),
    "layer norm": lambda x, w: F.layer_norm(x, (D,), w["b"]), "embedding": lambda x, w: F.embedding(
        (x[:, 0] > 0).long(), w["a"]) + x, "top values": lambda x, w: (x @ w["a"]).topk(2, -1).values,
    "broadcast": lambda x, w: (x[:, None] * w["a"]).exp(), "in place": shifted_in_place, "recurrent": recurrent,
    "gradient inside": gradient_inside, "checkpoint": lambda x, w: checkpoint(
        lambda x, a: (x @ a).tanh(), x, w["a"], use_reentrant=False),
    "layer inside": lambda x, w: compiled_layer("inputs")(lambda x, w: (x @ w["a"]).tanh())(x, w) * w["b"],
    "indexed": lambda x, w, index: (x @ w["a"])[index].exp(), "gated": gated,
}  # fmt: skip
GIVEN = {"indexed": ("index",), "gated": ("mask", "gain")}  # what a layer is given behind its weights

LAYERS = {
    f"{kind}: {name}": (fn, GIVEN.get(name, ()) if kind == "other" else ())
    for kind, group in (("last", LAST), ("view", VIEWS), ("constant", CONSTANT), ("other", OTHERS))
    for name, fn in group.items()
}
