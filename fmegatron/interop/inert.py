"""Pickles read as data: a machine for pickle's instructions that has nothing to call anything with.

Python's own unpickler imports and calls what a file names, and even with a guarded `find_class` it sets attributes of
whatever the file likes. This one builds lists, dicts, strings, numbers and `Record`s that mean "global X with these
arguments and this state". A global that the caller does not allow is an error that names it. Memory and time are
bounded by the size of the file: nothing is expanded, no size in the file is believed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any


class UnsafePickle(ValueError):
    """A pickle that is damaged, or that asks for something that plain data does not need."""


class Global:
    """The name of a class or function: never looked up, never called."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name[:80]}>"


class Record:
    """What a pickle states of an object: which global, called with what, and the state it was given."""

    __slots__ = ("name", "args", "state")

    def __init__(self, name: str, args: Any, state: Any = None):
        self.name, self.args, self.state = name, args, state

    def __repr__(self) -> str:
        return f"<a {self.name[:80]}>"


class Persistent:
    """A reference to something outside the pickle (a torch storage)."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def describe(value: Any) -> str:
    """A few words for an error message. Never `repr` of what a file holds: nested containers can take forever."""
    return repr(value) if isinstance(value, Global | Record) else f"a {type(value).__name__}"


_MEMBER = "builtins.getattr"  # of an enum, as Python 3.11.0 to 3.11.3 writes it: by name
_EMPTY_DICTS = frozenset({"collections.OrderedDict", "builtins.dict"})
_SEQUENCES = frozenset({"torch.Size", "builtins.tuple"})
_SCALARS = frozenset({str, int, bool, float, bytes, type(None)})
_MARK = object()


def load(data: bytes, allowed: Collection[str] | Callable[[str], bool], where: str) -> Any:
    """The value of a pickle, inert. allowed: names ("module.name") of the globals that may be mentioned.

    torch.Size becomes a tuple and an OrderedDict a dict; every other object is a Record. Raises UnsafePickle, which
    names `where` and what was found there.
    """
    try:
        return _Machine(data, allowed if callable(allowed) else allowed.__contains__, where).run()
    except UnsafePickle:
        raise
    except (IndexError, struct.error, ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
        raise UnsafePickle(
            f"{where}: not a whole pickle of plain data ({type(error).__name__}: {error!s:.100})"
        ) from None


class _Machine:
    """Pickle protocols 2 to 5: a stack, a memo, and a position in the data."""

    def __init__(self, data: bytes, allowed: Callable[[str], bool], where: str):
        self.data, self.allowed, self.where, self.at = data, allowed, where, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Carry out instructions until the one that ends it."""
        data, size = self.data, len(self.data)
        table = {code[0]: getattr(self, name) for code, name in _CODES}
        while self.at < size:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self.stack.pop()
            step = table.get(code)
            if step is None:
                raise self.error(f"instruction {bytes([code])!r}, which plain data does not need")
            step()
        raise self.error("no end")

    def error(self, what: str) -> UnsafePickle:
        return UnsafePickle(f"{self.where}: got {what} at byte {self.at}; refused, nothing was executed")

    # ---- numbers and texts that follow an instruction

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise self.error("an end in the middle")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, n: int) -> int:
        return int.from_bytes(self.take(n), "little")

    def line(self) -> str:
        stop = self.data.index(b"\n", self.at)
        text = self.data[self.at : stop].decode()
        self.at = stop + 1
        return text

    def since_mark(self) -> list[Any]:
        stack = self.stack
        i = len(stack) - 1
        while stack[i] is not _MARK:
            i -= 1
            if i < 0:
                raise self.error("items without a mark")
        items = stack[i + 1 :]
        del stack[i:]
        return items

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise self.error(f"an instruction for a {kind.__name__} on a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    # ---- instructions

    def proto(self) -> None:
        if self.number(1) > 5:
            raise self.error("a protocol above 5")

    def frame(self) -> None:
        self.take(8)

    def mark(self) -> None:
        self.stack.append(_MARK)

    def pop(self) -> None:
        self.stack.pop()

    def pop_mark(self) -> None:
        self.since_mark()

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def int1(self) -> None:
        self.stack.append(self.number(1))

    def int2(self) -> None:
        self.stack.append(self.number(2))

    def int4(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def long1(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.number(1)), "little", signed=True))

    def long4(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.number(4)), "little", signed=True))

    def double(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def text1(self) -> None:
        self.stack.append(self.take(self.number(1)).decode("utf-8", "surrogatepass"))

    def text4(self) -> None:
        self.stack.append(self.take(self.number(4)).decode("utf-8", "surrogatepass"))

    def text8(self) -> None:
        self.stack.append(self.take(self.number(8)).decode("utf-8", "surrogatepass"))

    def bytes1(self) -> None:
        self.stack.append(self.take(self.number(1)))

    def bytes4(self) -> None:
        self.stack.append(self.take(self.number(4)))

    def bytes8(self) -> None:
        self.stack.append(self.take(self.number(8)))

    def empty_tuple(self) -> None:
        self.stack.append(())

    def tuple1(self) -> None:
        self.stack[-1:] = [tuple(self.stack[-1:])]

    def tuple2(self) -> None:
        self.stack[-2:] = [tuple(self.stack[-2:])]

    def tuple3(self) -> None:
        self.stack[-3:] = [tuple(self.stack[-3:])]

    def marked_tuple(self) -> None:
        self.stack.append(tuple(self.since_mark()))

    def empty_list(self) -> None:
        self.stack.append([])

    def append(self) -> None:
        item = self.stack.pop()
        self.top(list).append(item)

    def appends(self) -> None:
        items = self.since_mark()
        self.top(list).extend(items)

    def empty_dict(self) -> None:
        self.stack.append({})

    def set_item(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._update(items)

    def set_items(self) -> None:
        self._update(self.since_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Keys of flat content only: hashing nested tuples can take time without end.
            if type(key) not in _SCALARS and type(key) is not Record:
                if type(key) is not tuple or any(type(part) not in _SCALARS for part in key):
                    raise self.error(f"a {type(key).__name__} as the key of a dict")
            target[key] = value

    def put1(self) -> None:
        self.memo[self.number(1)] = self.stack[-1]

    def put4(self) -> None:
        self.memo[self.number(4)] = self.stack[-1]

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get1(self) -> None:
        self.stack.append(self.memo[self.number(1)])

    def get4(self) -> None:
        self.stack.append(self.memo[self.number(4)])

    def global_line(self) -> None:
        module = self.line()
        self._global(module, self.line())

    def global_stack(self) -> None:
        module, name = self.stack[-2:]
        del self.stack[-2:]
        self._global(module, name)

    def _global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self.error("a global whose name is no text")
        if f"{module}.{name}" != _MEMBER and not self.allowed(f"{module}.{name}"):
            raise self.error(f"the global {module[:80]}.{name[:80]}, which is not on the list of plain data")
        self.stack.append(Global(f"{module}.{name}"))

    def call(self) -> None:
        args = self.stack.pop()
        name = self.top(Global).name
        if type(args) is not tuple:
            raise self.error("arguments that are no tuple")
        if name == _MEMBER:
            if len(args) != 2 or type(args[0]) is not Global or type(args[1]) is not str or args[0].name == _MEMBER:
                raise self.error(f"{_MEMBER} of something else than a class of the list and the name of a member")
            value: Any = Record(args[0].name, (args[1],))
        elif name in _EMPTY_DICTS and not args:
            value = {}
        elif name in _SEQUENCES and len(args) == 1 and type(args[0]) in (tuple, list):
            value = tuple(args[0])
        else:
            value = Record(name, args)
        self.stack[-1] = value

    def new_with_names(self) -> None:
        names = self.stack.pop()
        if names != {}:
            raise self.error("named arguments")
        self.call()

    def build(self) -> None:
        state = self.stack.pop()
        self.top(Record).state = state

    def persistent(self) -> None:
        self.stack[-1] = Persistent(self.stack[-1])


_CODES = (
    (b"\x80", "proto"),
    (b"\x95", "frame"),
    (b"(", "mark"),
    (b"0", "pop"),
    (b"1", "pop_mark"),
    (b"N", "none"),
    (b"\x88", "true"),
    (b"\x89", "false"),
    (b"K", "int1"),
    (b"M", "int2"),
    (b"J", "int4"),
    (b"\x8a", "long1"),
    (b"\x8b", "long4"),
    (b"G", "double"),
    (b"\x8c", "text1"),
    (b"X", "text4"),
    (b"\x8d", "text8"),
    (b"C", "bytes1"),
    (b"B", "bytes4"),
    (b"\x8e", "bytes8"),
    (b")", "empty_tuple"),
    (b"\x85", "tuple1"),
    (b"\x86", "tuple2"),
    (b"\x87", "tuple3"),
    (b"t", "marked_tuple"),
    (b"]", "empty_list"),
    (b"a", "append"),
    (b"e", "appends"),
    (b"}", "empty_dict"),
    (b"s", "set_item"),
    (b"u", "set_items"),
    (b"q", "put1"),
    (b"r", "put4"),
    (b"\x94", "memoize"),
    (b"h", "get1"),
    (b"j", "get4"),
    (b"c", "global_line"),
    (b"\x93", "global_stack"),
    (b"R", "call"),
    (b"\x81", "call"),
    (b"\x92", "new_with_names"),
    (b"b", "build"),
    (b"Q", "persistent"),
)
