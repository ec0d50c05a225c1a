"""Donation: after a call the given leaves are invalidated; an interrupted call leaves all old or all new values.

The memory of a donated leaf goes on in another tensor, which the call returns. The tensor that the caller gave becomes
a `Donated`: whatever is done with it raises ValueError, and it holds no memory. Memory that somebody else has too (a
view, an array of numpy, an UntypedStorage, what autograd has saved) stays theirs: the step writes into a copy.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fmegatron.collectives import interrupt
from fmegatron.step.state import State, Unseen
from fmegatron.step.torch_private import storage_number, storage_uses, tensor_uses

__all__ = ["Donated", "Donation", "Leaf", "require_own_memory"]

_KEEP = "to keep old values, copy them before the call: tree.copies(state)"


@dataclass(frozen=True)
class Leaf:
    """A donated leaf, or a State that was donated whole. position: among the tensors of a call. path: "0/params/w".

    name: of the step. failure: what ended the call that it was given to, "" for a call that returned.
    """

    position: int
    path: str
    name: str
    failure: str = ""
    what: str = "tensor"

    def error(self) -> ValueError:
        """Why it cannot be read any more, and what to do."""
        if self.failure:
            return ValueError(
                f"leaf {self.path!r}: got a {self.what} that was donated to {self.name}, which failed after it had "
                f"begun to write ({self.failure}), wanted one that is old or new; restore a checkpoint; {_KEEP}"
            )
        return ValueError(
            f"leaf {self.path!r}: got a {self.what} that was donated to {self.name}, which has put new values into its "
            f"memory, wanted one that is alive; use what {self.name} returned; it is the .last of its jit; {_KEEP}"
        )


@dataclass
class Newest:
    """The newest living value of the one argument that a jit donates. position: of the argument, and of its new value
    among several results. given: that of the call under way."""

    position: int
    given: Any = None
    value: Any = None

    def returned(self, result: Any) -> None:
        """A call has returned this."""
        self.value = result[self.position] if type(result) is tuple else result

    def kept(self) -> None:
        """Nobody gets the result of the call under way."""
        self.value = self.given


class Donated(torch.Tensor):
    """What is left of a tensor that was donated: every use of it but its repr raises ValueError."""

    _leaf: Leaf

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        todo = [*args, *(kwargs or {}).values()]
        while todo:
            x = todo.pop(0)
            if isinstance(x, Donated):
                raise x._leaf.error()
            todo += x if isinstance(x, (list, tuple)) else ()
        raise ValueError(f"{func}: got a tensor that had been donated, wanted one that is alive; {_KEEP}")

    def __repr__(self):
        return f"<donated to {self._leaf.name}: {self._leaf.path!r}>"

    def as_subclass(self, cls):
        """ValueError, as every use; one of the few that torch does not ask the class about."""
        raise self._leaf.error()

    __dir__ = object.__dir__


class Donation:
    """The donated leaves of one signature of a step, and the calls with them.

    leaves: in the order of the tensors of a call. paths: of all tensors of a call. devices: of the leaves.
    written: of graphs that run op by op, the positions of the tensors into which their last outputs are written; then
    harmless: whether the graph itself writes into none.
    """

    written: Sequence[int] = ()
    harmless: bool = False

    def __init__(
        self,
        leaves: Sequence[Leaf],
        paths: Sequence[str],
        devices: Sequence[torch.device],
        newest: Newest | None = None,
    ):
        self.leaves, self.paths, self.newest = list(leaves), paths, newest
        self.positions = [leaf.position for leaf in self.leaves]
        self.devices = devices
        self.plain = [torch.Tensor] * len(self.leaves)
        # How often a tensor, its storage and the object for that are counted, of no one else.
        sample = torch.empty(1, device="cpu")
        memory = sample.untyped_storage()
        self.alone = tensor_uses(sample), storage_uses(storage_number(memory)), sys.getrefcount(memory)

    @functools.cached_property
    def empty(self) -> list[torch.Tensor]:
        """What the given leaves hold afterwards; made when a call ends, as compiling makes nothing on the device."""
        return [torch.empty(0, device=device) for device in self.devices]

    def call(self, run: Callable, tensors: list, finish: Callable) -> Any:
        """`finish(memory of the leaves with new values, outputs of run)`; the given leaves are dead then.

        An error of `run` leaves them dead too if one may have been written, and as they were if not. Ctrl-C is held
        back until all is done and raised then; nobody gets the result in that case, so the given leaves stay alive and
        have the new values.
        """
        old = [tensors[i] for i in self.positions]
        kinds = [*map(type, old)]
        if kinds != self.plain:
            self._require_mortal(old, kinds)
        new, held = self._memory(old, tensors)
        given = list(tensors)
        for i, x in zip(self.positions, new, strict=True):
            given[i] = x

        def end(failure: str) -> None:
            leaves = [replace(leaf, failure=failure) for leaf in self.leaves] if failure else self.leaves
            self._end(old, leaves, held)

        return self._call(run, given, new, finish, end, lambda: _revive(old, kinds, new, held))

    def call_whole(self, run: Callable, state: State, made: Unseen, rest: list, finish: Callable) -> Any:
        """`call` with a State that nobody has looked into: nobody else has its leaves, so nothing is asked of one.

        made: its inside, whose tensors go on as they are. rest: the other tensors of the call.
        """

        def end(failure: str) -> None:
            state.end(Leaf(0, "0", self.leaves[0].name, failure, "State").error())

        return self._call(run, [*made.leaves, *rest], made.leaves, finish, end, lambda: state.revive(made))

    def _call(self, run: Callable, given: list, new: list, finish: Callable, end: Callable, revive: Callable) -> Any:
        safe, ran = self.harmless, False
        try:
            with interrupt.held_interrupt():
                with torch.no_grad():
                    outs = run(*given)
                    safe = False
                    outs = self._write(given, outs) if self.written else outs
                ran = True
                result = finish(new, outs)
                end("")
                # Here, where nothing interrupts: between the end of this call and the caller's `state =` it is lost.
                if self.newest is not None:
                    self.newest.returned(result)
            return result
        except BaseException as error:
            if self.newest is not None:
                self.newest.kept()
            if ran:
                revive()
            elif not safe:
                end(f"{type(error).__name__}: {error}".rstrip(": "))
                error.add_note(f"{self.leaves[0].name} had begun to write into its donated argument, which is lost.")
            raise

    def _memory(self, old: list, tensors: list) -> tuple[list, list[int]]:
        """(the memory that is written for each leaf; which leaves keep theirs, because others have them as tensors).

        A leaf whose memory others have too is given a copy of it.
        """
        tensor, storage, object_ = self.alone
        if len({*map(id, tensors)}) == len(tensors):
            for x in old:
                memory = x.untyped_storage()
                shared = storage_uses(storage_number(memory)) != storage or tensor_uses(x) != tensor
                if shared or sys.getrefcount(memory) != object_ or not memory.resizable():
                    break
            else:
                return [x.data for x in old], []
        require_own_memory(tensors, self.paths, self.positions)
        count = collections.Counter(storage_number(x.untyped_storage()) for x in tensors)
        pieces = {one for one, n in count.items() if storage_uses(one) - storage < n}  # all of them are given
        new, held = [], []
        for i, x in enumerate(old):
            memory = x.untyped_storage()
            if tensor_uses(x) != tensor:
                held.append(i)
                new.append(_copied(x.data))
                continue
            held_by_others = storage_number(memory) not in pieces or sys.getrefcount(memory) != object_
            if held_by_others or not memory.resizable():  # numpy, a file, a process or an UntypedStorage has it
                x.data = _copied(x.data)
            new.append(x.data)
        return new, held

    def _write(self, given: list, outs: Sequence) -> Sequence:
        first = len(outs) - len(self.written)
        for i, x in zip(self.written, outs[first:], strict=True):
            given[i].copy_(x)
        return outs[:first]

    def _end(self, old: list, leaves: list[Leaf], held: list[int]) -> None:
        kept = {id(old[i]) for i in held}
        for x, leaf, empty in zip(old, leaves, self.empty, strict=True):
            if not kept or id(x) not in kept:
                x.data = empty
            x.__class__ = Donated
            x._leaf = leaf

    def _require_mortal(self, old: list, kinds: list) -> None:
        for x, kind, leaf in zip(old, kinds, self.leaves, strict=True):
            try:
                x.__class__ = Donated
                x.__class__ = kind
            except TypeError as error:
                raise ValueError(
                    f"donated leaf {leaf.path!r}: got a {kind.__name__}, wanted a plain tensor ({error}); give "
                    "x.as_subclass(torch.Tensor)"
                ) from None


def _revive(old: list, kinds: list, new: list, held: list[int]) -> None:
    for x, kind, y in zip(old, kinds, new, strict=True):
        x.__class__ = kind
        x.data = y
    torch.autograd.graph.increment_version([old[i] for i in held])


def _copied(x: torch.Tensor) -> torch.Tensor:
    pinned = x.device.type == "cpu" and x.is_pinned()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, pin_memory=pinned).copy_(x)


def require_own_memory(tensors: list, paths: Sequence[str], donated: Sequence[int]) -> None:
    """Donated leaves are written while others are still read, so none may share memory with another argument."""
    spans = []
    for i, t in enumerate(tensors):
        steps = [(size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)]
        if i in donated and any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
            raise ValueError(
                f"donated leaf {paths[i]!r}: got an expanded tensor, wanted memory for each element; donate a .clone()"
            )
        if t.numel():
            spans.append((t.data_ptr(), t.data_ptr() + (sum(steps) + 1) * t.element_size(), i))
    behind, last = -1, -1  # where the memory ends that was seen so far, and whose that end is
    for start, end, i in sorted(spans):
        if start < behind and (i in donated or last in donated):
            raise ValueError(
                f"leaves {paths[last]!r} and {paths[i]!r}: got shared memory of which one is donated, wanted memory of "
                "their own, as writing one would change the other; pass a .clone() of one"
            )
        behind, last = max((behind, last), (end, i))
