"""Record a pure step as one flat graph: forward, backward, optimizer, and collectives by the names of their axes.

The step runs once on fake tensors. No process group, device memory or rank is needed, so the graph of 16,384 ranks is
recorded on a laptop. Each node knows the line of the user's code that it comes from, and that of the library behind it
(`node.meta["at"]`: "exp.py:21 (in fmegatron/nn/norm.py:19)").
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fmegatron import tree
from fmegatron.collectives import kinds, known_ranks
from fmegatron.collectives import torch_private as of_torch
from fmegatron.layout import layout, notation, rank_counts
from fmegatron.step.graph.nodes import items_of, meta_of, storage_of
from fmegatron.step.lines import described, line_from, line_here
from fmegatron.step.purity import (
    generators_kept,
    require_keyed,
    require_no_generator,
    require_no_hidden_tensors,
    require_pure,
)
from fmegatron.step.recorder import Recorder, recorder_of
from fmegatron.step.refused import (
    OF_ONE_DEVICE,
    OF_ONE_DTYPE,
    explained,
    has_tensor,
    require_device_of_outputs,
    require_one_device,
    require_one_dtype,
    tell_failed,
)
from fmegatron.step.regather import regathered
from fmegatron.step.torch_private import (
    FakeTensorMode,
    fx_traceback,
    loop_of,
    opname,
    outside_of_tracing,
    quiet_about_shapes,
)
from fmegatron.step.watched import Seen
from fmegatron.tree import structure
from fmegatron.tree.labels import alike, label_of, labelled

__all__ = [
    "Traced",
    "as_count_of_number",
    "as_of",
    "described",
    "line_here",
    "make_fakes",
    "own_results",
    "record",
    "recorded",
    "trace",
]


@dataclass
class Traced:
    """A recorded step.

    graph_module: flat graph; placeholders are the tensor leaves of the arguments in tree order, the output is the list
    of the tensor leaves of the result. fakes: fake tensors of the placeholders. in_paths, out_paths: names of the
    leaves ("0/params/head/w"). out_tree: optree structure of the result; out_static: per leaf of the result None for a
    tensor, else (value,) of a Python constant. aliased: per output, whether it shares storage with an input. called_at:
    the line that called `trace`, which is that of ops for which no line inside of the step stands. made_here: lines
    that make a tensor on no device in particular, or on one by name. in_labels, out_labels: the layouts of
    the tensors of the arguments (`tree.place`), and what the function itself knew of those that it returned; None: not
    known.
    """

    graph_module: torch.fx.GraphModule
    fakes: list
    in_paths: list[str]
    out_paths: list[str]
    out_tree: Any
    out_static: list
    aliased: list[bool]
    fake_mode: Any = field(repr=False, default=None)
    called_at: str = ""
    made_here: list[str] = field(default_factory=list)
    in_labels: list[layout.Label | None] = field(default_factory=list)
    out_labels: list[layout.Label | None] = field(default_factory=list)

    @property
    def outputs(self) -> list[torch.fx.Node]:
        """The nodes that are returned, one per tensor leaf of the result."""
        return list(items_of(self.graph_module.graph.output_node().args[0]))

    def result(self, tensors) -> structure.Tree:
        """Put output tensors back into the tree that the step returned."""
        if len(self.out_paths) == len(self.out_static):
            return structure.unflatten(self.out_tree, tensors)
        rest = iter(tensors)
        return structure.unflatten(self.out_tree, [next(rest) if s is None else s[0] for s in self.out_static])


def trace(
    fn: Callable,
    args: tuple,
    *,
    fake_mode=None,
    mesh: layout.Mesh | None = None,
    reads: Seen | None = None,
    stages: bool = False,
) -> Traced:
    """Run `fn(*args)` once on fake tensors and return its flat graph.

    args: trees whose tensor leaves give shape, stride, dtype and device (values are not read; meta tensors will do);
    all other leaves are constants of the graph. `fn` may be any Python over torch, with `value_and_grad`, collectives
    on symbolic axes and compiled layers inside.
    mesh: of the ranks that will run it, where the arguments do not know theirs; within another trace, that of this one.
    reads: who notes the functions that are entered (`step.watched`). stages: whether marks of stages are recorded.
    Raises ValueError naming the line if `fn` changes an argument in place, reads the value of a tensor (`if x > 0`),
    uses a tensor that is not an argument, draws random numbers from a generator (`step.purity`), or returns tensors in
    what is no tree (a set, a dataclass, a generator). Numbers of Python's and numpy's generators are constants of the
    graph, as all Python numbers are.
    """
    name = getattr(fn, "__name__", "fn")
    paths, leaves, spec = structure.flatten(args)
    require_no_generator(paths, leaves, name)
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    labels = [label_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    in_paths = [path for path, t in zip(paths, is_tensor, strict=True) if t]
    for path, label in zip(in_paths, labels, strict=True):
        if label is not None:
            notation.require_shares(label.layout, f"{name}: argument {path!r}")
    mode = fake_mode or FakeTensorMode()
    fakes = make_fakes([leaf for leaf, t in zip(leaves, is_tensor, strict=True) if t], mode)
    known = next((label.layout.mesh for label in labels if label is not None), None)
    of_paths = {storage_of(x): path for x, path in zip(fakes, in_paths, strict=True)}
    made_here: list[str] = []
    second = any(x.is_meta for x in leaves if isinstance(x, torch.Tensor))
    with record(mode, name, known or mesh, of_paths, made_here, second, reads, stages) as recorder:
        for x, label in zip(recorder.inputs(fakes), labels, strict=True):
            if label is not None:
                labelled(x, label.layout)
        rest = iter(fakes)
        filled = [next(rest) if t else leaf for leaf, t in zip(leaves, is_tensor, strict=True)]
        out = fn(*structure.unflatten(spec, filled))
        out_paths, outs, out_tree = structure.flatten(out)
        require_no_hidden_tensors(out_paths, outs, name)
        out_static = [None if isinstance(o, torch.Tensor) else (rank_counts.plain(o),) for o in outs]
        out_paths = [p for p, o in zip(out_paths, outs, strict=True) if isinstance(o, torch.Tensor)]
        outs = [o for o in outs if isinstance(o, torch.Tensor)]
        out_labels = [label_of(o) for o in outs]
        inputs = {storage_of(t) for t in fakes}
        aliased = [storage_of(o) in inputs for o in outs]
        recorder.outputs([o.detach() for o in outs])
    graph_module = recorded(recorder, name)
    require_pure(graph_module, in_paths)
    graph_module = regathered(graph_module)
    found = (in_paths, out_paths, out_tree, out_static, aliased)
    called_at, _ = line_from(sys._getframe(1), None)
    return Traced(graph_module, fakes, *found, mode, called_at, made_here, labels, out_labels)


def own_results(fn: Callable, of: Sequence[int] | None = None) -> Callable:
    """`fn`, whose results share no memory with its arguments, or with those at these positions: what is returned as it
    was given is returned as a copy."""

    def own(*args):
        found = fn(*args)
        taken = args if of is None else [args[i] for i in of if i < len(args)]
        given = {storage_of(x) for x in tree.leaves(taken) if isinstance(x, torch.Tensor)}
        return tree.map(
            lambda x: alike(x.clone(), x) if isinstance(x, torch.Tensor) and storage_of(x) in given else x, found
        )

    return functools.wraps(fn)(own)


def make_fakes(tensors, mode) -> list:
    """Fake tensors of the same shape, stride, dtype and device."""
    with outside_of_tracing(), torch.inference_mode(False), mode:
        return [torch.empty_strided(*meta_of(t)[:2], dtype=t.dtype, device=t.device) for t in tensors]


@contextlib.contextmanager
def record(
    mode,
    name: str,
    mesh: layout.Mesh | None = None,
    paths: Mapping[int, str] = MappingProxyType({}),
    made_here: list[str] | None = None,
    second: bool = False,
    reads: Seen | None = None,
    stages: bool = False,
) -> Iterator[Recorder]:
    """Context in which ops on fake tensors of the mode are recorded, each with its source line; one autograd thread,
    because dispatch modes are per thread. `recorded` gives the graph, behind it. mesh: of the ranks that will run it;
    None: that of the trace around it, where there is one. paths: of the arguments by their memory (`storage_of`), which
    errors name. made_here: takes lines, as `Traced` has them. second: whether the arguments are on the device meta.
    reads: who notes what is entered (`step.watched`); None: who does of the trace around. stages: as `Recorded` has
    it."""
    lines = _Lines(paths, second, reads or known_ranks.recorded_reads(), sys._getframe(2).f_code)
    root = known_ranks.Recorded(mesh or known_ranks.recorded_mesh(), reads or known_ranks.recorded_reads(), stages)
    with (
        explained(name, paths, second),
        quiet_about_shapes(),
        generators_kept(name),
        outside_of_tracing(),
        torch.inference_mode(False),  # a step that takes gradients has them wherever it is called
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        mode,
        fx_traceback.preserve_node_meta(),
        recorder_of(root, lines) as recorder,
        _Copies(paths, [] if made_here is None else made_here),
    ):
        yield recorder


def recorded(recorder: Recorder, name: str) -> torch.fx.GraphModule:
    """The graph, whose nodes have lines. ValueError for one that draws from torch's generators."""
    graph_module = recorder.graph_module
    assert graph_module is not None, "outputs are given"
    _set_lines(graph_module)
    require_keyed(graph_module, name)
    return graph_module


