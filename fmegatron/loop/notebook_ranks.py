"""Several ranks in a notebook: ipyparallel engines that `%%px` cells run on, of which none is waited for in vain."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed import Store, TCPStore

from fmegatron.loop.faults.notice import Place
from fmegatron.loop.launcher import use_threads

if TYPE_CHECKING:
    from ipyparallel import Client, DirectView

POLL_SECONDS = 0.5
LOST_SECONDS = 10  # how long an engine tries to reach a notebook that does not answer


class Engines:
    """Ranks of a notebook, engine i as rank i; made by `engines`. Closed by `close()`, `with`, or the notebook's end.

    size: number of ranks.  client, view: ipyparallel's Client, and its DirectView of these engines, which `%%px` uses.
    """

    def __init__(self, client: Client, view: DirectView, failures: list[str], close: Callable[[], None]):
        self.client, self.view, self.size = client, view, len(view)
        self._failures, self._close = failures, weakref.finalize(self, close)

    def __repr__(self) -> str:
        how = "closed" if not self._close.alive else "; ".join(self._failures) or "all there"
        return f"Engines({self.size} ranks): {how}"

    def check(self) -> None:
        """Raise RuntimeError that names the engines that ended, why, and what to do; in IPython each cell ends so."""
        if self._failures:
            raise RuntimeError(_told(self._failures))

    def close(self) -> None:
        """End the engines that this notebook started, and their controller; others are let go."""
        self._close()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def engines(n: int, client: Client | None = None, timeout_s: float = 120, patience_s: float = 5) -> Engines:
    """Make `n` ipyparallel engines the ranks of this notebook: cells that begin with `%%px` then run on all of them.

        ranks = loop.engines(2)

        %%px
        world = connect(Mesh(fsdp=2))  # gloo on CPUs; with CUDA nccl too, cuda:LOCAL_RANK

    Each engine has torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, ...) and its share of the cores as threads; one
    that is started here also has the notebook's folder and `sys.path`. A mesh may be left (`world.close()`) and another
    connected, as often as one likes.

    Nothing is waited for in vain: an engine that dies makes the cells that the others are in end within `patience_s`
    seconds, with their processes when they wait in a collective; so does an engine where a cell raises while others
    are still in that cell. Engines that are in no cell stay, with their variables. When the notebook's process ends,
    however it does, the engines that it started end.

    Args:
        n: number of ranks.
        client: an ipyparallel.Client whose engines are already there, such as those of a cluster, on any hosts that
            reach this one; the first n are taken. None: n engines are started on this machine.
        timeout_s: seconds for the engines to start and import torch.
        patience_s: seconds that an engine is given to end a cell by itself after another failed.

    Raises:
        ValueError: for an `n` below 1, and without ipyparallel. RuntimeError when engines do not come in time.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"engines: n: got {n!r:.60}, wanted a whole number of at least 1")
    try:
        import ipyparallel
    except ImportError as error:
        raise ValueError(
            "engines: got no package ipyparallel, wanted it installed; pip install 'fmegatron[notebook]'"
        ) from error
    until, failures = time.monotonic() + timeout_s, []
    with contextlib.ExitStack() as undo:
        undo.callback(failures.clear)  # after a close, no cell reports an engine as missing
        controller, where = 0, "its log"
        try:
            if client is None:
                where = undo.enter_context(tempfile.TemporaryDirectory(prefix="fmegatron-engines-"))
                quiet = logging.Logger("ipyparallel", logging.CRITICAL)  # it reports engines that are ended as failures
                cluster = ipyparallel.Cluster(n=n, profile_dir=where, controller_ip="127.0.0.1", delay=0.0, log=quiet)
                undo.callback(cluster.stop_cluster_sync)
                cluster.start_cluster_sync()
                controller = getattr(cluster.controller, "pid", 0)
                client = undo.enter_context(contextlib.closing(cluster.connect_client_sync()))
                client.wait_for_engines(n, timeout=max(0, int(until - time.monotonic())), interactive=False)
            if len(client.ids) < n:
                raise ValueError(f"engines: n: got {n}, wanted at most the client's {len(client.ids)}; start more")
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ids = sorted(client.ids)[:n]
            view = client[ids]
            _begin_all(client, ids, store.port, controller, patience_s, until)
        except (ipyparallel.error.IPythonError, TimeoutError) as error:
            raise RuntimeError(
                f"engines: {n} engines were not ready within {timeout_s:g} s: {error}; is the machine busy, or memory "
                f"short? timeout_s= waits longer"
            ) from error
        done = threading.Event()
        thread = threading.Thread(target=_look, args=(client, ids, store, failures, where, done), daemon=True)
        thread.start()
        undo.callback(thread.join, 5)
        undo.callback(done.set)
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is not None:
            view.block = True
            view.activate()
            shell.run_line_magic("pxconfig", "--progress-after=-1")  # bars would stay in the outputs
            tell = _teller(failures)
            shell.events.register("post_run_cell", tell)
            undo.callback(shell.events.unregister, "post_run_cell", tell)
        return Engines(client, view, failures, undo.pop_all().close)


