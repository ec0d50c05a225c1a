"""Rules for tensors that a step creates: constants, counters, random numbers of a seed.

Draws from a generator do not come here: a step with one is refused when it is traced (`step.purity`). Random numbers
that are a function of a key and of global positions (`nn.dropout`, integer hashes of `axis_index * n + arange`, philox
with a seed that is an argument) are ordinary arithmetic, and alike wherever key and positions are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.step.check.arithmetic import elementwise
from fmegatron.step.check.atoms import Atom, canonical, plain
from fmegatron.step.check.scope import Rules, Scope, op_name, shape_of
from fmegatron.step.check.values import Pending, Value, filled
from fmegatron.step.torch_private import outside_of_tracing


def counted(shape: Sequence[int], ramp: bool = False) -> Value:
    """A tensor made inside the step that differs along its dims: alike on all ranks, or counted in each one's part."""
    return Value(tuple(canonical((Atom(n, counted=True),)) for n in shape), ramp=ramp)


def made(constant: torch.Tensor) -> Value:
    """A tensor that the step made of Python numbers: equal on all ranks; a single number may count what a rank has."""
    if constant.numel() != 1:
        return Value(tuple(plain(n) for n in constant.shape))
    with outside_of_tracing():
        value = constant.item()
    return replace(filled(tuple(constant.shape), value), equal_terms=bool(value))


# ---- rules -----------------------------------------------------------------------------------------------------------
def constant(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """zeros, ones_like, full, fill_ ...: one number everywhere; what memory of `empty` holds counts as alike.

    The gradient of a loss that is n times too large begins as ones of the loss, and is as much too large.
    """
    name = op_name(node)
    value = given.get("fill_value", given.get("value", given.get("s")))
    value = 0 if "zero" in name else 1 if "ones" in name else value
    out = filled(shape_of(node), value if isinstance(value, (int, float)) else None)
    if not name.endswith("_like"):  # a number that the step writes may count what a rank has
        out = replace(out, equal_terms=bool(out.constant))
    if name != "ones_like" or out.dims:
        return out
    loss = given["self"]
    never = {a: "never" for a in loss.having(Pending)}
    return replace(out, excess=loss.excess, portion=never)


def counter(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """arange, eye, linspace ...: the same numbers on all ranks."""
    return counted(shape_of(node), given.get("start", 0) == 0 and given.get("step", 1) == 1 and "n" not in given)


def philox(scope: Scope, node: torch.fx.Node, given: dict) -> list[Value]:
    """Numbers from a seed and an offset that are tensors: alike wherever these are -> (numbers, next offset)."""
    source = elementwise(scope, node, "function", [given["seed"], given["offset"]])
    return [source.with_dims(plain(n) for n in node.meta["val"][0].shape), source]


RULES: Rules = MappingProxyType(
    dict.fromkeys(
        "full zeros ones empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like zero"
        " fill scalar_tensor empty_strided new_empty_strided".split(),
        constant,
    )
    | dict.fromkeys("arange iota eye linspace tril_indices triu_indices".split(), counter)
    | {"philox_rand": philox}
)
