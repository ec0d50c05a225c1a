"""Optimizer state in host memory: streamed to the device in chunks, updated there, and streamed back.

This is the one impure part of the room: state is written where it lies. What is decided is pure and can be read and
tested without a device (`chunks_of`, `offload_schedule`); what is done is a short interpreter of that table, whose
lanes are CUDA streams. Without CUDA the same table runs in order on the CPU. Rajbhandari et al. 2021 (ZeRO-Infinity,
arXiv 2104.07857, section 5.2) stream state in chunks in this way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmegatron import tree
from fmegatron.optim.optimizer import Optimizer
from fmegatron.optim.transform import Tree, merge

_ALIGNMENT = 256  # bytes; of what torch's allocator gives out


class Chunk(NamedTuple):
    """Parameters that are updated together: their paths, those of their state, and the bytes of that state."""

    params: tuple[str, ...]
    state: tuple[str, ...]
    nbytes: int


class Action(NamedTuple):
    """One entry of a schedule: "fetch", "update" or "store" of a chunk in a slot, after these entries (by number)."""

    kind: str
    chunk: int
    slot: int
    after: tuple[int, ...]


def chunks_of(params: Tree, state: Tree, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Consecutive parameters, in chunks whose state takes up to `chunk_bytes` (a larger parameter is one of its own).

    params, state: trees of tensors. A leaf of the state belongs to the parameter whose path its own ends with (codes
    and scales to theirs). Scalars that belong to none, such as the count, are given to every chunk. ValueError for
    another leaf that belongs to no parameter: an optimizer with state across parameters cannot be cut into chunks.
    """
    mine: dict[str, list[str]] = {path: [] for path in tree.paths(params)}
    sizes, known = dict.fromkeys(mine, 0), set(tree.paths(state))
    for path, x in zip(tree.paths(state), tree.leaves(state), strict=True):
        owner = _owner(path, mine, known)
        if owner is None and x.dim():
            raise ValueError(
                f"offload: {path}: got a state of shape {tuple(x.shape)} that belongs to no parameter, want one that"
                " ends with a parameter's path; this optimizer cannot be offloaded"
            )
        if owner is not None:
            mine[owner].append(path)
            sizes[owner] += _aligned(x.nbytes)
    out: list[Chunk] = []
    for path, own in mine.items():
        last = out[-1] if out else None
        if last and last.nbytes + sizes[path] <= chunk_bytes:
            out[-1] = Chunk((*last.params, path), (*last.state, *own), last.nbytes + sizes[path])
        else:
            out.append(Chunk((path,), tuple(own), sizes[path]))
    return tuple(out)


def offload_schedule(count: int, slots: int) -> tuple[Action, ...]:
    """What to issue, in order, to update `count` chunks with room for `slots` of them on the device.

    Chunk c lives in slot c mod slots. Its fetch waits until the one before it in the slot is stored, its update for its
    fetch, its store for its update; nothing else waits, so with three slots one chunk comes in, one is updated and one
    goes out. ValueError for less than one slot.
    """
    if slots < 1:
        raise ValueError(f"offload: slots: got {slots}, want at least 1, such as 3")
    out: list[Action] = []
    number: dict[tuple[str, int], int] = {}

    def issue(kind: str, chunk: int, *after: tuple[str, int]) -> None:
        number[kind, chunk] = len(out)
        out.append(Action(kind, chunk, chunk % slots, tuple(number[item] for item in after if item in number)))

    for chunk in range(min(slots - 1, count)):
        issue("fetch", chunk)
    for chunk in range(count):
        ahead = chunk + slots - 1
        if ahead < count:
            issue("fetch", ahead, ("store", ahead - slots))
        issue("update", chunk, ("fetch", chunk))
        issue("store", chunk, ("update", chunk))
    return tuple(out)


def to_host(state: Tree) -> Tree:
    """The state in host memory, page-locked where there is CUDA, so that copies run beside computation.

    Made once, after `init` or a restore. Scalars stay on their device, copied. Without CUDA all of it is a plain copy.
    """

    def one(x: torch.Tensor) -> torch.Tensor:
        if not x.dim():
            return x.clone()
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=torch.cuda.is_available()).copy_(x)

    return tree.map(one, state)


