"""jit: a pure function over trees becomes one compiled graph: traced, checked, passed through `PASSES`, compiled."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import optree
import torch

from fmegatron import tree
from fmegatron.collectives import World, known_ranks
from fmegatron.layout import layout
from fmegatron.step import cuda_graph as graphs
from fmegatron.step.agreement import communicates, require_same_graph, require_same_replicas
from fmegatron.step.ambient import Ambient, ambient, changes, compiled_without_autocast, without_autocast
from fmegatron.step.checker.entrypoints import check_call
from fmegatron.step.compile import usable_backend
from fmegatron.step.donation import Donation, Leaf, Newest, require_own_memory
from fmegatron.step.lines import warn_users
from fmegatron.step.opaque import Entry
from fmegatron.step.overlap.schedule import Overlap, overlap_of
from fmegatron.step.passes import Program, Target
from fmegatron.step.progress import progress
from fmegatron.step.signature import differences, require_constants, signature_of
from fmegatron.step.state import State, Unseen
from fmegatron.step.torch_private import compiling, is_tracing, outside_of_tracing, storage_number
from fmegatron.step.tracing import Traced, described, line_here, own_results, trace
from fmegatron.step.watched import Watched, Watching
from fmegatron.step.whole_result import Whole
from fmegatron.step.write_back import donated_leaves
from fmegatron.tree import labels, structure

__all__ = ["Compiled", "Jitted", "jit"]


class Compiled:
    """One signature of a jit: a function compiled for given shapes, strides, dtypes, devices and static values.

    traced: the symbolic graph. report: of the check of its collectives, None where it was not checked.
    stages: name -> graph module, in order "trace", "lower", "overlap", "stream", "donate", "exchange".
    read: what the trace has read besides its arguments. watching: of all signatures of the function; None: of this one.
    """

    def __init__(self, fn, args, donate, target: Target, check=None, newest=None, watching: Watching | None = None):
        self.ambient, tell = ambient(), watching is not None and (target.world is None or target.world.rank == 0)
        watching = watching or Watching(fn, _name(fn))
        seen, mesh = watching.begin(), None if target.world is None else target.world.mesh
        self.traced: Traced = trace(fn, args, mesh=mesh, reads=seen)
        self.read: Watched = watching.end(seen, tell)
        self.report = check(self.traced) if check is not None and target.world is not None else None
        checked = check is not None or target.world is None or target.world.size == 1
        self.donated, traced = donated_leaves(self.traced, args, donate), self.traced
        self.program = Program(traced.graph_module, traced.fakes, traced.fake_mode, target, self.donated)
        self.stages = self.program.stages
        self.number: int | None = None  # of what all ranks have compiled, if it communicates
        self.kept = [i for i in range(len(self.traced.out_paths)) if i not in self.donated]
        self.only_tensors = len(self.traced.in_paths) == len(tree.leaves(args))
        self.run: Callable[..., Any] | None = None
        self.recorder: graphs.Recorder | None = None  # of its calls
        self.donation: Donation | None = None
        found = {} if self.report is None else dict(self.report.found)
        labels = _known_of_outputs(traced, self.donated, checked, found)
        self.labels = [(i, label) for i, label in enumerate(labels) if label is not None]
        if self.donated:
            self.donation = self._donation(watching.name, newest)
        self.whole = Whole.of(self.traced, self.donated, args, donate) if self.donated else None

    def _donation(self, name: str, newest: Newest | None) -> Donation:
        paths, fakes = self.traced.in_paths, self.traced.fakes
        leaves = [Leaf(position, paths[position], name) for position in self.donated.values()]
        return Donation(leaves, paths, [fakes[leaf.position].device for leaf in leaves], newest)

    def compile(self, tell: Callable[[str], None] = lambda text: None) -> None:
        """Compile the layers inside, then the graph around them. tell: hears what is being compiled."""
        with without_autocast(self.ambient):  # its casts are in the graph
            self.run = compiled_without_autocast(self.program.compile(tell), self.ambient)
        if self.donation is not None:
            self.donation.written, self.donation.harmless = self.program.written, self.program.harmless
            if self.recorder is not None:
                self.run = graphs.Recorded(self.run, self.donation, self.recorder, self.program.target.world)

    def __call__(self, tensors: list) -> Any:
        """The result of the step for the tensors among its arguments."""
        run = self.run
        assert run is not None, "`compile` comes first"
        if self.donation is not None:
            return self.donation.call(run, tensors, self._finish)
        with torch.no_grad():
            outs = run(*tensors)
        return self._finish((), outs)

    def again(self, state: State, made: Unseen, rest: list) -> Any:
        """The result of a call with the last one's State, into which nobody has looked, and these other tensors."""
        assert self.run is not None and self.donation is not None, "it was called before"
        return self.donation.call_whole(self.run, state, made, rest, self._finish_again)

    def _finish(self, donated, outs) -> Any:
        """The result: the memory of the donated leaves, and what the graph returned."""
        results: list[Any] = [None] * len(self.traced.out_paths)
        for i, out in zip(self.kept, outs, strict=True):
            results[i] = out
        for i, x in zip(self.donated, donated, strict=True):
            results[i] = x
        for i, label in self.labels:
            results[i]._layout = label
        if self.whole is not None and _share_memory(donated, outs):
            self.whole = None  # what is returned beside the state is a view of it, which somebody may keep
        return self.traced.result(results) if self.whole is None else self.whole.result(list(donated), outs)

    def _finish_again(self, leaves: list, outs) -> Any:
        assert self.whole is not None, "it made the State"
        for i, label in self.labels:
            if i >= len(leaves):  # those of the State keep theirs
                outs[i - len(leaves)]._layout = label
        return self.whole.result(leaves, outs)


