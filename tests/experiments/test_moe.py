"""The experiment with experts: two steps of both models, equal work per token, one picture; checked on four ranks."""

import pytest

from experiments import moe
from fmegatron import loop
from fmegatron.check import main as check
from fmegatron.layout import Mesh
from fmegatron.model.counts import flops_per_token
from tests.experiments.given import flags, made
from tests.house import ROOT

TINY = {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 24, "seq_len": 16, "batch_size": 8, "eval_windows": 8}
SMALL = {**TINY, "steps": 2, "every": 2, "backend": "eager"}


@pytest.mark.slow
@pytest.mark.long
def test_two_steps_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    found = moe.main(made(moe.Config, run=str(tmp_path), eval_every=2, **SMALL))
    assert set(found) == {"dense", "mixture"} and all(0 < loss < 5 for loss in found.values())
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    last = [r for r in loop.read_metrics(tmp_path / "mixture" / "metrics.jsonl") if "loss" in r][-1]
    assert last["imbalance"] >= 1 and last["router_entropy"] > 0 and last["balance"] > 0


def test_equal_work():
    dense, mixture = (flops_per_token(moe.decoder(moe.Config(), kind, 65)) for kind in moe.KINDS)
    routers = 3 * 2 * moe.Config().layers * moe.Config().dim * moe.Config().experts
    assert mixture["total"] - dense["total"] == routers < 0.02 * dense["total"]


@pytest.mark.medium
def test_the_check_proves_it():
    options = flags(TINY)
    assert check([str(ROOT / "experiments/moe.py"), "--mesh", "fsdp=2,ep=2", *options]) == 0


def test_ranks_hold_experts_and_deal_rows():
    _, specs, rows = moe.describe(moe.Config(mesh=Mesh(ep=2), **TINY))
    assert specs.params["blocks"]["mlp"]["up"].layout.axes(1) == ("ep",) and rows["tokens"].axes(0) == ("ep",)
