"""Plans in files: a few arrays and what they were made of, written once, atomically, then mapped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fmegatron.files import whole

_MAGIC = b"fmplan01"


def save_arrays(path: str | os.PathLike, made_of: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write named 1-d arrays and a description as one file, which appears complete or not at all."""
    entries, offset = {}, 0
    for name, x in arrays.items():
        entries[name] = [x.dtype.str, len(x), offset]
        offset += -(-x.nbytes // 64) * 64
    text = json.dumps({"made_of": made_of, "arrays": entries}).encode()
    start = -(-(16 + len(text)) // 64) * 64
    with whole.whole_file(path) as file:
        file.write((_MAGIC + len(text).to_bytes(8, "little") + text).ljust(start, b"\0"))
        for x in arrays.values():
            file.write(np.ascontiguousarray(x).data.cast("B") if len(x) else b"")
            file.write(bytes(-x.nbytes % 64))


def load_arrays(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(what they were made of, arrays mapped read-only) of such a file; ValueError for another, or a damaged one."""
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(16)
        length = int.from_bytes(head[8:], "little")
        text = file.read(min(length, size)) if head[:8] == _MAGIC else b""
    start, arrays = -(-(16 + length) // 64) * 64, {}
    try:
        found = json.loads(text)
        for name, (dtype, count, offset) in found["arrays"].items():
            dtype, end = np.dtype(dtype), start + offset + count * np.dtype(dtype).itemsize
            if dtype.kind not in "iu" or min(count, offset) < 0 or end > size:
                raise ValueError(f"{path}: got array {name} up to byte {end} of {size}, wanted it inside of the file")
            mapped = np.memmap(path, dtype, "r", start + offset, (count,)) if count else np.zeros(0, dtype)
            arrays[name] = np.asarray(mapped)
        return found["made_of"], arrays
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: got a damaged plan ({error}), wanted a complete one; delete it") from None


def digest_of(*parts: Any) -> str:
    """xxh3 of arrays and JSON values, 16 hex digits."""
    digest = xxhash.xxh3_64()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data if part.nbytes else b"")
        else:
            digest.update(json.dumps(part, sort_keys=True).encode())
    return digest.hexdigest()
