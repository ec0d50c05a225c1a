"""Steps on random numbers: what rules leave open is run on simulated ranks, and on one, and compared.

The step on one rank is what `Description.on` makes, or the same function with what it closes over moved to a mesh of
ones (`other_mesh.py`), traced again. Both graphs run in torch.float64 on the same arrays. An output that differs far
beyond rounding, on all draws, is no output of one rank: a finding, as rounding, ties and zeros are not to blame; of one
that rules prove it is unproven then. Where both agree nothing is proven: numbers show mistakes, and not that there are
none.

A plain number may have been made of the mesh, and be another on one rank: whole numbers that the user's functions close
over, and those in the graph. A difference counts where it is there in each reading of them. What rules prove, of a step
that was told no plain number of ranks, has no reading of what is written in it: `/ 2` is a half. Nothing is said of
graphs whose hops may be counted by such a number, of what cannot be traced or computed so, and of steps too large.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fmegatron import tree
from fmegatron.collectives import kinds, table
from fmegatron.layout import Layout, Mesh, rank_counts
from fmegatron.step import opaque, widen
from fmegatron.step.checker.context import GO_ON, Finding, Report, Unproven, line_of, op_name
from fmegatron.step.checker.scaled_numbers import FAULTS, there_of, told_ranks
from fmegatron.step.checker.shapes import Open
from fmegatron.step.checker.sizes import is_cut
from fmegatron.step.description import Description
from fmegatron.step.every_rank import interpret
from fmegatron.step.graph.nodes import node_of
from fmegatron.step.other_mesh import OneRank, on_one_rank, ones
from fmegatron.step.tracing import Traced, trace

__all__ = ["Step", "differing"]

_MOST = 1 << 25  # elements that all ranks make together at most
_NODES = 1 << 17  # and ops that they run
_TRACES = 12  # of readings of numbers that functions close over at most
_RUNS = 128  # and of those in a graph
_FAR, _NEAR = 1e-6, 1e-4  # of what differs, and of what a reading may explain
_LESS = 1e-2  # of a difference, which is left where a reading explains it
_BACK = " (backward)"
_LOOK = "look at what it adds up, divides by, cuts and sends; testing.parity compares each line with one rank"
_RANKS = "was told a number of ranks, and with that of one rank the step makes other numbers, on random ones"
_PLAIN = "on random numbers it is not what one rank makes: a number may be made of that of ranks, or of a part's size"
_TOLD = "numbers are made of a size of a rank's part, and on random numbers the step is not what one rank makes of them"
# Of others numbers are dims, exponents, dtypes, and shapes, which a trace on one rank has of its own.
_OF_NUMBERS = frozenset(
    "mul div add sub rsub full full_like scalar_tensor lift_fresh_copy clamp clamp_min clamp_max".split()
)


class Step(NamedTuple):
    """What is compared: a function and what it is called with (layouts, or specs), its trace, and a layout per output
    (None: the same on all ranks; another value: it is not compared)."""

    fn: Callable | Description
    args: tuple
    traced: Traced
    outputs: Sequence[Any]
    empty: Callable[[Layout], torch.Tensor]


def differing(report: Report, step: Step, mesh: Mesh, before: Report | None = None) -> Report:
    """The report, where lines are findings that are unproven and of which an output is another than on one rank; and
    where an output is unproven that rules prove and that is another there: numbers that Python made of a number of
    ranks or of a size of a part (`0.9 * axes[name].size` asks the float), and what is cut by them, no rule sees.
    before: the report without what was taken for numbers of ranks: that stays where the step cannot be run with those
    of one rank, or then differs."""
    vouched = {path for one, _ in report.silenced if isinstance(one, Unproven) for path in one.outputs}
    open_ = {path for one in report.unproven for path in one.outputs} - vouched
    nodes = step.traced.graph_module.graph.nodes
    told = next((n for n in nodes if n.meta.get("asked") or n.meta.get("sums") or is_cut(n)), None)
    outputs = zip(step.traced.out_paths, step.traced.outputs, strict=True)
    of_number = {path for path, node in outputs if _is_count_of_number(node)} | vouched
    ranks = told_ranks(step.fn, mesh)
    paths = [p for p in step.traced.out_paths if p not in of_number]
    trusted = any(isinstance(one, Finding) for one, _ in report.silenced)  # what it makes may differ as the user knows
    if not paths or trusted or (isinstance(step.fn, Description) and step.fn.microbatches > 1):
        return report
    try:
        with torch.no_grad():
            compared, proven = _Compared(step, mesh), [path for path in paths if path not in open_]
            wrong = compared.different([path for path in paths if path in open_])
            beside = compared.of_other_shapes(proven)
            beside |= compared.different([p for p in proven if p not in beside], made=False, written=bool(ranks))
            as_told = compared.different_as_told([path for path in proven if path not in beside], ranks)
            beside |= as_told or set()
            if before is not None and (as_told is None or beside):
                return differing(before, step, mesh)
    except FAULTS:  # it cannot be run so: what was open stays open
        return report if before is None else before
    found = _with_findings(report, wrong)
    if not beside:
        return found
    axes = tuple(axis for axis in mesh.names if mesh[axis] > 1)
    differ = tuple(p for p in paths if p in beside)
    if told is not None:
        at, op, why = line_of(told), op_name(told), _TOLD
    elif ranks:
        at, op, why = ranks[0].at, "a number of ranks", _RANKS
    else:
        node = step.traced.outputs[step.traced.out_paths.index(differ[0])]
        while node.target is torch.ops.aten.detach.default:  # of the line that calls the step
            node = node_of(node.args[0])
        at, op, why = line_of(node), op_name(node), _PLAIN
    more = Unproven(at, op, axes, why, GO_ON, differ)
    return dataclasses.replace(found, unproven=(*found.unproven, more))


def _with_findings(report: Report, wrong: set[str]) -> Report:
    """The report, where open lines with outputs that are wrong are findings."""
    found, left, told = [], [], set[str]()
    for one in report.unproven:
        mine = [path for path in one.outputs if path in wrong and path not in told]
        told.update(mine)
        if not mine:
            left.append(one)
            continue
        more = f" and {len(mine) - 1} more" if len(mine) > 1 else ""
        what = f"{one.why}; and on random numbers {mine[0]}{more} is not what one rank makes of them"
        found.append(Finding(one.at, one.op, one.axes[0], what, _LOOK))
    left = [one for one in left if not set(one.outputs) <= wrong] if found else left
    return dataclasses.replace(report, findings=(*report.findings, *found), unproven=tuple(left))


class _Graph(NamedTuple):
    graph: torch.fx.Graph
    paths: list[str]
    mesh: Mesh


class _Compared:
    """A step on its mesh and on one rank."""

    def __init__(self, step: Step, mesh: Mesh):
        self.step, self.mesh, self.one = step, mesh, ones(mesh)
        self.layouts = [getattr(x, "layout", x) for x in tree.leaves(tree.layouts(step.args))]
        self.stated = isinstance(step.fn, Description) and step.fn.on is not None  # how it is on one rank
        self.many = self._flat(step.traced, mesh)
        local = [n for x in self.layouts for n in (*x.shape, *x.local_shape(0))]
        self._sizes = frozenset(n for n in (*local, *map(int, mesh.sizes)) if n > 1)
        if any(layout.unreduced for layout in self.layouts) or (not self.stated and _may_count_hops(self.many.graph)):
            raise Open

    def _flat(self, traced: Traced, mesh: Mesh) -> _Graph:
        wide = widen.widened(traced)
        graph = opaque.inline_layers(wide.graph_module.graph)
        kinds.require_mesh_of_graph(graph, mesh, "check", "the layouts")
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        size = sum(x.numel() for n in nodes for x in tree.leaves(n.meta.get("val")) if isinstance(x, torch.Tensor))
        if size * mesh.size > _MOST or len(nodes) * mesh.size > _NODES:
            raise Open
        return _Graph(graph, traced.out_paths, mesh)

    def _on_one(self, instead: Mapping[Any, float] | None = None) -> tuple[_Graph, set[int], set[float]]:
        """The step on one rank, the plain numbers that it closes over, and those of `instead` among them."""
        fn, plain, taken = self.step.fn, set[int](), set[float]()
        if isinstance(fn, Description) and fn.on is not None:
            described = fn.on(self.one)
            function, given = described.function, (described.state, described.batch)
        else:
            moved = OneRank(self.mesh, instead)
            function = moved(fn.function if isinstance(fn, Description) else fn)
            given, plain = tree.map(on_one_rank, tree.layouts(self.step.args)), moved.plain
            taken = moved.taken
        layouts = tree.layouts(given)
        if [x.shape for x in tree.leaves(layouts)] != [x.shape for x in self.layouts]:
            raise Open
        traced = trace(function, tree.map(self.step.empty, layouts))
        if traced.out_paths != self.many.paths or any(map(_of_ranks, traced.graph_module.graph.nodes)):
            raise Open
        return self._flat(traced, self.one), plain, taken

    def different(self, paths: Sequence[str], made: bool = True, written: bool = True) -> set[str]:
        """Those of these outputs that are others than on one rank, on all draws; none where a reading explains them.

        made: there are readings, too, of numbers that are others on one rank already, as they are made of sizes.
        written: there are readings, too, of numbers in the step, and not only of those that it closes over."""
        if not paths:
            return set()
        (graph, plain, _), draws, ranks = self._as_written, self._draws, self._ranks
        wrong = set(paths)
        for mine, (one, near) in zip(ranks, self._ones, strict=True):
            wrong = {p for p in wrong if self._differs(p, mine, one, near)}
        if not wrong or self.stated:
            return wrong
        changed = self._changed(graph, made) if written else ()
        gaps = {p: self._gap(p, ranks[0], self._ones[0][0]) for p in wrong}
        readings = ((other, draws[0]) for other in itertools.chain(self._closed_over(plain), changed))
        for other, draw in itertools.chain(((graph, draw) for draw in self._dealt(draws[0])), readings):
            try:
                one = self._ran(other, [[x] for x in draw])
            except FAULTS:  # no reading of it
                continue
            if any(self._differs(p, ranks[0], one, one, _NEAR) for p in paths):
                continue
            if all(self._gap(p, ranks[0], one) <= _LESS * gaps[p] for p in wrong):  # and not as near as it was before
                return set()
        return wrong

    def of_other_shapes(self, paths: Sequence[str]) -> set[str]:
        """Those of these outputs that on one rank have not the shape of what they stand for."""
        at = {path: self.many.paths.index(path) for path in paths}
        layouts = {path: layout for path in paths if isinstance(layout := self.step.outputs[at[path]], Layout)}
        given = {path: tuple(self._ones[0][0][at[path]][0].shape) for path in layouts}
        return {path for path, layout in layouts.items() if not layout.unreduced and given[path] != layout.shape}

    def different_as_told(self, paths: Sequence[str], told: Sequence[rank_counts.Told]) -> set[str] | None:
        """Those of these outputs that are others than on one rank where the plain numbers of ranks that Python was told
        are those of one rank: in each reading of what else may have been made of these. None: it has none."""
        numbers = there_of(self.mesh, told, self.mesh.names)
        if self.stated or not paths or not numbers:
            return set()
        found: set[str] | None = None
        for more in itertools.chain(({},), self._readings(self._as_written[1] - numbers.keys())):
            try:
                graph, _, taken = self._on_one({**numbers, **more})
                if not taken & numbers.keys():
                    return set()  # as it is written
                one = self._ran(graph, [[x] for x in self._draws[0]])
            except FAULTS:  # no reading of it
                continue
            wrong = {p for p in paths if self._differs(p, self._ranks[0], one, one, _NEAR)}
            if not wrong:
                return set()
            found = found or wrong
        return found

    # ---- values, which all questions share
    @functools.cached_property
    def _as_written(self) -> tuple[_Graph, set[int], set[float]]:
        return self._on_one()

    @functools.cached_property
    def _draws(self) -> list[list[torch.Tensor]]:
        bounds = self._bounds(self._as_written[0])
        return [[self._drawn(i, turn, bounds) for i in range(len(self.layouts))] for turn in (0, 1)]

    @functools.cached_property
    def _ranks(self) -> list[list[list[torch.Tensor]]]:
        """Of each draw the outputs of all ranks."""
        return [self._ran_on_ranks(draw) for draw in self._draws]

    @functools.cached_property
    def _ones(self) -> list[tuple[list, list]]:
        """Of each draw the outputs of one rank, and those of inputs that are moved by a little."""
        graph = self._as_written[0]
        return [
            (self._ran(graph, [[x] for x in draw]), self._ran(graph, [[_nudged(x)] for x in draw]))
            for draw in self._draws
        ]

    def _drawn(self, i: int, turn: int, bounds: Mapping[int, int]) -> torch.Tensor:
        leaf, layout = tree.leaves(self.step.args)[i], self.layouts[i]
        draw = torch.Generator().manual_seed(1000 * turn + i)
        number = getattr(getattr(leaf, "init", None), "value", None)
        if not layout.dtype.is_floating_point:
            if number is not None:
                return torch.full(layout.shape, number, dtype=layout.dtype)
            below = 2 if layout.dtype is torch.bool else bounds.get(i, 2)
            return torch.randint(below, layout.shape, generator=draw).to(layout.dtype)
        x = torch.rand(layout.shape, generator=draw, dtype=torch.float64)
        if number is not None:
            return number + 0.1 * x
        return x + 0.1 if turn else torch.randn(layout.shape, generator=draw, dtype=torch.float64) * 0.7

    def _bounds(self, graph: _Graph) -> dict[int, int]:
        """Of each input of whole numbers the largest bound, a size of some dim, with which one rank can be computed."""
        leaves, bounds = tree.leaves(self.step.args), {}
        whole = [i for i, x in enumerate(self.layouts) if not x.dtype.is_floating_point and x.dtype is not torch.bool]
        sizes = sorted({n for x in self.layouts for n in x.shape if n > 2}, reverse=True)
        for i in whole:
            for size in sizes if getattr(leaves[i], "init", None) is None else ():
                try:
                    trial = {**bounds, i: size}
                    self._ran(graph, [[self._drawn(j, 0, trial)] for j in range(len(self.layouts))])
                except FAULTS:
                    continue
                bounds[i] = size
                break
        return bounds

    def _ran(self, graph: _Graph, inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return interpret(graph.graph, graph.mesh, [widen.wide_column(column) for column in inputs])[0]

    def _ran_on_ranks(self, draw: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        ranks = range(self.mesh.size)
        of = zip(draw, self.layouts, strict=True)
        return self._ran(self.many, [[tree.local(x, layout, r) for r in ranks] for x, layout in of])

    # ---- comparison
    def _differs(self, path: str, ranks: list, one: list, near: list, far: float = _FAR) -> bool:
        """Whether an output is another than on one rank, by more than it moves where the inputs do by a little."""
        at = self.many.paths.index(path)
        layout, mine, whole = self.step.outputs[at], ranks[at], one[at][0].double()
        moved = (near[at][0].double() - whole).abs()
        if not (layout is None or isinstance(layout, Layout)) or not bool((whole.isfinite() & moved.isfinite()).all()):
            return False
        if layout is not None and (layout.unreduced or tuple(whole.shape) != layout.shape):
            return False
        size = whole.abs()[whole != 0]
        room = far * (whole.abs() + (size.median() if size.numel() else 0)) + 1e4 * moved + 1e-12
        differs = False
        for rank, x in enumerate(mine):
            wanted, allowed = (of if layout is None else tree.local(of, layout, rank) for of in (whole, room))
            if x.shape != wanted.shape or not bool(x.isfinite().all()):
                return False
            differs |= bool(((x.double() - wanted).abs() > allowed).any())
        return differs

    def _gap(self, path: str, ranks: list, one: list) -> float:
        """The largest difference of an element of an output from what one rank makes."""
        at = self.many.paths.index(path)
        layout, whole = self.step.outputs[at], one[at][0].double()
        parts = [whole if layout is None else tree.local(whole, layout, rank) for rank in range(len(ranks[at]))]
        gaps = [(x.double() - part).abs() for x, part in zip(ranks[at], parts, strict=True)]
        return max((float(gap.max()) for gap in gaps if gap.numel()), default=0.0)

    # ---- readings
    def _dealt(self, draw: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The arrays with rows of data in other orders: those in which parts of one rank are the parts of all ranks."""
        rows = {}
        for i, (path, layout) in enumerate(zip(self.step.traced.in_paths, self.layouts, strict=True)):
            local = layout.local_shape(0)
            if path.partition("/")[0] != "0" and local and 0 < local[0] < layout.shape[0]:
                rows[i] = local[0]
        for parts in sorted({n for size in rows.values() for n in range(2, size + 1) if not size % n}):
            dealt = list(draw)
            for i, size in rows.items():
                if not size % parts:
                    x = draw[i].unflatten(0, (-1, parts, size // parts))
                    dealt[i] = x.transpose(0, 1).flatten(0, 2)
            yield dealt

    def _closed_over(self, plain: set[int]) -> Iterator[_Graph]:
        """The step where plain numbers that functions close over are what they may be on one rank."""
        for instead in self._readings(plain):
            try:
                yield self._on_one(instead)[0]
            except FAULTS:  # no reading of it
                continue

    def _readings(self, plain: set[int]) -> Iterator[dict[int, int]]:
        """What these numbers may be on one rank: each of them, and all."""
        numbers = sorted(n for n in plain if self._is_of_mesh(n))
        every = [self._instead(n) for n in numbers]
        given = [(n, one) for n, others in zip(numbers, every, strict=True) for one in others]
        if len(given) > _TRACES:
            raise Open
        yield from ({n: one} for n, one in given)
        if len(numbers) > 1:
            yield from (dict(zip(numbers, way, strict=False)) for way in zip(*every, strict=False))

    def _is_of_mesh(self, n: int) -> bool:
        """Whether a whole number is a product of sizes and numbers of ranks, or one less than one."""
        return any(_divides_into(n + more, self._sizes) for more in (0, 1))

    def _instead(self, n: int) -> list[int]:
        found = []
        for ranks in _products([int(size) for size in self.mesh.sizes if size > 1]):
            found += [n * ranks] + ([n // ranks] if not n % ranks else [])
        return found

    def _changed(self, graph: _Graph, made: bool) -> Iterator[_Graph]:
        """The graph with numbers in it that a plain number of ranks, or of rows, would make others on one rank."""
        places: dict[tuple, list[torch.fx.Node]] = {}
        lines = dict[str, set[int]]()
        for node in self.many.graph.nodes:
            lines.setdefault(line_of(node).removesuffix(_BACK), set()).update(map(_whole, _numbers(node)))
        shapes = {n.name: n.meta["val"].shape for n in graph.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
        for node in graph.graph.nodes:  # the backward behind the forward, of whose numbers it may have some
            line, back = line_of(node).removesuffix(_BACK), line_of(node).endswith(_BACK)
            for number in _numbers(node) if line in lines else ():
                whole = _whole(number)
                if not made and whole not in lines[line]:
                    continue
                if (
                    (whole, line) in places
                    or not (back or _is_of_sizes(node, number, shapes))
                    and self._is_of_mesh(whole)
                ):
                    places.setdefault((whole, line), []).append(node)
        ranks = _products([int(size) for size in self.mesh.sizes if size > 1])
        groups = [[place] for place in places]
        groups += [[p for p in places if p[0] == n] for n in {n for n, _ in places}]
        groups += [list(pair) for pair in itertools.combinations(places, 2)]
        groups = [list(one) for one in dict.fromkeys(map(tuple, groups))]
        if 2 * len(groups) * len(ranks) > _RUNS:
            groups = groups[: 2 * len(places)]
        for group, factor in itertools.product(groups, [f for n in ranks for f in (float(n), 1 / n)]):
            wanted = {
                number: [node.name for place in group if place[0] == number for node in places[place]]
                for number, _ in group
            }
            yield _with_numbers(graph, wanted, factor)
        for (number, _), nodes in places.items():  # of a backward, a number may be one of torch's as well
            back = [node.name for node in nodes if line_of(node).endswith(_BACK)]
            ahead = [node.name for node in nodes if node.name not in back]
            for factor in [f for n in ranks for f in (float(n), 1 / n)] if len(back) > 1 else ():
                yield from (_with_numbers(graph, {number: [*ahead, one]}, factor) for one in back[:8])


def _products(sizes: Sequence[int]) -> list[int]:
    """The numbers of ranks along some of the axes."""
    some = (one for k in range(1, len(sizes) + 1) for one in itertools.combinations(sizes, k))
    return sorted({math.prod(one) for one in some})


def _divides_into(n: int, sizes: frozenset[int]) -> bool:
    """Whether a number is a product of some of these, each as often as it likes."""
    return n == 1 or any(not n % size and _divides_into(n // size, sizes) for size in sizes)


def _numbers(node: torch.fx.Node) -> list[float]:
    """The numbers in a node that may have been made of a plain whole one, beyond 1, or divide by one."""
    if node.op != "call_function" or op_name(node).rstrip("_") not in _OF_NUMBERS:
        return []
    given = [abs(x) for x in node.args if isinstance(x, (int, float)) and not isinstance(x, bool) and x]
    return [x for x in given if x != 1 and math.isfinite(x) and abs((y := max(x, 1 / x)) - round(y)) < 1e-9 * y < 1e-3]


def _is_of_sizes(node: torch.fx.Node, number: float, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a number is a product of sizes, and of nothing else."""
    for value, of in node.meta.get("made", ()):
        if (
            of is None
            or of[1]
            or of[2]
            or abs(abs(value) - number) > 1e-9 * number
            or any(n not in shapes for n, *_ in of[0])
        ):
            continue
        if abs(math.prod(shapes[name][d] ** float(power) for name, d, power in of[0]) / number - 1) < 1e-9:
            return True
    return False


def _with_numbers(graph: _Graph, wanted: Mapping[float, list[str]], factor: float) -> _Graph:
    """A copy in which numbers, in nodes of these names, are that many times as large."""
    made = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output = made.graph_copy(graph.graph, copies)
    made.output(output)
    for number, names in wanted.items():
        for old in graph.graph.nodes:
            if old.name not in names:
                continue
            new = copies[old]
            new.args = tuple(_times(x, number, factor) for x in new.args)
    return graph._replace(graph=made)


def _times(x: Any, number: float, factor: float) -> Any:
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not x:
        return x
    if abs(abs(x) - number) < 1e-9 * number:
        return int(x * factor) if isinstance(x, int) and (x * factor).is_integer() else x * factor
    return x / factor if abs(abs(x) * number - 1) < 1e-9 else x


def _nudged(x: torch.Tensor) -> torch.Tensor:
    """The values, moved by a little, of which an output moves by as little where it is not at a step."""
    if not x.is_floating_point():
        return x
    draw = torch.Generator().manual_seed(x.numel())
    return x * (1 + 1e-11 * torch.randn(x.shape, generator=draw, dtype=torch.float64))


def _of_ranks(node: torch.fx.Node) -> bool:
    """Whether a number of it is made of a number of ranks, which one rank has not."""
    made = node.meta.get("made", ())
    return bool(node.meta.get("ranks")) or any(of is not None and of[1] for _, of in made)


def _whole(number: float) -> int:
    """The whole number that it is, or by which it divides."""
    return round(max(number, 1 / number))


def _is_count_of_number(node: torch.fx.Node) -> bool:
    """Whether it is shown how much counts, of a number: by definition as many times as there are ranks."""
    while "times" not in node.meta and op_name(node) in ("detach", "clone", "alias", "view", "_to_copy"):
        node = node_of(node.args[0])
    return "times" in node.meta


def _may_count_hops(graph: torch.fx.Graph) -> bool:
    """Whether a line sends several times: how often, on one rank, a plain number in its code may say."""
    sent = [line_of(n) for n in graph.nodes if kinds.collective_of(n.target) is table.PPERMUTE]
    sent = [line for line in sent if not line.endswith(" (backward)")]
    return len(set(sent)) < len(sent)
