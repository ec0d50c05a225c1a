"""The gradient of one microbatch, cut into the parts of a pipeline's stages by what reaches what.

The graph is the one of a step without a pipeline, with marks where stages begin (`marks.stage`). A value of the forward
belongs to the stage of the nearest marks above it. Of stage s

    F   what leaves the stage, and what its B and W, and metrics, read of it
    B   what the gradient at the mark needs: that of the stage's input
    W   the rest: gradients of weights
    G   where the table has it, what those of F, B and W that follow it read, made of parameters alone: weights
        gathered, and cast ("GF": for forwards)
    R   where the table has it, what is linear in the gradients of W and has a collective: W gives what it is made of

What is made of parameters alone, or of the batch alone, belongs to no stage: each part that reads it makes it. What
mixes stages and is read by no backward (losses of routers, loads, metrics) is the part M, which runs behind the last.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate as running
from typing import Any

import torch
from torch import fx

from fmegatron.step.graph.nodes import node_of, user_line
from fmegatron.step.partition import base_of
from fmegatron.step.pipeline.by_layers import layers_apart
from fmegatron.step.pipeline.marks import MARK
from fmegatron.step.pipeline.parts import (
    extracted,
    layer_of,
    linear_in,
    reach,
    seeds_as_constants,
    split_backwards,
    summing,
    terms_by_stage,
    without_declarations,
)
from fmegatron.step.torch_private import opname

__all__ = ["Part", "Parts", "blocks_of", "cut", "with_outputs", "without_marks"]

GRADS = "grads/"  # how paths of gradients begin


@dataclass(frozen=True, eq=False)
class Part:
    """A graph of one stage.

    takes, gives: the names of its inputs and outputs: of values of one microbatch, or of inputs their paths:
    "layer 3 of 0/blocks/w" of a stacked leaf, "0/head" a whole leaf, "1/tokens" of the batch.
    """

    graph: fx.Graph
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of all stages.

    of: (kind, stage) -> part, of kinds as `Table.parts` has them. forward, backward: per stage the value that it sends
    to the next one, or to the one before: (its name there, its name where it is read); None at the ends. sides: per
    stage what M reads of it. metrics: M. What W, R and M give have the paths of gradients and metrics as their names;
    where R reduces, W gives sums' terms by the names of values.
    """

    of: dict[tuple[str, int], Part]
    forward: tuple[tuple[str, str] | None, ...]
    backward: tuple[tuple[str, str] | None, ...]
    sides: tuple[tuple[str, ...], ...]
    metrics: Part

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.sides)


def without_marks(graph: fx.Graph) -> fx.Graph:
    """A copy in which nothing is left of the marks."""
    found = _copy(graph)
    _erase_marks(found, lambda n: True)
    return found


def with_outputs(graph: fx.Graph, which: Sequence[int]) -> fx.Graph:
    """A copy that gives some of the outputs alone."""
    found = _copy(graph)
    outs: Any = found.output_node().args[0]
    found.output_node().args = ([outs[i] for i in which],)
    found.eliminate_dead_code()
    return found


def cut(
    graph: fx.Graph,
    takes: Sequence[str],
    gives: Sequence[str],
    stages: Sequence[int],
    who: str,
    apart: Collection[tuple[str, int]] = (),
) -> Parts:
    """The parts of stages of so many blocks.

    graph: the gradient of one microbatch, with marks, without ops in place; or its loss alone, whose parts B and W give
    nothing. takes, gives: the paths of what it takes and returns. who: of whom errors tell. apart: parts that gather
    for others, ("GBW", stage), and reduce, ("R", stage). Raises ValueError, naming lines and stages, for marks that
    are missing or there twice, a value that skips a stage, and a backward that reads what mixes stages.
    """
    graph, begins = _copy(graph), tuple(running((0, *stages[:-1])))
    _require_marks(graph, begins, sum(stages), any(map(_is_gradient, gives)), who)
    _erase_marks(graph, lambda n: n not in begins)
    without_declarations(graph)
    inputs, outs = layers_apart(graph, takes, gives, GRADS)
    seeds_as_constants(graph)
    split_backwards(graph)
    found = _Cut(graph, inputs, outs, begins, who)
    found.apart = set(apart)
    return found.parts()


