"""Trees: nested dicts, lists, tuples and NamedTuples of leaves, over optree, with stable readable paths.

Layouts and ArraySpecs are dataclasses, so they are leaves. Dict keys are sorted; `None` is an empty tree, not a leaf.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import optree


def flatten(tree: Any) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """(paths, leaves, spec) of a tree; `unflatten(spec, leaves)` is the inverse."""
    leaves, spec = optree.tree_flatten(tree)
    return list(_paths(spec)), leaves, spec


def unflatten(spec: optree.PyTreeSpec, leaves: Any) -> Any:
    """The tree of this spec with these leaves, in the order of `flatten`."""
    return optree.tree_unflatten(spec, leaves)


def leaves(tree: Any) -> list[Any]:
    """The leaves, in the order of `paths`."""
    return optree.tree_leaves(tree)


def paths(tree: Any) -> list[str]:
    """The path of every leaf: dict keys, NamedTuple field names and positions, joined by '/'.

    >>> paths({"blocks": {"wo": 1.0}, "scales": [2.0, 3.0]})
    ['blocks/wo', 'scales/0', 'scales/1']
    """
    return list(_paths(optree.tree_structure(tree)))


def map(f: Callable, *trees: Any) -> Any:  # noqa: A001  `tree.map` is its name
    """f over the leaves of the first tree and what stands there in the others; a new tree of the results.

    Raises ValueError, naming paths, when another tree does not have the structure of the first.
    """
    return _mapped(f, trees, None)


def map_with_path(f: Callable, *trees: Any) -> Any:
    """As `map`, with the path of the leaf as the first argument of f."""
    return _mapped(f, trees, True)


def _mapped(f: Callable, trees: tuple, with_path: bool | None) -> Any:
    first, spec = optree.tree_flatten(trees[0])
    try:
        columns = [first] + [spec.flatten_up_to(other) for other in trees[1:]]
    except (ValueError, TypeError) as error:
        for other in trees[1:]:
            difference = structure_difference(other, trees[0])
            if difference:
                raise ValueError(f"tree.map: the trees differ:\n{difference}") from None
        raise ValueError(f"tree.map: the trees differ in their containers: {error}") from None
    if with_path:
        columns.insert(0, list(_paths(spec)))
    return optree.tree_unflatten(spec, [f(*column) for column in zip(*columns, strict=True)])


def structure_difference(got: Any, wanted: Any) -> str:
    """What paths `got` lacks or has too many, one line each with the nearest other name; empty when they agree."""
    got_paths, wanted_paths = paths(got), paths(wanted)
    missing = [path for path in wanted_paths if path not in set(got_paths)]
    extra = [path for path in got_paths if path not in set(wanted_paths)]
    lines = [f"  {path}: got nothing, wanted a leaf{did_you_mean(path, extra)}" for path in missing]
    lines += [f"  {path}: got a leaf, wanted nothing there{did_you_mean(path, missing)}" for path in extra]
    return "\n".join(lines)


def did_you_mean(name: str, candidates: list[str]) -> str:
    """' (did you mean ...?)' with the nearest candidates, or nothing when none is near."""
    near = difflib.get_close_matches(name, candidates, n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def neither_norm_nor_bias(path: str) -> bool:
    """Whether neither "norm" nor "bias" stands in the path, in any case: how stacks of matrices are told from stacks of
    vectors. By default only such leaves decay, and only their gradients travel in 16 bits.

    >>> neither_norm_nor_bias("blocks/attention/wqkv"), neither_norm_nor_bias("blocks/attention_norm")
    (True, False)
    """
    return re.search("norm|bias", path, re.IGNORECASE) is None


@lru_cache(maxsize=1024)
def _paths(spec: optree.PyTreeSpec) -> tuple[str, ...]:
    return tuple("/".join(str(_name(entry)) for entry in accessor) for accessor in spec.accessors())


def _name(entry: optree.PyTreeEntry) -> Any:
    return getattr(entry, "field", entry.entry)
