"""A hybrid of Mamba-2 and attention: on simulated ranks as on one, fp64; documents; generation; refusals."""

import dataclasses

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.counts import parameters
from fmegatron.model.families.bamba import bamba
from fmegatron.model.forward import hidden
from fmegatron.model.rope import Rope
from fmegatron.model.sample import extend, new_cache
from fmegatron.nn.state_space import from_before
from tests.model.families.test_families_sharded import assert_proven
from tests.model.test_reference import make_batch
from tests.model.test_sharded import check
from tests.pairs import few, mixed


def hybrid(groups=1, layers=2, **changes):
    """A layer with a state, then one with attention; chunks that do not divide the sequence of 12."""
    mamba = model.Mamba(8, 4, 6, groups, conv=3, chunk=5, conv_bias=groups == 1, dt_range=(0.01, 0.9))
    attention = model.Attention(8, 4, 4, Rope(2))
    given = {"precision": Precision.fp64(), **changes}
    return bamba(90, 32, layers, 16, mamba, attention, model.MLP(24), (1,), **given)


MESHES = [Mesh(tp=2), Mesh(fsdp=2, tp=2), Mesh(tp=4), Mesh(dp=2, fsdp=2)]
CASES = mixed(MESHES, [1, 4], [False, True], [False, True])
IDS = ["-".join(map(str, case)) for case in CASES]


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "groups", "sequence_parallel", "documents"), few(1, CASES, IDS))
def test_loss_and_each_gradient(mesh, groups, sequence_parallel, documents, monkeypatch):
    """One layer: the other kind has its own tests, and both are in those of the families."""
    if documents:
        monkeypatch.setattr("tests.model.test_sharded.make_batch", lambda config, batch_size, mask: packed(config))
    check(hybrid(groups, 1, sequence_parallel=sequence_parallel), mesh)


@pytest.mark.medium
@pytest.mark.parametrize(("mesh", "groups", "sequence_parallel", "documents"), few(1, CASES, IDS))
def test_every_output_is_proven(mesh, groups, sequence_parallel, documents):
    others = {"documents": True, "positions": True} if documents else {}
    assert_proven(hybrid(groups, 1, sequence_parallel=sequence_parallel), mesh, None, **others)


def packed(config, batch_size=4):
    batch = make_batch(config, batch_size)
    starts = torch.tensor([[5], [8], [12], [1]])[:batch_size]
    documents = (torch.arange(12) >= starts).long()
    return batch | {"documents": documents, "positions": torch.where(documents == 0, 0, -starts) + torch.arange(12)}


def test_documents_do_not_see_each_other():
    of, mesh = hybrid(4), Mesh()
    params, axes = init(of, mesh, 0), Axes(mesh)
    batch = packed(of)
    got = model.read_out(*hidden(params, batch, of, axes)[:3], of)
    for row, cut in enumerate((5, 8, 12, 1)):
        parts = [part for part in batch["tokens"][row : row + 1].split((cut, 12 - cut), 1) if part.numel()]
        alone = torch.cat([model.logits(params, part, of, axes) for part in parts], 1)
        torch.testing.assert_close(got[row : row + 1], alone, rtol=1e-11, atol=1e-11)


