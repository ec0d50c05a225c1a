"""Blocks that cannot be meant are errors that name the field: names given twice, mixers that are no values, numbers."""

from dataclasses import dataclass

import pytest
import torch

from fmegatron import model, nn
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model import MLP, MTP, Array, Attention, Decoder, MoE, Part
from fmegatron.model.array_specs import init

ROUTER = nn.Router(4, 2)


def decoder(*parts, **fields):
    return Decoder(37, 16, (parts,), 32, **fields)


@dataclass
class Loose(model.Mixer):
    """A dataclass that is not frozen."""

    def arrays(self, dim):
        return {"g": Array((dim,))}

    def __call__(self, u_BSD, w, at):
        return u_BSD * w["g"]


@dataclass(frozen=True)
class Mean(model.PerToken):
    """Its result would be broadcast over the width."""

    def arrays(self, dim):
        return {"g": Array((dim,))}

    def __call__(self, u_BSD, w, at):
        return (u_BSD * w["g"]).mean(-1, keepdim=True)


WRONG = {
    "two parts of one name": (lambda: decoder(Part("mlp", MLP(8)), Part("mlp", MLP(16))), "the name 'mlp' twice"),
    "the name of a norm": (lambda: decoder(Part("a", MLP(8)), Part("a_norm", MLP(8))), "the name 'a_norm' twice"),
    "a name of MTP's own": (lambda: MTP((Part("proj", MLP(8)),)), "MTP.block: got the name 'proj' twice"),
    "a name with a slash": (lambda: Part("mlp/a", MLP(8)), "Part.name: got 'mlp/a', wanted a name without '/'"),
    "a mixer that is no value": (lambda: Part("a", Loose()), "Part.mixer: got a Loose .* write @dataclass"),
    "a weight below 0": (lambda: MTP((Part("mlp", MLP(8)),), weight=-1.0), "MTP.weight: got -1.0"),
    "a window of 0": (lambda: Attention(4, 2, 8, window=0), "Attention.window: got 0, wanted a number above 0"),
    "a cap of 0": (lambda: Attention(4, 2, 8, softcap=0.0), "Attention.softcap: got 0.0"),
    "ep as a text": (lambda: MoE(ROUTER, 8, ep="ep"), "MoE.ep: got 'ep', wanted a tuple of axes"),
    "experts of width 0": (lambda: MoE(ROUTER, 0), "MoE.ffn_dim: got 0"),
    "no chunk": (lambda: MoE(ROUTER, 8, chunks=0), "MoE.chunks: got 0"),
    "no room": (lambda: MoE(ROUTER, 8, rows=-3), "MoE.rows: got -3"),
    "no capacity": (lambda: MoE(ROUTER, 8, capacity=0.0), "MoE.capacity: got 0.0"),
    "room stated twice": (lambda: MoE(ROUTER, 8, capacity=1.0, rows=64), "MoE.capacity: got 1.0 with rows=64"),
    "a balance below 0": (lambda: MoE(ROUTER, 8, balance=-1.0), "MoE.balance: got -1.0, wanted 0 or more"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_meant_is_named(case):
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_a_mixer_whose_result_would_be_broadcast_is_named():
    of, mesh = decoder(Part("own", Mean())), Mesh()
    params = init(of, mesh, 0)
    with pytest.raises(ValueError, match=r"Mean of the part 'own': got \(2, 8, 1\) .* \(2, 8, 16\)"):
        model.logits(params, torch.zeros(2, 8, dtype=torch.int64), of, Axes(mesh))
