"""Trees: nested dicts, lists, tuples and NamedTuples of leaves, over optree, with stable readable paths.

Layouts and ArraySpecs are dataclasses, so they are leaves. Dict keys are sorted; `None` is an empty tree, not a leaf.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import optree

# Nested containers of leaves, or one leaf; Python has no type for it.
Tree = Any


def flatten(tree: Tree) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """(paths, leaves, spec) of a tree; `unflatten(spec, leaves)` is the inverse."""
    leaves, spec = optree.tree_flatten(tree)
    return list(_paths(spec)), leaves, spec


def unflatten(spec: optree.PyTreeSpec, leaves: Iterable[Any]) -> Tree:
    """The tree of this spec with these leaves, in the order of `flatten`."""
    return optree.tree_unflatten(spec, leaves)


def leaves(tree: Tree) -> list[Any]:
    """The leaves, in the order of `paths`."""
    return optree.tree_leaves(tree)


def paths(tree: Tree) -> list[str]:
    """The path of every leaf: dict keys, NamedTuple field names and positions, joined by '/'.

    >>> paths({"blocks": {"wo": 1.0}, "scales": [2.0, 3.0]})
    ['blocks/wo', 'scales/0', 'scales/1']
    """
    return list(_paths(optree.tree_structure(tree)))


def map(f: Callable, *trees: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:  # noqa: A001
    """f over the leaves of the first tree and what stands there in the others; a new tree of the results.

    is_leaf: nodes of the first tree for which it is true are leaves, whatever they contain.
    Raises ValueError, naming paths, when another tree does not have the structure of the first.

    >>> map(len, {"b": (3,), "w": (2, 3)}, is_leaf=lambda x: isinstance(x, tuple))
    {'b': 1, 'w': 2}
    """
    return _mapped(f, trees, False, is_leaf)


def map_with_path(f: Callable, *trees: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """As `map`, with the path of the leaf as the first argument of f."""
    return _mapped(f, trees, True, is_leaf)


def _mapped(f: Callable, trees: tuple, with_path: bool, is_leaf: Callable[[Any], bool] | None) -> Any:
    first, spec = optree.tree_flatten(trees[0], is_leaf=is_leaf)
    columns = [first]
    for i, other in enumerate(trees[1:], 2):
        try:
            columns.append(spec.flatten_up_to(other))
        except (ValueError, TypeError) as error:
            difference = structure_difference(other, trees[0]) or f"  {error}"
            raise ValueError(
                f"tree.map: tree {i}: got another structure than tree 1, wanted the same:\n{difference}"
            ) from None
    if with_path:
        columns.insert(0, list(_paths(spec)))
    return optree.tree_unflatten(spec, [f(*column) for column in zip(*columns, strict=True)])


def partition(tree: Tree, where: Callable[[str], bool]) -> tuple[Tree, Tree]:
    """(the leaves whose path `where` selects, the others): two trees of one structure, with None in place of the rest.

    `merge` puts them together again. So a loss is differentiated by what trains, and by nothing else:
    `value_and_grad(lambda trained, frozen, batch: loss(merge(trained, frozen), batch))(trained, frozen, batch)`.
    """

    def chosen(wanted: bool) -> Tree:
        return map_with_path(lambda path, leaf: leaf if where(path) == wanted else None, tree)

    return chosen(True), chosen(False)


def merge(a: Tree, b: Tree) -> Tree:
    """The leaves of `a`, and where they are absent (None) those of `b`.

    Raises ValueError, naming paths, when the two trees differ in structure.
    """
    try:
        return optree.tree_map(lambda x, y: y if x is None else x, a, b, none_is_leaf=True)
    except (ValueError, TypeError) as error:
        filled = [optree.tree_map(lambda x: 0, x, none_is_leaf=True) for x in (b, a)]
        difference = structure_difference(*filled) or f"  {error}"
        raise ValueError(f"tree.merge: got trees of two structures, wanted one:\n{difference}") from None


def structure_difference(got: Tree, wanted: Tree) -> str:
    """Where two trees differ in names or containers, the first place first, one line each; empty when they agree.

    >>> print(structure_difference({"a": 1, "b": [2, 3]}, {"a": 1, "b": {"x": 2}, "c": 3}))
      c: got nothing, wanted a leaf
      b: got a list of 2, wanted a dict of x
    """
    return "\n".join(_differences(optree.tree_structure(got), optree.tree_structure(wanted), ""))


def _differences(got: optree.PyTreeSpec, wanted: optree.PyTreeSpec, path: str) -> list[str]:
    root = "the tree itself"
    if got.type is not wanted.type or got.type not in (dict, OrderedDict) and _names(got) != _names(wanted):
        return [f"  {path or root}: got {_kind(got)}, wanted {_kind(wanted)}"]
    prefix, theirs, ours = path and f"{path}/", _children(got), _children(wanted)
    missing = {f"{prefix}{name}": child for name, child in ours.items() if name not in theirs}
    extra = {f"{prefix}{name}": child for name, child in theirs.items() if name not in ours}
    lines = [
        f"  {at or root}: got nothing, wanted {_kind(x)}{did_you_mean(at, list(extra))}" for at, x in missing.items()
    ]
    lines += [
        f"  {at or root}: got {_kind(x)}, wanted nothing{did_you_mean(at, list(missing))}" for at, x in extra.items()
    ]
    for name in ours:
        if name in theirs:
            lines += _differences(theirs[name], ours[name], f"{prefix}{name}")
    return lines


def fields_of(node: Any) -> tuple[str, ...] | None:
    """The names of the fields of a NamedTuple, and of a class that trees know by its attributes (`step.State`)."""
    spec = optree.tree_structure(node, is_leaf=lambda x: x is not node)
    if spec.type is None or spec.type is type(None):
        return None
    if optree.is_namedtuple_class(spec.type):
        return spec.type._fields
    entries = [accessor[0] for accessor in spec.accessors()]
    return tuple(map(str, spec.entries())) if entries and isinstance(entries[0], optree.GetAttrEntry) else None


def _names(spec: optree.PyTreeSpec) -> list:
    return list(getattr(spec.type, "_fields", spec.entries()))


def _children(spec: optree.PyTreeSpec) -> dict[Any, optree.PyTreeSpec]:
    return dict(zip(_names(spec), spec.children(), strict=True))


def _kind(spec: optree.PyTreeSpec) -> str:
    """ "a leaf", "None", "a dict of a, b", "a list of 3"."""
    if spec.type is None:
        return "a leaf"
    if spec.type is type(None):
        return "None"
    names = list(map(str, _names(spec)))
    if not names:
        return f"an empty {spec.type.__name__}"
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{_a(spec.type.__name__)} of {len(names) if spec.type in (list, tuple) else listed}"


def in_words(x: Any) -> str:
    """What something is, for an error: "a dict of a, b", "a tensor of shape (3,)", "2.5", "a Linear".

    >>> in_words({"a": 1}), in_words([1, 2]), in_words("relu"), in_words(None), in_words(range(3)), in_words(int)
    ('a dict of a', 'a list of 2', "'relu'", 'None', 'a range', 'the class int')
    """
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        kind = "tensor" if hasattr(x, "requires_grad") else type(x).__name__
        return f"{_a(kind)} of shape {tuple(x.shape)}"
    if x is None or isinstance(x, bool | int | float | complex | str):
        return repr(x)
    if isinstance(x, type):
        return f"the class {x.__name__}"
    spec = optree.tree_structure(x)
    return _a(type(x).__name__) if spec.type is None else _kind(spec)


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def did_you_mean(name: str, candidates: list[str]) -> str:
    """' (did you mean ...?)' with the nearest candidates, or nothing when none is near."""
    near = difflib.get_close_matches(name, candidates, n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


@lru_cache(maxsize=1024)
def _paths(spec: optree.PyTreeSpec) -> tuple[str, ...]:
    return tuple("/".join(str(_name(entry)) for entry in accessor) for accessor in spec.accessors())


def _name(entry: optree.PyTreeEntry) -> Any:
    return getattr(entry, "field", entry.entry)
