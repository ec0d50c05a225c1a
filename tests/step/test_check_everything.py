"""No finding, and no op without a rule, for every strategy, optimizer, format of state, precision and experiment."""

import pytest
import torch

from experiments import minimal, shakespeare
from fmegatron import optim
from fmegatron.collectives import Precision
from fmegatron.layout import Layout, Mesh
from fmegatron.optim import contrib
from fmegatron.optim.contrib.formats import Bfloat16
from fmegatron.optim.guard import Spike
from fmegatron.step import check
from tests.pairs import few, mixed
from tests.step.graph_mutants import problem
from tests.step.strategies import STRATEGIES

MESH = Mesh(dp=2, fsdp=2, tp=2)


def grouped():
    """Rates of their own for embedding and norms, a frozen head."""
    rules = [
        ("embed.*", optim.Group(lr=0.1)),
        (".*norm", optim.Group(weight_decay=0.0)),
        ("head.*", optim.Group(frozen=True)),
    ]
    return optim.grouped(1e-3, rules, adam=optim.scale_by_adam())


def guarded():
    """Skips, spikes, a dynamic loss scale."""
    options = {"clip_norm": 1.0, "spike": Spike(), "loss_scale": optim.LossScale()}
    return optim.skip_nonfinite(optim.adamw(1e-3), **options)


def stored(*rules):
    """AdamW whose state is stored in these formats."""
    return contrib.compressed(optim.adamw(1e-3), rules, key=3)


OPTIMIZERS = {
    "adamw": optim.adamw(optim.cosine(1e-3, 100, 10)),
    "sgd": optim.sgd(1e-2),
    "momentum": optim.sgd(1e-2, momentum=0.9),
    "lion": optim.lion(1e-3),
    "adafactor": contrib.adafactor(1e-2),
    "muon": optim.muon(1e-2),
    "soap": contrib.soap(1e-2),
    "grouped": grouped(),
    "guarded": guarded(),
    "bf16 moments, rounded at random": stored(("adam", Bfloat16(stochastic=True))),
    "int8 moments": stored(("adam/m", contrib.int8(block=2)), ("adam/v", contrib.int8(block=2, root=True))),
    "fp8 moments": stored(("adam/m", contrib.float8(block=2)), ("adam/v", contrib.float8(block=2, root=True))),
}
BF16 = {"param_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16}
OPTIONS = {
    "microbatches, mask": {"microbatches": 2, "mask": True, "strategy": STRATEGIES["zero2"]},
    "min-cut layers, tied": {"save": "mincut", "tied": True, "strategy": STRATEGIES["zero3"]},
    "remat, sequence parallel": {
        "save": "inputs", "sequence_parallel": True, "microbatches": 3,
        "strategy": STRATEGIES["hsdp"],
    },
    "bf16, fp32 sums": {**BF16, "precision": Precision.bf16(), "strategy": STRATEGIES["zero3"]},
    "bf16, exact sums": {
        **BF16, "precision": Precision(torch.bfloat16, torch.bfloat16, exact=True), "strategy": STRATEGIES["zero2"],
        "microbatches": 2,
    },
}  # fmt: skip


def assert_nothing_found(*problem_of, mesh=MESH):
    report = check(*problem_of)
    assert report.ok, str(report)


CASES = mixed(OPTIMIZERS, STRATEGIES)


@pytest.mark.medium
@pytest.mark.parametrize(("name", "strategy"), few(3, CASES, map("-".join, CASES)))
def test_optimizer_under_strategy(name, strategy):
    assert_nothing_found(*problem(MESH, OPTIMIZERS[name], strategy=STRATEGIES[strategy]))


@pytest.mark.medium
@pytest.mark.parametrize("name", few(1, [(name,) for name in OPTIONS], OPTIONS))
def test_options(name):
    assert_nothing_found(*problem(MESH, OPTIMIZERS["adamw"], **OPTIONS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", few(1, [("zero1",), ("zero3",)]))
def test_shakespeare(strategy):
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    config = shakespeare.Config(mesh=mesh, layers=1, strategy=strategy)
    assert_nothing_found(*shakespeare.describe(config), mesh=mesh)


def test_minimal():
    """Two ranks that see the same batch."""
    mesh = Mesh(dp=2)
    params = {name: Layout(shape, torch.float32, mesh) for name, shape in minimal.SHAPES.items()}
    rows = Layout((16, 64), torch.int64, mesh)
    assert_nothing_found(minimal.train_step, params, {"tokens": rows, "labels": rows}, mesh=mesh)
