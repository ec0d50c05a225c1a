"""Files that one can read in one sitting, finished, and made of nothing from this machine."""

import re

from tests.house import ROOT, none, sources

LIMIT = 500


def lines_with(pattern: str, path) -> list[str]:
    """FILE:LINE: what was found, for every line of a file that holds a match."""
    found = enumerate((re.search(pattern, line) for line in (ROOT / path).read_text().splitlines()), 1)
    return [f"{path}:{number}: {match.group()}" for number, match in found if match]


def test_length():
    lengths = {
        path: len((ROOT / path).read_text().splitlines()) for path in sources("fmegatron", "experiments", "tests")
    }
    none(
        f"{path} has {lines} lines, at most {LIMIT} are wanted; make two files of it"
        for path, lines in lengths.items()
        if lines > LIMIT
    )


def test_finished():
    words = "NotImplementedError|TO" + "DO|FIX" + "ME"
    none(line for path in sources("fmegatron", "experiments") for line in lines_with(words, path))


def test_tests_have_no_examples():
    """Which pytest would not run: tests/conftest.py searches no test file for them."""
    none(line for path in sources("tests") for line in lines_with(r"^\s*>>" + "> ", path))


def test_no_test_is_left_out():
    """But those that need an optional package (`importorskip`), megatron-core in the peers' environment, or a mount."""
    words = r"mark\.(sk" + "ip|xf" + "ail)|pytest.sk" + r"ip\("
    none(
        line
        for path in sources("tests")
        if path.name not in ("peer_python.py", "fuse.py")
        for line in lines_with(words, path)
    )
