"""Options of attention, norms, rotations and MLPs against plain formulas, in fp64; sharded ones are in test_sharded."""

import math

import pytest
import torch
import torch.nn.functional as F

from fmegatron import nn
from fmegatron.nn.attention_masks import soft_cap, visible
from fmegatron.nn.mlp import ACTIVATIONS
from fmegatron.nn.rope import Linear, Llama3, Yarn

B, S, H, G, K = 2, 9, 4, 2, 6
F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=F64)


def by_hand(q, k, v, mask, scale=None, softcap=None, sinks=None):
    """Softmax over the keys that a query sees and a sink, one query at a time."""
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for s in range(S):
                seen = (mask if mask.dim() == 2 else mask[b])[s].nonzero().flatten()
                z = k[b, seen, h // (H // G)] @ q[b, s, h] * (K**-0.5 if scale is None else scale)
                z = z if softcap is None else softcap * (z / softcap).tanh()
                z = z if sinks is None else torch.cat((z, sinks[h : h + 1]))
                out[b, s, h] = z.softmax(0)[: len(seen)] @ v[b, seen, h // (H // G)]
    return out


CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
WINDOW = CAUSAL & ~torch.ones(S, S, dtype=torch.bool).tril(-3)
DOCUMENTS = (torch.arange(S) >= torch.tensor([[4], [7]])).long()
OPTIONS = {
    "plain": (CAUSAL, None, {}),
    "scale": (CAUSAL, None, {"scale": 0.3}),
    "softcap": (CAUSAL, None, {"softcap": 0.7}),
    "sinks": (CAUSAL, None, {"sinks_H": draw(H)}),
    "softcap, sinks, window": (WINDOW, WINDOW, {"softcap": 0.7, "sinks_H": draw(H)}),
    "window": (WINDOW, WINDOW, {}),
    "documents": (CAUSAL & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]),) * 2 + ({},),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention(name):
    seen, mask, given = OPTIONS[name]
    q, k, v = (draw(B, S, heads, K, seed=i).requires_grad_() for i, heads in enumerate((H, G, G)))
    sinks = given.get("sinks_H")
    ours = nn.attention(q, k, v, mask, **given)
    theirs = by_hand(q, k, v, seen, given.get("scale"), given.get("softcap"), sinks)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    g = draw(B, S, H, K, seed=9)
    for a, b in zip(*(torch.autograd.grad((x * g).sum(), (q, k, v)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_masks_are_made_of_data():
    at = torch.arange(S)
    assert torch.equal(visible(at, at), CAUSAL) and torch.equal(visible(at, at, 3), WINDOW)
    shuffled = torch.randperm(S, generator=torch.Generator().manual_seed(0))
    assert torch.equal(visible(shuffled, shuffled, 3), WINDOW[shuffled][:, shuffled])
    assert torch.equal(visible(at, at, None, DOCUMENTS, DOCUMENTS), OPTIONS["documents"][0])


def test_soft_cap():
    x = torch.linspace(-9, 9, 50, dtype=F64)
    assert soft_cap(x, 2.0).abs().max() < 2 and torch.allclose(soft_cap(x, 1e4), x, atol=1e-5)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_layer_norm(dtype):
    x, w, b = draw(5, 12).to(dtype), draw(12).float(), draw(12, seed=3).float()
    wanted = F.layer_norm(x.double(), (12,), w.double(), b.double(), 1e-5)
    got = nn.layer_norm(x, w, b, 1e-5)
    assert got.dtype == dtype and torch.allclose(got.double(), wanted, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_a_norm_that_is_stored_around_0():
    x, w = draw(5, 12), draw(12)
    torch.testing.assert_close(nn.rms_norm(x, w, offset=1.0), nn.rms_norm(x, w + 1.0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    assert ACTIVATIONS[activation](torch.tensor(0.0)) == 0 and ACTIVATIONS[activation](torch.tensor(3.0)) > 2.8


def test_interleaved_pairs_turn_as_neighbours():
    x, angles = draw(B, S, H, K), nn.rope_angles(torch.arange(S), K, 100.0, F64)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angle = torch.arange(S)[:, None] * 100.0 ** -(torch.arange(0, K, 2, dtype=F64) / K)
    turned = z * torch.polar(torch.ones_like(angle), angle)[:, None]
    got = nn.apply_rope(x, *angles, interleaved=True)
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1), rtol=1e-12, atol=1e-13)


def test_a_part_of_each_head_is_rotated():
    x, angles = draw(B, S, H, K), nn.rope_angles(torch.arange(S), 4, dtype=F64)
    got = nn.apply_rope(x, *angles)
    assert torch.equal(got[..., 4:], x[..., 4:]) and torch.equal(got[..., :4], nn.apply_rope(x[..., :4], *angles))


def test_positions_of_each_row():
    positions = torch.stack((torch.arange(S), torch.arange(S).flip(0)))
    x, angles = draw(B, S, H, K), nn.rope_angles(positions, K, dtype=F64)
    got = nn.apply_rope(x, *angles)
    for b in range(B):
        assert torch.equal(got[b], nn.apply_rope(x[b : b + 1], *nn.rope_angles(positions[b], K, dtype=F64))[0])


def frequencies(scaling):
    cos, sin = nn.rope_angles(torch.tensor([1]), 64, 1e4, F64, scaling)
    return torch.atan2(sin, cos)[0], (cos.square() + sin.square()).sqrt()[0]


def test_scalings_keep_short_waves_and_divide_long_ones():
    plain, _ = frequencies(None)
    linear, _ = frequencies(Linear(4.0))
    torch.testing.assert_close(linear, plain / 4)
    for scaling, factor in ((Llama3(8.0, 1.0, 4.0, 4096), 1.0), (Yarn(8.0, 4096, attention=1.2), 1.2)):
        got, size = frequencies(scaling)
        assert torch.allclose(got[:3], plain[:3]) and torch.allclose(got[-3:], plain[-3:] / 8)
        ratio = plain / got
        assert bool((ratio.diff() >= -1e-9).all()) and any(1.1 < r < 7.9 for r in ratio.tolist())
        assert math.isclose(size[0], factor, rel_tol=1e-12)