class _Cut:
    """A graph while it is cut.

    into, back: per stage the mark in the forward, and in the backward (None: nothing above it has a gradient).
    forward: the nodes of the forward. near: of these, the stages of the nearest marks above. loose: nodes of no stage.
    needed: what is read for more than what is shown.
    """

    def __init__(self, graph: fx.Graph, inputs: dict[fx.Node, str], outs: dict[str, fx.Node], begins, who: str):
        self.graph, self.inputs, self.outs, self.begins, self.who = graph, inputs, outs, begins, who
        self.stages, self.order = len(begins), {n: i for i, n in enumerate(graph.nodes)}
        marks = [[n for n in graph.nodes if n.target is MARK and n.args[1] == b] for b in begins]
        self.into = [found[0] for found in marks]
        self.back = [found[1] if len(found) > 1 else None for found in marks]
        shown = [n for path, n in outs.items() if not _is_gradient(path)]
        self.forward, _ = reach([*shown, *self.into], lambda n: False)
        for n in graph.nodes:  # other results of the same op, such as what attention keeps for its backward
            if n.target is operator.getitem and n.args[0] in self.forward:
                self.forward.add(n)
        self.near, self.loose = self._near()
        self.home = self._homes()
        grads = [n for path, n in outs.items() if _is_gradient(path)]
        goals = [n.args[0] for n in (*self.into, *self.back) if n is not None]
        self.needed, _ = reach([*goals, *grads], lambda n: False)
        self.apart: set[tuple[str, int]] = set()
        self.fixed: set[fx.Node] | None = None

    def _near(self) -> tuple[dict[fx.Node, set[int]], set[fx.Node]]:
        number = {n: s for s, n in enumerate(self.into)}
        of_params, of_batch, near = set(), set(), {}
        for n in self.graph.nodes:
            path = self.inputs.get(n)
            if path is not None:
                (of_params if layer_of(path)[0].startswith("0/") else of_batch).add(n)
            if any(m in of_params for m in n.all_input_nodes):
                of_params.add(n)
            if any(m in of_batch for m in n.all_input_nodes):
                of_batch.add(n)
            near[n] = set()
            for m in n.all_input_nodes:
                near[n] |= {number[m]} if m in number else near[m] if m in self.forward else set()
        above, _ = reach([self.into[0]], lambda n: False)
        for n in self.graph.nodes:
            if n in above and n in of_params and n in of_batch:
                near[n] = {0}
        for s, n in enumerate(self.into):
            if near[n] - {max(s - 1, 0)}:
                raise self._skips(n, near[n], f"block {self.begins[s]}, at which stage {s} begins")
        loose = {n for n in self.graph.nodes if not near[n]}
        for s, n in enumerate(self.into):
            near[n] = {s}
        return near, loose

    def _homes(self) -> dict[fx.Node, set[int]]:
        """Of each node the stages whose values it is made of; of a gradient, where it is computed."""
        gradient = {n: max(s - 1, 0) for s, n in enumerate(self.back) if n is not None}
        home: dict[fx.Node, set[int]] = {}
        for n in self.graph.nodes:
            if n in self.forward:
                home[n] = set(self.near[n])
            elif n in gradient:
                home[n] = {self.back.index(n)}
            else:
                home[n] = set()
                for m in n.all_input_nodes:
                    home[n] |= {gradient[m]} if m in gradient else home[m]
        self.loose -= {n for n in self.graph.nodes if home[n]}
        return home

    def _saved(self, n: fx.Node) -> bool:
        """Whether a value of the forward is kept, where another part reads it."""
        return n in self.forward and n not in self.loose and self._whole(n)

    def _whole(self, n: fx.Node) -> bool:
        """Whether a value can be an output of a part: a tensor that is no view of another value."""
        return n not in self.inputs and isinstance(n.meta.get("val"), torch.Tensor) and base_of(n) is n

    def parts(self) -> Parts:
        """The parts of all stages."""
        grads: list[dict[str, fx.Node]] = [{} for _ in self.into]
        for path, node in self.outs.items():
            if not _is_gradient(path):
                continue
            terms = terms_by_stage(self.graph, node, self.home, f"{self.who}: {path!r}")
            if not self.home[node]:  # of a loss that is linear in what the last stage makes
                terms = {s: node for s in self._readers(path)}
            for s, term in terms.items():
                grads[s][path] = term
        self.order = {n: i for i, n in enumerate(self.graph.nodes)}  # with the terms
        shown = {path: n for path, n in self.outs.items() if not _is_gradient(path)}
        met, sides = self._sides(shown.values())
        of = {}
        for s in range(self.stages):
            of |= self._of_stage(s, grads[s], sides[s])
        return Parts(
            of,
            tuple(
                (self._leaves(s).name, self.into[s + 1].name) if s + 1 < self.stages else None
                for s in range(self.stages)
            ),
            tuple(
                (goal[0].name, node_of(self.back[s]).name) if (goal := self._goal(s)) and s else None
                for s in range(self.stages)
            ),
            tuple(tuple(n.name for n in found) for found in sides),
            self._part(list(shown.values()), met, list(shown)),
        )

    def _sides(self, shown: Iterable[fx.Node]) -> tuple[set[fx.Node], list[list[fx.Node]]]:
        """(what M reads of what is made before it; per stage what is made there). A value of no stage that is made of
        parameters (a penalty of a layer) is made where these are; so the last stage does not read a layer of another
        one for a sum that is shown alone."""
        of_params: dict[fx.Node, set[int]] = {}
        apart: set[fx.Node] = set()  # values of a stage that are made of parameters of others, too
        nodes, _ = reach(shown, lambda n: False)
        for n in self._sorted(nodes):
            read = [of_params[m] for m in n.all_input_nodes if m in of_params]
            if n in self.inputs and layer_of(self.inputs[n])[0].startswith("0/"):
                of_params[n] = self._stages_that_read(n)
            elif n in self.loose and read:
                of_params[n] = set.intersection(*read)
            elif n not in self.needed and (
                any(not self.near[n] <= of for of in read) or any(m in apart for m in n.all_input_nodes)
            ):
                apart.add(n)
        home = {n: min(of) for n, of in of_params.items() if of and n in self.loose and self._whole(n)}
        home |= {n: min(self.near[n]) for n in nodes if self._saved(n) and len(self.near[n]) == 1 and n not in apart}
        _, met = reach(shown, lambda n: n in home)
        return met, [self._sorted(n for n in met if home[n] == s) for s in range(self.stages)]

    def _readers(self, path: str) -> list[int]:
        """The first stage that reads a parameter, where its gradient has no stage; none where nothing reads it."""
        inputs = [n for n, name in self.inputs.items() if name == path.replace(GRADS, "0/", 1)]
        found = self._stages_that_read(*inputs)
        return [min(found)] if found else [0] if any(n.users for n in inputs) else []

    def _stages_that_read(self, *inputs: fx.Node) -> set[int]:
        """The stages that make something of these inputs which others need; if none, something that is shown."""
        todo, found, seen = list(inputs), {True: set[int](), False: set[int]()}, set[fx.Node]()
        while todo:
            n: Any = todo.pop()
            for user in n.users:
                if user in self.into:
                    found[True].add(max(self.into.index(user) - 1, 0))
                elif user in self.forward and user not in seen:
                    seen.add(user)
                    found[user in self.needed] |= self.near[user]
                    todo += [] if self.near[user] else [user]
        return found[True] or found[False]

    def _leaves(self, s: int) -> Any:
        """What stage s gives to the next one."""
        return self.into[s + 1].args[0]

    def _goal(self, s: int) -> list[Any]:
        """What B of stage s is for: the gradient at its mark, if there is one."""
        back = self.back[s]
        return [] if back is None else [back.args[0]]

    def _of_stage(self, s: int, grads: dict[str, fx.Node], sides: list[fx.Node]) -> dict[tuple[str, int], Part]:
        last = s + 1 == self.stages
        own = {self.into[s]} if s else set()
        given = set() if last or self.back[s + 1] is None else {self.back[s + 1]}
        goal = self._goal(s)
        b_nodes, b_met = reach(goal, lambda n: n in given or self._saved(n))
        b_nodes |= {item for n in b_nodes for item in n.users if item.target is operator.getitem}
        made = {n for n in b_nodes if n not in self.loose and self._whole(n)}
        _, w_met = reach(grads.values(), lambda n: n in given or n in made or self._saved(n))
        read = {n for n in b_met | w_met if self._saved(n)}
        for n in read:
            if self.near[n] != {s}:
                raise ValueError(
                    f"{self.who}: stage {s}: got a backward that reads {n.name} ({_line(n)}), made of values of "
                    f"stages {', '.join(map(str, sorted(self.near[n])))}, wanted values of one stage; make it a metric "
                    "(detach it), or begin other stages"
                )
        for n in (x for x in w_met if x in given or x in made):
            assert n in given or self.home[n] <= {s}, n
        kept = self._sorted(read - own)
        between = self._sorted(n for n in w_met if n in made)
        leave = [] if last else [self._leaves(s)]
        f_gives = list(dict.fromkeys([*leave, *sides, *kept]))
        stop = set(self.into[1:])
        _, f_met = reach(f_gives, lambda n: n in stop)
        if f_met - own:
            n = self._sorted(f_met - own)[0]
            raise self._skips(n, {self.into.index(n)}, f"stage {s}")
        b_gives = list(dict.fromkeys([*goal, *between]))
        of, ends = {}, dict[fx.Node, fx.Node]()
        if ("R", s) in self.apart:
            ends = self._tails(grads.values())
            paths = [path for path, n in grads.items() if n in ends]
            of["R", s] = self._part([grads[path] for path in paths], set(ends.values()), paths)
        own_grads = {path: n for path, n in grads.items() if n not in ends}
        w_given = [*own_grads.values(), *dict.fromkeys(ends.values())]
        w_paths = [*own_grads, *(n.name for n in dict.fromkeys(ends.values()))]
        known = {"F": own, "B": read | given, "W": read | given | set(between)}
        gathers = sorted(kind for kind, stage in self.apart if stage == s and kind[0] == "G")
        if gathers:
            each = {"F": f_gives, "B": b_gives, "W": w_given}
            weights = {kind: self._weights(gives, known[kind]) for kind, gives in each.items()}
            for kind in gathers:
                of[kind, s] = self._part(self._sorted(set().union(*(weights[reader] for reader in kind[1:]))), set())
            known = {kind: known[kind] | weights[kind] for kind in known}
        return of | {
            ("F", s): self._part(f_gives, known["F"]),
            ("B", s): self._part(b_gives, known["B"]),
            ("W", s): self._part(w_given, known["W"], w_paths),
        }

    def _weights(self, gives: list[fx.Node], known: set) -> set[fx.Node]:
        """What a part reads that is made of parameters alone, of more than views."""
        if self.fixed is None:
            self.fixed = self._fixed()
        nodes, found = reach(gives, lambda n: n in known or n in self.inputs)[0], set()
        for n in nodes:
            read = n.all_input_nodes if n not in self.fixed else [n] if n in gives else []
            found |= {base for m in read if m in self.fixed and self._whole(base := base_of(m))}
        return found

    def _fixed(self) -> set[fx.Node]:
        """What is made of parameters, and of nothing that differs by microbatch. Equal ones become one: the gather
        for a backward is that for its forward."""
        found, varies, known = set[fx.Node](), set[fx.Node](), dict[Any, fx.Node]()
        for n in list(self.graph.nodes):
            if n in self.inputs:
                (found if layer_of(self.inputs[n])[0].startswith("0/") else varies).add(n)
                if not layer_of(self.inputs[n])[0].startswith(("0/", "1/")):
                    varies.discard(n)
                continue
            if n not in self.loose or n.op != "call_function" or any(m in varies for m in n.all_input_nodes):
                varies.add(n)
            elif any(m in found for m in n.all_input_nodes):
                found.add(n)
                same: Any = n.args[0]
                if opname(n.target) not in ("detach", "alias") or same not in found:
                    same = known.setdefault((n.target, str(n.args), str(n.kwargs)), n)
                if same is not n:
                    n.replace_all_uses_with(same)
                    found.discard(n)
        return found

    def _tails(self, grads: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
        """{gradient: the last value behind which it differs by microbatch through this alone}, for those that are
        linear in it with a sum over ranks between: R applies what is behind to the sum of all microbatches."""
        ends, way = dict[fx.Node, fx.Node](), dict[fx.Node, set[fx.Node]]()
        for n in dict.fromkeys(grads):
            of: Any = n
            steps: list[Any] = [n]
            whole = 0
            while True:
                at = linear_in(of)
                if of.target is operator.getitem and summing(of.args[0]) is not None:
                    steps += [of.args[0], of.args[0].args[0][of.args[1]]]
                    whole = len(steps)
                elif at and [m for m in of.all_input_nodes if m not in self.loose] == [of.args[at[0]]]:
                    steps.append(of.args[at[0]])
                else:
                    break
                of = steps[-1]
            if not whole:
                continue
            steps, end = steps[:whole], base_of(steps[whole - 1])
            while steps[-1] is not end:
                steps.append(steps[-1].args[0])
            if self._whole(end) and self.home[end] == self.home[n]:
                ends[n], way[n] = end, set(steps)
        while True:  # a sum over ranks of several gradients has those of all of them
            known = set(ends.values())
            allowed = self.loose.union(*(way[n] for n in ends))
            bad = [n for n in ends if not reach([n], known.__contains__)[0] <= allowed]
            if not bad:
                return ends
            ends = {n: end for n, end in ends.items() if n not in bad}

    def _part(self, gives: list[fx.Node], known: set, paths: Sequence[str] | None = None) -> Part:
        """The part that gives these nodes, of inputs of the graph and values that are known."""
        nodes, met = reach(gives, lambda n: n in known or n in self.inputs)
        takes = self._sorted(met)
        graph = extracted(takes, self._sorted(nodes), gives)
        return Part(
            graph,
            tuple(self.inputs.get(n, n.name) for n in takes),
            tuple(paths if paths is not None else (n.name for n in gives)),
        )

    def _sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)

    def _skips(self, n: fx.Node, near: set[int], where: str) -> ValueError:
        return ValueError(
            f"{self.who}: {where}: got a value ({_line(n)}) of stages {', '.join(map(str, sorted(near)))}, wanted "
            "those of the stage before alone, as nothing skips a stage; let it go from block to block with x "
            "(torch.cat), or make stages in which it does not cross one"
        )