class Again(NamedTuple):
    """What another call with a State that nobody has looked into is compared with: all but the State."""

    compiled: Compiled
    spec: optree.PyTreeSpec
    signature: list
    ambient: Ambient


class Jitted:
    """What `jit` returns: call it like the function. cache: key -> Compiled, one per distinct signature.

    last: of a jit that donates one argument, the newest living value of it: what the last call returned in its place,
    or what an interrupted call was given. It holds that memory until the next call, or until it is set to None.
    """

    def __init__(self, fn, donate, target: Target, check, allow, cuda_graph: bool = False):
        self.allow, self.fn, self.donate, self.target, self.cuda_graph = allow, fn, donate, target, cuda_graph
        self.world, self.cache, self.checks = target.world, {}, check
        self._several = self.world is not None and self.world.size > 1
        self._newest = Newest(donate[0]) if len(donate) == 1 else None
        # Signature, structure, what is compiled for it.
        self._last: tuple[list, Any, Compiled] | None = None
        self._agreed = False  # whether something that communicates is compiled: then ranks are asked in each call
        self._asked: Callable[[], bool] | None = None
        self._again: Again | None = None  # of the last call, if it took a State that the next one may take whole
        self._inside = {}  # the same for calls inside another jit: key -> (traced, entry)
        self.name = _name(fn)
        self._watching, self._lock = Watching(fn, self.name), threading.RLock()
        functools.update_wrapper(self, fn, updated=())  # not the attributes of fn: it may be a Jitted itself

    @property
    def last(self) -> Any:
        """The newest living value of the donated argument, also behind an interrupt: what the last call returned for
        it, or, where it did not end, what it was given. None before the first call, and where several are donated.

        It is kept until the next call; `jitted.last = None` lets it go.
        """
        return None if self._newest is None else self._newest.value

    @last.setter
    def last(self, value: None) -> None:
        if self._newest is not None:
            self._newest.value = value

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
        if is_tracing():  # that thread compiles; it waits for no other one that does
            return self._call_inside(args)
        with self._lock:  # what is compiled, and asked of other ranks, is for one call at a time
            run, given = self._ready(args)
        # Nothing comes after the call: what is interrupted there would lose its result, and the donated state with it.
        return run(*given)

    def _ready(self, args: tuple) -> tuple[Callable, tuple]:
        """What computes a call, and what it is given."""
        again, settings = self._again, ambient()
        if self._newest is not None and len(args) > self._newest.position:
            self._newest.given = args[self._newest.position]
        if again is not None and args and type(args[0]) is State:
            made = args[0].untouched(again.compiled.whole)
            if made is not None:
                rest, spec = optree.tree_flatten(cast("Any", args[1:]))
                same = spec == again.spec and settings == again.ambient
                same = same and signature_of(rest, self._several) == again.signature
                if same and again.compiled.read.changed() is None:
                    self._ask(again.compiled.number)
                    return again.compiled.again, (args[0], made, [x for x in rest if isinstance(x, torch.Tensor)])
        leaves, spec = optree.tree_flatten(cast("Any", args))  # its types want a tree of one type of leaves
        signature = signature_of(leaves, self._several)
        # Compared with the last one before it is hashed, because this runs at every step for every leaf.
        last = self._last
        if last is None or signature != last[0] or spec != last[1] or settings != last[2].ambient:
            key = (spec, tuple(signature), settings)
            compiled = self.cache[key] if _known(key, self.cache, args) else None
        else:
            compiled = last[2]
        changed = None if compiled is None else compiled.read.changed()
        if compiled is None or changed is not None:
            key = (spec, tuple(signature), settings)
            self._ask(0, changed or self._changed(*key))
            self._tell_again(changed, key)
            compiled = self.cache[key] = self._build(args, leaves)
        else:
            same = last is not None and compiled is last[2]
            self._ask(compiled.number, "" if same else self._changed(spec, signature, settings))
        if last is None or compiled is not last[2]:
            last = self._last = (signature, spec, compiled)
        compiled, self._again = last[2], None
        if compiled.whole is not None:
            others = optree.tree_structure(cast("Any", args[1:]))
            self._again = Again(compiled, others, last[0][compiled.whole.state.num_leaves :], compiled.ambient)
        return compiled, (leaves if compiled.only_tensors else [x for x in leaves if isinstance(x, torch.Tensor)],)

    def _ask(self, number: int | None, new: str = "") -> None:
        """Ask all ranks whether they run the same compiled signature in this call, and hear what they said of the last
        one. new: what differs on this rank from its last call, which it says if others have another; it waits for them.
        ValueError where they have another; they are told in their next call, if they come to it.
        """
        if self.world is None or not self._agreed:
            return
        before, self._asked = self._asked, self.world.same_later(1 if number is None else number)
        if before is not None and not before():
            raise self._disagreement("in the call before this one", "")
        if new and not self._asked():
            raise self._disagreement("here", new)

    def _disagreement(self, where: str, new: str) -> ValueError:
        assert self.world is not None and self._last is not None, "ranks called it before"
        changed = f"on this rank {new}" if new else "what it is called with has not changed on this rank"
        return ValueError(
            f"jit of {described(self.fn)}, called at {line_here()}: rank {self.world.rank}: got arguments "
            f"{where} whose signature differs from that on other ranks: {changed}; wanted all ranks to change "
            "shapes, dtypes and keys in the same call, as they wait for each other in it: give all ranks as many rows, "
            "and pad the last batch"
        )

    def _changed(self, spec, signature, settings: Ambient) -> str:
        """What differs from the last call."""
        if self._last is None:
            return "all is new"
        said = changes(self._last[2].ambient, settings)
        if signature != self._last[0] or spec != self._last[1]:
            said.insert(0, differences((self._last[1], self._last[0]), (spec, signature)))
        return "; ".join(said)

    def _tell_again(self, changed: str | None, key: tuple) -> None:
        """A second graph is compiled, and why: because of the user's code, each time, or once of a signature, which may
        be wanted (another batch size) or not (a number)."""
        if self.world is not None and self.world.rank > 0:
            return
        if changed is not None:
            warn_users(f"{self.name} is compiled again, as its code has changed: {changed}")
        elif self._last is not None and len(self.cache) == 1:
            warn_users(f"{self.name} is compiled again (reported once): {self._changed(*key)}")

    def _build(self, args, leaves) -> Compiled:
        device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), torch.device("cpu"))
        target = replace(self.target, backend=usable_backend(self.target.backend, device))
        hint = "" if target.in_order else ' (backend="eager" starts without compiling)'
        quiet = None if self.world is None or self.world.rank == 0 else False
        with compiling(), progress(self.name, hint, quiet) as tell:
            tell("tracing")
            check = self._check if self.checks else None
            compiled = Compiled(self.fn, args, self.donate, target, check, self._newest, self._watching)
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            if self._several and self.world is not None:
                tell("comparing ranks")
                found = (compiled.traced, leaves, compiled.ambient)
                sends, number = require_same_graph(*found, self.world, self.name)
                if sends:
                    compiled.number, self._agreed = number, True
                    require_same_replicas(args, self.donate, self.world, self.name)
            if self.cuda_graph:
                compiled.recorder = graphs.recorder_on(device, compiled.program.graph_module.graph, self.world)
            require_own_memory(tensors, compiled.traced.in_paths, list(compiled.donated.values()))
            compile_ = functools.partial(compiled.compile, tell)
            if self.world is None:
                compile_()
            else:
                self.world.leader_first(compile_, f"compiling {self.name}")
        return compiled

    def _check(self, traced):
        """The report of the check of a traced call; None where there is nothing to check it by, which is said."""
        assert self.world is not None, "`Compiled` asks with a world"
        labels = zip(traced.in_paths, traced.in_labels, strict=True)
        missing = [path for path, label in labels if label is None]
        if not missing:
            return check_call(traced, self.world.mesh, self.donate, self.name, self.allow, self.world.rank == 0)
        if not self._several:
            return None
        others = f" and of {len(missing) - 1} more" if len(missing) > 1 else ""
        text = (
            f"jit of {described(self.fn)}, called at {line_here()}: got arrays whose layouts are not known: "
            f"{missing[0]!r}{others}, wanted all of them placed, as collectives are checked by it: "
            "tree.place(arrays, layouts), or check=False"
        )
        if self.donate:  # it updates a state: replicas that drift apart are never seen
            raise ValueError(text)
        if self.world.rank == 0 and (len(missing) < len(traced.in_paths) or communicates(traced)):
            warn_users(f"{text}; this one is not checked")
        return None

    def _call_inside(self, args: tuple):
        """Called while another function is traced: one opaque node, compiled once. What it donates is donated by the
        outermost jit, if that does: inside, memory belongs to the graph around."""
        leaves, spec = optree.tree_flatten(cast("Any", args))
        key = (spec, tuple(signature_of(leaves, labels=True)), ambient(), known_ranks.recorded_mesh())
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
            raise ValueError(
                f"{self.name}: got a tensor that needs a gradient, wanted none, as a jit is one node without a "
                "gradient; differentiate inside of it, call the plain function (.fn), or make it a compiled_layer"
            )
        known = self._inside[key] if _known(key, self._inside, args) else None
        if known is None or known[2].changed() is not None:
            seen = self._watching.begin()
            with compiling(), outside_of_tracing():
                fn = own_results(self.fn, self.donate) if self.donate else self.fn
                traced = trace(fn, args, mesh=key[-1], reads=seen)
            read = self._watching.end(seen)
            if any(traced.aliased):
                path = traced.out_paths[traced.aliased.index(True)]
                raise ValueError(
                    f"{self.name}: output {path!r}: got one of its inputs or a view of one, wanted a new tensor; "
                    "return a copy"
                )
            entry = Entry.make(self.name, traced.graph_module, traced.fakes, traced.fake_mode)
            self._inside[key] = (traced, entry, read)
        else:
            known[2].noted_around()
        traced, entry, _ = self._inside[key]
        outs = entry([x for x in leaves if isinstance(x, torch.Tensor)])
        for x, label in zip(outs, traced.out_labels, strict=True):
            if label is not None:
                labels.labelled(x, label.layout)
        return traced.result(outs)

    def graph(self, stage: str = "trace", call: int = 0) -> torch.fx.Graph:
        """The graph of the call-th signature after a stage (`Program.stages`): "trace", "lower", "overlap", ..."""
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
        "mode": 'give backend="inductor", "aot_eager" or "eager", and Inductor\'s settings as patches',
        "in_shardings": "leave it out: arrays know their layouts; state them once with tree.place(arrays, layouts)",
        "out_shardings": "leave it out: a function returns local tensors",
    }
)


