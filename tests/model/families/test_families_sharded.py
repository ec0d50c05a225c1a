"""Every family on simulated ranks equals one rank, loss and each gradient, fp64, 1e-10; the check proves all of it."""

import dataclasses

import pytest
import torch

from fmegatron import model, optim, step, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.counts import parameters
from fmegatron.model.families.registry import family_of
from fmegatron.model.forward import hidden
from fmegatron.step.layer import compiled_layer
from tests.definition import loss_of
from tests.model.families.tiny_hf import MODELS, config_of
from tests.model.test_reference import make_batch, tiny
from tests.model.test_sharded import check
from tests.pairs import few, mixed

pytest.importorskip("transformers")
FSDP_TP = Mesh(fsdp=2, tp=2)


def family(name, **changes):
    """The tiny model of a family, in fp64."""
    config = config_of(name)[1].to_dict()
    return model.deterministic(family_of(config).decoder(config, precision=Precision.fp64(), **changes))


DENSE = [name for name in MODELS if not set(MODELS[name][1]) & {"num_experts_per_tok"}]
EXPERTS = [name for name in MODELS if name not in DENSE]  # minutes each: their graphs are long
CASES = mixed(DENSE, [Mesh(dp=2, tp=2), FSDP_TP], [False, True])


@pytest.mark.parametrize(
    ("name", "mesh", "sequence_parallel"), few(1, CASES, ["-".join(map(str, case)) for case in CASES])
)
def test_loss_and_each_gradient(name, mesh, sequence_parallel):
    check(family(name, sequence_parallel=sequence_parallel), mesh, save="inputs")


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name, sequence_parallel):
    of = family(name, sequence_parallel=sequence_parallel)
    check(of, FSDP_TP, save="inputs")
    assert_proven(of, FSDP_TP)


def assert_proven(decoder, mesh, save="inputs", **others):
    """The train step has no finding and nothing unproven."""
    axes, layouts, optimizer = Axes(mesh), model.layouts(decoder, mesh), optim.adamw(1e-3)
    train = step.build_train_step(lambda p, b: model.loss(p, b, decoder, axes, save), optimizer, layouts, axes)
    rows = DataParallel().batch_layout((8, 12), torch.int64, mesh)
    batch = {"tokens": rows, "labels": rows, **dict.fromkeys(others, rows)}
    report = step.check(train, step.state_specs(model.specs(decoder, mesh), optimizer), batch)
    assert report.ok, str(report)


PROVEN = mixed(DENSE, [False, True])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sequence_parallel"), few(1, PROVEN, ["-".join(map(str, case)) for case in PROVEN]))
def test_every_output_is_proven(name, sequence_parallel):
    assert_proven(family(name, sequence_parallel=sequence_parallel), Mesh(dp=2, fsdp=2, tp=2))


# ---- fewer key/value heads than ranks of tp --------------------------------------------------------------------------
COPIES = [(Mesh(tp=4), 2), (Mesh(fsdp=2, tp=2), 1), (Mesh(tp=2), 2), (Mesh(tp=4), 1)]


OF_COPIES = [(*case, bias) for case in COPIES for bias in (False, True)]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mesh", "kv_heads", "bias"), few(1, OF_COPIES, [" ".join(map(str, c)) for c in OF_COPIES]))
def test_copies_of_kv_heads(mesh, kv_heads, bias):
    of = tiny(kv_heads=kv_heads, kv_copies=True, bias=bias, out_bias=bias, sequence_parallel=bias)
    check(of, mesh, save="inputs")
    assert_proven(of, mesh)


def test_copies_compute_what_fused_projections_do():
    fused, copied, mesh = tiny(), tiny(kv_copies=True), Mesh()
    params, batch = init(fused, mesh, 0), make_batch(fused)
    w = params["blocks"]["attention"]["wqkv"]
    attention = {"wq": w[..., :32], "wkv": w[..., 32:], "wo": params["blocks"]["attention"]["wo"]}
    other = {**params, "blocks": {**params["blocks"], "attention": attention}}
    losses = [loss_of(model.loss(p, batch, of, Axes(mesh))[0]) for p, of in ((params, fused), (other, copied))]
    assert torch.equal(*losses)