def _is_gradient(path: str) -> bool:
    return layer_of(path)[0].startswith(GRADS)


def _copy(graph: fx.Graph) -> fx.Graph:
    new, copied = fx.Graph(graph.owning_module), {}
    new.output(new.graph_copy(graph, copied))
    return new


def _erase_marks(graph: fx.Graph, which: Callable[[int], bool]) -> None:
    for n in list(graph.nodes):
        if n.target is MARK and which(n.args[1]):
            n.replace_all_uses_with(n.args[0])
            graph.erase_node(n)


def blocks_of(graph: fx.Graph, who: str) -> int:
    """How many blocks have a mark. ValueError, naming the line where the stack is unbound, where none has."""
    return 1 + max(_marks(graph, who))


def _marks(graph: fx.Graph, who: str) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for n in graph.nodes:
        if n.target is MARK:
            found.setdefault(n.args[1], []).append(n)
    if not found:
        stack = next((n for n in graph.nodes if n.target is torch.ops.aten.unbind.int), None)
        where = "" if stack is None else f"; its stack is taken apart at {_line(stack)}"
        raise ValueError(
            f"{who}: got a loss without marks of stages, wanted one before each block: "
            f"x = block(step.stage(x, n), w), n from 0{where}"
        )
    return found


def _require_marks(graph: fx.Graph, begins: Sequence[int], blocks: int, gradient: bool, who: str) -> None:
    """ValueError unless each of so many blocks has its mark. gradient: and one in the backward."""
    found = _marks(graph, who)
    count = max(found) + 1
    missing = [n for n in range(count) if n not in found]
    if missing:
        raise ValueError(
            f"{who}: got no step.stage(x, {missing[0]}) ({_line(found[max(found)][0])} has {max(found)}), wanted one "
            "before each block, n from 0; number the blocks"
        )
    for n, marks in found.items():
        if len(marks) > 2:
            raise ValueError(
                f"{who}: got step.stage(x, {n}) {(len(marks) + 1) // 2} times ({_line(marks[0])}), wanted it once "
                "before block n; number the blocks"
            )
    forward = [n for n in graph.nodes if n.target is MARK][:count]  # those of the backward are behind
    for at, n in enumerate(forward):
        if n.args[1] != at:
            raise ValueError(
                f"{who}: got step.stage(x, {n.args[1]}) ({_line(n)}) where block {at} begins, wanted each once, in the "
                "order of the blocks; number them from 0"
            )
    if count != blocks:
        raise ValueError(
            f"{who}: got {len(begins)} stages of {blocks} blocks and {count} marks of blocks ({_line(found[0][0])}), "
            "wanted as many blocks as there are; say how many each stage has"
        )
    for n in begins[1:]:
        if gradient and len(found[n]) < 2:
            raise ValueError(
                f"{who}: step.stage(x, {n}) ({_line(found[n][0])}): got a value without a gradient, wanted one that "
                "the loss depends on; look for .detach() behind it"
            )


def _line(n: Any) -> str:
    """The user's line of a node; of a placeholder, its name."""
    return user_line(n.meta.get("at", n.name))
