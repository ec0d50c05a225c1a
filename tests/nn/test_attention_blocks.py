"""Attention with its log-sum-exp: values, both gradients, blocks that are merged; with the kernel and without it."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from fmegatron import nn
from fmegatron.collectives import random_words
from fmegatron.nn import attention_blocks, tiled_attention
from fmegatron.nn.attention_blocks import attention_with_lse, block, block_backward, kernel_of, merged
from fmegatron.nn.attention_masks import Sight, visible
from fmegatron.step import jit, trace, value_and_grad
from fmegatron.step.layer import compiled_layer
from fmegatron.step.torch_private import FakeTensorMode
from tests.step import tiny

F64 = torch.float64
B, S, T, H, G, K = 2, 6, 10, 4, 2, 8


def rand(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype).requires_grad_()


def plain(q_BSHK, k_BTGK, v_BTGK, mask):
    """By the definition."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return (s.softmax(-1) @ v).transpose(1, 2), s.logsumexp(-1).transpose(1, 2)


def numel(node):
    val = node.meta.get("val")
    return val.numel() if isinstance(val, torch.Tensor) else 0


@pytest.fixture(params=["kernel", "tiled"])
def how(request, monkeypatch):
    """With torch's kernel on the CPU, and with the operator that takes what no kernel of torch's does."""
    if request.param == "tiled":
        monkeypatch.setattr(attention_blocks, "kernel_of", lambda *_, **__: attention_blocks.Choice("tiled", ()))


