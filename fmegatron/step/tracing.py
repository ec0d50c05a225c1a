"""Record a pure step as one flat graph: forward, backward, optimizer, and collectives by the names of their axes.

The step runs once on fake tensors. No process group, device memory or rank is needed, so the graph of 16,384 ranks is
recorded on a laptop. Each node knows the line of the user's code that it comes from, and that of the library behind it
(`node.meta["at"]`: "exp.py:21 (in fmegatron/nn/norm.py:19)").
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fmegatron import collectives, tree
from fmegatron.collectives import kinds
from fmegatron.collectives.known_ranks import Recorded, recorded_mesh, recorded_reads
from fmegatron.layout import dtypes, layout, notation
from fmegatron.nn import weight
from fmegatron.step.graph.nodes import items_of, meta_of, storage_of
from fmegatron.step.purity import (
    generators_kept,
    require_keyed,
    require_no_generator,
    require_no_hidden_tensors,
    require_pure,
)
from fmegatron.step.regather import regathered
from fmegatron.step.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    Recorder,
    TorchDispatchMode,
    forget_constant,
    fx_traceback,
    outside_of_tracing,
    quiet_about_shapes,
    recording,
)
from fmegatron.tree import structure
from fmegatron.tree.labels import alike, label_of, labelled

__all__ = ["Traced", "as_of", "described", "line_here", "make_fakes", "own_results", "record", "recorded", "trace"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_ROOT = os.path.dirname(os.path.dirname(_PACKAGE)) + os.sep
_COLLECTIVES = os.path.dirname(os.path.abspath(collectives.__file__)) + os.sep
_TREE = os.path.dirname(os.path.abspath(tree.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PRODUCTS = os.path.abspath(weight.__file__)  # who multiplies says more than how
_CONTEXTS = os.path.abspath(contextlib.__file__)  # between a context and whoever opened it
_COPY = os.path.abspath(copy.__file__)  # of Python, which users call
_MACHINERY = (_TORCH, _HERE, _COLLECTIVES, _TREE, _PRODUCTS, _CONTEXTS, _COPY, "<")


@dataclass
class Traced:
    """A recorded step.

    graph_module: flat graph; placeholders are the tensor leaves of the arguments in tree order, the output is the list
    of the tensor leaves of the result. fakes: fake tensors of the placeholders. in_paths, out_paths: names of the
    leaves ("0/params/head/w"). out_tree: optree structure of the result; out_static: per leaf of the result None for a
    tensor, else (value,) of a Python constant. aliased: per output, whether it shares storage with an input. called_at:
    the line that called `trace`, which is that of ops for which no line inside of the step stands. in_labels,
    out_labels: the layouts of the tensors of the arguments (`tree.place`), and what the function itself knew of
    those that it returned; None: not known.
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


def trace(fn: Callable, args: tuple, *, fake_mode=None, mesh: layout.Mesh | None = None, reads: Any = None) -> Traced:
    """Run `fn(*args)` once on fake tensors and return its flat graph.

    args: trees whose tensor leaves give shape, stride, dtype and device (values are not read; meta tensors will do);
    all other leaves are constants of the graph. `fn` may be any Python over torch, with `value_and_grad`, collectives
    on symbolic axes and compiled layers inside.
    mesh: of the ranks that will run it, where the arguments do not know theirs; within another trace, that of this one.
    reads: who notes the functions that are entered (`step.watched`).
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
    with record(mode, name, known or mesh, reads) as recorder:
        for x, label in zip(recorder.inputs(fakes), labels, strict=True):
            if label is not None:
                labelled(x, label.layout)
        rest = iter(fakes)
        filled = [next(rest) if t else leaf for leaf, t in zip(leaves, is_tensor, strict=True)]
        out = fn(*structure.unflatten(spec, filled))
        out_paths, outs, out_tree = structure.flatten(out)
        require_no_hidden_tensors(out_paths, outs, name)
        out_static = [None if isinstance(o, torch.Tensor) else (o,) for o in outs]
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
    called_at = _line(_frames(sys._getframe(1)))
    return Traced(graph_module, fakes, *found, mode, called_at, labels, out_labels)


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
    with outside_of_tracing(), mode:
        return [torch.empty_strided(*meta_of(t)[:2], dtype=t.dtype, device=t.device) for t in tensors]


@contextlib.contextmanager
def record(mode, name: str, mesh: layout.Mesh | None = None, reads: Any = None) -> Iterator[Recorder]:
    """Context in which ops on fake tensors of the mode are recorded, each with its source line; one autograd thread,
    because dispatch modes are per thread. `recorded` gives the graph, behind it. mesh: of the ranks that will run it;
    None: that of the trace around it, where there is one. reads: who notes what is entered (`step.watched`)."""
    root = Recorded(mesh or recorded_mesh(), reads or recorded_reads())
    with (
        _explained(name),
        quiet_about_shapes(),
        generators_kept(name),
        outside_of_tracing(),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        mode,
        fx_traceback.preserve_node_meta(),
        recording(root) as recorder,
        _Lines(root.reads),
        _Copies(),
    ):
        yield recorder


def recorded(recorder: Recorder, name: str) -> torch.fx.GraphModule:
    """The graph, whose nodes have lines. ValueError for one that draws from torch's generators."""
    graph_module = recorder.graph_module
    assert graph_module is not None, "outputs are given"
    _set_lines(graph_module)
    require_keyed(graph_module, name)
    return graph_module


