"""The pages beside the notebooks are true: their Python runs, and the names that their tables give exist."""

import importlib
import re

import pytest

from tests.house import LEVELS, ROOT

PAGES = sorted(path.name for path in (ROOT / "notebooks").glob("*.md"))


def text_of(page):
    return (ROOT / "notebooks" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", text_of(page), re.M | re.S):
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    cells = [line.split("|")[2] for line in text_of(page).splitlines() if line.startswith("|")]
    found = re.findall(rf"\b((?:{'|'.join(LEVELS)})(?:\.\w+)+)", "\n".join(cells))
    assert page == "glossary.md" or len(found) > 20
    for name in found:
        room, *rest = name.split(".")
        value = importlib.import_module(f"fmegatron.{room}")
        for part in rest:
            assert hasattr(value, part), f"{page}: {name} is not there"
            value = getattr(value, part)


def test_pages_are_there():
    assert PAGES == ["from_fsdp2.md", "from_jax.md", "from_megatron.md", "glossary.md"]