def test_generation_equals_the_growing_prompt():
    of, mesh = hybrid(4), Mesh()
    params, axes = init(of, mesh, 5), Axes(mesh)
    prompts, texts = [torch.tensor([[7]]), torch.tensor([[7, 3, 80, 11, 4, 9]])], []  # shorter than the convolution
    writers = [model.inference(params, of, axes, chunk=chunk) for chunk in (1, 4, 64)]
    for prompt in prompts:
        text = prompt
        for _ in range(6):
            best = model.logits(params, text, of, axes)[:, -1, :90].argmax(-1, keepdim=True)
            text = torch.cat((text, best), 1)
        texts.append(text[0, prompt.shape[1] :])
        for writer in writers:
            assert torch.equal(model.generate(writer, prompt, 6, temperature=0)[0], texts[-1])
    for writer in writers:  # together, the shorter behind padding
        got = model.generate(writer, [prompt[0] for prompt in prompts], 6, temperature=0)
        assert torch.equal(got, torch.stack(texts))


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_row_has_the_text_that_it_has_alone(chunk):
    """Whatever is before it: with chunk=1 the padding of a shorter row is read token by token, too."""
    of, mesh = hybrid(4), Mesh()
    g = torch.Generator().manual_seed(0)
    params = tree.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=g, dtype=x.dtype), init(of, mesh, 3))
    writer = model.inference(params, of, Axes(mesh), chunk=chunk)
    prompts = [[5], [7, 8, 9, 4, 11, 30, 2, 6, 40], [3, 17]]
    together = model.generate(writer, prompts, 6, temperature=0)
    alone = torch.cat([model.generate(writer, [prompt], 6, temperature=0) for prompt in prompts])
    assert torch.equal(together, alone)
    cache = new_cache(writer, 2, 16)  # and a document that begins in the middle, token by token
    padding, ids = torch.tensor([3, 0]), torch.tensor([[1, 2, 3, 9, 8], [1, 2, 3, 9, 8]])
    for slot in range(5):
        cache, logits = extend(
            cache, writer.weights, ids[:, slot : slot + 1], torch.tensor(slot), padding, of, Axes(mesh)
        )
    for row, first in ((0, 3), (1, 0)):
        want = model.logits(params, ids[row : row + 1, first:], of, Axes(mesh))[0, -1, :90]
        torch.testing.assert_close(logits[row, :90], want, rtol=1e-9, atol=1e-9)


# ---- a split sequence ------------------------------------------------------------------------------------------------
SPLIT = mixed([Mesh(cp=2), Mesh(cp=4), Mesh(cp=2, tp=2), Mesh(fsdp=2, cp=2)], [1, 4], [False, True])
SPLIT_IDS = ["-".join(map(str, case)) for case in SPLIT]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mesh", "groups", "documents"), few(1, SPLIT, SPLIT_IDS))
def test_states_go_from_rank_to_rank(mesh, groups, documents, monkeypatch):
    """Documents begin on other ranks, at their first token, and come back under the same id."""

    def batch_of(config, batch_size, mask):
        ids = (torch.arange(12) >= torch.tensor([[5], [6], [12], [1]])).long()
        ids = torch.where(torch.arange(12) >= torch.tensor([[8], [7], [12], [2]]), 0, ids)
        of_documents = {"documents": ids, "positions": torch.arange(12).repeat(4, 1)} if documents else {}
        return make_batch(config, batch_size) | of_documents

    monkeypatch.setattr("tests.model.test_sharded.make_batch", batch_of)
    check(hybrid(groups, 1, sequence_parallel=groups == 1), mesh)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mesh", "groups", "documents"), few(1, SPLIT, SPLIT_IDS))
def test_a_split_sequence_is_proven(mesh, groups, documents):
    others = {"documents": True, "positions": True} if documents else {}
    assert_proven(hybrid(groups, 1), mesh, None, **others)


def test_ranks_with_fewer_tokens_than_the_convolution_reaches():
    with pytest.raises(ValueError, match=r"from_before: got 1 tokens on each rank of cp=4, wanted 2 or more"):
        from_before(torch.ones(2, 1, 3), Axes(Mesh(cp=4))["cp"], 2)


def test_another_order_of_the_sequence_is_refused():
    attention = dataclasses.replace(hybrid().blocks[1][0].mixer, context="balanced")
    of = bamba(90, 32, 2, 16, hybrid().blocks[0][0].mixer, attention, model.MLP(24), (1,))
    with pytest.raises(
        ValueError, match=r"Decoder.blocks: got .* order of nn.zigzag .* in order; choose context='ring'"
    ):
        model.layouts(of, Mesh(cp=2))
    model.layouts(of, Mesh(tp=2))


def test_what_does_not_divide():
    with pytest.raises(ValueError, match=r"Mamba.groups: got 4, wanted a multiple of tp=8 .*; choose tp as a divisor"):
        model.layouts(hybrid(4), Mesh(tp=8))
    with pytest.raises(ValueError, match=r"Mamba.groups: got 3, wanted a divisor of heads=8"):
        model.Mamba(8, 4, 6, groups=3)


def test_work_of_a_token():
    """Counted by hand: a chunk of 5 of 12 tokens, 3 keys on average; the state is written and read once."""
    mamba = hybrid(4).blocks[0][0].mixer
    assert mamba.products(12, True) == 2 * 3 * (4 * 6 + 32) + 4 * 32 * 6
    assert parameters(hybrid(4))["mamba"] == 32 * (64 + 8 + 48) + 3 * 80 + 3 * 8 + 32 + 32 * 32
