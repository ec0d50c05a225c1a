"""jit: a pure function over trees becomes one compiled graph. Trace, lower, overlap, donate, exchange, compile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch

from fmegatron import tree
from fmegatron.collectives import World
from fmegatron.step.arrive import forget, gather_in_place
from fmegatron.step.check import Declared, check_call, declared_by
from fmegatron.step.compile import compile_graph, usable_backend
from fmegatron.step.exchange import exchanged
from fmegatron.step.fresh import copied_inputs
from fmegatron.step.lower import copy_module, lower
from fmegatron.step.opaque import Entry, bind_inner, opaque_entries
from fmegatron.step.overlap import Overlap, overlapped
from fmegatron.step.torch_private import is_tracing, outside_of_tracing
from fmegatron.step.trace import Traced, described, meta_of, trace

__all__ = ["Compiled", "Jitted", "jit"]


class Compiled:
    """One entry of a jit's cache: a function compiled for given shapes, strides, dtypes, devices and static values.

    traced: the symbolic graph. report: of the check of its collectives, None where it was not checked.
    stages: name -> graph module, in order "trace", "lower", "overlap", "donate", "exchange".
    """

    def __init__(self, fn, args, donate, world, backend, patches, options, check=None, overlap=None):
        self.traced: Traced = trace(fn, args)
        self.report = check(self.traced) if check is not None and world is not None else None
        self.donated = _donated_leaves(self.traced, args, donate)
        self.backend, self.patches = backend, patches
        self.options = {**(overlap.options if overlap else {}), **options}
        bound = bind_inner(self.traced.graph_module, world, backend, patches, overlap)
        lowered, self.fakes, self.rank_inputs = lower(bound, self.traced.fakes, world, self.traced.fake_mode)
        self.stages = {"trace": self.traced.graph_module, "lower": lowered}
        self.stages["overlap"] = overlapped(lowered, overlap, world)
        self.stages["donate"] = _donation_pass(self.stages["overlap"], self.traced, self.donated)
        self.stages["exchange"] = exchanged(self.stages["donate"], world)
        self.kept = [i for i in range(len(self.traced.out_paths)) if i not in self.donated]
        self.only_tensors = len(self.traced.in_paths) == len(tree.leaves(args))
        self.run = self.artifact = None

    def compile(self) -> None:
        """Compile the layers inside, then the graph around them."""
        for entry in opaque_entries(self.stages["exchange"].graph):
            entry.compile()
        self.artifact = compile_graph(
            self.stages["exchange"], self.fakes, self.backend, {**self.patches, **self.options}
        )
        rank_inputs = tuple(self.rank_inputs.tensors)
        self.run = (lambda *t: self.artifact(*t, *rank_inputs)) if rank_inputs else self.artifact

    def finish(self, tensors: list, outs) -> Any:
        """The result of a call: what the graph returned, and for donated leaves the argument with its new value."""
        results: list[Any] = [None] * len(self.traced.out_paths)
        for i, out in zip(self.kept, outs, strict=True):
            results[i] = out
        for i, position in self.donated.items():
            results[i] = tensors[position]
        return self.traced.result(results)


class Jitted:
    """What `jit` returns: call it like the function. cache: key -> Compiled, one per distinct signature."""

    def __init__(self, fn, donate, world, backend, patches, options, check, allow, overlap=None):
        self.declared = declared_by(fn) if check is None else check or None
        self.allow, self.overlap = allow, overlap
        self.fn, self.donate, self.world, self.backend = fn, donate, world, backend
        self.patches, self.options, self.cache, self._last = patches, options, {}, None
        self._inside = {}  # the same for calls inside another jit: key -> (traced, entry)
        self.name = getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)
        functools.update_wrapper(self, fn, updated=())  # not the attributes of fn: it may be a Jitted itself

    def __call__(self, *args, **named):
        if named:
            raise ValueError(
                f"jit of {described(self.fn)}: got {', '.join(named)} by name, wanted all arguments by position, which "
                "is how donate and layouts name them"
            )
        leaves, spec = optree.tree_flatten(args)
        # The signature: everything that the graph is specialised to. Written out and compared with the last one before
        # it is hashed, because this runs at every step for every leaf.
        signature = [
            (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves
        ]
        if is_tracing():
            return self._call_inside(args, leaves, (spec, tuple(signature)))
        if self._last is None or signature != self._last[0] or spec != self._last[1]:
            key = (spec, tuple(signature))
            if not _known(key, self.cache, args):
                self.cache[key] = self._build(args, leaves)
            self._last = (signature, spec, self.cache[key])
        compiled = self._last[2]
        tensors = leaves if compiled.only_tensors else [x for x in leaves if isinstance(x, torch.Tensor)]
        if compiled.donated and len({x.data_ptr() for x in tensors}) < len(tensors):
            _require_own_memory(tensors, compiled)  # not only at the first call: any state may be handed in later
        with torch.no_grad():
            outs = compiled.run(*tensors)
        return compiled.finish(tensors, outs)

    def _build(self, args, leaves) -> Compiled:
        device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), torch.device("cpu"))
        backend = usable_backend(self.backend, device)
        compiled = Compiled(
            self.fn, args, self.donate, self.world, backend, self.patches, self.options, self._check, self.overlap
        )
        _require_own_memory([x for x in leaves if isinstance(x, torch.Tensor)], compiled)
        if self.world is None:
            compiled.compile()
        else:
            self.world.leader_first(compiled.compile, f"compiling {self.name}")
        return compiled

    def _check(self, traced):
        if self.declared:
            tree.require_mesh(self.declared.state, self.world.mesh, f"jit: the state of {self.name}", "the world")
        return check_call(traced, self.declared, self.name, self.allow) if self.declared else None

    def _call_inside(self, args, leaves, key):
        """Called while another function is traced: one opaque node, compiled once."""
        if self.donate:
            raise ValueError(
                f"{self.name} donates an argument and is called inside another jit; only the outermost may"
            )
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
            raise ValueError(
                f"{self.name} is a jit inside of a gradient, and a jit is one node without a gradient; differentiate "
                "inside of it, call the plain function (.fn), or make it a compiled_layer"
            )
        if not _known(key, self._inside, args):
            with outside_of_tracing():
                traced = trace(self.fn, args)
            if any(traced.aliased):
                path = traced.out_paths[traced.aliased.index(True)]
                raise ValueError(
                    f"output {path!r} of {self.name} is one of its inputs or a view of one; return a new tensor"
                )
            entry = Entry.make(self.name, traced.graph_module, traced.fakes, traced.fake_mode)
            self._inside[key] = (traced, entry)
        traced, entry = self._inside[key]
        return traced.result(entry.op([x for x in leaves if isinstance(x, torch.Tensor)]))

    def graph(self, stage: str = "trace", call: int = 0) -> torch.fx.Graph:
        """The graph of the call-th signature after a stage: "trace", "lower", "overlap", "donate" or "exchange"."""
        entries = list(self.cache.values())
        if not entries:
            raise ValueError("nothing is compiled yet; call the function once")
        stages = entries[call].stages
        if stage not in stages:
            raise ValueError(f"unknown stage {stage!r}; choose one of {', '.join(stages)}")
        return stages[stage].graph


def jit(
    fn: Callable,
    donate: int | Sequence[int] | None = None,
    world: World | None = None,
    backend: str = "inductor",
    patches: dict | None = None,
    options: dict | None = None,
    check: Declared | bool | None = None,
    allow: Mapping[str, str] | None = None,
    overlap: Overlap | None = None,
) -> Jitted:
    """Compile a pure function over trees of tensors.

    fn: any Python over torch; it runs once per signature, on fake tensors. Tensors are traced, everything else in the
    arguments is a constant that belongs to the signature (keep step counts and learning rates in 0-d tensors).
    donate: position (or positions) of arguments whose memory the result may take. Each must come back in the result, in
    the same place of the result when the result is a tuple (argument 0 as result 0), with the same structure, shapes
    and dtypes; the returned leaves then are the old tensors with new values. Without donate no argument changes.
    world: the ranks, if the function communicates; one rank of a node compiles, the others load what it compiled.
    backend: see `compile_graph`. patches: Inductor settings for all graphs; options: for the outer graph alone.

    check: with a world, the collectives of a step are checked before anything is compiled (`step.check`), and a finding
    is a ValueError that lists all of them with their lines. None: what the step declares of itself (those of
    `build_train_step` do); Declared(state_layouts, batch_layouts): for a step of your own; False: no check.
    allow: "file.py:line" -> the reason why the findings at this line are none.
    overlap: how communication is merged and ordered so that it runs beside computation; None: as the step has it.

    A jitted function that is called while another one is traced becomes one opaque node, compiled once.
    """
    if not callable(fn) or isinstance(fn, torch.nn.Module) and fn.state_dict():
        raise ValueError(
            f"jit: got {tree.in_words(fn)}, wanted a pure function of trees of tensors; of a module: "
            "lambda params, x: torch.func.functional_call(module, params, (x,))"
        )
    if overlap is not None and not isinstance(overlap, Overlap):
        raise ValueError(f"jit: got overlap={overlap!r}, wanted None or a setting such as Overlap(depth=1)")
    positions = () if donate is None else (donate,) if isinstance(donate, int) else tuple(donate)
    settings = dict(patches or {}), dict(options or {}), check, dict(allow or {}), overlap
    return Jitted(fn, positions, world, backend, *settings)


def _known(key, cache: dict, args) -> bool:
    """Whether a signature is in a cache. ValueError for a leaf that cannot be part of one (a numpy array, say)."""
    try:
        return key in cache
    except TypeError:
        paths, leaves, _ = tree.flatten(args)
        wrong = [(p, type(x)) for p, x in zip(paths, leaves, strict=True) if type(x).__hash__ is None]
        raise ValueError(
            f"argument leaf {wrong[0][0]!r} is a {wrong[0][1].__name__}; jit takes tensors (make it one: "
            "torch.as_tensor) and hashable constants"
        ) from None


# ---- donation --------------------------------------------------------------------------------------------------------
def _donated_leaves(traced: Traced, args, donate) -> dict[int, int]:
    """Output index -> input index, for every tensor leaf of the donated arguments; checked before compiling."""
    donated: dict[int, int] = {}
    for position in donate:
        if not 0 <= position < len(args):
            raise ValueError(f"donate={position}, but the function takes {len(args)} arguments")
        inputs = {p: i for i, p in enumerate(traced.in_paths) if _under(p, str(position))}
        outputs = {p: i for i, p in enumerate(traced.out_paths)}
        if traced.out_tree.type is tuple:
            outputs = {p: i for p, i in outputs.items() if _under(p, str(position))}
        elif len(donate) > 1:
            raise ValueError(f"donate={donate}, but the function returns one result, no tuple with one for each")
        else:  # the result as a whole stands for the donated argument
            outputs = {f"{position}/{p}" if p else str(position): i for p, i in outputs.items()}
        missing, extra = sorted(set(inputs) - set(outputs)), sorted(set(outputs) - set(inputs))
        if missing or extra:
            raise ValueError(
                f"argument {position} is donated, so result {position} must have the same leaves; "
                f"missing from the result: {missing[:5] or 'none'}; only in the result: {extra[:5] or 'none'}"
            )
        for path, i in inputs.items():
            old, new = meta_of(traced.fakes[i]), meta_of(traced.outputs[outputs[path]].meta["val"])
            if old[0] != new[0] or old[2:] != new[2:]:
                raise ValueError(
                    f"donated leaf {path!r} changes: was {_words(old)}, would become {_words(new)}; "
                    "cast or reshape the new value, or do not donate"
                )
            donated[outputs[path]] = i
    return donated


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def _require_own_memory(tensors: list, compiled: Compiled) -> None:
    """Donated leaves are written while others are still read, so none may share memory with another argument."""
    paths, donated = compiled.traced.in_paths, set(compiled.donated.values())
    spans = []
    for i, t in enumerate(tensors):
        steps = [(size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)]
        if i in donated and any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
            raise ValueError(f"donated leaf {paths[i]!r} is expanded: its elements share memory; donate a .clone()")
        if t.numel():
            spans.append((t.data_ptr(), t.data_ptr() + (sum(steps) + 1) * t.element_size(), i))
    behind, last = -1, -1  # where the memory ends that was seen so far, and whose that end is
    for start, end, i in sorted(spans):
        if start < behind and (i in donated or last in donated):
            raise ValueError(
                f"leaves {paths[last]!r} and {paths[i]!r} share memory and one is donated: writing it would change the "
                "other; pass a .clone() of one"
            )
        behind, last = max((behind, last), (end, i))


def _words(meta) -> str:
    shape, _, dtype, device = meta
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def _donation_pass(graph_module, traced: Traced, donated: dict[int, int]) -> torch.fx.GraphModule:
    """Write new values into the old leaves at the end of the graph; the copy folds into the kernel that makes it, or
    into the gather that brings it.

    Every output that is or may become a copy of an input (`copied_inputs`) is first copied by an opaque op, else a step
    that swaps two leaves would leave both equal.
    """
    copy = copy_module(graph_module)
    graph = copy.graph
    output = graph.output_node()
    outs = list(output.args[0])
    inputs = graph.find_nodes(op="placeholder")
    safe = []
    with graph.inserting_before(output):
        for i, node in enumerate(outs):
            unchanged = i in donated and _behind_aliases(node) is inputs[donated[i]]
            copied = copied_inputs(node)
            if i in donated and copied.get(inputs[donated[i]]) is False:
                del copied[inputs[donated[i]]]  # in place, element by element
            if (copied or traced.aliased[i]) and not unchanged:
                value = node.meta.get("val")
                node = graph.call_function(torch.ops.fmegatron_step.barrier.default, (node, node))
                node.meta["val"] = value
            safe.append(inputs[donated[i]] if unchanged else node)
        written = {i: position for i, position in donated.items() if safe[i] is not inputs[position]}
        gathered = gather_in_place(graph, {i: (inputs[position], outs[i]) for i, position in written.items()})
        for i, position in written.items():
            if i not in gathered:
                graph.call_function(torch.ops.aten.copy_.default, (inputs[position], safe[i]))
    output.args = ([node for i, node in enumerate(safe) if i not in donated],)
    forget(graph, [outs[i] for i in gathered])
    graph.lint()
    copy.recompile()
    return copy


def _behind_aliases(node: torch.fx.Node) -> torch.fx.Node:
    """The node of which this one is only another name (detach of a detach ...)."""
    while node.op == "call_function" and node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        node = node.args[0]
    return node
