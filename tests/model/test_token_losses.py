"""Losses per token, and the three functions of a forward pass by themselves, against the whole."""

import functools

import pytest
import torch
import torch.nn.functional as F

from fmegatron import model, nn, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.forward import block
from fmegatron.testing import simulate
from fmegatron.testing.compare_ranks import relative_error
from tests.pairs import each_value

B, S, V = 4, 8, 48
SIZES = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_seq": S, "vocab_multiple": 8}
llama = functools.partial(model.llama, V, **SIZES, precision=Precision.fp64())
DECODERS = {
    "whole": llama(),
    "tied, in chunks, capped": llama(tied=True, loss_chunks=4, logit_softcap=5.0),
    "sequence parallel": llama(loss_chunks=2, sequence_parallel=True),
    "experts": llama(mlp=model.MoE(nn.Router(4, 2, normalised=True), 8, z_loss=0.05)),
}


def batch_of_all():
    g = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, V, (2, B, S), generator=g)
    return {"tokens": tokens, "labels": torch.where(torch.rand(B, S, generator=g) < 0.2, -100, labels)}


MESHES = [Mesh(), Mesh(tp=2), Mesh(dp=3), Mesh(dp=2, tp=2)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), each_value(DECODERS, MESHES, ids=[str, str]))
def test_they_are_minus_the_log_softmax(name, mesh):
    """A label below 0 has none, as of torch's ignore_index."""
    if mesh.extent("dp") == 3:
        given = {k: x[:3] for k, x in batch_of_all().items()}
    else:
        given = batch_of_all()
    of, params = DECODERS[name], init(DECODERS[name], Mesh(), 0)
    logits_BSV = model.logits(params, given["tokens"], of, Axes(Mesh()))[..., :V]
    labels = given["labels"]
    wanted = F.cross_entropy(logits_BSV.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)

    def losses(params, batch):
        nll_BS, beside = model.token_losses(params, batch, of)
        return nll_BS, beside.lse

    rows = {k: DataParallel("dp").batch_layout(tuple(x.shape), x.dtype, mesh) for k, x in given.items()}
    out = rows["labels"].replace(dtype=torch.float64)
    layouts = (model.layouts(of, mesh), rows)
    nll_BS, lse_BS = simulate(losses, mesh, params, given, layouts=layouts, out_layouts=(out, out)).globals()
    assert relative_error(nll_BS, wanted) < 1e-12
    assert relative_error(lse_BS, logits_BSV.logsumexp(-1)) < 1e-12


def test_its_gradients_for_any_weights_of_tokens_are_those_of_whole_logits():
    given, weight_BS = batch_of_all(), torch.linspace(-1, 2, B * S, dtype=torch.float64).view(B, S)
    for of in (DECODERS["tied, in chunks, capped"], DECODERS["whole"]):
        params = init(of, Mesh(), 0)
        found = []
        for chunked in (True, False):
            leaves = tree.map(lambda x: x.clone().requires_grad_(), params)
            if chunked:
                nll_BS, _ = model.token_losses(leaves, given, of, Axes(Mesh()))
            else:
                logits_BSV = model.logits(leaves, given["tokens"], of, Axes(Mesh()))[..., :V]
                nll_BS = -logits_BSV.log_softmax(-1).gather(-1, given["labels"].clamp(min=0)[..., None])[..., 0]
                nll_BS = nll_BS * (given["labels"] >= 0)
            found.append(torch.autograd.grad((nll_BS * weight_BS).sum(), tree.leaves(leaves)))
        assert all(relative_error(a, b) < 1e-11 for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", DECODERS)
def test_embed_blocks_and_head_by_themselves_are_the_logits(name):
    of, axes, given = DECODERS[name], Axes(Mesh()), batch_of_all()
    params, layouts = init(of, Mesh(), 0), model.layouts(of, Mesh())
    weights, at = model.Weights(params, layouts, of, axes), model.contexts(given, of, axes)
    x_BSD = model.embed(given["tokens"], weights["embed"]["embed"], at[0], of)

    def twice(x_BSD, w, at, parts):
        return block(x_BSD, w, at, parts=parts)

    functions = [(i, functools.partial(twice, parts=parts)) for i, parts in enumerate(of.blocks)]
    x_BSD, _ = model.blocks(x_BSD, at[1:], weights.layers(functions))
    found = model.read_out(x_BSD, weights["head"], at[1], of)
    assert torch.equal(found, model.logits(params, given["tokens"], of, axes))


def test_a_batch_of_other_shapes_is_refused():
    of, given = DECODERS["whole"], batch_of_all()
    with pytest.raises(ValueError, match=r"batch\['labels'\]: got shape \(4, 7\), wanted that of the tokens, \(4, 8\)"):
        model.token_losses(init(of, Mesh(), 0), given | {"labels": given["labels"][:, 1:]}, of)
