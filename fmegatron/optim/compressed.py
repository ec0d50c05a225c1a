"""Optimizer state kept in fewer bytes than float32, whatever the optimizer: decoded before an update, encoded after."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from fmegatron import tree
from fmegatron.collectives import Axes, random_words
from fmegatron.layout import Layout
from fmegatron.optim.blockwise import Blockwise, in_blocks
from fmegatron.optim.groups import whole_segments
from fmegatron.optim.matrices import split_over
from fmegatron.optim.optimizer import Optimizer, working_dtype
from fmegatron.optim.rounding import join_master, split_master, stochastic_bfloat16
from fmegatron.optim.transform import Tree
from fmegatron.tree import ArraySpec


@dataclass(frozen=True)
class Float32:
    """As it is: 4 bytes per element. For a rule that exempts leaves from the rules after it."""


@dataclass(frozen=True)
class Bfloat16:
    """2 bytes per element, 8 significant bits.

    stochastic: round at random, without bias. To nearest, a moving average whose weight of the new value is below
    1/256 (b2 = 0.999) stands still: each change is less than half a step of bfloat16.
    """

    stochastic: bool = False


@dataclass(frozen=True)
class Remainder:
    """For "master": the 16 bits by which the float32 master differs from its bfloat16 parameter, 2 bytes instead of 4.

    Parameter and remainder are the master, bit for bit (`split_master`). The parameter is the master rounded with ties
    away from zero, where without this format it is rounded with ties to even.
    """


@dataclass(frozen=True)
class NoMaster:
    """For "master": there is none, 0 bytes. The update is added to the bfloat16 parameter and rounded at random, so
    that small updates are not lost but happen now and then (Zamirai et al. 2020, arXiv 2010.06192, section 4)."""


Format = Float32 | Bfloat16 | Blockwise | Remainder | NoMaster
_OF_MASTER = (Remainder, NoMaster)


def compressed(
    opt: Optimizer,
    rules: Sequence[tuple[str, Format]],
    layouts: Tree | None = None,
    axes: Axes | None = None,
    *,
    key: int = 0,
) -> Optimizer:
    """`opt` with its float32 state stored in the formats that the rules say; its arithmetic stays in float32.

        formats = [("adam/m", optim.int8()), ("adam/v", optim.int8(root=True)), ("master", optim.Remainder())]
        opt = optim.compressed(optim.adamw(3e-4), formats, layouts, Axes(mesh))

    rules: (pattern over whole segments of the path in the state, format), the first that matches decides; leaves
    without a rule, and all that is not float32 (counts; moments of float64 parameters), stay as they are. Formats:
    `Bfloat16`, `float16`, `float8`, `int8`, `Float32`; for the leaves of "master" `Remainder`, `NoMaster`, `Float32`
    (rules with other formats do not concern them).
    layouts: of the parameters as the optimizer sees them, axes: Axes(mesh). Needed for formats with blocks or random
    rounding on a mesh; without them every leaf is whole.
    key: of the randomness (`tree.fold_in`); a word depends on key, count, path and global index only.

    A leaf in blocks becomes {"codes": …, "scale": …} at its place in the state; any other keeps path and layout. Wrap
    the optimizer itself and put guards around: `skip_nonfinite(compressed(adamw(...), ...))`. `init` raises ValueError
    for a rule that matches nothing (those for a master excepted: there may be none), naming the nearest paths; for a
    format that a leaf cannot have; and for a split leaf whose format must know layouts that were not given.
    """
    table = [(whole_segments(pattern), form) for pattern, form in rules]
    known: dict[str, Layout] = {}
    if layouts is not None:
        if axes is not None:
            axes.require(layouts, "compressed: layouts")
        specs = opt.init(tree.map(lambda layout: ArraySpec(layout), tree.layouts(layouts)))
        known = dict(zip(tree.paths(specs), tree.leaves(tree.layouts(specs)), strict=True))

    def format_of(path: str) -> Format:
        return next((form for pattern, form in table if _is_for(form, path) and pattern.search(path)), Float32())

    def layout_of(path: str) -> Layout | None:
        if layouts is not None and path not in known:
            raise ValueError(f"compressed: {path}: got no layout for it{tree.did_you_mean(path, list(known))}")
        return known.get(path)

    def encode(path: str, x: Any, count: torch.Tensor | None) -> Any:
        if x.dtype is not torch.float32:
            return x
        form, layout = format_of(path), layout_of(path)
        if isinstance(form, Blockwise) and form.applies(tuple(x.shape) if layout is None else layout.shape):
            return form.encode(x, layout)
        if isinstance(form, Bfloat16):
            if not form.stochastic or count is None:
                return x.to(torch.bfloat16)
            return stochastic_bfloat16(x, random_words(key, path, count, x, layout, axes))
        return x

    def encoded_spec(path: str, spec: ArraySpec) -> Any:
        if spec.dtype is not torch.float32:
            return spec
        form = format_of(path)
        _require_layouts(path, spec.layout, form, layouts, axes)
        _require_the_same(path, spec.layout, layout_of(path))
        if isinstance(form, Blockwise) and form.applies(spec.shape):
            return form.specs(f"compressed: {path}", spec)
        return spec.replace(dtype=torch.bfloat16) if isinstance(form, Bfloat16) else spec

    def decode(path: str, x: Any) -> torch.Tensor:
        if in_blocks(x):
            return format_of(path).decode(x, layout_of(path))
        return x.to(torch.float32) if x.dtype is torch.bfloat16 and isinstance(format_of(path), Bfloat16) else x

    def init(params: Tree) -> Tree:
        state = opt.init(params)
        if "count" not in state:
            raise ValueError(
                f"compressed: got an optimizer with the state {sorted(state)}, want one with a count of its own; wrap"
                " the optimizer first and the guard after: skip_nonfinite(compressed(adamw(...), rules), ...)"
            )
        _require_that_rules_match(rules, tree.paths(state))
        master = state.pop("master", {})

        def one(path: str, leaf: Any) -> Any:
            return encoded_spec(path, leaf) if isinstance(leaf, ArraySpec) else encode(path, leaf, None)

        by_path = dict(zip(tree.paths(params), tree.leaves(params), strict=True))

        def one_master(path: str, leaf: Any) -> Any:
            form = format_of(f"master/{path}")
            if isinstance(form, Float32):
                return leaf
            if by_path[path].dtype is not torch.bfloat16:
                raise ValueError(
                    f"compressed: master/{path}: got {form} for a parameter of {by_path[path].dtype}, want bfloat16;"
                    f" put a rule ('master/{path}', Float32()) before"
                )
            if isinstance(form, Remainder):
                return tree.zeros_like(by_path[path], torch.int16)
            if isinstance(leaf, ArraySpec):
                _require_layouts(f"master/{path}", leaf.layout, form, layouts, axes)
                _require_the_same(f"master/{path}", leaf.layout, layout_of(f"master/{path}"))
            return None

        state = tree.map_with_path(one, state)
        master = tree.map_with_path(one_master, master)
        return state | {"master": master} if tree.leaves(master) else state

    def masters(stored: Tree, params: Tree) -> Tree:
        """The float32 masters of those parameters that have one, None for the others."""
        leaves = dict(zip(tree.paths(stored), tree.leaves(stored), strict=True))

        def one(path: str, p: torch.Tensor) -> torch.Tensor | None:
            if p.dtype == working_dtype(p.dtype) or not opt.trains(path):
                return None
            form = format_of(f"master/{path}")
            if isinstance(form, Remainder):
                return join_master(p, leaves[path])
            return p.to(torch.float32) if isinstance(form, NoMaster) else leaves[path]

        return tree.map_with_path(one, params)

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        count, stored = state["count"], state.get("master", {})
        full = _map_stored(decode, {name: value for name, value in state.items() if name != "master"})
        master = masters(stored, params)
        if tree.leaves(master):
            full["master"] = master
        new_params, new = opt.update(grads, full, params)
        new_master = new.pop("master", {})
        new_state = tree.map_with_path(lambda path, x: encode(path, x, count), new)
        rounded: dict[str, torch.Tensor] = {}

        def one_master(path: str, x: torch.Tensor) -> torch.Tensor | None:
            form, at = format_of(f"master/{path}"), f"master/{path}"
            if isinstance(form, Remainder):
                rounded[path], rest = split_master(x)
                return rest
            if isinstance(form, NoMaster):
                rounded[path] = stochastic_bfloat16(x, random_words(key, at, count, x, layout_of(at), axes))
                return None
            return x

        new_master = tree.map_with_path(one_master, new_master)
        if tree.leaves(new_master):
            new_state["master"] = new_master
        return tree.map_with_path(lambda path, p: rounded.get(path, p), new_params), new_state

    return Optimizer(init, update, opt.trains)


def _map_stored(f: Callable[[str, Any], Any], state: Tree) -> Tree:
    """`tree.map_with_path` for which a leaf in blocks is one leaf, and both of its parts absent one that is absent."""

    def absent(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == {"codes", "scale"} and all(x is None for x in node.values())

    leaves, spec = optree.tree_flatten(state, is_leaf=lambda node: in_blocks(node) or absent(node))
    paths = tree.paths(optree.tree_unflatten(spec, range(len(leaves))))
    found = [None if absent(leaf) else f(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    return optree.tree_unflatten(spec, found)


def _require_layouts(path: str, layout: Layout, form: Format, layouts: Tree | None, axes: Axes | None) -> None:
    in_blocks = isinstance(form, Blockwise)
    random = isinstance(form, NoMaster) or (isinstance(form, Bfloat16) and form.stochastic)
    if not layout.sharded:
        return
    if (in_blocks or random) and layouts is None:
        raise ValueError(
            f"compressed: {path}: got {layout}, which is split, and no layouts; {form} looks at global indices: give"
            " layouts=tree.layouts(specs) and axes=Axes(mesh)"
        )
    if random and axes is None:
        raise ValueError(f"compressed: {path}: got {layout}, which is split, and no axes; give axes=Axes(mesh) too")


def _require_the_same(path: str, asked: Layout, known: Layout | None) -> None:
    if known is not None and split_over(asked) != split_over(known):
        raise ValueError(
            f"compressed: {path}: was made with {known}, but the state is asked for {asked}; give it the layouts that"
            " the optimizer sees: step.placements(layouts, strategy).optim"
        )


def _is_for(form: Format, path: str) -> bool:
    """Whether a leaf at this path can have a format at all: masters have formats of their own."""
    return isinstance(form, Float32) or isinstance(form, _OF_MASTER) == path.startswith("master/")


def _require_that_rules_match(rules: Sequence[tuple[str, Format]], paths: list[str]) -> None:
    """ValueError for a rule of a moment that no path of the state has."""
    for pattern, form in rules:
        mine = [path for path in paths if _is_for(form, path)]
        of_master = isinstance(form, _OF_MASTER) or pattern.startswith("master")
        if not of_master and not any(map(whole_segments(pattern).search, mine)):
            near = tree.did_you_mean(pattern, [*mine, *sorted({part for path in mine for part in path.split("/")})])
            raise ValueError(
                f"compressed: the rule {pattern!r} matches no path of the state that can be {form}{near}; want a"
                f" regular expression over whole segments of one of: {', '.join(mine[:8])}{' …' if mine[8:] else ''}"
            )
