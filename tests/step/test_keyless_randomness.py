"""Draws from torch's generators are refused where a step is traced, with the line and the way to draw by keys."""

import random

import pytest
import torch
import torch.nn.functional as F

from fmegatron import nn
from fmegatron.step import accumulate, jit, trace
from fmegatron.step.layer import compiled_layer

X = torch.ones(4, 4)
GENERATOR = torch.Generator()


def attention(x, rate):
    q = x.view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=rate)


def in_a_layer(x):
    return compiled_layer("inputs")(lambda x, w: F.dropout(x @ w, 0.5))(x, x)


def in_a_jit(x):
    return jit(lambda x: torch.rand_like(x))(x) + x


def in_microbatches(x):
    def loss(w, batch):
        return (F.dropout(batch, 0.5) @ w).sum()

    return accumulate(loss, 2)(x, x)[1]


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "module": lambda x: torch.nn.Dropout(0.5)(x),
    "native": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "channels": lambda x: F.dropout2d(x[None, None], 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: attention(x, 0.5),
    "rand": lambda x: torch.rand(4, 4) + x,
    "rand_like": lambda x: torch.rand_like(x),
    "in place": lambda x: torch.empty(4, 4).normal_() + x,
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "permutation": lambda x: x[torch.randperm(4)],
    "whole numbers": lambda x: x[torch.randint(0, 4, (2,))],
    "gumbel": lambda x: F.gumbel_softmax(x),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    "pooling": lambda x: F.fractional_max_pool2d(x[None], 2, output_size=2),
    "init": lambda x: torch.nn.init.xavier_uniform_(torch.empty(4, 4)) + x,
    "a generator of a closure": lambda x: torch.rand(4, 4, generator=GENERATOR) + x,
    "a generator of its own": lambda x: torch.rand(4, 4, generator=torch.Generator().manual_seed(3)) + x,
    "a compiled layer": in_a_layer,
    "a jit in a jit": in_a_jit,
    "microbatches": in_microbatches,
    "vmap": lambda x: torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(x),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_refused(name):
    before = torch.get_rng_state()
    with pytest.raises(
        ValueError,
        match=r"got aten\.\w+\.\w+ at test_keyless_randomness.py:\d+, which draws .*nn.dropout\(x, rate, key=",
    ):
        jit(DRAWS[name], backend="eager")(X)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("arguments", [(X, GENERATOR), (X, {"of": [GENERATOR]})], ids=["argument", "leaf"])
def test_a_generator_among_the_arguments_is_refused(arguments):
    with pytest.raises(ValueError, match=r"argument '1(/of/0)?': got a torch.Generator.*nn.dropout\(x, rate, key="):
        jit(lambda x, g: x, backend="eager")(*arguments)


def seeded(x):
    torch.manual_seed(3)
    return x + 1


def seeded_in_a_layer(x):
    return compiled_layer("inputs")(lambda x, w: seeded(x) @ w)(x, x)


def state_set(x):
    torch.set_rng_state(torch.Generator().manual_seed(5).get_state())
    return x + 1


@pytest.mark.parametrize("step", [seeded, seeded_in_a_layer, state_set], ids=lambda f: f.__name__)
def test_seeding_in_a_step_is_refused_and_undone(step):
    torch.manual_seed(11)
    torch.rand(3)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"got a new seed of torch's default generator .*once, when it is traced"):
        jit(step, backend="eager")(X)
    assert torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == 11


def forked(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
    return x + 1


RIGHT = {
    "evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "module in evaluation": lambda x: torch.nn.Dropout(0.5).eval()(x),
    "rate 0": lambda x: F.dropout(x, 0.0),
    "attention of rate 0": lambda x: attention(x, 0.0),
    "rrelu in evaluation": lambda x: F.rrelu(x),
    "alpha dropout in evaluation": lambda x: F.alpha_dropout(x, 0.5, training=False),
    "memory that is filled": lambda x: torch.empty(4, 4).fill_(1) + x,
    "density": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).log_prob(x),
    "a seed that is taken back": forked,
    "by a key": lambda x: nn.dropout(x, 0.5, key=1, count=torch.zeros((), dtype=torch.int64)),
    "philox of a seed that is data": lambda x: x + torch.ops.rngprims.philox_rand(
        [4, 4], torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64), None, x.device, x.dtype
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_draws_nothing_is_traced(name):
    trace(RIGHT[name], (X,))


def test_generators_are_free_outside_of_the_step():
    """What the caller draws, before, between and after calls, is as without them."""
    step = jit(lambda x: x + 1, backend="eager")
    torch.manual_seed(3)
    random.seed(3)
    wanted = torch.rand(3), torch.rand(3), random.random()
    torch.manual_seed(3)
    random.seed(3)
    first = torch.rand(3)
    step(X)
    assert torch.equal(first, wanted[0]) and torch.equal(torch.rand(3), wanted[1]) and random.random() == wanted[2]
