"""Claims: exclusive use of a directory by one process at a time, across nodes; a second process is refused.

    .WHAT.claim-TOKEN   this process has the directory (held: true), or is about to take it

Who wants the directory leaves a note of its own and then looks: if it sees that of another that lives, it takes its own
back. So of two that come at once at most one stays, and neither needs more of the storage than that a file which was
written is seen by the next listing: local and network file systems and object stores do. A note of a process that is
gone is void at once on the same machine; one of another machine when it was not renewed while it was watched for
`stale_s` seconds, by the watcher's own clock. Clocks of different nodes are never compared.
"""

from __future__ import annotations

import contextlib
import numbers
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator

from fmegatron.checkpoint.calls.arguments import ranks_of
from fmegatron.checkpoint.calls.ranks import Ranks, together
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.keyvalue import KeyNotes
from fmegatron.checkpoint.files.leases import Holder, Lease, Watch, alive, new_token
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.files.trees import make_directories
from fmegatron.collectives import interrupt
from fmegatron.files import owners

STALE_S = 120.0
BEAT_S = 10.0  # the holder renews its note
_LOOK_S = 0.5
_CONTEND_S = 30.0  # for others that come at the same moment to settle it


class ClaimedError(ValueError):
    """Another process has the directory; the message names it."""


class Claim:
    """A directory that this process has, until the block of `claim` ends."""

    def __init__(self, lease: Lease | None, text: str, what: str):
        self._lease, self._text, self._what = lease, text, what

    @property
    def lost(self) -> bool:
        """Whether another process has taken the directory over: this one was stopped, or cut off from it, for long."""
        return self._lease is not None and self._lease.lost

    def check(self) -> None:
        """Raise ClaimedError if it was lost. Costs nothing; the ranks other than 0 have nothing to check."""
        if self.lost:
            raise ClaimedError(
                f"{self._text}: got another {self._what} there, which took over when this one gave no sign of life; end"
                " one of the two"
            )


@contextlib.contextmanager
def claim(
    directory: str | os.PathLike | Store, what: str = "run", world: Ranks | None = None, *, stale_s: float = STALE_S
) -> Iterator[Claim]:
    """Within this block no other process can claim the directory for `what`, on any node that shares it.

    directory: a path (made if it is missing), URL or Store.  what: a word for the purpose; claims for different
    purposes do not know of each other.  world: the ranks that call this together; rank 0 holds the claim for all.

    A claim whose process is gone is taken over: at once on the same machine; after `stale_s` seconds without a renewal
    if it ran on another one, which a warning reports. A thread renews the own claim every 10 s.

    Raises ClaimedError (a ValueError; RuntimeError on the other ranks) when another process has it, OSError as
    RuntimeError when the directory cannot be written. Nothing else is written then.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, claim(folder) as mine:
    ...     mine.lost
    False
    """
    ranks, lease = ranks_of(world), None

    def work() -> str:
        nonlocal lease
        store = open_store(directory)
        if not isinstance(what, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", what):
            raise ValueError(f"claim: got what={what!r:.60}, wanted a short word of a-z, 0-9 and _, e.g. 'run'")
        if isinstance(stale_s, bool) or not isinstance(stale_s, numbers.Real) or not stale_s >= 3 * BEAT_S:
            least = f"{3 * BEAT_S:g} seconds or more, as a claim is renewed every {BEAT_S:g} s"
            raise ValueError(f"claim: got stale_s={stale_s!r:.60}, wanted {least}")
        if ranks.rank == 0:
            lease = _take(store, what, stale_s)
        return store.text

    try:
        text = together(ranks, f"claiming {getattr(directory, 'text', directory)} for a {what}", work)
        yield Claim(lease, text, what)
    finally:
        if lease is not None:
            lease.release()


def _take(store: Store, what: str, stale_s: float) -> Lease:
    """The claim of this process. Raises ClaimedError, OSError."""
    notes, watch, doubted, end = store.notes(), Watch(most_s=2.5 * BEAT_S), {}, None
    if isinstance(notes, Notes):
        make_directories(notes.at)
    mine = f".{what}.claim-{new_token()}"

    def claims() -> list[str]:
        return [name for name in notes.names() if re.fullmatch(rf"\.{what}\.claim-[0-9a-f]{{12}}", name)]

    def others() -> dict[str, Holder]:
        """Those that have, or are about to take, the directory, by their notes."""
        found = {name: alive(notes, name, watch, stale_s) for name in claims() if name != mine}
        return {name: holder for name, holder in found.items() if holder is not None}

    while True:
        found = others() or _settle(notes, mine, others)
        if isinstance(found, Lease):
            break
        for name, holder in found.items():
            if holder.sure and holder.held:
                raise ClaimedError(_refusal(store, what, holder))
            if not holder.sure and name not in doubted:
                doubted[name] = holder
                _warn(store, f"looking for {stale_s:g} s whether the {what} of {holder} lives")
        if all(holder.sure for holder in found.values()):  # they came at the same moment
            end = end or time.monotonic() + _CONTEND_S
            if time.monotonic() > end:
                raise ClaimedError(_refusal(store, what, next(iter(found.values()))))
        time.sleep(random.uniform(0.2, 1.0) * min(_LOOK_S, stale_s / 8))
    try:
        for name in set(claims()) - {mine}:  # all void
            if name in doubted:
                _warn(store, f"took over from {doubted[name]}, which has given no sign of life for {stale_s:g} s")
            notes.remove(name)
    except BaseException:  # a Ctrl-C, a warning that is an error
        found.release()
        raise
    return found


def _settle(notes: Notes | KeyNotes, mine: str, others: Callable[[], dict[str, Holder]]) -> Lease | dict[str, Holder]:
    """Leave the note and look: the claim, or, with the note taken back, who else is there."""
    lease, taken = None, False
    try:
        with interrupt.held_interrupt():
            lease = Lease(notes, mine, BEAT_S, exclusive=True, held=False)
        if found := others():
            return found
        lease.change(held=True)
        # Once more: this process may have been stopped until here for so long that others took it for dead.
        found = others()
        taken = not found
        return found or lease
    finally:
        if lease is not None and not taken:
            lease.release()


def _refusal(store: Store, what: str, holder: Holder) -> str:
    own = " (this process)" if holder.owner == owners.owner() else ""
    return (
        f"{store.text}: got a {what} there by {holder}{own}, wanted none; wait until it ends, end it, or choose"
        " another directory"
    )


def _warn(store: Store, text: str) -> None:
    warnings.warn(f"{store.text}: {text}", RuntimeWarning, stacklevel=7)
