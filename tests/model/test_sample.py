"""Generation: the cache gives what the full forward gives, ragged batches what rows give alone, errors help."""

import random

import pytest
import torch

from fmegatron import data, model, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.sample import ENDED, cache_lengths, extend, new_cache
from fmegatron.step import jit
from tests.model.test_reference import TINY, leaves_that_differ, make_batch, tiny

MESH = Mesh()
MODELS = {
    "llama": TINY,
    "one_kv_head": tiny(kv_heads=1),
    "sequence_parallel": tiny(sequence_parallel=True),
    "tied": tiny(tied=True),
}


def setup(decoder=TINY, **options):
    layouts, axes = model.layouts(decoder, MESH), Axes(MESH)
    params = leaves_that_differ(init(decoder, MESH, key=5))
    return params, layouts, axes, model.inference(params, decoder, axes, **options)


def greedy(params, text, count, decoder, layouts, axes):
    """By forwards over ever longer texts."""
    for _ in range(count):
        scores = model.logits(params, text, decoder, axes)[:, -1, : decoder.vocab_size]
        text = torch.cat((text, scores.argmax(-1, keepdim=True)), 1)
    return text[:, -count:]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("chunk", "prompt"), [(1, 1), (3, 5), (12, 5)])
def test_cached_decode_equals_the_full_forward(name, chunk, prompt):
    """In pieces of any length, behind padding that has nothing to do with the text."""
    decoder = MODELS[name]
    params, layouts, axes, writer = setup(decoder)
    tokens = make_batch(decoder)["tokens"]
    full = model.logits(params, tokens, decoder, axes)
    padding = -prompt % chunk
    behind = torch.cat((tokens[:, :padding].flip(1), tokens), 1)
    cache, padding_B = new_cache(writer, 3, padding + 12), torch.full((3,), padding)
    got, sizes = [], [chunk] * ((prompt + padding) // chunk) + [1] * (12 - prompt)
    for size in sizes:
        before, at = [k.clone() for k in tree.leaves(cache)], len(got)
        done = sum(sizes[:at])
        given = (behind[:, done : done + size], torch.tensor(done), padding_B, decoder, axes)
        new, logits = extend(cache, writer.weights, *given)
        assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves(cache), strict=True)), (
            "extend changed its argument"
        )
        cache = new
        got.append(logits)
    ends = [sum(sizes[: i + 1]) - padding - 1 for i in range(len(sizes))]
    for end, logits in zip(ends, got, strict=True):
        if end >= 0:
            torch.testing.assert_close(logits, full[:, end], rtol=1e-10, atol=1e-12)


def test_greedy_equals_the_argmax_of_growing_prompts():
    params, layouts, axes, writer = setup()
    prompt = make_batch(TINY)["tokens"][:, :4]
    ours = model.generate(writer, prompt, 6, temperature=0)
    assert torch.equal(ours, greedy(params, prompt, 6, TINY, layouts, axes))


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("chunk", [2, 64])
def test_rows_of_any_lengths_have_the_texts_that_they_have_alone(how, chunk):
    *_, writer = setup(chunk=chunk)
    tokens = make_batch(TINY)["tokens"]
    prompts = [tokens[0, :1], tokens[1, :7], tokens[2, :4].tolist()]
    together = model.generate(writer, prompts, 5, key=3, **how)
    for i, prompt in enumerate(prompts):
        assert torch.equal(model.generate(writer, [prompt], 5, key=3, rows=[i], **how)[0], together[i])


@pytest.mark.medium
def test_compiled_once_for_prompts_and_counts_of_all_lengths():
    """Four forms for 50 pairs up to 512, and the text of plain functions."""
    decoder = tiny(max_seq=1024, layers=1)
    made = []

    def compile(fn, donate=None):
        made.append(jit(fn, donate=donate, backend="eager"))
        return made[-1]

    *_, compiled = setup(decoder, compile=compile)
    *_, plain = setup(decoder)
    numbers = random.Random(0)
    tokens = torch.randint(0, decoder.vocab_size, (512,), generator=torch.Generator().manual_seed(0))
    for i in range(50):
        length, count = numbers.randint(1, 512), numbers.randint(1, 512)
        generator = model.stream(compiled, [tokens[:length]], count, key=i, temperature=0.8)
        text = [next(generator) for _ in range(min(count, 2))]
        if i < 5:
            wanted = model.stream(plain, [tokens[:length]], count, key=i, temperature=0.8)
            assert all(torch.equal(token, next(wanted)) for token in text)
    assert [len(fn.cache) for fn in made if fn.cache] == [1] * 4


