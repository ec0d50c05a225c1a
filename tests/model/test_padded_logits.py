"""Columns with which a vocabulary is padded count in no loss of one's own: logits are without them, or -inf there."""

import functools

import pytest
import torch
import torch.nn.functional as F

from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.model.forward import hidden
from fmegatron.testing import simulate
from tests.pairs import few
from tests.step.proven import proven_and_equal

F64 = torch.float64
MESHES = [Mesh(tp=2), Mesh(tp=3), Mesh(fsdp=2, tp=3)]
VOCABULARIES = {50: "the last rank has some", 40: "one of three ranks has nothing else", 72: "none is padded"}


def decoder(vocab_size, **changes):
    """Padded to 72: 36 columns of a rank of two, 24 of one of three."""
    sizes = {"dim": 12, "layers": 1, "heads": 6, "kv_heads": 6, "ffn_dim": 12, "max_seq": 8}
    how = {"vocab_multiple": 72, "param_dtype": F64, "compute_dtype": F64}
    return model.llama(vocab_size, **sizes, **how, **changes)


def own_loss(of, axes):
    """A loss that is none of ours: nobody tells it how many columns there are."""

    def loss_fn(params, batch):
        logits_BSV = model.logits(params, batch["tokens"], of, axes)
        nll_BS, lse_BS = nn.cross_entropy(logits_BSV, batch["labels"], axes["tp"])
        return {"focal": step.mean((nll_BS.square() + 0.1 * lse_BS).sum(), nll_BS.numel())}

    return loss_fn


def batch_of(vocab_size):
    draw = torch.Generator().manual_seed(2)
    return {name: torch.randint(0, vocab_size, (4, 8), generator=draw) for name in ("tokens", "labels")}


def described(vocab_size, changes, mesh):
    of = decoder(vocab_size, **changes)
    specs, shape = model.specs(of, mesh), {name: (4, 8) for name in ("tokens", "labels")}
    return step.build(own_loss(of, Axes(mesh)), optim.sgd(0.1), specs, shape, shards=True)


VARIANTS = [{}, {"tied": True}, {"sequence_parallel": True, "logit_softcap": 2.0}]
CASES = [(vocab_size, mesh, changes) for changes in VARIANTS for mesh in MESHES for vocab_size in VOCABULARIES]


@pytest.mark.medium
@pytest.mark.parametrize(("vocab_size", "mesh", "changes"), few(3, CASES, [f"{v}-{m}-{c}" for v, m, c in CASES]))
def test_an_own_loss_on_meshes(vocab_size, mesh, changes):
    """Proven by the check, equal to one rank, for three steps."""
    describe = functools.partial(described, vocab_size, changes)
    one = Mesh(**dict.fromkeys(mesh.names, 1))
    made = describe(mesh)
    layouts, state = (tree.layouts(made.state), made.batch), tree.init(describe(one).state, 0, 0)
    how = {"steps": 3, "layouts": layouts, "out_layouts": (layouts[0], None)}
    proven_and_equal(describe, mesh, state, batch_of(vocab_size), **how)


@pytest.mark.parametrize("tied", [False, True])
def test_by_definition(tied):
    """On one rank: plain torch on the columns there are, and no gradient of padding."""
    of, batch = decoder(50, tied=tied), batch_of(50)
    params = tree.init(model.specs(of, Mesh()), 3, 0)
    loss_fn = own_loss(of, Axes(Mesh()))
    (loss, _), grads = step.value_and_grad(loss_fn)(params, batch)
    logits = model.logits(params, batch["tokens"], of)
    assert logits.shape == (4, 8, 50)
    nll = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    wanted = (nll.square() + 0.1 * logits.logsumexp(-1).flatten()).mean()
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    of_padding = grads["embed"]["table"][50:] if tied else grads["head"]["w"][:, 50:]
    assert of_padding.abs().max() == 0 and of_padding.numel()
    parts, _ = model.loss(params, batch, of)
    torch.testing.assert_close(parts["lm"].total, nll.sum(), rtol=1e-12, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=3)], ids=str)
def test_what_read_out_hands_out(mesh):
    """Of ranks that split the vocabulary: minus infinity at padding, the rest bit for bit what one rank has; `read_out`
    of a pass in three parts too."""
    of, tokens = decoder(40), batch_of(40)["tokens"]
    specs = model.specs(of, mesh)
    params = tree.init(model.specs(of, Mesh()), 3, 0)

    def found(params, tokens):
        x, head, at, _ = hidden(params, {"tokens": tokens}, of, None)
        return {"logits": model.logits(params, tokens, of), "of parts": model.read_out(x, head, at, of)}

    out = Layout((4, 8, 72), F64, mesh, (None, None, "tp"))
    layouts = tree.layouts(specs), Layout((4, 8), torch.int64, mesh)
    got = simulate(found, mesh, params, tokens, layouts=layouts, out_layouts={"logits": out, "of parts": out}).globals()
    wanted = model.logits(params, tokens, of)
    for value in got.values():
        assert (value[..., 40:] == -torch.inf).all()
        torch.testing.assert_close(value[..., :40], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=3)], ids=str)
@pytest.mark.parametrize("chunks", [1, 4])
def test_the_loss_of_a_rank_of_padding_alone(mesh, chunks):
    """`model.loss` with 40 of 72 columns: in chunks it was NaN where a rank has nothing but padding."""
    of = decoder(40, loss_chunks=chunks)
    specs, batch = model.specs(of, mesh), batch_of(40)
    params = tree.init(model.specs(of, Mesh()), 3, 0)

    def loss(params, batch):
        return step.means(model.loss(params, batch, of)[0], Axes(mesh))

    rows = dict.fromkeys(batch, Layout((4, 8), torch.int64, mesh))
    found = simulate(loss, mesh, params, batch, layouts=(tree.layouts(specs), rows)).globals()
    parts, _ = model.loss(params, batch, decoder(40))
    torch.testing.assert_close(found["lm"], parts["lm"].total / 32, rtol=1e-12, atol=0)
