"""What torch and Python refuse while a step is traced, as errors with the user's line, the leaves that met, the fix."""

from __future__ import annotations

import contextlib
import dis
import os
import traceback
from collections.abc import Iterable, Mapping

import torch

from fmegatron import tree
from fmegatron.collectives import kinds
from fmegatron.layout import dtypes
from fmegatron.step.graph.nodes import storage_of
from fmegatron.step.lines import MACHINERY, TORCH, raised_at
from fmegatron.step.torch_private import DataDependentOutputException, DynamicOutputShapeException, opname

__all__ = [
    "OF_ONE_DEVICE",
    "OF_ONE_DTYPE",
    "explained",
    "has_tensor",
    "require_device_of_outputs",
    "require_one_device",
    "require_one_dtype",
    "tell_failed",
]


@contextlib.contextmanager
def explained(name: str, paths: Mapping[int, str], second: bool = False):
    """What torch and Python refuse in a step, as a ValueError that names the line, the leaves and the fix. What the
    step itself raises stays as it is. second: whether its arguments are on the device meta."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        raise _refused(
            e,
            f"{name}: at {raised_at(e)}: got a read of the value of a tensor ({e}), wanted a graph that does not "
            "depend on data; keep it in tensors (torch.where instead of if, no .item(), no nonzero or boolean index)",
        ) from None
    except AssertionError as e:
        if "convert all Tensors to FakeTensors" not in str(e) and "Mixing fake modes" not in str(e):
            raise
        if "device='meta'" in str(e) and not second:
            raise _refused(e, f"{name}: at {raised_at(e)}: {_NO_FORWARD_MODE} ({e})") from None
        raise _refused(
            e,
            f"{name}: at {raised_at(e)}: got a tensor from a closure or a global, wanted tensors among its arguments; "
            "pass it as an argument, or make it inside the function from Python numbers; of a module, pass all "
            f"parameters and buffers: torch.func.functional_call(module, {{**params, **buffers}}, args) ({e})",
        ) from None
    except Exception as e:
        at, text = raised_at(e), str(e)
        op, leaves = _note(e, _FAILED), _note(e, _LEAVES)
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
        elif "two devices, meta and" in text and not second:
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
        elif _TWO_DEVICES in text:
            met = text.rstrip(".!").partition("found ")[2]
            what = (
                f"{name}: at {at}: got tensors of {met}, wanted one device: what a step makes lies where its arguments "
                "do; give device=x.device, of an argument x"
            )
        elif not isinstance(e, _WRONG) or _raised_by_the_step(e) or "must be Tensor, not" in text:
            raise
        elif op:
            of = f"; of the arguments {leaves}" if leaves else ""
            what = f"{name}: {at}: {op}: {text.rstrip('.')}{of}; in a step tensors have the shapes of one rank's part"
        else:
            has = f"; the arguments have {_some(paths.values())}" if isinstance(e, KeyError) else ""
            what = f"{name}: {at}: {type(e).__name__}: {text.rstrip('.')}{has}"
        raise _refused(e, what) from None


_TWO_DEVICES = "found at least two devices"
_NO_FORWARD_MODE = (
    "got a gradient through torch.func's forward mode (jvp, jacfwd, hessian), or a tensor on the device meta, "
    "wanted reverse mode there: torch fills in tangents of zero on meta, which it cannot trace; "
    "torch.autograd.grad((gradient * v).sum(), x) is the same product"
)
_NOT_TRANSFORMED = ("setup_context", "inside of a function being transformed", "generate_vmap_rule", "jvp function")
_NOT_TWICE = ("once_differentiable", "derivative for ")
_LEAVES = "which are the arguments: "
_WRONG = (LookupError, AttributeError, TypeError, ValueError, RuntimeError)  # what torch and Python refuse with


def _note(e: BaseException, begin: str) -> str:
    """What the note of an error says that begins like this; "" without one."""
    notes = (note for note in getattr(e, "__notes__", ()) if note.startswith(begin))
    return next(notes, "").removeprefix(begin)


def _raised_by_the_step(e: BaseException) -> bool:
    """Whether a `raise` that is not torch's has made an error, or nothing inside of the step was running."""
    frames = [*traceback.walk_tb(e.__traceback__)]
    if not any(not frame.f_code.co_filename.startswith(MACHINERY) for frame, _ in frames):
        return True
    code, last = frames[-1][0].f_code, e.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    assert last is not None, "a context hears of errors that were raised"
    raises = dis.opname[code.co_code[last.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
    return raises and not code.co_filename.startswith((TORCH, os.path.abspath(__file__)))


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
    return ", ".join(map(repr, shown[:12])) + more


def tell_failed(e: Exception, op: str, args, kwargs, paths: Mapping[int, str]) -> None:
    """Note on an error the innermost op that it came from and the arguments that it was given."""
    if _note(e, _FAILED):
        return
    e.add_note(f"{_FAILED}{op} got {_words(args, kwargs)}")
    given = [x for x in tree.leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
    places = [place for x in given if (place := _memory_of(x)) is not None]
    known = [paths[place] for place in places if place in paths]
    if known:
        e.add_note(f"{_LEAVES}{', '.join(map(repr, dict.fromkeys(known)))}")


def _memory_of(x: torch.Tensor) -> int | None:
    try:
        return storage_of(x)
    except RuntimeError:  # of a transform of torch.func
        return None


_FAILED = "in a step that is traced: "  # how the note begins that names what an op failed with
_READS_MEMORY = (".numpy() is not supported", "numpy() on Tensor that requires grad", "data pointer of Tensor")


def _refused(e: BaseException, text: str) -> ValueError:
    """The error to raise instead of e, with the user's part of the stack as a note; torch's part is 40 frames."""
    error = ValueError(text)
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(MACHINERY)]
    if frames:
        error.add_note("".join(["In the step (most recent call last):\n", *traceback.format_list(frames)]).rstrip())
    return error


# What torch computes of one dtype only, and is recorded of fake tensors of several.
OF_ONE_DTYPE = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "convolution")


def require_one_dtype(args) -> None:
    found = {x.dtype for x in args if isinstance(x, torch.Tensor)}
    if len(found) > 1:
        several = " and ".join(sorted(map(str, found)))
        raise RuntimeError(f"a product: got {several}, wanted one dtype; cast one: x.to(y.dtype)")


# What takes no number of the CPU (a tensor without dims) beside another device, as element by element ops do.
OF_ONE_DEVICE = ("cat", "stack")


def require_one_device(op, args, second: bool) -> None:
    """RuntimeError for tensors on two devices, which fake tensors let pass: of an element by element op in place, of
    what joins tensors, and of a collective, whose ranks send from the device of the arguments. second: whether the
    arguments of the step are on the device meta."""
    given = [x for x in tree.leaves(args) if isinstance(x, torch.Tensor)]
    collective = kinds.collective_of(op)
    if collective is not None and collective.sent is not None:
        devices = {str(x.device) for x in given} | ({"meta"} if second else set())
    elif opname(op) in OF_ONE_DEVICE:
        devices = {str(x.device) for x in given}
    elif torch.Tag.pointwise in op.tags and op is not torch.ops.aten.copy_.default:
        devices = {str(x.device) for x in given if x.dim()}
    else:
        return
    _require_one(devices)


def require_device_of_outputs(outputs, inputs, grad_outputs=None, *_, **named) -> None:
    """The same for a gradient that torch.autograd.grad is given."""
    del inputs, named
    pairs = zip(_several(outputs), _several(grad_outputs), strict=False)
    for output, grad in pairs:
        if isinstance(grad, torch.Tensor) and grad.dim():
            _require_one({str(output.device), str(grad.device)})


def _several(x) -> tuple:
    return tuple(x) if isinstance(x, list | tuple) else (x,)


def _require_one(devices: set[str]) -> None:
    if len(devices) > 1:
        raise RuntimeError(f"{_TWO_DEVICES}, {' and '.join(sorted(devices, key=lambda x: x != 'meta'))}!")


def _words(args, kwargs) -> str:
    """ "f32[8, 4], f32[3, 4], 1": what an op was given."""
    given = tree.leaves((args, kwargs or {}))
    return ", ".join(
        f"{dtypes.dtype_name(x.dtype)}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in given
    )


def has_tensor(given) -> bool:
    """Whether a tensor is in arguments; lists of a graph that is run again are none of a tree (`immutable_list`)."""
    if isinstance(given, (list, tuple)):
        return any(map(has_tensor, given))
    return any(map(has_tensor, given.values())) if isinstance(given, dict) else isinstance(given, torch.Tensor)
