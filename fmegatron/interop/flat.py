"""Nested state dicts <-> flat ones by path, by the rule of torch.distributed.checkpoint.

Dicts are walked into, and lists and tuples that hold a tensor or a dict. What remains is a tensor or a value. An empty
dict is a value, so that it comes back. A path joins keys and positions by '/': "optimizer/state/0/exp_avg".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

Keys = tuple[Any, ...]


def flat_items(state: Any) -> dict[str, tuple[Keys, Any]]:
    """path -> (keys that lead there, tensor or value). Raises ValueError when two leaves have one path."""
    found: dict[str, tuple[Keys, Any]] = {}
    for keys, value in _walk(state, (), set()):
        path = "/".join(map(str, keys))
        if path in found:
            raise ValueError(
                f"{path}: got two entries with this path, at {found[path][0]} and {keys}, wanted one; rename the other"
            )
        found[path] = keys, value
    return found


def put(state: Any, keys: Keys, value: Any) -> None:
    """Set what stands at `keys` in a nested state dict; a tuple on the way is made anew."""
    at, *rest = keys
    if not rest:
        state[at] = value
    elif isinstance(state[at], tuple):
        items = list(state[at])
        put(items, tuple(rest), value)
        state[at] = type(state[at])(*items) if hasattr(state[at], "_fields") else type(state[at])(items)
    else:
        put(state[at], tuple(rest), value)


def nested(items: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts by path. Raises ValueError when something is below a leaf."""
    tree: dict[str, Any] = {}
    for path, value in items.items():
        *above, last = path.split("/")
        at = tree
        for key in above:
            at = at.setdefault(key, {})
            if type(at) is not dict:
                raise ValueError(f"{path}: got a leaf on the way to it, wanted a dict")
        if last in at:
            raise ValueError(f"{path}: got a leaf with others below it, wanted a leaf or a dict")
        at[last] = value
    return tree


def _walk(value: Any, keys: Keys, above: set[int]) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, Mapping) and value:
        items = value.items()
    elif isinstance(value, list | tuple) and any(_holds_more(item) for item in value):
        items = enumerate(value)
    else:
        yield keys, value
        return
    if id(value) in above:
        raise ValueError(f"{'/'.join(map(str, keys))}: got a state dict that contains itself, wanted a tree")
    for key, item in items:
        yield from _walk(item, (*keys, key), above | {id(value)})


def _holds_more(item: Any) -> bool:
    if isinstance(item, list | tuple):
        return any(_holds_more(x) for x in item)
    return isinstance(item, torch.Tensor | Mapping)
