"""Purity of a traced step: refuses in-place writes to arguments, hidden tensors, and randomness without keys."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator, Set
from typing import Any

import torch

from fmegatron import tree
from fmegatron.collectives import torch_private
from fmegatron.step.graph.nodes import storage_of, written_by
from fmegatron.step.torch_private import FakeTensor, Op, outside_of_tracing
from fmegatron.tree import structure

__all__ = ["generators_kept", "require_keyed", "require_no_generator", "require_no_hidden_tensors", "require_pure"]

_FIX = (
    "draw by a key, as a function of the position in the global array: nn.dropout(x, rate, key=..., count=...), "
    "nn.uniform, nn.normal (fmegatron.nn)"
)
_SWITCHES = ("train", "training")
_RATES = ("dropout_p", "dropout", "p")
_KEYED = frozenset({"rngprims::philox_rand"})  # seed and offset are tensors


def require_no_hidden_tensors(paths: list[str], leaves: list, name: str) -> None:
    """ValueError, naming the leaf, for what a step returns that is no tree and holds tensors: after the trace they are
    fakes, and no call would fill them in."""
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) and _hides_tensors(leaf):
            raise ValueError(
                f"{name}: its result{f' {path!r}' if path else ''}: got {structure.in_words(leaf)}, wanted tensors in "
                "dicts, lists, tuples or NamedTuples; return those, and make sets, objects or iterators of them outside"
            )


def _hides_tensors(x: Any, depth: int = 4) -> bool:
    """Whether a leaf makes tensors when it is read (an iterator, a coroutine) or holds some."""
    if isinstance(x, FakeTensor | Iterator | Awaitable):
        return True
    if depth == 0 or isinstance(x, type | torch.Tensor):
        return False
    held = x if isinstance(x, Set) else list(getattr(x, "__dict__", {}).values())
    return any(_hides_tensors(leaf, depth - 1) for leaf in tree.leaves(list(held)))


def require_pure(graph_module, in_paths) -> None:
    """A step may write into its own temporaries, never into an argument: ValueError naming leaf and line."""
    owner = {}
    for node, path in zip(graph_module.graph.find_nodes(op="placeholder"), in_paths, strict=True):
        owner[storage_of(node.meta["val"])] = path
    for node in graph_module.graph.nodes:
        for source in written_by(node):
            value = source.meta.get("val")
            if isinstance(value, FakeTensor) and storage_of(value) in owner:
                raise ValueError(
                    f"argument {owner[storage_of(value)]!r}: got {node.target} in place at {node.meta.get('at', '?')}, "
                    "wanted it unchanged, as a step is pure; return the new value instead (jit(..., donate=...) reuses "
                    "the memory)"
                )


def require_keyed(graph_module: torch.fx.GraphModule, name: str) -> None:
    """ValueError, naming op and line, for a graph that draws from torch's generators.

    What these hold depends on process, mesh and what was drawn before, is not in the state of a run, and is not resumed
    with it. Ops that could draw and do not are right: dropout and attention with a rate of 0, or not in training.
    """
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and _draws(node):
            raise ValueError(
                f"{name}: got {node.target} at {node.meta.get('at', '?')}, which draws from a generator of torch, "
                f"wanted numbers that are the same on every mesh and restored with a checkpoint; {_FIX}"
            )


def require_no_generator(paths: list[str], leaves: list, name: str) -> None:
    """ValueError, naming the leaf, for a torch.Generator among the arguments of a step."""
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, torch.Generator):
            raise ValueError(
                f"{name}: argument {path!r}: got a torch.Generator, wanted a key, as no step can return the state of a "
                f"generator; {_FIX}"
            )


def _draws(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, Op) or (schema := torch_private.schema_of(node.target)).name in _KEYED:
        return False
    takes_one = any("Generator" in str(argument.type) for argument in schema.arguments)
    if not takes_one and torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    given = _given(node, schema)
    off = any(given.get(name) is False for name in _SWITCHES)
    return not off and not any(isinstance(given.get(name), (int, float)) and given[name] == 0 for name in _RATES)


def _given(node: torch.fx.Node, schema: torch.FunctionSchema) -> dict[str, Any]:
    """The arguments of a node by name, defaults included."""
    arguments = schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return given | dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs


# ---- the default generators ------------------------------------------------------------------------------------------
@contextlib.contextmanager
def generators_kept(name: str):
    """ValueError for a step that seeds torch's default generators while it is traced; they are as before then.

    (What other threads draw meanwhile changes no seed.)
    """
    with outside_of_tracing():
        before = [(g, g.initial_seed(), g.get_state()) for g in _default_generators()]
    seeded = False
    try:
        yield
    finally:
        with outside_of_tracing():
            for generator, seed, state in before:
                if _was_seeded(generator, seed, state):
                    generator.set_state(state)
                    seeded = True
    if seeded:
        raise ValueError(
            f"{name}: got a new seed of torch's default generator (torch.manual_seed), wanted none, as that happens "
            f"once, when it is traced, and never in the compiled step; {_FIX}"
        )


def _was_seeded(generator: torch.Generator, seed: int, state: torch.Tensor) -> bool:
    if generator.initial_seed() != seed:
        return True
    now = generator.get_state()
    reseeded = torch.Generator(generator.device).manual_seed(seed).get_state()
    return not torch.equal(now, state) and torch.equal(now, reseeded)


def _default_generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
