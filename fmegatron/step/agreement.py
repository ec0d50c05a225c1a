"""Ranks agree: on the graph of a step before it is compiled, on replicas before the first update, on every call.

A rank whose constant, rows, dtypes or keys differ would run another graph than the others: they train on other numbers
in silence, or wait for each other for minutes.
"""

from __future__ import annotations

from typing import Any

import torch
import xxhash

from fmegatron import tree
from fmegatron.collectives import World, kinds
from fmegatron.layout import Layout
from fmegatron.step.ambient import Ambient, in_words
from fmegatron.step.graph.nodes import is_start, meta_text
from fmegatron.step.opaque import inline_layers
from fmegatron.step.replicas import ReplicasDifferError, compare_leaves
from fmegatron.step.torch_private import Op
from fmegatron.step.tracing import Traced

_SHOWN = 8  # elements of a constant

__all__ = ["communicates", "number_of", "require_same_graph", "require_same_replicas"]


def communicates(traced: Traced) -> bool:
    """Whether a traced function sends anything."""
    for node in inline_layers(traced.graph_module.graph).nodes:
        found = kinds.collective_of(node.target)
        if found is not None and found.sent is not None or is_start(node):
            return True
    return False


def number_of(text: str) -> int:
    """A number of 62 bits that is the same in every process."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 2


def require_same_graph(traced: Traced, leaves: list, settings: Ambient, world: World, name: str) -> tuple[bool, int]:
    """FailedOnRank, on all ranks and naming one, unless all have traced the same step of the same arguments under the
    same settings of torch; all call it. Sizes may differ where the layouts of the arguments say so. -> (whether any
    rank communicates, `number_of` it).

    leaves: of the arguments.
    """
    lines = [*in_words(settings), *_lines_of(traced, leaves)]
    number, sends = number_of("\n".join(lines)), communicates(traced)
    least, most, any_sends = world.minimum(torch.tensor([number, -number, -int(sends)])).tolist()
    if any_sends and not least == -most == number or any_sends and least != -most:
        first = world.broadcast_text("\n".join(lines)).split("\n")
        own = next(
            (i for i, (a, b) in enumerate(zip(lines, first, strict=False)) if a != b), min(len(lines), len(first))
        )
        error = None
        if lines != first:
            got, wanted = (of[own] if own < len(of) else "nothing more" for of in (lines, first))
            error = (
                f"ranks have to run the same step: got {got} here, wanted {wanted}, which rank 0 has; give all ranks "
                "batches of one shape, dtype and structure (what differs by rank in its size needs a layout that says "
                "so), the same settings of torch, and no Python number that depends on the rank "
                "(collectives.axis_index is the rank as a tensor)"
            )
        world.agree(error, f"{name}, called for the first time with this signature,")
    return bool(any_sends), number


def require_same_replicas(args: tuple, donate: tuple[int, ...], world: World, name: str) -> None:
    """ReplicasDifferError, on all ranks, where a leaf of the arguments, whose layout is known, has other bits on ranks
    that hold the same part: the donated ones first. All call it."""
    order = [*donate, *(i for i in range(len(args)) if i not in donate)]
    for i in order:
        found = [(p, x, tree.layout_of(x)) for p, x in zip(tree.paths(args[i]), tree.leaves(args[i]), strict=True)]
        known: list[tuple[str, torch.Tensor, Layout]] = [(p, x, y) for p, x, y in found if y is not None]
        difference = compare_leaves(known, world)
        if difference is None:
            continue
        path, layout, first, rank = difference
        fix = (
            "or they train two models; draw the state by the same key on all ranks (tree.init(specs, key, rank)), and "
            "read the same files"
            if i in donate
            else "as their layout says; give these ranks the same rows (loop.own_rows cuts them by the mesh), or state "
            "the layout that they have"
        )
        raise ReplicasDifferError(
            f"{path or f'argument {i}'}: got other bits of the same elements ({layout}) on ranks {first} and {rank} "
            f"when {name} was called first, wanted replicas alike, {fix}",
            path,
            (first, rank),
            0,
        )


def _lines_of(traced: Traced, leaves: list) -> list[str]:
    """What ranks must have alike, a line for each argument and each node."""
    given = iter(zip(traced.in_paths, traced.fakes, traced.in_labels, strict=True))
    lines, sizes = [], True
    for x in leaves:
        if not isinstance(x, torch.Tensor):
            lines.append(f"the constant {x!r}" if isinstance(x, int | float | str | bool | None) else f"a {type(x)}")
            continue
        path, fake, label = next(given)
        text = f"the argument {path!r} {meta_text((tuple(fake.shape), (), fake.dtype, fake.device.type))}"
        if label is not None:
            free = not label.layout.padded and not label.layout.is_even
            sizes = sizes and not free
            text = f"the argument {path!r} {label.layout}" if free else f"{text} of {label.layout}"
        lines.append(text)
    for node in inline_layers(traced.graph_module.graph).nodes:
        if node.op == "placeholder":
            continue
        called = str(node.target) if isinstance(node.target, str | Op) else getattr(node.target, "__name__", "?")
        if node.op == "call_function" and called == "constant" and not node.args:
            assert callable(node.target), "a constant is a function without arguments"
            lines.append(f"{node} = the constant {_value(node.target())} at {_used_at(node)}")
        else:
            text = f"{called}({_text(node.args, sizes)}, {_text(node.kwargs, sizes)})"
            lines.append(f"{node} = {text} at {node.meta.get('at', '?')}")
    return lines


def _used_at(node: torch.fx.Node) -> str:
    return next((at for user in node.users if (at := user.meta.get("at"))), "?")


def _value(x: Any) -> str:
    """The values of a constant, or a number of them."""
    if type(x) is not torch.Tensor:
        return type(x).__name__
    x = x.detach().cpu()
    if x.numel() <= _SHOWN:
        return str(x.tolist())
    return f"tensor {number_of(str(x.contiguous().reshape(-1).view(torch.uint8).tolist()))}"


def _text(x: Any, sizes: bool) -> str:
    if isinstance(x, list | tuple):
        return f"[{', '.join(_text(one, sizes) for one in x)}]"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{key}: {_text(one, sizes)}' for key, one in x.items())}}}"
    if isinstance(x, int) and not isinstance(x, bool):
        return str(x) if sizes else "n"
    if isinstance(x, torch.device):
        return x.type
    return str(x) if isinstance(x, float | str | bool | None | torch.fx.Node | torch.dtype) else type(x).__name__
