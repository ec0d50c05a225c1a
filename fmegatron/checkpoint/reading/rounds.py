"""Work in rounds of bounded size, so that memory does not grow with the state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def in_rounds(items: Iterable[Any], most: int) -> Iterator[list[Any]]:
    """Consecutive items whose `nbytes` are at most `most` together; a larger one is alone.

    >>> import numpy as np
    >>> [[x.nbytes for x in part] for part in in_rounds(map(np.zeros, (1, 1, 1, 5, 1)), 16)]
    [[8, 8], [8], [40], [8]]
    """
    part, size = [], 0
    for item in items:
        if part and size + item.nbytes > most:
            yield part
            part, size = [], 0
        part.append(item)
        size += item.nbytes
    if part:
        yield part
