"""Source: what a run reads, a class with defaults; own data subclass it."""

from __future__ import annotations

import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fmegatron.data import closures
from fmegatron.tree import arrivals, structure

Ranges = tuple[tuple[int, int], ...]  # (start, stop) of rows or columns, in the order in which a rank holds them


class Source(ABC):
    """Batches by position. Update n reads position n - 1, so that a resumed run reads what the first would have read.

        class Pairs(data.Source):
            def at(self, position):
                draw = torch.Generator().manual_seed(position)
                return {"image": torch.randn(64, 96, generator=draw), "text": torch.randn(64, 64, generator=draw)}

        run(Pairs(), steps=1000)

    A batch is a tree of tensors in host memory, of all ranks together. The run gives each rank its rows, puts them on
    its device and makes the next batches in a thread while a step runs: a source knows no rank and no device. `at` is
    all that a source needs; the other methods have defaults. A source that wraps another one hands on all five.
    """

    @abstractmethod
    def at(self, position: int) -> structure.Tree:
        """The batch of a position (0, 1, 2 …), all rows of all ranks."""

    def rows(self, position: int, ranges: Ranges) -> structure.Tree | None:
        """Some rows of the batch of a position, for sources that can read less than all: the ranges (start, stop) of
        dim 0, one after the other. None, the default: `at` is asked, and cut.

        Asked where the number of rows is known before the batch is read: of `data.Batches`, and of other sources by a
        run that has a `step.Description`. All arrays of such a batch have the same rows in dim 0.
        """
        return None

    def describe(self) -> dict[str, Any] | None:
        """What these data are, as JSON values: a checkpoint states it, and a resume with data that state something
        else is refused by what differs. None: nothing is stated.
        """
        return None

    def state(self) -> structure.Tree | None:
        """A JSON value that `restore` goes on from behind the last batch that was given. None: a position determines
        the batch. Either always None, or never.

        The run asks after each batch, and keeps in a checkpoint the state behind the batch that was used, whatever was
        read ahead: one for each rank.
        """
        return None

    def restore(self, state: structure.Tree) -> None:
        """Go on behind the batch after which `state` was given."""
        raise TypeError(
            f"{type(self).__name__}.restore: got a state and a class without this method, wanted one; a source "
            "with a state() goes on from it"
        )


@dataclass(frozen=True, eq=False)
class _Function(Source):
    function: Callable[[int], structure.Tree]
    _before: list[dict[str, str]] = field(default_factory=list, init=False)  # what a call changes, as it was before

    def at(self, position: int) -> structure.Tree:
        if self._before:
            return self.function(position)
        values = closures.used(self.function)
        batch = self.function(position)
        after = closures.used(self.function)
        self._before.append({name: text for name, text in values.items() if after.get(name) != text})
        return batch

    @property
    def written(self) -> tuple[str, ...]:
        """The names of what the first call has changed: its batches cannot follow from what was in it."""
        return tuple(sorted(name for before in self._before for name in before))

    def describe(self) -> dict[str, Any] | None:
        values = closures.used(self.function)
        for before in self._before:
            values |= before
        return {"kind": "function", "uses": values} if values else None


def source(function: Callable[[int], structure.Tree]) -> Source:
    """The source of a pure function from position to the batch of all ranks; a decorator, too.

    It states the numbers, texts and arrays that the function uses beside its argument (closes over, has as defaults,
    reads of its module), and functions that it closes over or calls in its module, so that a resume with another of
    them is refused; a name that only one of the two has is named. What the first call changes (a buffer that it fills)
    is stated as it was before, and its elements are not compared. Lists, dicts and
    objects are not compared, nor is the function's text: a class with `describe` states more.

    >>> @source
    ... def squares(position):
    ...     return {"x": torch.arange(4) + position}
    >>> squares.at(2)["x"].tolist()
    [2, 3, 4, 5]
    """
    if not callable(function) or isinstance(function, Source):
        raise ValueError(
            f"source: got {structure.in_words(function)}, wanted a function from position to a batch; a data.Source "
            "needs none"
        )
    return _Function(function)


def written_by(given: Source) -> tuple[str, ...]:
    """The names of what a function of data uses and has written to: a resume does not compare what is in them."""
    return given.written if isinstance(given, _Function) else ()


def source_name(given: Source) -> str:
    """How a source is called in messages: by its class, or by the function that it is made of."""
    if isinstance(given, _Function):
        of = given.function
        return of.__qualname__ if isinstance(of, types.FunctionType) else f"source of a {type(of).__name__}"
    return type(given).__name__


def source_file(given: Source) -> str | None:
    """The file of its class, or of the function that it is made of; None where it has none."""
    of = given.function if isinstance(given, _Function) else type(given)
    try:
        return inspect.getsourcefile(of)
    except TypeError:  # of a prompt, or an object that is called
        return None


def require_source(given: Any, who: str) -> Source:
    """What was given; ValueError for another value, such as a function."""
    if isinstance(given, Source):
        return given
    fix = "data.Batches, or an object of a subclass of data.Source"
    if callable(given):
        fix = "data.source(function), whose function gives the batch of all ranks"
    raise ValueError(f"{who}: got {structure.in_words(given)}, wanted a data.Source; give {fix}")


@dataclass(frozen=True, eq=False)
class Placed(Source):
    """A source whose arrays are put on a device; layouts that are known stay known."""

    source: Source
    device: torch.device
    arrivals: arrivals.Arrivals = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "arrivals", arrivals.Arrivals(self.device))

    def at(self, position: int) -> structure.Tree:
        return self.arrivals(self.source.at(position))
