"""A notebook that compiles names in its first cells how long a first step takes, and with which backend."""

import json
import re

import pytest

from tests.house import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_time_of_a_first_step_is_named(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    if re.search(r"\bjit\(", code):
        first = " ".join("".join("".join(cell["source"]) for cell in cells[:2]).split())
        assert re.search(r"first step .*\d s\b|first step .*seconds?\b", first, re.I) and "backend" in code
        assert re.search("eager", first) and re.search("[Ii]nductor", first)


def test_some_notebooks_compile():
    found = [path.name for path in NOTEBOOKS if "jit(" in path.read_text(encoding="utf-8")]
    assert found == ["02_train_step.ipynb", "05_bench.ipynb"]
