"""The order of the rooms: imports go upwards only, stand at the top of files, and no drawer takes what has no place."""

import ast

import pytest

from tests.house import LEVELS, ROOT, rooms, sources, syntax

# Optional packages: a user without them must be able to import the room.
OPTIONAL = {"matplotlib", "wandb", "IPython", "ipyparallel", "safetensors", "tokenizers", "spmd_types", "zarr"}
# Peers of benchmarks, which run in an environment of their own.
PEERS = {"jax", "orbax", "megatron"}
OPTIONAL_MODULES = {"torch.utils.tensorboard"}
# Files beside the rooms that are run (`python -m fmegatron.check`): they may import every room, and none imports them.
PROGRAMS = {"fmegatron/check.py"}
DRAWERS = {"utils", "util", "common", "core", "base", "helpers", "misc"}


def imported(node: ast.AST) -> list[str]:
    """Dotted names that an import statement brings in, [] for another statement."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: a relative import; write the room's full name"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def test_beside_the_rooms_are_programs_only():
    beside = {path.as_posix() for path in sources("fmegatron") if len(path.parts) == 2}
    assert beside == PROGRAMS | {"fmegatron/__init__.py"}
    for program in PROGRAMS:
        assert (ROOT / program).read_text().endswith('if __name__ == "__main__":\n    sys.exit(main())\n')
    names = {
        name for path in sources("fmegatron", "experiments") for n in ast.walk(syntax(path)) for name in imported(n)
    }
    assert not [name for name in names if name.startswith("fmegatron.check.") or name == "fmegatron.check"]


def test_every_room_has_a_level():
    assert set(rooms()) <= set(LEVELS)


@pytest.mark.parametrize("path", sources("fmegatron"), ids=str)
def test_imports_go_up(path):
    room = path.parts[1] if len(path.parts) > 2 else None
    if path.as_posix() in PROGRAMS:
        return
    for node in ast.walk(syntax(path)):
        for name in imported(node):
            parts = name.split(".")
            if parts[0] in ("tests", "experiments"):
                raise AssertionError(f"{path}:{node.lineno}: the package imports {parts[0]}")
            if parts[0] != "fmegatron" or len(parts) < 2 or parts[1] == room:
                continue
            assert room is not None and LEVELS[parts[1]] < LEVELS[room], (
                f"{path}:{node.lineno}: room {room!r} imports {name!r}; a room imports only from rooms above it"
            )


@pytest.mark.parametrize("path", sources("fmegatron", "experiments"), ids=str)
def test_no_imports_inside_functions(path):
    for function in ast.walk(syntax(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                for name in imported(node):
                    optional = name.split(".")[0] in OPTIONAL | PEERS or name.rpartition(".")[0] in OPTIONAL_MODULES
                    assert optional, f"{path}:{node.lineno}: import of {name!r} inside a function; it is not optional"


@pytest.mark.parametrize("path", sources("experiments"), ids=str)
def test_experiments_never_import_each_other(path):
    names = [name for node in ast.walk(syntax(path)) for name in imported(node)]
    assert not [name for name in names if name.split(".")[0] == "experiments"]


def test_no_drawers():
    names = {part.removesuffix(".py") for path in sources("fmegatron", "experiments") for part in path.parts}
    assert not names & DRAWERS
