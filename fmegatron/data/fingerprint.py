"""fingerprint: a short text by which a run that is resumed notices that its data is another."""

from __future__ import annotations

import numpy as np
import xxhash

from fmegatron.data.documents import Tokens

_WHOLE = 1 << 20  # tokens that are all looked at
_PIECES, _PIECE = 1024, 1024  # of more, evenly spaced, the first and the last among them


def fingerprint(tokens: Tokens) -> str:
    """Number and digest of the ids, the same for every way in which they are stored and on every machine.

    Of more than a million tokens only as many are read, so that a corpus of any size takes milliseconds; other data,
    another order or another tokenizer shows, a single id that was mended may not.

    >>> fingerprint(np.arange(3, dtype=np.uint16))
    '3 tokens, xxh3 7fb6f0c094f81c5d'
    """
    count, digest = len(tokens), xxhash.xxh3_64()
    starts = [0] if count <= _WHOLE else [i * (count - _PIECE) // (_PIECES - 1) for i in range(_PIECES)]
    for start in starts:
        piece = np.asarray(tokens[start : start + (_WHOLE if count <= _WHOLE else _PIECE)])
        digest.update(np.ascontiguousarray(piece, dtype="<i8").tobytes())
    return f"{count} tokens, xxh3 {digest.hexdigest()}"
