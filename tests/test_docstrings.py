"""Every public symbol says what it is: rooms, files, and all that a room's `__all__` names, with its public methods."""

import importlib
import inspect

import pytest

from tests.house import module, rooms, sources


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


@pytest.mark.parametrize("room", rooms())
def test_public_symbols(room):
    package = importlib.import_module(f"fmegatron.{room}")
    assert package.__all__, f"fmegatron.{room} names nothing in __all__"
    assert len(set(package.__all__)) == len(package.__all__)
    found = [gap for name in package.__all__ for gap in missing(f"{room}.{name}", getattr(package, name))]
    assert not found, f"no docstring: {', '.join(found)}"


@pytest.mark.parametrize("path", sources("fmegatron"), ids=str)
def test_files(path):
    assert (module(path).__doc__ or "").strip(), f"{path} begins with no docstring"
