"""Short names of torch dtypes, as layouts print and store them."""

from __future__ import annotations

import torch

_NAMES = (
    ("bool", "bool"),
    ("u8", "uint8"),
    ("u16", "uint16"),
    ("u32", "uint32"),
    ("u64", "uint64"),
    ("i8", "int8"),
    ("i16", "int16"),
    ("i32", "int32"),
    ("i64", "int64"),
    ("f4x2", "float4_e2m1fn_x2"),  # two values in a byte; shapes count bytes
    ("f8e4m3fn", "float8_e4m3fn"),
    ("f8e4m3fnuz", "float8_e4m3fnuz"),
    ("f8e5m2", "float8_e5m2"),
    ("f8e5m2fnuz", "float8_e5m2fnuz"),
    ("f8e8m0fnu", "float8_e8m0fnu"),
    ("f16", "float16"),
    ("bf16", "bfloat16"),
    ("f32", "float32"),
    ("f64", "float64"),
    ("c32", "complex32"),
    ("c64", "complex64"),
    ("c128", "complex128"),
)


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype: `bf16`, `f32`, `i64`, `f8e4m3fn`, `bool`. Raises ValueError for one without a name."""
    for name, torch_name in _NAMES:
        if getattr(torch, torch_name, None) is dtype:
            return name
    raise ValueError(f"got dtype {dtype!r}, wanted a torch.dtype among {', '.join(name for name, _ in _NAMES)}")


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype with a short name. Raises ValueError for an unknown name."""
    for short, torch_name in _NAMES:
        if short == name and hasattr(torch, torch_name):
            return getattr(torch, torch_name)
    raise ValueError(f"got dtype name {name!r}, wanted one of {', '.join(short for short, _ in _NAMES)}")
