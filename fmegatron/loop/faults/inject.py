"""Faults on request: `--run.faults.inject=kill:rank=2,step=17` lets rank 2 be killed when it begins update 17 of a run.

For whoever wants to see what a run does when it happens: several faults are joined by "+", each happens once in a run.

    loop.Faults(inject="kill:rank=1,step=17+diskfull:rank=0,step=30,at=save,seconds=5")
"""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fmegatron import tree
from fmegatron.files import disk
from fmegatron.tree import structure

# What happens to a rank, and for how many seconds unless it is given (None: it has no duration).
KINDS = MappingProxyType(
    {
        "exception": (None, "ValueError"),
        "exit": (None, "SystemExit with status 3"),
        "kill": (None, "SIGKILL"),
        "stop": (float("inf"), "SIGSTOP, and SIGCONT after so many seconds"),
        "hang": (float("inf"), "a sleep"),
        "slow": (0.1, "so many seconds of work more in this update and in every later one"),
        "nan": (None, "NaN in the first element of the first array of the state"),
        "bitflip": (None, "one bit of that element is flipped"),
        "oom": (None, "an allocation that no memory is large enough for"),
        "diskfull": (float("inf"), "for so many seconds, no file can be written by this process and its writer"),
    }
)
PLACES = ("setup", "step", "save", "flight", "evaluation")


@dataclass(frozen=True)
class Injection:
    """One fault. kind: of `KINDS`. rank: None for all. step: the update at whose beginning it happens.

    at: "step", or the place where it happens in or behind this update: "save", "flight" (when an asynchronous save has
    begun) or "evaluation"; "setup": before the first update, whatever the step. seconds: of what has a duration.
    """

    kind: str
    rank: int | None = None
    step: int = 1
    at: str = "step"
    seconds: float | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            near = structure.did_you_mean(self.kind, list(KINDS))
            raise ValueError(f"inject: got {self.kind!r}, wanted one of {', '.join(KINDS)}{near}")
        if self.kind == "diskfull" and sys.platform != "linux":
            raise ValueError(
                f"inject: diskfull: got the system {sys.platform!r}, wanted 'linux', where the files of the writer can "
                "be limited; leave it out here"
            )
        if self.at not in PLACES:
            raise ValueError(f"inject: {self.kind}: at: got {self.at!r}, wanted one of {', '.join(PLACES)}")
        if self.step < 1 and self.at != "setup":
            raise ValueError(f"inject: {self.kind}: step: got {self.step}, wanted at least 1, the first update")
        if self.rank is not None and self.rank < 0:
            raise ValueError(f"inject: {self.kind}: rank: got {self.rank}, wanted at least 0, or all")
        if self.seconds is not None and not self.seconds >= 0:
            raise ValueError(f"inject: {self.kind}: seconds: got {self.seconds}, wanted a number of at least 0")
        if self.seconds is None:
            object.__setattr__(self, "seconds", KINDS[self.kind][0])
        elif KINDS[self.kind][0] is None:
            raise ValueError(
                f"inject: {self.kind}: seconds: got {self.seconds}, wanted none: it has no duration; leave it out"
            )

    def __str__(self) -> str:
        """As `parse` reads it."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kind"}
        given = [f"{name}={value}" for name, value in parts.items() if value is not None and value != float("inf")]
        return f"{self.kind}:{','.join(given)}"

    @staticmethod
    def parse(text: str) -> "tuple[Injection, ...]":
        """The faults of a text such as "kill:rank=2,step=17+nan:step=20"; none of an empty one.

        >>> Injection.parse("kill:rank=2,step=17+nan:step=20")[0]
        Injection(kind='kill', rank=2, step=17, at='step', seconds=None)

        Raises ValueError, naming the part.
        """
        return tuple(_one(part) for part in text.split("+") if part.strip())


_READ: MappingProxyType[str, Callable[[str], Any]] = MappingProxyType(
    {"rank": int, "step": int, "at": str, "seconds": float}
)


def _one(text: str) -> Injection:
    kind, _, rest = text.strip().partition(":")
    found = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.strip().partition("=")
        if name in found:
            raise ValueError(f"inject: {text}: got {name} twice, wanted it once; join several faults by '+'")
        try:
            found[name] = None if (name, value) == ("rank", "all") else _READ[name](value)
        except (KeyError, ValueError):
            raise ValueError(
                f"inject: {text}: got {part!r}, wanted rank=, step=, seconds= with a number, or at= with one of "
                f"{', '.join(PLACES)}; such as kill:rank=2,step=17"
            ) from None
    return Injection(kind, **found)


class Injector:
    """The faults of one rank, called where they may happen: `injector("step", number, state)`.

    Each happens once: a file in `folder` states that it has, for the process that is started again; without a folder,
    once in a process.
    """

    def __init__(self, faults: "str | tuple[Injection, ...]" = (), rank: int = 0, folder: Path | None = None):
        faults = Injection.parse(faults) if isinstance(faults, str) else tuple(faults)
        self.rank, self.folder = rank, folder
        self.faults = [fault for fault in faults if fault.rank in (None, rank)]
        self._slow = 0.0

    def __call__(self, at: str, step: int, state: structure.Tree = None) -> None:
        """Bring about what is due at this place of this update. state: what it may be done to."""
        for fault in list(self.faults):
            if fault.at == at and (at == "setup" or step >= fault.step):
                self.faults.remove(fault)
                if step == fault.step or at != "step":
                    if self._first(fault):
                        self._happen(fault, state)

    def slowed(self, step: Callable) -> Callable:
        """The same step, which works the seconds of a "slow" that has happened, too: what measures it sees them."""

        def slowed_step(state: structure.Tree, batch: structure.Tree) -> Any:
            if self._slow:
                _work(self._slow)
            return step(state, batch)

        return slowed_step if self._slow or any(fault.kind == "slow" for fault in self.faults) else step

    def _first(self, fault: Injection) -> bool:
        """Whether this fault has not happened yet in this run; afterwards it has."""
        if self.folder is None:
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self.folder / f"{fault}@{self.rank}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _happen(self, fault: Injection, state: structure.Tree) -> None:
        seconds, pid = fault.seconds or 0.0, os.getpid()
        os.write(2, f"rank {self.rank}: injected {fault}\n".encode())
        if fault.kind == "exception":
            raise ValueError(f"injected: got {fault}, wanted none")
        if fault.kind == "exit":
            sys.exit(3)
        if fault.kind == "kill":
            os.kill(pid, signal.SIGKILL)
        if fault.kind == "stop":
            if seconds != float("inf"):
                _later(seconds, f"kill -CONT {pid}")
            os.kill(pid, signal.SIGSTOP)
        if fault.kind == "hang":
            time.sleep(min(seconds, 1e9))
        if fault.kind == "slow":
            self._slow = seconds
        if fault.kind in ("nan", "bitflip"):
            _damage(state, fault.kind)
        if fault.kind == "oom":
            device = next((x.device for x in tree.leaves(state) if isinstance(x, torch.Tensor)), None)
            torch.empty(1 << 60, dtype=torch.uint8, device=device)
        if fault.kind == "diskfull":
            _fill(seconds)


def _later(seconds: float, command: str) -> None:
    """Let a process that is no child of this one run a command after some seconds."""
    subprocess.run(["sh", "-c", f"(sleep {seconds}; {command}) >/dev/null 2>&1 &"], start_new_session=True, check=True)


def _work(seconds: float) -> None:
    """Use a processor for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


