"""The state of a run: step, parameters, optimizer state; its specs and layouts under a strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import optree
import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes, resharding
from fmegatron.collectives.known_ranks import require_one_rank
from fmegatron.collectives.wires import Wire
from fmegatron.layout import DataParallel, Layout, Rules, data_parallel, layout
from fmegatron.optim import transform
from fmegatron.optim.average import average_of
from fmegatron.step.offload import fetched, on_device
from fmegatron.step.torch_private import register_node
from fmegatron.tree import labels, spec, structure, torch_private

__all__ = [
    "State",
    "Unseen",
    "averaged_params",
    "lying_as",
    "moved",
    "placements",
    "require_optimizer",
    "require_state",
    "state_specs",
]


_PARAMS = "params"
_ALL = ".*"  # the pattern of every path


class Unseen(NamedTuple):
    """The inside of a State into which nobody has looked. by: who made it, and may take it whole; told by identity."""

    by: object
    leaves: list[torch.Tensor]
    spec: optree.PyTreeSpec


class State(Sequence):
    """What a run carries from step to step: number of steps done (0-d int64), parameters, optimizer state.

    A node of trees with the paths "step", "params/..." and "opt/...", and in use a NamedTuple of its three fields:
    `step, params, opt = state`, `state._replace(params=params)`. It cannot be changed.

    What a donated call of `jit` returned makes its fields when somebody looks into it. As long as nobody has, nobody
    else has its tensors, and the next donated call of the same jit takes it whole: no leaf is asked for anything, and
    the given State is dead at once. Looking into a State that was donated raises ValueError.

    A subclass is a TypeError: what carries more is a NamedTuple with these three fields and its own.
    """

    __slots__ = ("_ended", "_fields_made", "_unseen")
    _fields: ClassVar[tuple[str, ...]] = ("step", "params", "opt")

    def __init__(self, step: structure.Tree, params: structure.Tree, opt: structure.Tree):
        self._fields_made, self._unseen, self._ended = (step, params, opt), None, None

    def __init_subclass__(cls) -> None:
        raise TypeError(
            f"class {cls.__name__}: got a subclass of State, wanted State itself or a NamedTuple, as trees would take "
            f"an object of a subclass for one leaf; to carry more, write class {cls.__name__}(NamedTuple) with the "
            "fields step, params, opt and your own"
        )

    @classmethod
    def unseen(cls, made: Unseen) -> State:
        """A State of these leaves, into which nobody has looked."""
        self = object.__new__(cls)
        self._fields_made, self._unseen, self._ended = None, made, None
        return self

    def untouched(self, by: object) -> Unseen | None:
        """Its leaves, if `by` made it and nobody has looked into it; None: it is taken leaf by leaf."""
        return self._unseen if self._unseen is not None and self._unseen.by is by else None

    def end(self, error: ValueError) -> None:
        """Donated whole: the leaves are let go, and every look raises `error`."""
        self._fields_made, self._unseen, self._ended = None, None, error

    def revive(self, made: Unseen) -> None:
        """`end` taken back: nobody got the result of the call, so its leaves are this State's."""
        self._fields_made, self._unseen, self._ended = None, made, None

    @property
    def step(self) -> structure.Tree:
        """Updates done, 0-d int64."""
        return self._seen()[0]

    @property
    def params(self) -> structure.Tree:
        """The tree of the parameters."""
        return self._seen()[1]

    @property
    def opt(self) -> structure.Tree:
        """The optimizer's state."""
        return self._seen()[2]

    def _seen(self) -> tuple[Any, Any, Any]:
        if self._ended is not None:
            raise ValueError(*self._ended.args)
        if self._unseen is not None:
            made = self._unseen
            state = cast("State", optree.tree_unflatten(made.spec, made.leaves))
            self._fields_made, self._unseen = state._fields_made, None
        return self._fields_made  # pyright: ignore[reportReturnType]  one of the three is always there

    def _replace(self, **fields: Any) -> State:
        return State(**{**self._asdict(), **fields})

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(State._fields, self._seen(), strict=True))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._seen())

    def __len__(self) -> int:
        return len(State._fields)

    def __getitem__(self, i: int) -> structure.Tree:
        return self._seen()[i]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self._seen() == other._seen()

    def __reduce__(self) -> tuple:
        return State, self._seen()

    def __repr__(self) -> str:
        if self._ended is not None:
            return f"<State that was donated: {self._ended}>"
        return f"State({', '.join(f'{name}={x!r}' for name, x in self._asdict().items())})"


# A class of ours is no node of trees by itself: optree, and torch.func by torch's own trees, are told what is in it.
cast("Any", optree.register_pytree_node)(  # its types want a Collection
    State,
    lambda state: (state._seen(), None, State._fields),
    lambda _, fields: State(*fields),
    path_entry_type=optree.GetAttrEntry,
    namespace=torch_private.EVERY_NAMESPACE,
)
register_node(State, lambda state: (list(state._seen()), None), lambda fields, _: State(*fields))