# ---- lines -----------------------------------------------------------------------------------------------------------
_BACKWARD, _OF_BACKWARD, _OUTSIDE = "<backward>", " (backward)", " <outside>"
_AS_OF, _OF_RANKS, _OF_TORCH = "fmegatron_line", "fmegatron_ranks", "fmegatron_sizes"
_OF_NUMBER = "fmegatron_count_of_number"
_OF_PARTS, _OF_SUMS, _OF_GRADIENT, _ONE = "fmegatron_parts", "fmegatron_sums", "fmegatron_gradient", Fraction(1)
_OF_MADE = "fmegatron_made"


def as_of(line: str) -> contextlib.AbstractContextManager:
    """What is traced inside has this line: of the user's code that asked for it, and what for."""
    return fx_traceback.annotate({_AS_OF: line})


def as_count_of_number(times: tuple[int, ...]) -> contextlib.AbstractContextManager:
    """What is traced inside is a count that a loss_fn gave as a number, of all ranks and microbatches.

    times: the numbers of ranks along each axis, and of microbatches. No trace can tell the number of a rank's rows
    (`len(x)`), of which a mesh has as many as one rank, from that of a term that all ranks have (1, of a penalty; whole
    rows on a mesh that splits sequences), axis by axis: a parity allows for both.
    """
    return fx_traceback.annotate({_OF_NUMBER: times})


