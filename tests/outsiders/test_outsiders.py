"""Programs as somebody writes them who has read the manual and no file of the package: few names, all of them public.

Beside those of this folder two of `experiments/`: a preference loss on two models, a contrast over all rows.
"""

import ast
import importlib
import types

import pytest
import torch

from experiments import shakespeare
from fmegatron import checkpoint, loop, step, testing, tree
from fmegatron.layout import Mesh
from fmegatron.step.from_loss import build
from tests.experiments.given import made
from tests.house import LEVELS, ROOT

HERE = "tests/outsiders"
# What they need of fmegatron, at most. Of a step by hand each line is seen: gradients, reduction, norm, clip, update.
NAMES = {
    f"{HERE}/lora.py": 15, f"{HERE}/own_data.py": 10, f"{HERE}/wrapped.py": 10, f"{HERE}/own_step.py": 19,
    "experiments/two_towers.py": 15, "experiments/preferences.py": 17, "experiments/shakespeare.py": 18,
}  # fmt: skip
PROGRAMS = ("own_data", "wrapped", "own_step", "lora")
MESHES = {"own_data": Mesh(fsdp=2), "wrapped": Mesh(dp=2), "own_step": Mesh(fsdp=2), "lora": Mesh(fsdp=2)}
TINY = {"dim": 8, "batch_size": 4}


def used(path: str) -> set[str]:
    """`room.name` and names taken from rooms, of a file that takes whole rooms or public names only."""
    syntax = ast.parse((ROOT / path).read_text())
    found, taken = set(), {}
    for node in ast.walk(syntax):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fmegatron":
            front = importlib.import_module(node.module or "")
            for alias in node.names:
                if node.module == "fmegatron" and alias.name in LEVELS:
                    taken[alias.asname or alias.name] = importlib.import_module(f"fmegatron.{alias.name}")
                else:
                    assert alias.name in front.__all__, f"{path}: {node.module}.{alias.name} is not public"
                    found.add(f"{node.module}.{alias.name}")
        assert not (isinstance(node, ast.Import) and any(a.name.startswith("fmegatron") for a in node.names)), path
    for node in ast.walk(syntax):
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr in ("_replace", "_asdict"), f"{path}: {node.attr}"
            if isinstance(node.value, ast.Name) and isinstance(taken.get(node.value.id), types.ModuleType):
                assert node.attr in taken[node.value.id].__all__, f"{path}: {node.value.id}.{node.attr} is not public"
                found.add(f"{node.value.id}.{node.attr}")
    return found


@pytest.mark.parametrize("path", NAMES)
def test_few_names_and_public_ones(path):
    assert len(found := used(path)) <= NAMES[path], sorted(found)


def test_the_flagship_is_short():
    assert len((ROOT / "experiments/shakespeare.py").read_text().splitlines()) <= 90


def config_of(name, tmp_path, mesh=None, **changes):
    """(module, Config) of a program, small; of `lora` with the run of which it has the model."""
    program, sizes = importlib.import_module(f"tests.outsiders.{name}"), dict(TINY)
    if name == "lora":
        beginning, sizes = tmp_path / "beginning", {"batch_size": 4, "seq_len": 8, "rank": 2}
        if not beginning.exists():
            small = {"dim": 8, "layers": 1, "heads": 2, "seq_len": 8, "batch_size": 4, "steps": 2, "warmup": 1}
            how = {"eval_windows": 4, "prompts": (), "backend": "eager", "run": str(beginning)}
            shakespeare.experiment(made(shakespeare.Config, **small, **how))
        sizes["beginning"] = str(beginning)
    sizes |= {"layers": 1, "seq_len": 8} if name == "wrapped" else {}
    sizes |= {"text": str(shakespeare.TEXT)} if name in ("lora", "wrapped") else {}
    return program, program.Config(mesh=mesh or Mesh(), **sizes, **changes)


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_check_proves_it_and_all_ranks_compute_it(name, tmp_path):
    mesh = MESHES[name]
    program, config = config_of(name, tmp_path, mesh)
    report = step.check(*program.describe(config))
    assert report.ok, str(report)

    def on(mesh):
        return program.describe(config_of(name, tmp_path, mesh)[1])

    value, batch = on(mesh), program.experiment.data(config).at(0)
    whole = tree.init(on(Mesh()).state, 0, 0)
    layouts = (tree.layouts(value.state), tree.layouts(value.batch))
    batch = {key: batch[key] for key in value.batch}
    found = testing.parity(on, mesh, whole, batch, layouts=layouts, out_layouts=(layouts[0], None), fp64=True)
    assert found.ok, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_trains_and_goes_on_on_another_mesh(name, tmp_path, ranks):
    options = loop.Options(str(tmp_path / "run"), 3, backend="eager")
    program, config = config_of(name, tmp_path, run=options)
    program.experiment(config)
    longer = loop.Options(str(tmp_path / "run"), 5, backend="eager")
    ranks.run(trained, name, config_of(name, tmp_path, Mesh(fsdp=2), run=longer)[1], ranks=2)
    assert checkpoint.Manager(tmp_path / "run/checkpoints").latest() == 5
    losses = {row["step"]: row["loss"] for row in loop.read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in row}
    assert {1, 5} <= losses.keys() and all(loss < float("inf") for loss in losses.values())


def trained(rank, name, config):
    """On a real rank."""
    importlib.import_module(f"tests.outsiders.{name}").experiment(config)


def test_a_description_takes_shapes_as_build_does():
    """Rows of a step by hand are those that `build` makes of the same shapes; Layouts and specs stay what they are."""
    program = importlib.import_module("tests.outsiders.own_data")
    value = program.describe(program.Config(mesh=Mesh(fsdp=2)))
    shapes = {"x": ((16, 8), tree.leaves(value.batch)[0].dtype), "y": ((16,), tree.leaves(value.batch)[0].dtype)}
    by_hand = step.Description(value.function, value.state, shapes)
    assert by_hand.batch == value.batch and step.Description(*value).batch == value.batch
    assert by_hand.batch["x"].axes(0) == ("fsdp",) and build is step.build
    with pytest.raises(ValueError, match=r"Description: batch\['x'\]: got 16, wanted the shape of an int64 array"):
        step.Description(value.function, value.state, {"x": 16})
    for wrong in (
        ((16, 8), "float32"),
        (torch.float32, (16, 8)),
        ((8.0, 4), torch.float32),
        ((True, 4), torch.float32),
    ):
        with pytest.raises(ValueError, match=r"batch\['x'\]: got \(.*, wanted .*torch dtype"):
            step.Description(value.function, value.state, {"x": wrong})
    with pytest.raises(ValueError, match="Description: state: got None, wanted specs of a state"):
        step.Description(value.function, None, {"x": (16, 8)})
