"""The pages beside the notebooks are true: their Python runs, and the names that their tables give exist."""

import dataclasses
import importlib
import importlib.util
import re
import sys

import pytest
import torch

from fmegatron import check, checkpoint, loop, parity, tree
from tests.code_lines import code_lines
from tests.house import LEVELS, ROOT

PAGES = sorted(path.name for path in (ROOT / "notebooks").glob("*.md"))


def text_of(page):
    return (ROOT / "notebooks" / page).read_text(encoding="utf-8")


@pytest.mark.long
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
    assert not page.startswith("from_") or len(found) > 20
    for name in found:
        room, *rest = name.split(".")
        value = importlib.import_module(f"fmegatron.{room}")
        for part in rest:
            assert hasattr(value, part), f"{page}: {name} is not there"
            value = getattr(value, part)


def test_pages_are_there():
    assert PAGES == ["from_fsdp2.md", "from_jax.md", "from_megatron.md", "glossary.md", "own_experiment.md"]


def module_of(file):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_own_experiment_is_short(tmp_path):
    """Names of fmegatron, at most 15; lines with code, 50."""
    source = re.search(r"^```python\n(.*?)^```", text_of("own_experiment.md"), re.M | re.S)[1]
    taken = {name for line in re.findall(r"^from fmegatron\S* import (.+)$", source, re.M) for name in line.split(", ")}
    rooms = {name for name in taken if (ROOT / "fmegatron" / name).is_dir()}
    used = set(re.findall(rf"(?<!torch\.)\b(?:{'|'.join(rooms)})\.\w+", source)) | (taken - rooms)
    (tmp_path / "own.py").write_text(source)
    assert len(used) <= 15 and code_lines(tmp_path / "own.py") <= 50, " ".join(sorted(used))


@pytest.mark.medium
def test_the_own_experiment(tmp_path, monkeypatch, capsys):
    """Checked for eight ranks, compared with one, trained, gone on with, and read back into its module."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "own.py"
    file.write_text(re.search(r"^```python\n(.*?)^```", text_of("own_experiment.md"), re.M | re.S)[1])
    (tmp_path / "text.txt").write_text("to be or not to be " * 100)
    small = ["--dim=8", "--batch_size=4", "--seq_len=8"]
    assert check.main([str(file), "--mesh", "dp=2,fsdp=4"]) == 0, capsys.readouterr()
    assert parity.main([str(file), "--mesh", "fsdp=2", *small, "--steps", "1"]) == 0, capsys.readouterr()

    own = module_of(file)
    options = loop.Options("runs/own", 2, backend="eager")
    config = own.Config(run=options, text="text.txt", dim=8, batch_size=4, seq_len=8)
    own.experiment(config)
    longer = dataclasses.replace(config, run=dataclasses.replace(options, steps=3))
    assert own.experiment(longer).metrics["loss"] > 0
    number, state, _ = checkpoint.Manager("runs/own/checkpoints").restore_latest()
    net = own.Denoiser(8)
    net.load_state_dict(state["params"])
    assert number == 3 and "resumed from step 2" in capsys.readouterr().out

    checkpoint.save("start", dict(net.state_dict()))
    specs = own.describe(config).state
    given = checkpoint.restore("start", tree.layouts(specs.params))
    begun = tree.init(specs, key=0, rank=0, given=given)
    assert all(torch.equal(begun.params[name], p) for name, p in net.state_dict().items())
