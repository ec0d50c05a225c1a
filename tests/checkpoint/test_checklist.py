"""REFERENCE_CHECKLIST.md names tests that exist, and leaves no line open."""

import ast
import pathlib
import re

HERE = pathlib.Path(__file__).parent


def names_in(path):
    """Names of the test functions of a file."""
    functions = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in functions if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_line_is_answered_by_a_test_that_exists():
    lines = [line for line in (HERE / "REFERENCE_CHECKLIST.md").read_text().splitlines() if line.startswith("- ")]
    assert len(lines) >= 83, "the reference's list has 83 lines"
    wrong = []
    for line in lines:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", line)
        wrong += [line] * (not named and not re.search(r"does not apply: \w.*\.$|does not apply, \w.*\.$", line))
        for file, name in named:
            path = HERE.parent / file
            if not path.exists() or name not in names_in(path):
                wrong.append(f"{file}::{name} does not exist")
    assert not wrong, "\n".join(wrong)
    assert "[ ]" not in "".join(lines)
