"""Matches each requested leaf to a view of stored leaves, or raises an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fmegatron import tree
from fmegatron.checkpoint.calls.arguments import flat_layouts
from fmegatron.checkpoint.files.format import Leaf, dtype_of, dtype_text
from fmegatron.checkpoint.reading.mapping import Rule, apply_rules, is_fresh
from fmegatron.checkpoint.reading.source import Source
from fmegatron.checkpoint.reading.strict import Difference, Strictness, can_be_left_out, complaints, near
from fmegatron.checkpoint.reading.view import Fill, View, check_parts, filled, fitted
from fmegatron.layout import Layout
from fmegatron.tree import ArraySpec, structure


@dataclass(frozen=True)
class Request:
    """The wanted tree, flattened; and, for each leaf, the view of stored leaves that it is (None: it is left out).

    leaves: the stored leaves by the names that the views use.
    """

    paths: list[str]
    layouts: list[Layout]
    spec: Any
    leaves: dict[str, Leaf]
    views: list[View | None] = field(default_factory=list)
    difference: Difference = Difference()
    anew: dict[int, ArraySpec] = field(default_factory=dict)  # by number: leaves that checkpoints do not hold

    @property
    def left_out(self) -> list[int]:
        """Numbers of the leaves that the result does not have."""
        return [i for i, view in enumerate(self.views) if view is None]


def subtree(leaves: Mapping[str, Leaf], prefix: str, empty: bool = False) -> dict[str, Leaf]:
    """The stored leaves below a path, by the rest of their paths (all for "").

    Raises ValueError when there is none, unless it may be empty: nothing of it was saved.
    """
    if not isinstance(prefix, str):
        raise ValueError(f"prefix: got {prefix!r:.60}, wanted the path of a stored subtree, e.g. 'params', or ''")
    prefix = prefix.strip("/")
    if not prefix:
        return dict(leaves)
    if prefix in leaves:
        return {"": leaves[prefix]}
    start = prefix + "/"
    found = {name.removeprefix(start): leaf for name, leaf in leaves.items() if name.startswith(start)}
    if not found and not empty:
        above = {"/".join(name.split("/")[: start.count("/")]) for name in leaves}
        hint = structure.did_you_mean(prefix, sorted(above))
        raise ValueError(f"prefix: got {prefix!r}, wanted the path of stored leaves{hint}; name a stored subtree")
    return found


def _listed(rules: Any) -> Sequence[Rule]:
    """One rule alone is a list of one; what is no rule is refused by who applies it."""
    several: list[Any] = list(rules) if isinstance(rules, Iterable) and not isinstance(rules, str) else [rules]
    return several


class Leaves(NamedTuple):
    """The leaves of what is no Source, by path. text: what it is, for messages."""

    text: str
    leaves: Mapping[str, Leaf]


def match(
    source: Source | Leaves,
    target_layouts: Any,
    mode: Strictness,
    *,
    rules: Sequence[Rule] = (),
    prefix: str = "",
    cast: bool = False,
    has_initial: bool = False,
) -> Request:
    """The request that fits, or one ValueError that lists what does not."""
    rules = _listed(rules)
    paths, layouts, spec = flat_layouts(target_layouts)
    anew = {i: x for i, x in enumerate(tree.leaves(target_layouts)) if isinstance(x, ArraySpec) and not x.saved}
    leaves = subtree(source.leaves, prefix, empty=bool(anew) and len(anew) == len(paths))
    views = apply_rules(rules, {name: leaf.shape for name, leaf in leaves.items()})
    asked, fresh = set(paths), {path for path in paths if is_fresh(rules, path)}
    difference = Difference(
        missing=tuple(name for name, view in views.items() if name not in asked and not view.spare),
        unexpected=tuple(p for i, p in enumerate(paths) if p not in views and p not in fresh and i not in anew),
    )
    problems, found, unexpected = complaints(difference, mode), [], set(difference.unexpected)
    droppable = can_be_left_out(spec) if unexpected else []
    for i, (path, layout) in enumerate(zip(paths, layouts, strict=True)):
        view: View | None = None
        if i in anew:
            view = filled(layout.shape, Fill.ZEROS)
            if path in views and (others := views[path].sources - {path}):  # what is stored under this path is known
                problems.append(
                    f"{path}: got {', '.join(sorted(others)[:3])} by a rule, wanted nothing, as it is not saved and"
                    f" made anew; rename to another leaf, or leave it out: checkpoint.drop({path!r}) behind that rule"
                )
        elif path in fresh or (path in unexpected and has_initial):
            view = filled(layout.shape, Fill.FRESH)
        elif path in views:
            view = fitted(views[path], layout.shape)
            problems += _misfits(path, view, layout, leaves, cast)
        elif mode.unexpected != "raise" and not droppable[i]:
            hint = near(path, difference)
            problems.append(
                f"{path}: not in the checkpoint{hint}, and its container is no dict, so it cannot be left out;"
                " pass initial= with a value for it"
            )
        if view is not None and not has_initial and any(part.source is Fill.FRESH for part in view.parts):
            problems.append(f"{path}: a rule takes it from `initial`, which was not given; pass initial=")
        found.append(view)
    if problems:
        more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        lines = "\n".join(f"  {p}" for p in problems[:10])
        raise ValueError(
            f"{source.text}: got leaves that do not fit the target layouts, wanted all to fit:\n{lines}{more}"
        )
    return Request(paths, layouts, spec, leaves, found, difference, anew)


def _misfits(path: str, view: View, layout: Layout, leaves: dict[str, Leaf], cast: bool) -> list[str]:
    """What keeps a view from being this wanted leaf."""
    sources = sorted({part.source for part in view.parts if isinstance(part.source, str)})
    renamed = f" (from {', '.join(sources[:3])})" if sources and sources != [path] else ""
    if view.shape != layout.shape:
        hint = "use the stored shape"
        if len(view.shape) == len(layout.shape):
            dims = [d for d, (a, b) in enumerate(zip(view.shape, layout.shape, strict=True)) if a != b]
            hint += f", or allow zeros or truncation there by rules=[checkpoint.pad({path!r}, dim={dims[0]})]"
        return [f"{path}: stored with global shape {view.shape}{renamed}, wanted {layout.shape}; {hint}"]
    if layout.unreduced:
        return [f"{path}: wanted as a pending sum over {layout.unreduced}; ask for a layout without unreduced"]
    if not sources and not math.prod(view.shape):
        sources = sorted(view.sources)
    problems = []
    for stored in sorted({leaves[source].dtype for source in sources}):
        if dtype_of(stored) is not layout.dtype:
            problems += _dtype_problem(path, renamed, stored, layout, cast)
    try:
        check_parts(view)
    except ValueError as error:
        problems.append(f"{path}: the rules do not give it once and whole: {error}")
    return problems


def _dtype_problem(path: str, renamed: str, stored: str, layout: Layout, cast: bool) -> list[str]:
    wanted = dtype_text(layout.dtype)
    if not cast:
        return [f"{path}: stored as {stored}{renamed}, wanted {wanted}; pass cast=True to convert, or ask for {stored}"]
    if not torch.can_cast(dtype_of(stored), layout.dtype):
        return [f"{path}: stored as {stored}{renamed}, wanted {wanted}, which cannot hold it; ask for {stored}"]
    return []