class _Lines:
    """Notes for every op of the forward the line of the user's code that it comes from. The arguments are those of
    `record`; top: the code that calls what is recorded, behind which no line is one of it."""

    def __init__(self, paths: Mapping[int, str], second: bool, reads: Seen | None, top: types.CodeType):
        self.paths, self.second, self.reads, self.top = paths, second, reads, top

    def __call__(self, func: Any, args: tuple, kwargs: dict, run: Callable) -> Any:
        """What the op gives, which `run` records."""
        if fx_traceback.current_meta.get("in_grad_fn"):
            fx_traceback.set_stack_trace([_BACKWARD])  # the mark that all versions of torch copy onto nodes
        else:
            line, inside = line_from(sys._getframe(1), self.top)
            if self.reads is not None:
                self.reads.look(sys._getframe(1))
            fx_traceback.set_stack_trace([line if inside else line + _OUTSIDE] if line else [])
        try:
            if opname(func) in OF_ONE_DTYPE:
                require_one_dtype(args)
            mutable = (schema := of_torch.schema_of(func)) is not None and schema.is_mutable
            if mutable or opname(func) in OF_ONE_DEVICE or kinds.collective_of(func):
                require_one_device(func, args, self.second)
            return run(*args, **kwargs)
        except Exception as e:
            tell_failed(e, func.name().partition("::")[2], args, kwargs, self.paths)
            raise


