"""Dropout and router noise in decoders: the same masks on every mesh, in microbatches and recomputed; never silent."""

import dataclasses
import functools

import pytest
import torch

from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.arrays import TokenContext
from fmegatron.model.draws import draws_of, dropped
from fmegatron.model.families.gpt2 import gpt2 as gpt2_of_model
from fmegatron.model.families.registry import family_of
from fmegatron.model.json_form import described, description
from fmegatron.nn.context_parallel import zigzag as zigzag_of_nn
from fmegatron.testing import assert_parity, simulate
from fmegatron.testing.compare_ranks import relative_error
from tests.model.test_reference import leaves_that_differ
from tests.pairs import few
from tests.step.proven import proven_and_equal

ROWS, SEQ, VOCAB, OPTIMIZER = 16, 16, 46, optim.sgd(0.1, momentum=0.9)
DATA = ("dp", "fsdp", "ep")
HSDP = DataParallel(DATA, *[("fsdp",)] * 3)
NOISY = {"jitter": 0.2, "noise": 0.5}
ROUTER = nn.Router(4, 2, normalised=True)


def with_dropout(of, context=None, **changes):
    """A model whose parts, embedding, and routers draw numbers."""

    def other(part):
        mixer = part.mixer
        if isinstance(mixer, model.Attention):
            mixer = dataclasses.replace(mixer, context=context)
        return dataclasses.replace(part, dropout=0.2, mixer=mixer)

    blocks = tuple(tuple(map(other, block)) for block in of.blocks)
    mtp = of.mtp and dataclasses.replace(of.mtp, block=tuple(map(other, of.mtp.block)))
    return dataclasses.replace(of, blocks=blocks, mtp=mtp, embed_dropout=0.1, **changes)


def gpt2(**changes):
    sizes = {"vocab_size": VOCAB, "dim": 16, "layers": 2, "heads": 4, "max_seq": SEQ, "vocab_multiple": 2}
    return gpt2_of_model(**{**sizes, "dropout": 0.2, "embed_dropout": 0.1, "precision": Precision.fp64(), **changes})


