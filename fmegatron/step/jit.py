"""jit: a pure function over trees becomes one compiled graph: traced, checked, passed through `PASSES`, compiled."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from types import MappingProxyType
from typing import Any, cast

import optree
import torch

from fmegatron import tree
from fmegatron.collectives import World
from fmegatron.step.check import Declared, check_call, declared_by
from fmegatron.step.compile import usable_backend
from fmegatron.step.donation import Donation, Leaf, require_own_memory
from fmegatron.step.opaque import Entry
from fmegatron.step.overlap import Overlap
from fmegatron.step.passes import Program, Target
from fmegatron.step.progress import progress
from fmegatron.step.signature import differences, require_constants, signature_of
from fmegatron.step.torch_private import is_tracing, outside_of_tracing
from fmegatron.step.trace import Traced, described, trace
from fmegatron.step.write_back import donated_leaves

__all__ = ["Compiled", "Jitted", "jit"]

_NONE: Mapping[str, Any] = MappingProxyType({})


class Compiled:
    """One signature of a jit: a function compiled for given shapes, strides, dtypes, devices and static values.

    traced: the symbolic graph. report: of the check of its collectives, None where it was not checked.
    stages: name -> graph module, in order "trace", "lower", "overlap", "donate", "exchange".
    """

    def __init__(self, fn, args, donate, target: Target, check=None, options: Mapping[str, Any] = _NONE):
        self.traced: Traced = trace(fn, args)
        self.report = check(self.traced) if check is not None and target.world is not None else None
        self.donated, traced = donated_leaves(self.traced, args, donate), self.traced
        self.program = Program(traced.graph_module, traced.fakes, traced.fake_mode, target, self.donated)
        self.stages, self.options = self.program.stages, options
        self.kept = [i for i in range(len(self.traced.out_paths)) if i not in self.donated]
        self.only_tensors = len(self.traced.in_paths) == len(tree.leaves(args))
        self.run: Callable[..., Any] | None = None
        self.donation: Donation | None = None
        if self.donated:
            self.donation = self._donation(_name(fn))

    def _donation(self, name: str) -> Donation:
        paths, fakes = self.traced.in_paths, self.traced.fakes
        leaves = [Leaf(position, paths[position], name) for position in self.donated.values()]
        return Donation(leaves, paths, [fakes[leaf.position].device for leaf in leaves])

    def compile(self, tell: Callable[[str], None] = lambda text: None) -> None:
        """Compile the layers inside, then the graph around them. tell: hears what is being compiled."""
        self.run = self.program.compile(self.options, tell)
        if self.donation is not None:
            self.donation.written, self.donation.harmless = self.program.written, self.program.harmless

    def __call__(self, tensors: list) -> Any:
        """The result of the step for the tensors among its arguments."""
        run = self.run
        assert run is not None, "`compile` comes first"
        if self.donation is not None:
            return self.donation.call(run, tensors, self._finish)
        with torch.no_grad():
            outs = run(*tensors)
        return self._finish((), outs)

    def _finish(self, donated, outs) -> Any:
        """The result: the memory of the donated leaves, and what the graph returned."""
        results: list[Any] = [None] * len(self.traced.out_paths)
        for i, out in zip(self.kept, outs, strict=True):
            results[i] = out
        for i, x in zip(self.donated, donated, strict=True):
            results[i] = x
        return self.traced.result(results)


class Jitted:
    """What `jit` returns: call it like the function. cache: key -> Compiled, one per distinct signature."""

    def __init__(self, fn, donate, target: Target, options, check, allow):
        self.declared = declared_by(fn) if check is None else check or None
        self.allow, self.fn, self.donate, self.target, self.options = allow, fn, donate, target, options
        self.world, self.cache = target.world, {}
        self._last: tuple[list, Any, Compiled] | None = None  # signature, structure, what is compiled for it
        self._inside = {}  # the same for calls inside another jit: key -> (traced, entry)
        self.name = _name(fn)
        functools.update_wrapper(self, fn, updated=())  # not the attributes of fn: it may be a Jitted itself

    def __repr__(self) -> str:
        where = "one process" if self.world is None else f"rank {self.world.rank} of {self.world.mesh}"
        donated = f", donates {', '.join(map(str, self.donate))}" if self.donate else ""
        compiled = "1 signature" if len(self.cache) == 1 else f"{len(self.cache)} signatures"
        return f"jit of {described(self.fn)} on {where}: {self.target.backend}{donated}, {compiled} compiled"

    def __call__(self, *args, **named):
        if named:
            raise ValueError(
                f"jit of {described(self.fn)}: got {', '.join(named)} by name, wanted all arguments by position, which "
                "is how donate and layouts name them"
            )
        leaves, spec = optree.tree_flatten(cast("Any", args))  # its types want a tree of one type of leaves
        signature = signature_of(leaves)
        if is_tracing():
            return self._call_inside(args, leaves, (spec, tuple(signature)))
        # Compared with the last one before it is hashed, because this runs at every step for every leaf.
        last = self._last
        if last is None or signature != last[0] or spec != last[1]:
            key = (spec, tuple(signature))
            if not _known(key, self.cache, args):
                self._tell_second(spec, signature)
                self.cache[key] = self._build(args, leaves)
            last = self._last = (signature, spec, self.cache[key])
        compiled = last[2]
        return compiled(leaves if compiled.only_tensors else [x for x in leaves if isinstance(x, torch.Tensor)])

    def _tell_second(self, spec, signature) -> None:
        """Once: a second graph is compiled, and why; that may be wanted (another batch size) or not (a number)."""
        last = self._last
        if last is not None and len(self.cache) == 1 and (self.world is None or self.world.rank == 0):
            changed = differences((last[1], last[0]), (spec, signature))
            warnings.warn(f"{self.name} is compiled again (reported once): {changed}", stacklevel=3)

    def _build(self, args, leaves) -> Compiled:
        device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), torch.device("cpu"))
        target = replace(self.target, backend=usable_backend(self.target.backend, device))
        hint = "" if target.in_order else ' (backend="eager" starts without compiling)'
        with progress(self.name, hint, None if self.world is None or self.world.rank == 0 else False) as tell:
            tell("tracing")
            compiled = Compiled(self.fn, args, self.donate, target, self._check, self.options)
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            require_own_memory(tensors, compiled.traced.in_paths, list(compiled.donated.values()))
            compile_ = functools.partial(compiled.compile, tell)
            if self.world is None:
                compile_()
            else:
                self.world.leader_first(compile_, f"compiling {self.name}")
        return compiled

    def _check(self, traced):
        if self.declared and self.world is not None:
            tree.require_mesh(self.declared.state, self.world.mesh, f"jit: the state of {self.name}", "the world")
            return check_call(traced, self.declared, self.name, self.allow, speak=self.world.rank == 0)
        return None

    def _call_inside(self, args, leaves, key):
        """Called while another function is traced: one opaque node, compiled once."""
        if self.donate:
            raise ValueError(
                f"{self.name}: got donate={self.donate} inside another jit, wanted donation by the outermost jit "
                "alone; leave it out here"
            )
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
            raise ValueError(
                f"{self.name}: got a tensor that needs a gradient, wanted none, as a jit is one node without a "
                "gradient; differentiate inside of it, call the plain function (.fn), or make it a compiled_layer"
            )
        if not _known(key, self._inside, args):
            with outside_of_tracing():
                traced = trace(self.fn, args)
            if any(traced.aliased):
                path = traced.out_paths[traced.aliased.index(True)]
                raise ValueError(
                    f"{self.name}: output {path!r}: got one of its inputs or a view of one, wanted a new tensor; "
                    "return a copy"
                )
            entry = Entry.make(self.name, traced.graph_module, traced.fakes, traced.fake_mode)
            self._inside[key] = (traced, entry)
        traced, entry = self._inside[key]
        return traced.result(entry.op([x for x in leaves if isinstance(x, torch.Tensor)]))

    def graph(self, stage: str = "trace", call: int = 0) -> torch.fx.Graph:
        """The graph of the call-th signature after a stage: "trace", "lower", "overlap", "donate" or "exchange"."""
        compiled = list(self.cache.values())
        if not compiled:
            raise ValueError(f"{self.name}: got a jit that has compiled nothing, wanted its graph; call it once before")
        stages = compiled[call].stages
        if stage not in stages:
            raise ValueError(f"stage: got {stage!r}, wanted one of {', '.join(stages)}")
        return stages[stage].graph


_STATIC = "leave it out: what is no tensor among the arguments is static"
_WHOLE = "leave it out: the whole function is one graph, of the shapes that it is called with"
_OF_OTHERS = MappingProxyType(
    {
        **{"donate_argnums": "give donate=0, the positions", "donate_argnames": "give donate=0, the positions"},
        **{"static_argnums": _STATIC, "static_argnames": _STATIC, "fullgraph": _WHOLE, "dynamic": _WHOLE},
        "mode": 'give backend="inductor", "aot_eager" or "eager", and Inductor\'s settings as options',
        "in_shardings": "leave it out: a function sees local tensors; testing.simulate takes layouts",
        "out_shardings": "leave it out: a function returns local tensors",
    }
)


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
    **others: object,
) -> Jitted:
    """Compile a pure function over trees of tensors.

    A second signature is compiled too, with one warning that names what differs. A jitted function that is called while
    another one is traced becomes one opaque node, compiled once.

    Args:
        fn: any Python over torch; it runs once per signature, on fake tensors. Tensors are traced, everything else in
            the arguments is a constant that belongs to the signature, with all that it holds (keep step counts and
            learning rates in 0-d tensors).
        donate: position (or positions) of arguments whose memory the result may take. Each must come back in the
            result, in the same place of the result when the result is a tuple (argument 0 as result 0), with the same
            structure, shapes and dtypes. The given tree is dead after the call: reading one of its leaves, or passing
            it again, is a ValueError (keep a copy, tree.map(torch.clone, state), of what you need later; memory that a
            leaf shares with a view of yours or an array of numpy is left to you). Without donate no argument changes.
        world: the ranks, if the function communicates; one rank of a node compiles, the others load what it compiled.
        backend: "inductor", "compile", "aot_eager" or "eager", see `step.compile.compile_graph`.
        patches: Inductor's settings for all graphs. With {"_micro_pipeline_tp": True} gathers and reduce-scatters have
            the form in which Inductor joins them to the products beside them (on CUDA, in symmetric memory).
        options: Inductor's settings for the outer graph alone.
        check: with a world, the collectives of a step are checked before anything is compiled (`step.check`), and a
            finding is a ValueError that lists all of them with their lines. Outputs that the check cannot prove refuse
            nothing: rank 0 warns, once, which they are, because of which line, and how to go on. None: what the step
            declares of itself (those of `build_train_step` do); Declared(state_layouts, batch_layouts): for a step of
            your own; False: no check.
        allow: "file.py:line" -> the reason why the findings, or what is unproven, at this line are none.
        overlap: how communication is merged and ordered so that it runs beside computation; None: as the step has it.
        others: arguments of other libraries' functions of this kind, a ValueError that says what takes their place.

    Raises ValueError for wrong arguments, and at a call for named arguments, and for a step that is impure or wrong.
    """
    if not callable(fn) or isinstance(fn, torch.nn.Module) and fn.state_dict():
        raise ValueError(
            f"jit: got {tree.in_words(fn)}, wanted a pure function of trees of tensors; of a module: "
            "lambda params, x: torch.func.functional_call(module, params, (x,))"
        )
    if others:
        name, value = next(iter(others.items()))
        fix = _OF_OTHERS.get(name, "arguments of the function go to what jit returns")
        own = ", ".join([*signature(jit).parameters][1:-1])
        raise ValueError(f"jit: got {name}={value!r}, wanted arguments of its own: {own}; {fix}")
    if overlap is not None and not isinstance(overlap, Overlap):
        raise ValueError(f"jit: got overlap={overlap!r}, wanted None or a setting such as Overlap(depth=1)")
    positions = () if donate is None else tuple(donate) if isinstance(donate, (list, tuple)) else (donate,)
    if any(isinstance(at, bool) or not isinstance(at, int) for at in positions):
        raise ValueError(f"jit: got donate={donate!r}, wanted the position of an argument, such as 0, or several")
    target = Target(world, backend, tuple(sorted((patches or {}).items())), overlap)
    return Jitted(fn, positions, target, dict(options or {}), check, dict(allow or {}))


def _name(fn: Callable) -> str:
    return getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)


def _known(key, cache: dict, args) -> bool:
    """Whether a signature is in a cache. ValueError for a leaf that cannot be part of one (such as a numpy array)."""
    try:
        return key in cache
    except TypeError:
        require_constants(args)
        raise