def test_more_ranks_than_copies_can_serve():
    with pytest.raises(ValueError, match=r"Attention.kv_heads: got 2, wanted a multiple of tp=3 .* kv_copies=True"):
        tiny(heads=6, dim=48, kv_heads=2, kv_copies=True).check_mesh(Mesh(tp=3))


# ---- packed documents ------------------------------------------------------------------------------------------------
PACKED = {"plain": {}, "window": {"window": 3}, "softcap, sinks": {"softcap": 2.0, "sinks": True}}


@pytest.mark.parametrize("name", PACKED)
def test_documents_do_not_see_each_other(name):
    """A row of two packed documents gives each the logits that it has alone."""
    of, mesh = tiny(**PACKED[name]), Mesh()
    params, axes = init(of, mesh, 0), Axes(mesh)
    tokens = make_batch(of)["tokens"]
    positions = torch.cat((torch.arange(5), torch.arange(7))).expand(3, -1)
    documents = torch.cat((torch.zeros(5), torch.ones(7))).long().expand(3, -1)
    batch = {"tokens": tokens, "positions": positions, "documents": documents}
    got = model.read_out(*hidden(params, batch, of, axes)[:3], of)
    alone = [model.logits(params, part, of, axes) for part in (tokens[:, :5], tokens[:, 5:])]
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(1, [(name,) for name in PACKED], PACKED))
def test_documents_on_a_mesh(name):
    of = tiny(**PACKED[name], sequence_parallel=True)

    def batch_of(config, batch_size, mask=False):
        batch = make_batch(config, batch_size)
        documents = (torch.arange(12) >= torch.randint(1, 12, (batch_size, 1))).long()
        return {**batch, "documents": documents, "positions": torch.arange(12).repeat(batch_size, 1)}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.model.test_sharded.make_batch", batch_of)
        check(of, FSDP_TP, save="inputs")
    assert_proven(of, FSDP_TP, documents=True, positions=True)


# ---- stacks ----------------------------------------------------------------------------------------------------------
@pytest.mark.medium
def test_blocks_with_equal_arrays_share_a_stack_and_those_with_equal_maths_a_compiled_pair(monkeypatch):
    gemma, made = family("gemma2"), []
    assert {name: stack.depths for name, stack in gemma.stacks.items()} == {"blocks": (0, 1, 2, 3, 4, 5)}
    compiled = compiled_layer

    def counted(*args, **options):
        made.append(compiled(*args, **options))
        return made[-1]

    monkeypatch.setattr("fmegatron.step.layer.compiled_layer", counted)
    mesh = Mesh()
    params = init(gemma, mesh, 0)
    model.loss(params, make_batch(gemma), gemma, Axes(mesh), "inputs")
    assert len(made) == 2  # with windows, and without


def mixed_stacks(**changes):
    """A decoder of two kinds of blocks in turn, of other widths."""
    of = tiny(layers=4, **changes)
    narrow = tiny(layers=4, ffn_dim=32, **changes).blocks[0]
    return dataclasses.replace(of, blocks=(of.blocks[0], narrow, narrow, of.blocks[0]))


@pytest.mark.slow
def test_blocks_of_two_kinds_on_a_mesh():
    of = mixed_stacks(kv_heads=2, sequence_parallel=True)
    check(of, FSDP_TP, save="inputs")
    assert_proven(of, FSDP_TP)


def test_blocks_of_two_kinds():
    of = mixed_stacks(kv_heads=2, sequence_parallel=True)
    assert {name: stack.depths for name, stack in of.stacks.items()} == {"blocks": (0, 3), "blocks2": (1, 2)}
    assert parameters(of)["total"] == sum(x.numel() for x in tree.leaves(init(of, Mesh(), 0)))


def test_angles_of_equal_ropes_are_computed_once():
    gemma = family("gemma3")
    tables = [at.angles["attention"] for at in gemma.at(torch.arange(8))]
    assert len({id(cos) for cos, _ in tables}) == 2
