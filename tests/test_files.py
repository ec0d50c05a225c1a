"""Files that one can read in one sitting, finished, and made of nothing from this machine."""

import re

import pytest

from tests.house import ROOT, sources

LIMIT = 400


@pytest.mark.parametrize("path", sources("fmegatron", "experiments", "tests"), ids=str)
def test_length(path):
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= LIMIT, f"{path} has {lines} lines, at most {LIMIT} are wanted; make two files of it"


@pytest.mark.parametrize("path", sources("fmegatron", "experiments"), ids=str)
def test_finished(path):
    text = (ROOT / path).read_text()
    found = re.search("NotImplementedError|TO" + "DO|FIX" + "ME", text)
    assert not found, f"{path}: {found.group()}"


@pytest.mark.parametrize("path", sources("tests"), ids=str)
def test_no_test_is_left_out(path):
    text = (ROOT / path).read_text()
    found = re.search(r"mark\.(sk" + "ip|xf" + "ail)|pytest.sk" + r"ip\(", text)
    assert not found, f"{path}: {found.group()}"
