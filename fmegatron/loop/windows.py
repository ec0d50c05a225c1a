"""Windows on a run: a profiler trace, or a snapshot of memory, of some steps of some rank, by flag or by a file.

    --run.log.profile='trace:steps=10-12,rank=0; memory:steps=20-21'    # loop.Log(profile="...")
    echo "trace:next=3,rank=2" > runs/a/profile     # while it runs: the three steps behind the next log point

Files are written into `profiles/` of the run, and an event names them. Nothing is agreed between ranks: a rank that is
observed is slower, and the others wait for it where they would anyway.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fmegatron.files import disk
from fmegatron.loop.onlookers import Onlooker
from fmegatron.loop.torch_private import record_memory, write_memory

KINDS = ("trace", "memory")
FILE = "profile"
_WAIT = "_c10d_functional::wait_tensor"


@dataclass(frozen=True)
class Window:
    """Updates `first` to `last`, on one rank. what: "trace", or "memory"."""

    first: int
    last: int
    rank: int = 0
    what: str = "trace"

    def __post_init__(self):
        if not (1 <= self.first <= self.last and self.rank >= 0 and self.what in KINDS):
            raise ValueError(
                f"Window: got {self.what!r:.40}, steps {self.first} to {self.last} of rank {self.rank}, wanted one of "
                f"{', '.join(KINDS)}, steps a-b with 1 <= a <= b, and a rank of 0 or more"
            )

    def __str__(self) -> str:
        """As `windows` reads it."""
        return f"{self.what}:steps={self.first}-{self.last},rank={self.rank}"

    def name(self) -> str:
        """Of its file, without an ending."""
        return f"{self.what}_steps_{self.first:08d}-{self.last:08d}_rank_{self.rank}"


def windows(text: str, step: int = 0) -> tuple[Window, ...]:
    """The windows that a text names; `next=N` are the N updates behind `step`. ValueError for what is none.

    >>> windows("trace:steps=10-12; memory:next=2,rank=3", step=100)
    (Window(first=10, last=12, rank=0, what='trace'), Window(first=101, last=102, rank=3, what='memory'))
    """
    found = []
    for part in filter(None, (part.strip() for part in re.split(r"[;\n]", text))):
        what, _, rest = part.partition(":")
        given: dict[str, str] = {}
        for item in filter(None, rest.split(",")):
            name, _, value = item.strip().partition("=")
            given[name] = value
        steps, behind, rank = given.pop("steps", None), given.pop("next", None), given.pop("rank", "0")
        match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", steps or "")
        if behind is not None and steps is None and re.fullmatch(r"[1-9]\d{0,8}", behind):
            first, last = step + 1, step + int(behind)
        elif match and behind is None:
            first, last = int(match[1]), int(match[2] or match[1])
        else:
            first, last = 0, 0
        if given or not first or not re.fullmatch(r"\d{1,9}", rank) or what.strip() not in KINDS:
            raise ValueError(
                f"profile: got {part!r:.80}, wanted KIND:steps=A-B,rank=R or KIND:next=N,rank=R with KIND one of "
                f"{', '.join(KINDS)}; such as trace:steps=10-12,rank=0"
            )
        found.append(Window(first, last, int(rank), what.strip()))
    return tuple(found)


class Windows:
    """The windows of one rank, while it runs. A context manager: one that is open at the end of the run is written.

    directory: of the run. note: is called with (event, step, path=...) for each file. exposed: with the seconds per
    step in which this rank's computation waited for communication, of each trace that has any.
    """

    def __init__(
        self,
        directory: Path,
        wanted: Sequence[Window] = (),
        rank: int = 0,
        device: torch.device | None = None,
        note: Callable[..., Any] = lambda *args, **values: None,
        exposed: Callable[[float], Any] = lambda seconds: None,
    ):
        self.directory, self.rank, self.device = Path(directory), rank, device or torch.device("cpu")
        self.wanted = [window for window in wanted if window.rank == rank]
        self._note, self._exposed = note, exposed
        self._onlooker = Onlooker("the window of a profiler")
        self._open: Window | None = None
        self._profile: torch.profiler.profile | None = None
        self._number, self._seen = 0, self._state()

    def around(self, step: Callable, start: int) -> Callable:
        """The same step, observed where a window is open; start: updates that were made before."""
        self._number = start

        def observed(state: Any, batch: Any) -> Any:
            self._number += 1
            if self._open is None and self.wanted:
                self._onlooker(self._begin)
            out = step(state, batch)
            if self._open is not None and self._number >= self._open.last:
                self._onlooker(self._end)
            return out

        return observed

    def look(self) -> None:
        """At a log point: read the file `profile` of the run, if it is another than before. One `stat` otherwise."""
        now = self._state()
        if now == self._seen or now is None:
            self._seen = now
            return
        self._seen = now
        try:
            asked = windows(disk.text_of(self.directory / FILE), self._number)
        except (ValueError, OSError) as error:
            warnings.warn(f"{self.directory / FILE}: {error}; nothing is observed", RuntimeWarning, stacklevel=2)
            return
        own = [window for window in asked if window.rank == self.rank]
        for window in own:
            if window.last <= self._number:
                text = f"{self.directory / FILE}: {window.name()}: step {self._number} is over; nothing is observed"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        self.wanted += [window for window in own if window.last > self._number]

    def _state(self) -> tuple[int, int] | None:
        try:
            found = (self.directory / FILE).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _begin(self) -> None:
        self.wanted = [window for window in self.wanted if window.last >= self._number]
        window = next((window for window in self.wanted if window.first <= self._number), None)
        if window is None:
            return
        self.wanted.remove(window)
        self._open = Window(self._number, window.last, window.rank, window.what)  # from where it does begin
        cuda = self.device.type == "cuda"
        if window.what == "memory" and cuda:
            record_memory(True)
            return
        activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
        memory = window.what == "memory"
        self._profile = torch.profiler.profile(
            activities=activities, profile_memory=memory, record_shapes=memory, with_stack=memory
        )
        self._profile.start()

    def _end(self) -> None:
        window, profile, self._open, self._profile = self._open, self._profile, None, None
        assert window is not None, "a window is open"
        folder = self.directory / "profiles"
        folder.mkdir(parents=True, exist_ok=True)
        window = Window(window.first, max(window.first, min(window.last, self._number)), window.rank, window.what)
        if profile is None:
            path = folder / f"{window.name()}.pickle"
            write_memory(path)
            record_memory(False)
        else:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # kernels that the window has launched are in it
            profile.stop()
            path = folder / f"{window.name()}.json.gz"
            profile.export_chrome_trace(str(path))
            waited = exposed(profile.events()) if window.what == "trace" else None
            if waited is not None:
                self._exposed(waited / (window.last - window.first + 1))
        self._note("profile", self._number, path=str(path.relative_to(self.directory)), rank=window.rank)

    def __enter__(self) -> "Windows":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._open is not None:
            self._onlooker(self._end)  # the run's own error is what counts


def exposed(events: Any) -> float | None:
    """Seconds in which computation waited for communication, of a profiler's events; None without communication.

    On CUDA, communication is the kernels of NCCL, and exposed what no other kernel covers; on a CPU, what the host
    waits in `wait_tensor`.
    """
    events = list(events or ())
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    if on_device:
        spans = [(e.time_range.start, e.time_range.end, "nccl" in e.name) for e in on_device]
        if not any(communicates for _, _, communicates in spans):
            return None
        return 1e-6 * sum(end - start for start, end in _uncovered(spans))
    waits = [e.time_range.elapsed_us() for e in events if e.name == _WAIT]
    return 1e-6 * sum(waits) if waits else None


def _uncovered(spans: Sequence[tuple[float, float, bool]]) -> Iterator[tuple[float, float]]:
    """The parts of the spans that are marked which no span without a mark covers.

    >>> list(_uncovered([(0, 4, True), (1, 2, False), (3, 9, False), (8, 12, True)]))
    [(0, 1), (2, 3), (9, 12)]
    """
    edges = sorted((at, kind, marked) for start, end, marked in spans for at, kind in ((start, 1), (end, -1)))
    counts, since = {True: 0, False: 0}, 0.0
    for at, kind, marked in edges:
        if counts[True] and not counts[False] and at > since:
            yield since, at
        counts[marked] += kind
        since = at
