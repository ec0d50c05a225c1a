"""Every optimizer, once, with the facts that tests want to know about it; the parameters on which they are tried."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fmegatron import optim, tree
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.optim import Group, Optimizer, contrib
from fmegatron.optim.contrib import compressed
from fmegatron.optim.contrib.formats import Bfloat16
from fmegatron.optim.guard import Spike
from fmegatron.optim.sign_descent import scale_by_lion
from fmegatron.optim.transform import chain, masked
from fmegatron.tree import ArraySpec, Normal
from tests.optim.formats import FORMATS, adamw_in, blocks


@dataclass(frozen=True)
class Row:
    """One optimizer: how it is made, the paths of its state for a fp32 parameter "w" of two dims, whether it updates
    each leaf on its own, whether its state lies as the parameters do, and how it is made for "w" alone, where the rules
    of `make` would match nothing."""

    make: Callable[[], Optimizer]
    state: set[str]
    by_leaf: bool = True
    state_like_params: bool = True
    alone: Callable[[], Optimizer] | None = None


def _clipped() -> Optimizer:
    adam = masked(optim.scale_by_adam(0.8, 0.9), ["embed", "w"])
    body = chain(adam=adam, decay=optim.add_decayed_weights(0.05))
    rate = optim.scale_by_learning_rate(optim.wsd(1e-2, 40, 10, 3))
    return optim.optimizer(clip=optim.clip_by_global_norm(0.5), body=body, rate=rate)


RULES = [
    ("embed|table", Group(lr=0.5, optimizer="lion")),
    (".*norm", Group(rate=optim.cosine(5e-2, 50), weight_decay=0.01, optimizer="adam")),
]


def _grouped(rules=tuple(RULES)) -> Optimizer:
    both = {"adam": optim.scale_by_adam(), "lion": scale_by_lion()}
    return optim.grouped(optim.wsd(2e-2, 50, 10), rules, choose=lambda path: "adam", **both)


def _guarded() -> Optimizer:
    options = {"clip_norm": 1.0, "spike": Spike(warmup=3), "loss_scale": optim.LossScale(growth_interval=4)}
    return optim.skip_nonfinite(optim.adamw(1e-2), **options)


def plain(make: Callable[..., Optimizer], *args, **options) -> Callable[..., Optimizer]:
    """`make` of these arguments."""
    return lambda: make(*args, **options)


def muon(**options) -> Optimizer:
    """Muon with everything that depends on the parameters below."""
    options = {"parts": [("blocks/0/w", 2)], "matrices": ["w$"]} | options
    return optim.muon(optim.cosine(3e-2, 50), **options)


ADAM, MOMENTUM = {"count", "adam/m/w", "adam/v/w"}, {"count", "momentum/w"}
TABLE = {
    "adamw": Row(plain(optim.adamw, 1e-2), ADAM),
    "adamw-cosine-no-decay": Row(plain(optim.adamw, optim.cosine(1e-2, 50, 5), weight_decay=0), ADAM),
    "adamw-patterns": Row(plain(optim.adamw, 1e-2, decay=["table$"]), ADAM),
    "adamw-settable": Row(plain(optim.adamw, optim.settable(1e-2)), ADAM | {"rate/settable"}),
    "sgd": Row(plain(optim.sgd, 1e-1), {"count"}),
    "sgd-momentum": Row(plain(optim.sgd, 1e-1, momentum=0.9, weight_decay=0.01), MOMENTUM),
    "sgd-nesterov": Row(plain(optim.sgd, optim.cosine(1e-1, 50), momentum=0.9, nesterov=True), MOMENTUM),
    "lion": Row(plain(optim.lion, 1e-2), {"count", "lion/w"}),
    "adafactor": Row(
        lambda: contrib.adafactor(3e-2, weight_decay=0.01, clip=2.0),
        {"count", "factored/row/w", "factored/col/w"},
        state_like_params=False,
    ),
    "muon": Row(muon, {"count", "muon/w"}),
    "muon-original-shared": Row(
        lambda: muon(scale="original", nesterov=False, share=("dp",)),
        {"count", "muon/w"},
    ),
    "soap": Row(
        lambda: contrib.soap(1e-2, matrices=["w$"], max_dim=7),
        {"count"} | {f"soap/{name}/w" for name in ("m", "v", "left", "left_basis", "right", "right_basis")},
        state_like_params=False,
    ),
    "groups": Row(_grouped, {"count", "adam/m/w", "adam/v/w"}, alone=lambda: _grouped(())),
    "guarded": Row(
        _guarded,
        {"skipped", "norm", *(f"opt/{path}" for path in ADAM), "spike/mean", "spike/seen"}
        | {f"loss_scale/{name}" for name in ("factor", "finite", "left")},
        by_leaf=False,
    ),
    "chain-of-chains": Row(_clipped, {"count", "body/adam/m/w", "body/adam/v/w"}, by_leaf=False),
}


def _state(*names: str) -> set[str]:
    """Paths of the state of "w" when these are stored in blocks."""
    return {"count"} | {f"{name}/w/{part}" for name in names for part in ("codes", "scale")}


def _row(make, rule, state) -> Row:
    """An optimizer whose state is stored by one rule."""
    return Row(lambda: compressed(make(), [rule]), state, True, False)


IN_BLOCKS = _state("adam/m", "adam/v")
COMPRESSED = {
    f"adamw-{name}": Row(adamw_in(rules), ADAM if name.startswith("bf16") else IN_BLOCKS, state_like_params=False)
    for name, rules in FORMATS.items()
}
COMPRESSED |= {
    "sgd-int8": _row(TABLE["sgd-momentum"].make, blocks(contrib.int8, "momentum"), _state("momentum")),
    "lion-fp8": _row(TABLE["lion"].make, blocks(contrib.float8, "lion"), _state("lion")),
    "adafactor-bf16": _row(TABLE["adafactor"].make, ("factored", Bfloat16()), TABLE["adafactor"].state),
    "soap-bf16": _row(TABLE["soap"].make, ("soap/(m|v)", Bfloat16()), TABLE["soap"].state),
    "muon-bf16": _row(muon, ("muon", Bfloat16()), {"count", "muon/w"}),
}
EVERY = TABLE | COMPRESSED
DTYPES = {
    "fp32": [torch.float32] * 4,
    "fp64": [torch.float64] * 4,
    "bf16": [torch.bfloat16] * 4,
    "mixed": [torch.bfloat16, torch.float32, torch.float16, torch.float64],
}
ONE = Mesh(dp=1, fsdp=1, tp=1)


def make_specs(dtypes, mesh=ONE):
    """Specs of parameters of every kind: split on two dims, interleaved, on one dim, replicated."""
    table, w, norm, scale = dtypes
    halves = Split("tp", parts=2)
    return {
        "embed": {"table": ArraySpec(Layout((8, 6), table, mesh, ("tp", "fsdp")), Normal(0.5))},
        "blocks": [
            {
                "w": ArraySpec(Layout((3, 6, 8), w, mesh, (None, "fsdp", halves)), Normal(0.5)),
                "attention_norm": ArraySpec(Layout((2, 8), norm, mesh, (None, "fsdp")), Normal(1.0)),
            }
        ],
        "scale": ArraySpec(Layout((), scale, mesh), Normal(1.0)),
    }


def make_params(dtypes):
    """The parameters of `make_specs`, whole."""
    return tree.init(make_specs(dtypes), key=0, rank=0)


def loss_of(params, step=0):
    """A quadratic with its minimum away from 0, a little different at each step."""
    return sum(((x.double() - 0.3 - 0.01 * step) ** 2).sum() for x in tree.leaves(params))


def grads_of(params, step=0):
    """Its gradient, in the parameters' dtypes."""
    return tree.map(lambda x: (2 * (x.double() - 0.3 - 0.01 * step)).to(x.dtype), params)


def run(opt, params, state, steps):
    """(params, state) after these steps."""
    for step in steps:
        params, state = opt.update(grads_of(params, step), state, params)
    return params, state


def assert_same(a, b):
    """Bit for bit, by path."""
    assert tree.paths(a) == tree.paths(b)
    for path, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, path
        assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)), path  # float8 too
