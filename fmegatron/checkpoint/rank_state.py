"""State that each rank has for itself: a JSON value of every rank as one leaf with a layout over the mesh.

    state["loader"], layouts["loader"] = rank_state.pack({"position": 7}), rank_state.layout(mesh, "dp")
    ...
    got = restore(path, {..., "loader": rank_state.layout(new_mesh, "dp")}, rules=[per_rank("loader", "wrap")], ...)
    rank_state.unpack(got["loader"])

The leaf is uint8 [ranks, capacity], one row for each position along the axes, and is saved and restored like any other.
Where the number of positions changes, the rule `per_rank` assigns the rows; without it the numbers must agree.
Arrays of a fixed shape for each rank need no packing: give them a leading dim of 1 and a layout like this.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from fmegatron.layout import Layout, Mesh

_LENGTH_BYTES = 8


def layout(mesh: Mesh, axes: str | tuple[str, ...] | None = None, capacity: int = 4096) -> Layout:
    """The layout of a leaf with a row for each position along `axes` (default: all axes of the mesh, so each rank).

    Ranks that differ only in other axes must pack the same value: one of them is saved. capacity: bytes of a row.
    """
    axes = mesh.names if axes is None else mesh.axes(axes)
    return Layout((mesh.extent(axes), capacity), torch.uint8, mesh, (axes,))


def pack(value: Any, capacity: int = 4096) -> torch.Tensor:
    """A JSON value as uint8 [1, capacity]: 8 bytes of length (little-endian), JSON text, zeros. Tuples become lists.

    Raises ValueError for what JSON does not have, and for a value that needs more bytes than `capacity`.
    """
    _check(value)
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"rank state: got {value!r:.80}, wanted a JSON value ({error})") from None
    data = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    if len(data) > capacity:
        raise ValueError(
            f"rank state: got a value of {len(data)} bytes as JSON, wanted at most capacity={capacity}; pass a larger"
            " capacity to pack and layout"
        )
    row = torch.zeros(1, capacity, dtype=torch.uint8)
    row[0, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return row


def unpack(row: torch.Tensor) -> Any:
    """The value that `pack` made a row of. Raises ValueError for anything else."""
    data = bytes(row.reshape(-1).tolist()) if row.dtype is torch.uint8 else b""
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES + size:
        raise ValueError(
            f"rank state: got {row.dtype} of {len(data)} bytes for a value of {size}, wanted what pack made"
        )
    try:
        return json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + size])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"rank state: got no JSON ({error}), wanted what pack made") from None


def _check(value: Any) -> None:
    """Keys that are not strings would come back as strings: an error now."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if not isinstance(key, str):
            raise ValueError(f"rank state: got the key {key!r}, wanted a string, as JSON has it; write str({key!r})")
        _check(item)
    for item in value if isinstance(value, list | tuple) else ():
        _check(item)
