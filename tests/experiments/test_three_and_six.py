"""Experiments on 3 and 6 ranks, which divide none of their sizes but the batch: they start, and mean the same."""

import dataclasses
import importlib

import pytest

from experiments import finetune, preferences, shakespeare, windowed
from fmegatron import testing, tree
from fmegatron.layout import Mesh
from tests.experiments.given import made

ROWS = {"mixer": 30, "own_model": 30, "windowed": 30, "two_towers": 72}  # others: 18
TP = {"heads": 6, "dim": 132, "vocab_multiple": 66}
BY_HEADS = {"shakespeare": {"multiple": 3}, "moe": TP, "own_model": TP, "windowed": TP}
DATA = [Mesh(fsdp=3), Mesh(fsdp=6), Mesh(dp=2, fsdp=3)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["by_hand", "mixer", "two_towers", *BY_HEADS])
def test_it_starts(name):
    """All sizes but the rows are those that it has by itself; tp=3 is what flags can make of it."""
    of, rows = importlib.import_module(f"experiments.{name}"), {"batch_size": ROWS.get(name, 18)}
    for mesh in DATA:
        of.describe(of.Config(mesh=mesh, **rows))
    for mesh in (Mesh(tp=3), Mesh(dp=2, tp=3), Mesh(tp=6)) if name in BY_HEADS else ():
        of.describe(of.Config(mesh=mesh, **rows, **BY_HEADS[name]))
    for mesh in (Mesh(fsdp=3, tp=2),) if name in BY_HEADS else ():
        of.describe(of.Config(mesh=mesh, **rows))


LM = {"dim": 12, "layers": 2, "heads": 2, "seq_len": 8, "batch_size": 12}
SMALL = {
    "by_hand": {"batch_size": 12},
    "mixer": {"dim": 10, "layers": 2, "seq_len": 8, "batch_size": 12},
    "two_towers": {"dim": 10, "layers": 2, "image": 7, "text": 5, "out": 5, "batch_size": 24},
    "shakespeare": LM, "moe": LM | {"ffn_dim": 20}, "own_model": LM, "windowed": LM | {"window": 3},
}  # fmt: skip


def equal_to_one_rank(of, config, mesh):
    testing.assert_parity(lambda m: of.describe(dataclasses.replace(config, mesh=m)), mesh, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", DATA, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_it_steps(name, mesh):
    """Two updates, all leaves of the state and all metrics those of one rank, in fp64."""
    of = importlib.import_module(f"experiments.{name}")
    equal_to_one_rank(of, made(of.Config, **SMALL[name]), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", DATA, ids=str)
def test_preferences_step(tmp_path, mesh):
    run = {"run": str(tmp_path), "steps": 1, "backend": "eager"}
    shakespeare.experiment(made(shakespeare.Config, eval_windows=1, prompts=(), warmup=0, **LM, **run))
    equal_to_one_rank(preferences, preferences.Config(start=str(tmp_path), pairs=6, seq_len=6), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", DATA, ids=str)
def test_finetune_steps(tmp_path, mesh):
    pytest.importorskip("transformers")
    from tests.model.families.tiny_hf import model_of

    model_of("llama3.1", vocab_size=256).save_pretrained(tmp_path / "model")
    config = finetune.Config(model=str(tmp_path / "model"), seq_len=8, batch_size=12, sequence_parallel=False)
    equal_to_one_rank(finetune, config, mesh)


@pytest.mark.slow
@pytest.mark.long
def test_columns_of_a_padded_vocabulary_count_in_no_loss():
    """Label smoothing adds up all columns of the logits; those behind the bytes are minus infinity under tp."""
    sizes = {"dim": 12, "heads": 3, "layers": 1, "seq_len": 6, "window": 3, "batch_size": 2, "vocab_multiple": 66}
    config = made(windowed.Config, **sizes)
    mesh, batch = Mesh(tp=3), windowed.read(config).at(0)
    _, specs, rows = windowed.describe(dataclasses.replace(config, mesh=mesh))
    layouts, state = tree.layouts(specs), tree.init(windowed.describe(config).state, 0, 0)
    testing.assert_parity(
        lambda mesh: windowed.describe(dataclasses.replace(config, mesh=mesh)), mesh, state, batch,
        layouts=(layouts, rows), out_layouts=(layouts, None), tolerance=1e-4,
    )  # fmt: skip
