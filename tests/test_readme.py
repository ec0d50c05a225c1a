"""README, BUILD and the manual in docs/ are true: their Python runs, and commands, paths and links in them exist."""

import ast
import functools
import json
import re

import pytest
import torch

from fmegatron import step, tree
from fmegatron.collectives import World
from fmegatron.layout import DataParallel, Mesh
from tests.house import LEVELS, ROOT, rooms, syntax

MANUAL = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PAPERS = ("README.md", "BUILD.md", *MANUAL)
LINKED = (*PAPERS, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "notebooks").glob("*.*"))))
LINKED += ("fmegatron/checkpoint/FORMAT.md",)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def text_of(name: str) -> str:
    """A page without its code, or the Markdown cells of a notebook."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".ipynb"):
        text = "\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)


def anchors(name: str) -> set[str]:
    """What may stand behind `#` in a link to this page: its headings, as GitHub writes them."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)", text, re.M)}


def broken(name: str, text: str) -> list[str]:
    """The links of a text, as it would stand in this page, that lead nowhere."""
    found = []
    for path, anchor in LINK.findall(text):
        to = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        if not to.exists() or (anchor and anchor not in anchors(to.relative_to(ROOT).as_posix())):
            found.append(f"{name}: {path}#{anchor}" if anchor else f"{name}: {path}")
    return found


@pytest.mark.parametrize("name", LINKED)
def test_links(name):
    assert broken(name, text_of(name)) == []


def test_a_broken_link_is_found():
    wrong = ("a.md", "data.md#no", "#no", "BUILD.md", "../BUILD.md#checking-an-experiment")
    right = ("data.md", "figures.md#not-yet", "../BUILD.md#the-rooms", "https://a.b/c", "../experiments")
    for path in wrong:
        assert broken("docs/index.md", f"see [x]({path})") == [f"docs/index.md: {path}"]
    assert broken("docs/index.md", " ".join(f"[x]({path})" for path in right)) == []


def test_every_page_is_in_the_index():
    named = {path for path, _ in LINK.findall(text_of("docs/index.md"))}
    assert {name.removeprefix("docs/") for name in MANUAL} - {"index.md"} <= named


@pytest.mark.parametrize(("name", "kilobytes"), [("README.md", 9), ("BUILD.md", 6)])
def test_size(name, kilobytes):
    """What does not fit is a page of docs/."""
    assert (ROOT / name).stat().st_size <= 1000 * kilobytes


def test_rooms():
    """BUILD has them all, in the order in which they import each other; every folder says what it is for."""
    table = (ROOT / "BUILD.md").read_text().partition("## The rooms")[2].partition("\n## ")[0]
    lines = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    named = [room for line in lines for room in line]
    assert sorted(named) == rooms() and [LEVELS[room] for room in named] == sorted(LEVELS[room] for room in named)
    for folder in {path.parent for path in (ROOT / "fmegatron").rglob("*.py")}:
        assert len(ast.get_docstring(syntax((folder / "__init__.py").relative_to(ROOT))) or "") > 40, folder


@pytest.mark.parametrize("name", PAPERS)
def test_commands_exist(name):
    targets = set(re.findall(r"^([a-z%-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", (ROOT / name).read_text(), re.M):
        command = target[0] or target[1]
        benchmark = command not in targets and command.startswith("bench-") and "bench-%" in targets
        assert command in targets or benchmark, f"{name} says `make {command}`, which the Makefile does not know"
        if benchmark:
            assert (ROOT / f"experiments/benchmarks/{command.removeprefix('bench-')}.py").exists(), command


def python_of(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def blocks() -> list[str]:
    """The Python block of the README, and those of the pages that go on from it."""
    found = [python_of(page) for page in ("README.md", "docs/data_parallelism.md", "docs/randomness.md")]
    assert [len(of) for of in found] == [1, 2, 1]
    return [code for of in found for code in of]


def run(code: str, names: dict) -> dict:
    """The names after a block was run with these."""
    exec(compile(code, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_experiment_runs(backend, capsys, monkeypatch):
    """The Python block of the README, as it stands there, for a few steps."""
    code = blocks()[0]
    monkeypatch.setattr(step, "jit", functools.partial(step.jit, backend=backend))
    assert "steps=200" in code and len(code.splitlines()) <= 25
    monkeypatch.chdir(ROOT)
    run(code.replace("steps=200", "steps=2, log_every=1"), {})
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 2 and losses[1] < losses[0]


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
def test_the_step_by_hand_runs(mesh):
    """The second block of the page proves its step; on one rank the loss goes down."""
    names = run(blocks()[2], {"mesh": mesh, "DataParallel": DataParallel})
    if mesh.size == 1:
        state, batch = tree.init(names["specs_of_state"], key=0, rank=0), {"x": torch.randn(16, 64)}
        losses = []
        for _ in range(3):
            state, metrics = names["zero_step"](state, batch)
            losses.append(float(metrics["loss"]))
        assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_data_parallelism_runs(backend, capsys, monkeypatch):
    """The block of its page goes on from that of the README, of which the loop is left out."""
    first, second = blocks()[:2]
    assert "DataParallel.zero3()" in second and "\nfor info in " in first and "step.jit(train_step, " in second
    monkeypatch.chdir(ROOT)
    names = run(first.partition("\nfor info in ")[0], {})
    names = run(second.replace("step.jit(train_step, ", f"step.jit(train_step, backend={backend!r}, "), names)
    assert names["state"].step == 1 and 5 < names["metrics"]["loss"] < 6  # log 256 = 5.55
    assert "planned" in capsys.readouterr().out


def test_state_and_batches_lie_where_the_world_computes(monkeypatch):
    """On a node with GPUs the blocks train there; a device without data stands for one."""
    device = torch.device("meta")
    monkeypatch.setattr("fmegatron.collectives.connect", lambda mesh: World(mesh, 0, device))
    monkeypatch.chdir(ROOT)
    first, second = blocks()[:2]
    names = run(first.partition("\nfor info in ")[0], {})
    for number in range(2):
        leaves = tree.leaves([names["state"], names["batches"].at(0)])
        assert len(leaves) > 10 and {x.device for x in leaves} == {device}, f"block {number}"
        names = run(second.partition("\ntrain_step = step.jit")[0], names)


def test_randomness_runs():
    names = run(blocks()[3], {"tree": tree})
    assert names["noise"].shape == (16, 64) and 0 < (names["x"] == 0).sum() < 16 * 64


def test_which_collective_goes_where(capsys):
    """The right one is proven; of the other the finding says what its page says."""
    for code in python_of("docs/checking.md"):
        run(code, {})
    said = capsys.readouterr().out
    assert (
        "adds a pending sum and a value that is sharded" in said and "Fix: enter(x, axis) what all ranks have" in said
    )


@pytest.mark.parametrize("name", PAPERS)
def test_paths_exist(name):
    for path in re.findall(r"`((?:docs|experiments|fmegatron|tests|notebooks)/[\w/.]+)`", (ROOT / name).read_text()):
        assert (ROOT / path).exists(), f"{name} names {path}, which is not there"
