"""GPT models of megatron-core itself, saved by it at tp 1 and 2: the same logits here, the same bits on every mesh."""

from pathlib import Path

import pytest
import torch

from fmegatron import checkpoint, interop, model, tree
from fmegatron.collectives import Axes
from fmegatron.interop import megatron
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.testing import simulate
from tests import peer_python
from tests.interop.gpt_of_megatron import CASES
from tests.interop.test_hf_load import assert_shards

MESHES = [Mesh(), Mesh(tp=2), Mesh(fsdp=2, tp=2), Mesh(fsdp=3)]
STRATEGY = DataParallel.zero3()


@pytest.fixture(scope="module", params=[1, 2], ids=["tp 1", "tp 2"])
def saved(request, tmp_path_factory):
    """A folder with what megatron-core wrote on so many ranks."""
    folder = tmp_path_factory.mktemp("megatron")
    peer_python.run(Path(__file__).with_name("gpt_of_megatron.py"), request.param, folder)
    return folder


def logits_on(mesh, params, of, tokens):
    """The whole logits, computed by simulated ranks."""
    layouts, axes = model.layouts(of, mesh, strategy=STRATEGY), Axes(mesh)
    rows = STRATEGY.batch_layout(tuple(tokens.shape), torch.int64, mesh)
    out = Layout((*tokens.shape, of.padded_vocab), torch.float32, mesh, (*rows.spec[:2], "tp"))
    return simulate(
        lambda p, b: model.logits(p, b["tokens"], of, layouts, axes), mesh, params, {"tokens": tokens},
        layouts=(layouts, {"tokens": rows}), out_layouts=out,
    ).globals()  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_megatrons_and_all_meshes_hold_the_same_bits(saved, case):
    run, found = saved / case / "run", torch.load(saved / case / "logits.pt")
    of = megatron.decoder(run, param_dtype=torch.float32, compute_dtype=torch.float32)
    assert of.vocab_size == (128 if case == "experts" else 65)  # of the tokenizer, where the arguments have it
    assert checkpoint.describe(interop.source(run)).step == 7
    whole = megatron.load(run, of, model.layouts(of, Mesh()))
    wanted = found["logits"][..., : of.vocab_size]
    for mesh in MESHES:
        layouts = model.layouts(of, mesh, strategy=STRATEGY)
        for rank in range(mesh.size):
            assert_shards(megatron.load(run, of, layouts, rank=rank), whole, layouts, rank)
        got = logits_on(mesh, whole, of, found["tokens"])[..., : of.vocab_size]
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max(), mesh
    assert all(torch.isfinite(x).all() for x in tree.leaves(whole))
