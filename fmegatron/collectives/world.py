"""The ranks of a run: process groups named by axis, and the few agreements that a run needs outside its graphs."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fmegatron import tree
from fmegatron.collectives.meet import meet
from fmegatron.collectives.process_group import (
    as_bytes,
    control_group,
    default_device,
    empty_bytes,
    end_reading,
    known_group,
    last_references,
    make_current,
    noting_sockets,
    start,
)
from fmegatron.collectives.slurm import adopt_slurm
from fmegatron.collectives.torch_private import register_group, unregister_group
from fmegatron.layout import Mesh
from fmegatron.tree import arrivals, structure

__all__ = ["FailedOnRank", "World", "connect"]

_ENDS_S = 5.0  # how long one that leaves waits for what it has ended


class FailedOnRank(RuntimeError):
    """What all ranks were doing failed on one of them; raised on all. rank: the first on which it failed."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank

    def __reduce__(self):
        return type(self), (str(self), self.rank)


class World:
    """A mesh with processes behind it. Made by `connect` or `alone`; closed by `close()` or as a context manager.

    mesh, rank, size: as connected.  device: where this rank computes; `put` brings a tree there.
    Process groups are created when an axis is first used, in the order of use, which is the order of one program on all
    ranks. They are registered with torch under names made of the axes ("fmegatron:fsdp+tp"), the same on every rank, so
    that all ranks trace and compile one and the same graph.
    """

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, control=None, owns_process_group: bool = False):
        self.mesh, self.rank, self.size, self.device = mesh, rank, mesh.size, device
        self._arrivals = arrivals.Arrivals(device)
        self._control, self._owns, self._device_mesh = control, owns_process_group, None
        self.begun = 0  # how often it has left its groups
        self._groups: dict[str, tuple[str, dist.ProcessGroup]] = {}  # axes and use -> (name at torch, group)
        self._registered: list[str] = []
        self._store: dist.Store | None = None  # of the job; this and how to connect are kept by `connect`, for `renew`
        self._backend, self._timeout_s = "", 0.0
        self._sockets: dict[int, int] = {}
        self._asked: list[Any] = []  # works of questions, the newest of which may be under way
        self._aborted = threading.Event()
        self._indices: dict[tuple[str, ...], torch.Tensor] = {}
        self.compiled: dict[Any, Any] = {}  # of the room step: the layers that are compiled for these ranks

    @classmethod
    def alone(cls, device: str | torch.device | None = None) -> World:
        """The world of a single process, whatever else runs: one rank, no process group.

        device: default the first CUDA device where there is CUDA, else the CPU. It becomes the current one.
        """
        return cls(Mesh(), 0, make_current(torch.device(default_device(0) if device is None else device)))

    def __repr__(self) -> str:
        return f"World({self.mesh}, rank {self.rank} of {self.size}, {self.device})"

    def __hash__(self) -> int:
        return id(self)

    @property
    def on_nccl(self) -> bool:
        """Whether tensors of its device travel over NCCL."""
        own = dist.get_backend_config() if dist.is_initialized() and not self._backend else self._backend
        return "nccl" in own

    def put(self, values: structure.Tree, layouts: structure.Tree | None = None) -> structure.Tree:
        """The tree with its tensors on this rank's device; tensors that are there already are returned as they are.

        To a CUDA device they go through pinned memory, on a stream of their own, and the host waits for none of them:
        what reads them on the current stream comes behind. Only for what the caller has pinned it waits.

        layouts: theirs, as for `tree.place`; a batch that is made by hand needs them. None: those that the values know.

        >>> World.alone("cpu").put({"x": torch.zeros(2)})["x"].device
        device(type='cpu')
        """

        values = self._arrivals(values)
        return values if layouts is None else tree.place(values, layouts, self.rank)

    # ---- groups -----------------------------------------------------------------------------------------------------
    def coordinates(self) -> dict[str, int]:
        """This rank's position along every axis."""
        return self.mesh.coordinates(self.rank)

    def index(self, axes: str | tuple[str, ...]) -> int:
        """This rank's position along one axis, or along several joined (major first)."""
        return self.mesh.index(self.rank, axes)

    def index_tensor(self, axes: tuple[str, ...]) -> torch.Tensor:
        """`index` as 0-d int64 on the device, which compiled steps read; it follows `renew`."""
        if axes not in self._indices:
            self._indices[axes] = torch.tensor(self.index(axes), device=self.device)
        return self._indices[axes]

    def group_name(self, axes: tuple[str, ...], use: str = "") -> str:
        """Name under which torch knows this rank's process group over `axes`; creates the groups at first use.

        use: a word for a group of its own ("gather"): the same ranks, another communicator, "fmegatron:fsdp#gather".
        """
        key = "fmegatron:" + "+".join(axes) + (f"#{use}" if use else "")
        if key not in self._groups:
            self._groups[key] = self._open(key, axes, own=bool(use))
        return self._groups[key][0]

    def _open(self, key: str, axes: tuple[str, ...], own: bool) -> tuple[str, dist.ProcessGroup]:
        """The group under the first name that is free, or that another open world has for the same ranks: a cell of a
        notebook that connects is run again, and runs of two meshes may follow each other in one process."""
        name, number = key, 0
        while True:
            known = known_group(name)
            if known is None:
                self._all_come(key)
                with noting_sockets(self._sockets):
                    group = self._make_group(name, axes, own)
                self._registered.append(name)
                return name, group
            if set(dist.get_process_group_ranks(known)) == set(self.mesh.group(self.rank, axes)):
                return name, known
            number += 1
            name = f"{key}#{number}"

    def _all_come(self, key: str) -> None:
        """Wait for the ranks that make this group, too. torch waits for them where no `abort` reaches."""
        if self._store is None:
            return
        if meet(self._store, self.rank, self.size, key, self._timeout_s, self._aborted.is_set) is None:
            raise RuntimeError(
                f"{self}: {key}: Connection closed by peer: given up before all ranks came to this group"
            )

    @staticmethod
    def axes_of(name: str) -> tuple[str, ...]:
        """The axes of a group, from its name."""
        return tuple(name.removeprefix("fmegatron:").partition("#")[0].split("+"))

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """This rank's process group over `axes`."""
        self.group_name(axes)
        return self._groups["fmegatron:" + "+".join(axes)][1]

    def order(self, axes: tuple[str, ...]) -> tuple[int, ...] | None:
        """Position in the group over `axes` of each index along them, None where they are the same.

        torch numbers the ranks of a group in ascending order; along `("tp", "fsdp")` of a mesh `fsdp, tp` the index
        counts otherwise.
        """
        ranks = self.mesh.group(self.rank, axes)
        order = tuple(sorted(ranks).index(rank) for rank in ranks)
        return None if order == tuple(range(len(order))) else order

    def _make_group(self, name: str, axes: tuple[str, ...], own: bool) -> dist.ProcessGroup:
        if len(axes) == 1 and not own:
            group = self.device_mesh().get_group(axes[0])
        else:
            groups = self.mesh.groups(axes)
            if len(groups) == 1 and groups[0] == tuple(range(self.size)) and not own:
                group = dist.group.WORLD
            else:
                group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
        assert isinstance(group, dist.ProcessGroup), "this rank is in one of the groups"
        register_group(name, group)
        return group

    def device_mesh(self) -> dist.device_mesh.DeviceMesh:
        """The torch DeviceMesh of the same ranks and axis names."""
        if self._device_mesh is None:
            ranks = torch.empty(self.mesh.sizes, dtype=torch.int64)
            for rank in range(self.size):
                ranks[tuple(self.mesh.coordinates(rank).values())] = rank
            self._device_mesh = dist.device_mesh.DeviceMesh(self.device.type, ranks, mesh_dim_names=self.mesh.names)
        return self._device_mesh

    # ---- agreements on the CPU, outside any graph ------------------------------------------------------------------
    def barrier(self) -> None:
        """Return when every rank has called it."""
        if self.size > 1:
            dist.barrier(group=self._control)

    def ask(self, *flags: bool) -> Callable[[], tuple[bool, ...]]:
        """Begin to ask all ranks; call what is returned for the answer: which of the flags are true on any rank.

        Only the call for the answer waits, for ranks that have not asked yet. All ranks ask in the same order among
        their other agreements and collectives, and may fetch the answer whenever they like, or never.
        """
        values = torch.tensor([int(bool(flag)) for flag in flags])
        work = None
        if self.size > 1:
            work = self._noted(dist.all_reduce(values, dist.ReduceOp.MAX, group=self._control, async_op=True))

        def answer() -> tuple[bool, ...]:
            if work is not None:
                work.wait()
            return tuple(map(bool, values.tolist()))

        return answer

    def _noted(self, work: Any) -> Any:
        """The work of a question, which `renew` waits for."""
        self._asked = [one for one in self._asked if not one.is_completed()] + [work]
        return work

    def same_later(self, number: int) -> Callable[[], bool]:
        """Begin to ask all ranks whether they have the same number of less than 63 bits; as `ask` begins. The answer of
        a question from before `renew` is True: nobody knows it any more."""
        row, begun, work = torch.tensor([number, -number]), self.begun, None
        if self.size > 1:
            work = self._noted(dist.all_reduce(row, dist.ReduceOp.MAX, group=self._control, async_op=True))

        def answer() -> bool:  # holds no group: its threads are joined with the last reference, at `close`
            if work is None or begun != self.begun:
                return True
            work.wait()
            most, least = row.tolist()
            return most == -least

        return answer

    def agree(self, error: str | None, what: str) -> None:
        """Wait for all ranks; if one passes an error, raise FailedOnRank with the first such rank's message on all."""
        if self.size == 1:
            if error is not None:
                raise RuntimeError(f"{what} failed: {error}")
            return
        first = torch.tensor([self.rank if error is not None else self.size])
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self._control)
        failed = int(first.item())
        if failed == self.size:
            return
        message = self.broadcast_text(error or "", failed)
        raise FailedOnRank(f"{what} failed on rank {failed} of {self.size}: {message}", failed)

    def broadcast_text(self, text: str, source: int = 0) -> str:
        """The text of rank `source`, on all ranks; what other ranks pass does not matter."""
        if self.size == 1:
            return text
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else empty_bytes(0)
        length = torch.tensor([data.numel()])
        dist.broadcast(length, source, group=self._control)
        if self.rank != source:
            data = empty_bytes(int(length.item()))
        if length.item():
            dist.broadcast(data, source, group=self._control)
        return bytes(data.tolist()).decode()

    # ---- tensors in host memory, outside any graph ------------------------------------------------------------------
    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """row: CPU int64 [n], n the same on all ranks. Returns int64 [size, n]: every rank's row, on all ranks."""
        if self.size == 1:
            return row[None].clone()
        rows = torch.empty(self.size, row.numel(), dtype=row.dtype)
        dist.all_gather(list(rows.unbind()), row.contiguous(), group=self._control)
        return rows

    def gather_later(self, row: torch.Tensor) -> Callable[[], torch.Tensor]:
        """`gather_rows` that waits for the others only when what it returns is called."""
        if self.size == 1:
            return lambda: row[None]
        rows = torch.empty(self.size, row.numel(), dtype=row.dtype)
        work = self._noted(dist.all_gather(list(rows.unbind()), row.contiguous(), group=self._control, async_op=True))

        def answer() -> torch.Tensor:
            work.wait()
            return rows

        return answer

    def minimum(self, row: torch.Tensor) -> torch.Tensor:
        """row: CPU int64 [n], n the same on all ranks. Returns the smallest value of each element, on all ranks."""
        row = row.clone()
        if self.size > 1:
            dist.all_reduce(row, dist.ReduceOp.MIN, group=self._control)
        return row

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send CPU tensors to ranks and fill CPU tensors from ranks, all at once; only the ranks that are named meet.

        Between two ranks, tensors arrive in the order in which they are listed, and both sides must list the same
        sizes. Tensors are contiguous; they are read and filled in place, as bytes. Own rank: a copy.
        """
        own = iter([x for peer, x in sends if peer == self.rank])
        works, tags = [], {}

        def tag(peer, direction):
            tags[peer, direction] = tags.get((peer, direction), -1) + 1
            return tags[peer, direction]

        for peer, x in receives:
            if peer == self.rank:
                x.copy_(next(own))
            elif x.numel():
                works.append(dist.irecv(as_bytes(x), peer, group=self._control, tag=tag(peer, "from")))
        for peer, x in sends:
            if peer != self.rank and x.numel():
                works.append(dist.isend(as_bytes(x), peer, group=self._control, tag=tag(peer, "to")))
        for work in works:
            work.wait()

    def on_all(self, work, what: str):
        """`work()` of each rank; where it fails on one, RuntimeError with its message on all, none of which goes on."""
        result = error = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        try:
            self.agree(None if error is None else f"{type(error).__name__}: {error}", what)
        except RuntimeError as raised:
            raise raised from error
        return result

    def leader_first(self, work, what: str):
        """Run `work()` on one rank of each node, then on the others; for work that fills a cache shared by a node.

        Returns what `work()` returned here. If it raises on a leader, RuntimeError with that message on all ranks.
        """
        if self.size == 1:
            return work()
        leader = int(os.environ.get("LOCAL_RANK", self.rank)) == 0
        result = self.on_all(work if leader else lambda: None, what)
        return result if leader else work()

    # ---- life ------------------------------------------------------------------------------------------------------
    def abort(self) -> None:
        """Let all that waits in a collective of this process fail. From any thread; `renew` comes next, or the end.

        The other ranks notice nothing of it before this one has left its groups: each aborts its own.
        """
        self._aborted.set()
        groups = [group for _, group in list(self._groups.values())]
        if dist.is_initialized():
            groups += [self._control, dist.group.WORLD]
        for group in {id(group): group for group in groups if group is not None}.values():
            with contextlib.suppress(RuntimeError):  # it has been aborted
                group.abort()  # gloo ignores it
        end_reading(self._sockets)

    def renew(self, timeout_s: float = 60, given_up: Callable[[], bool] = lambda: False, rank: int = -1) -> None:
        """New communicators under the same names, so that compiled steps go on; all ranks call it.

        What the old ones were doing is abandoned, and answers that were asked for never come. A world of one process
        has none. given_up: asked a few times a second; when it is true, RuntimeError. rank: of this process from now
        on, each process another; -1: as before.
        Raises TimeoutError when a rank does not come within `timeout_s`; RuntimeError when the process group was not
        made by `connect`.
        """
        if self.size == 1:
            return
        if not self._owns or self._store is None:
            raise RuntimeError(f"{self}: its process group was not made by connect, and cannot be renewed; start again")
        keys, self.rank = list(self._groups), self.mesh.check_rank(self.rank if rank < 0 else rank)
        self.abort()
        until = time.monotonic() + _ENDS_S
        while not all(work.is_completed() for work in self._asked) and time.monotonic() < until:
            time.sleep(0.001)
        # A socket that closes while the rank at its other end still sends leaves a thread of gloo there waiting for
        # ever (a send of its event loop that fails wakes nobody): so all have ended what they do before any closes.
        if (store := meet(self._store, self.rank, self.size, "world", timeout_s, given_up)) is None:
            raise RuntimeError(f"{self}: the ranks did not meet again: given up")
        self._leave()
        for axes, index in self._indices.items():
            index.fill_(self.index(axes))
        self._begin(store)
        for key in keys:  # in the order of first use, the same on all ranks
            axes, _, use = key.removeprefix("fmegatron:").partition("#")
            self.group_name(tuple(axes.split("+")), use)

    def _begin(self, store: dist.Store | None) -> None:
        self._sockets.clear()
        self._aborted.clear()
        with noting_sockets(self._sockets):
            start(store, self.rank, self.size, self._backend, self._timeout_s, self.device)
            self._control = control_group(self.device, self._timeout_s)

    def close(self) -> None:
        """Leave the groups; destroys torch's process group if `connect` started it."""
        owned = self._owns and dist.is_initialized()
        self._leave()
        if owned:
            self._owns, self._store = False, None
            atexit.unregister(self.close)

    def _leave(self) -> None:
        for name in self._registered:
            unregister_group(name)
        self._registered.clear()
        held = list(self._groups.values())
        self._groups.clear()
        self._asked.clear()
        if self._owns and dist.is_initialized():
            self.begun += 1
            with last_references([held, self._control, self._device_mesh, dist.group.WORLD], _ENDS_S):
                held = self._control = self._device_mesh = None
                dist.destroy_process_group()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def connect(
    mesh: Mesh, device: str | torch.device | None = None, backend: str | None = None, timeout_s: float = 1800
) -> World:
    """Bind a mesh to the processes that torchrun (or srun, or an existing process group) started; size 1 needs none.

    device: default cuda:LOCAL_RANK where there is CUDA, else cpu; it becomes the current one. backend: default nccl
    with gloo for the CPU on CUDA, else gloo. timeout_s: how long a collective may take before it is an error. A process
    group that this call starts is closed with `World.close`, at the latest when Python exits; after that, and after a
    restart by torchrun, `connect` makes another that knows nothing of the one before.
    Raises ValueError when the mesh and the number of processes disagree, and for two ranks on one GPU, which NCCL
    refuses; TimeoutError for ranks that do not come.
    """
    adopt_slurm(os.environ)
    device = torch.device(default_device(os.environ.get("LOCAL_RANK", 0)) if device is None else device)
    launched = dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if size != mesh.size:
        fix = (
            f"start {mesh.size} processes (torchrun --nproc-per-node={mesh.size} ...)"
            if size == 1
            else f"choose axes whose sizes multiply to {size}"
        )
        raise ValueError(
            f"connect: got mesh {mesh}, which has {mesh.size} ranks, wanted {size}, since {size} "
            f"process{'es' if size > 1 else ''} run; {fix}"
        )
    device = make_current(device)
    if not launched:
        return World(mesh, 0, device)
    if dist.is_initialized():
        return World(mesh, dist.get_rank(), device, control_group(device, timeout_s))
    # The store may be torchrun's, which outlives a restart: an address in it may be that of a dead process.
    store, rank, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
    world = World(mesh, rank, device, owns_process_group=True)
    world._store, world._timeout_s = store, timeout_s
    world._backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    world._begin(meet(store, rank, size, "world", timeout_s))
    # A worker thread of gloo that drops the last reference to a tensor needs the interpreter; once Python shuts down,
    # asking for it aborts the process. Closing joins those threads while Python still lives.
    atexit.register(world.close)
    return world
