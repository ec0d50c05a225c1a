"""What saving and restoring need to know of the other ranks: very little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Ranks(Protocol):
    """What saving and restoring need of a `World`: who am I, and do all agree that it went well."""

    rank: int
    size: int

    def agree(self, error: str | None, what: str) -> None:
        """Wait for all ranks; RuntimeError on all with the first failing rank's message if one passed an error."""


class Alone:
    """The world of a single process."""

    rank, size = 0, 1

    def agree(self, error: str | None, what: str) -> None:
        """Raise RuntimeError if there is an error."""
        if error is not None:
            raise RuntimeError(f"{what} failed: {error}")


def together(world: Ranks, what: str, work: Callable[[], Any]) -> Any:
    """Run `work()` on all ranks; if it raises on one, raise on all. A rank's own ValueError or Ctrl-C stays."""
    error = result = None
    try:
        result = work()
    except BaseException as e:  # a rank that is interrupted must tell the others, too
        error = e
    try:
        world.agree(None if error is None else f"{type(error).__name__}: {error}", what)
    except RuntimeError as raised:
        if isinstance(error, ValueError) or (error is not None and not isinstance(error, Exception)):
            raise error from None
        raise raised from error
    return result


def announce(world: Ranks, text: str | None) -> str:
    """Rank 0's text, on all ranks, by the one means there is: the message of an agreement. Raises RuntimeError."""
    if world.size == 1:
        return text or ""
    mark = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}fmegatron\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"
    try:
        world.agree(f"{mark}{text}{mark}" if world.rank == 0 else None, "passing on a text")
    except RuntimeError as message:
        _, *found = str(message).split(mark)
        if len(found) == 2:
            return found[0]
        raise
    raise RuntimeError("passing on a text: the world's agree() lost the message of rank 0")
