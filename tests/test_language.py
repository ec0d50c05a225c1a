"""Docstrings and comments in plain technical English, with the field's words in the place of our own."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.house import ROOT, nodes, none, sources

# Rooms whose docstrings and comments have been read for it.
ROOMS = ("checkpoint", "data", "interop", "layout", "loop", "optim", "testing", "tree")
# "is at", "full", "assigned", "reports" or "states", "identical"; a process, a user, a rank.
WORDS = re.compile(
    r"\b(lie|lies|lay|lying|whole|wholes|deal|deals|dealt|dealing|say|says|said|saying|tell|tells|told|telling|alike"
    r"|nobody|nobody's|somebody|somebody's)\b",
    re.I,
)
# What means itself: integers as text shows them, arguments of this name, a command.
ALLOWED = re.compile(r"\bwhole numbers?\b|\bwhole=|^\s*whole: |\(head, say\)")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every line of a docstring and every comment of a file."""
    with open(ROOT / path, encoding="utf-8") as text:
        for token in tokenize.generate_tokens(io.StringIO(text.read()).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            yield from enumerate(str(first.value.value).split("\n"), first.lineno)


def test_docstrings_and_comments_use_the_words_of_the_field():
    none(
        f"{path}:{line}: {found[0]!r} in: {text.strip()}"
        for room in ROOMS
        for path in sources(f"fmegatron/{room}")
        if WORDS.search((ROOT / path).read_text())  # in most files the words are nowhere, which is read at once
        for line, text in sorted(prose(path))
        if (found := WORDS.search(ALLOWED.sub("", text)))
    )


def test_what_counts_as_prose_and_as_a_word():
    """Code and error texts are no prose, and what means itself is allowed."""
    found = dict(prose(Path("tests/test_language.py")))
    assert any("with the field's words" in text for text in found.values())
    assert not any("re.compile" in text for text in found.values())
    assert WORDS.search("where it lies") and not WORDS.search("underlies; tellers; on_whole_matrices")
    assert not WORDS.search(ALLOWED.sub("", "a whole number, place(w, whole=(0,))"))
