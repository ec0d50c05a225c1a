"""The wheel, outside of the checkout: what is in it, and that what it holds runs without the rest."""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fmegatron
from fmegatron import doctor
from tests.house import ROOT

TOOLS = ("check", "checkpoint", "data", "doctor", "interop", "model", "parity", "plan", "report")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which the wheel is unpacked; the wheel is built of a copy, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "fmegatron", folder / "src" / "fmegatron", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "src" / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    done = subprocess.run(build, cwd=folder / "src", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"fmegatron-{fmegatron.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Python in a folder without a checkout, whose fmegatron is that of the wheel."""
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, "-P", *arguments], cwd=site.parent, env=env, capture_output=True, text=True, timeout=300
    )


def test_the_wheel_has_every_file_of_the_package(site):
    wanted = {p.relative_to(ROOT) for p in (ROOT / "fmegatron").rglob("*") if p.suffix != ".pyc" and p.is_file()}
    assert wanted == {p.relative_to(site) for p in (site / "fmegatron").rglob("*") if p.is_file()}


def test_a_build_of_torch_in_a_container_is_left_alone():
    text = next(
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.strip().startswith('"torch')
    )
    wanted = Requirement(text.strip().split('"')[1]).specifier
    for version, right in (("2.11.0a0+1b2c", True), ("2.11.0", True), ("2.13.0+cpu", True), ("2.10.1", False)):
        assert wanted.contains(version, prereleases=True) == right


def test_what_was_tried_is_said_in_one_place():
    """fmegatron.PYTHON and fmegatron.TORCH: pip refuses older ones, and the table of the page says the same."""
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={fmegatron.PYTHON[0]}"' in text and f'"torch>={fmegatron.TORCH[0]}.0a0"' in text
    page = (ROOT / "docs/launching.md").read_text()
    for name, (oldest, newest) in (("Python", fmegatron.PYTHON), ("torch", fmegatron.TORCH)):
        assert f"| {name} | {oldest} to {newest} |" in page
    assert doctor.LEAST[0] == ("torch", fmegatron.TORCH[0])


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.11.0a0+1b2c", "2.14.1+cu130"])
def test_the_command_installs_nothing_of_torch(site, version, tmp_path):
    """On a node of which only torch is another one; --no-index: pip would ask for what it thinks is missing."""
    known = tmp_path / f"torch-{version.replace('-', '_')}.dist-info"
    known.mkdir()
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (wheel,) = site.parent.glob("*.whl")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    show = [sys.executable, "-P", "-c", "import fmegatron; print(fmegatron.install_command())"]
    path = {**env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{site}"}
    said = subprocess.run(show, cwd=tmp_path, env=path, capture_output=True, text=True).stdout
    assert said == f"python -m pip install . 'torch=={version}'\n"
    pip = [sys.executable, *shlex.split(said.replace(" . ", f" {wheel} "))[1:]]
    done = subprocess.run([*pip, "--dry-run", "--no-index"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stdout.splitlines() if "Would install" in line and "torch" in line], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_tells_its_use(site, tool):
    done = run(site, "-m", f"fmegatron.{tool}", "--help")
    assert done.returncode == 0 and "usage" in done.stdout.lower(), done.stderr


@pytest.mark.slow
def test_the_block_of_the_readme_runs_and_a_checkpoint_is_written(site):
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (site.parent / "data").mkdir()
    shutil.copy(ROOT / "data" / "tinyshakespeare.txt", site.parent / "data")
    more = "\nimport fmegatron\nfrom fmegatron import checkpoint\nprint(fmegatron.__file__)\n"
    more += "checkpoint.save('saved', info.state)\n"
    more += "back = checkpoint.restore('saved', info.state)\n"
    more += "import torch\nassert all(map(torch.equal, tree.leaves(back.params), tree.leaves(info.state.params)))\n"
    (site.parent / "block.py").write_text(block.replace("steps=200", "steps=3") + more)
    done = run(site, "block.py")
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout and (site.parent / "saved").is_dir()
