"""The order of the sub-packages: what a checkpoint is, writing and reading it, and what goes on around that."""

import ast

import pytest

from tests.house import sources, syntax

ORDER = ("calls", "files", "dicts", "writing", "reading", "background", "manage", "local", "tools")
BESIDE = {"calls", "files", "dicts"}  # what writing and reading have in common; neither needs the other


@pytest.mark.parametrize("path", [path for path in sources("fmegatron/checkpoint") if len(path.parts) > 3], ids=str)
def test_imports_go_one_way(path):
    package = path.parts[2]
    may = BESIDE if package == "reading" else set(ORDER[: ORDER.index(package)])
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("fmegatron.checkpoint"):
            names = (
                [a.name for a in node.names] if node.module == "fmegatron.checkpoint" else [node.module.split(".")[2]]
            )
            assert set(names) <= may | {package}, f"{path}:{node.lineno}: {package} imports {names}, it may {may}"


def test_beside_the_packages_is_the_front_only():
    assert {path.name for path in sources("fmegatron/checkpoint") if len(path.parts) == 3} == {
        "__init__.py",
        "__main__.py",
        "rank_state.py",
    }
