"""Pulse: which section of a run a rank is in, since when, and how long it may be; setting it costs an assignment."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from torch.distributed import Store


@dataclass(frozen=True)
class Patience:
    """Seconds that a rank may spend in one section of a run before it counts as hanging.

    The limit of a section is the larger of its number here and `factor` times the longest that this rank has spent in
    it so far. setup: until the first update begins (data, restore, first evaluation). compile: the first update of a
    process. step: any other update, with its batch and metrics. caller: code in the body of the loop. restart: ranks
    that meet again after a fault (`Restart`). end: closing what is open.
    """

    setup: float = 1800.0
    compile: float = 3600.0
    step: float = 300.0
    save: float = 900.0
    evaluation: float = 900.0
    caller: float = 1800.0
    restart: float = 300.0
    end: float = 900.0
    factor: float = 5.0

    @staticmethod
    def parse(text: str) -> Patience:
        """The limits of a text; the others are the default.

        >>> Patience.parse("step=60,save=1200").save
        1200.0

        Raises ValueError, naming the part.
        """
        given = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            try:
                given[name] = float(value)
            except ValueError:
                given[name] = value
            if name not in _NAMES or isinstance(given[name], str):
                wanted = ", ".join(_NAMES)
                raise ValueError(f"patience: got {part!r:.60}, wanted SECTION=SECONDS of {wanted}; or off") from None
        return Patience(**given)

    @staticmethod
    def sections(text: str) -> tuple[str, ...]:
        """The names that a text gives a limit."""
        parts = () if text == "off" else text.replace(" ", "").split(",")
        return tuple(part.partition("=")[0] for part in parts if part)

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"Patience: {item.name}: got {value!r:.60}, wanted a number above 0")


_NAMES = tuple(item.name for item in fields(Patience))
SECTIONS = tuple(name for name in _NAMES if name != "factor")


@dataclass(frozen=True)
class Now:
    """What a rank does. count: sections that it has entered. since: of time.monotonic(). limit: seconds."""

    count: int
    section: str
    step: int
    since: float
    limit: float

    @property
    def seconds(self) -> float:
        """In the section so far."""
        return time.monotonic() - self.since


class Pulse:
    """What this rank does now. Made by `watched`, whose thread reads it.

    patience: None for no limits. slowest: seconds, by section. attempt: how often the ranks have met again.
    """

    def __init__(self, patience: Patience | None = None, rank: int = 0):
        self.patience, self.rank, self.slowest = patience, rank, dict.fromkeys(SECTIONS, 0.0)
        self.attempt, self.board, self._opened = 0, None, threading.Event()
        self.on_fault: Callable[[int], None] | None = None  # is given the attempt that has failed
        self.now = Now(0, "setup", 0, time.monotonic(), math.inf if patience is None else patience.setup)

    def enter(self, section: str, step: int | None = None) -> None:
        """The rank enters a section (step: of this update; None: of the same as before); the one before is over."""
        old, now, limit = self.now, time.monotonic(), math.inf
        self.slowest[old.section] = max(self.slowest[old.section], now - old.since)
        if self.patience is not None:
            limit = max(getattr(self.patience, section), self.patience.factor * self.slowest[section])
        self.now = Now(old.count + 1, section, old.step if step is None else step, now, limit)

    # ---- faults after which the ranks go on (`Restart`)
    def opened(self, board: Store) -> None:
        """The ranks have met: reports are possible now."""
        self.board = board
        self._opened.set()

    def report(self, text: str, seconds: float = 10.0) -> bool:
        """Let the threads of the other ranks know that this one has failed; False where they cannot be reached."""
        if not self._opened.wait(seconds) or self.board is None:
            return False
        try:
            self.board.compare_set(f"fault/{self.attempt}", "", f"rank {self.rank}: {text}")
        except (RuntimeError, OSError):  # the store is gone
            return False
        return True

    def fault(self, attempt: int | None = None) -> str | None:
        """What a rank has reported in an attempt (default: since the last meeting); None: nothing. For the thread."""
        attempt = self.attempt if attempt is None else attempt
        if self.board is not None and self.board.check([key := f"fault/{attempt}"]):
            return self.board.get(key).decode()
        return None
