"""Mixers that cannot be meant are refused: where the class is defined, where a part is made, or where one is asked."""

import dataclasses
from dataclasses import dataclass

import pytest

from fmegatron import model
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model import Array, Attention, Part
from fmegatron.model.array_specs import init
from fmegatron.model.counts import cache_bytes_per_token
from fmegatron.model.mixer import Mixer
from tests.model.test_mamba import hybrid
from tests.model.test_reference import TINY, make_batch, tiny
from tests.model.test_wrapped import MODELS, Beside, Quiet, quick, wrapped


class Mixin:
    """Not a wrapper itself."""

    def read(self, u_BSD, w, at, cache, slots):
        return u_BSD, cache


FINAL = {
    "a call": ((model.Wrapped,), {"__call__": lambda self, u, w, at: u}, "__call__"),
    "read": ((model.Wrapped,), {"read": Mixin.read}, "read"),
    "read of a mixin": ((Mixin, model.Wrapped), {}, "read"),
    "read below a wrapper": ((Quiet,), {"read": Mixin.read}, "read"),
    "arrays": ((model.Wrapped,), {"arrays": lambda self, dim: {}}, "arrays"),
    "rates": ((model.Wrapped,), {"rates": {}}, "rates"),
    "a field rope": ((model.Wrapped,), {"__annotations__": {"rope": object}}, "rope"),
}


@pytest.mark.parametrize("case", FINAL)
def test_a_wrapper_with_a_way_of_its_own_is_refused_when_it_is_defined(case):
    bases, body, name = FINAL[case]
    with pytest.raises(TypeError, match=rf"Own\.{name}: got one of its own .*wanted hooks only .*write given"):
        type("Own", bases, body)


def test_a_subclass_with_a_call_and_the_read_of_another_is_refused_when_it_is_defined():
    """It would train by its call, and generate by the inherited read, in silence."""
    call, how = (lambda self, u, w, at: -Attention.__call__(self, u, w, at)), r"Half.__call__: .* the read of Attention"
    with pytest.raises(TypeError, match=how):
        type("Half", (Attention,), {"__call__": call})
    with pytest.raises(TypeError, match=how):
        type("Half", (type("Called", (), {"__call__": call}), Attention), {})
    whole = type("Whole", (Attention,), {"__call__": call, "read": Mixin.read})
    type("Below", (whole,), {})
    type("Loud", (model.MLP,), {"__call__": call})  # read of PerToken is the call
    type("Same", (Attention,), {"__call__": Attention.__call__, "read": Attention.read})


@dataclass(frozen=True)
class Unrated(model.Wrapped):
    """Its dropout is not among its rates, though the inner mixer has one of that name."""

    dropout: float


@dataclass(frozen=True)
class Duck:
    """What was a mixer once."""

    rope = None

    def arrays(self, dim):
        return {"g": Array((dim,))}

    def __call__(self, u_BSD, w, at):
        return u_BSD * w["g"]


@dataclass(frozen=True)
class Jittery(model.PerToken):
    """A rate that nobody is told of."""

    jitter: float

    def arrays(self, dim):
        return {}

    def __call__(self, u_BSD, w, at):
        return u_BSD


REFUSED = {
    "a duck": (Duck(), r"Part.mixer: got a Duck, wanted a model.Mixer; write class Duck\(model.Mixer\)"),
    "a duck inside": (Quiet(Duck()), "Part.mixer.inner: got a Duck, wanted a model.Mixer"),
    "a rate that is not told": (Jittery(0.1), r"Part.mixer: got Jittery.jitter, .* property rates that gives"),
    "the same inside": (Quiet(Jittery(0.1)), r"Part.mixer.inner: got Jittery.jitter"),
    "one hidden by the inner mixer's": (
        Unrated(Attention(4, 4, 4, dropout=0.1), 0.1), r"Part.mixer: got Unrated.dropout, .* property own_rates",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_mixer_is_refused(case):
    mixer, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        Part("own", mixer)


def test_what_is_not_written_is_missed_when_it_is_made():
    with pytest.raises(TypeError, match="abstract method.* arrays"):
        type("Bare", (model.Mixer,), {"__call__": lambda self, u, w, at: u})()


def test_two_wrappers_of_one_name_are_refused():
    of = wrapped(TINY, lambda mixer: Beside(Beside(mixer, 4), 2))
    with pytest.raises(ValueError, match=r"Beside.name: got 'own' beside the arrays .*set name of the class"):
        model.specs(of, Mesh())


@dataclass(frozen=True)
class Forgetful(model.Mixer):
    """Calls another mixer, whose rope it does not tell of."""

    inner: Mixer

    def arrays(self, dim):
        return self.inner.arrays(dim)

    def __call__(self, u_BSD, w, at):
        return self.inner(u_BSD, w, at)


@pytest.mark.parametrize("name", ["llama", "latents"])
def test_a_rope_without_angles_is_an_error(name):
    of, mesh = wrapped(MODELS[name](), Forgetful, "attention"), Mesh()
    with pytest.raises(ValueError, match=r"\.rope: got a rope and no angles .*model.Wrapped"):
        model.logits(init(of, mesh, 0), make_batch(of)["tokens"], of, Axes(mesh))


def test_generation_and_counts_refuse_a_mixer_that_does_not_know():
    of, mesh = wrapped(tiny(attention=Attention(4, 4, 4)), Forgetful, "attention"), Mesh()
    params = init(of, mesh, 0)
    with pytest.raises(ValueError, match=r"generate: got the mixer Forgetful.*write read and new_cache"):
        model.inference(params, of, Axes(mesh))
    with pytest.raises(ValueError, match="Part 'attention': got a Forgetful without cache_width"):
        cache_bytes_per_token(of)
    found = quick(of, Mesh(fsdp=2))
    assert "what 'attention' keeps" in found.unknown_memory
    assert "the work of 'attention' besides products with its arrays" in found.unknown


def test_the_order_of_tokens_is_asked_through_wrappers():
    of = wrapped(hybrid(), Quiet)
    mamba, attention = of.blocks[0][0].mixer, of.blocks[1][0].mixer
    assert (mamba.order, attention.order) == ("row", "any")
    dealt = Quiet(dataclasses.replace(attention.inner, context="balanced"))
    mixed = dataclasses.replace(of, blocks=(of.blocks[0], (Part("attention", dealt), *of.blocks[1][1:])))
    with pytest.raises(ValueError, match=r"Decoder.blocks: got Quiet over sequences in the order of nn.zigzag"):
        mixed.check_mesh(Mesh(cp=2))