MASKS = {
    "causal": None,
    "of rows": torch.rand(B, S, T, generator=torch.Generator().manual_seed(2)) < 0.6,
    "any": torch.rand(B, 1, S, T, generator=torch.Generator().manual_seed(2)) < 0.6,
    "of heads": torch.rand(1, H, S, T, generator=torch.Generator().manual_seed(3)) < 0.6,
}


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=["both", "o", "lse"])
@pytest.mark.parametrize("name", MASKS)
def test_both_gradients(how, name, given):
    mask, keys = MASKS[name], S if MASKS[name] is None else T
    q, k, v = rand(B, S, H, K), rand(B, keys, G, K, seed=1), rand(B, keys, G, K, seed=2)
    a, b = rand(B, S, H, K, seed=3).detach() * given[0], rand(B, S, H, seed=4).detach() * given[1]
    full = torch.ones(S, S, dtype=torch.bool).tril() if mask is None else mask[:, None] if mask.dim() == 3 else mask
    found = []
    for fn, m in ((attention_with_lse, mask), (plain, full)):
        o, lse = fn(q, k, v, m)
        loss = sum((x * y).sum() for x, y, use in ((o, a, given[0]), (lse, b, given[1])) if use)
        grads = torch.autograd.grad(loss, (q, k, v), allow_unused=True, materialize_grads=True)
        found.append([o, lse, *grads])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_it_is_the_attention_of_the_decoder():
    q, k, v = rand(B, S, H, K), rand(B, S, G, K, seed=1), rand(B, S, G, K, seed=2)
    assert torch.equal(attention_with_lse(q, k, v)[0], nn.attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(how, dtype):
    q, k, v = (
        rand(B, S, H, K, dtype=dtype),
        rand(B, S, G, K, seed=1, dtype=dtype),
        rand(B, S, G, K, seed=2, dtype=dtype),
    )
    o, lse = attention_with_lse(q, k, v)
    wanted = plain(q.double(), k.double(), v.double(), torch.ones(S, S, dtype=torch.bool).tril())
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close([o.double(), lse.double()], list(wanted), **tolerance)
    for g in torch.autograd.grad(o.sum() + lse.sum(), (q, k, v)):
        assert g.dtype == dtype and g.isfinite().all()


def test_blocks_are_merged(how):
    """Three blocks of keys, one of which some queries do not see at all, and a query that sees nothing anywhere."""
    q, k, v = rand(B, H, S, K), rand(B, G, T, K, seed=1), rand(B, G, T, K, seed=2)
    mask = MASKS["any"].clone()
    mask[:, :, 1:4, 3:7], mask[0, 0, 5] = False, False
    pieces = [slice(0, 3), slice(3, 7), slice(7, T)]
    with torch.no_grad():
        found = [block(q, k[:, :, one], v[:, :, one], mask[..., one]) for one in pieces]
        o, lse = merged(merged(found[0], found[1]), found[2])
    s = (q @ k.repeat_interleave(2, 1).mT / math.sqrt(K)).masked_fill(~mask, -math.inf)
    wanted = s.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(o, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(lse == -math.inf, (~mask.any(-1)).expand_as(lse))
    do = rand(B, H, S, K, seed=5).detach()
    grads = torch.autograd.grad((wanted.nan_to_num(0.0) * do)[mask.any(-1).expand(B, H, S)].sum(), (q, k, v))
    with torch.no_grad():
        parts = [block_backward(do, q, k[:, :, one], v[:, :, one], (o, lse), mask[..., one]) for one in pieces]
    dq, dk, dv = sum(p[0] for p in parts), torch.cat([p[1] for p in parts], 2), torch.cat([p[2] for p in parts], 2)
    torch.testing.assert_close([dq, dk, dv], list(grads), rtol=1e-12, atol=1e-12)


def test_values_of_another_width():
    """No kernel takes them."""
    q, k, v = rand(B, S, H, K), rand(B, T, G, K, seed=1), rand(B, T, G, 3, seed=2)
    mask = MASKS["any"]
    torch.testing.assert_close(attention_with_lse(q, k, v, mask), plain(q, k, v, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.medium
@pytest.mark.parametrize("save", ["mincut", "inputs"])
def test_in_a_compiled_layer(save):
    def fn(x, w):
        o, lse = attention_with_lse(x * w["q"], x[:, :, :G] * w["k"], x[:, :, :G])
        return o, lse

    def loss(p, x, layer):
        o, lse = layer(x, p)
        return (o * x).sum() + lse.square().sum()

    p, x = {"q": rand(K).detach(), "k": rand(K, seed=1).detach()}, rand(B, S, H, K, seed=2).detach()
    wanted = value_and_grad(lambda p, x: loss(p, x, fn))(p, x)
    step = value_and_grad(lambda p, x: loss(p, x, compiled_layer(save)(fn)))
    torch.testing.assert_close(jit(step, backend="aot_eager")(p, x), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend):
    q, k, v = (rand(B, S, heads, K, seed=i).detach() for i, heads in enumerate((H, G, G)))
    step = value_and_grad(lambda p: sum(x.square().sum() for x in attention_with_lse(p["q"], p["k"], p["v"])))
    p = {"q": q, "k": k, "v": v}
    torch.testing.assert_close(jit(step, backend=backend, patches=tiny.SCALAR)(p), step(p), rtol=1e-12, atol=1e-12)


OPTIONS = {
    "cap": (None, False, 0.7, None),
    "cap, mask": (MASKS["any"], False, 0.7, 0.4),
    "cap, sinks": (None, True, 0.7, 0.4),
    "sinks": (None, True, None, 0.4),
    "sinks, mask": (MASKS["of rows"], True, None, None),
    "cap, sinks, mask of heads": (MASKS["of heads"], True, 0.7, None),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_sinks_and_caps_in_blocks(how, name, monkeypatch):
    """Blocks of 4 keys, the last of them smaller; whole rows that see nothing but the sink."""
    monkeypatch.setattr(tiled_attention, "_TILE", 4)
    mask, sunk, cap, scale = OPTIONS[name]
    keys = S if mask is None else T
    given = [rand(B, S, H, K), rand(B, keys, G, K, seed=1), rand(B, keys, G, K, seed=2)]
    given += [rand(H, seed=6)] * sunk
    if mask is not None and sunk:
        mask = mask.clone()
        mask[..., 2, :] = False

    def wanted(q, k, v, sinks=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
        s = q @ k.mT * (K**-0.5 if scale is None else scale)
        s = s if cap is None else cap * (s / cap).tanh()
        seen = torch.ones(S, S, dtype=torch.bool).tril() if mask is None else mask[:, None] if mask.dim() == 3 else mask
        s = s.masked_fill(~seen, -math.inf)
        if sinks is not None:
            s, v = torch.cat((s, sinks[:, None, None].expand(B, H, S, 1)), -1), F.pad(v, (0, 0, 0, 1))
        return (s.softmax(-1) @ v).transpose(1, 2)

    def ours(q, k, v, sinks=None):
        return nn.attention(q, k, v, mask, scale=scale, softcap=cap, sinks_H=sinks)

    do, found = rand(B, S, H, K, seed=9).detach(), []
    for fn in (ours, wanted):
        o = fn(*given)
        found.append([o, *torch.autograd.grad((o * do).sum(), given)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_second_gradient_is_refused_by_name():
    q = rand(B, S, H, K)
    (g,) = torch.autograd.grad(nn.attention(q, q, q, softcap=2.0).sum(), q, create_graph=True)
    with pytest.raises(ValueError, match=r"attention with sinks, a cap, .*: got a gradient of its gradient"):
        torch.autograd.grad(g.sum(), q)


@pytest.mark.medium
def test_no_scores_of_all_keys_are_made():
    """With a cap, with sinks, by documents within a window."""
    sizes = {}
    for name in ("cap", "sinks", "documents"):

        def loss(p, at, name=name):
            x, sinks, cap = p["x"], p["sinks"] if name == "sinks" else None, 3.0 if name == "cap" else None
            seen = nn.Causal(at, at, 1024) if name == "documents" else None
            return nn.attention(x, x, x, seen, softcap=cap, sinks_H=sinks).square().sum()

        with FakeTensorMode():
            p = {"x": torch.zeros(1, 4096, 4, 8), "sinks": torch.zeros(4)}
            at = torch.zeros(1, 4096, dtype=torch.int64)
        sizes[name] = max(map(numel, trace(value_and_grad(loss), (p, at)).graph_module.graph.nodes))
    assert sizes == dict.fromkeys(("cap", "sinks", "documents"), 4 * 4096 * 8)


KERNELS = {
    ("cpu", torch.float64, 64, 64, True): "flash on the CPU",
    ("cpu", torch.float32, 64, 32, False): "tiled",
    ("cuda", torch.bfloat16, 128, 128, False): "flash",
    ("cuda", torch.float16, 256, 256, False): "flash",
    ("cuda", torch.bfloat16, 128, 128, True): "memory-efficient",
    ("cuda", torch.bfloat16, 512, 512, False): "memory-efficient",
    ("cuda", torch.float32, 64, 64, False): "memory-efficient",
    ("cuda", torch.bfloat16, 192, 128, False): "memory-efficient",
    ("cuda", torch.bfloat16, 20, 20, False): "tiled",
    ("cuda", torch.float64, 64, 64, False): "tiled",
}


def test_which_kernel_computes_a_block():
    with FakeTensorMode():
        for (device, dtype, width, values, masked), wanted in KERNELS.items():
            q, v = (torch.empty(1, 2, 64, w, dtype=dtype, device=device) for w in (width, values))
            mask = torch.ones(64, 64, dtype=torch.bool, device=device) if masked else None
            assert kernel_of(q, v, mask).kernel == wanted, (device, dtype, width, values, masked)
            at = torch.zeros(1, 1, 64, dtype=torch.int64, device=device)
            assert kernel_of(q, v, mask, 2.0).kernel == kernel_of(q, v, Sight(at, at)).kernel == "tiled"


def test_which_kernel_and_why_not_another_is_said():
    with FakeTensorMode():
        q, v = (torch.empty(1, 64, 2, w, dtype=torch.bfloat16, device="cuda") for w in (192, 128))
        at = torch.zeros(1, 1, 64, dtype=torch.int64, device="cuda")
        assert nn.attention_kernel(q, v, Sight(at, at, window=4)).splitlines() == [
            "flash on the CPU: is the CPU's, wants values as wide as the keys, makes no mask of positions",
            "flash: wants values as wide as the keys, makes no mask of positions",
            "memory-efficient: makes no mask of positions",
            "tiled: taken",
        ]
        assert nn.attention_kernel(v, v, sinks_H=torch.empty(2, device="cuda")).endswith("\nflash: taken")
        assert nn.attention_kernel(q, v).startswith("F.scaled_dot_product_attention: taken")


def test_what_is_visible():
    positions = torch.tensor([[0, 1, 2, 0, 1], [4, 0, 3, 1, 2]])
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    for window, docs in itertools.product((None, 2), (None, documents)):
        mask = visible(positions, positions, window, docs, docs)
        for b, i, j in itertools.product(range(2), range(5), range(5)):
            gap = int(positions[b, i] - positions[b, j])
            wanted = 0 <= gap < (window or 99) and (docs is None or bool(documents[b, i] == documents[b, j]))
            assert bool(mask[b, i, j]) == wanted
    assert torch.equal(visible(*[positions[1]] * 2, 2)[None], visible(*[positions[1:]] * 2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_rope_at_positions_of_each_row(dtype):
    positions = torch.tensor([[0, 1, 2, 3], [7, 0, 1, 5]])
    x = rand(2, 4, H, K).detach().to(dtype)
    tables = nn.rope_angles(positions, K, 100.0, dtype)
    got = nn.apply_rope(x, *tables)
    for b in range(2):
        wanted = nn.apply_rope(x[b : b + 1], *nn.rope_angles(positions[b], K, 100.0, dtype))
        assert torch.equal(got[b : b + 1], wanted)


# ---- masks that are made of positions, tile by tile ------------------------------------------------------------------
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0, 1]])
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 8, [0] * 8 + [1] * 2 + [2] * 2])


@pytest.mark.parametrize("tile", [4, 1024])
@pytest.mark.parametrize("window, packed", [(None, False), (None, True), (3, False), (3, True)])
def test_a_mask_of_positions_is_the_mask_that_is_given(window, packed, tile, monkeypatch):
    """Tiles of 4: some of which no pair is seen, which are left out, forward and backward."""
    monkeypatch.setattr(tiled_attention, "_TILE", tile)
    tiles, left, walked = PACKED.shape[1] // 4, [], tiled_attention._of_tile
    monkeypatch.setattr(tiled_attention, "_of_tile", lambda *of: left.append(of[1]) or walked(*of))
    positions, documents = (PACKED, DOCUMENTS) if packed else (torch.arange(12), None)
    q, k, v = rand(2, 12, H, K), rand(2, 12, G, K, seed=1), rand(2, 12, G, K, seed=2)
    do, found = rand(2, 12, H, K, seed=3).detach(), []
    dense = visible(positions, positions, window, documents, documents)
    for seen in (nn.Causal(positions, documents, window), dense):
        o = nn.attention(q, k, v, seen)
        found.append([o, *torch.autograd.grad((o * do).sum(), (q, k, v))])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert len(left) == 1 or len(left) < tiles**2 - (1 if packed else 2)


def test_dropout_of_the_softmax_is_keyed_by_its_place():
    """As of `random_words` of p[B, S, H, T]; in tiles as whole; its gradient is that of what is multiplied."""
    words = torch.stack(random_words.beginnings(5, "x", torch.arange(B * S).view(B, S)))
    dropped = tiled_attention.Dropped(words, torch.arange(H) * S, 0.4)
    q, k, v = rand(B, S, H, K), rand(B, S, G, K, seed=1), rand(B, S, G, K, seed=2)
    word = random_words.random_words(5, "x", torch.arange(B * S).view(B, S), torch.empty(B, S, H, S)).transpose(1, 2)
    found = []
    for ours in (True, False):
        if ours:
            o = nn.attention(q, k, v, dropped=dropped)
        else:
            k_of, v_of = (x.transpose(1, 2).repeat_interleave(2, 1) for x in (k, v))
            s = q.transpose(1, 2) @ k_of.mT / math.sqrt(K)
            p = s.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), -math.inf).softmax(-1)
            o = (torch.where(word < round(0.4 * 2**32), 0, p / 0.6) @ v_of).transpose(1, 2)
        found.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v))])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