class _Copies(TorchFunctionMode):
    """What Python's copy and pickle make of tensors while a step is traced; left alone, fakes of another trace. And
    what torch refuses before an op runs, and what is made on no device in particular. paths, made_here: of `record`."""

    def __init__(self, paths: Mapping[int, str], made_here: list[str]):
        super().__init__()
        self.paths, self.made_here = paths, made_here

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__deepcopy__ and args[0].is_leaf:
            x: torch.Tensor = args[0]
            with torch.no_grad():
                return alike(x.clone(), x).requires_grad_(x.requires_grad)
        if func is torch.Tensor.__reduce_ex__:
            raise ValueError(
                f"{line_here()}: got a shallow copy or a pickle of a tensor (copy.copy, pickle, torch.save), wanted "
                "none, as while a step is traced a tensor has no values; x.clone() copies one"
            )
        if (loop := loop_of(func)) is not None:
            raise ValueError(
                f"{line_here()}: got {loop}, which runs functions as graphs of their own, wanted one flat graph, in "
                "which collectives, the check and donation see each op; torch.where(p, a, b) in place of a condition, "
                "`for i in range(n)` in place of a loop; step.layers compiles the body of many turns once"
            )
        if func in _SIZES:
            return _known(func, args, func(*args, **(kwargs or {})))
        known = _noted((*args, *(kwargs or {}).values()))
        if func in _GRADIENTS:
            known[_OF_GRADIENT] = True
        noted = fx_traceback.annotate(known) if known else contextlib.nullcontext()
        if func is torch.nn.functional.kl_div and (kwargs or {}).get("reduction") == "batchmean":
            noted = fx_traceback.annotate({_OF_TORCH: "rows"})
        elif func is torch.functional.einsum:
            noted = fx_traceback.annotate({_OF_TORCH: "ones"})
        try:
            if func is torch.autograd.grad:
                require_device_of_outputs(*args, **(kwargs or {}))
            with noted:
                made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and _is_made_here(func, args, kwargs or {}):
                self.made_here.append(line_here())
            return made
        except Exception as e:
            tell_failed(e, getattr(func, "__name__", "an op").strip("_"), args, kwargs, self.paths)
            raise


_NUMEL = (torch.Tensor.numel, torch.numel)
_SHAPE = torch.Tensor.shape.__get__  # pyright: ignore[reportAttributeAccessIssue]  of the descriptor
_SIZES = frozenset((_SHAPE, torch.Tensor.size, torch.Tensor.__len__, *_NUMEL))
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def _known(func: Callable, args: Sequence, found: Any) -> Any:
    """Sizes of a tensor that know whose they are."""
    node = of_torch.recorded_node(args[0]) if args and isinstance(args[0], torch.Tensor) else None
    if node is None:
        return found
    if func is torch.Tensor.__len__:  # Python makes a plain number of it
        rank_counts.SizeOf(node, 0).ask()
        return found
    if func in _NUMEL:
        dims = range(args[0].dim())
        return rank_counts.RankCount(found, tuple((rank_counts.SizeOf(node, d), _ONE) for d in dims)) if dims else found
    if not isinstance(found, torch.Size):
        return rank_counts.RankCount(found, ((rank_counts.SizeOf(node, args[1] % args[0].dim()), _ONE),))
    sizes = [rank_counts.RankCount(n, ((rank_counts.SizeOf(node, d), _ONE),)) for d, n in enumerate(found)]
    return torch.Size(sizes)


def _noted(given: Sequence) -> dict[str, Any]:
    """What nodes are to know of the numbers that their op is given."""
    over, sizes = None, []
    for a in given:
        if isinstance(a, rank_counts.OF_RANKS):
            over = over or rank_counts.of_ranks(a) or None
            sizes.append(a)
        elif isinstance(a, (tuple, list)):
            sizes += [one for one in a if isinstance(one, rank_counts.OF_RANKS)]
    known: dict[str, Any] = {} if over is None else {_OF_RANKS: over}
    if sizes and (found := [one for a in sizes if (one := _of_parts(a))]):
        known[_OF_PARTS] = tuple(found)
    if numbers := _numbers_in(given):
        made = [(a, _made_of(a.over)) for a in numbers]
        known[_OF_MADE] = tuple([(rank_counts.plain(a), None if of is None or _has_rest(of) else of) for a, of in made])
        if sums := tuple([(float(rank_counts.plain(a)), of) for a, of in made if of and rank_counts.of_sums(a)]):
            known[_OF_SUMS] = sums
    return known


def _numbers_in(given: Any) -> list:
    """Numbers that know of what they are made, in arguments, their lists and the slices of an index."""
    found = []
    for a in given:
        if isinstance(a, rank_counts.OF_RANKS):
            found.append(a)
        elif isinstance(a, (tuple, list)):
            found += _numbers_in(a)
        elif isinstance(a, slice):
            found += _numbers_in((a.start, a.stop, a.step))
    return found


def _made_of(over: Iterable[tuple[Any, Fraction]]) -> tuple | None:
    """Of what a number is made: (names of nodes, dims and powers of sizes; powers of numbers of ranks; ((number, (what
    each of its terms is here, None of a rest or a quotient, and of what), ...), power) of sums). None where that is not
    all of this graph."""
    sizes, ranks, sums = [], [], []
    for key, power in over:
        if isinstance(key, str):
            ranks.append((key, power))
        elif isinstance(key, rank_counts.SizeOf):
            if key.node.graph is not of_torch.recorded_graph():
                return None
            sizes.append((key.node.name, key.dim, power))
        else:
            terms = [_made_of(one) for one in key.terms]
            if None in terms:
                return None
            parts = key.parts or (None,) * len(terms)
            sums.append((rank_counts.plain(key.number), tuple(zip(parts, terms, strict=True)), power))
    return tuple(sizes), tuple(ranks), tuple(sums)


