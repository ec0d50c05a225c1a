"""Nested containers <-> leaves by path, and the kinds of containers that paths leave open.

    flatten({"w": tensor, "opt": {0: array}, "betas": (0.9, 0.95)})
    leaves      {"w": tensor, "opt/0": array, "betas": (0.9, 0.95)}
    containers  {"opt": {"dict": [0]}, "opt/0": "array"}

Dicts, NamedTuples and a step's State are walked into, and lists and tuples that hold more than plain values; what
remains is a leaf. An empty container is a leaf. Paths are those of `fmegatron.tree`, so a state saved without layouts
is restored with them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from fmegatron import tree
from fmegatron.checkpoint.dicts.values import from_json, to_json
from fmegatron.layout import Layout
from fmegatron.tree import structure

ARRAY, SCALAR = "array", "scalar"  # numpy's, in `containers`
Array = torch.Tensor | np.ndarray | np.generic | Layout | tree.ArraySpec


class Flat(NamedTuple):
    """leaves: path -> array or plain value, in the order of the containers.  containers: path -> JSON."""

    leaves: dict[str, Any]
    containers: dict[str, Any]

    @property
    def arrays(self) -> dict[str, Any]:
        """The leaves that have elements."""
        return {path: x for path, x in self.leaves.items() if isinstance(x, Array)}

    @property
    def values(self) -> dict[str, Any]:
        """The other leaves."""
        return {path: x for path, x in self.leaves.items() if not isinstance(x, Array)}


def flatten(state: Any) -> Flat:
    """The leaves and containers of a state. Raises ValueError, naming the path, for two leaves of one path."""
    found = Flat({}, {})
    try:
        _walk(state, "", (), found)
    except RecursionError:
        raise ValueError("state: got a container that contains itself, wanted a tree; take it out") from None
    return found


def _walk(node: Any, path: str, above: tuple[int, ...], found: Flat) -> None:
    items = _items(node)
    if items is None:
        if path in found.leaves:
            raise ValueError(
                f"{path}: got two leaves of this path (a key that is another's text?), wanted one; rename one"
            )
        found.leaves[path] = node
        if isinstance(node, np.ndarray | np.generic):
            found.containers[path] = ARRAY if isinstance(node, np.ndarray) else SCALAR
        return
    if id(node) in above:
        raise ValueError(f"{path or 'state'}: got a container that contains itself, wanted a tree; take it out")
    if (kind := _kind(node, path)) is not None:
        if path in found.containers:
            raise ValueError(
                f"{path}: got two containers of this path (a key that is another's text?), wanted one; rename one"
            )
        found.containers[path] = kind
    for key, item in items:
        _walk(item, below(path, key), (*above, id(node)), found)


def below(path: str, key: Any) -> str:
    """The path of a container's item."""
    return f"{path}/{key}" if path else str(key)


def _items(node: Any) -> list[tuple[Any, Any]] | None:
    """What is in a container that is walked into; None for a leaf."""
    if isinstance(node, Mapping):
        return list(node.items()) or None
    if (fields := structure.fields_of(node)) is not None:
        return list(zip(fields, node, strict=True)) or None
    if isinstance(node, list | tuple) and any(map(_holds_more, node)):
        return list(enumerate(node))
    return None


def _holds_more(item: Any) -> bool:
    return isinstance(item, Mapping | Array) or (structure.fields_of(item) is not None) or (
        isinstance(item, list | tuple) and any(map(_holds_more, item))
    )  # fmt: skip


def _kind(node: Any, path: str) -> Any:
    """What the paths do not determine: None for dicts whose keys are parts of paths, and for NamedTuples."""
    if isinstance(node, list):
        return "list"
    if structure.fields_of(node) is not None:
        return None
    if isinstance(node, tuple):
        return "tuple"
    texts = set(map(str, node))
    for text in texts:
        parts = text.split("/")
        if text == "":
            raise ValueError(f"{path or 'state'}: got the key '', wanted text; rename the key")
        if any("/".join(parts[:i]) in texts for i in range(1, len(parts))):
            at = below(path, text)
            raise ValueError(f"{at}: got a key that is below another key of its dict, wanted neither; rename one")
    if all(type(key) is str and "/" not in key for key in node):
        return None
    return {"dict": [to_json(key, f"{below(path, key)} (its key)") for key in node]}