def jit(
    fn: Callable,
    donate: int | Sequence[int] | None = None,
    world: World | None = None,
    backend: str = "inductor",
    patches: dict | None = None,
    check: bool = True,
    allow: Mapping[str, str] | None = None,
    overlap: Overlap | bool = True,
    host_bytes: int = 1 << 29,
    cuda_graph: bool = False,
    **others: object,
) -> Jitted:
    """Compile a pure function over trees of tensors.

    Settings of torch around a call (autocast, default dtype, determinism, precisions) are part of the signature. What
    the trace has read of your code, functions and plain values, is compared in every call, and a difference compiles
    again with a warning that names it (docs/captured.md). On several ranks all must have traced the same step, hold the
    same replicas, and change in the same call: else an error that names the argument or line, and the rank.
    A second signature is compiled too, with one warning that names what differs. A jitted function that is called while
    another one is traced becomes one opaque node, compiled once; its donate says nothing there, that of the outermost
    jit does.

    Args:
        fn: any Python over torch; it runs once per signature, on fake tensors. Tensors are traced, everything else in
            the arguments is a constant that belongs to the signature, with all that it holds (keep step counts and
            learning rates in 0-d tensors).
        donate: position (or positions) of arguments whose memory the result may take. Each must come back in the
            result, in the same place of the result when the result is a tuple (argument 0 as result 0), with the same
            structure, shapes and dtypes. The given tree is dead after the call: reading one of its leaves, or passing
            it again, is a ValueError (keep a copy, tree.copies(state), of what you need later; memory of a leaf
            that a view, an UntypedStorage or a numpy array of yours has is left to you; an address from data_ptr() is
            not seen). Without donate no argument changes.
        world: the ranks, if the function communicates; one rank of a node compiles, the others load what it compiled.
        backend: "inductor", "compile", "aot_eager" or "eager", see `step.compile.compile_graph`.
        patches: Inductor's settings for all graphs. With {"_micro_pipeline_tp": True} gathers and reduce-scatters have
            the form in which Inductor joins them to the products beside them (on CUDA, in symmetric memory).
        check: with a world, the collectives are checked before anything is compiled (`step.check`), by the layouts of
            the arrays that the function is called with (`tree.place`), and a finding is a ValueError that lists all of
            them with their lines. The result of a donated argument must have its layouts, and has them in the next
            call. Outputs that the check cannot prove refuse nothing: rank 0 warns, once, which they are, because of
            which line, and how to go on. On several ranks, arguments whose layouts are not known are refused where the
            function donates; where it communicates, rank 0 warns that it is not checked. False: no check.
        allow: "file.py:line" -> the reason why the findings, or what is unproven, at this line are none.
        overlap: how communication is ordered so that it runs beside computation, within a limit of memory (`Overlap`);
            True: `Overlap()`. False: the order of the graph. Without ranks there is nothing to order.
        host_bytes: of state in host memory (`state_specs(..., memory="host")`) that travels to the device together; up
            to three times so many bytes are there at a time. A piece of a leaf has one element or more. Of gradients on
            their way to the host where that updates ("host-update").
        cuda_graph: whether calls are launched as one graph of CUDA (`step.cuda_graph`), the first one excepted: one
            launch a step. What is donated must be the state that the call before has returned; all else is copied.
        others: arguments of other libraries' functions of this kind, a ValueError that says what takes their place.

    Raises ValueError for wrong arguments, and at a call for named arguments, for a step that is impure or wrong, and
    for ranks that are called with other signatures; FailedOnRank where they have traced other steps, and
    ReplicasDifferError where replicas of what is donated differ at the first call.
    """
    if not callable(fn) or isinstance(fn, torch.nn.Module) and fn.state_dict():
        raise ValueError(
            f"jit: got {structure.in_words(fn)}, wanted a pure function of trees of tensors; of a module: "
            "lambda params, x: torch.func.functional_call(module, params, (x,))"
        )
    if others:
        name, value = next(iter(others.items()))
        fix = _OF_OTHERS.get(name, "arguments of the function go to what jit returns")
        own = ", ".join([*signature(jit).parameters][1:-1])
        raise ValueError(f"jit: got {name}={value!r}, wanted arguments of its own: {own}; {fix}")
    positions = () if donate is None else tuple(donate) if isinstance(donate, (list, tuple)) else (donate,)
    if any(isinstance(at, bool) or not isinstance(at, int) for at in positions):
        raise ValueError(f"jit: got donate={donate!r}, wanted the position of an argument, such as 0, or several")
    if isinstance(host_bytes, bool) or not isinstance(host_bytes, int) or host_bytes < 1:
        raise ValueError(f"jit: got host_bytes={host_bytes!r}, wanted a number of bytes, such as 1 << 29")
    target = Target(world, backend, tuple(sorted((patches or {}).items())), overlap_of(overlap), host_bytes)
    if cuda_graph not in (True, False) or (cuda_graph and not positions):
        got = f"cuda_graph={cuda_graph!r:.60}, donate={donate!r}"
        raise ValueError(f"jit: got {got}, wanted True only where something is updated in place; give donate=0 too")
    if not isinstance(check, bool):
        raise ValueError(
            f"jit: check: got {structure.in_words(check)}, wanted True or False; layouts are those of the arrays: "
            "tree.place(state, layouts)"
        )
    return Jitted(fn, positions, target, check, dict(allow or {}), cuda_graph)


