"""JSON from files that are not trusted: objects alone, each key once, numbers that are some, bounded memory."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOST_BYTES = 256 << 20  # of a file: room for the manifest of a million leaves
# What CPython needs for a list or dict and for a value in one, about; how much a file may need, and per byte of it.
# (`[[],[],` needs 40 bytes for each of its own; a real manifest 8 to 12.)
_CONTAINER_BYTES, _VALUE_BYTES, _MOST_FOR_ANY_FILE, _MOST_PER_BYTE = 64, 24, 128 << 20, 20


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object without duplicate keys, NaN or infinity. Raises ValueError, before it takes much memory."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key stands twice")
        return value

    def refuse(text: str) -> float:
        raise ValueError(f"{text[:40]} is no JSON number")

    def finite(text: str) -> float:
        return value if math.isfinite(value := float(text)) else refuse(text)

    check_memory(data)
    try:
        with no_collection():
            # Decoded here: json.loads would guess other encodings than UTF-8.
            value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if type(value) is not dict:
        raise ValueError(f"got a {type(value).__name__}, wanted an object")
    return value


def check_memory(data: bytes) -> None:
    """Raise ValueError for JSON that takes more memory than a file may."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data)} bytes, more than {MOST_BYTES}")
    need = (data.count(b"[") + data.count(b"{")) * _CONTAINER_BYTES + data.count(b",") * _VALUE_BYTES
    if need > max(_MOST_FOR_ANY_FILE, _MOST_PER_BYTE * len(data)):
        raise ValueError(f"{len(data)} bytes that need {need} bytes of memory")


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the search for cycles: what is made here has none, and looking takes longer than all the rest."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
