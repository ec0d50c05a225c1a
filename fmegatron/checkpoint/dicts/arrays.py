"""Tensors and numpy arrays of a state without layouts, as plain tensors with layouts of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fmegatron import tree
from fmegatron.checkpoint.files.format import bits, dtype_of, dtype_text, raw_dtype
from fmegatron.checkpoint.files.other_threads import changed, let_others_run
from fmegatron.layout import Layout, Mesh, dtypes


def as_tensor(x: Any, path: str, to_read: bool = False) -> torch.Tensor:
    """A tensor or numpy array as a tensor of its own memory, detached; numpy's is copied where torch cannot share it
    (of another byte order, strides below 0 or between elements; read-only, unless it is only `to_read`).

    Raises ValueError, naming the path, for what has no plain elements: subclasses, sparse and meta tensors, objects;
    RuntimeError for an array that another thread writes to while it is copied.
    """
    if isinstance(x, torch.Tensor):
        _check_plain(x, path)
        return x.detach()
    _check_array(x, path)
    value = np.asarray(x)
    dtype = layout_of(value, path).dtype
    plain, own = raw_dtype(dtype.itemsize), value
    shared = own.dtype.isnative and own.flags.aligned and (own.flags.writeable or to_read)
    if not shared or any(stride < 0 or stride % own.itemsize for stride in own.strides):
        own = value.astype(value.dtype.newbyteorder("="), order="C")  # by its own type: complex numbers swap by halves
        let_others_run()  # a write that is under way moves on, and shows
        again = own if value.dtype.isnative else own.astype(value.dtype)
        if not np.array_equal(again.view(plain), value.view(plain), equal_nan=True):  # complex128 has no such integer
            raise RuntimeError(changed(path))
    own = own.view(plain)
    if not own.flags.writeable:  # torch wants memory that may be written to
        own = np.asarray(_Writeable(own))
    return torch.from_numpy(own).view(dtype)


class _Writeable:
    """A read-only array as numpy's array interface has it, for readers that do not ask."""

    def __init__(self, x: np.ndarray):
        self.kept, found = x, x.__array_interface__
        self.__array_interface__ = {**found, "data": (found["data"][0], False)}


def as_numpy(x: torch.Tensor) -> np.ndarray:
    """A tensor as a numpy array of its dtype; the same memory on the CPU."""
    return bits(x.cpu()).numpy().view(dtype_text(x.dtype))


def layout_of(x: Any, path: str) -> Layout:
    """The layout, on one process, of what a tensor, meta tensor, array, Layout or ArraySpec asks for."""
    if isinstance(x, Layout | tree.ArraySpec):
        return x if isinstance(x, Layout) else x.layout
    if isinstance(x, torch.Tensor):
        _check_plain(x, path, meta=True)
        return Layout(tuple(x.shape), x.dtype, Mesh())
    _check_array(x, path)
    try:
        dtype = dtype_of(x.dtype.name)
        if np.dtype(x.dtype.name).itemsize != dtype.itemsize:
            raise ValueError
    except (ValueError, TypeError):
        raise ValueError(
            f"{path}: got a numpy array of dtype {x.dtype}, wanted bools, numbers, or lists of text;"
            " pass x.tolist(), or x.astype(...) of a number type"
        ) from None
    return Layout(tuple(x.shape), dtype, Mesh())


def _check_array(x: Any, path: str) -> None:
    """ValueError for a subclass of numpy's arrays: it has more than its elements (a mask, units). np.memmap has not."""
    if isinstance(x, np.ndarray) and type(x) not in (np.ndarray, np.memmap):
        kind, fix = type(x).__qualname__, "pass np.asarray(x), if its elements are all"
        if isinstance(x, np.ma.MaskedArray):
            fix = "pass x.data and x.mask as two arrays, or x.filled(...)"
        raise ValueError(f"{path}: got a {kind}, a subclass of numpy's arrays, wanted a plain array; {fix}")


def _check_plain(x: torch.Tensor, path: str, meta: bool = False) -> None:
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        kind, fix = type(x).__qualname__, "save what it is made of"
        if hasattr(x, "device_mesh"):
            fix = "interop.save_state_dict and interop.load_state_dict take it, on any number of ranks"
        raise ValueError(f"{path}: got a {kind}, wanted a plain tensor; {fix}")
    if x.is_quantized:
        fix = "pass x.int_repr(), and scale and zero point beside it, or x.dequantize()"
        raise ValueError(f"{path}: got a quantized tensor ({x.dtype}), wanted a plain one; {fix}")
    if x.is_nested:
        raise ValueError(f"{path}: got a nested tensor, wanted a plain one; pass list(x.unbind())")
    if x.layout is not torch.strided:
        raise ValueError(f"{path}: got {x.layout}, {x.dtype}, wanted a dense tensor; pass x.to_dense()")
    try:
        dtypes.dtype_name(x.dtype)
    except ValueError:
        fix = "pass x.view(torch.uint8), if that is how its elements lie"
        raise ValueError(f"{path}: got dtype {x.dtype}, wanted one that a checkpoint has a name for; {fix}") from None
    if x.is_meta and not meta:
        raise ValueError(f"{path}: got a meta tensor, wanted one with memory; pass x.to_empty(...) or initialize it")
