"""Optimizers whose state takes fewer bytes than float32: it is decoded before an update and encoded after it."""

from collections.abc import Sequence
from typing import Any

import torch

from fmegatron import tree
from fmegatron.collectives.known_ranks import require_one_rank
from fmegatron.layout import Layout
from fmegatron.optim.clipping import GradNorm
from fmegatron.optim.contrib.codec import Codec
from fmegatron.optim.contrib.formats import Format, FormatTable, require_that_rules_match
from fmegatron.optim.from_transforms import Optimizer
from fmegatron.optim.recorded import recorded
from fmegatron.tree import ArraySpec, arithmetic, labels, structure


@recorded
def compressed(
    opt: Optimizer,
    rules: Sequence[tuple[str, Format]],
    *,
    key: int = 0,
) -> Optimizer:
    """`opt` with its float32 state stored in the formats that the rules name; its arithmetic stays in float32.

        formats = [("adam/m", contrib.int8()), ("adam/v", contrib.int8(root=True)), ("master", contrib.Remainder())]
        opt = contrib.compressed(optim.adamw(3e-4), formats)

    A leaf in blocks becomes {"codes": …, "scale": …} at its place in the state; any other keeps path and layout. Wrap
    the optimizer itself and put guards around: `skip_nonfinite(compressed(adamw(...), ...))`. Blocks and random
    rounding follow the layouts that the parameters know; without any all are full, on one rank.

    Args:
        opt: one whose state has a count of its own.
        rules: (pattern over full segments of the path in the state, format), the first that matches decides; leaves
            without a rule, and all that is not float32 (counts; moments of float64 parameters), stay as they are.
            Formats: `Bfloat16`, `float16`, `float8`, `int8`, `Float32`; for the leaves of "master" `Remainder`,
            `NoMaster`, `Float32` (rules with other formats do not concern them).
        key: of the randomness (`tree.fold_in`); a word depends on key, count, path and global index only.

    Raises:
        ValueError: by `init`: a rule that matches nothing (those for a master excepted: there may be none), naming the
            nearest paths; a format that a leaf cannot have.
    """
    table = FormatTable.of(rules)

    def init(params: structure.Tree) -> structure.Tree:
        state = opt.init(params)
        if "count" not in state:
            raise ValueError(
                f"compressed: got an optimizer with the state {sorted(state)}, wanted one with a count of its own; wrap"
                " the optimizer first and the guard after: skip_nonfinite(compressed(adamw(...), rules), ...)"
            )
        require_that_rules_match(rules, tree.paths(state))
        codec = Codec(table, _layouts_of_state(opt, params), key)
        of_path = dict(zip(tree.paths(params), tree.leaves(params), strict=True))

        def one(path: str, leaf: Any) -> Any:
            return codec.spec(path, leaf) if isinstance(leaf, ArraySpec) else codec.encode(path, leaf, None)

        master = structure.map_with_path(
            lambda path, leaf: codec.first_master(f"master/{path}", leaf, of_path[path]), state.pop("master", {})
        )
        return _with_master(structure.map_with_path(one, state), master)

    def update(
        grads: structure.Tree, state: structure.Tree, params: structure.Tree, norm: GradNorm | None = None
    ) -> tuple[structure.Tree, structure.Tree]:
        codec = Codec(table, _layouts_of_state(opt, params, grads, state), key)
        stored = dict(zip(tree.paths(state.get("master", {})), tree.leaves(state.get("master", {})), strict=True))

        def joined(path: str, p: torch.Tensor) -> torch.Tensor | None:
            if p.dtype == arithmetic.working_dtype(p.dtype) or not opt.trains(path):
                return None
            return codec.join(f"master/{path}", p, stored.get(path))

        full = codec.decode_tree(_without_master(state))
        new_params, new = opt.update(grads, _with_master(full, structure.map_with_path(joined, params)), params, norm)
        of_path, rounded = dict(zip(tree.paths(new_params), tree.leaves(new_params), strict=True)), {}

        def one_master(path: str, x: torch.Tensor) -> torch.Tensor | None:
            rounded[path], rest = codec.split(f"master/{path}", x, of_path[path], state["count"])
            return rest

        master = structure.map_with_path(one_master, new.get("master", {}))
        encoded = structure.map_with_path(lambda path, x: codec.encode(path, x, state["count"]), _without_master(new))
        after = structure.map_with_path(
            lambda path, p: labels.alike(rounded[path], p) if path in rounded else p, new_params
        )
        return after, _with_master(encoded, master)

    return opt._replace(init=init, update=update)


def _layouts_of_state(opt: Optimizer, params: structure.Tree, *beside: structure.Tree) -> dict[str, Layout] | None:
    """The layouts of an optimizer's state by path, from those of its parameters; None where these know none, on one
    rank. beside: trees that may know the mesh."""
    if all(isinstance(leaf, torch.Tensor) and tree.layout_of(leaf) is None for leaf in tree.leaves(params)):
        require_one_rank("compressed", tree.paths(params)[0], "parameter", tree.leaves(beside))
        return None
    specs = opt.init(tree.map(ArraySpec, tree.layouts(params)))
    return dict(zip(tree.paths(specs), tree.leaves(tree.layouts(specs)), strict=True))


def _without_master(state: structure.Tree) -> structure.Tree:
    return {name: value for name, value in state.items() if name != "master"}


def _with_master(state: structure.Tree, master: structure.Tree) -> structure.Tree:
    return state | {"master": master} if tree.leaves(master) else state