def _begin_all(client: Client, ids: list[int], port: int, controller: int, patience_s: float, until: float) -> None:
    """Make engine ids[i] rank i: its environment, and its watch. controller: pid, 0 for engines of others."""
    view = client[ids]

    def remaining() -> float:
        return max(0.1, until - time.monotonic())

    if controller:  # engines of others have a place of their own
        at = f"import os, sys; sys.path[:] = {sys.path!r}; os.chdir({os.getcwd()!r})"
        view.execute(at, silent=True, block=False).get(remaining())
    hosts = view.apply_async(socket.gethostname).get(remaining())
    here = "127.0.0.1" if set(hosts) == {socket.gethostname()} else socket.getfqdn()
    asked = []
    for rank, host in enumerate(hosts):
        place = Place(rank, len(hosts), hosts[:rank].count(host), hosts.count(host))
        one = client[ids[rank]]
        asked.append(one.apply_async(_begin, place, here, port, controller, patience_s))
    for one in asked:
        one.get(remaining())


# ---- in the notebook -------------------------------------------------------------------------------------------------
def _look(client: Client, ids: list[int], store: Store, failures: list[str], where: str, done: threading.Event) -> None:
    """Note engines that ended, in `failures` and for the other engines in the store, until `done`."""
    missed = set()
    while not done.wait(POLL_SECONDS):
        for rank in sorted(rank for rank, one in enumerate(ids) if one not in client.ids and rank not in missed):
            missed.add(rank)
            why = f"died, killed or out of memory ({where})"
            if store.check([f"ended/{rank}"]):
                why = store.get(f"ended/{rank}").decode()
            failures.append(f"engine {rank} {why}")
            store.compare_set("died", "", f"engine {rank} died")


def _told(failures: list[str]) -> str:
    return (
        f"engines: {'; '.join(failures)}; start again (ranks = loop.engines(n), connect, restore the last checkpoint), "
        "also on fewer ranks"
    )


def _teller(failures: list[str]) -> Callable[[Any], None]:
    """What ends a cell of the notebook: a line on stderr if engines ended since the cell before."""
    count = 0

    def tell(_: Any) -> None:
        nonlocal count
        if len(failures) > count:
            count = len(failures)
            print(_told(failures), file=sys.stderr, flush=True)

    return tell


# ---- in an engine ----------------------------------------------------------------------------------------------------
def _begin(place: Place, host: str, port: int, controller: int, patience_s: float) -> None:
    """Make this process a rank, and watch over it. controller: pid of what ends with the notebook, 0 for none."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_size),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the notebook's
    )
    use_threads(place)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=30))
    watch = _Watch(place.rank, store, patience_s)
    events = sys.modules["IPython"].get_ipython().events
    events.register("pre_run_cell", watch.begin)
    events.register("post_run_cell", watch.end)
    threading.Thread(target=watch.run, args=(controller,), daemon=True).start()


class _Watch:
    """Ends this engine when it stays in a cell that can not end, and when the notebook has gone."""

    def __init__(self, rank: int, store: Store, patience_s: float):
        self.rank, self.store, self.patience_s = rank, store, patience_s
        self.cell: str | None = None  # the cell that runs: its text and how often it ran, the same on all engines
        self.ran: dict[str, int] = {}

    def begin(self, info: Any) -> None:
        """A cell begins."""
        text = hashlib.sha256(info.raw_cell.encode()).hexdigest()
        self.ran[text] = self.ran.get(text, 0) + 1
        self.cell = f"cell/{text}/{self.ran[text]}"

    def end(self, result: Any) -> None:
        """A cell ended; others that are in it know it if it raised."""
        cell, self.cell = self.cell, None
        error = result.error_before_exec or result.error_in_exec
        if cell is not None and error is not None:
            with contextlib.suppress(RuntimeError, OSError):
                self.store.compare_set(cell, "", f"engine {self.rank} raised {type(error).__name__} in the same cell")

    def run(self, controller: int) -> None:
        """Look until the process ends."""
        waits, since, answered = None, 0.0, time.monotonic()
        while True:
            time.sleep(POLL_SECONDS)
            cell = self.cell
            try:
                why = self._failure(cell)
                answered = time.monotonic()
            except (RuntimeError, OSError):
                if time.monotonic() - answered < LOST_SECONDS:
                    continue
                if not controller:  # an engine of others stays
                    return
                with contextlib.suppress(OSError):
                    os.kill(controller, signal.SIGTERM)
                os._exit(1)
            if cell is None or why is None:
                waits = None
            elif cell != waits:
                waits, since = cell, time.monotonic()
            elif time.monotonic() - since > self.patience_s:
                self.store.set(f"ended/{self.rank}", f"was ended after {self.patience_s:g} s in its cell, as {why}")
                os._exit(1)

    def _failure(self, cell: str | None) -> str | None:
        """Why the cell that runs cannot end, None while it can."""
        for key in ("died", *([cell] if cell else [])):
            if self.store.check([key]):
                return self.store.get(key).decode()
        return None
