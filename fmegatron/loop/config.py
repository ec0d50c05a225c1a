"""Metadata of a Config's fields: their range, and whether a resumed run may change them.

@dataclass(frozen=True)
class Config:
    heads: int = field(6, resume="refused", least=1)  # changes the function, or the order of data
    lr: float = field(2e-3, resume="named", above=0)  # meant to be changed by who knows what follows
    prompts: tuple[str, ...] = field(("ROMEO:",), resume="free")  # changes what is shown and kept
    __post_init__ = check
"""

import dataclasses
import numbers
import os
import types
import typing
from typing import Any, Literal, TypeVar

# An instance of the dataclass that an experiment defines; each experiment has its own.
Config = Any
T = TypeVar("T")
CLASSES = ("refused", "named", "free")


class UsageError(ValueError):
    """A command line that does not fit the `Config`; the message states what was wrong and names the nearest flag."""


def field(default: T, *, resume: str = "refused", least: float | None = None, above: float | None = None) -> T:
    """A field of a frozen dataclass with a default, as `dataclasses.field`, that also states what holds for its value.

    resume: what happens when a run is resumed with another value: "refused" unless it is allowed by name, "named" in
    what is printed, or "free". A field that states none is refused, a Mesh named: any mesh gives the same state. least,
    above: the value, of text and tuples their length, is at least, or above, this number.
    """
    if resume not in CLASSES:
        raise ValueError(f"field: resume: got {resume!r}, wanted one of {', '.join(CLASSES)}")
    return dataclasses.field(default=default, metadata={"resume": resume, "least": least, "above": above})


def check(config: Config) -> None:
    """Raise ValueError, naming the field, for a value of a Config of the wrong type or outside of its range.

    To be called when a Config is made: `__post_init__ = check`, or in an own `__post_init__`. Values that mean the same
    become what the field has: a list a tuple, a Path a str, a whole number a float, numpy's numbers Python's.
    """
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        if not item.init:
            continue
        name, value = f"{type(config).__name__}.{item.name}", getattr(config, item.name)
        try:
            fitting = _fitting(value, hints[item.name])
        except TypeError:
            raise ValueError(
                f"{name}: got {value!r:.80} of type {type(value).__name__}, wanted {type_name(hints[item.name])}"
            ) from None
        least, above = item.metadata.get("least"), item.metadata.get("above")
        size, unit = _size(fitting)
        if least is not None and size is not None and not size >= least:
            raise ValueError(f"{name}: got {fitting!r:.80}, wanted at least {least}{unit}")
        if above is not None and size is not None and not size > above:
            raise ValueError(f"{name}: got {fitting!r:.80}, wanted a number{unit and f' of{unit}'} above {above}")
        if fitting is not value:
            object.__setattr__(config, item.name, fitting)


def _size(value: Any) -> tuple[Any, str]:
    """What `least` and `above` are compared with, and its unit: a number itself; of text and tuples the length."""
    if isinstance(value, str | tuple):
        return len(value), " characters" if isinstance(value, str) else " values"
    return value, ""


def type_name(hint: Any) -> str:
    """How a type is called in messages: `int`, `tuple[str, ...]`."""
    return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)


def _fitting(value: Any, hint: Any) -> Any:
    """The value as the type that a field asks for; TypeError where it is of another."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _fitting(value, option)
            except TypeError:
                continue
        raise TypeError
    if origin is Literal:
        for option in arguments:
            if type(option) is type(value) and option == value:
                return value
        raise TypeError
    if origin is tuple and isinstance(value, tuple | list):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(arguments) != len(value):
            raise TypeError
        fitting = tuple(_fitting(item, wanted) for item, wanted in zip(value, arguments, strict=True))
        same = type(value) is tuple and all(new is old for new, old in zip(fitting, value, strict=True))
        return value if same else fitting
    if hint in (int, float) and isinstance(value, bool):
        raise TypeError
    if hint is int and isinstance(value, numbers.Integral):
        return value if type(value) is int else int(value)
    if hint is float and isinstance(value, numbers.Real):
        return value if type(value) is float else float(value)
    if hint is bool and type(value).__name__ == "bool":  # numpy's, too
        return value if value is True or value is False else bool(value)
    if hint is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    wanted = origin or hint
    if wanted is Any or not isinstance(wanted, type) or isinstance(value, wanted):
        return value
    raise TypeError
