"""Every public symbol says what it is: rooms, files, and all that a room's `__all__` names, with its public methods."""

import importlib
import inspect
import re

from tests.house import module, none, rooms, sources


def missing(name: str, thing) -> list[str]:
    """Names of `thing` and its public methods that have no docstring of their own."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return []  # a constant: the comment beside it cannot be seen from here
    doc, found = inspect.getdoc(thing) or "", []
    # dataclass and NamedTuple write 'Name(field: type, ...)' where nothing stands.
    if not doc.strip() or doc.startswith(f"{getattr(thing, '__name__', '')}("):
        found.append(name)
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            value = value.fget if isinstance(value, property) else value
            if not member.startswith("_") and inspect.isfunction(value) and not value.__doc__:
                found.append(f"{name}.{member}")
    return found


def test_public_symbols():
    packages = {room: importlib.import_module(f"fmegatron.{room}") for room in rooms()}
    none(
        f"fmegatron.{room} names nothing in __all__"
        for room, package in packages.items()
        if not package.__all__ and room != "files"  # of which no user needs anything
    )
    twice = {room: {name for name in p.__all__ if p.__all__.count(name) > 1} for room, p in packages.items()}
    none(f"__all__ of fmegatron.{room} names {', '.join(names)} twice" for room, names in twice.items() if names)
    none(
        f"{gap} has no docstring"
        for room, package in packages.items()
        for name in package.__all__
        for gap in missing(f"{room}.{name}", getattr(package, name))
    )


def test_files():
    none(
        f"{path} begins with no docstring" for path in sources("fmegatron") if not (module(path).__doc__ or "").strip()
    )


# Words of our own where the field has others ("is at", "full", "assigned", "reports", "identical"), and -ise.
IDIOMS = re.compile(
    r"\b(lies?|lying|dealt|says?|said|tells?|told|alike|nobody|somebody|whole|whoever)\b|\bin words\b"
    r"|\b\w{4,}is(ed|es|ation|ing)\b",
    re.I,
)
ENGLISH = {"raised", "raises", "raising"}


def test_first_sentences_speak_the_language_of_the_field():
    """They are what a newcomer reads first, where they open a folder or a file."""
    none(
        f"{path}: {found[0]!r} in: {first}"
        for path in sources("fmegatron")
        for first in [(module(path).__doc__ or "").partition("\n\n")[0]]
        for found in IDIOMS.finditer(first)
        if found[0].lower() not in ENGLISH
    )