def mixture(context=None, sequence_parallel=False, ep=("ep",)):
    mlp = model.MoE(ROUTER, 12, balance=0.1, z_loss=0.01, ep=ep, **NOISY)
    of = model.llama(
        VOCAB, dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, max_seq=SEQ, mlp=mlp, vocab_multiple=2,
        precision=Precision.fp64(), sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return with_dropout(of, context)


def further():
    """Two depths of multi-token prediction behind one block."""
    of = gpt2(layers=1)
    return dataclasses.replace(of, mtp=model.MTP(of.blocks[0], depths=2, norm=of.norm))


# name -> (mesh, model, documents in a row?, microbatches, what a block saves)
CASES = {
    "dp and fsdp, accumulated": (Mesh(dp=2, fsdp=2), gpt2(), False, 2, "inputs"),
    "tp, softmax too": (Mesh(fsdp=2, tp=2), gpt2(attention_dropout=0.3), True, 1, "mincut"),
    "tp, sequence parallel": (Mesh(dp=2, tp=2), mixture(sequence_parallel=True), True, 1, "inputs"),
    "cp": (Mesh(dp=2, cp=2), gpt2(), True, 2, None),
    "cp and tp, experts over them": (Mesh(cp=2, tp=2), mixture("ulysses", True, ("cp", "tp")), False, 1, "inputs"),
    "ep": (Mesh(fsdp=2, ep=2), mixture(), False, 2, "inputs"),
    "ep and tp": (Mesh(ep=2, tp=2), mixture(), True, 1, None),
    "balanced": (Mesh(cp=2, ep=2), mixture("balanced"), True, 1, "inputs"),
    "more tokens": (Mesh(fsdp=2, tp=2), further(), True, 2, "inputs"),
}


def train_step(mesh, of, n=1, save=None, key=3):
    axes, layouts = Axes(mesh, data=HSDP.tokens), model.layouts(of, mesh, strategy=HSDP)

    def loss(params, batch, samples):
        return model.loss(params, batch, of, axes, save, samples=samples, key=key)

    return step.build_train_step(loss, OPTIMIZER, layouts, axes, strategy=HSDP, microbatches=n, with_sample_ids=True)


def specs_of(mesh, of):
    return step.state_specs(model.specs(of, mesh, strategy=HSDP), OPTIMIZER, HSDP)


def state_of(of):
    state = tree.init(specs_of(Mesh(), of), 0, 0)
    return state._replace(step=torch.tensor(5), params=leaves_that_differ(state.params))


def batch_of(packed, zigzag=1, i=0):
    g = torch.Generator().manual_seed(i)
    batch = {name: torch.randint(0, VOCAB, (ROWS, SEQ), generator=g) for name in ("tokens", "labels")}
    at, begins = torch.arange(SEQ).expand(ROWS, -1), torch.randint(1, SEQ + 1, (ROWS, 1), generator=g)
    if packed:
        second = at >= begins
        batch |= {"documents": second.long(), "positions": torch.where(second, at - begins, at)}
    elif zigzag > 1:
        batch["positions"] = at
    return {name: x[:, zigzag_of_nn(SEQ, zigzag)].contiguous() for name, x in batch.items()}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", few(1, [(name,) for name in CASES], CASES))
def test_equal_to_one_rank_and_proven(name):
    """Loss, gradients (first moments), norms and two updates, fp64; and it is not the model without dropout."""
    mesh, of, packed, n, save = CASES[name]
    zigzag = mesh["cp"] if name == "balanced" else 1
    batch = functools.partial(batch_of, packed, zigzag)
    rows = {k: HSDP.batch_layout(tuple(x.shape), x.dtype, mesh, n) for k, x in batch().items()}
    specs, state = specs_of(mesh, of), state_of(of)
    equal = proven_and_equal if of.mtp is None else assert_parity  # its labels ahead are padded in the step
    found = equal(
        lambda m: train_step(m, of, n, save), mesh, state, lambda i: batch(i=i), layouts=(tree.layouts(specs), rows),
        steps=2, floor=1e-12,
    )  # fmt: skip
    _, quiet = train_step(Mesh(), model.deterministic(of))(state, batch())
    _, once = train_step(Mesh(), of)(state, batch())
    assert abs(once["loss"] - quiet["loss"]) > 1e-4 and {"loss", "grad_norm"} <= set(found.sharded.metrics)


# ---- the masks themselves --------------------------------------------------------------------------------------------
MESHES = [Mesh(dp=2, tp=2), Mesh(fsdp=2, cp=2), Mesh(cp=2, cpi=2), Mesh(ep=2, cp=2, tp=2), Mesh(cp=4)]


@pytest.mark.medium
@pytest.mark.parametrize("split", [False, True], ids=["", "sequence parallel"])
def test_masks_are_the_same_bit_for_bit(split):
    """On every mesh, however the sequence is dealt; other tokens, samples, depths, parts and keys have others."""
    packed = batch_of(True)
    at = {"samples": torch.arange(ROWS) + 2**33, "positions": packed["positions"], "documents": packed["documents"]}

    def masks(mesh, order, key=1, depth=2, name="mlp"):
        axes, names = Axes(mesh, data=HSDP.tokens), ("positions", "documents")

        def of_rank(x, at):
            draws = draws_of(at["samples"], at["positions"], at["documents"], key, SEQ, 7)
            given = TokenContext(at["positions"], draws=draws(depth), axes=axes)
            return {"x": dropped(x["x"], 0.5, name, given)}, {}

        rows = HSDP.batch_layout((ROWS, SEQ), torch.int64, mesh)
        along = (*HSDP.sequence, "tp") if split else HSDP.sequence
        layouts = {k: rows for k in names} | {"samples": HSDP.batch_layout((ROWS,), torch.int64, mesh)}
        of_x = {"x": Layout((ROWS, SEQ, 6), torch.float64, mesh, (HSDP.axes, along))}
        values = {k: x[:, order] if x.dim() > 1 else x for k, x in at.items()}
        ones = {"x": torch.ones(ROWS, SEQ, 6, dtype=torch.float64)}
        sim = simulate(of_rank, mesh, ones, values, layouts=(of_x, layouts), out_layouts=(of_x, {}))
        return sim.globals()[0]["x"][:, order.argsort()]

    in_order = torch.arange(SEQ)
    wanted = masks(Mesh(), in_order)
    for mesh in MESHES:
        for order in (in_order, zigzag_of_nn(SEQ, 4)):
            assert torch.equal(masks(mesh, order), wanted), mesh
    flat = wanted.flatten(0, 1)
    assert 0.4 < flat.bool().double().mean() < 0.6 and len(flat.unique(dim=0)) > 55  # of 64 masks of six elements
    for other in ({"key": 2}, {"depth": 3}, {"name": "attention"}):
        assert not torch.equal(masks(Mesh(), in_order, **other), wanted)


def test_dropout_of_the_softmax_is_the_definition():
    """Masked weights times values, by hand; the weights that stay are scaled."""
    of = gpt2(layers=1, dropout=0.0, embed_dropout=0.0, attention_dropout=0.5)
    mixer = of.blocks[0][0].mixer
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, 4, 4, generator=g, dtype=torch.float64) for _ in range(3))
    positions = torch.arange(5)
    at = TokenContext(positions, draws=draws_of(torch.arange(2), positions, None, 0, SEQ, 2)(1))
    got = mixer.attend(q, k, v, {}, at)
    assert not torch.equal(got, mixer.attend(q, k, v, {}, at._replace(draws=None)))
    eye = torch.eye(5, dtype=torch.float64)[None, :, None].expand(2, 5, 4, 5)  # values that show the weights
    p_BSHT = mixer.attend(q, k, eye, {}, at)
    s = (q.transpose(1, 2) @ k.transpose(1, 2).mT / 2).masked_fill(
        ~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf
    )
    p = s.softmax(-1).transpose(1, 2)
    kept = p_BSHT != 0
    torch.testing.assert_close(p_BSHT, torch.where(kept, 2 * p, 0), rtol=1e-12, atol=1e-14)
    assert 0.3 < kept[p > 0].double().mean() < 0.7
    torch.testing.assert_close(
        got, (p_BSHT.transpose(1, 2) @ v.transpose(1, 2)).transpose(1, 2), rtol=1e-12, atol=1e-13
    )


