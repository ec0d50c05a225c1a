"""The README is true: its tree is the one on disk, with each file's own first sentence, and its commands exist.

`make readme` (this file as a program) writes the tree anew.
"""

import ast
import re

from tests.house import LEVELS, ROOT, rooms, syntax

BEGIN, END = "<!-- tree: written by `make readme` -->\n```\n", "```\n<!-- end of tree -->"
FOLDERS = ("experiments", "notebooks", "tests")


def sentence(path) -> str:
    """First sentence of the first line of a file's docstring."""
    line = (ast.get_docstring(syntax(path.relative_to(ROOT))) or "").partition("\n")[0]
    return line.partition(". ")[0].rstrip(".")


def tree() -> str:
    """The rooms in their order with their files, then the other folders."""
    lines = ["fmegatron/"]
    for room in sorted(rooms(), key=lambda name: LEVELS[name]):
        folder = ROOT / "fmegatron" / room
        lines.append(f"  {room + '/':<18} {sentence(folder / '__init__.py')}")
        files = sorted(path for path in folder.rglob("*.py") if path.name != "__init__.py")
        lines += [f"    {path.relative_to(folder).as_posix():<16} {sentence(path)}" for path in files]
    for folder in FOLDERS:
        lines.append(f"{folder}/")
        if folder != "tests":
            files = sorted((ROOT / folder).rglob("*.py")) + sorted((ROOT / folder).glob("*.ipynb"))
            for path in files:
                text = sentence(path) if path.suffix == ".py" else "executed by a test"
                lines.append(f"  {path.relative_to(ROOT / folder).as_posix():<18} {text}")
        else:
            lines.append("  mirror the rooms; golden/ holds readable dumps of layouts")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def test_tree():
    readme = (ROOT / "README.md").read_text()
    written = readme.partition(BEGIN)[2].partition(END)[0]
    assert written == tree(), "the README's tree is not the one on disk; run `make readme`"


def test_commands_exist():
    targets = set(re.findall(r"^([a-z%-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name in ("README.md", "BUILD.md"):
        for target in re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", (ROOT / name).read_text(), re.M):
            command = target[0] or target[1]
            benchmark = command.startswith("bench-") and "bench-%" in targets
            assert command in targets or benchmark, f"{name} says `make {command}`, which the Makefile does not know"
            if benchmark:
                assert (ROOT / f"experiments/benchmarks/{command.removeprefix('bench-')}.py").exists(), command


def test_the_experiment_runs(capsys, monkeypatch):
    """The first Python block of the README, as it stands there, for a few steps."""
    code = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert "steps=200" in code and len(code.splitlines()) <= 25
    monkeypatch.chdir(ROOT)
    exec(compile(code.replace("steps=200", "steps=2, log_every=1"), "README.md", "exec"), {})
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_paths_exist():
    for name in ("README.md", "BUILD.md"):
        for path in re.findall(r"`((?:experiments|fmegatron|tests|notebooks)/[\w/.]+)`", (ROOT / name).read_text()):
            assert (ROOT / path).exists(), f"{name} names {path}, which is not there"


if __name__ == "__main__":
    before = (ROOT / "README.md").read_text()
    head, _, rest = before.partition(BEGIN)
    assert rest, f"README.md has no line {BEGIN!r}"
    (ROOT / "README.md").write_text(head + BEGIN + tree() + END + rest.partition(END)[2])
