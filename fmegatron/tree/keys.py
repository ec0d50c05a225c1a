"""Random keys: integers folded with the name of a stream of numbers."""

from __future__ import annotations

import hashlib


def fold_in(key: int, *data: int | str) -> int:
    """A new key from a key and what it is for: a path, a step, a layer. The same on every rank, machine and version.

    Keys are Python ints of 63 bits (0 or more), so they fit an int64 tensor. Folding in steps is folding at once.

    >>> fold_in(0, "params", 3) == fold_in(fold_in(0, "params"), 3) != fold_in(0, "params", 4)
    True
    """
    for item in data:
        if isinstance(item, str):
            text = b"s" + item.encode()
        elif isinstance(item, int):
            text = b"i%d" % item
        else:
            raise ValueError(f"fold_in: got {item!r} of type {type(item).__name__}, wanted an int or a str")
        digest = hashlib.blake2b(text, digest_size=8, key=(key % 2**64).to_bytes(8, "little")).digest()
        key = int.from_bytes(digest, "little") >> 1
    return key