class Offloaded:
    """`update(grads, state, params) -> (params, state)` of an optimizer whose state lies in host memory (`to_host`).

    The state is written in place and comes back as the same tensors; parameters are new tensors. `slots` chunks of up
    to `chunk_bytes` of state are on the device at a time (`device_bytes` in all), however large the state is.

    opt: one that updates every leaf on its own, such as `compressed(adamw(...))`; not a guard.  params, state: as they
    will be given, for shapes and device.  update: what runs for a chunk, e.g. jit(opt.update, donate=1), which writes
    the state where it was fetched to; None: opt.update.

    It is a step of its own beside the jitted one that makes the gradients: a compiled graph has one stream. Nothing
    waits for the host; before something else reads the state (a checkpoint), call `wait()`. The streams are run on
    CUDA; tensors on the CPU take the same way in order, which saves nothing and is for tests.
    ValueError for a guard, and for a state that cannot be cut into chunks.
    """

    def __init__(
        self,
        opt: Optimizer,
        params: Tree,
        state: Tree,
        *,
        chunk_bytes: int = 256 << 20,
        slots: int = 3,
        update: Callable | None = None,
    ) -> None:
        if opt.judges_norm:
            raise ValueError(
                "offload: got an optimizer that looks at all gradients (skip_nonfinite), want one that updates every"
                " leaf on its own; judge the norm in the step that makes the gradients"
            )
        self.update = opt.update if update is None else update
        self.chunks = chunks_of(params, state, chunk_bytes)
        self.actions = offload_schedule(len(self.chunks), slots)
        owned = {path for chunk in self.chunks for path in chunk.state}
        self.shared = [path for path in tree.paths(state) if path not in owned]
        self.device = tree.leaves(params)[0].device
        self.slots: list[dict[str, torch.Tensor]] = [{} for _ in range(min(slots, len(self.chunks)))]
        self.lanes = {}
        if self.device.type == "cuda":
            self.lanes = {kind: torch.cuda.Stream(self.device) for kind in ("fetch", "store")}

    @property
    def device_bytes(self) -> int:
        """Device memory that full slots take."""
        return len(self.slots) * max(chunk.nbytes for chunk in self.chunks)

    def __call__(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """One update of all chunks; see the class."""
        host = dict(zip(tree.paths(state), tree.leaves(state), strict=True))
        done: list[Any] = []
        new_params, shared = None, {}
        if self.lanes:  # what was stored last time is fetched now
            self.lanes["fetch"].wait_stream(self.lanes["store"])
        for action in self.actions:
            chunk = self.chunks[action.chunk]
            with self._lane(action.kind, [done[i] for i in action.after]):
                own = self.slots[action.slot]
                if action.kind == "fetch":
                    own.clear()  # stored, for the lane: it gives the memory to no other stream
                    for path in chunk.state:
                        own[path] = torch.empty_like(host[path], device=self.device)
                        own[path].copy_(host[path], non_blocking=True)
                elif action.kind == "update":
                    where = {path: x.data_ptr() for path, x in own.items()}
                    part = _part(state, {**own, **{path: host[path].clone() for path in self.shared}})
                    out, new = self.update(_part_of(grads, chunk.params), part, _part_of(params, chunk.params))
                    new_params = out if new_params is None else merge(new_params, out)
                    for path, x in zip(tree.paths(new), tree.leaves(new), strict=True):
                        if path not in own:
                            shared[path] = x
                        elif x.data_ptr() == where[path]:  # an update that donates: the old tensor is dead
                            own[path] = x
                        else:
                            own[path].copy_(x)
                else:
                    for path, x in own.items():
                        host[path].copy_(x, non_blocking=True)
                done.append(self._mark())
        for path, x in shared.items():
            host[path].copy_(x)
        return new_params, state

    def wait(self) -> None:
        """Return when the state in host memory is that of the last update."""
        for lane in self.lanes.values():
            lane.synchronize()

    def _lane(self, kind: str, events: list) -> Any:
        """The stream on which a kind of action runs, made to wait for events; the current one for updates."""
        lane = self.lanes.get(kind)
        stream = torch.cuda.current_stream(self.device) if self.lanes and lane is None else lane
        for event in events if self.lanes else ():
            stream.wait_event(event)
        return torch.cuda.stream(lane)

    def _mark(self) -> Any:
        """An event that has happened when what was issued so far on the current stream is done."""
        return torch.cuda.current_stream(self.device).record_event() if self.lanes else None


def _owner(path: str, params: dict[str, Any], state: set[str]) -> str | None:
    """The parameter whose path a path of the state ends with; of a leaf in blocks, without its end.

    Where several fit ("adam/m/w", of "w" or of "m/w"), the one in front of whose path the state has most parameters.
    """
    whole = path.removesuffix("/codes").removesuffix("/scale")
    if not {f"{whole}/codes", f"{whole}/scale"} <= state:
        whole = path

    def company(path: str) -> int:
        front = whole.removesuffix(path)
        return sum(front + other in state or f"{front}{other}/codes" in state for other in params)

    return max((p for p in params if whole.endswith("/" + p)), key=lambda p: (company(p), len(p)), default=None)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _part(state: Tree, found: dict[str, torch.Tensor]) -> Tree:
    """The tree with these leaves, None for the others."""
    return tree.map_with_path(lambda path, x: found.get(path), state)


def _part_of(x: Tree, paths: tuple[str, ...]) -> Tree:
    """The leaves at these paths, None for the others."""
    return tree.map_with_path(lambda path, leaf: leaf if path in paths else None, x)