def placements(param_layouts: structure.Tree, strategy: DataParallel) -> data_parallel.Placed:
    """Three trees of Layouts for a tree of the parameters' layouts at rest: theirs, the gradients', the optimizer's.

    In a step matrix optimizers (`optim.muon`) see parameters in the layouts `placements(...).optim`.
    """
    grads = tree.map(strategy.grads_layout, param_layouts)
    return data_parallel.Placed(param_layouts, grads, tree.map(strategy.optim_layout, param_layouts))


def state_specs(
    param_specs: structure.Tree,
    optimizer: optim.Optimizer,
    strategy: DataParallel | None = None,
    memory: str | Sequence[tuple[str, str]] = "device",
) -> State:
    """Specs of the full state, given those of the parameters: one definition for memory, layouts and checkpoint.

    `tree.init(state_specs(...), key, rank)` is the state at step 0: the parameters are those that `tree.init` draws of
    `param_specs` alone, on every mesh and under every strategy, and master copies equal them. With `given=params` it is
    the state at step 0 of parameters that are known already.
    strategy: how the optimizer's state is sharded beyond the parameters; None: as the specs state (`tree.specs(...,
    strategy=)`), and exactly as the parameters are where they state none. All specs of the state know it.
    memory: where the optimizer's state is at rest: "device", "host", or "host-update", in host memory and updated there
    too (by gradients that travel down, as the parameters travel up); or (pattern, memory) rows, of which the first
    that matches full segments of a leaf's path decides, and "device" where none does: [("adam|master", "host")].
    Arrays without dims are on the device whatever is said. A step fetches what is in host memory and stores it again.
    Parameters are where their specs say, and rows whose pattern begins with "params" decide of them too, by paths such
    as "params/head/w": [("params", "host"), (".*", "host")]. A loss gets them on the device: each is copied there
    before its first use, dropped behind the last one in the forward, and copied again for the backward.
    Raises ValueError for an optimizer that is none, for another strategy than that of the specs, for an unknown memory,
    and for a row that decides no array.
    """
    require_optimizer(optimizer, "state_specs")
    mesh, stated = tree.leaves(param_specs)[0].mesh, spec.strategy_of(param_specs)
    if strategy is not None and stated is not None and stated != strategy:
        raise ValueError(
            f"state_specs: got the strategy {strategy} and specs of {stated}, wanted one; say it where the specs are "
            "made, and nowhere else"
        )
    strategy = strategy or stated
    step = tree.ArraySpec(Layout((), torch.int64, mesh), 0, strategy=strategy)
    params = tree.map(lambda spec: dataclasses.replace(spec, strategy=strategy), tree.named(param_specs))
    seen = _seen(tree.map(_on_device, params), strategy)
    opt = tree.map(lambda spec: dataclasses.replace(spec, strategy=strategy), optimizer.init(seen))
    rows = _memories(memory)
    of_params = [row for row in rows if row[0].partition("/")[0] == _PARAMS]
    (placed,) = _remembered({_PARAMS: params}, of_params).values() if of_params else (params,)
    return State(step, placed, _remembered(opt, [row for row in rows if row not in of_params]))


def _on_device(spec: tree.ArraySpec) -> tree.ArraySpec:
    return dataclasses.replace(spec, layout=on_device(spec.layout))


def _memories(given: Any) -> list[tuple[str, str]]:
    """Rows of (pattern, memory), of one word for all or as they were given; ValueError for what is neither."""
    known = ", ".join(layout.MEMORIES)
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = [(_ALL, given)]
    for row in given:
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 2 or not isinstance(row[0], str):
            raise ValueError(
                f"state_specs: memory: got {row!r:.60} as a row, wanted one of {known} for all, or rows of (pattern, "
                'memory); [("params", "host"), (".*", "host")]'
            )
        if row[1] not in layout.MEMORIES:
            raise ValueError(
                f"state_specs: memory: got {row[1]!r} for {row[0]!r}, wanted one of {known}; or, of some arrays, rows: "
                '[("params", "host"), (".*", "host")]'
            )
    return [(pattern, memory) for pattern, memory in given]


