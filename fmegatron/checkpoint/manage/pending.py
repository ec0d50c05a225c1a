"""The asynchronous saves of a Manager: pending, completed, failed.

All ranks hold the same pending saves, because a save ends on all of them in the same exchange.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from fmegatron.checkpoint.background.async_save import AsyncSaver, check_saver
from fmegatron.checkpoint.background.handle import Handle
from fmegatron.checkpoint.calls.ranks import Ranks, together
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.manage.report import Report


class Background:
    """Pending saves, oldest first, each with the Report of its beginning.

    saver: the user's, who closes it; None: one is made at the first save, and closed by `close`.
    on_failure: "warn": a save that fails is warned about (rank 0), and training goes on; "raise": RuntimeError.
    """

    def __init__(self, world: Ranks, saver: AsyncSaver | None, on_failure: str):
        if on_failure not in ("warn", "raise"):
            raise ValueError(f"Manager: got on_failure={on_failure!r}, wanted 'warn' or 'raise'")
        check_saver(saver)
        self.world, self.on_failure = world, on_failure
        self.pending: list[tuple[Handle, Report]] = []
        self._saver, self._owns = saver, saver is None

    def begin(
        self,
        place: Store,
        state: Any,
        layouts: Any,
        metadata: dict[str, Any] | None,
        finite: bool | None,
        begun: Report,
    ) -> Report:
        """Stage the state; returns `begun` with the time that it took, or with the error by which it could not begin.

        A wrong request is a ValueError for any `on_failure`; on the ranks that made none, RuntimeError.
        """
        began = time.perf_counter()
        if self._saver is None:
            self._saver = together(self.world, "starting the process that writes checkpoints", AsyncSaver)
        count = len(self.pending)

        def note(handle: Handle) -> None:
            self.pending.append((handle, begun))

        try:
            self._saver.save(place, state, layouts, self.world, metadata, step=begun.step, finite=finite, begun=note)
        except BaseException as error:
            if len(self.pending) > count:  # Ctrl-C while this rank staged it: the others hear of it in `poll`
                raise
            # It is raised on all ranks; Ctrl-C on one is RuntimeError on the others.
            wrong = isinstance(error, ValueError) or not isinstance(error, Exception)
            right = self.world.minimum(torch.tensor([int(not wrong)]))
            if not right or self.on_failure == "raise":
                raise
            self._warn(begun.step, f"{error}")
            return replace(begun, error=f"{error}")
        stall = time.perf_counter() - began
        return replace(begun, seconds=stall, stall_seconds=stall)

    def poll(self) -> list[Report]:
        """Reports of the saves that have ended; all ranks, and collective only while a save is pending."""
        if self.pending and self._saver is not None:
            try:
                self._saver.poll()
            except RuntimeError as error:
                if not any(handle.failure == str(error) for handle, _ in self.pending):
                    raise  # of another save of the user's saver
        return self._ended()

    def finish(self, bar: Callable[..., AbstractContextManager], only: str | None = None) -> list[Report]:
        """Wait until all have ended (or the one at the path `only`); the reports of all that have. All ranks.

        bar: `progress` with all but what, how much, and how far.
        """
        for handle, begun in self.pending:
            if only in (None, begun.path) and not handle.done:
                with bar(f"saving step {begun.step}", handle.bytes, lambda handle=handle: handle.progress[0]):
                    try:
                        handle.result()
                    except RuntimeError:
                        if not handle.done:
                            raise  # another rank was interrupted
        return self._ended()

    def close(self) -> None:
        """Give up what `finish` did not finish (that needs no other rank); end the process, unless it is the user's."""
        waits = not self.pending
        self.pending = []
        if self._saver is not None and self._owns:
            saver, self._saver = self._saver, None
            saver.close(waits)

    def _ended(self) -> list[Report]:
        ended = [(handle, begun) for handle, begun in self.pending if handle.done]
        self.pending = [(handle, begun) for handle, begun in self.pending if not handle.done]
        reports = []
        for handle, begun in ended:
            try:
                handle.result()  # has ended: raises its error, or marks it as reported; no communication
                reports.append(replace(begun, seconds=handle.durable_s, stall_seconds=handle.staged_s, durable=True))
            except RuntimeError as error:
                reports.append(replace(begun, seconds=time.perf_counter() - handle.began, error=f"{error}"))
                if self.on_failure == "warn":
                    self._warn(begun.step, f"{error}")
        return reports

    def _warn(self, step: int, error: str) -> None:
        if self.world.rank == 0:
            text = f"the save of step {step} failed; training goes on, and the next save tries again: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=5)
