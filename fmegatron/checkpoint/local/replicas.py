"""LocalReplicas: checkpoints on the nodes' own disks, each shard on several nodes, for fast recovery."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from fmegatron.checkpoint.calls.arguments import are_saved, check_path, check_step, flat_layouts, ranks_of
from fmegatron.checkpoint.calls.ranks import Ranks, together
from fmegatron.checkpoint.files import trees
from fmegatron.checkpoint.files.format import CheckpointError
from fmegatron.checkpoint.files.manifest import to_json_text
from fmegatron.checkpoint.local.cliques import check_groups, cliques
from fmegatron.checkpoint.local.recover import Found, recover
from fmegatron.checkpoint.local.saving import How, Saving
from fmegatron.checkpoint.local.shard import Content
from fmegatron.checkpoint.local.shelf import Shelf
from fmegatron.checkpoint.manage.manager import Manager
from fmegatron.checkpoint.writing.saving import agreed, check_names, check_request
from fmegatron.tree import structure


@dataclass(frozen=True)
class LocalReplicas:
    """Saves to node-local storage (a RAM disk, an SSD), with each shard on `copies` nodes; recovery by peers.

    The state is the directories themselves: each shard is a checkpoint that every tool reads (FORMAT.md). `save`
    returns when all is written (copy, exchange, disk); `save_async` leaves the disk to a thread. `restore_latest` takes
    any layouts on any number of ranks, if what they want is on the nodes that are left.

    Args:
        directory: where this node keeps replicas; it may differ from node to node, and ranks of a node may share it.
        run: names the run, the same after each restart; shards are in `directory`/`run`, those of other runs never
            count.
        world: the ranks that call its methods together (`collectives.connect`); None for one process.
        copies: nodes that hold each shard; 1 is enough where ranks of other nodes hold the same elements (hsdp): what
            they have stands in for a shard that is nowhere.
        spacing: ranks of a node, or a tuple of the ranks on each node; default: LOCAL_WORLD_SIZE as torchrun sets it,
            else 1.
        groups: who holds whose shards, instead of `cliques(...)`.
        keep: newest steps to keep.
        durable: whether a save waits until all is on the disk; False saves time on a RAM disk, where it means nothing.
        portion_bytes: exchanged and written at a time; a save takes as much host memory for each member of a group.

    >>> import tempfile
    >>> from fmegatron.layout import Layout, Mesh
    >>> layouts = {"w": Layout((2, 3), torch.float32, Mesh())}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     local = LocalReplicas(folder + "/ramdisk", "my-run", copies=1)
    ...     local.save(7, {"w": torch.ones(2, 3)}, layouts, metadata={"loss": 0.5})
    ...     step, state, metadata = local.restore_latest(layouts)
    >>> step, state["w"].sum(), metadata
    (7, tensor(6.), {'loss': 0.5})
    """

    directory: str | os.PathLike
    run: str
    world: Ranks | None = None
    copies: int = 2
    spacing: int | tuple[int, ...] | None = None
    groups: Sequence[Sequence[int]] | None = None
    keep: int = 1
    durable: bool = True
    portion_bytes: int = 32 << 20

    def __post_init__(self):
        check_path(self.directory)
        object.__setattr__(self, "world", ranks_of(self.world))
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", self.run):
            raise ValueError(
                f"LocalReplicas: got run {self.run!r:.120}, wanted 1 to 100 of A-Z a-z 0-9 _ - . (no . first)"
            )
        for name in ("copies", "keep", "portion_bytes"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"LocalReplicas: got {name}={value!r}, wanted a number of at least 1")

    @property
    def _ranks(self) -> Ranks:
        assert self.world is not None, "`__post_init__` has put this process's own in the place of None"
        return self.world

    @property
    def shelf(self) -> Shelf:
        """The directory of this node and run."""
        return Shelf(os.path.join(os.path.realpath(os.fspath(self.directory)), self.run))

    def members(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that keep each other's shards."""
        if self.groups is not None:
            return check_groups(self.groups, self._ranks.size)
        spacing = self.spacing or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return cliques(self._ranks.size, self.copies, spacing)

    def save(
        self,
        step: int,
        state: structure.Tree,
        layouts: structure.Tree,
        metadata: dict[str, Any] | None = None,
        *,
        finite: bool | None = None,
    ) -> None:
        """Store this rank's tensors on its own node and on those of its group; older steps go when all have agreed.

        Saving a step again replaces it; an older step is refused (ValueError), unless training was set back by
        `restore_latest`. Warns (rank 0) when the nodes do not allow as many copies as wanted.

        Args:
            step: number of the step.
            state: tree of this rank's local tensors, any device.
            layouts: the same tree of Layouts (or ArraySpecs).
            metadata: JSON values; those of rank 0 are stored.
            finite: whether loss and gradient norm of this step are finite. If one rank passes False, nothing is stored,
                with a warning: replicas are states to go back to, and older ones are not given up for one that is none.

        Raises ValueError for a request that does not fit, RuntimeError on all ranks with the first failing rank's
        message when anything else fails; older steps are untouched then.
        """
        self._begin(step, state, layouts, metadata, finite, None).result()

    def save_async(
        self,
        step: int,
        state: structure.Tree,
        layouts: structure.Tree,
        metadata: dict[str, Any] | None = None,
        *,
        finite: bool | None = None,
        most_bytes: int = 8 << 30,
    ) -> Saving:
        """`save` that leaves the disk to a thread: it blocks for copy and exchange, and the state may change after it.

        Call `handle.poll()` once a step on all ranks, or `handle.result()`; the set counts from then on. One save at a
        time in a directory. Errors are raised as by `save`, here or there.

        Args:
            step: as of `save`.
            state: as of `save`.
            layouts: as of `save`.
            metadata: as of `save`.
            finite: as of `save`.
            most_bytes: host memory that may wait for the disk here, this rank's shard and those of its group; above it,
                the call blocks until something is written.
        """
        return self._begin(step, state, layouts, metadata, finite, most_bytes)

    def _begin(self, step, state, layouts, metadata, finite, most_bytes) -> Saving:
        world, shelf = self._ranks, self.shelf

        def prepare():
            check_step(step)
            tensors, plans = check_request(state, layouts, world, metadata, step, finite)
            check_names(shelf.place(step, world.rank, 0), plans, world.size)
            shelf.prepare(step)
            return tensors, self.members()

        tensors, groups = together(world, f"saving local replicas of step {step}", prepare)
        finite = agreed(finite, world)
        group = next(group for group in groups if world.rank in group) if finite is not False else ()
        user = json.loads(world.broadcast_text(to_json_text(metadata or {})))  # rank 0's, as of a global checkpoint
        (paths, leaves, _), held = flat_layouts(layouts), are_saved(layouts)
        what = list(compress(paths, held)), list(compress(leaves, held))
        content = Content(self.run, step, world.size, *what, user, finite)
        least, warning = min(map(len, groups)), ""
        if self.groups is None and least < self.copies:
            warning = (
                f"local replicas: some shards are on {least} node{'s' * (least > 1)} only, {self.copies} were wanted;"
                " add nodes, make them even, or pass a smaller copies="
            )
        how = How(self.portion_bytes, self.durable, most_bytes, self.keep, warning)
        saving = Saving(shelf, content, group, world, how)
        saving.exchange(tensors)
        if not group and world.rank == 0:
            text = f"local replicas of step {step} were not stored: its loss or gradient norm is not finite"
            warnings.warn(f"{shelf.path}: {text}", RuntimeWarning, stacklevel=3)
        return saving

    def steps(self) -> list[int]:
        """The steps of which this node holds something, in rising order; whether that is good, reading will show."""
        return sorted({step for step, _, _ in self.shelf.keys()})

    def clear(self) -> None:
        """Remove all that the nodes keep of the run; all ranks call it. RuntimeError on all where that fails on one."""
        shelf = self.shelf
        together(self._ranks, f"removing the local replicas {shelf.path}", lambda: trees.remove(shelf.path))

    def restore_latest(
        self,
        layouts: structure.Tree,
        *,
        fallback: Manager | Callable[..., tuple[int, Any, dict[str, Any]]] | None = None,
        device: str | torch.device | None = None,
        protect: bool = True,
    ) -> tuple[int, Any, dict[str, Any]]:
        """(step, state, metadata) of the newest step of which all that is wanted is intact on some node.

        What is on the own disk and good is read there, the rest comes from the next holder whose copy is good, or from
        a replica; the sender verifies what it reads, the receiver what it gets. A copy that fails is not tried again,
        and all ranks decide the same. What was skipped is reported by RuntimeWarnings.

        layouts: of the leaves that were saved, on any mesh (with other leaves the global checkpoint is restored).
        fallback: the Manager of the global checkpoints: newer ones than the newest local step are preferred, and older
        ones come when no local step is left; or a function `fallback(layouts)` that is called at last and returns the
        same triple.
        device: where the tensors go (default: that of the world).
        protect: when a node lacks a shard that it should hold (it was replaced, or the layouts are others), store the
        step again on all, under the layouts of now.

        Raises CheckpointError when nothing is left, ValueError when the layouts do not fit the world.
        """
        world, shelf, notes = self._ranks, self.shelf, []
        if isinstance(fallback, Manager) and fallback.world.size != world.size:
            raise ValueError(
                f"LocalReplicas: got a fallback of {fallback.world.size} ranks, wanted one of {world.size};"
                " give the Manager the same world"
            )
        try:
            found = recover(shelf, self.run, layouts, world, fallback, device, self.portion_bytes, notes)
            notes += shelf.restored(found.step)
            if protect and found.holders is not None:
                self._protect(found, found.holders, layouts, notes)
            return found.step, found.state, found.metadata
        except CheckpointError:
            notes += shelf.restored(-1)  # nothing here is good: training may start anew, from any step
            raise
        finally:  # at the end: a warning that is turned into an error must not stop one rank of several half-way
            for note in notes:
                warnings.warn(note, RuntimeWarning, stacklevel=2)

    def _protect(self, found: Found, holders: list[list[int]], layouts: Any, notes: list[str]) -> None:
        groups = self.members()
        lacking = [m for group in groups for m in group if any(m not in holders[r] for r in group)]
        if not lacking:
            return
        try:
            self.save(found.step, found.state, layouts, found.metadata)
        except RuntimeError as error:
            notes.append(f"the restored step {found.step} could not be stored again for ranks {lacking[:8]}: {error}")
