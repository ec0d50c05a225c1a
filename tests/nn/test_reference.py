"""nn on one rank against foreign references (torch.nn.functional, arithmetic by hand) in fp64, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from fmegatron import nn
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh


def tp():
    return Axes(Mesh(tp=1))["tp"]


def rand(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def assert_same(ours, theirs, inputs, rtol=1e-10, atol=1e-13):
    """Values, and the gradient of each input under one random cotangent."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    cotangent = rand(*ours.shape, seed=7, dtype=ours.dtype).detach()
    for got, wanted in zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


def test_rms_norm():
    x, w = rand(3, 5, 8), rand(8)
    assert_same(nn.rms_norm(x, w, 1e-6), F.rms_norm(x, (8,), w, 1e-6), [x, w])


def test_rms_norm_takes_statistics_in_fp32_for_bf16():
    x, w = rand(2, 512, dtype=torch.bfloat16), rand(512, dtype=torch.float32)
    y = nn.rms_norm(x, w)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, F.rms_norm(x.float(), (512,), w, 1e-5).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_equals_softmax_written_out(heads, kv_heads):
    B, S, K = 2, 7, 8
    q, k, v = rand(B, S, heads, K), rand(B, S, kv_heads, K, seed=1), rand(B, S, kv_heads, K, seed=2)
    score = torch.einsum("bshk,bthk->bhst", q, k.repeat_interleave(heads // kv_heads, 2)) / K**0.5
    p = score.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    theirs = torch.einsum("bhst,bthk->bshk", p, v.repeat_interleave(heads // kv_heads, 2))
    assert_same(nn.attention(q, k, v), theirs, [q, k, v])


def test_attention_mask_selects_keys():
    q, k, v = rand(2, 1, 4, 8), rand(2, 9, 2, 8), rand(2, 9, 2, 8, seed=1)
    ours = nn.attention(q, k, v, (torch.arange(9) < 5)[None])
    cut = nn.attention(q.expand(2, 5, 4, 8), k[:, :5], v[:, :5])[:, -1:]
    assert_same(ours, cut, [q, k, v])


def test_rope_keeps_lengths_and_depends_on_distance_only():
    K, theta = 16, 100.0
    cos, sin = nn.rope_angles(torch.arange(20), K, theta, torch.float64)
    q, k = rand(1, 1, 1, K), rand(1, 1, 1, K, seed=1)
    q_S, k_S = (nn.apply_rope(x.expand(1, 20, 1, K), cos, sin)[0, :, 0] for x in (q, k))
    torch.testing.assert_close(q_S.norm(dim=-1), q.flatten().norm().expand(20))
    dots = q_S @ k_S.T
    for shift in range(-5, 6):
        diagonal = dots.diagonal(shift)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_rope_refuses_an_odd_head():
    with pytest.raises(ValueError, match="got head width 5, wanted an even one"):
        nn.rope_angles(torch.arange(3), 5)


def test_gated_mlp():
    x, gate, up, down = rand(2, 3, 8), rand(8, 12), rand(8, 12, seed=1), rand(12, 8)
    ours = nn.gated_mlp(x, torch.cat((gate, up), 1), down, tp())
    assert_same(ours, (F.silu(x @ gate) * (x @ up)) @ down, [x, gate, up, down])


def test_embed():
    table, ids = rand(11, 4), torch.tensor([[0, 10, 3], [3, 3, 1]])
    assert_same(nn.embed(ids, table, tp()), F.embedding(ids, table), [table])


@pytest.mark.parametrize("vocab", [None, 17, 12])
def test_cross_entropy(vocab):
    logits, labels = rand(3, 5, 17), torch.randint(0, vocab or 17, (3, 5), generator=torch.Generator().manual_seed(0))
    nll, lse = nn.cross_entropy(logits, labels, tp(), vocab)
    real = logits[..., :vocab]
    assert_same(nll, F.cross_entropy(real.flatten(0, 1), labels.flatten(), reduction="none").view(3, 5), [logits])
    nll, lse = nn.cross_entropy(logits, labels, tp(), vocab)
    assert_same(lse, real.logsumexp(-1), [logits])
    nll, lse = nn.cross_entropy(logits, labels, tp(), vocab)
    theirs = (
        F.cross_entropy(real.flatten(0, 1), labels.flatten(), reduction="none").view(3, 5)
        + 0.1 * real.logsumexp(-1) ** 2
    )
    assert_same(nll + 0.1 * lse.square(), theirs, [logits])


def test_cross_entropy_of_bf16_logits_is_exact_in_fp32():
    logits, labels = rand(2, 4, 33, dtype=torch.bfloat16), torch.randint(0, 33, (2, 4))
    nll, lse = nn.cross_entropy(logits, labels, tp())
    assert nll.dtype == lse.dtype == torch.float32
    theirs = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(2, 4)
    torch.testing.assert_close(nll, theirs)
    (grad,) = torch.autograd.grad(nll.sum(), [logits])
    assert grad.dtype == torch.bfloat16


def test_cross_entropy_survives_large_logits():
    logits = (rand(1, 2, 9) * 1e4).detach().requires_grad_()
    nll, _ = nn.cross_entropy(logits, torch.tensor([[1, 2]]), tp())
    assert torch.isfinite(nll).all() and torch.isfinite(torch.autograd.grad(nll.sum(), [logits])[0]).all()


def test_cross_entropy_keeps_the_logits_and_nothing_else_of_their_size():
    logits, labels = rand(2, 4, 1000), torch.zeros(2, 4, dtype=torch.int64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        nn.cross_entropy(logits, labels, tp())
    big = [t for t in kept if t.numel() >= logits.numel()]
    assert len(big) == 1 and big[0].data_ptr() == logits.data_ptr()