@contextlib.contextmanager
def _explained(name: str):
    """What torch refuses to trace, as a ValueError that names the line and the fix."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        raise _refused(
            e,
            f"{name}: at {_raised_at(e)}: got a read of the value of a tensor ({e}), wanted a graph that does not "
            "depend on data; keep it in tensors (torch.where instead of if, no .item(), no nonzero or boolean index)",
        ) from None
    except AssertionError as e:
        if "convert all Tensors to FakeTensors" not in str(e) and "Mixing fake modes" not in str(e):
            raise
        if _OF_FORWARD_MODE in str(e):
            raise _refused(e, f"{name}: at {_raised_at(e)}: {_NO_FORWARD_MODE} ({e})") from None
        raise _refused(
            e,
            f"{name}: at {_raised_at(e)}: got a tensor from a closure or a global, wanted tensors among its arguments; "
            "pass it as an argument, or make it inside the function from Python numbers; of a module, pass all "
            f"parameters and buffers: torch.func.functional_call(module, {{**params, **buffers}}, args) ({e})",
        ) from None
    except Exception as e:
        at, text = _raised_at(e), str(e)
        op = next((note for note in getattr(e, "__notes__", ()) if note.startswith(_FAILED)), None)
        if "leaf Variable that requires grad" in text:
            what = (
                f"{name}: at {at}: got an argument that is changed in place, wanted it unchanged, as a step is pure; "
                "return the new value instead"
            )
        elif isinstance(e, RuntimeError) and any(words in text for words in _READS_MEMORY):
            what = (
                f"{name}: at {at}: got a read of the values of a tensor (.numpy() or its memory), wanted none, as "
                "while a step is traced a tensor has a shape and no values; keep it in tensors, or do this before or "
                "after the step"
            )
        elif "two devices, meta and" in text:
            what = f"{name}: at {at}: {_NO_FORWARD_MODE} ({text})"
        elif isinstance(e, kinds.Untransformable):
            what = f"{name}: at {at}: {text}"
        elif isinstance(e, RuntimeError) and any(words in text for words in _NOT_TRANSFORMED):
            what = (
                f"{name}: at {at}: got a transform of torch.func (grad, vjp, jvp, vmap) around a function whose "
                "gradient is written by hand or taken inside (a compiled layer, attention, value_and_grad), wanted "
                f"that function in plain torch, or torch.autograd.grad around it ({text.splitlines()[0]})"
            )
        elif isinstance(e, RuntimeError) and any(words in text for words in _NOT_TWICE):
            what = (
                f"{name}: at {at}: got a second gradient (create_graph=True) of a function that has a first one only "
                "(ring attention, grouped products, torch's fused attention), wanted one that can be differentiated "
                f"twice; write that function in plain torch there ({text.splitlines()[0]})"
            )
        elif op is not None:
            what = (
                f"{name}: {at}: {op.removeprefix(_FAILED)}: {text.rstrip('.')}; in a step tensors have the shapes of "
                "one rank's part"
            )
        else:
            raise
        raise _refused(e, what) from None


_FAILED = "in a step that is traced: "  # how the note begins that names what an op failed with
_OF_FORWARD_MODE = "device='meta'"
_NO_FORWARD_MODE = (
    "got a gradient through torch.func's forward mode (jvp, jacfwd, hessian), or a tensor on the device meta, wanted "
    "reverse mode there: torch fills in tangents of zero that it cannot trace; "
    "torch.autograd.grad((gradient * v).sum(), x) is the same product"
)
_NOT_TRANSFORMED = ("setup_context", "inside of a function being transformed", "generate_vmap_rule", "jvp function")
_NOT_TWICE = ("once_differentiable", "derivative for ")
_READS_MEMORY = (".numpy() is not supported", "numpy() on Tensor that requires grad", "data pointer of Tensor")


def _refused(e: BaseException, text: str) -> ValueError:
    """The error to raise instead of e, with the user's part of the stack as a note; torch's part is 40 frames."""
    error = ValueError(text)
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(_MACHINERY)]
    if frames:
        error.add_note("".join(["In the step (most recent call last):\n", *traceback.format_list(frames)]).rstrip())
    return error


# ---- lines -----------------------------------------------------------------------------------------------------------
_BACKWARD, _OF_BACKWARD = "<backward>", " (backward)"
_AS_OF = "fmegatron_line"


def as_of(line: str) -> contextlib.AbstractContextManager:
    """What is traced inside has this line: of the user's code that asked for it, and what for."""
    return fx_traceback.annotate({_AS_OF: line})


