"""fingerprint: a short text by which a run that is resumed notices that its data is another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import xxhash

from fmegatron.data.documents import Tokens

_WHOLE = 1 << 20  # tokens that are all looked at
_PIECES, _PIECE = 1024, 1024  # of more, evenly spaced, the first and the last among them


@runtime_checkable
class Pieces(Protocol):
    """Tokens that are far away: many places are asked for at once."""

    def pieces(self, starts: Sequence[int], count: int, /) -> list[np.ndarray]: ...


def fingerprint(tokens: Tokens) -> str:
    """Number and digest of the ids, the same for every way in which they are stored and on every machine.

    Of more than a million tokens only as many are read, so that a corpus of any size takes milliseconds; other data,
    another order or another tokenizer shows, a single id that was mended may not.

    >>> fingerprint(np.arange(3, dtype=np.uint16))
    '3 tokens, xxh3 7fb6f0c094f81c5d'
    """
    count, digest = len(tokens), xxhash.xxh3_64()
    starts = [i * (count - _PIECE) // (_PIECES - 1) for i in range(_PIECES)]
    if count <= _WHOLE:
        pieces = [tokens[:]]
    elif isinstance(tokens, Pieces):
        pieces = tokens.pieces(starts, _PIECE)
    else:
        pieces = (tokens[start : start + _PIECE] for start in starts)
    for piece in pieces:
        digest.update(np.ascontiguousarray(piece, dtype="<i8").tobytes())
    return f"{count} tokens, xxh3 {digest.hexdigest()}"
