"""Restarts in the process by nvidia-resiliency-ext: its wrapper around a function of our World, on any backend.

For whoever has that wrapper around all runs; a Run with `Faults(restart=Restart())` does the same by itself, and
sooner. The package is optional (the extra `resiliency`). Tried with 0.4.1 on gloo ranks: its own `Abort` ends NCCL's
groups only, and a rank that waits in gloo would be killed at its hard time limit. Here the sockets of the World are
shut (`World.abort`), what waits fails, and the next call gets the same World with new communicators, so that compiled
steps go on.

What it asks its store every second is a warning of torch on stderr each time; TORCH_CPP_LOG_LEVEL=ERROR hides them.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch.distributed import PrefixStore

from fmegatron.collectives import World, adopt_slurm, connect, meet
from fmegatron.layout import Mesh
from fmegatron.loop.restart import FINAL

T = TypeVar("T")


def nvidia_restart(
    train: Callable[[World, Any], T],
    mesh: Mesh,
    *,
    most: int = 3,
    meet_s: float = 60.0,
    leave_s: float = 5.0,
    store_kwargs: Mapping[str, Any] | None = None,
    **settings: object,
) -> T:
    """The result of `train(world, call)`, called again in the same processes on all ranks after an exception on one.

    All ranks call this where no process group is open yet (under torchrun: at the beginning of `main`). The world is
    closed at the end. What is compiled for a world is made once when the function that makes it is cached:

        @functools.cache
        def compiled(world):
            return step.jit(train_step, world=world, donate=0)

        def train(world, call):
            run = loop.Run("runs/a", compiled(world), specs, world=world)
            for info in run(batches, steps=1000):
                call.ping()

        loop.nvidia_restart(train, mesh, soft_timeout=timedelta(seconds=300), hard_timeout=timedelta(seconds=600))

    Args:
        train: call: the package's CallWrapper (`iteration`, `ping`, `atomic`). It must not restart by itself: a Run in
            it has none of its own (`Restart(0)`, the default).
        mesh: of the world. A rank that is gone for good ends all.
        most: restarts in all.
        meet_s: seconds that the ranks have to meet again.
        leave_s: seconds that `train` has to leave, once what it waited for has failed, before it is interrupted
            wherever it is.
        store_kwargs: where their store is (torch's TCPStore); None: beside torchrun's.
        settings: of `inprocess.Wrapper`, but for its `store_factory`; an `abort` and an `initialize` come in addition.

    Raises:
        ValueError: without the package. What `train` raised, when it is not called again.
    """
    try:
        from nvidia_resiliency_ext.inprocess import CallWrapper, Compose, Wrapper
        from nvidia_resiliency_ext.inprocess.abort import Abort
        from nvidia_resiliency_ext.inprocess.exception import RestartAbort
        from nvidia_resiliency_ext.inprocess.initialize import RetryController
        from nvidia_resiliency_ext.inprocess.store import StoreMixin, TCPStore
    except ImportError as error:
        raise ValueError(
            "nvidia_restart: got no package nvidia-resiliency-ext, wanted it installed; "
            "pip install 'fmegatron[resiliency]' (its 0.4.1 is for Python 3.11 and older, newer ones need glibc 2.39)"
        ) from error
    adopt_slurm(os.environ)
    ranks = _Ranks(mesh, meet_s, leave_s)
    # connect() may be the host of a store at the same place, where no torchrun is.
    where = {"multi_tenant": True, **(store_kwargs or {})}
    base = TCPStore(**where)
    room = meet(base, int(os.environ["RANK"]), mesh.size, "nvidia", meet_s)
    assert room is not None, "it is not given up"
    room.compare_set("word", "", secrets.token_hex(8))

    class Store(PrefixStore, StoreMixin):
        """The package's, without what an attempt before a restart by torchrun has left in it."""

        def __init__(self, word, **where):
            self.base = TCPStore(**where)
            super().__init__(f"fmegatron/nvidia/{word}", self.base)

        @property
        def critical_ranks(self):
            return self.base.critical_ranks

    class Wake(Abort):
        def __call__(self, state):
            ranks.wake(state.iteration)
            return state

    def attempt(call: CallWrapper = None):  # pyright: ignore[reportArgumentType]  the wrapper fills it in
        with ranks.attempt(call.iteration) as world:
            try:
                return train(world, call)
            except FINAL as error:
                raise RestartAbort(f"{type(error).__name__}: {error}") from error

    limits = RetryController(max_iterations=most + 1, min_world_size=mesh.size)
    for name, own in (("abort", Wake()), ("initialize", limits)):
        theirs = settings.get(name)
        settings[name] = own if theirs is None else Compose(theirs, own)
    try:
        where["word"] = room.get("word").decode()
        return Wrapper(store_factory=Store, store_kwargs=where, **settings)(attempt)()
    except RestartAbort as last:
        if isinstance(last.__cause__, FINAL):
            raise last.__cause__ from None
        if ranks.error is None:
            raise RuntimeError(f"nvidia_restart: the restarts end: {last}") from last
        ranks.error.add_note(f"No restart in the process: {last}")
        raise ranks.error from None
    finally:
        ranks.close()


class _Ranks:
    """The world of one process from one attempt to the next. error: of the newest attempt that failed."""

    def __init__(self, mesh: Mesh, meet_s: float, leave_s: float):
        self.mesh, self.meet_s, self.leave_s = mesh, meet_s, leave_s
        self.world: World | None = None
        self.error: Exception | None = None
        self.woken = -1  # the newest attempt that is to end
        self.outside = threading.Event()
        self.outside.set()

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[World]:
        """A world that works, for this attempt."""
        self.outside.clear()
        try:
            yield self._meet(number)
        except Exception as error:
            self.error = error
            raise
        finally:
            self.outside.set()

    def _meet(self, number: int) -> World:
        world, self.world = self.world, None
        try:
            if world is None:
                world = connect(self.mesh)
            else:
                world.renew(self.meet_s, lambda: self.woken >= number)
        except BaseException:  # also the one by which the package interrupts
            if world is not None:
                world.close()
            raise
        self.world = world
        return world

    def wake(self, number: int) -> None:
        """From another thread: what this rank waits for fails; returns when the attempt has been left.

        The package interrupts the main thread next, and what closes files and puts signals back should be over then.
        """
        self.woken = number
        if self.world is not None:
            self.world.abort()
        self.outside.wait(self.leave_s)

    def close(self) -> None:
        """The end."""
        if self.world is not None:
            self.world.close()