class _Lines(TorchDispatchMode):
    """Notes for every op of the forward the line of the user's code that it comes from. reads: hears of the stack."""

    def __init__(self, reads: Any):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if fx_traceback.current_meta.get("in_grad_fn"):
            fx_traceback.set_stack_trace([_BACKWARD])  # the mark that all versions of torch copy onto nodes
        else:
            line = _line(_frames(sys._getframe(1)))
            if self.reads is not None:
                self.reads.look(sys._getframe(1))
            fx_traceback.set_stack_trace([line] if line else [])
        if kinds.collective_of(func):
            for x in tree.leaves(args[0]):
                forget_constant(x)
        try:
            return func(*args, **(kwargs or {}))
        except Exception as e:
            if not any(note.startswith(_FAILED) for note in getattr(e, "__notes__", ())):
                e.add_note(f"{_FAILED}{func.name().partition('::')[2]} got {_words(args, kwargs)}")
            raise


class _Copies(TorchFunctionMode):
    """What Python's copy and pickle make of tensors while a step is traced; left alone, fakes of another trace."""

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
        return func(*args, **(kwargs or {}))


def _words(args, kwargs) -> str:
    """ "f32[8, 4], f32[3, 4], 1": what an op was given."""
    given = tree.leaves((args, kwargs or {}))
    return ", ".join(
        f"{dtypes.dtype_name(x.dtype)}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in given
    )


def _frames(frame) -> Iterator[tuple[str, int]]:
    """(file, line) of a frame and of those that called it."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def line_here() -> str:
    """The line of the user's code that is running now, and behind it the library's: as on the nodes of a trace."""
    return _line(_frames(sys._getframe(1)))


def _line(frames: Iterable[tuple[str, int | None]]) -> str:
    """Of frames, innermost first: the first outside of this package, and behind it the first of the package that is
    neither torch's nor this machinery's: "exp.py:21 (in fmegatron/nn/norm.py:19)"; "" where there is neither."""
    library = ""
    for file, number in frames:
        if file.startswith(_MACHINERY):
            continue
        if not file.startswith(_PACKAGE):
            return f"{_file_line(file, number)}{library and f' (in {library})'}"
        library = library or f"{file.removeprefix(_ROOT).replace(os.sep, '/')}:{number}"
    return library


def _file_line(path: str, line: int | None) -> str:
    """ "file.py:12"; "cell:12" for a cell of a notebook, which ipykernel names after its process and a hash."""
    folder, name = os.path.split(path)
    return f"{'cell' if os.path.basename(folder).startswith('ipykernel_') else name}:{line}"


def described(fn: Callable) -> str:
    """ "loss_fn (file.py:12)": a function by its name and the line where it begins; what wraps it is looked through."""
    while inner := getattr(fn, "func", None) or getattr(fn, "__wrapped__", None):
        fn = inner
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    return name if code is None else f"{name} ({_file_line(code.co_filename, code.co_firstlineno)})"


def _raised_at(e: BaseException) -> str:
    """The line of the user's code that an exception came from."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(e.__traceback__)]
    return _line(reversed(frames)) or "?"


def _set_lines(graph_module) -> None:
    """meta["at"]: the line of each node; for a node of the backward the line of its forward, marked "(backward)"."""
    forward_line = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        trace_text = (node.meta.get("stack_trace") or "?").strip()
        of_backward = trace_text == _BACKWARD or bool(node.meta.get("is_gradient_acc"))
        node.meta["backward"] = of_backward
        stated = node.meta.get("custom", {}).get(_AS_OF)
        if stated is not None:
            node.meta["at"] = stated
        elif of_backward:
            number = node.meta.get("seq_nr", -1)
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
