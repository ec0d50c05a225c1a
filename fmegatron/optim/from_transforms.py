"""Optimizer: (init, update), made of a chain of transforms, one count, and master copies of narrow parameters."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from fmegatron import tree
from fmegatron.collectives.known_ranks import require_one_rank
from fmegatron.layout import Layout
from fmegatron.optim.clipping import GradNorm, clip
from fmegatron.optim.recorded import recorded
from fmegatron.optim.transform import Transform, chain, require_named
from fmegatron.tree import ArraySpec, arithmetic, labels, structure

_RESERVED = ("count", "master")


def every_path(path: str) -> bool:
    """True: the choice of all leaves."""
    del path
    return True


def no_loss_scale(state: structure.Tree) -> None:
    """None: the loss is not scaled."""
    del state


def always(before: structure.Tree, after: structure.Tree) -> None:
    """None: no update is refused."""
    del before, after


class Update(Protocol):
    """The signature of every optimizer's update."""

    def __call__(
        self, grads: structure.Tree, state: structure.Tree, params: structure.Tree, norm: GradNorm | None = None
    ) -> tuple[structure.Tree, structure.Tree]:
        """(new parameters, new state), both of the structure, shapes and dtypes that came in.

        norm: what the caller knows of the global norm of exactly these gradients, which are not clipped yet, and the
        limit to which this update has to clip them; None: they are used as they are.
        """
        ...


class Optimizer(NamedTuple):
    """Pure functions; nothing is changed in place, and nothing in the state is a Python number.

    init(params) -> state for a tree of tensors; for a tree of ArraySpecs, the ArraySpecs of that state: the same
    structure. update: see `Update`. `params` may be any part of the tree for which the state was made (one layer's
    shards) where every leaf is updated on its own.

    trains(path): whether a parameter is updated at all. Frozen ones have no state, need no gradient (None may stand in
    its place) and come back from `update` as the tensors that they were.
    loss_scale(state): the 0-d factor by which the loss is to be multiplied before the backward pass, and out of which
    the gradients are taken before `update`; None for none.
    applied(before, after): whether the update between these two states was applied, a 0-d bool; None where none is ever
    refused.
    text: the call that made it, which is its repr.

    `optimizer(...)` makes one of transforms. A wrapper replaces what it changes and keeps the rest:
    `opt._replace(update=...)`.
    """

    init: Callable[[structure.Tree], structure.Tree]
    update: Update
    trains: Callable[[str], bool] = every_path
    loss_scale: Callable[[structure.Tree], torch.Tensor | None] = no_loss_scale
    applied: Callable[[structure.Tree, structure.Tree], torch.Tensor | None] = always
    text: str = ""

    def __repr__(self) -> str:
        return self.text or f"Optimizer of {self.update.__module__}"


@recorded
def optimizer(*unnamed: object, **transforms: Transform) -> Optimizer:
    """The optimizer that adds to the parameters what a chain of transforms makes of the gradients.

    All arithmetic is in working precision: float64 for float64 parameters, float32 for all others, whose float32 master
    copy the state keeps and whose parameters are the rounded master. ValueError for a transform without a name,
    or named "count" or "master"; `init` raises it for complex parameters, naming the path.
    """
    require_named("optimizer", unnamed, transforms)
    if taken := sorted(set(_RESERVED) & set(transforms)):
        raise ValueError(
            f"optimizer: got a transform named {taken[0]!r}, wanted another name; the state uses this one itself"
        )
    inner = chain(**transforms)

    def init(params: structure.Tree) -> structure.Tree:
        leaves = tree.leaves(params)
        if not leaves:
            raise ValueError(
                "optimizer: got parameters without a tensor or ArraySpec, and so nothing to update, wanted one or more"
            )
        for path, leaf in zip(tree.paths(params), leaves, strict=True):
            if leaf.dtype.is_complex:
                raise ValueError(
                    f"optimizer: {path}: got {leaf.dtype}, wanted a real floating-point dtype: moments, masters and "
                    "decay are defined for real numbers; keep real and imaginary part as a last dim of 2 "
                    "(torch.view_as_real) and join them in the loss (torch.view_as_complex)"
                )
        narrow = tree.map(lambda p: None if p.dtype == arithmetic.working_dtype(p.dtype) else p, params)
        master = tree.copies(narrow, arithmetic.working_dtype)
        state = {"count": _count_like(leaves[0]), **inner.init(tree.merge(master, params))}
        return state | {"master": master} if tree.leaves(master) else state

    def update(
        grads: structure.Tree, state: structure.Tree, params: structure.Tree, norm: GradNorm | None = None
    ) -> tuple[structure.Tree, structure.Tree]:
        given = params
        params = _with_meaning(params, grads, state, inner.by_dims)
        _require_alike(grads, state, params, init)
        if norm is not None and norm.limit is not None:
            grads = clip(grads, norm.value, norm.limit)
        count, master = state["count"], state.get("master")
        working = params if master is None else tree.map(_known, tree.merge(master, params), params)
        grads = tree.map(lambda w, g: g.to(w.dtype), working, grads)
        updates, new_inner = inner.update(grads, state, working, count)
        working = tree.add(working, updates)
        new_state = {"count": count + 1, **new_inner}
        if master is not None:
            new_state["master"] = tree.map(lambda p, w: None if p.dtype == w.dtype else w, params, working)
        # The next update of the same function must find the layouts again: a matrix optimizer goes by them.
        return tree.map(lambda p, w: labels.alike(w.to(p.dtype), p), given, working), new_state

    return Optimizer(init, update)


