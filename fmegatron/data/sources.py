"""Other people's data: sources with `len` and `[i]`, maps of samples, and iterators that know their state."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from fmegatron.data.contract import Source
from fmegatron.data.order import shuffled
from fmegatron.data.steps import StepBatches, check_sizes, require_from_start, whole
from fmegatron.data.stored import digest_of
from fmegatron.tree import structure

Row = dict[str, np.ndarray]
_IGNORED = -100  # a label that is none, of Hugging Face and of torch's cross_entropy
_LOOKED_AT = 16  # items of a source that its description looks at


class Items(Protocol):
    """A grain.MapDataset, a datasets.Dataset, a list: what has a length and items by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Stateful(Protocol):
    """An iterable that knows where it is."""

    def __iter__(self) -> Iterator: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> None: ...


@dataclass(frozen=True, eq=False)
class SourceBatches(StepBatches):
    """Training batches of a random-access source: each item a row, each once an epoch, in an order that (seed, epoch)
    fixes.

    An item is an array of ids [n], n up to seq_len + 1, or a mapping of arrays [n] with "tokens", n up to seq_len, and
    perhaps "labels" (else the tokens that follow), "mask", "positions", "documents", "padding", and other integers.
    Rows are padded with zeros: "padding" is True there, "mask" False there and where there is no label. A mask is of 0
    and 1 in any dtype; a label of -100 is none. Other fields of an item (texts) are left out; all items have the same.
    shuffle: False for the order of the source. Raises ValueError for an empty source, and, when they are read, for
    items that are longer, of another form or of negative ids.

    >>> batches = SourceBatches([[1, 2, 3], [4, 5, 6, 7]], batch_size=2, seq_len=4, seed=0, shuffle=False)
    >>> batches.at(0)["tokens"].tolist(), batches.at(0)["mask"].tolist()
    ([[1, 2, 0, 0], [4, 5, 6, 0]], [[True, True, False, False], [True, True, True, False]])
    """

    source: Items
    batch_size: int
    seq_len: int
    seed: int
    shuffle: bool = True
    offset: int = 0
    zigzag: int = 1

    def __post_init__(self) -> None:
        check_sizes(self)
        if not hasattr(self.source, "__getitem__") or not hasattr(self.source, "__len__") or not len(self.source):
            raise ValueError(
                f"SourceBatches: source: got {structure.in_words(self.source)}, wanted items by number, source[i], and "
                "a length above 0; give an iterable to data.Stream"
            )

    @property
    def windows(self) -> int:
        """Number of rows in an epoch."""
        return len(self.source)

    def read(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays [n, S] of the samples of these numbers, int64 [n]."""
        size = len(self.source)
        numbers = shuffled(self.seed, size, samples) if self.shuffle else samples % size
        rows = [row_of(self.source[number], self.seq_len, f"item {number}") for number in numbers.tolist()]
        for number, row in zip(numbers.tolist(), rows, strict=True):
            if row.keys() != rows[0].keys():
                raise ValueError(
                    f"item {number}: got the fields {', '.join(sorted(row))}, wanted those of item {numbers[0]}, "
                    f"{', '.join(sorted(rows[0]))}; map the source to items of the same fields"
                )
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def describe(self) -> dict[str, Any]:
        """What a checkpoint states of this data, as JSON."""
        size = len(self.source)
        places = sorted({i * (size - 1) // (_LOOKED_AT - 1) for i in range(_LOOKED_AT)})
        rows = [row_of(self.source[i], self.seq_len, f"item {i}") for i in places]
        return {"kind": "source", "items": size, "digest": digest_of(*(x for row in rows for x in row.values())),
                "seq_len": self.seq_len, "seed": self.seed, "shuffle": self.shuffle}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Mapped(StepBatches):
    """Batches whose rows went through a pure function: row n is `function(row, n)`.

    function: (row of arrays [S], number of the sample) -> such a row; what is random in it must be a function of the
    number (`FillInTheMiddle` is). It gets copies. batch_size: default that of the batches.
    """

    batches: StepBatches
    function: Callable[[Row, int], Row]
    offset: int = 0  # see `after`
    batch_size: int = 0
    seq_len: int = field(init=False)
    zigzag: int = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.batches, StepBatches) or not callable(self.function):
            raise ValueError(
                f"Mapped: got {structure.in_words(self.batches)}, wanted Batches, and a function of (row, number)"
            )
        require_from_start(self.batches, "Mapped: batches")
        object.__setattr__(self, "batch_size", self.batch_size or self.batches.batch_size)
        for name in ("seq_len", "zigzag"):
            object.__setattr__(self, name, getattr(self.batches, name))

    def read(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays [n, S] of the samples of these numbers, int64 [n]."""
        given = self.batches.read(samples)
        rows = [
            self.function({name: x[row].copy() for name, x in given.items()}, number)
            for row, number in enumerate(samples.tolist())
        ]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def describe(self) -> dict[str, Any]:
        """What a checkpoint states of this data, as JSON: the function by its text."""
        try:
            named = _named(self.function)
        except RecursionError:
            raise ValueError(
                f"Mapped: function: got {structure.in_words(self.function)}, which closes over itself, wanted one that "
                "a resume can compare; give a dataclass with __call__"
            ) from None
        return {"kind": "mapped", "function": named, "of": self.batches.describe()}


def _named(function: Any) -> str:
    """A function's text, the same in every process: its name, and what it closes over. ValueError where there is none,
    and for a lambda, as all of them have one name."""
    if isinstance(function, functools.partial):
        given = [_text(x) for x in function.args] + [f"{k}={_text(x)}" for k, x in sorted(function.keywords.items())]
        named = f"partial({', '.join([_named(function.func), *given])})"
    elif isinstance(function, types.MethodType):
        named = f"{_text(function.__self__)}.{function.__func__.__qualname__}"
    elif isinstance(function, types.FunctionType):
        if function.__name__ == "<lambda>":
            raise ValueError(
                "Mapped: function: got a lambda, which another one cannot be told from, wanted one that a resume can "
                "compare; give a function with a name (def), or a dataclass with __call__"
            )
        default = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        values = dict(zip(function.__code__.co_freevars, map(_text, held), strict=True))
        values |= {"defaults": str([_text(x) for x in default])} if default else {}
        named = function.__qualname__ + (f" with {values}" if values else "")
    else:
        named = _text(function)
    if " at 0x" in named:
        raise ValueError(
            f"Mapped: function: got {named:.80}, whose text is another in every process, wanted one that a resume can "
            "compare; give it a __repr__ (a dataclass has one)"
        )
    return named


def _has_arrays(x: Any) -> bool:
    if isinstance(x, list | tuple | dict):
        return any(map(_has_arrays, x.values() if isinstance(x, dict) else x))
    return isinstance(x, np.ndarray | torch.Tensor)


def _text(x: Any) -> str:
    """A text of a value that a function uses, which another value does not have."""
    if isinstance(x, np.ndarray | torch.Tensor):
        elements = (
            x
            if isinstance(x, np.ndarray)
            else x.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
        )
        return f"{type(x).__name__} {x.dtype}{list(x.shape)} {digest_of(elements)}"
    if isinstance(x, types.FunctionType | functools.partial | types.MethodType):
        return _named(x)
    if isinstance(x, set | frozenset) and not all(isinstance(one, int) for one in x):  # of another order each time
        return f"{type(x).__name__}({', '.join(sorted(map(_text, x)))})"
    if isinstance(x, list | tuple | dict) and _has_arrays(x):  # whose repr leaves elements out
        inside = [f"{key!r}: {_text(y)}" for key, y in x.items()] if isinstance(x, dict) else map(_text, x)
        return f"{type(x).__name__}({', '.join(inside)})"
    return getattr(x, "__qualname__", None) or repr(x)


class Stream(Source):
    """An iterable with a state, such as torchdata's StatefulDataLoader or a streaming `datasets`, as a source.

        for info in run(data.Stream(loader), steps=1000):
            ...

    An item is the batch of a position, of all ranks together: every rank has the same iterable, reads all of it and is
    given its rows by the run, which saves the iterable's state (a JSON value) with each checkpoint. Who wants a rank to
    read less writes a `Source` with `rows`. A new epoch begins where the iterable ends.
    Raises ValueError for an iterable without `state_dict` and `load_state_dict`.
    """

    def __init__(self, iterable: Stateful) -> None:
        for name in ("state_dict", "load_state_dict", "__iter__"):
            if not hasattr(iterable, name):
                raise ValueError(
                    f"Stream: got {structure.in_words(iterable)} without {name}, wanted an iterable with state_dict "
                    "and load_state_dict (torchdata.stateful_dataloader, datasets.IterableDataset)"
                )
        self._iterable, self._next = iterable, 0
        self._iterator: Iterator | None = None

    def at(self, position: int) -> structure.Tree:
        """The next batch, which must be that of this position.

        Raises ValueError for another position: an iterable cannot go back; RuntimeError for an iterable that is empty.
        """
        if whole(position, "Stream.at: position") != self._next:
            raise ValueError(
                f"Stream.at: got position {position}, wanted {self._next}, as an iterable only goes on; restore(state) "
                "goes where the state was taken"
            )
        for _ in range(2):
            self._iterator = iter(self._iterable) if self._iterator is None else self._iterator
            try:
                item = next(self._iterator)
                break
            except StopIteration:
                self._iterator = None
        else:
            raise RuntimeError("Stream.at: the iterable has no item in a new epoch; give one that is not used up")
        self._next += 1
        return item

    def state(self) -> dict[str, Any]:
        """The next position, and the iterable's own state: {"next", "iterable"}."""
        return {"next": self._next, "iterable": copy.deepcopy(self._iterable.state_dict())}  # it may go on to change it

    def restore(self, state: dict[str, Any]) -> None:
        """Go on behind the batch after which `state` was given."""
        self._iterable.load_state_dict(copy.deepcopy(state["iterable"]))
        self._next, self._iterator = state["next"], None


def row_of(item: Any, length: int, where: str) -> Row:
    """An item of a source as a row of arrays [S] (see `SourceBatches`)."""
    arrays = _arrays(item, where)
    n = len(arrays["tokens"])
    if n > length or any(len(x) != n for x in arrays.values()):
        raise ValueError(
            f"{where}: got {', '.join(f'{len(x)} of {name!r}' for name, x in arrays.items())}, wanted arrays of one "
            f"length, at most seq_len={length}; cut it in the source"
        )
    if "labels" not in arrays:
        arrays["labels"] = np.append(arrays["tokens"][1:], np.int64(_IGNORED))[:n]
    mask = arrays["labels"] != _IGNORED
    arrays["labels"] = np.where(mask, arrays["labels"], 0)
    padding = arrays["padding"] if "padding" in arrays else np.zeros(n, dtype=bool)
    arrays["padding"] = np.concatenate([padding, np.ones(length - n, dtype=bool)])
    mask &= ~padding
    arrays["mask"] = mask & arrays["mask"] if "mask" in arrays else mask
    for name in ("tokens", "labels"):
        _check_ids(arrays[name], name, where)
    return {
        name: np.concatenate([x, np.zeros(length - n, dtype=x.dtype)]) if len(x) < length else x
        for name, x in arrays.items()
    }


def _arrays(item: Any, where: str) -> Row:
    if isinstance(item, Mapping):
        if "tokens" not in item:
            raise ValueError(f"{where}: got the fields {', '.join(map(str, item))}, wanted 'tokens' among them; map "
                             "the source to items with it")  # fmt: skip
        found = {}
        for name, value in item.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value = value.double()  # numpy has no bfloat16
            x = np.asarray(value) if hasattr(value, "__len__") and not isinstance(value, str) else np.zeros(0, "U1")
            if name in ("mask", "padding"):
                found[name] = _zeros_and_ones(x, name, value, where)
            elif x.ndim == 1 and (x.dtype.kind in "iub" or not x.size):
                found[name] = x.astype(bool if x.dtype.kind == "b" else np.int64)
            elif name == "labels":
                raise ValueError(f"{where}: got 'labels' as {structure.in_words(value)}, wanted integers [n]")
        if "tokens" not in found or found["tokens"].dtype != np.int64:
            raise ValueError(f"{where}: got 'tokens' as {structure.in_words(item['tokens'])}, wanted integers [n]")
        known = ("tokens", "labels", "mask", "padding", *(() if found["tokens"].size else ("positions", "documents")))
        return {name: x for name, x in found.items() if x.size or name in known}
    ids = np.asarray(item)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{where}: got {structure.in_words(item)}, wanted ids [n], or a mapping with 'tokens'")
    ids = ids.astype(np.int64)
    _check_ids(ids, "tokens", where)
    if len(ids) > 1:
        return {"tokens": ids[:-1], "labels": ids[1:]}
    return {"tokens": ids, "labels": np.full_like(ids, _IGNORED)}


def _check_ids(ids: np.ndarray, name: str, where: str) -> None:
    if ids.size and ids.min() < 0:
        raise ValueError(
            f"{where}: got {ids.min()} in {name!r}, wanted ids of 0 or more; only labels, beside 'tokens', may be "
            f"{_IGNORED}, which is none"
        )


def _zeros_and_ones(x: np.ndarray, name: str, given: Any, where: str) -> np.ndarray:
    """A mask as bool [n]."""
    if x.ndim != 1 or x.size and x.dtype.kind not in "biuf":
        raise ValueError(f"{where}: got {name!r} as {structure.in_words(given)}, wanted numbers 0 and 1 [n]")
    if x.size and (other := x[(x != 0) & (x != 1)]).size:
        raise ValueError(f"{where}: got {other[0]} in {name!r}, wanted 0 and 1; make weights of tokens a mask")
    return x.astype(bool)
