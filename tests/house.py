"""What the tests of the house share: where things are, and which modules there are."""

import ast
import functools
import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]

# DESIGN: a room imports only from rooms of lower level; rooms of one level stand beside each other.
LEVELS = {
    "files": 0,
    "layout": 0,
    "tree": 1,
    "collectives": 2,
    "nn": 3,
    "checkpoint": 3,
    "data": 3,
    "optim": 4,
    "step": 5,
    "model": 6,
    "plan": 7,
    "interop": 7,
    "loop": 8,
    "testing": 9,
}


def sources(*folders: str) -> list[Path]:
    """Every Python file of the project under these folders, relative to the root."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in found if "__pycache__" not in path.parts)


@functools.cache  # ten tests read the whole package
def syntax(path: Path) -> ast.Module:
    """The parsed source of a file named relative to the root."""
    return ast.parse((ROOT / path).read_text(), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, as `ast.walk` gives them, but for those of how a name is used and of operators."""
    plain = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)
    return tuple(node for node in ast.walk(syntax(path)) if not isinstance(node, plain))


def none(offences: Iterable[str]) -> None:
    """Fail with all offences at once, one a line, if there are any."""
    found = list(offences)
    assert not found, f"{len(found)} found:\n" + "\n".join(found)


def module(path: Path) -> ModuleType:
    """The imported module of a file of the package."""
    parts = path.with_suffix("").parts
    return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def rooms() -> list[str]:
    """Names of the rooms that exist."""
    return sorted(path.parent.name for path in (ROOT / "fmegatron").glob("*/__init__.py"))
