"""Documents inside of windows: where they end, as entries of a batch that attention and loss understand."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Tokens(Protocol):
    """What batches are cut from: a numpy array, TokenArray or IndexedTokens; a slice of it is a numpy array.

    Tokens that know their documents have `bounds(start, stop)`, too.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> np.ndarray: ...


def check_documents(documents: bool | int, tokens: Tokens, name: str) -> None:
    """ValueError where tokens do not know their documents, and no id ends them."""
    if documents is True and not hasattr(tokens, "bounds"):
        raise ValueError(
            f"{name}: documents: got True and tokens of {type(tokens).__name__}, which do not know where documents end,"
            " wanted data.IndexedTokens; or give the id that ends a document: documents=tokenizer.eod"
        )
    if not isinstance(documents, bool) and (not isinstance(documents, int | np.integer) or documents < 0):
        raise ValueError(f"{name}: documents: got {documents!r:.40}, wanted True, False or the id that ends a document")


def document_ends(tokens: Tokens, starts: list[int], ids: np.ndarray, documents: bool | int) -> np.ndarray:
    """bool [n, S]: which token of windows ids[n, S + 1], which begin at `starts`, is the last one of its document."""
    if documents is not True:
        return ids[:, :-1] == documents
    known: Any = tokens  # `check_documents` has seen to it
    length = ids.shape[1]
    ends = np.zeros((len(starts), length - 1), dtype=bool)
    for row, start in enumerate(starts):
        ends[row, known.bounds(start, start + length) - start - 1] = True
    return ends


def document_entries(ends: np.ndarray) -> dict[str, np.ndarray]:
    """Of ends [n, S] (whether a token is the last one of its document): the entries of a batch about documents.

    "documents" int64 [n, S]: 0, 1, … from the window's beginning; "positions" int64 [n, S]: from the beginning of the
    document, or of the window if that is later; "mask" bool [n, S]: False where the label is of the next document.
    """
    n, length = ends.shape
    starts = np.zeros((n, length), dtype=np.int64)
    starts[:, 1:] = np.where(ends[:, :-1], np.arange(1, length), 0)
    documents = np.zeros((n, length), dtype=np.int64)
    np.cumsum(ends[:, :-1], axis=1, out=documents[:, 1:])
    positions = np.arange(length) - np.maximum.accumulate(starts, axis=1)
    return {"documents": documents, "positions": positions, "mask": ~ends}