def _known_of_outputs(
    traced: Traced, donated: Mapping[int, int], checked: bool, found: Mapping[int, layout.Layout]
) -> list[layout.Label | None]:
    """The layouts of the outputs of a compiled call, where they are known: new values of donated arrays have theirs,
    others what the function states, where that was checked or there is one rank; and on one rank what has the shape of
    the array in whose place it stands has its layout, as there is no other. found: what the check has proven of others.
    What dims mean is known of the array in whose place one stands, where nothing else says it."""
    labels = [label if checked and label and not label.layout.unreduced else None for label in traced.out_labels]
    inputs = dict(zip(traced.in_paths, zip(traced.in_labels, traced.fakes, strict=True), strict=True))
    several = traced.out_tree.type is tuple
    for i, (path, node) in enumerate(zip(traced.out_paths, traced.outputs, strict=True)):
        label, fake = inputs.get(path if several else f"0/{path}" if path else "0", (None, None))
        alike = fake is not None and (fake.shape, fake.dtype) == (node.meta["val"].shape, node.meta["val"].dtype)
        if label is not None and alike and label.layout.mesh.size == 1:
            labels[i] = labels[i] or label
        own = labels[i] or (found[i].label if i in found else None)
        labels[i] = own if own is None or label is None else own.layout.meaning(label.layout).label
    for out, given in donated.items():
        labels[out] = traced.in_labels[given]
    return labels


def _share_memory(donated: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
    """Whether one of the outputs has memory of the new values of donated leaves."""
    memory = {storage_number(x.untyped_storage()) for x in donated}
    return any(storage_number(x.untyped_storage()) in memory for x in outs)


def _name(fn: Callable) -> str:
    return getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)


def _known(key, cache: dict, args) -> bool:
    """Whether a signature is in a cache. ValueError for a leaf that cannot be part of one (such as a numpy array)."""
    try:
        return key in cache
    except TypeError:
        require_constants(args)
        raise