def _has_rest(made: tuple) -> bool:
    """Whether there is a rest or a quotient in it, of which nothing is known on another number of ranks."""
    return any(part is None or _has_rest(of) for _, terms, _ in made[2] for part, of in terms)


def _of_parts(number: Any) -> tuple | None:
    """(a number, names of nodes, dims and powers of the sizes that it is made of, powers of numbers of ranks) of one
    that is made of sizes of this graph."""
    sizes = rank_counts.of_sizes(number)
    if not sizes or any(key.node.graph is not of_torch.recorded_graph() for key in sizes):
        return None
    powers = tuple((key.node.name, key.dim, power) for key, power in sizes.items())
    return float(rank_counts.plain(number)), powers, tuple(rank_counts.of_ranks(number).items())


def _is_made_here(func, args, kwargs) -> bool:
    """Whether what a function of torch returns lies on a device that is none of its arguments'."""
    if func in (torch.Tensor.cpu, torch.Tensor.cuda) or isinstance(kwargs.get("device"), str):
        return True
    if func is torch.Tensor.to:
        return any(isinstance(x, str) for x in args)
    given = isinstance(kwargs.get("device"), torch.device)
    return not given and not has_tensor((args, kwargs))


def _set_lines(graph_module) -> None:
    """meta["at"]: the line of each node; for a node of the backward the line of its forward, marked "(backward)".
    meta["ranks"]: {axis: power} of the number of ranks that its number is, or that of its forward. meta["sizes"]: what
    is known of sizes that torch took itself: "rows", it divides by those that it was given; "ones", dims of size 1 that
    its views add have it on any number of ranks. meta["parts"]: of the numbers that it was given and that are made of
    sizes of a rank's parts (number, ((name of a node, dim, power), ...), ((axis, power), ...)); meta["sums"]: of those
    that are made of sums with such sizes (number, of what, see `_made_of`); meta["made"]: of all that are made of any
    (number, of what; None: of a rest); meta["asked"]: dims of its result whose size Python was told as a plain number.
    meta["of_gradient"]: whether autograd asked for it. meta["outside"]: no line inside of what is traced stands for it,
    and `at` is that of the call. (meta["scales"]: see `checker/scaled_numbers.py`.)"""
    forward_line, of_forward = {}, {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        trace_text, outside, _ = (node.meta.get("stack_trace") or "?").strip().partition(_OUTSIDE)
        node.meta["outside"] = bool(outside)
        of_backward = trace_text == _BACKWARD or bool(node.meta.get("is_gradient_acc"))
        node.meta["backward"] = of_backward
        node.meta["of_gradient"] = of_backward or _OF_GRADIENT in node.meta.get("custom", {})
        stated = node.meta.get("custom", {}).get(_AS_OF)
        custom, number = node.meta.get("custom", {}), node.meta.get("seq_nr", -1)
        known = {"ranks": custom.get(_OF_RANKS), "sizes": custom.get(_OF_TORCH), "parts": custom.get(_OF_PARTS)}
        known["sums"], known["made"] = custom.get(_OF_SUMS), custom.get(_OF_MADE)
        known["times"] = custom.get(_OF_NUMBER)
        known = of_forward.get(number, {}) if of_backward else (of_forward.setdefault(number, known), known)[1]
        node.meta.update((key, one) for key, one in known.items() if one is not None)
        if stated is not None:
            node.meta["at"] = stated
        elif of_backward:
            # An autograd.Function that calls another one inside has no op of its own number, but of the next ones.
            line = next((forward_line[number + i] for i in range(4) if number + i in forward_line), None)
            if line is None:
                line = next((m.meta["at"] for m in node.all_input_nodes if "at" in m.meta), "?")
                line = line.removesuffix(_OF_BACKWARD)
            node.meta["at"] = line + _OF_BACKWARD
        else:
            node.meta["at"] = trace_text
            forward_line.setdefault(
                node.meta.get("seq_nr"), trace_text
            )  # later ops without gradient have the same number
