"""GPT models of megatron-core itself, saved by it at tp 1 and 2: the same logits here, the same bits on every mesh."""

from pathlib import Path

import pytest
import torch

from fmegatron import checkpoint, interop, model, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.interop import megatron
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.testing import simulate
from tests import peer_python
from tests.interop.gpt_of_megatron import ADAMW, CASES
from tests.interop.test_hf_load import assert_shards

MESHES = [Mesh(), Mesh(tp=2), Mesh(fsdp=2, tp=2), Mesh(fsdp=3)]
STRATEGY = DataParallel.zero3()


@pytest.fixture(scope="module", params=[1, 2], ids=["tp 1", "tp 2"])
def saved(request, tmp_path_factory):
    """A folder with what megatron-core wrote on so many ranks."""
    folder = tmp_path_factory.mktemp("megatron")
    peer_python.run(Path(__file__).with_name("gpt_of_megatron.py"), "models", request.param, folder)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["tp 1, dp 2", "tp 2"])
def trained(request, tmp_path_factory):
    """The same of a training with its distributed optimizer."""
    folder = tmp_path_factory.mktemp("trained")
    peer_python.run(Path(__file__).with_name("gpt_of_megatron.py"), "trained", request.param, folder)
    return folder


def logits_on(mesh, params, of, tokens):
    """The whole logits, computed by simulated ranks."""
    layouts, axes = model.layouts(of, mesh, strategy=STRATEGY), Axes(mesh)
    rows = STRATEGY.batch_layout(tuple(tokens.shape), torch.int64, mesh)
    columns = of.padded_vocab if mesh["tp"] > 1 else of.vocab_size
    out = Layout((*tokens.shape, columns), torch.float32, mesh, (*rows.spec[:2], "tp"))
    return simulate(
        lambda p, b: model.logits(p, b["tokens"], of, axes), mesh, params, {"tokens": tokens},
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


def state_layouts(of, mesh, optimizer):
    return tree.layouts(step.state_specs(model.specs(of, mesh, strategy=STRATEGY), optimizer, STRATEGY))


def test_training_goes_on_from_megatrons_state(trained):
    """fp32: the loss of the next step, and the logits behind it, which AdamW's moments and count decide."""
    rate = {"learning_rate": ADAMW["lr"], "b1": ADAMW["adam_beta1"], "b2": ADAMW["adam_beta2"]}
    optimizer = optim.adamw(**rate, eps=ADAMW["adam_eps"], weight_decay=ADAMW["weight_decay"])
    for case in ("fp32", "experts"):
        if not (trained / case).exists():  # experts at tp 2: see the program
            continue
        run, found = trained / case / "run", torch.load(trained / case / "next.pt")
        of = megatron.decoder(run, param_dtype=torch.float32, compute_dtype=torch.float32)
        layouts, axes = state_layouts(of, Mesh(), optimizer), Axes(Mesh())
        state = megatron.load_state(run, of, layouts)
        assert int(state.step) == int(state.opt["count"]) == 2
        train = step.build_train_step(
            lambda p, b, of=of, axes=axes, layouts=layouts: model.loss(p, b, of, axes),
            optimizer, layouts.params, axes, clip_norm=None,
        )  # fmt: skip
        tokens = found["batch"]
        state, metrics = step.jit(train, backend="eager")(state, {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        assert abs(float(metrics["loss"]) / float(found["loss"]) - 1) <= 1e-5, case
        got = model.logits(state.params, tokens[:, :-1], of, axes)
        wanted = found["logits"][..., : of.vocab_size]
        assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max(), case


def test_masters_and_moments_of_its_distributed_optimizer(trained):
    """bf16 parameters with fp32 masters; the same bits on every mesh; fp32 parameters from the masters alone."""
    run, optimizer = trained / "bf16" / "run", optim.adamw(1e-3)
    of = megatron.decoder(run, param_dtype=torch.bfloat16)
    whole = megatron.load_state(run, of, state_layouts(of, Mesh(), optimizer))
    for master, x in zip(tree.leaves(whole.opt["master"]), tree.leaves(whole.params), strict=True):
        assert master.dtype == torch.float32 and torch.equal(master.to(x.dtype), x)
        assert not torch.equal(master, x.float())
    assert all((v >= 0).all() and v.any() for v in tree.leaves(whole.opt["adam"]["v"]))
    for mesh in MESHES:
        layouts = state_layouts(of, mesh, optimizer)
        for rank in range(mesh.size):
            assert_shards(megatron.load_state(run, of, layouts, rank=rank), whole, layouts, rank)
    wide = megatron.decoder(run, param_dtype=torch.float32)
    params = megatron.load_state(run, wide, state_layouts(wide, Mesh(), optimizer)).params
    assert all(map(torch.equal, tree.leaves(params), tree.leaves(whole.opt["master"])))