def _remembered(specs: structure.Tree, rows: Sequence[tuple[str, str]]) -> structure.Tree:
    """The specs of a part of a state, in their memories. A row for all that is left may find nothing left."""
    rules, decided = Rules([*((pattern, (i,)) for i, (pattern, _) in enumerate(rows)), (".*", (-1,))]), set()

    def one(path: str, spec: tree.ArraySpec) -> tree.ArraySpec:
        (i,) = rules.match(path)
        if i < 0 or not spec.shape:
            return spec
        decided.add(i)
        return dataclasses.replace(spec, layout=spec.layout.replace(memory=rows[i][1]))

    placed = structure.map_with_path(one, specs)
    if left := [pattern for i, (pattern, _) in enumerate(rows) if i not in decided and pattern != _ALL]:
        raise ValueError(
            f"state_specs: memory: got {left[0]!r}, which decides no array, wanted patterns of full segments of paths "
            f"such as {', '.join(tree.paths(specs)[:4])}"
        )
    return placed


def require_optimizer(optimizer: Any, who: str) -> None:
    """ValueError for what is no Optimizer, such as a Transform."""
    if isinstance(optimizer, transform.Transform):
        raise ValueError(
            f"{who}: optimizer: got an optim.Transform, wanted an optim.Optimizer; make one of it and a "
            "rate: optim.optimizer(direction=transform, rate=optim.scale_by_learning_rate(1e-3))"
        )
    if not isinstance(optimizer, optim.Optimizer):
        raise ValueError(
            f"{who}: optimizer: got {structure.in_words(optimizer)}, wanted an optim.Optimizer, such as "
            "optim.adamw(1e-3); Optimizer(init, update) makes one of two functions of your own"
        )


def _seen(param_specs: Any, strategy: DataParallel | None) -> Any:
    """The parameters' specs as the optimizer sees them."""
    if strategy is None:
        return param_specs
    return tree.map(lambda spec: dataclasses.replace(spec, layout=strategy.optim_layout(spec.layout)), param_specs)


def averaged_params(state: State) -> structure.Tree:
    """The average of the parameters (`optim.averaged`) in the place of the parameters: same layouts, same dtypes.

    A pure function that communicates where the strategy shards the optimizer's state beyond the parameters: call it
    inside the jitted step that evaluates. Parameters that are not trained are those of the state.

    The arrays of the state know their layouts, or all are full, on one rank. Raises ValueError, naming the leaf, where
    one does not know its layout, and for an optimizer that keeps no average.
    """
    average = fetched(average_of(state.opt), state.step)
    trained, frozen = tree.partition(state.params, set(tree.paths(average)).__contains__)
    narrow = tree.map(lambda a, p: a.to(p.dtype), average, trained)
    if not any(tree.layout_of(x) for x in tree.leaves((average, trained))):
        require_one_rank("averaged_params", tree.paths(trained)[0], "parameter")
        return tree.merge(narrow, frozen)
    rest = tree.map(on_device, tree.layouts(trained))
    held = tree.map(lambda layout, p: layout.replace(dtype=p.dtype), tree.layouts(average), trained)
    axes = Axes(tree.leaves(rest)[0].mesh)
    return tree.merge(moved(narrow, held, rest, axes, Wire(), 1 << 20), frozen)


def moved(values: Any, sources: Any, targets: Any, axes: Axes, wire: Any, together: int) -> Any:
    """A tree of values from one tree of layouts to another, small leaves together (`reshard_many`)."""
    _, leaves, spec = structure.flatten(values)
    wires = wire if isinstance(wire, Wire) else tree.leaves(wire)
    return structure.unflatten(
        spec, resharding.reshard_many(leaves, tree.leaves(sources), tree.leaves(targets), axes, wires, together)
    )


def lying_as(new: State, old: Any) -> State:
    """A new state, known to lie as the old one where that is known, for what comes after it in the same trace.

    These are statements like all others: the check proves what is computed by them, and takes none for granted.
    """
    _, leaves, spec = structure.flatten(new)
    _, before, given = structure.flatten(State(old.step, old.params, old.opt))
    if spec != given:  # of an optimizer of one's own; who jits the step is told
        return new
    known = [labels.alike(x, y) if x.shape == y.shape else x for x, y in zip(leaves, before, strict=True)]
    return structure.unflatten(spec, known)


def require_state(state: Any, batch: Any) -> None:
    """ValueError for what has no step, params and opt, such as a dict of them or the parameters alone."""
    if _is_state(state):
        return
    fix = "draw one: tree.init(step.state_specs(specs, optimizer), key, rank)"
    if _is_state(batch):
        fix = "the second argument is one: call train_step(state, batch)"
    elif isinstance(state, dict) and set(state) == set(State._fields):
        fix = "give State(**it)"
    elif isinstance(state, tuple | list) and len(state) == len(State._fields):
        fix = "give State(*it)"
    raise ValueError(
        f"train_step: its first argument: got {structure.in_words(state)}, wanted a State(step, params, opt); {fix}"
    )


def _is_state(x: Any) -> bool:
    return isinstance(x, State) or all(hasattr(x, name) for name in State._fields)  # one's own, with more in it, is one
