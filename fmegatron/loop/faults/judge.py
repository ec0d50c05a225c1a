"""Which rank reads the words of all others when ranks are late: one of them, which reports what it sees.

If each late rank read them, the bytes of a hang would grow with the square of the ranks: 63 GB for 16,384. So a late
rank asks for the office with one compare_set; whoever holds it notes its beat there, and one whose beat has not changed
for some pauses is followed by another. What a late rank reads beside is as long as one message.
"""

import json
import time
from typing import NamedTuple

from torch.distributed import Store

_SILENT_PAUSES = 6  # after which a judge that gives no sign is followed by another
_JUDGE, _VIEW = "judge", "view"


class View(NamedTuple):
    """What the judge has seen. number: of its look. least: the fewest sections that a rank has entered. some: whether
    others have entered more. who: where the ranks are, in words."""

    number: int
    least: int
    some: bool
    who: str

    def hangs(self, count: int) -> bool:
        """Whether a rank that is late, and has entered so many sections, hangs: it is behind, or none is."""
        return count <= self.least or not self.some


class Judge:
    """The office of judge, as one rank sees it. pause: seconds between its looks."""

    def __init__(self, rank: int, pause: float):
        self.rank, self.pause = rank, pause
        self._seen: tuple[str, float] | None = None  # what the judge has noted, and when this rank saw it first
        self._noted = ""  # by this rank, while it judges
        self._first: tuple[int, int | None] = (-1, None)  # sections of this rank, and the number of the view then

    def is_own(self, board: Store | None, beats: int) -> bool:
        """Whether this rank judges now: it has been the first that asked, or follows one that gives no sign."""
        if board is None:
            return True
        own = f"{self.rank} {beats}"
        if self._noted:
            held, self._noted = board.compare_set(_JUDGE, self._noted, own).decode(), ""
        else:
            held = board.compare_set(_JUDGE, "", own).decode()
        if held == own:
            self._noted = own
            return True
        now = time.monotonic()
        if self._seen is None or self._seen[0] != held:
            self._seen = held, now
        if now - self._seen[1] <= _SILENT_PAUSES * self.pause:
            return False
        self._seen = None
        self._noted = own if board.compare_set(_JUDGE, held, own).decode() == own else ""
        return bool(self._noted)

    def leave(self, board: Store | None) -> None:
        """This rank is not late any more: another may judge at once."""
        if self._noted and board is not None:
            board.compare_set(_JUDGE, self._noted, "")
        self._noted, self._seen = "", None

    def tell(self, board: Store | None, view: View) -> None:
        """Let the others know."""
        if board is not None:
            board.set(_VIEW, json.dumps(view))

    def told(self, board: Store | None, count: int) -> View | None:
        """What the judge has reported since this rank is in its section (`count`); None: nothing yet."""
        view = None
        if board is not None and board.check([_VIEW]):
            view = View(*json.loads(board.get(_VIEW)))
        number = None if view is None else view.number
        if self._first[0] != count:  # what stands there may be of a section that all have left
            self._first = count, number
        return None if number == self._first[1] else view
