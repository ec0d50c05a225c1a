"""Agreement of all ranks on one save: digests of what each has read travel in the restore's last all-reduce.

Each rank opens the checkpoint by itself. So when it is saved again meanwhile, or a node's view of the file system is
old, two ranks may have read two saves. Then all look again until they see the same one, and read that.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fmegatron.checkpoint.calls.ranks import Ranks, compared
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.format import digest_text
from fmegatron.checkpoint.files.saved import SavedAgain
from fmegatron.checkpoint.reading.snapshot import Saved, on_snapshot, snapshot_of
from fmegatron.checkpoint.reading.source import Foreign, Source
from fmegatron.checkpoint.reading.strict import listed

_TRIES = 4  # of reading, because the ranks had read different saves
_PAUSES_S = (0.0, 0.1, 0.5, 1.5, 3.0)  # before each look for a save that all ranks see
_MOST_COMPARED = 20_000  # leaves that are compared one by one for the error message


def on_one_save(
    ranks: Ranks,
    what: str,
    path: Saved,
    work: Callable[[Source], Any],
    asked: Callable[[Any], int] = lambda result: 0,
    before: Callable[[], None] = lambda: None,
) -> tuple[Source, Any]:
    """(the save, `work(save)`) on every rank, of the same save on all of them. All ranks call this.

    asked: a number of at most 63 bits, of a rank's result, that must be the same on all ranks.  before: checks of the
    arguments, made before anything is opened.

    Raises on all ranks: what `work` raises on one; RuntimeError, naming the path and what differs, when the ranks go on
    seeing different saves; ValueError when `asked` differs.
    """
    agreed: Source | None = None
    for _ in range(_TRIES):

        def read(agreed: Source | None = agreed) -> tuple[Source, Any]:
            before()
            return on_snapshot(path, lambda source: (source, work(source)), first=agreed)

        found, (same, alike) = compared(ranks, what, read, lambda found: (found[0].digest, asked(found[1])), 2)
        if same and not alike:
            raise ValueError(
                f"{what}: got different trees from ranks 0 and {_other(ranks, asked(found[1]))}, wanted one; give all"
                " ranks the same layouts, rules and options, or pass read='own'"
            )
        if same:
            return found
        seen = found[0]
        del found  # given back before another save is read
        if not isinstance(path, Source):
            seen, same = _look(ranks, what, path)
        if not same:
            raise RuntimeError(f"{what} failed: {_difference(ranks, seen)}")
        agreed = seen
    raise SavedAgain(f"{what} failed: it was saved again {_TRIES} times meanwhile; try when no other job saves there")


def _look(ranks: Ranks, what: str, path: str | os.PathLike | Store | Foreign) -> tuple[Source, bool]:
    """Look, a bounded number of times, until all ranks see the same save: what this rank saw last, and whether."""
    for pause in _PAUSES_S:
        time.sleep(pause)
        seen, (same,) = compared(ranks, what, lambda: snapshot_of(path), lambda seen: (seen.digest,), 1)
        if same:
            break
    return seen, same


def _difference(ranks: Ranks, seen: Source) -> str:
    """Which ranks see what, in words that are the same on all ranks."""
    other = _other(ranks, seen.digest)
    text = json.dumps({"path": seen.text, **_summary(seen)})
    a, b = (json.loads(ranks.broadcast_text(text, rank)) for rank in (0, other))
    found = [] if a["step"] == b["step"] else ["their steps"]
    for name in ("metadata", "leaves"):
        if names := [key for key in {**a[name], **b[name]} if a[name].get(key) != b[name].get(key)]:
            found.append(f"{name} {listed(names, 5)}")
    return (
        f"{a['path']}: the ranks see different saves of it: rank 0 has step {a['step']} ({a['save']}), rank"
        f" {other} step {b['step']} ({b['save']}); {', '.join(found)} differ; another job saves"
        " there, or the file system shows some nodes what was there before: restore again when that is over"
    )


def _other(ranks: Ranks, number: int) -> int:
    """The first rank whose number differs from rank 0's."""
    numbers = ranks.gather_rows(torch.tensor([number]))[:, 0].tolist()
    return next(rank for rank, n in enumerate(numbers) if n != numbers[0])


def _summary(source: Source) -> dict[str, Any]:
    """What a save holds, by digests."""
    leaves = {path: _leaf_digest(source, path) for path in source.leaves}
    if len(leaves) > _MOST_COMPARED:
        leaves = {f"({len(leaves)} leaves)": _digest(leaves)}
    metadata = {key: _digest(value) for key, value in source.metadata.items()}
    return {"step": source.step, "save": source.named, "metadata": metadata, "leaves": leaves}


def _leaf_digest(source: Source, path: str) -> str:
    leaf = source.leaves[path]
    return _digest([leaf.shape, leaf.dtype, source.digest_of(path)])


def _digest(value: Mapping[str, Any] | Any) -> str:
    return digest_text(json.dumps(value, sort_keys=True).encode())
