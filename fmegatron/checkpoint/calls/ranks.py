"""The interface to the other ranks that saving and restoring need: agreement, broadcast, gather, exchange."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Ranks(Protocol):
    """What saving and restoring need of a `World`: who am I, do all agree that it went well, and bytes from peers."""

    rank: int
    size: int
    device: torch.device

    def agree(self, error: str | None, what: str) -> None:
        """Wait for all ranks; RuntimeError on all with the first failing rank's message if one passed an error."""

    def broadcast_text(self, text: str, source: int = 0) -> str:
        """The text of rank `source`, on all ranks."""
        ...

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """int64 [n] of every rank -> int64 [size, n] on all ranks."""
        ...

    def minimum(self, row: torch.Tensor) -> torch.Tensor:
        """int64 [n] of every rank -> int64 [n], the smallest of each, on all ranks."""
        ...

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send and fill CPU tensors, as `World.exchange`."""


@contextmanager
def jointly(world: Ranks, what: str) -> Iterator[None]:
    """A block that all ranks run; if it raises on one, it raises on all. A rank's own ValueError or Ctrl-C stays."""
    error = None
    try:
        yield
    except BaseException as e:  # a rank that is interrupted must report it to the others, too
        error = e
    _agree(world, what, error)


def together(world: Ranks, what: str, work: Callable[[], Any]) -> Any:
    """The result of `work()`, run `jointly`."""
    with jointly(world, what):
        return work()


def compared(
    world: Ranks, what: str, work: Callable[[], Any], facts: Callable[[Any], Sequence[int]], count: int
) -> tuple[Any, list[bool]]:
    """`together`, and for each of the `count` numbers in `facts(result)` whether it is the same on all ranks.

    facts: numbers of at most 63 bits.  Costs what `together` costs: one small all-reduce.
    """
    error = result = None
    numbers = [0] * count
    try:
        result = work()
        numbers = list(facts(result))
    except BaseException as e:
        error = e
    # The smallest of each number, and of its negative: the same on all ranks when the first is the second's negative.
    row = [world.size if error is None else world.rank, *numbers, *(-n for n in numbers)]
    least = world.minimum(torch.tensor(row)).tolist()
    if least[0] < world.size:
        _agree(world, what, error)
    return result, [a == -b for a, b in zip(least[1 : count + 1], least[count + 1 :], strict=True)]


def _agree(world: Ranks, what: str, error: BaseException | None) -> None:
    """Wait for all ranks; if one has an error, raise on all."""
    try:
        world.agree(None if error is None else f"{type(error).__name__}: {error}", what)
    except RuntimeError as raised:
        if isinstance(error, ValueError) or (error is not None and not isinstance(error, Exception)):
            raise error from None
        raise raised from error


def close_on_exit(kind: type[BaseException] | None, close: Callable[..., None], world: Ranks) -> None:
    """`close()` at the end of a `with` block that ended by `kind`, None for no error.

    After an error other ranks may never come: `close(wait=...)` then waits only where this rank is alone, and never
    after Ctrl-C; what goes wrong then is a warning, as the first error is the one to see.
    """
    if kind is None:
        close()
        return
    try:
        close(wait=issubclass(kind, Exception) and world.size == 1)
    except Exception as late:
        warnings.warn(f"after another error: {late}", RuntimeWarning, stacklevel=3)
