"""Text as tokens come: complete characters only, and the end at a stop text.

The text of tokens is not the sum of their texts: a character may be several tokens, and a first word has no space. So
each token is decoded with those before it, since the last point at which a character was complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fmegatron.tree import structure

_INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_LONGEST = 3  # of them at the end of a text may become one with the next token


class Tokenizer(Protocol):
    """What text needs of a tokenizer: those of `fmegatron.data` have it."""

    @property
    def vocab_size(self) -> int:
        """Its ids are below this."""
        ...

    def encode(self, text: str) -> Any:
        """Ids of a text."""
        ...

    def decode(self, ids: Any) -> str:
        """The text of ids."""
        ...

    def describe(self) -> dict:
        """What names it, as plain JSON."""
        ...


class Spoken(NamedTuple):
    """What has been heard of a text. ids: since the last but one complete point. complete: how many of them were there
    at the last. shown: characters of their text that are in `text`. text: all that is complete. new: its part of the
    last token."""

    ids: tuple[int, ...] = ()
    complete: int = 0
    shown: int = 0
    text: str = ""
    new: str = ""

    def recent(self, stop: str) -> str:
        """The end of the text in which the last token may have completed `stop`."""
        return self.text[max(0, len(self.text) - len(self.new) - len(stop) + 1) :]


def hear(before: Spoken, id: int, tokenizer: Tokenizer) -> Spoken:
    """What has been heard with one token more."""
    ids = (*before.ids, id)
    now = tokenizer.decode(ids)
    held = min(_LONGEST, len(now) - len(now.rstrip(_INCOMPLETE)))
    upto = max(before.shown, len(now) - held)
    new = now[before.shown : upto]
    if held:
        return Spoken(ids, before.complete, upto, before.text + new, new)
    kept = ids[before.complete :]
    return Spoken(kept, len(kept), len(tokenizer.decode(kept)), before.text + new, new)


def rest(heard: Spoken, tokenizer: Tokenizer) -> str:
    """What was held back as incomplete, when no token comes any more."""
    return tokenizer.decode(heard.ids)[heard.shown :]


def pieces(ids: Iterable[int], tokenizer: Tokenizer, stop_texts: Sequence[str] = ()) -> Iterator[str]:
    """The text of ids as they come, up to the first stop text, which is not part of it.

    Pieces end with complete characters, and what may be the beginning of a stop text waits for the next ids.
    """
    heard, given = Spoken(), 0
    for id in ids:
        heard = hear(heard, id, tokenizer)
        found = [at for stop in stop_texts if (at := heard.text.find(stop, given)) >= 0]
        if found:
            yield heard.text[given : min(found)]
            return
        waits = max((_overlap(heard.text[given:], stop) for stop in stop_texts), default=0)
        if upto := heard.text[given : len(heard.text) - waits]:
            yield upto
            given += len(upto)
    left = heard.text[given:] + (rest(heard, tokenizer) if heard.ids else "")
    if left:
        yield left


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop text begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def texts_of(prompts: Tensor | Sequence[Sequence[int] | Tensor], vocab_size: int) -> list[Tensor]:
    """int64 [P] of each row. ValueError for none, for ids of another kind, and for those that the model has not."""
    texts = [torch.as_tensor(row) for row in prompts]
    wrong = [text for text in texts if text.dim() != 1 or text.is_floating_point()]
    if wrong and wrong[0].numel() or not texts:
        raise ValueError(
            f"prompts: got {structure.in_words(wrong[0]) if wrong else 'no row'}, wanted a row of ids for each text; "
            "for one text pass [ids]"
        )
    rows = [text.to("cpu", torch.int64) for text in texts]
    if wrong_ids := [i for row in rows for i in row[(row < 0) | (row >= vocab_size)].tolist()]:
        raise ValueError(
            f"prompts: got the id {wrong_ids[0]}, wanted 0 to {vocab_size - 1}; encode with the model's tokenizer"
        )
    return rows
