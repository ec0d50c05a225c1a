"""What the commit protocol needs of a directory or an object store; `move` is where the two differ."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from fmegatron.checkpoint.files.keyvalue import KeyNotes
from fmegatron.checkpoint.files.leases import Lease, Watch
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.storage import Storage

FILE_BYTES = 4096  # of a pointer, all
Files = TypeVar("Files", bound=Storage)


class Slots(ABC, Generic[Files]):
    """A place NAME, the small files directly in it, and the files below its tokens."""

    @property
    @abstractmethod
    def text(self) -> str:
        """Path or URL."""

    @abstractmethod
    def content(self, name: str) -> bytes | None:
        """The first 4096 bytes of a file; None: it is missing; b"": it is none that can be read. Raises OSError."""

    @abstractmethod
    def is_there(self, name: str) -> bool:
        """Whether a file has this name. Raises OSError if that cannot be seen."""

    @abstractmethod
    def inside(self, start: str = "") -> list[str]:
        """Names of files and directories (no links) directly in NAME that begin so. Raises OSError."""

    @abstractmethod
    def make(self, token: str) -> None:
        """Make an empty draft, then room for the files of a token: what has no draft is no save that has begun."""

    @abstractmethod
    def fill(self, name: str, data: bytes) -> None:
        """Write a draft, durably. Raises FileNotFoundError if it is not there any more."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file, or replace it, durably."""

    @abstractmethod
    def move(self, name: str, to: str) -> None:
        """Give a small file another name, in the place of a file of that name. Raises FileNotFoundError, OSError."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Remove a small file, if it is there."""

    @abstractmethod
    def delete(self, name: str, stop: threading.Event | None) -> None:
        """Remove a file, or a directory with all that is in it, its marker first, until `stop`."""

    @abstractmethod
    def durable(self, below: str = "") -> None:
        """The names in NAME, or in a directory below it, survive a power cut when this returns. ("..": that above.)"""

    @abstractmethod
    def files(
        self, token: str, lease: Lease | None = None, stated: dict[str, Any] | None = None, hold: bool = False
    ) -> Files:
        """The files of a token, "": those in NAME itself. hold: they are read, all of one save."""

    @abstractmethod
    def published(self, token: str) -> None:
        """This token is the checkpoint now: leave what leads people to its files, or states when that was."""

    @abstractmethod
    def saved_at(self) -> float | None:
        """When the checkpoint that is here was saved, seconds since 1970, by one clock for all in a directory."""

    @abstractmethod
    def is_link(self) -> bool:
        """Whether NAME leads to another place."""

    @abstractmethod
    def unlink(self) -> None:
        """Remove a NAME that leads to another place."""

    @abstractmethod
    def tidy(self) -> None:
        """Remove what makes the place be there, if nothing is in it."""

    @abstractmethod
    def prepare(self) -> None:
        """Make what is above NAME. Raises ValueError for a place that no checkpoint can be put at, OSError."""

    @abstractmethod
    def clean_old(self, watch: Watch) -> None:
        """Remove what dead saves of NAME have left that were made before version 4."""

    @abstractmethod
    def children(self) -> list[str]:
        """Names in this directory where a checkpoint may be."""

    @abstractmethod
    def notes(self) -> Notes | KeyNotes:
        """Small files beside the checkpoints of this directory."""

    @property
    @abstractmethod
    def saver_notes(self) -> Notes | KeyNotes:
        """Where those who save here leave theirs."""

    @abstractmethod
    def limits(self) -> tuple[int, int]:
        """Most bytes of a part of the name of a file of a checkpoint that is saved here, and of all of it."""

    @abstractmethod
    def bytes_begun(self) -> int | None:
        """Bytes of the files of saves that are under way; None where that cannot be seen."""

    @abstractmethod
    def how_to_move(self, to: str) -> str:
        """What a person does to give the checkpoint another name."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """JSON from which `store_from_json` makes the same in another process."""