# ---- back: dicts, lists and tuples of the leaves


def nested(leaves: Mapping[str, Any], containers: Mapping[str, Any]) -> Any:
    """The containers that these leaves were in. A NamedTuple becomes a dict of its fields.

    A list that lacks some of its items becomes a dict. Raises ValueError for containers that `flatten` did not make.
    """
    return _nested({path: (path, x) for path, x in leaves.items()}, containers, "")


def _nested(rests: dict[str, tuple[str, Any]], containers: Mapping[str, Any], path: str) -> Any:
    """rests: what is left of a path -> (the path, the leaf)."""
    kind = containers.get(path)
    if len(rests) == 1 and "" in rests:
        return rests[""][1]
    texts = None
    if isinstance(kind, dict):
        keys = kind.get("dict")
        if not isinstance(keys, list):
            raise ValueError(f"{path}: got {kind!r:.60}, wanted the keys of a dict")
        texts = {str(key): key for key in map(from_json, keys)}
    groups: dict[str, dict[str, tuple[str, Any]]] = {}
    for rest, leaf in rests.items():
        key = _first(rest, texts)
        if key == rest and key in groups or "" in groups.get(key, ()):
            raise ValueError(f"{below(path, key)}: got a leaf and leaves below it, wanted one of them; rename one")
        groups.setdefault(key, {})[rest[len(key) + 1 :]] = leaf
    items = {key: _nested(group, containers, below(path, key)) for key, group in groups.items()}
    if kind in ("list", "tuple") and set(items) == {str(i) for i in range(len(items))}:
        ordered = [items[str(i)] for i in range(len(items))]
        return ordered if kind == "list" else tuple(ordered)
    return {(texts or {}).get(key, key): item for key, item in items.items()}


def _first(rest: str, texts: Mapping[str, Any] | None) -> str:
    """The first key of a path: the one of the dict's keys, or the first part."""
    parts = rest.split("/")
    if texts is not None:
        for i in range(len(parts), 0, -1):
            if (text := "/".join(parts[:i])) in texts:
                return text
    return parts[0]


# ---- back: the containers of a target


class Absent:
    """Stands for a leaf that is left out of its dict."""


def rebuilt(node: Any, leaves: Mapping[str, Any], in_place: bool, path: str = "") -> Any:
    """The containers of `node` with other leaves; Absent ones are left out of their dicts.

    in_place: dicts and lists are changed; a tuple is made anew where an item of it is another object. Leaves that are
    Absent stay. Raises ValueError for one that is Absent from a list or tuple otherwise.
    """
    items = _items(node)
    if items is None:
        x = leaves[path]
        return node if in_place and x is Absent else x
    new = [(key, rebuilt(item, leaves, in_place, below(path, key))) for key, item in items]
    if isinstance(node, Mapping):
        if not in_place:
            found = {key: x for key, x in new if x is not Absent}
            if not isinstance(node, MutableMapping):
                return found
            made = copy.copy(node)  # of its class, with its attributes: state dicts of modules have one
            made.clear()
            made.update(found)
            return made
        cast("MutableMapping[Any, Any]", node).update(new)  # a target whose dicts cannot change raises here
        return node
    if gone := next((below(path, key) for key, x in new if x is Absent), None):
        raise ValueError(
            f"{gone}: got nothing, as it is not in the checkpoint, and its container is no dict, wanted a value;"
            " pass initial= with a value for it"
        )
    values = [x for _, x in new]
    if isinstance(node, list):
        if not in_place:
            return values
        node[:] = values
        return node
    if all(a is b for a, b in zip(node, values, strict=True)):
        return node
    return type(node)(*values) if structure.fields_of(node) is not None else tuple(values)