def test_lengths_of_a_cache_hold_every_prompt_and_count():
    for max_seq, chunk in ((12, 12), (512, 64), (1024, 64), (5000, 64), (300, 7)):
        lengths = cache_lengths(max_seq, chunk)
        assert list(lengths) == sorted(set(lengths)) and lengths[-1] >= -(-(max_seq - 1) // chunk) * chunk
        assert all(-(-length // chunk) * chunk + max_seq - length - 1 <= lengths[-1] for length in range(1, max_seq))


def test_one_key_gives_one_text():
    *_, writer = setup()
    prompt = make_batch(TINY)["tokens"][:, :4]

    def text(key, **how):
        return model.generate(writer, prompt, 8, key=key, temperature=1.3, top_p=0.9, **how)

    assert torch.equal(text(1), text(1)) and not torch.equal(text(1), text(2))
    assert int(text(1).max()) < TINY.vocab_size, "a padded id was chosen"
    same = prompt[:1].expand(3, -1)
    texts = model.generate(writer, same, 8, key=1, temperature=1.3)
    assert len({tuple(row) for row in texts.tolist()}) > 1, "rows of one prompt share their chance"


def test_stop_ids_end_each_row_for_itself():
    *_, writer = setup()
    prompt = make_batch(TINY)["tokens"][:, :3]
    full = model.generate(writer, prompt, 8, key=4, temperature=1.5)
    stop = {int(full[0, 2]), int(full[1, 5])}
    got = model.generate(writer, prompt, 8, key=4, temperature=1.5, stop_ids=stop)
    ends = [next((i for i, id in enumerate(row) if id in stop), 7) for row in full.tolist()]
    assert got.shape == (3, max(ends) + 1)
    for row, wanted, end in zip(got.tolist(), full.tolist(), ends, strict=True):
        assert row[: end + 1] == wanted[: end + 1] and set(row[end + 1 :]) <= {ENDED}
    assert (
        got.shape == torch.stack(list(model.stream(writer, prompt, 8, key=4, temperature=1.5, stop_ids=stop)), 1).shape
    )


def test_stop_ids_may_be_of_any_kind_of_integer():
    *_, writer = setup()
    prompt = make_batch(TINY)["tokens"][:1, :3]
    stop = model.generate(writer, prompt, 8, key=4, temperature=1.5)[0, 2:3]
    wanted = model.generate(writer, prompt, 8, key=4, temperature=1.5, stop_ids=stop.tolist())
    assert wanted.shape[1] <= 3
    for given in (stop, stop.int(), stop.numpy(), [stop[0]], list(stop.numpy())):
        assert torch.equal(model.generate(writer, prompt, 8, key=4, temperature=1.5, stop_ids=given), wanted)
    for wrong in (5, stop[0], [0.5], stop.double(), stop[None], ["a"], [True]):
        with pytest.raises(ValueError, match="stop_ids: got .*, wanted integers"):
            model.generate(writer, prompt, 8, stop_ids=wrong)


def test_stop_texts_end_a_row_where_they_are_complete():
    *_, writer = setup()
    tokenizer = data.CharTokenizer("".join(map(chr, range(32, 82))))
    prompt = make_batch(TINY)["tokens"][:1, :3]
    text = tokenizer.decode(model.generate(writer, prompt, 9, key=4, temperature=1.5)[0])
    stop = text[3:6]
    how = {"key": 4, "temperature": 1.5, "stop_texts": ["no such", stop], "tokenizer": tokenizer}
    got = tokenizer.decode(model.generate(writer, prompt, 9, **how)[0])
    assert got == text[: text.index(stop) + 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 99}, "together at most Decoder.max_seq=12"),
        ({"temperature": -1.0}, "wanted >= 0"),
        ({"top_p": 0.0}, "0 < top_p <= 1"),
        ({"top_k": 0}, "a whole number of at least 1"),
        ({"rows": [1, 2]}, "rows: got 2 numbers"),
        ({"stop_texts": ["x"]}, "and a tokenizer"),
        ({"prompts": []}, "prompts: got no row"),
        ({"prompts": [[]]}, "prompts of 0 to 0"),
        ({"prompts": torch.zeros(4, dtype=torch.int64)}, "for one text pass"),
    ],
)
def test_errors(change, message):
    *_, writer = setup()
    args = {"count": 2, "prompts": torch.zeros(1, 4, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=message):
        model.generate(writer, args.pop("prompts"), args.pop("count"), **args)


def test_symbolic_axes_are_refused():
    params, layouts, *_ = setup()
    with pytest.raises(ValueError, match="got symbolic axes of the mesh tp2"):
        model.inference(params, TINY, Axes(Mesh(tp=2)))