# ---- nothing is silent -----------------------------------------------------------------------------------------------
def test_a_gradient_without_samples_is_refused():
    of = gpt2()
    params, batch = init(of, Mesh(), 0), batch_of(False)
    grad = step.value_and_grad(lambda p, b, of=of: model.loss(p, b, of, Axes(Mesh())), axes=Axes(Mesh()))
    with pytest.raises(
        ValueError, match=r"Decoder.embed_dropout: got 0.1 in a loss .*with_sample_ids=True.*deterministic"
    ):
        grad(params, batch)
    quiet = model.deterministic(of)
    (loss, _), _ = step.value_and_grad(lambda p, b: model.loss(p, b, quiet, Axes(Mesh())))(params, batch)
    parts, _ = model.loss(params, batch, of, Axes(Mesh()))
    assert torch.equal(loss, step.means(parts, Axes(Mesh()))["lm"])  # evaluation draws nothing
    noisy = model.deterministic(mixture())
    assert noisy == model.deterministic(noisy) and not any(
        getattr(p.mixer, "noise", 0) for b in noisy.blocks for p in b
    )


def test_dropout_of_the_softmax_is_refused_over_cp():
    of, mesh = gpt2(attention_dropout=0.1), Mesh(cp=2)
    rows = HSDP.batch_layout((ROWS, SEQ), torch.int64, mesh)
    with pytest.raises(ValueError, match="Attention.dropout: got 0.1 on the mesh cp2, .* set it to 0"):
        step.check(train_step(mesh, of), specs_of(mesh, of), {"tokens": rows, "labels": rows})


def test_config_json():
    """GPT-2's three rates are fields; what is absent is what transformers takes then; others are refused by name."""
    config = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": SEQ}
    family = family_of(config)
    of = family.decoder({**config, "resid_pdrop": 0.3, "embd_pdrop": 0.0})
    part = of.blocks[0][0]
    assert (part.dropout, of.embed_dropout, part.mixer.dropout) == (0.3, 0.0, 0.1)
    assert family.decoder(config, dropout=0.0).blocks[0][0].dropout == 0.0
    assert described(description(of)) == of
    with pytest.raises(ValueError, match="config.json: attention_dropout: got 0.1"):
        family_of({"model_type": "llama"}).decoder({"model_type": "llama", "attention_dropout": 0.1})


@pytest.mark.parametrize(("make", "field"), [
    (lambda: model.Part("x", None, dropout=1.5), "Part.dropout"),
    (lambda: model.Attention(4, 4, 4, dropout=-0.1), "Attention.dropout"),
    (lambda: gpt2(embed_dropout=2), "Decoder.embed_dropout"),
    (lambda: model.MoE(ROUTER, 4, noise=-1.0), "MoE.noise"),
])  # fmt: skip
def test_rates_that_cannot_be_meant(make, field):
    with pytest.raises(ValueError, match=f"{field}: got"):
        make()


@pytest.mark.slow
def test_compiled_equals_traced_eagerly():
    """Masks in a compiled step, recomputed in its backward, are those of the plain functions."""
    of = gpt2(attention_dropout=0.3)
    plain, compiled = train_step(Mesh(), of), step.jit(train_step(Mesh(), of, 2, "inputs"), backend="aot_eager")
    (a, b), (c, d) = (f(state_of(of), batch_of(True)) for f in (plain, compiled))
    for path, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(c), strict=True):
        assert relative_error(y, x, 1e-12) < 1e-10, path
    assert relative_error(d["grad_norm"], b["grad_norm"]) < 1e-10
