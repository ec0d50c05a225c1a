"""README and BUILD are true: their trees are the one on disk, in each file's own first sentence; their commands exist.

`make readme` (this file as a program) writes the trees anew: README's of the rooms, BUILD's of every file.
"""

import ast
import re

import pytest
import torch

from fmegatron import tree
from fmegatron.collectives import World
from tests.house import LEVELS, ROOT, rooms, syntax

BEGIN, END = "<!-- tree: written by `make readme` -->\n```\n", "```\n<!-- end of tree -->"
FOLDERS = ("experiments", "notebooks")


def sentence(path) -> str:
    """First sentence of the first line of a file's docstring."""
    line = (ast.get_docstring(syntax(path.relative_to(ROOT))) or "").partition("\n")[0]
    return re.split(r"(?<!et al)\. ", line)[0].rstrip(".")


def rooms_tree() -> str:
    """The rooms in their order, with the folders in them."""
    lines = []
    for room in sorted(rooms(), key=lambda name: LEVELS[name]):
        folder = ROOT / "fmegatron" / room
        for inner in sorted(path.parent for path in folder.rglob("__init__.py")):
            name = inner.relative_to(ROOT / "fmegatron").as_posix() + "/"
            indent = "  " * (1 + name.count("/"))
            lines.append(f"{indent}{name.split('/')[-2] + '/':<{20 - len(indent)}} {sentence(inner / '__init__.py')}")
    return "\n".join(["fmegatron/", *lines]) + "\n"


def files_tree() -> str:
    """Every file of the rooms and of the other folders."""
    lines = []
    for room in sorted(rooms(), key=lambda name: LEVELS[name]):
        folder = ROOT / "fmegatron" / room
        lines.append(f"fmegatron/{room}/")
        files = sorted(path for path in folder.rglob("*.py") if path.name != "__init__.py")
        lines += [f"  {path.relative_to(folder).as_posix():<18} {sentence(path)}" for path in files]
    for name in FOLDERS:
        lines.append(f"{name}/")
        files = sorted((ROOT / name).rglob("*.py")) + sorted((ROOT / name).glob("*.ipynb"))
        files += sorted((ROOT / name).glob("*.md")) if name == "notebooks" else []
        for path in files:
            text = sentence(path) if path.suffix == ".py" else "executed by a test"
            text = path.read_text().partition("\n")[0].removeprefix("# ") if path.suffix == ".md" else text
            lines.append(f"  {path.relative_to(ROOT / name).as_posix():<18} {text}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


TREES = {"README.md": rooms_tree, "BUILD.md": files_tree}


@pytest.mark.parametrize("name", TREES)
def test_tree(name):
    written = (ROOT / name).read_text().partition(BEGIN)[2].partition(END)[0]
    assert written == TREES[name](), f"the tree of {name} is not the one on disk; run `make readme`"


def test_commands_exist():
    targets = set(re.findall(r"^([a-z%-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name in ("README.md", "BUILD.md"):
        for target in re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", (ROOT / name).read_text(), re.M):
            command = target[0] or target[1]
            benchmark = command not in targets and command.startswith("bench-") and "bench-%" in targets
            assert command in targets or benchmark, f"{name} says `make {command}`, which the Makefile does not know"
            if benchmark:
                assert (ROOT / f"experiments/benchmarks/{command.removeprefix('bench-')}.py").exists(), command


def blocks() -> list[str]:
    """The Python blocks of the README, in their order."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def run(code: str, names: dict) -> dict:
    """The names after a block was run with these."""
    exec(compile(code, "README.md", "exec"), names)
    return names


@pytest.mark.long
def test_the_experiment_runs(capsys, monkeypatch):
    """The first Python block, as it stands there, for a few steps."""
    from torch._inductor import config  # its own patch: what monkeypatch puts back, config.cpp no longer shows

    code = blocks()[0]
    assert "steps=200" in code and len(code.splitlines()) <= 25
    monkeypatch.chdir(ROOT)
    with config.patch({"cpp.simdlen": 1}):  # no vector instructions: g++ takes a third less time
        run(code.replace("steps=200", "steps=2, log_every=1"), {})
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 2 and losses[1] < losses[0]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_data_parallelism_runs(backend, capsys, monkeypatch):
    """The second block goes on from the first, of which the loop is left out."""
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


def test_paths_exist():
    for name in ("README.md", "BUILD.md"):
        for path in re.findall(r"`((?:experiments|fmegatron|tests|notebooks)/[\w/.]+)`", (ROOT / name).read_text()):
            assert (ROOT / path).exists(), f"{name} names {path}, which is not there"


if __name__ == "__main__":
    for name, tree in TREES.items():
        head, _, rest = (ROOT / name).read_text().partition(BEGIN)
        assert rest, f"{name} has no line {BEGIN!r}"
        (ROOT / name).write_text(head + BEGIN + tree() + END + rest.partition(END)[2])
