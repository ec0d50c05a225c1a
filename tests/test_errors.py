"""Errors have one form: of what the caller gave, "PATH: got X, wanted Y; FIX"; of what happened, "SUBJECT: what; FIX".

A function that does not know the path raises "got X, wanted Y", and its caller puts "PATH: " before it.
"""

import ast
import re
from collections.abc import Iterable

from tests.house import ROOT, nodes, rooms

GIVEN = {"ValueError", "TypeError", "argparse.ArgumentTypeError"}  # what the caller gave is wrong
FORM_OF_GIVEN = re.compile(
    r"(\S[^;\n]*: )?got .*, wanted |.*\{\}: \{\}$", re.S
)  # or a path before a message made elsewhere
FORM_OF_EVENT = re.compile(r"\S[^;\n]*: \S", re.S)
# Facts about a file's content, which the reader puts behind its path and "the manifest is damaged".
FRAGMENTS = {"fmegatron/checkpoint/files/parse.py", "fmegatron/files/strict_json.py"}


def text(node: ast.expr) -> str | None:
    """A message as written, with {} for what is filled in; None if it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text(node.left), text(node.right)]
        return None if parts == [None, None] else "".join("{}" if part is None else part for part in parts)
    if isinstance(node, ast.IfExp):
        return text(node.body)
    return None


def messages(tree: Iterable[ast.AST]):
    """(line, name of the exception, message) of each `raise` with a message of its own.

    Not of a function that makes the error ("raise self.error(...)"), nor of a message that is put together only.
    """
    for node in tree:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name, message = ast.unparse(node.exc.func), text(node.exc.args[0])
            if message is not None and re.search(r"[A-Z]\w*$", name) and re.search(r"\w", message):
                yield node.lineno, name, message


def wrong(name: str, message: str) -> bool:
    """Whether a message has not the form of its kind of exception."""
    return not (FORM_OF_GIVEN if name in GIVEN else FORM_OF_EVENT).match(message)


def offenders(room: str) -> list[str]:
    """The messages of a room that have another form, with their lines."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}: {message[:160]!r}"
        for path in sorted((ROOT / "fmegatron" / room).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in FRAGMENTS
        for line, name, message in messages(nodes(path.relative_to(ROOT)))
        if wrong(name, message)
    ]


def test_the_forms_are_told_apart():
    """The rule itself, on right and wrong messages."""
    assert not wrong("ValueError", "adamw: eps: got {}, wanted 0 or more, such as 1e-8")
    assert not wrong("OSError", "{}: a chunk could not be written: {}")
    assert not wrong("ValueError", "got dtype {}, wanted one of {}") and not wrong("ValueError", "layout {}: {}")
    for bad in ("{} has no layout; give one", "eps: want 0 or more", "eps: got {}, want a number"):
        assert wrong("ValueError", bad), bad
    assert wrong("RuntimeError", "the writer died")


def test_errors_have_one_form():
    """Every `raise` of the package with a message of its own."""
    found = [line for room in sorted(set(rooms())) for line in offenders(room)]
    assert not found, "\n".join(found)


if __name__ == "__main__":
    import sys

    print("\n".join(line for room in sys.argv[1:] or sorted(rooms()) for line in offenders(room)))
