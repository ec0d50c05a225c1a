"""Generation: the cache gives what the full forward gives, choices are functions of their arguments, errors help."""

import pytest
import torch

from fmegatron import model
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model.sample import choose, decode, prefill, sampling_weights, uniform
from fmegatron.step import jit
from tests.model.test_reference import TINY, leaves_that_differ, make_batch, tiny

MESH = Mesh()
LAYOUTS = model.layouts(TINY, MESH)


def setup():
    return leaves_that_differ(model.init(TINY, MESH, key=5)), Axes(MESH)


@pytest.mark.parametrize("variant", [{}, {"tied": True}, {"kv_heads": 1}, {"sequence_parallel": True}])
@pytest.mark.parametrize("prompt", [1, 5])
def test_cached_decode_equals_the_full_forward(variant, prompt):
    config = tiny(**variant)
    layouts, axes = model.layouts(config, MESH), Axes(MESH)
    params = leaves_that_differ(model.init(config, MESH, key=5))
    tokens = make_batch(config)["tokens"]
    full = model.logits(params, tokens, config, layouts, axes)
    weights = sampling_weights(params, config, layouts, axes)
    cache, logits = prefill(weights, tokens[:, :prompt], config, axes, slots=tokens.shape[1])
    got = [logits]
    for i in range(prompt, tokens.shape[1]):
        before = [k.clone() for k in cache["k"]]
        new, logits = decode(cache, weights, tokens[:, i], torch.tensor(i), config, axes)
        assert all(torch.equal(a, b) for a, b in zip(before, cache["k"], strict=True)), "decode changed its argument"
        cache = new
        got.append(logits)
    torch.testing.assert_close(torch.stack(got, 1), full[:, prompt - 1 :], rtol=1e-10, atol=1e-12)


def test_greedy_equals_the_argmax_of_growing_prompts():
    params, axes = setup()
    prompt = make_batch(TINY)["tokens"][:, :4]
    ours = model.generate(params, prompt, 6, TINY, LAYOUTS, axes, temperature=0)
    text = prompt
    for _ in range(6):
        scores = model.logits(params, text, TINY, LAYOUTS, axes)[:, -1, : TINY.vocab_size]
        text = torch.cat((text, scores.argmax(-1, keepdim=True)), 1)
    assert torch.equal(ours, text[:, 4:])


def test_compiled_decoding_writes_the_same_text_with_one_graph():
    params, axes = setup()
    prompt = make_batch(TINY)["tokens"][:, :4]
    made = []

    def compile(fn, donate=None):
        made.append(jit(fn, donate=donate, backend="aot_eager"))
        return made[-1]

    plain = model.generate(params, prompt, 6, TINY, LAYOUTS, axes, key=1, temperature=0.8)
    compiled = model.generate(params, prompt, 6, TINY, LAYOUTS, axes, key=1, temperature=0.8, compile=compile)
    assert torch.equal(plain, compiled) and [len(fn.cache) for fn in made] == [1, 1]


def test_one_key_gives_one_text():
    params, axes = setup()
    prompt = make_batch(TINY)["tokens"][:, :4]

    def text(key):
        return model.generate(params, prompt, 8, TINY, LAYOUTS, axes, key=key, temperature=1.3, top_p=0.9)

    assert torch.equal(text(1), text(1)) and not torch.equal(text(1), text(2))
    assert int(text(1).max()) < TINY.vocab_size, "a padded id was chosen"


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.75, 1.0])
def test_top_p_draws_the_shortest_set_with_enough_mass(top_p):
    torch.manual_seed(0)
    logits = torch.randn(1, 20, dtype=torch.float64) * 2
    p, order = logits[0].softmax(-1).sort(descending=True)
    size = int((p.cumsum(0) < top_p - 1e-12).sum()) + 1 if top_p < 1 else 20
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    drawn = choose(logits.expand(4000, 20), u, 1.0, top_p)
    frequency = torch.bincount(drawn, minlength=20) / 4000
    wanted = torch.zeros(20, dtype=torch.float64)
    wanted[order[:size]] = p[:size] / p[:size].sum()
    torch.testing.assert_close(frequency.double(), wanted, rtol=0, atol=1 / 2000)  # an even grid of u: no luck involved


def test_temperature_sharpens_and_the_ends_of_uniform_are_safe():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert int(choose(logits, torch.tensor([0.99999]), temperature=0.01)) == 1
    assert int(choose(logits, torch.tensor([1 - 2.0**-53], dtype=torch.float64))) == 0
    assert int(choose(logits, torch.tensor([0.0]))) == 1


def test_uniform_is_a_function_of_key_position_and_row():
    u = torch.stack([uniform(3, i, 4) for i in range(500)])
    assert 0 <= float(u.min()) and float(u.max()) < 1 and abs(float(u.mean()) - 0.5) < 0.03
    assert torch.equal(u[7], uniform(3, 7, 4)) and len(u.unique()) == u.numel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 99}, "together at most Decoder.max_seq=12"),
        ({"temperature": -1.0}, "wanted temperature >= 0"),
        ({"top_p": 0.0}, "0 < top_p <= 1"),
        ({"axes": Axes(Mesh(tp=2))}, "got symbolic axes of the mesh tp2"),
    ],
)
def test_errors(change, message):
    params, axes = setup()
    args = {"count": 2, "axes": axes, "temperature": 1.0, "top_p": 1.0} | change
    with pytest.raises(ValueError, match=message):
        model.generate(
            params, torch.zeros(1, 4, dtype=torch.int64), args.pop("count"), TINY, LAYOUTS, args.pop("axes"), **args
        )
