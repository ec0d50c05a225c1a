"""The order of the rooms: imports go upwards only, stand at the top of files, and no drawer takes what has no place."""

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house import LEVELS, ROOT, nodes, none, rooms, sources

# Optional packages: a user without them must be able to import the room.
OPTIONAL = {
    "lm_eval",
    "matplotlib",
    "wandb",
    "IPython",
    "ipyparallel",
    "safetensors",
    "tokenizers",
    "spmd_types",
    "zarr",
}
OPTIONAL |= {"mlflow", "opentelemetry", "pynvml"}
OPTIONAL |= {"zstandard", "pyarrow", "datasets", "jinja2"}
OPTIONAL |= {"triton"}
# Peers of benchmarks, which run in an environment of their own.
PEERS = {"jax", "orbax", "megatron", "transformers", "grain", "torchdata"}
OPTIONAL_MODULES = {"torch.utils.tensorboard"}
# Files beside the rooms that are run (`python -m fmegatron.check`): they may import every room, and none imports them.
PROGRAMS = {"fmegatron/check.py", "fmegatron/doctor.py", "fmegatron/parity.py", "fmegatron/report.py"}
# A table of names that every room shows: it imports nothing.
TABLES = {"fmegatron/moved.py"}
# Commands of rooms that look at what rooms below them make (experiments, which the loop loads; checkpoints of other
# systems): programs too, inside of their rooms.
COMMANDS = {"fmegatron/plan/__main__.py", "fmegatron/checkpoint/__main__.py"}
# Also behind a colon or a semicolon, as in `def f(): import os`.
INDENTED_IMPORT = re.compile(r"^[^\S\n]+(import|from)\s|[:;][^\S\n]*(import|from)\s", re.MULTILINE)
DRAWERS = {"utils", "util", "common", "core", "base", "helpers", "misc"}


def imported(node: ast.AST) -> list[str]:
    """Dotted names that an import statement brings in, [] for another statement."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names]
    return []


def imports(*folders: str) -> Iterator[tuple[Path, int, str]]:
    """(file, line, dotted name) of every import in the files of these folders."""
    for path in sources(*folders):
        for line, name in imports_of(path):
            yield path, line, name


@functools.cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of every import in a file."""
    return tuple((node.lineno, name) for node in nodes(path) for name in imported(node))


def room_of(path: Path) -> str | None:
    """The room of a file, None of one beside the rooms."""
    return path.parts[1] if len(path.parts) > 2 else None


def goes_up(room: str | None, name: str) -> bool:
    """Whether a file of this room may import `name`."""
    parts = name.split(".")
    if parts[0] != "fmegatron" or len(parts) < 2 or parts[1] == room or f"fmegatron/{parts[1]}.py" in TABLES:
        return True
    return room is not None and LEVELS[parts[1]] < LEVELS[room]


def test_beside_the_rooms_are_programs_only():
    beside = {path.as_posix() for path in sources("fmegatron") if len(path.parts) == 2}
    assert beside == PROGRAMS | TABLES | {"fmegatron/__init__.py"}
    none(
        f"{table}: imports {name}; every room imports it"
        for table in TABLES
        for node in nodes(Path(table))
        for name in imported(node)
        if name.startswith("fmegatron")
    )
    for program in PROGRAMS | COMMANDS:
        assert (ROOT / program).read_text().endswith('if __name__ == "__main__":\n    sys.exit(main())\n')
    names = {name for _, _, name in imports("fmegatron", "experiments")}
    programs = {program.removesuffix(".py").replace("/", ".") for program in PROGRAMS}
    assert not [name for name in names if ".".join(name.split(".")[:2]) in programs]


def test_every_room_has_a_level():
    assert set(rooms()) <= set(LEVELS)


def test_imports_name_rooms_in_full():
    none(
        f"{path}:{line}: {name!r} is a relative import; write the room's full name"
        for path, line, name in imports("fmegatron", "experiments")
        if name.startswith(".")
    )


def test_imports_go_up():
    found = [
        (path, line, name) for path, line, name in imports("fmegatron") if path.as_posix() not in PROGRAMS | COMMANDS
    ]
    none(
        f"{path}:{line}: the package imports {name}"
        for path, line, name in found
        if name.split(".")[0] in ("tests", "experiments")
    )
    none(
        f"{path}:{line}: room {room_of(path)!r} imports {name!r}; a room imports only from rooms above it"
        for path, line, name in found
        if not goes_up(room_of(path), name)
    )


def imports_inside(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of imports inside functions; of a file without one that is indented nothing is parsed."""
    if INDENTED_IMPORT.search((ROOT / path).read_text()):
        for function in nodes(path):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from ((node.lineno, name) for node in ast.walk(function) for name in imported(node))


def test_no_imports_inside_functions():
    none(
        f"{path}:{line}: import of {name!r} inside a function; it is not optional"
        for path in sources("fmegatron", "experiments")
        for line, name in imports_inside(path)
        if name.split(".")[0] not in OPTIONAL | PEERS and name.rpartition(".")[0] not in OPTIONAL_MODULES
    )


def file_of(name: str) -> str | None:
    """The module that an imported name is of: itself, or what it is taken from."""
    for found in (name, name.rpartition(".")[0]):
        path = ROOT.joinpath(*found.split("."))
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            return found
    return None


def test_no_files_import_each_other_in_a_circle():
    """Names for type checkers count, too: who must know whom is one question."""
    needs: dict[str, set[str]] = {}
    for path, _, name in imports("fmegatron"):
        own = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        needs.setdefault(own, set()).add(file_of(name))
    graph = graphlib.TopologicalSorter({own: others - {own, None} for own, others in needs.items()})
    graph.prepare()  # CycleError names the files


# Private names of Python itself that have no public form.
OF_PYTHON = {"_current_frames", "_exit", "_fields", "_getframe", "_signal"}


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of every private name that a file takes from an object or a module."""
    for node in nodes(path):
        found = []
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found = [node.attr]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and isinstance(node.args[1], ast.Constant)
        ):
            found = [node.args[1].value]
        elif not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fmegatron"):
            found = [part for name in imported(node) for part in name.split(".")]
        yield from ((node.lineno, name) for name in found if name.startswith("_") and not name.endswith("__"))


def own_names() -> Iterator[str]:
    """Every name that some file of the package defines."""
    for path in sources("fmegatron"):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def test_private_names_of_others_stand_in_one_file_of_each_room():
    """torch may move them with any release: then one file of the room is mended."""
    ours = OF_PYTHON.union(own_names())
    none(
        f"{path}:{line}: {name} is a private name of another package; put it into torch_private.py of the room"
        for path in sources("fmegatron")
        if path.name != "torch_private.py"
        for line, name in private_names(path)
        if name not in ours
    )
    places = [path for path in sources("fmegatron") if path.name == "torch_private.py"]
    assert len({room_of(path) for path in places}) == len(places)


def test_experiments_never_import_each_other():
    none(f"{path}:{line}: {name}" for path, line, name in imports("experiments") if name.split(".")[0] == "experiments")


def test_no_drawers():
    names = {part.removesuffix(".py") for path in sources("fmegatron", "experiments") for part in path.parts}
    assert not names & DRAWERS