_WORDS = MappingProxyType({1: (torch.int8, 1), 2: (torch.int16, 6), 4: (torch.int32, 21), 8: (torch.int64, 50)})


def _damage(state: structure.Tree, kind: str) -> None:
    x = next(x for x in tree.leaves(state) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel())
    with torch.no_grad():
        if kind == "nan":
            x.view(-1)[0] = float("nan")
        else:  # a high bit of the mantissa: a number that looks like one
            integer, bit = _WORDS[x.element_size()]
            word = x.view(-1)[:1].view(integer)
            word ^= 1 << bit


def _fill(seconds: float) -> None:
    """Writes into files fail as on a full disk: with ENOSPC in this process, EFBIG in those that it has started."""
    write, until = os.write, time.monotonic() + seconds

    def full(fd, content):
        if fd > 2 and time.monotonic() < until and stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, content)

    os.write = full
    for child in _children(os.getpid()):
        resource.prlimit(child, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        if seconds != float("inf"):
            _later(seconds, f"prlimit --pid {child} --fsize=unlimited")


def _children(pid: int) -> list[int]:
    """Processes that this one has started, and those that they have."""
    found = []
    for task in disk.names_in(f"/proc/{pid}/task"):
        children = disk.look(Path(f"/proc/{pid}/task/{task}/children").read_text, "")  # "": it has ended meanwhile
        for child in map(int, children.split()):
            found += [child, *_children(child)]
    return found
