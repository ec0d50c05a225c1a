"""What `prepare` knows of its own work: documents that were left out, and whether texts come back from their ids."""

from __future__ import annotations

import json
import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fmegatron.data.texts import Bad, Part
from fmegatron.files import whole

_PLACES = 10_000  # of a part that are kept
_SHOWN = 20  # in PREFIX.json
_DOCUMENTS, _CHARACTERS = 4, 100_000  # of a part, and of a document, that are decoded
_MOST_CHANGED, _MUCH_CHANGED = 0.5, 0.1


class Skipped(list):
    """The documents of a part that were left out: all are counted, the first are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.documents, self.why = 0, Counter()

    def append(self, one: Bad) -> None:
        self.documents += 1
        self.why[_kind(one.why)] += 1
        if len(self) < _PLACES:
            super().append(one)

    def stats(self) -> dict[str, Any]:
        """As JSON values."""
        return {"documents": self.documents, "why": dict(self.why), "places": [one._asdict() for one in self]}


def _kind(why: str) -> str:
    """What many errors have in common."""
    for words in ("no UTF-8", "no JSON", "surrogate"):
        if words in why:
            return {"surrogate": "half of a surrogate pair"}.get(words, words)
    return "no text"


def skipped_of(prefix: str, parts: Sequence[Part], found: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """{"skipped": what PREFIX.json states}; writes PREFIX.skipped.jsonl. ValueError for an input of which nothing is
    left."""
    kept, first, count, why, shown = Counter(), {}, 0, Counter(), []
    lines = f"{prefix}.skipped.jsonl"
    with whole.whole_file(lines) as file:
        for number, part in enumerate(parts):
            stats = found[number].get("skipped") or Skipped().stats()  # a part that was made without it misses none
            kept[part.path] += found[number]["documents"]
            count, why = count + stats["documents"], why + Counter(stats["why"])
            for place in stats["places"]:
                first.setdefault(part.path, place)
                shown += [place] if len(shown) < _SHOWN else []
                file.write(json.dumps(place).encode() + b"\n")
    if not count:
        os.unlink(lines)
    for path, place in first.items():
        if not kept[path]:
            raise ValueError(
                f"{path}: got no document that can be read, wanted one or more; the first, at {place['at']}: "
                f"{place['why']}"
            )
    return {"skipped": {"documents": count, "why": dict(why), "first": shown}}


class Sample:
    """Some documents of a part, and what their ids are decoded to. counts: characters; lost and added by that."""

    def __init__(self) -> None:
        self.left, self.counts = _DOCUMENTS, {"characters": 0, "lost": 0, "added": 0}

    def take(self, tokenizer: Any, texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> None:
        """Those of the first texts. ids: of all of them, one after the other."""
        starts = np.cumsum(lengths) - lengths
        for text, start, length in zip(texts[: self.left], starts, lengths, strict=False):
            own = ids[start : start + length]
            if len(text) > _CHARACTERS:
                text = text[:_CHARACTERS]
                own = tokenizer.encode(text)
            before, after = _characters(text), _characters(tokenizer.decode(own))
            self.counts["characters"] += before.total()
            self.counts["lost"] += (before - after).total()
            self.counts["added"] += (after - before).total()
        self.left = max(0, self.left - len(texts))


def _characters(text: str) -> Counter[str]:
    """How often each character is in a text, without spaces, case and accents, which tokenizers may drop."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return Counter(x for x in plain if not x.isspace() and not unicodedata.combining(x))


def require_same_text(prefix: str, samples: Sequence[Mapping[str, int]]) -> None:
    """A RuntimeWarning, or ValueError, where decoded documents are not what they were."""
    of = {name: sum(one[name] for one in samples) for name in ("characters", "lost", "added")}
    changed = max(of["lost"], of["added"]) / max(1, of["characters"])
    if changed <= _MUCH_CHANGED:
        return
    text = (
        f"{prefix}: got ids of {of['characters']:,} characters that decode to other ones: {of['lost']:,} are lost, "
        f"{of['added']:,} added, wanted a tokenizer that knows these texts; look at what it makes of one: "
        "tokenizer.decode(tokenizer.encode(text))"
    )
    if changed > _MOST_CHANGED:
        raise ValueError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=3)
