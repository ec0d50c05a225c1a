"""Scores are sums of log-softmax, whatever batch they are made in; perplexity counts every token once."""

import pytest
import torch

from fmegatron import model
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model.json_form import described, description
from tests.model.test_reference import TINY, make_batch, tiny
from tests.model.test_sample import setup

TOKENS = make_batch(TINY)["tokens"]


def log_softmax(params, row, decoder=TINY):
    """log p of each token of a row but the first, by a plain forward over it alone."""
    axes = Axes(Mesh())
    scores = model.logits(params, row[None, :-1], decoder, axes)[0, :, : decoder.vocab_size].log_softmax(-1)
    return scores.gather(-1, row[1:, None])[:, 0], scores.argmax(-1) == row[1:]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_score_is_the_sum_of_log_softmax(batch_size):
    params, *_, reader = setup()
    best = model.generate(reader, TOKENS[:1, :5], 4, temperature=0)[0]
    rows = [(TOKENS[0, :3], TOKENS[0, 3:9]), (TOKENS[1, :1], TOKENS[1, 1:]), (TOKENS[2, :5], TOKENS[2, :0])]
    rows += [(TOKENS[0, :5], best), (TOKENS[2], TOKENS[1, :1])]
    found = model.score(reader, *zip(*rows, strict=True), batch_size=batch_size)
    for (prompt, behind), got in zip(rows, found, strict=True):
        wanted, greedy = log_softmax(params, torch.cat((prompt, behind)))
        torch.testing.assert_close(got.log_likelihoods, wanted[len(prompt) - 1 :], rtol=1e-12, atol=1e-12)
        assert got.greedy == bool(greedy[len(prompt) - 1 :].all())
        assert abs(got.total - float(wanted[len(prompt) - 1 :].sum())) < 1e-9
    assert found[3].greedy and not found[0].greedy


@pytest.mark.long
@pytest.mark.parametrize("stride", [None, 1, 5, 12])
@pytest.mark.parametrize("length", [2, 12, 13, 14, 36, 37])
def test_perplexity_counts_every_token_once(stride, length):
    params, *_, reader = setup()
    text = TOKENS.flatten().repeat(2)[:length]
    got, by = model.perplexity(reader, text, stride=stride, batch_size=3), stride or 12
    total, done, start = 0.0, 0, 0
    while done < length - 1:  # windows in the order of the text, new tokens only
        row = text[start : start + 13]
        values, _ = log_softmax(params, row)
        new = min(start + 12, length - 1) - done
        total, done, start = total - float(values[len(values) - new :].sum()), done + new, start + by
    assert got.tokens == length - 1 and abs(got.loss - total / (length - 1)) < 1e-10
    assert abs(got.perplexity - torch.tensor(total / (length - 1)).exp()) < 1e-4
    assert abs(got.bits_per_byte(2 * length) * 2 * length * torch.tensor(2.0).log() - total) < 1e-3


def test_errors():
    *_, reader = setup()
    with pytest.raises(ValueError, match="wanted one for each of the 2 prompts"):
        model.score(reader, [[1], [2]], [[1]])
    with pytest.raises(ValueError, match=r"prompts\[1\]: got 0 tokens"):
        model.score(reader, [[1], []], [[1], [2]])
    with pytest.raises(ValueError, match=r"together at most Decoder.max_seq \+ 1 = 13"):
        model.score(reader, [[1]], [[1] * 13])
    with pytest.raises(ValueError, match="a stride of 1 to Decoder.max_seq=12"):
        model.perplexity(reader, [1, 2, 3], stride=13)


@pytest.mark.parametrize("changes", [{}, {"tied": True, "max_seq": 99}, {"compute_dtype": torch.bfloat16}])
def test_a_decoder_comes_back_from_its_description(changes):
    decoder = tiny(**changes)
    assert described(description(decoder)) == decoder


@pytest.mark.parametrize("wrong", [-1, TINY.vocab_size])
def test_ids_that_the_model_does_not_have(wrong):
    """Rows that only pad a table, and what ranks of tp would take for zeros."""
    *_, reader = setup()
    for call in (
        lambda: model.generate(reader, [[1, wrong]], 2),
        lambda: model.score(reader, [[wrong]], [[1]]),
        lambda: model.score(reader, [[1]], [[wrong]]),
        lambda: model.perplexity(reader, [1, wrong, 2]),
    ):
        with pytest.raises(ValueError, match=f"got the id {wrong}, wanted 0 to {TINY.vocab_size - 1}"):
            call()
    with pytest.raises(ValueError, match="-1 new tokens"):
        model.generate(reader, [[1]], -1)