def _with_meaning(
    params: structure.Tree, grads: structure.Tree, state: structure.Tree, by_dims: bool
) -> structure.Tree:
    """The parameters, where those that were computed, and so do not know their layouts, would be taken for matrices
    and are vectors, or the other way about, by what their gradients and their state know: as aliases that know it.

    by_dims: whether the numbers depend on it; ValueError then, naming the path, for one of 1 dim of which nothing is
    known where there are several ranks: it may be a range of a matrix (`require_one_rank`).
    """
    if all(tree.layout_of(p) is not None for p in tree.leaves(params)):
        return params
    shapes = {path: p.shape for path, p in zip(tree.paths(params), tree.leaves(params), strict=True)}
    known: dict[str, Layout] = {}
    for path, x in (*zip(*structure.flatten(state)[:2], strict=True), *zip(*structure.flatten(grads)[:2], strict=True)):
        of, layout = _behind(path, shapes), tree.layout_of(x) if isinstance(x, torch.Tensor) else None
        if layout is not None and shapes.get(of) == x.shape and not layout.unreduced:
            known[of] = layout.meaning(known.get(of, layout))

    def one(path: str, p: torch.Tensor) -> torch.Tensor:
        layout = known.get(path)
        if by_dims and tree.layout_of(p) is None and layout is None and p.dim() == 1:
            require_one_rank("optimizer", path, "parameter", (*tree.leaves(grads), *tree.leaves(state)))
        if tree.layout_of(p) is not None or layout is None or layout.is_matrix == (p.dim() > 1):
            return p
        return labels.labelled(p.detach(), layout.replace(dtype=p.dtype))

    return structure.map_with_path(one, params)


def _require_alike(grads: structure.Tree, state: structure.Tree, params: structure.Tree, init: Callable) -> None:
    """ValueError, naming the leaf, for gradients, or a state, that are known to have other layouts than the
    parameters: a strategy may shard the state further, and torch names two shapes alone."""
    paths, found = tree.paths(params), [tree.layout_of(x) for x in tree.leaves(params)]
    layouts = {path: layout for path, layout in zip(paths, found, strict=True) if layout is not None}
    if len(layouts) < len(paths):
        return

    def wrong(path: str, other: str, got: Layout, wanted: Layout) -> ValueError:
        return ValueError(
            f"optimizer: {path}: got a parameter in the layout {wanted} and {other} in {got}, wanted one layout; "
            "under a strategy that shards the optimizer's state further (zero1, zero2, hybrid), bring gradients and "
            "parameters to strategy.optim_layout of their layouts, and parameters back, as step.build_train_step does: "
            "step.reduce_gradients(grads, to=...), collectives.reshard (docs/data_parallelism.md)"
        )

    for path, grad in zip(tree.paths(grads), tree.leaves(grads), strict=True):
        got, wanted = tree.layout_of(grad), layouts.get(path)
        if got is not None and wanted is not None and not got.unreduced and not _alike(got, wanted):
            raise wrong(path, "a gradient", got, wanted)
    known = [(path, tree.layout_of(x)) for path, x in zip(tree.paths(state), tree.leaves(state), strict=True)]
    split = {path: layout for path, layout in known if layout is not None and layout.shape}
    if not split or all(_alike(layouts.get(_behind(path, layouts)), layout) for path, layout in split.items()):
        return
    of_state = init(tree.map(ArraySpec, tree.layouts(params)))
    for path, spec in zip(tree.paths(of_state), tree.leaves(of_state), strict=True):
        if path in split and not _alike(spec.layout, split[path]):
            of = _behind(path, layouts)
            raise wrong(of, f"a state, {path},", split[path], layouts[of] if of in layouts else spec.layout)


def _alike(a: Layout | None, b: Layout) -> bool:
    """Whether each rank has the same elements of both: an axis of size 1 cuts nothing."""
    if a is None:
        return False
    a, b = (x.without(tuple(name for name in x.mesh.names if x.mesh[name] == 1)) for x in (a, b))
    return (a.shape, a.mesh, a.spec, a.flat, a.local_shape(0)) == (b.shape, b.mesh, b.spec, b.flat, b.local_shape(0))


def _behind(path: str, layouts: Mapping[str, object]) -> str:
    """Of the path of a leaf of a state, such as "adam/m/blocks/w", that of its parameter; else itself."""
    while path and path not in layouts:
        path = path.partition("/")[2]
    return path


def _known(master: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The master, in the layout of its parameter (one that was decoded does not know it)."""
    return labels.alike(master, param) if tree.layout_of(master) is None else master


def _count_like(leaf: torch.Tensor | ArraySpec) -> torch.Tensor | ArraySpec:
    if isinstance(leaf, ArraySpec):
        return ArraySpec(Layout((), torch.int64, leaf.mesh))
    return torch.zeros((), dtype=torch.int64, device=leaf.device)
